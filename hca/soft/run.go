package soft

import (
	"sync"
	"time"

	"github.com/uverbsd/uverbsd/hca"
)

// exec is a runner's private copy of the work request it is at: once it is
// taken, nothing in the QP's rings is looked at.
type exec struct {
	q   *QP
	era uint32 // q.era when the request was taken
	sendSlot
	inl    [maxInline]byte
	dest   hca.AHAttr
	qpn    uint32 // connected: destination
	ownKey uint32 // UD: the sender's own Q_Key
	src    vec
	length uint64

	peer  *QP
	pera  uint32 // peer.era when it was claimed
	minR  uint8  // peer's min_rnr_timer
	polls bool   // needRecv: the peer's receives come without a post
	srq   *SRQ   // XRC: what the request names, while it is executed
	recv  recvSlot
	rsge  [maxSGE]hca.SGE
	dst   vec
	wc    hca.WC // of the receive
	done  uint64 // payload bytes this Run has moved
	moved uint64 // of the message at hand, since its last turn
	small [smallSize]byte
	notes notes
	// hold is the place in the pool of the goroutine that runs x, nil if it has
	// none; own is one taken for a large message.
	hold   *holder
	own    holder
	worker bool // it is a worker
	// targets are UD queue pairs that have something in their inq.
	targets []*QP
	plan    plan // over a wire: what of the request is to be sent
	ear     *ear // of whoever listens to the request; else nil
}

var execs = sync.Pool{New: func() any { return new(exec) }}

func getExec() *exec { return execs.Get().(*exec) }

// put gives x back without keeping what it points to alive.
func (x *exec) put() {
	x.q, x.peer, x.ah, x.hold = nil, nil, nil, nil
	x.src.clear()
	x.dst.clear()
	clear(x.targets)
	x.targets = x.targets[:0]
	x.done = 0
	execs.Put(x)
}

// verdict is how the execution of a request ended.
type verdict uint8

const (
	finished  verdict = iota // with a status
	needRecv                 // the peer has no receive; x is parked with it
	needPeer                 // the peer is not there, or not ready; parked in the fabric
	needPlace                // a gate is full or an atomic is under way; parked there
)

// Run does what is queued on the QP and what its receives allow its peers to
// do. See hca.QP.
func (q *QP) Run() { q.run(nil) }

// run is Run on a goroutine that has place h in the pool, or none.
func (q *QP) run(h *holder) {
	var w notes
	q.kickReceivers(h, &w)
	if q.srq != nil && q.srq.mapped {
		q.srq.kick(h, &w) // nobody else would
	}
	q.runSend(h, &w)
	if q.typ == hca.QPTypeUD {
		q.runInbound(&w)
	}
	if q.dev.link != nil {
		q.wireAnswers()
	}
	q.passOn()
	q.dev.events.drain()
	w.wake()
}

// kickReceivers wakes as many waiting senders as there are receives.
func (q *QP) kickReceivers(h *holder, w *notes) {
	if q.r.waiters.n.Load() == 0 {
		return
	}
	for n := q.posted(); n > 0; n-- {
		o := q.r.waiters.pop()
		if o == nil {
			return
		}
		o.wakeFor(q.pd.ctx, h, w)
	}
}

// wake lets q's head try again, on a worker.
func (q *QP) wake() {
	q.woken.Store(true)
	q.dev.pool.few.sched(q)
}

// Wake is loop.Sleeper's: the peer has come.
func (q *QP) Wake() { q.wake() }

// wakeFor is wake for a goroutine that belongs to ctx. A QP of the same context
// runs on it at once; another's could block it in that other's memory.
func (q *QP) wakeFor(ctx *UContext, h *holder, w *notes) {
	if q.pd.ctx != ctx {
		q.wake()
		return
	}
	q.woken.Store(true)
	q.runSend(h, w)
	q.passOn()
}

// runSend runs the send queue if nobody does. The waiters to be woken are added
// to w: a waiter can hold up who wakes it, so that must be the last that he does.
func (q *QP) runSend(h *holder, w *notes) {
	var x *exec
	s := &q.s
	s.mu.Lock()
	if s.wire != nil {
		s.mu.Unlock()
		q.runWire(h, w)
		return
	}
	for n := 0; q.runnableLocked(); n++ {
		if x == nil {
			x = getExec()
			x.hold, x.worker = h, h != nil
		}
		if n >= runBatchWRs || x.done >= runBatchBytes || h == nil && x.own.lane == nil && x.done >= postBatchBytes {
			q.laneLocked().sched(q)
			break
		}
		if !x.placeLocked(q) {
			q.dev.pool.bulk.sched(q)
			break
		}
		x.takeLocked(q)
		s.mu.Unlock()
		v, st := x.perform()
		x.hold.beat()
		s.mu.Lock()
		if s.owner != x { // taken away while the copy was stuck
			if v == needPeer && !s.absent {
				q.dev.fabric.Unpark(x.qpn, q)
			}
			break
		}
		s.owner = nil
		more := q.settleHeadLocked(x, v, st)
		if !x.notes.empty() || len(x.targets) > 0 {
			// The token is free: a datagram's receiver that blocks must not stop
			// the queue.
			if len(x.targets) > 0 && more && q.pendingLocked() {
				q.dev.pool.few.sched(q)
			}
			s.mu.Unlock()
			x.notes.tell(w)
			x.deliverTargets(w)
			s.mu.Lock()
		}
		if !more {
			break
		}
	}
	s.mu.Unlock()
	if x == nil {
		return
	}
	x.notes.tell(w)
	if l := x.own.lane; l != nil {
		l.leave(&x.own)
	}
	x.put()
}

// laneLocked is the lane that the head belongs into.
func (q *QP) laneLocked() *lane {
	if w, _, _ := q.s.ring.front(); w.total >= bulkMin {
		return &q.dev.pool.bulk
	}
	return &q.dev.pool.few
}

// pausesLocked: is the head one that must be able to pause?
func (q *QP) pausesLocked() bool {
	w, _, _ := q.s.ring.front()
	return w.total >= inlineMax
}

// placeLocked takes the place that q's head needs, if x has it not; false when
// there is none.
func (x *exec) placeLocked(q *QP) bool {
	l := q.laneLocked()
	if l == &q.dev.pool.few || x.hold != nil && x.hold.lane == l && (x.hold != &x.own || !q.pausesLocked()) {
		return true
	}
	if q.pausesLocked() || !l.enter(&x.own) {
		return false
	}
	x.hold = &x.own
	return true
}

// runnableLocked: is there a head to work on, and nobody at it?
func (q *QP) runnableLocked() bool {
	s := &q.s
	if s.owner != nil || s.closed || !q.pendingLocked() {
		return false
	}
	if s.parked {
		if !q.woken.Load() {
			return false
		}
		if s.wait == waitRNR {
			// A receive that comes early does not shorten the wait that the
			// responder asked for (IBTA 1.4 §9.7.5.2.8).
			if d := time.Until(s.waitUntil); d > 0 {
				q.armLocked(d)
				return false
			}
		}
		q.woken.Store(false)
		s.parked = false
		q.unparkLocked()
	}
	return s.attr.State == hca.QPRTS || s.attr.State == hca.QPSQD && s.started
}

// unparkLocked takes the QP out of the fabric's list of those who wait for a peer.
func (q *QP) unparkLocked() {
	if q.s.absent {
		q.s.absent = false
		q.dev.fabric.Unpark(q.s.attr.DestQPN, q)
	}
}

// takeLocked takes the token and copies the head.
func (x *exec) takeLocked(q *QP) {
	s := &q.s
	s.owner, s.started = x, true
	q.woken.Store(false)
	w, sges, inline := s.ring.front()
	x.q, x.era, x.peer = q, q.era.Load(), nil
	x.sendSlot = *w
	x.moved = 0
	x.src.sges = append(x.src.sges[:0], sges...)
	copy(x.inl[:], inline)
	x.dest, x.qpn, x.ownKey = s.attr.AH, s.attr.DestQPN, s.attr.QKey
	if w.ah != nil {
		x.dest, x.qpn = w.ah.attr, w.qpn
	}
}

// settleHeadLocked does to the head what the verdict says; false when there is
// nothing more to do now.
func (q *QP) settleHeadLocked(x *exec, v verdict, st hca.WCStatus) bool {
	s := &q.s
	if v == needPeer {
		s.absent = true
	}
	switch state := s.attr.State; {
	case s.closed || state == hca.QPReset:
		q.unlink()
		q.unparkLocked()
		return false
	case state == hca.QPErr:
		q.unlink()
		q.unparkLocked()
		if v == finished {
			q.completeLocked(x, st)
		}
		q.flushSQLocked(&x.notes)
		return false
	}
	if v != finished {
		st = q.parkLocked(x, v)
		if st == hca.WCSuccess {
			return false
		}
	}
	s.wait, s.rnrLeft = waitNone, s.attr.RNRRetry
	ok := q.completeLocked(x, st)
	switch {
	case !ok:
		q.event(hca.EventQPFatal)
		q.errLocked(&x.notes)
		return false
	case st != hca.WCSuccess && reliable(q.typ):
		q.errLocked(&x.notes)
		return false
	case st != hca.WCSuccess:
		q.sqeLocked(&x.notes)
		return false
	}
	q.drainedLocked()
	return true
}

// completeLocked takes the head out and makes its completion, if it has one;
// false if the CQ is overrun.
func (q *QP) completeLocked(x *exec, st hca.WCStatus) bool {
	s := &q.s
	s.ring.drop()
	s.started = false
	if st == hca.WCSuccess {
		if !isLocal(x.op) {
			s.count.txBytes += x.length
			s.count.txPkts += packets(x.length)
		}
		if !q.sigAll && x.flags&hca.SendSignaled == 0 {
			return true
		}
	}
	return q.pushSend(x.id, x.op, st, uint32(x.length), &x.notes)
}

// parkLocked leaves the head for later. It returns the status to complete it
// with when its time or its retries are over, else WCSuccess.
func (q *QP) parkLocked(x *exec, v verdict) hca.WCStatus {
	s := &q.s
	switch v {
	case needRecv:
		forEver := s.attr.RNRRetry == 7
		if !forEver && s.rnrLeft == 0 {
			q.unlink()
			return hca.WCRNRRetryExcErr
		}
		d, now := rnrTime(x.minR), time.Now()
		if s.wait != waitRNR {
			s.waitSince = now
		}
		s.wait, s.waitUntil = waitRNR, now.Add(d)
		switch {
		case !forEver:
			s.rnrLeft--
		case x.polls:
			d = max(d, rnrLookMin, min(now.Sub(s.waitSince)/rnrLookShare, rnrLookMax))
		default: // the receive that comes wakes it, now or when the wait is over
			d = 0
		}
		if d > 0 {
			q.armLocked(d)
		}
	case needPeer:
		if s.attr.Timeout == 0 { // for ever
			s.wait = waitPeer
			break
		}
		now := time.Now()
		if s.wait != waitPeer {
			s.wait, s.waitUntil = waitPeer, now.Add(transportTime(s.attr.Timeout, s.attr.RetryCnt))
		}
		if !now.Before(s.waitUntil) {
			q.unparkLocked()
			return hca.WCRetryExcErr
		}
		q.armLocked(s.waitUntil.Sub(now))
	}
	s.parked = true
	if q.woken.Load() {
		// Woken between the look and here: there is a Run on its way, or it has
		// found the token taken and gone.
		q.dev.pool.few.sched(q)
	}
	return hca.WCSuccess
}

func (q *QP) armLocked(d time.Duration) {
	if q.s.timer == nil {
		q.s.timer = time.AfterFunc(d, q.onTimer)
		return
	}
	q.s.timer.Reset(d)
}

// onTimer wakes the head when its wait is over. A timer that was set anew
// meanwhile comes again.
func (q *QP) onTimer() {
	q.s.mu.Lock()
	due := q.s.parked && !q.s.closed && !time.Now().Before(q.s.waitUntil)
	q.s.mu.Unlock()
	if due {
		q.wake()
	}
}
