package cuse_test

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/cusetest"
)

func TestHandshakeVersions(t *testing.T) {
	for _, c := range []struct {
		name         string
		major, minor uint32
		ok           bool
	}{
		{"Linux 6.1", 7, 37, true},
		{"oldest", 7, 31, true},
		{"too old", 7, 30, false},
		{"much too old", 6, 40, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := cusetest.NewRaw(t, &dev{}, cuse.Config{})
			defer k.Close()
			if err := k.SendInit(c.major, c.minor); err != nil {
				t.Fatal(err)
			}
			err := k.Session.Handshake()
			if c.ok != (err == nil) {
				t.Fatalf("handshake: %v", err)
			}
			if !c.ok && !strings.Contains(err.Error(), "Linux 5.4") {
				t.Errorf("the message does not say what is needed: %v", err)
			}
			if !c.ok {
				return
			}
			buf := make([]byte, 4096)
			n, err := k.Recv(buf)
			if err != nil || !bytes.Contains(buf[:n], []byte("DEVNAME=infiniband/uverbs0\x00")) {
				t.Fatalf("reply % x, %v", buf[:n], err)
			}
			const flags = 16 + 12 // fuse_out_header, then major, minor, unused
			if buf[flags]&abi.CuseUnrestrictedIoctl == 0 {
				t.Error("ioctl is restricted")
			}
		})
	}
}

func TestOperations(t *testing.T) {
	d := &dev{
		write: func(_ *file, r cuse.Request, data []byte) {
			if string(data) == "bad" {
				r.ReplyError(unix.ENOSPC)
				return
			}
			r.ReplyWrite(len(data))
		},
		read:  func(_ *file, r cuse.Request, size int) { r.ReplyRead(bytes.Repeat([]byte("x"), min(size, 5))) },
		ioctl: func(_ *file, r cuse.Request, _ cuse.IoctlArgs) { r.ReplyError(unix.ENOTTY) },
		poll:  func(_ *file, r cuse.Request, _ cuse.PollArgs) { r.ReplyPoll(unix.POLLIN) },
		open: func(r cuse.Request, _ uint32) (cuse.File, error) {
			if r.UID() == 77 {
				return nil, unix.EACCES
			}
			return nil, errors.New("no errno in it")
		},
	}
	opener := d.open
	d.open = nil
	k := cusetest.New(t, d, cuse.Config{})
	f := open(t, k, 100)
	if n, e := f.Write([]byte("hello")); n != 5 || e != 0 {
		t.Errorf("write: %d, %v", n, e)
	}
	if _, e := f.Write([]byte("bad")); e != unix.ENOSPC {
		t.Errorf("write: %v", e)
	}
	if b, e := f.Read(64); string(b) != "xxxxx" || e != 0 {
		t.Errorf("read: %q, %v", b, e)
	}
	if _, e := f.Ioctl(0xc0181b01, 0); e != unix.ENOTTY {
		t.Errorf("ioctl: %v", e)
	}
	if ev, e := f.Poll(9, unix.POLLIN, true); ev != unix.POLLIN || e != 0 {
		t.Errorf("poll: %#x, %v", ev, e)
	}
	if err := k.Session.Notify(9); err != nil || !k.WaitNotify(9) {
		t.Errorf("notify: %v", err)
	}
	if e := f.Flush(); e != 0 {
		t.Errorf("flush: %v", e)
	}
	if e := f.Release(); e != 0 || d.released.Load() != 1 {
		t.Errorf("release: %v, called %d times", e, d.released.Load())
	}

	d2 := &dev{open: opener}
	k2 := cusetest.New(t, d2, cuse.Config{})
	if _, e := k2.Open(1, 77, 77, 0); e != unix.EACCES {
		t.Errorf("open: %v", e)
	}
	if _, e := k2.Open(1, 78, 78, 0); e != unix.EIO {
		t.Errorf("open with an error that has no errno: %v", e)
	}
}

// Failure class 7: a panic in one command is EIO, logged, and the daemon goes on.
func TestPanicIsEIO(t *testing.T) {
	log, seen := logs()
	d := &dev{write: func(_ *file, r cuse.Request, data []byte) {
		if data[0] == 0 {
			panic("boom")
		}
		r.ReplyWrite(len(data))
	}}
	k := cusetest.New(t, d, cuse.Config{Log: log})
	f := open(t, k, 100)
	for range 3 {
		if _, e := f.Write([]byte{0}); e != unix.EIO {
			t.Fatalf("panic: %v", e)
		}
		if n, e := f.Write([]byte{1, 2}); n != 2 || e != 0 {
			t.Fatalf("after a panic: %d, %v", n, e)
		}
	}
	if seen.FilterMessageSnippet("panic").Len() == 0 {
		t.Errorf("not logged: %v", seen.All())
	}
}

// A long command arrives in pieces and is handed over whole.
func TestLongCommand(t *testing.T) {
	var got []int
	d := &dev{write: func(_ *file, r cuse.Request, data []byte) {
		got = append(got, len(data))
		for i, b := range data[1:] {
			if b != byte(i) {
				r.ReplyError(unix.EBADMSG)
				return
			}
		}
		r.ReplyWrite(len(data))
	}}
	d.open = func(cuse.Request, uint32) (cuse.File, error) { return framed{&file{d: d}}, nil }
	k := cusetest.New(t, d, cuse.Config{})
	f := open(t, k, 100)
	command := func(units byte) []byte {
		b := make([]byte, int(units)*1000)
		b[0] = units
		for i := range b[1:] {
			b[i+1] = byte(i)
		}
		return b
	}
	for _, units := range []byte{1, 131, 200, 250} {
		for _, inPage := range []int{0, 100, 4095} {
			b := command(units)
			if n, e := f.WriteAt(b, inPage); n != len(b) || e != 0 {
				t.Fatalf("%d units at %d: %d, %v", units, inPage, n, e)
			}
			if last := got[len(got)-1]; last != len(b) {
				t.Fatalf("handed over %d of %d bytes", last, len(b))
			}
		}
	}
	// Another thread's command in between does not mix with it.
	b := command(250)
	if n, e := f.Piece(0, b[:131072]); n != 131072 || e != 0 {
		t.Fatalf("first piece: %d, %v", n, e)
	}
	if n, e := f.Thread(101).Write(command(1)); n != 1000 || e != 0 {
		t.Fatalf("other thread: %d, %v", n, e)
	}
	if n, e := f.Piece(131072, b[131072:]); n != len(b)-131072 || e != 0 {
		t.Fatalf("second piece: %d, %v", n, e)
	}
	if last := got[len(got)-1]; last != len(b) {
		t.Fatalf("handed over %d of %d bytes", last, len(b))
	}
	// A sequence that breaks off is thrown away.
	if n, e := f.Piece(0, b[:131072]); n != 131072 || e != 0 {
		t.Fatalf("first piece: %d, %v", n, e)
	}
	if n, e := f.Write(command(2)); n != 2000 || e != 0 {
		t.Fatalf("a new command: %d, %v", n, e)
	}
}

// Failure class 3: a command that says it is longer than it was written is not
// the first piece of one that the kernel cut, which is never so short.
func TestRow3ShortWriteIsNoPiece(t *testing.T) {
	var got int
	d := &dev{write: func(_ *file, r cuse.Request, data []byte) {
		got = len(data)
		r.ReplyError(unix.EINVAL)
	}}
	d.open = func(cuse.Request, uint32) (cuse.File, error) { return framed{&file{d: d}}, nil }
	k := cusetest.New(t, d, cuse.Config{})
	f := open(t, k, 100)
	for _, size := range []int{1, 24, 4096, 31 * 4096} {
		b := make([]byte, size)
		b[0] = 250
		if n, e := f.Piece(0, b); e != unix.EINVAL || got != size {
			t.Errorf("%d bytes: %d, %v, and the handler saw %d", size, n, e, got)
		}
	}
	b := make([]byte, 31*4096+1)
	b[0] = 250
	if n, e := f.Piece(0, b); e != 0 || n != len(b) || got == len(b) {
		t.Errorf("the shortest piece: %d, %v", n, e)
	}
}

// Failure class 35: a handler that blocks, announced or not, stops nobody else.
func TestBlockedHandler(t *testing.T) {
	for _, announced := range []bool{true, false} {
		g := newGate(t)
		d := &dev{write: func(_ *file, r cuse.Request, data []byte) {
			if data[0] == 0 {
				if announced {
					r.Detach()
				}
				g.wait()
			}
			r.ReplyWrite(len(data))
		}}
		k := cusetest.New(t, d, cuse.Config{})
		stuck, other := open(t, k, 100), open(t, k, 200)
		p := stuck.WriteAsync([]byte{0})
		eventually(t, "the handler blocks", func() bool { return g.entered.Load() == 1 })
		for range 100 {
			if n, e := other.Write([]byte{1}); n != 1 || e != 0 {
				t.Fatalf("announced %v: %d, %v", announced, n, e)
			}
		}
		g.open()
		if n, e := cusetest.Written(p); n != 1 || e != 0 {
			t.Fatalf("%d, %v", n, e)
		}
	}
}

// Close hung when the only reader was inside a handler.
func TestCloseWhileReaderHandles(t *testing.T) {
	for _, ends := range []bool{true, false} {
		g := newGate(t)
		d := &dev{write: func(_ *file, r cuse.Request, data []byte) { g.wait(); r.ReplyWrite(len(data)) }}
		k := cusetest.New(t, d, cuse.Config{})
		f := open(t, k, 100)
		p := f.WriteAsync([]byte{0})
		eventually(t, "the handler runs", func() bool { return g.entered.Load() == 1 })
		closed := make(chan struct{})
		go func() { _ = k.Session.Close(); close(closed) }()
		if ends {
			g.open()
		}
		soon(t, "Close returns", closed)
		if _, e := cusetest.Written(p); !ends && e != unix.EIO {
			t.Errorf("a request left behind: %v", e)
		}
		if d.released.Load() != 1 {
			t.Errorf("released %d times", d.released.Load())
		}
		g.open()
		if err := k.Close(); err != nil {
			t.Errorf("Serve: %v", err)
		}
	}
}

func TestKernelEndsTheSession(t *testing.T) {
	d := &dev{}
	k := cusetest.New(t, d, cuse.Config{})
	open(t, k, 100)
	if err := k.Abort(); err == nil {
		t.Fatal("Serve returned nil")
	}
	if d.released.Load() != 1 {
		t.Errorf("released %d times", d.released.Load())
	}
}

// Failure class 29: 10⁴ open and close leave nothing.
func TestManyOpens(t *testing.T) {
	d := &dev{}
	k := cusetest.New(t, d, cuse.Config{})
	open(t, k, 1).Release()
	f0, g0 := fds(), goroutines()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 2500 {
				f, e := k.Open(uint32(10+w), 1, 1, 0)
				if e != 0 {
					t.Error(e)
					return
				}
				f.Release()
			}
		}()
	}
	wg.Wait()
	if f1, g1 := fds(), goroutines(); f1 > f0 || g1 > g0+4 {
		t.Errorf("fds %d, then %d; goroutines %d, then %d", f0, f1, g0, g1)
	}
	if d.opened.Load() != d.released.Load() {
		t.Errorf("%d opened, %d released", d.opened.Load(), d.released.Load())
	}
}
