package cuse

import (
	"encoding/binary"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// Request is one request of the kernel's. It is a small value to be copied; what
// it says of the caller stays true for as long as it is kept, and one kept past
// its reply can answer nothing: the object behind it is recycled under a new
// generation.
type Request struct {
	st        *request
	gen       uint64
	tid       uint32
	uid       uint32
	gid       uint32
	fileFlags uint32
}

// TID is the calling thread as our pid namespace sees it, 0 if it does not.
func (r Request) TID() uint32 { return r.tid }

// UID is the caller's fsuid.
func (r Request) UID() uint32 { return r.uid }

// GID is the caller's fsgid.
func (r Request) GID() uint32 { return r.gid }

// FileFlags are the file's flags at this call, O_NONBLOCK among them. Only READ,
// WRITE and OPEN carry them.
func (r Request) FileFlags() uint32 { return r.fileFlags }

// request is what stands behind a Request until it has its reply and its
// handler has returned.
type request struct {
	s *Session

	// word is gen<<2 | how it was answered. Whoever moves it from wordOpen owns
	// the one reply.
	word atomic.Uint64
	// refs: one for the reply, one for the handler. At zero it is recycled.
	refs atomic.Int32

	// Set by admit, constant until recycled.
	unique uint64
	op     uint32
	size   int // READ, WRITE: bytes asked for
	f      *file
	head   Request

	base int // WRITE: bytes answered with earlier pieces; set before the handler runs

	// Guarded by Session.mu.
	w           *worker // runs the handler now
	prev, next  *request
	qnext       *request // in a file's queue, the ready queue or the free list
	msg         []byte   // a parked request's own copy
	interrupted time.Time
	onInterrupt func()
}

const (
	wordOpen      = 0
	wordAnswered  = 1
	wordAbandoned = 3 // answered by the session: a late reply is no mistake
)

// claim takes the right to reply.
func (r Request) claim(how uint64) bool {
	return r.st != nil && r.st.word.CompareAndSwap(r.gen<<2|wordOpen, r.gen<<2|how)
}

// Pending says whether r still lacks its reply. It does not once the session has
// answered for a handler whose client was killed (Config.Killed): the thread may
// be gone then and its id another's, so its memory must not be reached for.
func (r Request) Pending() bool { return r.open() }

func (r Request) open() bool { return r.st != nil && r.st.word.Load() == r.gen<<2|wordOpen }

// begin claims r for a handler's reply, and drops a second one.
func (r Request) begin() bool {
	if r.claim(wordAnswered) {
		r.st.s.unlink(r.st)
		return true
	}
	if r.st == nil {
		return false
	}
	if s := r.st.s; r.st.word.Load() != r.gen<<2|wordAbandoned && !s.closing.Load() {
		s.misuse("second reply to one request dropped")
	}
	return false
}

// ReplyError fails the request. It returns false, as all replies do, if the
// request was answered already; that is logged as a mistake of the handler's.
func (r Request) ReplyError(errno unix.Errno) bool {
	if !r.begin() {
		return false
	}
	r.st.s.sendError(r.st.unique, r.st.sane(errno))
	r.st.replied()
	return true
}

// TryReplyError is ReplyError for whoever may come late by design, such as an
// OnInterrupt callback: it does not log.
func (r Request) TryReplyError(errno unix.Errno) bool { return r.open() && r.tryError(errno) }

func (r Request) tryError(errno unix.Errno) bool {
	if !r.claim(wordAnswered) {
		return false
	}
	r.st.s.unlink(r.st)
	r.st.s.sendError(r.st.unique, r.st.sane(errno))
	r.st.replied()
	return true
}

// errnoMax: the kernel refuses replies with larger ones (fs/fuse/dev.c,
// fuse_dev_do_write).
const errnoMax = 511

// sane maps what must not reach the kernel to EIO: no error at all, an error the
// kernel refuses to take, and ENOSYS where it switches the call off for good.
func (st *request) sane(errno unix.Errno) unix.Errno {
	bad := errno == 0 || errno > errnoMax
	if errno == unix.ENOSYS {
		bad = st.op == abi.FuseOpen || st.op == abi.FusePoll || st.op == abi.FuseFlush
	}
	if bad {
		st.s.misuse("error reply with an unusable errno", zap.Uint32("opcode", st.op), zap.Int("errno", int(errno)))
		return unix.EIO
	}
	return errno
}

// ReplyOK answers Flush.
func (r Request) ReplyOK() bool {
	if !r.begin() {
		return false
	}
	if r.st.is(abi.FuseFlush, abi.FuseRelease) {
		r.st.s.sendError(r.st.unique, 0)
	}
	r.st.replied()
	return true
}

// is checks that the reply fits the request, and answers EIO if not.
func (st *request) is(op, or uint32) bool {
	if st.op == op || st.op == or {
		return true
	}
	st.s.misuse("reply of another kind than the request", zap.Uint32("opcode", st.op))
	st.s.sendError(st.unique, unix.EIO)
	return false
}

// ReplyWrite says that n bytes were taken, counted over the whole write().
func (r Request) ReplyWrite(n int) bool {
	if !r.begin() {
		return false
	}
	if st := r.st; st.is(abi.FuseWrite, abi.FuseWrite) {
		n -= st.base
		if n > st.size {
			st.s.misuse("write reply longer than the write")
			n = st.size
		}
		var m struct {
			_ abi.FuseOutHeader
			b abi.FuseWriteOut
		}
		m.b.Size = uint32(max(n, 0)) // earlier pieces cannot be taken back
		st.s.send(st.unique, bytesOf(&m))
	}
	r.st.replied()
	return true
}

// readInline is the longest READ reply built on the stack: 16 async events.
const readInline = 256

// ReplyRead returns data; b is free again when it returns.
func (r Request) ReplyRead(b []byte) bool {
	if !r.begin() {
		return false
	}
	if st := r.st; st.is(abi.FuseRead, abi.FuseRead) {
		if len(b) > st.size {
			st.s.misuse("read reply longer than the read")
			b = b[:st.size]
		}
		var m struct {
			h    abi.FuseOutHeader
			data [readInline]byte
		}
		msg := bytesOf(&m)
		if len(b) > readInline {
			msg = make([]byte, len(bytesOf(&m.h))+len(b))
		}
		head := len(bytesOf(&m.h))
		msg = msg[:head+copy(msg[head:], b)]
		st.s.send(st.unique, msg)
	}
	r.st.replied()
	return true
}

// ReplyPoll says which events are there now.
func (r Request) ReplyPoll(revents uint32) bool {
	var m struct {
		_ abi.FuseOutHeader
		b abi.FusePollOut
	}
	m.b.Revents = revents
	return r.reply(abi.FusePoll, bytesOf(&m))
}

// ReplyIoctl makes ioctl() return result.
func (r Request) ReplyIoctl(result int32) bool {
	var m struct {
		_ abi.FuseOutHeader
		b abi.FuseIoctlOut
	}
	m.b.Result = result
	return r.reply(abi.FuseIoctl, bytesOf(&m))
}

// reply sends msg, whose header is still empty, in answer to an op.
func (r Request) reply(op uint32, msg []byte) bool {
	if !r.begin() {
		return false
	}
	if st := r.st; st.is(op, op) {
		st.s.send(st.unique, msg)
	}
	r.st.replied()
	return true
}

// OnInterrupt has f called once if the client gets a signal while it waits: on
// another goroutine, or here and at once if the signal came already, so hold no
// lock that f takes. f does not run once the request was answered, but may be
// running while it is: use TryReplyError. False means already answered. Without
// OnInterrupt an interrupt changes nothing; in particular those that our own
// ptrace raises do not.
func (r Request) OnInterrupt(f func()) bool {
	if r.st == nil {
		return false
	}
	s := r.st.s
	s.mu.Lock()
	if !r.open() {
		s.mu.Unlock()
		return false
	}
	if r.st.interrupted.IsZero() {
		r.st.onInterrupt = f
		s.mu.Unlock()
		return true
	}
	s.mu.Unlock()
	s.callback(f)
	return true
}

// Detach says that the handler, on whose goroutine this is, is going to block:
// another worker reads from now on.
func (r Request) Detach() {
	if r.st == nil {
		return
	}
	s := r.st.s
	s.mu.Lock()
	if w := r.worker(); w != nil {
		s.detachLocked(w)
	}
	s.mu.Unlock()
}

// After has f run on this goroutine when the handler has returned. It is called
// by the handler (or by f) on its own goroutine, and counts as part of it: while
// f runs, the next request waits until the monitor or Detach calls another
// worker. False, and f does not run, if the handler has returned already.
func (r Request) After(f func()) bool {
	if r.st == nil {
		return false
	}
	s := r.st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	w := r.worker()
	if w == nil {
		return false
	}
	w.after = append(w.after, f)
	return true
}

// worker is the one that runs r's handler, nil when that has returned.
func (r Request) worker() *worker {
	if r.st.word.Load()>>2 != r.gen {
		return nil
	}
	return r.st.w
}

func putHeader(msg []byte, unique uint64, code int32) {
	binary.NativeEndian.PutUint32(msg, uint32(len(msg)))
	binary.NativeEndian.PutUint32(msg[4:], uint32(code))
	binary.NativeEndian.PutUint64(msg[8:], unique)
}

// send fills in the header at the front of msg and sends it.
func (s *Session) send(unique uint64, msg []byte) {
	putHeader(msg, unique, 0)
	s.sendRaw(msg)
}

// sendError sends a reply without a body: an error, or success for 0.
func (s *Session) sendError(unique uint64, errno unix.Errno) unix.Errno {
	var h abi.FuseOutHeader
	h.Error = -int32(errno)
	h.Unique = unique
	h.Len = uint32(len(bytesOf(&h)))
	return s.sendRaw(bytesOf(&h))
}

// sendRaw writes one message. A request that the kernel has given up (ENOENT) or
// a channel that has gone is the reader's business, not the replier's.
func (s *Session) sendRaw(msg []byte) unix.Errno {
	errno := s.ch.write(msg)
	switch errno {
	case 0, unix.ENOENT, unix.ENODEV, unix.EPERM, unix.ECONNABORTED, unix.ENOTCONN, unix.EPIPE, unix.ECONNRESET:
	default:
		s.misuse("the kernel refused a reply", zap.Error(errno))
	}
	return errno
}
