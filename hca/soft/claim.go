package soft

import "github.com/uverbsd/uverbsd/hca"

// claim takes p's oldest receive for a message of n bytes. When it cannot, ok
// is false and v says why: finished means that the message is lost (UC).
func (x *exec) claim(p *QP, n uint64) (v verdict, ok bool) {
	r := &p.r
	r.mu.Lock()
	switch {
	case !x.acceptedLocked(p) || p.era.Load() != x.pera:
		r.mu.Unlock()
		v, _ = x.noPeer()
		return v, false
	case r.claimer != nil:
		// A runner of an earlier connection is still at p's receive.
		r.refused = true
		r.mu.Unlock()
		return x.busyPeer(), false
	case !p.popLocked(x, n):
		v, x.polls = needRecv, p.mapsRecv || x.srq != nil && x.srq.mapped
		if p.typ == hca.QPTypeUC {
			r.count.dropped++
			v = finished
		}
		r.mu.Unlock()
		return v, false
	}
	r.claimer, r.claimID, r.claimSRQ = x, x.recv.id, x.srq
	p.estLocked()
	r.mu.Unlock()
	x.wc = hca.WC{ID: x.recv.id, QPN: p.num, SrcQP: x.q.num, Port: physPort,
		SLID: x.q.dev.port.LID(), SL: x.dest.SL}
	return finished, true
}

// busyPeer is noPeer for a peer that is there but has its hands full.
func (x *exec) busyPeer() verdict {
	if x.q.typ == hca.QPTypeUC {
		return finished
	}
	x.q.dev.fabric.Park(x.qpn, x.q)
	x.peer.r.mu.Lock()
	if x.peer.r.claimer == nil {
		x.q.woken.Store(true)
	}
	x.peer.r.mu.Unlock()
	return needPeer
}

// popLocked takes a receive of q's, whose r.mu is held, into x. When there is
// none a sender on RC or XRC is parked. On UC and UD a receive that is too small for n
// bytes stays where it is, because the message is dropped instead.
func (q *QP) popLocked(x *exec, n uint64) bool {
	unreliable := !reliable(q.typ)
	if x.srq != nil {
		q.r.rnrSRQ = x.srq
		return x.srq.pop(x, n, unreliable)
	}
	if q.srq != nil {
		return q.srq.pop(x, n, unreliable)
	}
	w := q.r.ring.peek()
	switch {
	case w == nil:
		if !unreliable {
			q.r.waiters.add(x.q)
		}
		return false
	case unreliable && w.total < n:
		return false
	}
	x.recv = q.r.ring.pop(x.rsge[:])
	return true
}

// releaseLocked ends x's claim, with p.r.mu held; false if it was taken away.
func (x *exec) releaseLocked(p *QP) bool {
	if p.r.claimer != x {
		return false
	}
	p.r.claimer = nil
	if p.r.refused {
		p.r.refused = false
		p.dev.fabric.Announce(p.num)
	}
	return true
}

// finishRecv completes a claimed receive after a copy that ended in res.
func (x *exec) finishRecv(p *QP, res moved) (verdict, hca.WCStatus) {
	switch res {
	case badSrc: // the sender's fault: its QP dies
		x.orphan(p)
		return finished, hca.WCLocProtErr
	case badDst:
		return x.answer(p, hca.WCLocProtErr)
	}
	p.r.mu.Lock()
	if !x.releaseLocked(p) {
		p.r.mu.Unlock()
		return x.noPeer()
	}
	switch {
	case p.r.state == hca.QPErr:
		p.flushClaimLocked(&x.notes)
		p.flushRQLocked(&x.notes)
		p.r.mu.Unlock()
		return x.noPeer()
	case !canReceive(p.r.state): // RESET: nothing is completed
		p.r.mu.Unlock()
		return x.noPeer()
	case res == stopped: // the sender went away in mid-message
		x.orphanLocked(p)
		p.r.mu.Unlock()
		return x.noPeer()
	}
	p.r.count.rxBytes += x.length
	p.r.count.rxPkts += packets(x.length)
	ok := x.pushRecv(p, &x.wc, x.flags&hca.SendSolicited != 0)
	p.r.mu.Unlock()
	if !ok {
		p.toErr(hca.EventQPFatal, &x.notes)
	}
	return finished, hca.WCSuccess
}

// failRecv completes a claimed receive with an error and moves the responder to
// ERR because of it.
func (x *exec) failRecv(p *QP, st hca.WCStatus, ev hca.EventType) {
	p.r.mu.Lock()
	if x.releaseLocked(p) {
		switch {
		case p.r.state == hca.QPErr:
			p.flushClaimLocked(&x.notes)
			p.flushRQLocked(&x.notes)
		case canReceive(p.r.state):
			wc := hca.WC{ID: x.recv.id, Status: st, Opcode: hca.WCRecv, QPN: p.num}
			x.pushRecv(p, &wc, true)
		}
	}
	p.r.mu.Unlock()
	p.toErr(ev, &x.notes)
}

// orphaned holds the claim on a receive whose message will never be complete
// because its sender failed in the middle. As on a wire the responder does not
// know: the receive stays taken until the QP goes to ERR or RESET.
var orphaned = new(exec)

func (x *exec) orphan(p *QP) {
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	if !x.releaseLocked(p) {
		return
	}
	switch {
	case p.r.state == hca.QPErr:
		p.flushClaimLocked(&x.notes)
		p.flushRQLocked(&x.notes)
	case canReceive(p.r.state):
		x.orphanLocked(p)
	}
}

// orphanLocked leaves a released receive to nobody. On UC, where the next
// message may be a good one, it is completed in error instead.
func (x *exec) orphanLocked(p *QP) {
	if reliable(p.typ) {
		p.r.claimer = orphaned
		return
	}
	wc := hca.WC{ID: x.recv.id, Status: hca.WCRemInvReqErr, Opcode: hca.WCRecv, QPN: p.num}
	p.pushOwn(&wc, true, &x.notes)
}
