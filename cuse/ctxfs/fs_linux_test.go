package ctxfs_test

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/ctxfs"
)

const clientUID = 12345

// needFuse skips only where the kernel cannot do it; where it can, whatever goes
// wrong is a failure.
func needFuse(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	if err := ctxfs.Supported(); err != nil {
		var u unix.Utsname
		_ = unix.Uname(&u)
		if errors.Is(err, unix.EOPNOTSUPP) && kernelBefore(unix.ByteSliceToString(u.Release[:]), 6, 9) {
			t.Skip(err)
		}
		t.Fatal(err)
	}
}

func kernelBefore(release string, major, minor int) bool {
	n := [2]int{}
	for i, s := range strings.SplitN(release, ".", 3)[:2] {
		for _, c := range s {
			if c < '0' || c > '9' {
				break
			}
			n[i] = n[i]*10 + int(c-'0')
		}
	}
	return n[0] < major || n[0] == major && n[1] < minor
}

// mountpoint is a directory that other users can reach.
func mountpoint(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctxfs")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	return filepath.Join(dir, "ctx-0")
}

// mount makes an FS that is served until the test ends.
func mount(t testing.TB, cfg cuse.Config) *ctxfs.FS {
	t.Helper()
	needFuse(t)
	fs, err := ctxfs.New(mountpoint(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- fs.Serve() }()
	t.Cleanup(func() {
		if err := fs.Close(); err != nil {
			t.Error(err)
		}
		select {
		case err := <-served:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("Serve does not return")
		}
	})
	return fs
}

func arena(t testing.TB) *ctxfs.Arena {
	t.Helper()
	a, err := ctxfs.NewArena(nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return a
}

// file is what the daemon has behind a file of ours.
type file struct {
	write    func(r cuse.Request, data []byte)
	released chan struct{}
	refuse   atomic.Bool // for the test's opener
}

func newFile(write func(r cuse.Request, data []byte)) *file {
	if write == nil {
		write = func(r cuse.Request, data []byte) { r.ReplyWrite(len(data)) }
	}
	return &file{write: write, released: make(chan struct{})}
}

func (f *file) Write(r cuse.Request, data []byte)    { f.write(r, data) }
func (f *file) Read(r cuse.Request, _ int)           { panic("READ reached the daemon") }
func (f *file) Poll(r cuse.Request, _ cuse.PollArgs) { panic("POLL reached the daemon") }
func (f *file) Ioctl(cuse.Request, cuse.IoctlArgs)   { panic("IOCTL reached the daemon") }
func (f *file) Flush(cuse.Request)                   { panic("FLUSH reached the daemon") }
func (f *file) Release(uint32)                       { close(f.released) }

// WholeSize: a command's first four bytes are its length.
func (f *file) WholeSize(b []byte) int {
	if len(b) < 4 {
		return 0
	}
	return int(binary.NativeEndian.Uint32(b))
}

func soon(t testing.TB, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatalf("never: %s", what)
	}
}

// accept is an Opener that lets everybody in.
func accept(f *file) ctxfs.Opener {
	return func(cuse.Request, uint32) (cuse.File, error) { return f, nil }
}

func add(t testing.TB, fs *ctxfs.FS, a *ctxfs.Arena, uid int, open ctxfs.Opener) *ctxfs.Entry {
	t.Helper()
	e, err := fs.Add(a.FD(), uint32(uid), uint32(uid), open)
	if err != nil {
		t.Fatal(err)
	}
	return e
}
