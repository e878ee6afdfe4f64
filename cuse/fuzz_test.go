package cuse_test

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/cusetest"
)

const (
	// fuzzOdd in the flags of an OPEN makes a file whose commands may be split.
	fuzzOdd = 1
	// fuzzFrames and fuzzFrame bound one input: its replies fit the socket pair,
	// of which this end reads nothing meanwhile.
	fuzzFrames = 64
	fuzzFrame  = 16 << 10

	inHeader  = 40 // sizeof(struct fuse_in_header)
	outHeader = 16 // sizeof(struct fuse_out_header)
)

// fuzzDev answers at once, but a READ of an odd size only when it is interrupted
// or at the end of the input.
type fuzzDev struct {
	session          *cuse.Session
	opened, released atomic.Int64
	wrong            atomic.Pointer[string]

	mu   sync.Mutex
	hold bool
	held []cuse.Request
}

type fuzzFile struct{ d *fuzzDev }

// fuzzFramed has commands of ten times their first byte.
type fuzzFramed struct{ fuzzFile }

func (d *fuzzDev) Open(_ cuse.Request, flags uint32) (cuse.File, error) {
	if flags == 0xbad {
		return nil, unix.ENOSYS
	}
	d.opened.Add(1)
	if flags&fuzzOdd != 0 {
		return fuzzFramed{fuzzFile{d}}, nil
	}
	return fuzzFile{d}, nil
}

// keep holds the answer back, and says whether it did.
func (d *fuzzDev) keep(r cuse.Request) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hold {
		d.held = append(d.held, r)
	}
	return d.hold
}

// flush answers what is held, and has nothing be held after it.
func (d *fuzzDev) flush() {
	d.mu.Lock()
	held := d.held
	d.held, d.hold = nil, false
	d.mu.Unlock()
	for _, r := range held {
		r.TryReplyError(unix.EBUSY)
	}
}

func (f fuzzFile) Write(r cuse.Request, data []byte) { r.ReplyWrite(len(data)) }

// fuzzMaxWrite is the least that a session takes, and so the shortest piece.
const fuzzMaxWrite = 4096

func (fuzzFramed) WholeSize(first []byte) int {
	if len(first) == 0 {
		return 0
	}
	return 200 * int(first[0])
}

func (f fuzzFramed) Write(r cuse.Request, data []byte) {
	if want := f.WholeSize(data); len(data) < want && len(data) >= fuzzMaxWrite {
		s := fmt.Sprintf("a command of %d bytes came with %d", want, len(data))
		f.d.wrong.Store(&s)
	}
	r.ReplyWrite(len(data))
}

func (f fuzzFile) Read(r cuse.Request, size int) {
	if size%2 == 1 && f.d.keep(r) {
		r.OnInterrupt(func() { r.TryReplyError(unix.EINTR) })
		return
	}
	r.ReplyRead(make([]byte, min(size, 300)))
}

func (f fuzzFile) Poll(r cuse.Request, p cuse.PollArgs) {
	if p.ScheduleNotify {
		_ = f.d.session.Notify(p.Kh)
	}
	r.ReplyPoll(p.Events)
}

func (f fuzzFile) Ioctl(r cuse.Request, a cuse.IoctlArgs) {
	switch a.Cmd % 4 {
	case 1:
		r.Detach()
	case 2:
		r.After(func() {})
	case 3:
		r.ReplyError(unix.Errno(a.Arg))
		return
	}
	r.ReplyIoctl(int32(len(a.Data)))
}

func (f fuzzFile) Flush(r cuse.Request) { r.ReplyOK() }
func (f fuzzFile) Release(uint32)       { f.d.released.Add(1) }

// fuzzKernel sends one input after another to one session.
type fuzzKernel struct {
	d      *fuzzDev
	raw    *cusetest.Raw
	logged *observer.ObservedLogs
	t      *testing.T
	buf    []byte
	owed   map[uint64]int // replies by unique
	opens  map[uint64]int // OPENs among them
	fhs    []uint64       // files of this input, the two it begins with first
	begun  bool           // those are there
	stays  uint64         // a file open all the time
	rest   string         // what the session holds between inputs
}

func newFuzzKernel(f *testing.F, mounted bool) *fuzzKernel {
	log, logged := logs()
	d := &fuzzDev{}
	cfg := cuse.Config{MaxWrite: fuzzMaxWrite, Log: log}
	var raw *cusetest.Raw
	if mounted {
		raw = cusetest.NewRawMounted(f, fuzzTree{d}, cfg)
	} else {
		raw = cusetest.NewRaw(f, d, cfg)
	}
	k := &fuzzKernel{
		d: d, raw: raw, logged: logged,
		buf: make([]byte, 8192), owed: map[uint64]int{}, opens: map[uint64]int{},
	}
	d.session = k.raw.Session
	if err := k.raw.Handshake(); err != nil {
		f.Fatal(err)
	}
	patience := unix.NsecToTimeval(cusetest.Patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(k.raw.FD, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience); err != nil {
		f.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- k.raw.Session.Serve() }()
	f.Cleanup(func() {
		k.raw.Close()
		if err := <-served; err != nil {
			f.Error(err)
		}
	})
	// One file of the user's stays open, so that what stays charged shows.
	if err := k.raw.Send(fuzzRequest(abi.FuseOpen, 2, 100, abi.FuseOpenIn{})); err != nil {
		f.Fatal(err)
	}
	if n, err := k.raw.Recv(k.buf); n != outHeader+16 || err != nil {
		f.Fatalf("open: %d bytes, %v", n, err)
	}
	k.stays = binary.NativeEndian.Uint64(k.buf[outHeader:])
	k.rest = "1 files, 0 requests (0 interrupted, 0 owed a reply), 1 users with 0 handlers and 0 bytes, 0 handlers, 0 ready"
	return k
}

// send sends a message and notes the reply that is owed for it.
func (k *fuzzKernel) send(msg []byte) {
	if len(msg) >= inHeader {
		op, unique := binary.NativeEndian.Uint32(msg[4:]), binary.NativeEndian.Uint64(msg[8:])
		switch op {
		case abi.FuseForget, abi.FuseBatchForget, abi.FuseNotifyReply, abi.FuseInterrupt:
		default:
			if unique != 0 {
				k.owed[unique]++
			}
			if unique != 0 && op == abi.FuseOpen {
				k.opens[unique]++
			}
		}
	}
	if err := k.raw.Send(msg); err != nil {
		k.t.Fatalf("send: %v", err)
	}
}

// settle takes replies until none is owed.
func (k *fuzzKernel) settle() {
	for len(k.owed) > 0 {
		n, err := k.raw.Recv(k.buf)
		if err != nil || n == 0 {
			k.t.Fatalf("%v; without a reply: %v", err, k.owed)
		}
		k.take(k.buf[:n])
	}
}

func (k *fuzzKernel) take(msg []byte) {
	if len(msg) < outHeader || int(binary.NativeEndian.Uint32(msg)) != len(msg) {
		k.t.Fatalf("reply with a wrong length: % x", msg)
	}
	code, unique := int32(binary.NativeEndian.Uint32(msg[4:])), binary.NativeEndian.Uint64(msg[8:])
	switch {
	case unique == 0 && code == abi.FuseNotifyPoll && len(msg) == outHeader+8:
		return
	case unique&abi.FuseIntReqBit != 0 && code == -int32(unix.EAGAIN) && len(msg) == outHeader:
		return // asks for an INTERRUPT again
	case k.owed[unique] == 0:
		k.t.Fatalf("reply that is not owed: % x", msg)
	case code > 0 || code <= -512 || code != 0 && len(msg) != outHeader:
		k.t.Fatalf("reply that the kernel refuses: % x", msg)
	}
	if k.owed[unique]--; k.owed[unique] == 0 {
		delete(k.owed, unique)
	}
	// A client that opens twice under one unique is no client; which of two
	// requests this answers then shows in the length.
	if k.opens[unique] > 0 && code == 0 && len(msg) == outHeader+16 {
		if fh := binary.NativeEndian.Uint64(msg[outHeader:]); k.begun {
			k.fhs = append(k.fhs, fh)
		} else {
			k.fhs[unique/2-1] = fh
		}
	}
}

// run sends one input's messages: each is its length in two bytes, then that.
// An fh of 0 stands for a plain file, 1 for one with commands in pieces.
func (k *fuzzKernel) run(t *testing.T, in []byte) {
	k.t = t
	clear(k.owed)
	clear(k.opens)
	k.fhs, k.begun = append(k.fhs[:0], 0, 0), false
	k.d.mu.Lock()
	k.d.hold = true
	k.d.mu.Unlock()
	k.send(fuzzRequest(abi.FuseOpen, 2, 100, abi.FuseOpenIn{}))
	k.send(fuzzRequest(abi.FuseOpen, 4, 100, abi.FuseOpenIn{Flags: fuzzOdd}))
	k.settle()
	k.begun = true
	if k.fhs[0] == 0 || k.fhs[1] == 0 {
		t.Fatalf("files: %x", k.fhs)
	}
	for range fuzzFrames {
		if len(in) < 2 {
			break
		}
		n := min(int(binary.LittleEndian.Uint16(in)), len(in)-2, fuzzFrame)
		msg := append([]byte(nil), in[2:2+n]...)
		in = in[2+n:]
		if n == 0 {
			continue // an empty read is the channel's end
		}
		if len(msg) >= inHeader+8 && binary.NativeEndian.Uint32(msg[4:]) != abi.FuseInterrupt {
			if fh := binary.NativeEndian.Uint64(msg[inHeader:]); fh < 2 {
				binary.NativeEndian.PutUint64(msg[inHeader:], k.fhs[fh])
			} else if fh == k.stays {
				binary.NativeEndian.PutUint64(msg[inHeader:], k.fhs[0])
			}
		}
		k.send(msg)
	}
	// Read after all of the input, so that interrupts find what is held.
	const barrier = 1 << 40
	k.send(fuzzRequest(9999, barrier, 100, nil))
	for k.owed[barrier] > 0 {
		n, err := k.raw.Recv(k.buf)
		if err != nil || n == 0 {
			t.Fatalf("%v; without a reply: %v", err, k.owed)
		}
		k.take(k.buf[:n])
	}
	k.d.flush()
	k.settle()
	clear(k.opens)
	for i, fh := range k.fhs {
		k.send(fuzzRequest(abi.FuseRelease, uint64(4+2*i), 100, abi.FuseReleaseIn{Fh: fh}))
	}
	k.settle()

	// The last reply comes a moment before its handler's end.
	for end := time.Now().Add(cusetest.Patience); k.raw.Session.Held() != k.rest; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("left: %s", k.raw.Session.Held())
		}
	}
	if o, r := k.d.opened.Load(), k.d.released.Load(); o != r+1 {
		t.Fatalf("%d opened, %d released", o, r)
	}
	if wrong := k.d.wrong.Swap(nil); wrong != nil {
		t.Fatal(*wrong)
	}
	if seen := k.logged.FilterMessageSnippet("panic").All(); len(seen) > 0 {
		t.Fatal(seen)
	}
}

func fuzzRequest(op uint32, unique uint64, tid uint32, in any, data ...byte) []byte {
	var body []byte
	if in != nil {
		var err error
		if body, err = binary.Append(nil, binary.NativeEndian, in); err != nil {
			panic(err)
		}
	}
	return cusetest.Message(abi.FuseInHeader{Opcode: op, Unique: unique, UID: 1000, GID: 1000, PID: tid}, body, data)
}

func fuzzWrite(unique uint64, tid uint32, fh, offset uint64, data []byte) []byte {
	return fuzzRequest(abi.FuseWrite, unique, tid, abi.FuseWriteIn{Fh: fh, Offset: offset, Size: uint32(len(data))}, data...)
}

// fuzzFramesOf puts an input together.
func fuzzFramesOf(msgs ...[]byte) []byte {
	var in []byte
	for _, m := range msgs {
		in = append(binary.LittleEndian.AppendUint16(in, uint16(len(m))), m...)
	}
	return in
}

// Whatever the kernel's end sends, the session lives, answers each request once,
// and keeps nothing when the files are closed.
func FuzzMessage(f *testing.F) {
	command := make([]byte, 12000)
	command[0] = 60 // units of 200
	write := fuzzWrite(10, 100, 0, 0, []byte("hello"))
	interrupt := func(unique uint64) []byte {
		return fuzzRequest(abi.FuseInterrupt, unique|abi.FuseIntReqBit, 0, abi.FuseInterruptIn{Unique: unique})
	}
	for _, msgs := range [][][]byte{
		{fuzzRequest(abi.FuseOpen, 10, 100, abi.FuseOpenIn{})},
		{fuzzRequest(abi.FuseOpen, 10, 100, abi.FuseOpenIn{Flags: 0xbad}), fuzzRequest(abi.FuseOpen, 12, 0, abi.FuseOpenIn{Flags: 1})},
		{fuzzRequest(abi.FuseRead, 10, 100, abi.FuseReadIn{Size: 64})},
		{fuzzRequest(abi.FuseRead, 10, 100, abi.FuseReadIn{Size: 63}), interrupt(10)},
		{fuzzRequest(abi.FuseRead, 10, 100, abi.FuseReadIn{Size: 1<<32 - 1}), interrupt(12), write},
		{write, write},
		{fuzzWrite(10, 100, 0, 0, nil), fuzzWrite(12, 100, 1, 0, nil), fuzzWrite(14, 100, 1, 8, nil)},
		{fuzzRequest(abi.FuseWrite, 10, 100, abi.FuseWriteIn{Size: 1 << 31}, 1, 2, 3)},
		{fuzzWrite(10, 100, 1, 0, command[:4096]), fuzzWrite(12, 100, 1, 4096, command[4096:8192]), fuzzWrite(14, 100, 1, 8192, command[8192:])},
		{fuzzWrite(10, 0, 1, 0, command[:4096]), fuzzWrite(12, 0, 1, 0, command[:4097]), fuzzWrite(14, 0, 1, 4096, command[4096:])},
		{fuzzWrite(10, 100, 1, 0, command[:1]), fuzzWrite(12, 101, 1, 0, command[:2]), fuzzWrite(14, 100, 1, 1, command), fuzzWrite(16, 101, 1, 1<<63, command)},
		{fuzzWrite(10, 100, 1, 0, command[:4096]), fuzzRequest(abi.FuseRelease, 12, 100, abi.FuseReleaseIn{Fh: 1}), fuzzWrite(14, 100, 1, 4096, command[4096:])},
		{fuzzRequest(abi.FuseRelease, 10, 100, abi.FuseReleaseIn{}), fuzzRequest(abi.FuseRelease, 12, 100, abi.FuseReleaseIn{}), write},
		{fuzzRequest(abi.FuseRead, 10, 100, abi.FuseReadIn{Size: 63}), fuzzRequest(abi.FuseRelease, 12, 100, abi.FuseReleaseIn{})},
		{fuzzRequest(abi.FuseRelease, 10, 100, abi.FuseReleaseIn{Fh: 1 << 63}), fuzzRequest(abi.FuseRelease, 12, 100, abi.FuseReleaseIn{Fh: 1<<32 | 1<<20})},
		{fuzzRequest(abi.FuseFlush, 10, 100, abi.FuseFlushIn{})},
		{fuzzRequest(abi.FusePoll, 10, 100, abi.FusePollIn{Kh: 7, Events: 1, Flags: abi.FusePollScheduleNotify})},
		{fuzzRequest(abi.FuseIoctl, 10, 100, abi.FuseIoctlIn{Cmd: 1, InSize: 3}, 1, 2, 3), write},
		{fuzzRequest(abi.FuseIoctl, 10, 100, abi.FuseIoctlIn{Cmd: 2, InSize: 1<<32 - 1}, 1, 2, 3), write},
		{fuzzRequest(abi.FuseIoctl, 10, 100, abi.FuseIoctlIn{Cmd: 3, Arg: 38}), fuzzRequest(abi.FuseIoctl, 12, 100, abi.FuseIoctlIn{Cmd: 3})},
		{interrupt(10), interrupt(11), fuzzRequest(abi.FuseInterrupt, 0, 0, nil)},
		{fuzzRequest(abi.FuseForget, 10, 0, uint64(1)), fuzzRequest(abi.FuseBatchForget, 12, 0, uint64(0)), fuzzRequest(abi.FuseNotifyReply, 14, 0, nil)},
		{fuzzRequest(9999, 10, 100, nil), fuzzRequest(abi.CuseInit, 12, 0, abi.CuseInitIn{Major: 7, Minor: 37}), fuzzRequest(abi.FuseOpen, 0, 100, abi.FuseOpenIn{})},
		{{1, 2, 3}, fuzzRequest(abi.FuseWrite, 10, 100, make([]byte, 12)), write[:len(write)-1], append(write[:len(write):len(write)], 0)},
	} {
		f.Add(fuzzFramesOf(msgs...))
	}
	k := newFuzzKernel(f, false)
	f.Fuzz(k.run)
}

// fuzzTree has the same files.
type fuzzTree struct{ d *fuzzDev }

func (t fuzzTree) OpenNode(r cuse.Request, node uint64, flags uint32) (cuse.File, cuse.OpenReply, error) {
	f, err := t.d.Open(r, flags)
	return f, cuse.OpenReply{Flags: abi.FopenDirectIO}, err
}

func (t fuzzTree) Answer(h *abi.FuseInHeader, body, out []byte) ([]byte, unix.Errno) {
	if h.Opcode == abi.FuseStatfs {
		return append(out, make([]byte, 80)...), 0
	}
	return out, unix.Errno(len(body))
}

// FuzzMounted is FuzzMessage for a mounted file system.
func FuzzMounted(f *testing.F) {
	command := make([]byte, 12000)
	command[0] = 60
	const at = 1 << 20
	for _, msgs := range [][][]byte{
		{fuzzRequest(abi.FuseLookup, 10, 100, nil, []byte("name\x00")...), fuzzRequest(abi.FuseGetattr, 12, 100, make([]byte, 16))},
		{fuzzRequest(abi.FuseStatfs, 10, 100, nil), fuzzRequest(abi.FuseDestroy, 12, 100, nil), fuzzRequest(abi.FuseInit, 14, 0, cusetest.PassthroughInit())},
		{fuzzRequest(abi.FuseOpendir, 10, 100, make([]byte, 300)), fuzzRequest(abi.FuseFallocate, 12, 100, make([]byte, 700))},
		{fuzzWrite(10, 100, 1, at, command[:4096]), fuzzWrite(12, 100, 1, at+4096, command[4096:8192]), fuzzWrite(14, 100, 1, at+8192, command[8192:])},
		{fuzzWrite(10, 100, 1, at, command[:4096]), fuzzWrite(12, 100, 1, at+4096, command[:24]), fuzzWrite(14, 100, 1, 0, command[:4096])},
		{fuzzWrite(10, 100, 1, 1<<64-4096, command[:4096]), fuzzWrite(12, 100, 1, 0, command[4096:8192]), fuzzWrite(14, 101, 1, 0, nil)},
	} {
		f.Add(fuzzFramesOf(msgs...))
	}
	k := newFuzzKernel(f, true)
	f.Fuzz(k.run)
}
