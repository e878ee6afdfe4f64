package ctxfs_test

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/ctxfs"
)

// What dispatch needs of an Arena (hca.Arena).
var _ interface {
	Alloc(n int) (mem []byte, offset uint64, err error)
	Free(offset uint64)
} = (*ctxfs.Arena)(nil)

// slowFile's Release waits.
type slowFile struct {
	*file
	let chan struct{}
}

func (f slowFile) Release(flags uint32) {
	<-f.let
	f.file.Release(flags)
}

// Many Releases that take long hold up neither their client's close() nor another
// user.
func TestSlowReleases(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	let := make(chan struct{})
	c := newClient(t, clientUID)
	var slow []*file
	for range 40 {
		f := newFile(nil)
		slow = append(slow, f)
		fd := c.open(add(t, fs, a, clientUID, func(cuse.Request, uint32) (cuse.File, error) { return slowFile{f, let}, nil }).Path())
		if r := c.do(ask{Op: "close", FD: fd}); r.Errno != 0 {
			t.Fatal(r.Errno)
		}
	}
	c = newClient(t, clientUID+1)
	f := newFile(nil)
	fd := c.open(add(t, fs, a, clientUID+1, accept(f)).Path())
	if n, errno := c.write(fd, command(24)); n != 24 {
		t.Errorf("write: %v", errno)
	}
	c.do(ask{Op: "close", FD: fd})
	soon(t, "another's Release", f.released)
	close(let)
	for _, f := range slow {
		soon(t, "a slow Release", f.released)
	}
}

// What is behind a file is let go of when the file, its owner's fd and all mappings
// are gone, however the file ended. A small tmpfs tells.
func TestMemoryIsGivenBack(t *testing.T) {
	fs := mount(t, cuse.Config{})
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	used := func() uint64 {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		return (st.Blocks - st.Bfree) * uint64(st.Bsize)
	}
	const big = 4 << 20
	c := newClient(t, 0)
	for name, end := range map[string]func(e *ctxfs.Entry, f *file){
		"opened and closed": func(e *ctxfs.Entry, f *file) {
			c.do(ask{Op: "close", FD: c.open(e.Path())})
			soon(t, "Release", f.released)
		},
		"mapped": func(e *ctxfs.Entry, f *file) {
			fd := c.open(e.Path())
			m := c.do(ask{Op: "mmap", FD: fd, Len: big, Flags: unix.PROT_READ | unix.PROT_WRITE | unix.MAP_SHARED<<8})
			c.do(ask{Op: "close", FD: fd})
			soon(t, "Release", f.released)
			if used() < big {
				t.Error("gone while it was mapped")
			}
			if r := c.do(ask{Op: "munmap", FD: int(m.N)}); r.Errno != 0 {
				t.Error(r.Errno)
			}
		},
		"removed": func(e *ctxfs.Entry, f *file) { e.Remove() },
		"refused, then removed": func(e *ctxfs.Entry, f *file) {
			f.refuse.Store(true)
			if r := c.do(ask{Op: "open", Path: e.Path(), Flags: unix.O_RDWR}); r.Errno != unix.EACCES {
				t.Errorf("open: %v", r.Errno)
			}
			e.Remove()
		},
	} {
		mem, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Fallocate(mem, 0, 0, big); err != nil {
			t.Fatal(err)
		}
		f := newFile(nil)
		e, err := fs.Add(mem, 0, 0, func(cuse.Request, uint32) (cuse.File, error) {
			if f.refuse.Load() {
				return nil, unix.EACCES
			}
			return f, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(mem)
		if used() < big {
			t.Errorf("%s: gone at once", name)
		}
		end(e, f)
		for late := time.Now().Add(patience); used() != 0; time.Sleep(time.Millisecond) {
			if time.Now().After(late) {
				t.Fatalf("%s: %d bytes are kept", name, used())
			}
		}
	}
}

func TestAddBadFile(t *testing.T) {
	fs := mount(t, cuse.Config{})
	if _, err := fs.Add(-1, 0, 0, accept(newFile(nil))); !errors.Is(err, unix.EBADF) {
		t.Errorf("no fd: %v", err)
	}
}
