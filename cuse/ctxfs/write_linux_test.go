package ctxfs_test

import (
	"bytes"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
)

func TestWrite(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	var last atomic.Value
	f := newFile(func(r cuse.Request, data []byte) {
		last.Store([3]uint32{r.TID(), r.UID(), r.GID()})
		if data[0] == 99 {
			r.ReplyError(unix.ENOSPC)
			return
		}
		r.ReplyWrite(len(data))
	})
	var opener atomic.Uint32
	e := add(t, fs, a, clientUID, func(r cuse.Request, flags uint32) (cuse.File, error) {
		opener.Store(r.TID())
		if r.UID() != clientUID || flags&unix.O_ACCMODE != unix.O_RDWR {
			t.Errorf("OPEN by %d with flags %#x", r.UID(), flags)
		}
		return f, nil
	})
	c := newClient(t, clientUID)
	tid := uint32(c.do(ask{Op: "tid"}).N)
	fd := c.open(e.Path())
	if opener.Load() != tid {
		t.Errorf("opened by thread %d, not %d", opener.Load(), tid)
	}
	if n, errno := c.write(fd, make([]byte, 24)); n != 24 || errno != 0 {
		t.Errorf("write: %d, %v", n, errno)
	}
	if want := [3]uint32{tid, clientUID, clientUID}; last.Load() != want {
		t.Errorf("caller %v, want %v", last.Load(), want)
	}
	if _, errno := c.write(fd, []byte{99}); errno != unix.ENOSPC {
		t.Errorf("write that fails: %v", errno)
	}
	c.do(ask{Op: "close", FD: fd})
	soon(t, "Release", f.released)
}

// Long commands arrive whole, however the kernel splits them and wherever the
// file's position is.
func TestLongCommands(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	var mu sync.Mutex
	var seen []byte
	calls := 0
	f := newFile(func(r cuse.Request, data []byte) {
		mu.Lock()
		seen = append(seen[:0], data...)
		calls++
		mu.Unlock()
		r.ReplyWrite(len(data))
	})
	c := newClient(t, 0)
	fd := c.open(add(t, fs, a, 0, accept(f)).Path())
	for _, n := range []int{24, 4096, 128 << 10, 128<<10 + 8, 65535 * 4, 300_000, 532_480, 532_484, 1 << 20, (65535+65535)*8 + 24} {
		for _, at := range []int{0, 1, 2048, 4095} {
			mu.Lock()
			calls = 0
			mu.Unlock()
			want := command(n)
			if r := c.do(ask{Op: "command", FD: fd, Len: n, Flags: at}); int(r.N) != n || r.Errno != 0 {
				t.Fatalf("%d bytes at %d: %d, %v", n, at, r.N, r.Errno)
			}
			mu.Lock()
			if calls != 1 || !bytes.Equal(seen, want) {
				t.Errorf("%d bytes at %d: %d calls, %d bytes seen", n, at, calls, len(seen))
			}
			mu.Unlock()
		}
	}
	// From a position that no earlier write left.
	want := command(700_000)
	r := c.do(ask{Op: "command", FD: fd, Len: len(want), Offset: 1 << 40})
	mu.Lock()
	if int(r.N) != len(want) || !bytes.Equal(seen, want) {
		t.Errorf("pwrite: %d, %v", r.N, r.Errno)
	}
	mu.Unlock()
	if r := c.do(ask{Op: "command", FD: fd, Len: (65535+65535)*8 + 24 + 4}); r.Errno != unix.EINVAL {
		t.Errorf("longer than any command: %d, %v", r.N, r.Errno)
	}
}

// A thread whose long write() ended early writes its next command where the next
// piece would have come.
func TestCommandAfterTornWrite(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	got := make(chan int, 2)
	f := newFile(func(r cuse.Request, data []byte) {
		got <- len(data)
		r.ReplyWrite(len(data))
	})
	c := newClient(t, 0)
	fd := c.open(add(t, fs, a, 0, accept(f)).Path())
	r := c.do(ask{Op: "torn", FD: fd, Count: 65 * 4096, Len: 66 * 4096})
	if r.N != 65*4096 {
		t.Fatalf("torn write: %d, %v", r.N, r.Errno)
	}
	select {
	case n := <-got:
		t.Errorf("%d bytes of a torn command were handled", n)
	default:
	}
	if n, errno := c.write(fd, command(24)); n != 24 || errno != 0 {
		t.Fatalf("next write: %d, %v", n, errno)
	}
	if n := <-got; n != 24 {
		t.Errorf("next command has %d bytes", n)
	}
}

func TestManyThreads(t *testing.T) {
	fs := mount(t, cuse.Config{})
	const clients, threads, rounds = 4, 8, 200
	var n atomic.Int64
	var all []*client
	for range clients {
		f := newFile(func(r cuse.Request, data []byte) {
			n.Add(1)
			r.ReplyWrite(len(data))
		})
		c := newClient(t, clientUID)
		fd := c.open(add(t, fs, arena(t), clientUID, accept(f)).Path())
		c.send(ask{Op: "writers", FD: fd, Count: threads, Len: rounds})
		all = append(all, c)
	}
	for _, c := range all {
		if r := c.recv(); r.Errno != 0 {
			t.Errorf("%v: %s", r.Errno, r.Data)
		}
	}
	if n.Load() != clients*threads*rounds {
		t.Errorf("%d commands", n.Load())
	}
}

// A client killed while its command waits gets away, and its file its Release.
func TestClientKilledInWrite(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	entered := make(chan cuse.Request, 1)
	f := newFile(func(r cuse.Request, _ []byte) {
		r.Detach()
		entered <- r
	})
	c := newClient(t, clientUID)
	fd := c.open(add(t, fs, a, clientUID, accept(f)).Path())
	c.send(ask{Op: "write", FD: fd, Data: command(24)})
	r := <-entered
	c.kill() // returns when the process is gone
	soon(t, "Release", f.released)
	if r.TryReplyError(unix.EIO) {
		t.Error("the session did not answer for the killed client")
	}
}
