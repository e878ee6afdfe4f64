package ctxfs_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
)

// Close with clients that wait in write().
func TestCloseWithWaiters(t *testing.T) {
	fs := mount(t, cuse.Config{})
	const clients = 3
	entered := make(chan struct{}, clients)
	var all []*client
	var files []*file
	for range clients {
		f := newFile(func(r cuse.Request, _ []byte) { entered <- struct{}{} }) // answered by Close
		c := newClient(t, clientUID)
		fd := c.open(add(t, fs, arena(t), clientUID, accept(f)).Path())
		c.send(ask{Op: "write", FD: fd, Data: command(24)})
		all, files = append(all, c), append(files, f)
	}
	for range clients {
		<-entered
	}
	if err := fs.Close(); err != nil {
		t.Fatal(err)
	}
	for i, c := range all {
		if r := c.recv(); r.Errno != unix.EIO {
			t.Errorf("waiter: %d, %v", r.N, r.Errno)
		}
		soon(t, "Release", files[i].released)
	}
}

func TestAfterClose(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	f := newFile(nil)
	e := add(t, fs, a, 0, accept(f))
	c := newClient(t, 0)
	fd := c.open(e.Path())
	if err := fs.Close(); err != nil {
		t.Fatal(err)
	}
	soon(t, "Release", f.released)
	if _, errno := c.write(fd, command(24)); errno == 0 {
		t.Error("write succeeds")
	}
	if r := c.do(ask{Op: "close", FD: fd}); r.Errno != 0 {
		t.Error("close:", r.Errno)
	}
	if _, err := fs.Add(a.FD(), 0, 0, accept(f)); !errors.Is(err, unix.ENODEV) {
		t.Error("Add:", err)
	}
	if _, err := os.Stat(filepath.Dir(e.Path())); !errors.Is(err, os.ErrNotExist) {
		t.Error("the mount point:", err)
	}
}
