package ctxfs_test

import (
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
)

// An entry is opened once, by its owner, and then its name is gone.
func TestOnlyOneOpen(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	f := newFile(nil)
	var asked atomic.Int32
	var refuse atomic.Bool
	e := add(t, fs, a, clientUID, func(cuse.Request, uint32) (cuse.File, error) {
		asked.Add(1)
		if refuse.Load() {
			return nil, unix.EACCES
		}
		return f, nil
	})
	c, other, root := newClient(t, clientUID), newClient(t, clientUID+1), newClient(t, 0)
	open := ask{Op: "open", Path: e.Path(), Flags: unix.O_RDWR}

	if r := other.do(open); r.Errno != unix.EACCES || asked.Load() != 0 {
		t.Errorf("open by another user: %v, asked %d times", r.Errno, asked.Load())
	}
	refuse.Store(true)
	if r := c.do(open); r.Errno != unix.EACCES || asked.Load() != 1 {
		t.Errorf("open that is refused: %v, asked %d times", r.Errno, asked.Load())
	}
	refuse.Store(false)
	fd := c.open(e.Path())
	if asked.Load() != 2 {
		t.Errorf("asked %d times", asked.Load())
	}
	for name, c := range map[string]*client{"owner": c, "another user": other, "root": root} {
		if r := c.do(open); r.Errno != unix.ENOENT {
			t.Errorf("open again by %s: %v", name, r.Errno)
		}
		if r := c.do(ask{Op: "stat", Path: e.Path()}); r.Errno != unix.ENOENT {
			t.Errorf("stat by %s: %v", name, r.Errno)
		}
	}
	for _, flags := range []int{unix.O_RDWR, unix.O_RDONLY, unix.O_WRONLY} {
		if r := c.do(ask{Op: "reopen", FD: fd, Flags: flags}); r.Errno != unix.EACCES {
			t.Errorf("reopen by the owner, flags %d: %v", flags, r.Errno)
		}
	}
	link := "/proc/" + strconv.Itoa(c.cmd.Process.Pid) + "/fd/" + strconv.Itoa(fd)
	if r := root.do(ask{Op: "open", Path: link, Flags: unix.O_RDWR}); r.Errno != unix.EACCES {
		t.Errorf("reopen by root: %v", r.Errno)
	}
	if r := other.do(ask{Op: "open", Path: link, Flags: unix.O_RDWR}); r.Errno != unix.EACCES {
		t.Errorf("reopen by another user: %v", r.Errno)
	}
	if asked.Load() != 2 {
		t.Errorf("the opener was asked %d times", asked.Load())
	}
	// The open file is none the worse for it.
	if n, errno := c.write(fd, command(24)); n != 24 || errno != 0 {
		t.Errorf("write: %d, %v", n, errno)
	}
	if r := c.do(ask{Op: "fstat", FD: fd}); r.Errno != 0 || r.N != unix.S_IFREG|0o600 {
		t.Errorf("fstat: %o, %v", r.N, r.Errno)
	}
	e.Remove()
	if n, errno := c.write(fd, command(24)); n != 24 || errno != 0 {
		t.Errorf("write after Remove: %d, %v", n, errno)
	}
}

func TestRemoveBeforeOpen(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	e := add(t, fs, a, 0, accept(newFile(nil)))
	c := newClient(t, 0)
	if r := c.do(ask{Op: "stat", Path: e.Path()}); r.Errno != 0 {
		t.Fatal(r.Errno)
	}
	held := c.do(ask{Op: "open", Path: e.Path(), Flags: unix.O_PATH})
	if held.Errno != 0 {
		t.Fatal(held.Errno)
	}
	e.Remove()
	e.Remove()
	if r := c.do(ask{Op: "open", Path: e.Path(), Flags: unix.O_RDWR}); r.Errno != unix.ENOENT {
		t.Errorf("open: %v", r.Errno)
	}
	if r := c.do(ask{Op: "reopen", FD: int(held.N), Flags: unix.O_RDWR}); r.Errno != unix.EACCES {
		t.Errorf("open of the inode that was held: %v", r.Errno)
	}
}

// What the file and its directory answer to all but write() and mmap().
func TestRefusals(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	c := newClient(t, 0)
	e := add(t, fs, a, 0, accept(newFile(nil)))
	dir := filepath.Dir(e.Path())
	fd := c.open(e.Path())
	for _, q := range []struct {
		ask
		errno unix.Errno
		n     int64
	}{
		{ask{Op: "read", FD: fd, Len: 24}, unix.EINVAL, -1},
		{ask{Op: "ioctl", FD: fd, Flags: 0xc0181b01}, unix.ENOTTY, 0},
		{ask{Op: "ioctl", FD: fd, Flags: 0x5401}, unix.ENOTTY, 0},
		{ask{Op: "ftruncate", FD: fd, Offset: 0}, unix.EINVAL, 0},
		{ask{Op: "ftruncate", FD: fd, Offset: 1 << 20}, unix.EINVAL, 0},
		{ask{Op: "fallocate", FD: fd, Offset: 4096}, unix.ENODEV, 0},
		{ask{Op: "fallocate", FD: fd, Offset: 4096, Flags: unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE}, unix.ENODEV, 0},
		{ask{Op: "lseek", FD: fd, Offset: 0, Flags: unix.SEEK_DATA}, unix.ESPIPE, -1},
		{ask{Op: "lseek", FD: fd, Offset: 0, Flags: unix.SEEK_HOLE}, unix.ESPIPE, -1},
		{ask{Op: "fsync", FD: fd}, unix.EINVAL, 0},
		{ask{Op: "fchmod", FD: fd}, unix.EPERM, 0},
		{ask{Op: "fchown", FD: fd, Len: 1}, unix.EPERM, 0},
		{ask{Op: "fgetxattr", FD: fd}, unix.EOPNOTSUPP, 0},
		{ask{Op: "seal", FD: fd}, unix.EINVAL, -1},
		{ask{Op: "poll", FD: fd}, 0, unix.POLLIN | unix.POLLOUT},
		{ask{Op: "write", FD: fd, Data: command(24)}, 0, 24},
		{ask{Op: "readdir", Path: dir}, unix.EACCES, -1},
		{ask{Op: "creat", Path: dir + "/x"}, unix.EPERM, -1},
		{ask{Op: "open", Path: dir + "/x"}, unix.ENOENT, -1},
		{ask{Op: "open", Path: dir + "/../x"}, unix.ENOENT, -1},
	} {
		if r := c.do(q.ask); r.Errno != q.errno || q.errno == 0 && r.N != q.n {
			t.Errorf("%s %s %#x: %d, %v, want %d, %v", q.Op, q.Path, q.Flags, r.N, r.Errno, q.n, q.errno)
		}
	}
	// O_TRUNC is a truncation after the open.
	e = add(t, fs, a, 0, accept(newFile(nil)))
	if r := c.do(ask{Op: "open", Path: e.Path(), Flags: unix.O_RDWR | unix.O_TRUNC}); r.Errno != unix.EINVAL {
		t.Errorf("O_TRUNC: %v", r.Errno)
	}
	// A user who is not root.
	c = newClient(t, clientUID)
	if r := c.do(ask{Op: "readdir", Path: dir}); r.Errno != unix.EACCES {
		t.Errorf("a user lists the directory: %v", r.Errno)
	}
	if r := c.do(ask{Op: "creat", Path: dir + "/x"}); r.Errno != unix.EACCES && r.Errno != unix.EPERM {
		t.Errorf("a user makes a file: %v", r.Errno)
	}
}

// An Opener that panics or blocks holds up its own client only.
func TestBadOpener(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	c, d := newClient(t, clientUID), newClient(t, clientUID+1)
	e := add(t, fs, a, clientUID, func(cuse.Request, uint32) (cuse.File, error) { panic("opener") })
	if r := c.do(ask{Op: "open", Path: e.Path(), Flags: unix.O_RDWR}); r.Errno != unix.EIO {
		t.Errorf("an opener that panics: %v", r.Errno)
	}
	in, out := make(chan struct{}), make(chan struct{})
	e = add(t, fs, a, clientUID, func(cuse.Request, uint32) (cuse.File, error) {
		close(in)
		<-out
		return nil, unix.EACCES
	})
	c.send(ask{Op: "open", Path: e.Path(), Flags: unix.O_RDWR})
	<-in
	e.Remove() // while it is being opened
	fd := d.open(add(t, fs, a, clientUID+1, accept(newFile(nil))).Path())
	if n, errno := d.write(fd, command(24)); n != 24 {
		t.Errorf("write of another: %v", errno)
	}
	close(out)
	if r := c.recv(); r.Errno != unix.EACCES {
		t.Errorf("open that was refused late: %v", r.Errno)
	}
}
