package soft

import (
	"encoding/binary"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// What the requester's half of a wire makes of answers, and of none.

// takeAnswer does a packet that answers one of q's requests; false if it is none.
func (q *QP) takeAnswer(in *inbound) bool {
	s, k := &q.s, &in.pkt
	s.mu.Lock()
	w := s.wire
	if w == nil || s.closed || s.attr.State != hca.QPRTS && s.attr.State != hca.QPSQD || !w.fromPeer(k) {
		s.mu.Unlock()
		return false
	}
	t := &w.tx
	if roce.PSNDiff(k.PSN, t.una) < 0 || roce.PSNDiff(k.PSN, t.high) >= 0 {
		s.mu.Unlock()
		return false // an old one again, or of what was never sent (§9.7.5.1.2)
	}
	switch k.Op.Operation() {
	case roce.Acknowledge:
		q.acknowledgeLocked(w, k, &in.notes)
	default:
		if k.Op.Operation() != roce.ReadRespMiddle && k.Syndrome&roce.SyndromeKind != roce.SyndromeACK {
			q.acknowledgeLocked(w, k, &in.notes)
			break
		}
		q.answeredLocked(w, k, &in.notes)
	}
	s.mu.Unlock()
	// It may have let something go on.
	q.runSend(nil, &in.waits)
	return true
}

// acknowledgeLocked is of an ACK, an RNR NAK or a NAK.
func (q *QP) acknowledgeLocked(w *wire, k *roce.Packet, n *notes) {
	t := &w.tx
	code := k.Syndrome & roce.SyndromeCode
	if k.Syndrome&roce.SyndromeKind == roce.SyndromeACK {
		q.ackedLocked(w, k.PSN, n)
		return
	}
	// A NAK acknowledges what comes before it (§9.7.5.1.1).
	if k.PSN != t.una && !q.ackedLocked(w, (k.PSN-1)&roce.PSNMask, n) {
		return
	}
	if t.base == t.begun || q.s.wire != w {
		return
	}
	switch k.Syndrome & roce.SyndromeKind {
	case roce.SyndromeRNR:
		if t.rnrLeft == 0 {
			q.failHeadLocked(hca.WCRNRRetryExcErr, n)
			return
		}
		if q.s.attr.RNRRetry != 7 { // for ever
			t.rnrLeft--
		}
		q.goBackLocked(w)
		t.lost = false
		t.tries = q.s.attr.RetryCnt // it is there
		t.rnrUntil = time.Now().Add(rnrTime(code))
		q.clockLocked(w)
	case roce.SyndromeNAK:
		switch code {
		case roce.NAKSequence:
			q.lossLocked(w)
		case roce.NAKInvalidReq:
			q.failHeadLocked(hca.WCRemInvReqErr, n)
		case roce.NAKRemoteAccess:
			q.failHeadLocked(hca.WCRemAccessErr, n)
		case roce.NAKRemoteOp:
			q.failHeadLocked(hca.WCRemOpErr, n)
		}
	}
}

// ackedLocked: the peer has all up to psn. False if it says so of a read or an atomic
// whose answer was lost: then it is asked for again.
func (q *QP) ackedLocked(w *wire, psn uint32, n *notes) bool {
	t := &w.tx
	for t.base != t.begun {
		rq := t.req(t.base)
		if roce.PSNDiff(rq.first, psn) > 0 {
			break
		}
		if rq.answered {
			q.lossLocked(w)
			return false
		}
		if roce.PSNDiff(rq.last, psn) > 0 {
			q.progressLocked(w, (psn+1)&roce.PSNMask)
			break
		}
		q.progressLocked(w, (rq.last+1)&roce.PSNMask)
		q.doneHeadLocked(w, hca.WCSuccess, n)
		if q.s.wire != w || q.s.attr.State == hca.QPErr {
			return false
		}
	}
	return true
}

// progressLocked moves una on.
func (q *QP) progressLocked(w *wire, una uint32) {
	t := &w.tx
	k := int(roce.PSNDiff(una, t.una))
	if k <= 0 {
		return
	}
	t.una = una
	if t.easing && roce.PSNDiff(una, t.eased) >= 0 {
		t.easing = false
	}
	if roce.PSNDiff(una, t.at) > 0 {
		t.at = una
	}
	done := 0
	for done < t.nreads && roce.PSNDiff(t.reads[done], una) < 0 {
		done++
	}
	copy(t.reads[:], t.reads[done:t.nreads])
	t.nreads -= done
	t.lost, t.tries, t.rnrLeft = false, q.s.attr.RetryCnt, q.s.attr.RNRRetry
	if t.window < windowMax {
		if t.slow {
			t.window = min(t.window+k, windowMax)
		} else if t.grown += k; t.grown >= t.window {
			t.grown = 0
			t.window++
		}
	}
	q.startClockLocked(w)
}

// goBackLocked has everything sent again from the oldest packet that is not
// acknowledged.
func (q *QP) goBackLocked(w *wire) {
	t := &w.tx
	t.gen++
	t.at = t.una
	t.nreads = 0
}

// lossLocked goes back once for a packet that was lost; after that the timer does.
// The network was too full, or so it looks.
func (q *QP) lossLocked(w *wire) {
	t := &w.tx
	if t.lost {
		return
	}
	t.lost = true
	q.goBackLocked(w)
	t.shrink()
	q.startClockLocked(w)
}

func (t *wireTx) shrink() {
	t.window = max(t.window/2, windowMin)
	t.slow, t.grown = false, 0
}

// congested does a congestion notification: half as much is sent at a time, at most
// once for what was on its way.
func (q *QP) congested(k *roce.Packet) bool {
	q.s.mu.Lock()
	defer q.s.mu.Unlock()
	w := q.s.wire
	if w == nil || !w.fromPeer(k) {
		return false
	}
	if t := &w.tx; !t.easing {
		t.shrink()
		t.easing, t.eased = true, t.high
	}
	return true
}

// answeredLocked does an answer with bytes: of a read, or an atomic's.
func (q *QP) answeredLocked(w *wire, k *roce.Packet, n *notes) {
	t := &w.tx
	// It acknowledges what comes before it.
	for t.base != t.begun && roce.PSNDiff(t.req(t.base).last, k.PSN) < 0 {
		if !q.ackedLocked(w, t.req(t.base).last, n) {
			return
		}
	}
	if t.base == t.begun || t.taking {
		return
	}
	rq := t.req(t.base)
	slot, sges, _ := q.s.ring.entry(0)
	atomic := k.Op.Operation() == roce.AtomicAck
	switch {
	case !rq.answered || isAtomic(slot.op) != atomic:
		q.failHeadLocked(hca.WCBadRespErr, n)
		return
	case roce.PSNDiff(k.PSN, rq.first) > 0 && k.PSN != t.una || roce.PSNDiff(k.PSN, t.una) > 0:
		q.lossLocked(w)
		return
	}
	off := uint64(uint32(roce.PSNDiff(k.PSN, rq.first))) * uint64(w.mtu)
	want, limit := min(slot.total-min(off, slot.total), uint64(w.mtu)), slot.total
	if atomic {
		want, limit = 0, atomicSize
	}
	if uint64(len(k.Payload)) != want {
		q.failHeadLocked(hca.WCBadRespErr, n)
		return
	}
	num := t.base
	x := getExec()
	defer x.put()
	x.q, x.era = q, q.era.Load()
	x.src.sges = append(x.src.sges[:0], sges...)
	data := k.Payload
	if atomic {
		data = x.small[:atomicSize]
		binary.NativeEndian.PutUint64(data, k.Orig)
	}
	if len(data) > 0 && !q.pd.ctx.free() {
		return // as good as lost: the memory holds others up already
	}
	t.taking = true
	q.s.mu.Unlock()
	ok := x.src.resolve(q.pd, hca.AccessLocalWrite, limit)
	if ok {
		x.src.skip(off)
		ok = x.src.write(data) == nil
	}
	q.s.mu.Lock()
	if q.s.wire != w || q.era.Load() != x.era && !t.taking {
		return // it was taken away
	}
	t.taking = false
	if q.s.attr.State == hca.QPErr {
		if q.s.owner == nil {
			q.flushSQLocked(n)
		}
		return
	}
	if t.base != num || t.una != k.PSN || q.era.Load() != x.era {
		return
	}
	if !ok {
		q.failHeadLocked(hca.WCLocProtErr, n)
		return
	}
	last := k.PSN == rq.last
	q.progressLocked(w, (k.PSN+1)&roce.PSNMask)
	if last {
		q.doneHeadLocked(w, hca.WCSuccess, n)
	}
}

// retransmitTime is how long the oldest packet may go unanswered; 0: for ever.
func (q *QP) retransmitTime() time.Duration {
	a := &q.s.attr
	if a.Timeout == 0 {
		return 0
	}
	d := max(transportTime(a.Timeout, 0), timerFloor)
	again := a.RetryCnt - q.s.wire.tx.tries
	return d << min(again, backOff)
}

// startClockLocked times the oldest packet anew.
func (q *QP) startClockLocked(w *wire) {
	w.tx.deadline = time.Time{}
	if d := q.retransmitTime(); d > 0 && reliable(q.typ) {
		w.tx.deadline = time.Now().Add(d)
	}
	q.clockLocked(w)
}

// clockLocked sees to it that the timer goes off when there is something to do.
func (q *QP) clockLocked(w *wire) {
	t := &w.tx
	when := t.rnrUntil
	if when.IsZero() && t.una != t.at {
		when = t.deadline
	}
	if when.IsZero() || !t.timed.IsZero() && !when.Before(t.timed) {
		return // it goes off before, and looks again
	}
	t.timed = when
	d := time.Until(when)
	if t.timer == nil {
		t.timer = time.AfterFunc(d, func() { q.onWireTimer(w) })
		return
	}
	t.timer.Reset(d)
}

// onWireTimer looks what the wire waits for.
func (q *QP) onWireTimer(w *wire) {
	var n notes
	s, t := &q.s, &w.tx
	s.mu.Lock()
	if s.wire != w || s.closed || s.attr.State != hca.QPRTS && s.attr.State != hca.QPSQD {
		s.mu.Unlock()
		return
	}
	t.timed = time.Time{}
	now := time.Now()
	switch {
	case !t.rnrUntil.IsZero():
		if !now.Before(t.rnrUntil) {
			q.dev.pool.few.sched(q)
		} else {
			q.clockLocked(w)
		}
	case t.una == t.at || t.deadline.IsZero():
	case now.Before(t.deadline):
		q.clockLocked(w)
	case t.tries == 0:
		q.failHeadLocked(hca.WCRetryExcErr, &n)
	default:
		t.tries--
		q.goBackLocked(w)
		t.shrink()
		t.lost = true
		q.startClockLocked(w)
		q.dev.pool.few.sched(q)
	}
	s.mu.Unlock()
	n.later(q.dev)
}
