package ctxfs_test

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
)

func TestMmapShared(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	mem, off, err := a.Alloc(10_000)
	if err != nil {
		t.Fatal(err)
	}
	_, gap, _ := a.Alloc(5000)
	mem2, off2, err := a.Alloc(4096)
	if err != nil || len(mem) != 3*4096 || len(mem2) != 4096 || gap == off {
		t.Fatal(err, len(mem), len(mem2))
	}
	f := newFile(nil)
	c := newClient(t, clientUID)
	fd := c.open(add(t, fs, a, clientUID, accept(f)).Path())
	const rw = unix.PROT_READ | unix.PROT_WRITE
	shared := rw | unix.MAP_SHARED<<8
	m := c.do(ask{Op: "mmap", FD: fd, Offset: int64(off), Len: len(mem), Flags: shared})
	m2 := c.do(ask{Op: "mmap", FD: fd, Offset: int64(off2), Len: len(mem2), Flags: shared})
	if m.Errno != 0 || m2.Errno != 0 {
		t.Fatalf("mmap: %v, %v", m.Errno, m2.Errno)
	}
	copy(mem[8192:], "from the daemon")
	if r := c.do(ask{Op: "peek", FD: int(m.N), Offset: 8192, Len: 15}); string(r.Data) != "from the daemon" {
		t.Errorf("client sees %q", r.Data)
	}
	c.do(ask{Op: "poke", FD: int(m2.N), Offset: 4090, Data: []byte("client")})
	if string(mem2[4090:]) != "client" {
		t.Errorf("daemon sees %q", mem2[4090:])
	}

	// What else mmap() makes of it.
	if r := c.do(ask{Op: "mmap", FD: fd, Len: 4096, Flags: rw | unix.MAP_PRIVATE<<8}); r.Errno != 0 {
		t.Errorf("MAP_PRIVATE: %v", r.Errno)
	} else if c.do(ask{Op: "poke", FD: int(r.N), Data: []byte("private")}); bytes.HasPrefix(mem, []byte("private")) {
		t.Error("a private mapping writes into the arena")
	}
	if r := c.do(ask{Op: "mmap", FD: fd, Len: 4096, Flags: rw | unix.PROT_EXEC | unix.MAP_SHARED<<8}); r.Errno != unix.EPERM {
		t.Errorf("PROT_EXEC: %v", r.Errno)
	}
	if r := c.do(ask{Op: "mprotect", FD: int(m.N), Flags: rw | unix.PROT_EXEC}); r.Errno != unix.EACCES {
		t.Errorf("mprotect to PROT_EXEC: %v", r.Errno)
	}

	// A client can punch holes, through its mapping; the daemon reads zeros.
	if r := c.do(ask{Op: "madvise", FD: int(m.N), Flags: unix.MADV_REMOVE}); r.Errno != 0 {
		t.Errorf("MADV_REMOVE: %v", r.Errno)
	}
	if mem[8192] != 0 {
		t.Errorf("daemon sees %q in a hole", mem[8192:8200])
	}
	mem[0] = 1

	// The mapping outlives the fd and the mount.
	c.do(ask{Op: "close", FD: fd})
	soon(t, "Release", f.released)
	copy(mem, "closed")
	if r := c.do(ask{Op: "peek", FD: int(m.N), Len: 6}); string(r.Data) != "closed" {
		t.Errorf("client sees %q after close", r.Data)
	}
	if err := fs.Close(); err != nil {
		t.Fatal(err)
	}
	copy(mem, "unmounted")
	if r := c.do(ask{Op: "peek", FD: int(m.N), Len: 9}); string(r.Data) != "unmounted" {
		t.Errorf("client sees %q after unmount", r.Data)
	}
	a.Close()
	if r := c.do(ask{Op: "peek", FD: int(m.N), Len: 9}); string(r.Data) != "unmounted" {
		t.Errorf("client sees %q after the arena closed", r.Data)
	}
}

func TestMmapBeyondEndKillsOnlyTheClient(t *testing.T) {
	fs, a := mount(t, cuse.Config{}), arena(t)
	mem, _, err := a.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	f := newFile(nil)
	c := newClient(t, 0)
	fd := c.open(add(t, fs, a, 0, accept(f)).Path())
	m := c.do(ask{Op: "mmap", FD: fd, Offset: 0, Len: 1 << 20, Flags: unix.PROT_READ | unix.MAP_SHARED<<8})
	if m.Errno != 0 {
		t.Fatal(m.Errno)
	}
	c.send(ask{Op: "peek", FD: int(m.N), Offset: 8192, Len: 1})
	if r, err := c.tryRecv(); err == nil {
		t.Errorf("touch beyond the end: %+v", r)
	}
	soon(t, "Release", f.released)
	mem[4095] = 1
}
