package dispatch

import (
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"golang.org/x/sys/unix"
)

// MaxEvents bounds the unread events of one event file, 32 bytes each. The
// kernel's bound is memory; a client with this many unread has stopped reading.
const MaxEvents = 1 << 14

// Bits of poll(2) that x/sys lacks on Linux (asm-generic/poll.h).
const (
	pollRdNorm = 0x40
	pollWrNorm = 0x100
)

type eventKind bool

const (
	asyncEvents eventKind = true
	compEvents  eventKind = false
)

// eventSource counts one object's events of one kind. The count is of events
// that were read: libibverbs waits in destroy until it has acknowledged as many
// (ib_uverbs_event_read).
type eventSource struct {
	read   atomic.Uint32
	unread int // in the queue; guarded by eventFile.mu
}

func (s *eventSource) count() uint32 { return s.read.Load() }

type event struct {
	element uint64
	typ     uint32
	src     *eventSource
}

// eventFile is the file behind an async_fd or a completion channel: struct
// ib_uverbs_event_queue and the file around it.
type eventFile struct {
	f       *File
	kind    eventKind
	charged atomic.Bool // a completion channel that its context and user pay for

	// mu guards the members below. Leaf.
	mu      sync.Mutex
	queue   []event
	waiting []*waitingRead // oldest first
	kh      uint64
	notify  bool // a poller wants to know
	open    bool // the client has its descriptor
	closed  bool // and has closed it, or its context is gone
	gone    bool // the context is gone: readers see EIO
	last    bool // the device is gone: no event comes any more
}

// waitingRead is a read() that waits for an event.
type waitingRead struct {
	r           Request
	interrupted bool // guarded by eventFile.mu
}

func newEventFile(f *File, k eventKind) *eventFile { return &eventFile{f: f, kind: k} }

// charge counts a completion channel; ENOMEM. uncharge takes that back, once.
func (e *eventFile) charge() error {
	if err := e.f.take(kindChannel, objectBytes); err != nil {
		return err
	}
	e.charged.Store(true)
	return nil
}

func (e *eventFile) uncharge() {
	if e.charged.Swap(false) {
		e.f.give(kindChannel, objectBytes)
	}
}

func (e *eventFile) opened() {
	e.mu.Lock()
	e.open = true
	e.mu.Unlock()
}

func (e *eventFile) isOpen() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.open
}

func (e *eventFile) isClosed() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.closed
}

func (e *eventFile) encode(ev event, b []byte) int {
	if e.kind == asyncEvents {
		d := abi.AsyncEvent{Element: ev.element, EventType: ev.typ}
		return copy(b, bytesOf(&d))
	}
	d := abi.CompEvent{CQHandle: ev.element}
	return copy(b, bytesOf(&d))
}

func (e *eventFile) recordSize() int {
	if e.kind == asyncEvents {
		return sizeOf[abi.AsyncEvent]()
	}
	return sizeOf[abi.CompEvent]()
}

// push queues an event and wakes whoever waits. Never blocks.
func (e *eventFile) push(element uint64, typ uint32, src *eventSource) {
	e.mu.Lock()
	if e.closed || !e.open || e.last || len(e.queue) >= MaxEvents {
		e.mu.Unlock()
		return
	}
	if len(e.waiting) == 0 && e.f.takeQueue(eventBytes) != nil {
		e.mu.Unlock()
		return // as the kernel without memory (ib_uverbs_async_handler)
	}
	e.pushLocked(event{element, typ, src})
}

// pushLast is push of an event that is never lost: over every bound, and nothing
// comes after it.
func (e *eventFile) pushLast(element uint64, typ uint32) {
	e.mu.Lock()
	if e.closed || !e.open || e.last {
		e.mu.Unlock()
		return
	}
	e.last = true
	if len(e.waiting) == 0 {
		e.f.forceQueue(eventBytes)
	}
	e.pushLocked(event{element: element, typ: typ})
}

// pushLocked queues a paid event, or gives it to who waits, who costs nothing. It
// unlocks.
func (e *eventFile) pushLocked(ev event) {
	if len(e.waiting) > 0 {
		r := e.waiting[0].r
		e.waiting = e.waiting[1:]
		e.takeLocked(ev)
		e.mu.Unlock()
		e.answer(r, ev)
		return
	}
	e.queue = append(e.queue, ev)
	if ev.src != nil {
		ev.src.unread++
	}
	kh, notify := e.kh, e.notify
	e.notify = false
	e.mu.Unlock()
	if notify {
		e.f.dev.cfg.Notify(kh)
	}
}

// popLocked takes the oldest event off a queue that has one.
func (e *eventFile) popLocked() event {
	ev := e.queue[0]
	e.giveLocked(1)
	if ev.src != nil {
		ev.src.unread--
	}
	if e.queue = e.queue[1:]; len(e.queue) == 0 {
		e.queue = nil // lets the array go
	}
	e.takeLocked(ev)
	return ev
}

// giveLocked gives back what n unread events cost.
func (e *eventFile) giveLocked(n int) { e.f.giveQueue(uint64(n) * eventBytes) }

// takeLocked counts an event as read.
func (e *eventFile) takeLocked(ev event) {
	if ev.src != nil {
		ev.src.read.Add(1)
	}
}

func (e *eventFile) answer(r Request, ev event) {
	var b [16]byte
	r.ReplyRead(b[:e.encode(ev, b[:])])
}

// purge takes an object's unread events away.
func (e *eventFile) purge(src *eventSource) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if src.unread == 0 {
		return
	}
	src.unread = 0
	kept := e.queue[:0]
	for _, ev := range e.queue {
		if ev.src != src {
			kept = append(kept, ev)
		}
	}
	e.giveLocked(len(e.queue) - len(kept))
	clear(e.queue[len(kept):])
	if e.queue = kept; len(kept) == 0 {
		e.queue = nil // lets the array go
	}
}

// detach ends the file: its context is gone. Readers that wait get EIO; what is
// unread may still be read if it is kept.
func (e *eventFile) detach(keep bool) {
	e.uncharge()
	e.mu.Lock()
	e.gone = true
	if !keep || e.closed {
		e.giveLocked(len(e.queue))
		e.queue = nil
	}
	e.closed = true
	waiting := e.waiting
	e.waiting = nil
	kh, notify := e.kh, e.notify
	e.notify = false
	e.mu.Unlock()
	for _, w := range waiting {
		w.r.ReplyError(unix.EIO)
	}
	if notify {
		e.f.dev.cfg.Notify(kh)
	}
}

// Write of an event file: uverbs_event_fops has no write.
func (e *eventFile) Write(r Request, _ []byte) { r.ReplyError(unix.EINVAL) }

// Read gives one event (ib_uverbs_event_read): EINVAL for a buffer too small
// for one, EAGAIN with O_NONBLOCK when there is none, EIO when the context is
// gone, EINTR on a signal.
func (e *eventFile) Read(r Request, size int) {
	e.mu.Lock()
	switch {
	case len(e.queue) > 0 && size < e.recordSize():
		e.mu.Unlock()
		r.ReplyError(unix.EINVAL)
	case len(e.queue) > 0:
		ev := e.popLocked()
		e.mu.Unlock()
		e.answer(r, ev)
	case e.gone:
		e.mu.Unlock()
		r.ReplyError(unix.EIO)
	case r.FileFlags()&unix.O_NONBLOCK != 0:
		e.mu.Unlock()
		r.ReplyError(unix.EAGAIN)
	case size < e.recordSize():
		// The kernel would wait and then say so; nothing is gained by waiting.
		e.mu.Unlock()
		r.ReplyError(unix.EINVAL)
	default:
		e.mu.Unlock()
		e.wait(r)
	}
}

// wait keeps r until there is an event for it.
func (e *eventFile) wait(r Request) {
	w := &waitingRead{r: r}
	// First, since r must not be touched once it may be answered; a signal that
	// comes before r is in the list leaves its mark in w.
	r.OnInterrupt(func() { e.interrupted(w) })
	e.mu.Lock()
	switch {
	case w.interrupted:
		e.mu.Unlock()
		r.ReplyError(unix.EINTR)
	case e.gone:
		e.mu.Unlock()
		r.ReplyError(unix.EIO)
	case len(e.queue) > 0:
		ev := e.popLocked()
		e.mu.Unlock()
		e.answer(r, ev)
	default:
		e.waiting = append(e.waiting, w)
		e.mu.Unlock()
	}
}

// interrupted answers a read whose thread got a signal. The kernel's
// ERESTARTSYS cannot be sent through FUSE; EINTR is what it becomes without
// SA_RESTART.
func (e *eventFile) interrupted(w *waitingRead) {
	e.mu.Lock()
	w.interrupted = true
	for i, x := range e.waiting {
		if x == w {
			e.waiting = append(e.waiting[:i], e.waiting[i+1:]...)
			e.mu.Unlock()
			w.r.ReplyError(unix.EINTR)
			return
		}
	}
	e.mu.Unlock()
}

// Poll says POLLIN when an event waits, else POLLERR when the context is gone
// (ib_uverbs_event_poll). Who wants to be notified is told of the next event even
// if one waits already: an edge-triggered epoll does not ask again before it was
// told.
func (e *eventFile) Poll(r Request, kh uint64, notify bool) {
	e.mu.Lock()
	var ready uint32
	if len(e.queue) > 0 {
		ready = unix.POLLIN | pollRdNorm
	}
	if ready == 0 && e.gone {
		ready = unix.POLLERR
	}
	e.kh = kh
	if notify {
		e.notify = true
	}
	e.mu.Unlock()
	r.ReplyPoll(ready)
}

// WholeSize: an event file takes no commands.
func (e *eventFile) WholeSize(first []byte) int { return len(first) }

// Release is the last close of the descriptor.
func (e *eventFile) Release() {
	e.uncharge()
	e.mu.Lock()
	e.closed = true
	e.giveLocked(len(e.queue))
	e.queue = nil
	e.mu.Unlock()
	e.f.dropChannel(e)
}

var _ hca.Notifier = (*ucontext)(nil)
