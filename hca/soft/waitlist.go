package soft

import (
	"sync"
	"sync/atomic"
)

// waitList holds the queue pairs parked for one reason, oldest first. A queue
// pair is in one list at most.
//
// Whoever frees what is waited for pops one waiter and wakes it. That waiter may
// have no use for it any more (its queue pair was reset), so after its Run it
// passes the wake on if ready says that there is still something to have.
type waitList struct {
	ready func() bool  // set once; called under no lock
	n     atomic.Int32 // length, read without mu by those who look for waiters

	// mu guards the links (QP.waitPrev, waitNext) of the list's members. Leaf.
	mu         sync.Mutex
	head, tail *QP
}

// add appends q, after taking it out of whatever list it was in.
func (l *waitList) add(q *QP) {
	q.unlink()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !q.waitIn.CompareAndSwap(nil, l) {
		return // a stale runner of q was faster; its list or q's timer wakes q
	}
	q.waitPrev, q.waitNext = l.tail, nil
	if l.tail == nil {
		l.head = q
	} else {
		l.tail.waitNext = q
	}
	l.tail = q
	l.n.Add(1)
}

func (l *waitList) removeLocked(q *QP) {
	if q.waitPrev == nil {
		l.head = q.waitNext
	} else {
		q.waitPrev.waitNext = q.waitNext
	}
	if q.waitNext == nil {
		l.tail = q.waitPrev
	} else {
		q.waitNext.waitPrev = q.waitPrev
	}
	q.waitPrev, q.waitNext = nil, nil
	l.n.Add(-1)
	q.waitIn.Store(nil)
}

// pop takes the oldest, nil if there is none.
func (l *waitList) pop() *QP {
	if l.n.Load() == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	q := l.head
	if q != nil {
		l.removeLocked(q)
		q.wokenBy.Store(l)
	}
	return q
}

// passOn is the end of a Run that a waitList may have caused.
func (q *QP) passOn() {
	if q.wokenBy.Load() == nil {
		return
	}
	l := q.wokenBy.Swap(nil)
	if l == nil || l.n.Load() == 0 || !l.ready() {
		return
	}
	if o := l.pop(); o != nil {
		o.wake()
	}
}

// unlink takes q out of the list it is in, if any.
func (q *QP) unlink() {
	for {
		l := q.waitIn.Load()
		if l == nil {
			return
		}
		l.mu.Lock()
		if q.waitIn.Load() == l {
			l.removeLocked(q)
		}
		l.mu.Unlock()
	}
}
