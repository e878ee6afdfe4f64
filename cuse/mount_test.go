package cuse_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/cusetest"
)

// tree is a file system whose every inode can be opened.
type tree struct {
	*dev
	reply  cuse.OpenReply
	file   func(node uint64) cuse.File // nil: a plain one
	answer func(h *abi.FuseInHeader, body, out []byte) ([]byte, unix.Errno)
}

func (t *tree) OpenNode(r cuse.Request, node uint64, flags uint32) (cuse.File, cuse.OpenReply, error) {
	f, err := t.dev.Open(r, flags)
	if t.file != nil {
		f = t.file(node)
	}
	return f, t.reply, err
}

func (t *tree) Answer(h *abi.FuseInHeader, body, out []byte) ([]byte, unix.Errno) {
	if t.answer == nil {
		return out, unix.ENOSYS
	}
	return t.answer(h, body, out)
}

func TestMountHandshake(t *testing.T) {
	with := func(change func(in *abi.FuseInitIn)) abi.FuseInitIn {
		in := cusetest.PassthroughInit()
		change(&in)
		return in
	}
	for _, q := range []struct {
		name string
		in   abi.FuseInitIn
		err  error
	}{
		{"Linux 6.9", cusetest.PassthroughInit(), nil},
		{"newer", with(func(in *abi.FuseInitIn) { in.Minor = 99; in.Flags |= 1 << 31; in.Flags2 |= 0xff00 }), nil},
		{"Linux 6.1", with(func(in *abi.FuseInitIn) { in.Minor = 37; in.Flags2 = 0 }), unix.EOPNOTSUPP},
		{"built without passthrough", with(func(in *abi.FuseInitIn) { in.Flags2 = 0 }), unix.EOPNOTSUPP},
		{"flags2 that do not count", with(func(in *abi.FuseInitIn) { in.Flags &^= abi.FuseInitExt }), unix.EOPNOTSUPP},
		{"another protocol", with(func(in *abi.FuseInitIn) { in.Major = 8 }), unix.EOPNOTSUPP},
	} {
		k := cusetest.NewRawMounted(t, &tree{dev: &dev{}}, cuse.Config{})
		if err := k.SendFuseInit(q.in); err != nil {
			t.Fatal(err)
		}
		err := k.Session.Handshake()
		if !errors.Is(err, q.err) {
			t.Errorf("%s: %v", q.name, err)
		}
		if err != nil && (strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "6.9")) {
			t.Errorf("%s: no help to a user: %v", q.name, err)
		}
		var m struct {
			h abi.FuseOutHeader
			b abi.FuseInitOut
		}
		buf := make([]byte, 256)
		n, rerr := k.Recv(buf)
		_, _ = binary.Decode(buf[:16], binary.NativeEndian, &m.h)
		_, _ = binary.Decode(buf[16:], binary.NativeEndian, &m.b)
		switch {
		case rerr != nil || q.err != nil && (n != 16 || m.h.Error != -int32(unix.EPROTO)):
			t.Errorf("%s: reply of %d bytes with %d, %v", q.name, n, m.h.Error, rerr)
		case q.err != nil:
		case n != 16+64 || m.h.Error != 0 || m.b.Minor != abi.FusePassthroughMinor || m.b.MaxStackDepth != 1 ||
			m.b.Flags2 != abi.FuseInit2Passthrough || m.b.MaxWrite != uint32(m.b.MaxPages)*4096 || m.b.MaxWrite <= 65535*4 ||
			m.b.Flags&^q.in.Flags != 0:
			t.Errorf("%s: %+v", q.name, m.b)
		}
		k.Close()
	}
	// A device's session is not a mount's, and the other way round.
	k := cusetest.NewRawMounted(t, &tree{dev: &dev{}}, cuse.Config{})
	defer k.Close()
	if err := k.SendInit(7, 40); err != nil {
		t.Fatal(err)
	}
	if err := k.Session.Handshake(); !errors.Is(err, unix.EPROTO) {
		t.Errorf("CUSE_INIT: %v", err)
	}
}

func TestMountOpen(t *testing.T) {
	d := &tree{dev: &dev{}, reply: cuse.OpenReply{Flags: abi.FopenPassthrough | abi.FopenDirectIO, Backing: 7}}
	var node uint64
	d.file = func(n uint64) cuse.File { node = n; return &file{d: d.dev} }
	k := cusetest.NewMounted(t, d, cuse.Config{})
	f, out, errno := k.OpenNode(1234, 1, 1000, 1000, unix.O_RDWR)
	if errno != 0 || node != 1234 || out.BackingID != 7 || out.OpenFlags != d.reply.Flags {
		t.Fatalf("node %d, %+v, %v", node, out, errno)
	}
	if n, errno := f.Write(make([]byte, 24)); n != 24 || errno != 0 {
		t.Errorf("write: %d, %v", n, errno)
	}
	if errno := f.Release(); errno != 0 {
		t.Error(errno)
	}
	d.open = func(cuse.Request, uint32) (cuse.File, error) { return nil, unix.EACCES }
	if _, _, errno := k.OpenNode(1234, 1, 1000, 1000, unix.O_RDWR); errno != unix.EACCES {
		t.Errorf("refused: %v", errno)
	}
}

func TestMountAnswer(t *testing.T) {
	d := &tree{dev: &dev{}}
	d.answer = func(h *abi.FuseInHeader, body, out []byte) ([]byte, unix.Errno) {
		switch {
		case h.Opcode == abi.FuseLookup && string(body) == "name\x00" && h.Nodeid == 1:
			return append(out, bytes.Repeat([]byte{9}, 128)...), 0
		case h.Opcode == abi.FuseGetattr:
			panic("answer")
		case h.Opcode == abi.FuseStatfs:
			return out, 5000 // no errno
		}
		return out, unix.ENOENT
	}
	log, seen := logs()
	k := cusetest.NewMounted(t, d, cuse.Config{Log: log})
	if b, errno := k.Ask(abi.FuseLookup, 1, []byte("name\x00")); errno != 0 || !bytes.Equal(b, bytes.Repeat([]byte{9}, 128)) {
		t.Errorf("lookup: % x, %v", b, errno)
	}
	for _, q := range []struct {
		op    uint32
		errno unix.Errno
	}{{abi.FuseLookup, unix.ENOENT}, {abi.FuseGetattr, unix.EIO}, {abi.FuseStatfs, unix.EIO}, {abi.FuseDestroy, 0}, {abi.FuseInit, unix.ENOENT}} {
		if _, errno := k.Ask(q.op, 2); errno != q.errno {
			t.Errorf("opcode %d: %v, want %v", q.op, errno, q.errno)
		}
	}
	if n := seen.FilterMessageSnippet("panic").Len(); n != 1 {
		t.Errorf("%d panics logged", n)
	}
	// What needs no reply gets none; cusetest complains of one.
	if err := k.Inject(cusetest.Message(abi.FuseInHeader{Opcode: abi.FuseForget, Unique: 1 << 40, Nodeid: 5}, make([]byte, 8))); err != nil {
		t.Fatal(err)
	}
}

func TestMountForgetName(t *testing.T) {
	k := cusetest.NewMounted(t, &tree{dev: &dev{}}, cuse.Config{})
	const name = "0123456789abcdef0123456789abcdef"
	if err := k.Session.ForgetName(name); err != nil {
		t.Fatal(err)
	}
	eventually(t, "INVAL_ENTRY", func() bool { return k.Dropped(name) == 1 })
}

// Long writes of a mounted file come whole from wherever its position is.
func TestMountSplit(t *testing.T) {
	var mu sync.Mutex
	var sizes []int
	d := &tree{dev: &dev{}}
	d.write = func(_ *file, r cuse.Request, data []byte) {
		mu.Lock()
		sizes = append(sizes, len(data))
		mu.Unlock()
		r.ReplyWrite(len(data))
	}
	// Commands of n * 100,000 bytes; a first byte of 0 is a short one.
	d.file = func(uint64) cuse.File { return bigUnits{&file{d: d.dev}} }
	k := cusetest.NewMounted(t, d, cuse.Config{})
	f, _, errno := k.OpenNode(2, 1, 1000, 1000, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	long := func(n int) []byte {
		b := make([]byte, n*100_000)
		b[0] = byte(n)
		return b
	}
	const piece = 65 * 4096
	write := func(b []byte, inPage, want int) {
		t.Helper()
		if n, errno := f.WriteAt(b, inPage); n != want || errno != 0 {
			t.Errorf("write of %d: %d, %v", len(b), n, errno)
		}
	}
	take := func(want ...int) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if len(sizes) != len(want) {
			t.Fatalf("commands %v, want %v", sizes, want)
		}
		for i := range want {
			if sizes[i] != want[i] {
				t.Fatalf("commands %v, want %v", sizes, want)
			}
		}
		sizes = nil
	}
	for _, start := range []uint64{0, 24, 1<<40 + 5, 1<<63 - 1<<30} {
		f.Pos = start
		for _, inPage := range []int{0, 1, 4095} {
			write(long(2), inPage, 200_000)
			write(long(3), inPage, 300_000)
			write(make([]byte, 24), inPage, 24)
			write(long(10), inPage, 1_000_000)
		}
		take(200_000, 300_000, 24, 1_000_000, 200_000, 300_000, 24, 1_000_000, 200_000, 300_000, 24, 1_000_000)
	}

	// A write() that broke off after its first piece, and what may follow it.
	for name, next := range map[string]func(){
		"a short command where the next piece would be": func() { write(make([]byte, 24), 0, 24); take(24) },
		"a long one there":      func() { write(long(3), 0, 300_000); take(300_000) },
		"a short one elsewhere": func() { f.Pos = 99; write(make([]byte, 24), 0, 24); take(24) },
		"the same again":        func() { f.Pos = 1000; write(long(3), 0, 300_000); take(300_000) },
	} {
		f.Pos = 1000
		if n, errno := f.Piece(f.Pos, long(3)[:piece]); n != piece || errno != 0 {
			t.Fatalf("%s: first piece: %d, %v", name, n, errno)
		}
		f.Pos += piece
		next()
		if t.Failed() {
			t.Fatal(name)
		}
	}
	if errno := f.Release(); errno != 0 {
		t.Error(errno)
	}
	eventually(t, "nothing held", func() bool { return k.Session.Held() == "" })
}

type bigUnits struct{ *file }

func (bigUnits) WholeSize(b []byte) int { return int(b[0]) * 100_000 }

// A mounted session allocates nothing per command either.
func TestMountNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	k := cusetest.NewRawMounted(t, &tree{dev: &dev{}, file: func(uint64) cuse.File { return bigUnits{&file{d: &dev{}}} }}, cuse.Config{})
	n := newNullRaw(t, k)
	for range 1000 {
		n.command(t)
	}
	if got := testing.AllocsPerRun(2000, func() { n.command(t) }); got != 0 {
		t.Errorf("%v allocations per command", got)
	}
}
