package soft

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/uverbsd/uverbsd/hca"
)

// event is one callback to make: an asynchronous event of some object, or the
// delivery of a CQ whose completion a verb made.
type event struct {
	guard *guard
	cq    *CQ
	qp    hca.QPHandler
	srq   hca.SRQHandler
	cqh   hca.CQHandler
	port  hca.Notifier
	num   uint8
	ev    hca.EventType
}

// events delivers callbacks in order, one at a time: by Run, which drains what
// is there, and by one goroutine for verbs that are not followed by a Run.
type events struct {
	pending atomic.Int32 // len(q), read without mu by drain's fast path

	// mu guards what is below. Leaf.
	mu       sync.Mutex
	cond     *sync.Cond
	q        []event
	draining bool
	stop     bool
	done     chan struct{}
}

func (e *events) start() {
	e.cond = sync.NewCond(&e.mu)
	e.done = make(chan struct{})
	go func() {
		defer close(e.done)
		for {
			e.mu.Lock()
			for !e.stop && (len(e.q) == 0 || e.draining) {
				e.cond.Wait()
			}
			stop := e.stop
			e.mu.Unlock()
			if stop {
				return
			}
			e.drain()
		}
	}()
}

// close stops the goroutine; what is queued is dropped.
func (e *events) close() {
	e.mu.Lock()
	e.stop = true
	e.q = nil
	e.cond.Broadcast()
	e.mu.Unlock()
	<-e.done
}

// add queues a callback. It may be called under any lock.
func (e *events) add(ev event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stop {
		return
	}
	e.q = append(e.q, ev)
	e.pending.Add(1)
	e.cond.Signal()
}

// drain makes the queued callbacks, unless somebody is at it: then he makes them.
func (e *events) drain() {
	if e.pending.Load() == 0 {
		return
	}
	e.mu.Lock()
	if e.draining {
		e.mu.Unlock()
		return
	}
	e.draining = true
	for len(e.q) > 0 {
		q := e.q
		e.q = nil
		e.pending.Store(0)
		e.mu.Unlock()
		for i := range q {
			q[i].deliver()
		}
		e.mu.Lock()
	}
	e.draining = false
	e.cond.Signal()
	e.mu.Unlock()
}

func (v *event) deliver() {
	if v.cq != nil {
		v.cq.tell()
		v.cq.wake(false)
		return
	}
	if !v.guard.enter() {
		return
	}
	defer v.guard.exit()
	switch {
	case v.port != nil:
		v.port.PortEvent(v.ev, v.num)
	case v.qp != nil:
		v.qp.QPEvent(v.ev)
	case v.srq != nil:
		v.srq.SRQEvent(v.ev)
	case v.cqh != nil:
		v.cqh.CQEvent(v.ev)
	}
}

// guard keeps callbacks off an object that was closed.
type guard struct {
	// mu guards the rest. Leaf.
	mu     sync.Mutex
	inside int
	closed bool
}

func (g *guard) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.inside++
	return true
}

func (g *guard) exit() {
	g.mu.Lock()
	g.inside--
	g.mu.Unlock()
}

// close lets no more callbacks in and waits, within stuckWait, for those inside.
func (g *guard) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	waitUntil(func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.inside == 0
	})
}

// waitUntil waits for ok, at most stuckWait. Only where a verb may sleep.
func waitUntil(ok func() bool) bool {
	if ok() {
		return true
	}
	const step = 50 * time.Microsecond
	for end := time.Now().Add(stuckWait); time.Now().Before(end); {
		time.Sleep(step)
		if ok() {
			return true
		}
	}
	return ok()
}
