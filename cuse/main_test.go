package cuse_test

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/cusetest"
)

func TestMain(m *testing.M) {
	before := fds()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		if after := fds(); after > before {
			fmt.Fprintf(os.Stderr, "fds: %d before, %d after\n", before, after)
			code = 1
		}
	}
	os.Exit(code)
}

// fds counts open descriptors, the runtime's own poller left out.
func fds() int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	n := 0
	for _, e := range list {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && to != "anon_inode:[eventpoll]" && to != "anon_inode:[eventfd]" {
			n++
		}
	}
	return n
}

func goroutines() int { return runtime.NumGoroutine() }

// dev is a handler made of functions; what is nil has a plain answer.
type dev struct {
	open     func(r cuse.Request, flags uint32) (cuse.File, error)
	write    func(f *file, r cuse.Request, data []byte)
	read     func(f *file, r cuse.Request, size int)
	poll     func(f *file, r cuse.Request, p cuse.PollArgs)
	ioctl    func(f *file, r cuse.Request, a cuse.IoctlArgs)
	release  func(f *file, flags uint32)
	opened   atomic.Int64
	released atomic.Int64
}

type file struct {
	d  *dev
	nr int64
}

func (d *dev) Open(r cuse.Request, flags uint32) (cuse.File, error) {
	if d.open != nil {
		return d.open(r, flags)
	}
	return &file{d: d, nr: d.opened.Add(1)}, nil
}

func (f *file) Write(r cuse.Request, data []byte) {
	if f.d.write != nil {
		f.d.write(f, r, data)
		return
	}
	r.ReplyWrite(len(data))
}

func (f *file) Read(r cuse.Request, size int) {
	if f.d.read != nil {
		f.d.read(f, r, size)
		return
	}
	r.ReplyRead(nil)
}

func (f *file) Poll(r cuse.Request, p cuse.PollArgs) {
	if f.d.poll != nil {
		f.d.poll(f, r, p)
		return
	}
	r.ReplyPoll(p.Events)
}

func (f *file) Ioctl(r cuse.Request, a cuse.IoctlArgs) {
	if f.d.ioctl != nil {
		f.d.ioctl(f, r, a)
		return
	}
	r.ReplyIoctl(0)
}

func (f *file) Flush(r cuse.Request) { r.ReplyOK() }

func (f *file) Release(flags uint32) {
	f.d.released.Add(1)
	if f.d.release != nil {
		f.d.release(f, flags)
	}
}

// framed is a file whose commands say in their first byte how many units of 1000
// bytes they are long.
type framed struct{ *file }

func (framed) WholeSize(b []byte) int {
	if len(b) == 0 {
		return 0
	}
	return int(b[0]) * 1000
}

// logs is a logger whose entries can be looked at.
func logs() (*zap.Logger, *observer.ObservedLogs) {
	core, seen := observer.New(zap.DebugLevel)
	return zap.New(core), seen
}

func open(t testing.TB, k *cusetest.Kernel, tid uint32) *cusetest.File {
	t.Helper()
	f, errno := k.Open(tid, 1000, 1000, 0)
	if errno != 0 {
		t.Fatalf("open: %v", errno)
	}
	return f
}

// eventually waits for a state that nothing announces.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(cusetest.Patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// soon fails the test instead of waiting for ever.
func soon(t testing.TB, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(cusetest.Patience):
		t.Fatalf("never: %s", what)
	}
}

// gate holds handlers back. Opened at the latest when the test ends.
type gate struct {
	ch      chan struct{}
	once    sync.Once
	entered atomic.Int64
}

func newGate(t testing.TB) *gate {
	g := &gate{ch: make(chan struct{})}
	t.Cleanup(g.open)
	return g
}

func (g *gate) open() { g.once.Do(func() { close(g.ch) }) }

func (g *gate) wait() {
	g.entered.Add(1)
	<-g.ch
}
