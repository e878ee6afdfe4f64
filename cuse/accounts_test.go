package cuse

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// The tests here play the workers of a session that is not served, so that each
// step comes in the order that is wanted.

// hooked is the handler, and its only file.
type hooked struct {
	write    func(data []byte)
	writes   []byte    // the first byte of each
	kept     []Request // READs, not answered
	released int
}

func (h *hooked) Open(Request, uint32) (File, error) { return h, nil }

func (h *hooked) Write(r Request, data []byte) {
	h.writes = append(h.writes, data[0])
	if h.write != nil {
		h.write(data)
	}
	r.ReplyWrite(len(data))
}

func (h *hooked) Read(r Request, _ int)        { h.kept = append(h.kept, r) }
func (h *hooked) Poll(r Request, _ PollArgs)   { r.ReplyPoll(0) }
func (h *hooked) Ioctl(r Request, _ IoctlArgs) { r.ReplyIoctl(0) }
func (h *hooked) Flush(r Request)              { r.ReplyOK() }
func (h *hooked) Release(uint32)               { h.released++ }

// bare is a session and the kernel's end of its channel.
type bare struct {
	*Session
	t    *testing.T
	peer int
}

func newBare(t *testing.T, h Handler, cfg Config) *bare {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fds[0]) })
	ch, err := NewChannel(fds[1])
	if err != nil {
		t.Fatal(err)
	}
	cfg.Name = "infiniband/uverbs0"
	s := New(ch, h, cfg)
	if s.bad != nil {
		t.Fatal(s.bad)
	}
	t.Cleanup(func() { _ = s.Close() })
	return &bare{Session: s, t: t, peer: fds[0]}
}

// bareMessage makes a request by thread 100 of user 1000.
func bareMessage(op uint32, unique uint64, fixed int, fh uint64, data ...byte) []byte {
	msg := make([]byte, headerLen+fixed, headerLen+fixed+len(data))
	msg = append(msg, data...)
	var h abi.FuseInHeader
	h.Len, h.Opcode, h.Unique, h.UID, h.PID = uint32(len(msg)), op, unique, 1000, 100
	copy(msg, bytesOf(&h))
	binary.NativeEndian.PutUint64(msg[headerLen:], fh)
	if op == abi.FuseWrite {
		binary.NativeEndian.PutUint32(msg[headerLen+16:], uint32(len(data)))
	}
	return msg
}

// replies takes what was answered since the last time: errnos by unique.
func (b *bare) replies() map[uint64][]unix.Errno {
	got := map[uint64][]unix.Errno{}
	var buf [256]byte
	for {
		n, err := unix.Read(b.peer, buf[:])
		if err != nil || n < 16 {
			return got
		}
		u := binary.NativeEndian.Uint64(buf[8:])
		got[u] = append(got[u], unix.Errno(-int32(binary.NativeEndian.Uint32(buf[4:]))))
	}
}

// open opens the file, on unique 2.
func (b *bare) open(w *worker) (fh uint64) {
	b.t.Helper()
	b.message(w, bareMessage(abi.FuseOpen, 2, 8, 0))
	var buf [64]byte
	if n, err := unix.Read(b.peer, buf[:]); n != 32 || err != nil {
		b.t.Fatalf("open: %d bytes, %v", n, err)
	}
	return binary.NativeEndian.Uint64(buf[16:])
}

// kill has the monitor answer for a request whose thread was killed.
func (b *bare) kill(w *worker, unique uint64) {
	b.message(w, bareMessage(abi.FuseInterrupt, unique|abi.FuseIntReqBit, 8, unique))
	b.mu.Lock()
	st := b.findLocked(unique)
	if st == nil {
		b.t.Errorf("request %d is not outstanding", unique)
	} else {
		st.interrupted = time.Now().Add(-2 * tickKill)
	}
	b.killCheck = time.Time{}
	b.mu.Unlock()
	b.tick(0)
}

// A request that was answered for a killed client while it waited for its turn
// does not reach the handler: the file may have had its Release.
func TestKilledWhileReadyDoesNotRun(t *testing.T) {
	const first, second, third = 10, 12, 14
	for _, c := range []struct {
		name   string
		killed []uint64 // in the queue
		late   bool     // and one after its turn came
		want   []byte   // what the handler sees after the first
	}{
		{"none", nil, false, []byte{second, third}},
		{"the ready one", []uint64{second}, false, []byte{third}},
		{"all", []uint64{second, third}, false, nil},
		{"after its turn came", nil, true, []byte{third}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := &hooked{}
			b := newBare(t, h, Config{Readers: minReaders, Killed: func(uint32) bool { return true }}) // one handler per user
			w, other := &worker{}, &worker{}
			fh := b.open(w)
			h.write = func(data []byte) {
				if data[0] == first { // meanwhile more come, and are parked
					b.message(other, bareMessage(abi.FuseWrite, second, 40, fh, second))
					b.message(other, bareMessage(abi.FuseWrite, third, 40, fh, third))
				}
			}
			b.message(w, bareMessage(abi.FuseWrite, first, 40, fh, first))
			if b.nready.Load() != 1 || !slices.Equal(h.writes, []byte{first}) {
				t.Fatalf("%d ready after %v", b.nready.Load(), h.writes)
			}
			for _, u := range c.killed {
				b.kill(other, u)
			}
			release := len(c.killed) == 2
			if release { // as the client's exit does, at once
				b.message(other, bareMessage(abi.FuseRelease, 20, 24, fh))
			}
			for st := b.takeReady(w); st != nil; st = b.takeReady(w) {
				if !st.head.open() {
					t.Errorf("request %d is over and has its turn", st.unique)
				}
				if c.late && st.unique == second {
					b.kill(other, second)
				}
				b.run(w, st, st.msg)
			}
			if got := h.writes[1:]; !slices.Equal(got, c.want) {
				t.Errorf("the handler saw %v, not %v", got, c.want)
			}
			if !release {
				b.message(other, bareMessage(abi.FuseRelease, 20, 24, fh))
			}
			if h.released != 1 {
				t.Errorf("released %d times", h.released)
			}
			if held := b.Held(); held != "" {
				t.Errorf("left: %s", held)
			}
			got := b.replies()
			for _, u := range []uint64{first, second, third, 20} {
				if len(got[u]) != 1 {
					t.Errorf("request %d has replies %v", u, got[u])
				}
			}
		})
	}
}

// A RELEASE that was answered by the session reaches the file all the same.
func TestAnsweredReleaseRuns(t *testing.T) {
	h := &hooked{}
	b := newBare(t, h, Config{})
	w := &worker{}
	fh := b.open(w)
	msg := bareMessage(abi.FuseRelease, 20, 24, fh)
	var head abi.FuseInHeader
	load(&head, msg)
	st := b.admit(w, &head, fh, Request{uid: 1000, tid: 100}, 0, msg)
	if !b.abandon(st.head, unix.EIO) {
		t.Fatal("not answered")
	}
	b.run(w, st, msg)
	if h.released != 1 {
		t.Errorf("released %d times", h.released)
	}
	if got := b.replies()[20]; !slices.Equal(got, []unix.Errno{unix.EIO}) {
		t.Errorf("replies %v", got)
	}
	if held := b.Held(); held != "" {
		t.Errorf("left: %s", held)
	}
}

// Two threads that are one thread id to us, 0 in a foreign pid namespace, inside
// a long command at once: the first's piece is thrown out with its charge.
func TestTwoLongCommandsOfOneThreadID(t *testing.T) {
	for _, tid := range []uint32{0, 100} {
		h := &hooked{}
		b := newBare(t, h, Config{})
		fh := b.open(&worker{})
		f := b.slots[uint32(fh)].f
		r := Request{st: &request{s: b.Session, f: f}, tid: tid}
		const whole = 1 << 20
		for range 2 * parkedBytesMax / whole { // enough that a leak would end in ENOMEM
			b.mu.Lock()
			f.user.bytes += whole // as join does, before it copies unlocked
			b.mu.Unlock()
			b.keep(r, &split{buf: make([]byte, 1, whole)})
			if f.user.bytes != whole || len(f.splits) != 1 {
				t.Fatalf("thread %d: %d bytes charged for %d commands", tid, f.user.bytes, len(f.splits))
			}
		}
		b.message(&worker{}, bareMessage(abi.FuseRelease, 20, 24, fh))
		if f.user.bytes != 0 {
			t.Errorf("thread %d: %d bytes stay charged", tid, f.user.bytes)
		}
	}
}

// An OPEN whose client died (ENOENT for the reply) while Close took the file
// table: one of the two releases the file, and nothing panics under the lock.
func TestOpenGivenUpDuringClose(t *testing.T) {
	for _, c := range []struct {
		name   string
		before func(b *bare, fh uint64)
		taken  bool
	}{
		{"before it", func(*bare, uint64) {}, true},
		{"after it", func(b *bare, _ uint64) { _ = b.Close() }, false},
		{"already released", func(b *bare, fh uint64) {
			b.message(&worker{}, bareMessage(abi.FuseRelease, 20, 24, fh))
		}, false},
		{"released and opened again", func(b *bare, fh uint64) {
			b.message(&worker{}, bareMessage(abi.FuseRelease, 20, 24, fh))
			b.mu.Lock()
			again := b.addFileLocked(&file{impl: &hooked{}, user: b.userLocked(1000)})
			b.mu.Unlock()
			if uint32(again) != uint32(fh) {
				b.t.Error("the place in the table was not used again")
			}
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := &hooked{}
			b := newBare(t, h, Config{})
			fh := b.open(&worker{})
			f := b.slots[uint32(fh)].f
			c.before(b, fh)
			taken := b.takeBack(fh, f)
			if taken {
				b.releaseFile(f, 0)
			}
			if taken != c.taken {
				t.Errorf("taken: %v", taken)
			}
			_ = b.Close()
			if h.released != 1 {
				t.Errorf("released %d times", h.released)
			}
		})
	}
}

// A late reply that is under way when Close answers the rest is written before
// the channel is closed; its client saw the device gone without an answer.
func TestCloseWaitsForReplyUnderWay(t *testing.T) {
	for range 20 {
		h := &hooked{}
		b := newBare(t, h, Config{})
		w := &worker{}
		fh := b.open(w)
		b.message(w, bareMessage(abi.FuseRead, 10, 40, fh))
		b.message(w, bareMessage(abi.FuseRead, 12, 40, fh))
		late := h.kept[0]
		if !late.begin() {
			t.Fatal("answered already")
		}
		closed := make(chan struct{})
		go func() { defer close(closed); _ = b.Close() }()
		// The other one's EIO is what Close does last before it closes the channel.
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(b.peer), Events: unix.POLLIN}}, 10_000); n != 1 || err != nil {
			t.Fatalf("nothing from Close: %v", err)
		}
		if got := b.replies(); !slices.Equal(got[12], []unix.Errno{unix.EIO}) {
			t.Fatalf("replies %v", got)
		}
		if errno := b.sendError(late.st.unique, unix.ENOSPC); errno != 0 {
			t.Fatalf("the late reply: %v", errno)
		}
		late.st.replied()
		<-closed
		if got := b.replies(); !slices.Equal(got[10], []unix.Errno{unix.ENOSPC}) {
			t.Fatalf("late replies %v", got)
		}
	}
}
