package soft

import (
	"fmt"
	"time"

	"github.com/uverbsd/uverbsd/hca"
)

// Path migration states (enum ib_mig_state).
const (
	migMigrated = 0
	migRearm    = 1
	migArmed    = 2
)

// qpAccess is what a QP's access flags may hold: programs hand it a region's,
// also those that say nothing to a QP (ib_modify_qp looks at none of them).
const qpAccess = hca.AccessKnown | hca.AccessOptionalRange

// Modify checks everything, then changes what m names; EINVAL, and nothing has
// changed. After a move to ERR everything is flushed, after one to RESET
// nothing is left; both wait, within stuckWait, for copies under way.
func (q *QP) Modify(a *hca.QPAttr, m hca.QPAttrMask) error {
	q.modMu.Lock()
	defer q.modMu.Unlock()
	var n notes
	q.s.mu.Lock()
	from := q.s.attr.State
	to := from
	if m&hca.QPMaskState != 0 {
		to = a.State
	}
	if err := q.checkModify(from, to, a, m); err != nil {
		q.s.mu.Unlock()
		return fmt.Errorf("modify qp %#x: %w", q.num, err)
	}
	switch {
	case m&hca.QPMaskState == 0:
		q.setAttrsLocked(a, m)
	case to == hca.QPReset:
		q.resetLocked()
	case to == hca.QPErr:
		q.errLocked(&n)
	default:
		q.setAttrsLocked(a, m)
		q.enterLocked(from, to, m&mNotify != 0 && a.EnSQDAsyncNotify)
		if from == hca.QPRTR && to == hca.QPRTS {
			q.startWireLocked()
		}
	}
	q.s.mu.Unlock()
	if to == hca.QPErr {
		q.flushLate(&n)
	}
	if to == hca.QPReset || to == hca.QPErr {
		q.settle()
		q.wakeWaiters()
	}
	n.later(q.dev)
	if to == hca.QPRTR || to == hca.QPRTS {
		q.dev.fabric.Announce(q.num)
	}
	return nil
}

// checkModify is ib_modify_qp_is_ok and rvt_modify_qp's checks. Unlike them it
// does not believe a current state that is not the real one.
func (q *QP) checkModify(from, to hca.QPState, a *hca.QPAttr, m hca.QPAttrMask) error {
	dev := &q.dev.attr
	bad := func(what string, v any) error { return fmt.Errorf("%s %v: %w", what, v, einval) }
	switch {
	case q.s.closed:
		return bad("closed", q.num)
	case m&hca.QPMaskCurState != 0 && (a.CurState != from || from < hca.QPRTR || from > hca.QPSQE):
		return bad("current state", a.CurState)
	case !moveOK(from, to, q.typ, m):
		return fmt.Errorf("from state %d to %d with attributes %#x: %w", from, to, uint32(m), einval)
	case m&hca.QPMaskState != 0 && from == hca.QPSQD && q.s.started && to != hca.QPErr && to != hca.QPReset:
		return bad("draining, state", to)
	case m&mPort != 0 && a.Port != physPort:
		return bad("port", a.Port)
	case m&mPKey != 0 && int(a.PKeyIndex) >= dev.PKeyTableLen:
		return bad("pkey index", a.PKeyIndex)
	case m&mAccess != 0 && a.Access&^qpAccess != 0:
		return bad("access", a.Access)
	case m&mMTU != 0 && (a.PathMTU.Bytes() == 0 || a.PathMTU > mtu4096):
		return bad("path MTU", a.PathMTU)
	case m&mMTU != 0 && q.dev.link != nil && a.PathMTU.Bytes() > q.dev.link.State().MTU: // rxe_qp_chk_attr
		return bad("path MTU over the link's,", a.PathMTU)
	case m&mTmo != 0 && a.Timeout > 31:
		return bad("timeout", a.Timeout)
	case m&mRetry != 0 && a.RetryCnt > 7:
		return bad("retry count", a.RetryCnt)
	case m&mRNR != 0 && a.RNRRetry > 7:
		return bad("RNR retry", a.RNRRetry)
	case m&mMinRNR != 0 && a.MinRNRTimer > 31:
		return bad("min RNR timer", a.MinRNRTimer)
	case m&mRd != 0 && uint32(a.MaxRdAtomic) > dev.MaxQPInitRd:
		return bad("max_rd_atomic", a.MaxRdAtomic)
	case m&mDestRd != 0 && uint32(a.MaxDestRdAtomic) > dev.MaxQPRdAtom:
		return bad("max_dest_rd_atomic", a.MaxDestRdAtomic)
	case m&mQPN != 0 && a.DestQPN > numMask:
		return bad("destination QPN", a.DestQPN)
	case m&mAlt != 0 && (a.AltPort != physPort || int(a.AltPKeyIndex) >= dev.PKeyTableLen || a.AltTimeout > 31):
		return bad("alternate path on port", a.AltPort)
	case m&mAlt != 0 && q.dev.ethernet(): // path migration is InfiniBand's (_ib_modify_qp)
		return bad("alternate path on", q.dev.fabric.Link())
	case m&mMig != 0 && !q.migOK(to, a.PathMigState):
		return bad("path migration state", a.PathMigState)
	}
	if m&mAV != 0 {
		if err := q.dev.checkAddress(&a.AH, false); err != nil {
			return err
		}
	}
	if m&mAlt != 0 {
		if err := q.dev.checkAddress(&a.AltAH, false); err != nil {
			return fmt.Errorf("alternate %w", err)
		}
	}
	return nil
}

// migOK is rvt_modify_qp's rule: REARM from anything but ARMED, into RTS;
// MIGRATED from anything but REARM, into RTS or SQD; ARMED is not for clients.
func (q *QP) migOK(to hca.QPState, mig uint8) bool {
	switch mig {
	case migRearm:
		return q.s.attr.PathMigState != migArmed && to == hca.QPRTS
	case migMigrated:
		return q.s.attr.PathMigState != migRearm && (to == hca.QPRTS || to == hca.QPSQD)
	}
	return false
}

// setAttrsLocked takes over what m names, and copies to the responder what it
// needs.
func (q *QP) setAttrsLocked(a *hca.QPAttr, m hca.QPAttrMask) {
	to := &q.s.attr
	for _, f := range []struct {
		bit hca.QPAttrMask
		set func()
	}{
		{mNotify, func() { to.EnSQDAsyncNotify = a.EnSQDAsyncNotify }},
		{mAccess, func() { to.Access = a.Access }},
		{mPKey, func() { to.PKeyIndex = a.PKeyIndex }},
		{mPort, func() { to.Port = a.Port }},
		{mQKey, func() { to.QKey = a.QKey }},
		{mAV, func() { to.AH = q.dev.path(a.AH) }},
		{mMTU, func() { to.PathMTU = a.PathMTU }},
		{mTmo, func() { to.Timeout = a.Timeout }},
		{mRetry, func() { to.RetryCnt = a.RetryCnt }},
		{mRNR, func() { to.RNRRetry = a.RNRRetry; q.s.rnrLeft = a.RNRRetry }},
		{mRQPSN, func() { to.RQPSN = a.RQPSN & numMask }},
		{mRd, func() { to.MaxRdAtomic = a.MaxRdAtomic }},
		{mAlt, func() {
			to.AltAH, to.AltPKeyIndex, to.AltPort, to.AltTimeout = a.AltAH, a.AltPKeyIndex, a.AltPort, a.AltTimeout
		}},
		{mMinRNR, func() { to.MinRNRTimer = a.MinRNRTimer }},
		{mSQPSN, func() { to.SQPSN = a.SQPSN & numMask }},
		{mDestRd, func() { to.MaxDestRdAtomic = a.MaxDestRdAtomic }},
		{mMig, func() { to.PathMigState = a.PathMigState }},
		{mQPN, func() { to.DestQPN = a.DestQPN }},
	} {
		if m&f.bit != 0 {
			f.set()
		}
	}
	r := &q.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if m&mAV != 0 && q.dev.link != nil {
		q.setWireLocked()
	}
	r.destQPN, r.av, r.access, r.qkey = to.DestQPN, to.AH, to.Access, to.QKey
	r.maxDest, r.minRNR = to.MaxDestRdAtomic, to.MinRNRTimer
}

// enterLocked makes a move that is neither to RESET nor to ERR. notify asks for
// EventSQDrained when it is one to SQD.
func (q *QP) enterLocked(from, to hca.QPState, notify bool) {
	q.s.attr.State = to
	q.r.mu.Lock()
	q.r.state = to
	if to == hca.QPRTR {
		q.r.commEst = false
	}
	q.r.mu.Unlock()
	if to == hca.QPSQD && from == hca.QPRTS {
		q.s.drain = notify
		q.drainedLocked()
	}
}

// drainedLocked raises EventSQDrained once the head that was begun is done.
func (q *QP) drainedLocked() {
	if q.s.attr.State == hca.QPSQD && q.s.drain && !q.s.started {
		q.s.drain = false
		q.event(hca.EventSQDrained)
	}
}

// unwaitLocked forgets what the head waited for.
func (q *QP) unwaitLocked() {
	s := &q.s
	q.unlink()
	q.unparkLocked()
	s.parked, s.wait = false, waitNone
	s.rnrLeft = s.attr.RNRRetry
	if s.timer != nil {
		s.timer.Stop()
	}
	q.stopWireLocked()
}

// resetLocked is the first half of a move to RESET: nothing is posted, begun or
// completed after it. settle is the second.
func (q *QP) resetLocked() {
	q.era.Add(1)
	q.unwaitLocked()
	q.s.attr.State = hca.QPReset
	q.s.drain = false
	q.r.mu.Lock()
	q.r.state = hca.QPReset
	q.r.mu.Unlock()
}

// resetAttrs is how a QP begins, and what RESET makes of it.
func (q *QP) resetAttrs() {
	q.s.attr = hca.QPAttr{State: hca.QPReset, PathMigState: migMigrated}
	q.s.rnrLeft, q.s.started, q.s.heard = 0, false, heard{}
	q.r.destQPN, q.r.av, q.r.access, q.r.qkey, q.r.maxDest, q.r.minRNR = 0, hca.AHAttr{}, 0, 0, 0, 0
	q.r.commEst, q.r.refused, q.r.claimSRQ = false, false, nil
	q.s.wire, q.r.wire = nil, nil
}

// errLocked moves the QP to ERR and flushes what nobody is working on. What
// somebody is working on he flushes when he is done; should he be stuck, steal
// does. Nothing happens in RESET and ERR.
func (q *QP) errLocked(n *notes) {
	s, r := &q.s, &q.r
	if s.attr.State == hca.QPErr || s.attr.State == hca.QPReset {
		return
	}
	era := q.era.Add(1)
	q.unwaitLocked()
	s.attr.State = hca.QPErr
	s.drain = false
	stuck := q.sendBusyLocked()
	if !stuck {
		q.flushSQLocked(n)
	}
	r.mu.Lock()
	r.state = hca.QPErr
	q.dropInboundLocked()
	q.flushOrphanLocked(n)
	if r.claimer != nil {
		stuck = true
	} else {
		q.flushRQLocked(n)
	}
	r.mu.Unlock()
	if stuck {
		time.AfterFunc(stuckWait, func() { q.steal(era) })
	}
}

// toErr moves the QP to ERR because of ev, from outside its locks.
func (q *QP) toErr(ev hca.EventType, n *notes) {
	q.s.mu.Lock()
	if st := q.s.attr.State; st != hca.QPErr && st != hca.QPReset && !q.s.closed {
		q.event(ev)
		q.errLocked(n)
	}
	q.s.mu.Unlock()
	q.wakeWaiters()
}

// sqeLocked moves a UC or UD QP to SQE: its send queue is flushed, it still
// receives.
func (q *QP) sqeLocked(n *notes) {
	q.s.attr.State = hca.QPSQE
	q.r.mu.Lock()
	q.r.state = hca.QPSQE
	q.r.mu.Unlock()
	q.flushSQLocked(n)
}

// flushSQLocked completes every send with a flush error.
func (q *QP) flushSQLocked(n *notes) {
	most := 0 // of a mapped queue once round: its client may go on writing
	if q.sq != nil {
		most = q.sq.Len() + 1
	}
	for q.s.ring.count > 0 || most > 0 && q.refillLocked() > 0 {
		w, _, _ := q.s.ring.front()
		id, op := w.id, w.op
		q.s.ring.drop()
		q.pushSend(id, op, hca.WCWRFlushErr, 0, n)
		most--
	}
	q.s.started = false
}

// flushRQLocked completes every receive with a flush error, under r.mu. With an
// SRQ there is none, and the event says so.
func (q *QP) flushRQLocked(n *notes) {
	if q.srq != nil {
		q.event(hca.EventQPLastWQEReached)
		return
	}
	for most := q.r.ring.most(); most > 0; most-- {
		w := q.r.ring.peek()
		if w == nil {
			return
		}
		q.r.ring.drop()
		q.pushFlushedRecv(w.id, n)
	}
}

// flushOrphanLocked completes a receive that nobody will fill, under r.mu.
func (q *QP) flushOrphanLocked(n *notes) {
	if q.r.claimer == orphaned {
		q.r.claimer = nil
		q.flushClaimLocked(n)
	}
}

// flushClaimLocked completes the receive of a claim that has ended, under r.mu.
func (q *QP) flushClaimLocked(n *notes) {
	if s := q.r.claimSRQ; s != nil {
		s.push(&hca.WC{ID: q.r.claimID, Status: hca.WCWRFlushErr, Opcode: hca.WCRecv, QPN: q.num}, true, n)
		return
	}
	q.pushFlushedRecv(q.r.claimID, n)
}

func (q *QP) pushFlushedRecv(id uint64, n *notes) {
	wc := hca.WC{ID: id, Status: hca.WCWRFlushErr, Opcode: hca.WCRecv, QPN: q.num}
	q.pushOwn(&wc, true, n)
}

// settle waits, within stuckWait, until nobody works on the QP, and then takes
// it away from who still does. Called with modMu after a move to RESET or ERR.
func (q *QP) settle() {
	waitUntil(func() bool {
		q.s.mu.Lock()
		defer q.s.mu.Unlock()
		q.r.mu.Lock()
		defer q.r.mu.Unlock()
		return !q.sendBusyLocked() && (q.r.claimer == nil || q.r.claimer == orphaned) && !q.wireBusyLocked()
	})
	q.steal(q.era.Load())
	q.s.mu.Lock()
	defer q.s.mu.Unlock()
	if q.s.attr.State != hca.QPReset {
		return
	}
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	q.s.ring.reset()
	q.r.ring.reset()
	q.dropInboundLocked()
	q.resetAttrs()
}

// steal takes the QP away from stuck runners, unless it has moved on since.
func (q *QP) steal(era uint32) {
	var n notes
	q.s.mu.Lock()
	if q.era.Load() == era {
		flush := q.s.attr.State == hca.QPErr
		if q.sendBusyLocked() {
			q.s.owner = nil
			if w := q.s.wire; w != nil {
				w.tx.taking = false
			}
			if flush {
				q.flushSQLocked(&n)
			}
		}
		q.r.mu.Lock()
		if q.r.claimer != nil {
			q.r.claimer = nil
			if flush {
				q.flushClaimLocked(&n)
				q.flushRQLocked(&n)
			}
		}
		q.r.mu.Unlock()
	}
	q.s.mu.Unlock()
	n.later(q.dev)
}
