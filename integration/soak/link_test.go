package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"github.com/uverbsd/uverbsd/pin"
)

// inside is a dispatch.System whose only process is the test itself.
type inside struct{ dev *dispatch.Device }

func at(addr uint64, n int) []byte {
	return unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(nil), addr)), n)
}

func (inside) PID() int                              { return 1 }
func (inside) Name() string                          { return "test" }
func (inside) MemlockLimit() (uint64, error)         { return 1 << 30, nil }
func (inside) CanLockAny() bool                      { return false }
func (inside) CanNetRaw() bool                       { return false }
func (inside) Key() string                           { return "test" }
func (inside) Get()                                  {}
func (inside) Put()                                  {}
func (inside) CheckRange(uint64, uint64, bool) error { return nil }

// SharedPieces: none, there is one process.
func (inside) SharedPieces(uint64, uint64) ([]hca.SharedPiece, error) { return nil, nil }

func (inside) ReadAt(b []byte, addr uint64) error  { copy(b, at(addr, len(b))); return nil }
func (inside) WriteAt(b []byte, addr uint64) error { copy(at(addr, len(b)), b); return nil }
func (inside) Check(int, uint32, uint32) error     { return nil }
func (inside) CheckImage() error                   { return nil }

func (s inside) OpenProcess(int) (dispatch.Process, error)      { return s, nil }
func (inside) Read(_ int, b []byte, addr uint64) error          { copy(b, at(addr, len(b))); return nil }
func (inside) Write(_ int, b []byte, addr uint64) error         { copy(at(addr, len(b)), b); return nil }
func (inside) ReadBehind(int, int, []byte) error                { return unix.EFAULT }
func (inside) OpenFile(int, int32) (dispatch.ClientFile, error) { return nil, unix.EBADF }
func (inside) SameFile(int, int32, int32) bool                  { return false }
func (s inside) Credentials(dispatch.Process, int, uint32, uint32) (dispatch.Credentials, error) {
	return s, nil
}

// Install: nothing here has descriptors, so there are no events.
func (inside) Install(int, func(int) []string, func() bool, func(), func(dispatch.Standing, error) unix.Errno) error {
	return unix.EPERM
}

// request is one command that waits for its answer.
type request struct {
	answer chan struct {
		n int
		e unix.Errno
	}
	done atomic.Bool
}

func (r *request) reply(n int, e unix.Errno) {
	r.done.Store(true)
	r.answer <- struct {
		n int
		e unix.Errno
	}{n, e}
}
func (*request) TID() int                  { return 1 }
func (*request) UID() uint32               { return 1000 }
func (*request) GID() uint32               { return 1000 }
func (*request) FileFlags() uint32         { return 0 }
func (*request) Detach()                   {}
func (*request) OnInterrupt(func())        {}
func (r *request) Pending() bool           { return !r.done.Load() }
func (r *request) ReplyError(e unix.Errno) { r.reply(0, e) }
func (r *request) ReplyWrite(n int)        { r.reply(n, 0) }
func (r *request) ReplyRead(b []byte)      { r.reply(len(b), 0) }
func (r *request) ReplyPoll(uint32)        { r.reply(0, 0) }

// opened is a client of dev.
func opened(t *testing.T, dev *dispatch.Device) *rawverbs.Client {
	t.Helper()
	newRequest := func() *request {
		r := &request{}
		r.answer = make(chan struct {
			n int
			e unix.Errno
		}, 1)
		return r
	}
	h, err := dev.Open(newRequest())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Release() })
	mem, err := rawverbs.NewMem()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(mem.Free)
	c := &rawverbs.Client{FD: -1, Async: -1, Mem: mem, Via: func(b []byte) (int, unix.Errno) {
		r := newRequest()
		h.Write(r, append([]byte(nil), b...))
		a := <-r.answer
		return a.n, a.e
	}}
	if err := c.GetContext(); err != nil {
		t.Fatal(err)
	}
	return c
}

// ends are the two sockets of one connection.
func ends(t *testing.T) (a, b *control) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out [2]*control
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		out[i] = newControl(c.(*net.UnixConn))
	}
	return out[0], out[1]
}

// TestLink runs whole connections of every kind on an engine in this process:
// both ends must find everything right, and leave nothing.
func TestLink(t *testing.T) {
	engine, err := soft.New(loop.New(hca.LinkInfiniBand), soft.Config{GUID: hca.GUID{7: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = engine.Close() }()
	var pins pin.Accountant
	dev := dispatch.NewDevice(dispatch.Config{HCA: engine, System: inside{}, Pins: &pins, Users: dispatch.NewUsers(dispatch.Limits{}), Notify: func(uint64) {}})
	defer dev.Remove()
	for _, k := range []linkKind{linkRC, linkSRQ, linkUC, linkUD} {
		t.Run(k.String(), func(t *testing.T) {
			clients := [2]*rawverbs.Client{opened(t, dev), opened(t, dev)}
			for n := range 20 {
				var ctl [2]*control
				ctl[0], ctl[1] = ends(t)
				result := make(chan error, 2)
				for i := range 2 {
					go func() { result <- oneConnection(clients[i], ctl[i], k, i == 0, uint64(n)) }()
				}
				if err := errors.Join(<-result, <-result); err != nil {
					t.Fatalf("connection %d: %v", n, err)
				}
			}
			for _, f := range dev.Files() {
				if len(f.Objects) != 1 || f.Objects["context"] != 1 || f.Pinned != 0 {
					t.Errorf("left: %v, %d pinned bytes", f.Objects, f.Pinned)
				}
			}
		})
	}
}

func oneConnection(c *rawverbs.Client, ctl *control, k linkKind, dials bool, seed uint64) error {
	defer func() { _ = ctl.conn.Close() }()
	area, err := unix.Mmap(-1, 0, areaLen, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(area) }()
	p, err := c.SelfPath(filepath.Base(node))
	if err != nil {
		return err
	}
	w := worker{dials: dials}
	r := rand.New(rand.NewPCG(seed, 7))
	e := &end{c: c, ctl: ctl, kind: k, path: p, area: area}
	if err = e.create(r, false); err == nil {
		err = w.traffic(e, r)
	}
	if err = errors.Join(err, e.close()); err != nil {
		return fmt.Errorf("dials %v: %w", dials, err)
	}
	return nil
}
