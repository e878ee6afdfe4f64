package main

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/dispatch"
)

// node is a dispatch.Device behind a cuse session.
type node struct {
	dev *dispatch.Device
	end func() // ends the session

	// mu guards the members below. Leaf.
	mu    sync.Mutex
	files int  // open, event files included, and opens under way
	going bool // end is called when the last has gone
	ended bool
}

// Open implements cuse.Handler.
func (n *node) Open(r cuse.Request, _ uint32) (cuse.File, error) {
	n.count(1)
	q := take(r)
	defer q.drop(2) // an open is answered by the session
	h, err := n.dev.Open(q)
	if err != nil {
		n.count(-1)
		return nil, err
	}
	return &file{h, n}, nil
}

// retire ends the session as soon as no file is open.
func (n *node) retire() {
	n.mu.Lock()
	n.going = true
	n.mu.Unlock()
	n.count(0)
}

// count adds to the files. The session is ended on a goroutine of its own, since
// that waits for the handler that took away the last.
func (n *node) count(by int) {
	n.mu.Lock()
	n.files += by
	end := n.going && !n.ended && n.files == 0
	n.ended = n.ended || end
	n.mu.Unlock()
	if end {
		go n.end()
	}
}

// file is a dispatch.Handle as a cuse.File.
type file struct {
	h dispatch.Handle
	n *node
}

func (f *file) Write(r cuse.Request, data []byte) {
	q := take(r)
	defer q.drop(1)
	f.h.Write(q, data)
}

func (f *file) Read(r cuse.Request, size int) {
	q := take(r)
	defer q.drop(1)
	f.h.Read(q, size)
}

func (f *file) Poll(r cuse.Request, p cuse.PollArgs) {
	q := take(r)
	defer q.drop(1)
	f.h.Poll(q, p.Kh, p.ScheduleNotify)
}

// Ioctl: ENOTTY tells libibverbs that there is no ioctl ABI at all, so that it
// falls back to write() for good (cmd_fallback.c).
func (f *file) Ioctl(r cuse.Request, _ cuse.IoctlArgs) { r.ReplyError(unix.ENOTTY) }
func (f *file) Flush(r cuse.Request)                   { r.ReplyOK() }
func (f *file) Release(uint32)                         { f.h.Release(); f.n.count(-1) }
func (f *file) WholeSize(first []byte) int             { return f.h.WholeSize(first) }

// request is a cuse.Request as a dispatch.Request: pooled, so that the
// interface costs no allocation per command. It goes back once it has been
// answered and the handler has returned.
type request struct {
	r    cuse.Request
	refs atomic.Int32
}

var requests = sync.Pool{New: func() any { return new(request) }}

func take(r cuse.Request) *request {
	q := requests.Get().(*request)
	q.r = r
	q.refs.Store(2)
	return q
}

func (q *request) drop(n int32) {
	if q.refs.Add(-n) == 0 {
		q.r = cuse.Request{}
		requests.Put(q)
	}
}

func (q *request) TID() int             { return int(q.r.TID()) }
func (q *request) UID() uint32          { return q.r.UID() }
func (q *request) GID() uint32          { return q.r.GID() }
func (q *request) FileFlags() uint32    { return q.r.FileFlags() }
func (q *request) Pending() bool        { return q.r.Pending() }
func (q *request) Detach()              { q.r.Detach() }
func (q *request) OnInterrupt(f func()) { q.r.OnInterrupt(f) }

func (q *request) ReplyError(e unix.Errno)  { q.r.ReplyError(e); q.drop(1) }
func (q *request) ReplyWrite(n int)         { q.r.ReplyWrite(n); q.drop(1) }
func (q *request) ReplyRead(b []byte)       { q.r.ReplyRead(b); q.drop(1) }
func (q *request) ReplyPoll(revents uint32) { q.r.ReplyPoll(revents); q.drop(1) }
