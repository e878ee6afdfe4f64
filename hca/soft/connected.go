package soft

import (
	"encoding/binary"

	"github.com/uverbsd/uverbsd/hca"
)

// perform executes the request in x, under no lock.
func (x *exec) perform() (verdict, hca.WCStatus) {
	q := x.q
	if x.op == hca.OpInvalid {
		x.length = 0
		return finished, hca.WCLocQPOpErr
	}
	if isLocal(x.op) {
		return x.local()
	}
	need := hca.Access(0)
	if x.op == hca.OpRDMARead || isAtomic(x.op) {
		need = hca.AccessLocalWrite
	}
	limit := uint64(everything)
	if isAtomic(x.op) {
		limit = atomicSize
	}
	x.length = 0
	if !x.src.resolve(q.pd, need, limit) {
		return finished, hca.WCLocProtErr
	}
	x.length = x.src.n + uint64(x.ninline)
	if x.length > maxMsg {
		return finished, hca.WCLocLenErr
	}
	if !q.pd.ctx.freeOrPark(q) {
		return needPlace, 0
	}
	if q.typ == hca.QPTypeUD {
		return x.datagram()
	}
	p := x.findPeer()
	if p == nil {
		return x.noPeer()
	}
	x.listen(p)
	v, st := x.performAt(p)
	x.listened(v, st)
	return v, st
}

// performAt is perform for a request that has found its peer.
func (x *exec) performAt(p *QP) (verdict, hca.WCStatus) {
	q := x.q
	if q.typ == hca.QPTypeXRCIni {
		if !x.enterSRQ(p) {
			return finished, hca.WCRemInvReqErr
		}
		defer x.leaveSRQ()
	}
	if ctx := x.peerPD(p).ctx; ctx != q.pd.ctx {
		if !ctx.freeOrPark(q) {
			return needPlace, 0
		}
		if !x.visit(ctx) {
			q.woken.Store(true) // for a worker
			return needPlace, 0
		}
		defer x.unvisit(ctx)
	}
	var v verdict
	var st hca.WCStatus
	switch x.op {
	case hca.OpSend, hca.OpSendImm, hca.OpSendInv:
		v, st = x.send(p)
	case hca.OpRDMAWrite, hca.OpRDMAWriteImm:
		v, st = x.write(p)
	case hca.OpRDMARead:
		v, st = x.read(p)
	case hca.OpFlush:
		v, st = x.flushRemote(p)
	default:
		v, st = x.atomic(p)
	}
	x.done += x.length
	return v, st
}

// lookup finds the QP that the request is addressed to; nil if there is none.
func (x *exec) lookup() *QP {
	port := x.q.dev.fabric.Resolve(&x.dest)
	if port == nil {
		return nil
	}
	d, ok := port.Endpoint().(*Device)
	if !ok || !d.up.Load() || !x.q.dev.up.Load() {
		return nil
	}
	return d.qp(x.qpn)
}

// findPeer is lookup for connected QPs: nil also if the other end is not
// connected to this one.
func (x *exec) findPeer() *QP {
	p := x.lookup()
	if p == nil {
		return nil
	}
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	if !x.acceptedLocked(p) {
		return nil
	}
	x.peer, x.pera, x.minR = p, p.era.Load(), p.r.minRNR
	return p
}

// acceptedLocked: is p, whose r.mu is held, ready for messages from x.q?
func (x *exec) acceptedLocked(p *QP) bool {
	r, q := &p.r, x.q
	if p.typ != peerType(q.typ) || !canReceive(r.state) || r.destQPN != q.num {
		return false
	}
	return x.leadsBackLocked(p)
}

// noPeer parks the request until its peer comes. On UC the message is lost.
func (x *exec) noPeer() (verdict, hca.WCStatus) {
	q := x.q
	if q.typ == hca.QPTypeUC {
		return finished, hca.WCSuccess
	}
	q.dev.fabric.Park(x.qpn, q)
	// It may have come before q was in the list.
	if x.findPeer() != nil {
		q.woken.Store(true)
	}
	return needPeer, 0
}

// bytes is the payload of a message that fits into x.small or is inline; ok is
// false when it cannot be read.
func (x *exec) bytes() (p []byte, ok bool) {
	if x.ninline > 0 {
		return x.inl[:x.ninline], true
	}
	p = x.small[:x.length]
	return p, x.src.read(p) == nil
}

// send does SEND, with immediate or invalidate.
func (x *exec) send(p *QP) (verdict, hca.WCStatus) {
	// A small payload is read before the receive is taken, so that only the
	// receiver's own memory can hold the receiver's receive.
	small := x.length <= smallSize
	var data []byte
	if small {
		var ok bool
		if data, ok = x.bytes(); !ok {
			return finished, hca.WCLocProtErr
		}
		if x.stale() {
			return x.noPeer()
		}
		x.hear(data)
	}
	v, ok := x.claim(p, x.length)
	if !ok {
		return v, hca.WCSuccess
	}
	if st := x.checkRecv(p); st != hca.WCSuccess {
		return x.answer(p, st)
	}
	res := movedAll
	if small {
		if x.dst.write(data) != nil {
			res = badDst
		}
	} else {
		res = x.copy(&x.dst, &x.src, x.length)
	}
	x.wc.Opcode, x.wc.ByteLen = hca.WCRecv, uint32(x.length)
	switch x.op {
	case hca.OpSendImm:
		x.wc.Imm, x.wc.Flags = x.imm, hca.WCWithImm
	case hca.OpSendInv:
		if res == movedAll && !p.invalidate(x.imm) {
			// As in rxe (RESPST_ERR_INVALIDATE_RKEY) the payload is there, the
			// sender is told of success and the receiver fails.
			x.failRecv(p, hca.WCRemInvReqErr, hca.EventQPAccessErr)
			return finished, hca.WCSuccess
		}
		x.wc.Imm, x.wc.Flags = x.imm, hca.WCWithInv
	}
	return x.finishRecv(p, res)
}

// checkRecv checks a claimed receive against the message: what the receive is
// to be completed with.
func (x *exec) checkRecv(p *QP) hca.WCStatus {
	if x.recv.bad { // RESPST_ERR_MALFORMED_WQE
		return hca.WCLocQPOpErr
	}
	pd := x.peerPD(p)
	if p.srq != nil {
		pd = p.srq.pd
	}
	x.dst.sges = append(x.dst.sges[:0], x.rsge[:x.recv.nsge]...)
	if !x.dst.resolve(pd, hca.AccessLocalWrite, x.length) {
		return hca.WCLocProtErr
	}
	if x.dst.n < x.length {
		return hca.WCLocLenErr
	}
	return hca.WCSuccess
}

// answer fails a claimed receive with st and tells the sender accordingly.
func (x *exec) answer(p *QP, st hca.WCStatus) (verdict, hca.WCStatus) {
	toSender, ev := hca.WCRemOpErr, hca.EventQPFatal
	if st == hca.WCLocLenErr {
		toSender, ev = hca.WCRemInvReqErr, hca.EventQPReqErr
	}
	x.failRecv(p, st, ev)
	if x.q.typ == hca.QPTypeUC {
		toSender = hca.WCSuccess
	}
	return finished, toSender
}

// write does RDMA WRITE, with or without immediate.
func (x *exec) write(p *QP) (verdict, hca.WCStatus) {
	if v, st, ok := x.remote(p, hca.AccessRemoteWrite, x.length); !ok {
		return v, st
	}
	if x.op == hca.OpRDMAWriteImm {
		// The receive is taken first: without one the message must leave no
		// trace. It is filled with nothing, its size does not matter.
		if v, ok := x.claim(p, 0); !ok {
			return v, hca.WCSuccess
		}
	}
	res := movedAll
	if x.length <= smallSize {
		data, ok := x.bytes()
		if ok {
			x.hear(data)
		}
		switch {
		case !ok:
			res = badSrc
		case x.stale():
			res = stopped
		case len(data) > 0 && x.dst.write(data) != nil:
			res = badDst
		}
	} else {
		res = x.copy(&x.dst, &x.src, x.length)
	}
	if x.op == hca.OpRDMAWriteImm {
		x.wc.Opcode, x.wc.ByteLen = hca.WCRecvImm, uint32(x.length)
		x.wc.Imm, x.wc.Flags = x.imm, hca.WCWithImm
		return x.finishRecv(p, res)
	}
	return x.finishRemote(p, res, hca.WCRemOpErr, x.length, 0)
}

// read does RDMA READ: the peer's range is the source.
func (x *exec) read(p *QP) (verdict, hca.WCStatus) {
	if v, st, ok := x.remote(p, hca.AccessRemoteRead, x.length); !ok {
		return v, st
	}
	switch res := x.copy(&x.src, &x.dst, x.length); res {
	case badSrc: // the peer's memory
		return x.finishRemote(p, badDst, hca.WCRemOpErr, 0, 0)
	case badDst: // our own
		return x.finishRemote(p, badSrc, 0, 0, 0)
	default:
		return x.finishRemote(p, res, 0, 0, x.length)
	}
}

// flushRemote does FLUSH. There is nothing to do but to check (rxe_resp.c,
// process_flush, whose barrier is one for the processor's stores): requests before it
// have ended, and what they wrote lies in the client's memory, which all see.
func (x *exec) flushRemote(p *QP) (verdict, hca.WCStatus) {
	f := x.flush()
	if v, st, ok := x.remote(p, f.Access(), uint64(f.Length)); !ok {
		return v, st
	}
	return x.finishRemote(p, movedAll, 0, 0, 0)
}

// atomic does COMPARE SWAP and FETCH ADD, plain and masked, and ATOMIC WRITE on 8 bytes
// in the host's order, one at a time per space.
func (x *exec) atomic(p *QP) (verdict, hca.WCStatus) {
	need, write := hca.AccessRemoteAtomic, x.op == hca.OpAtomicWrite
	if write {
		need, x.length = hca.AccessRemoteWrite, atomicSize
	}
	if v, st, ok := x.remote(p, need, atomicSize); !ok {
		return v, st
	}
	word := x.small[:atomicSize]
	res, busy := x.exchange(word, func(s *space) bool { return s.lockOrPark(x.q) })
	if busy {
		return needPlace, 0
	}
	// The old value goes to the requester, in its order too.
	if res == movedAll && !write && x.src.write(word) != nil {
		res = badSrc
	}
	return x.finishRemote(p, res, hca.WCRemOpErr, atomicSize, atomicSize)
}

// exchange does the atomic in x on its target, whose old value goes to word, the first
// bytes of x.small. busy: lock did not get the right to.
func (x *exec) exchange(word []byte, lock func(*space) bool) (res moved, busy bool) {
	target := &x.dst.segs[0]
	space, done := target.mr.spaceAt(target.addr)
	defer done(space)
	if !lock(space) {
		return movedAll, true
	}
	defer space.unlock()
	if target.read(word, 0) != nil {
		return badDst, false
	}
	if x.stale() {
		return stopped, false
	}
	if val, store := x.update(binary.NativeEndian.Uint64(word)); store {
		upd := x.small[atomicSize : 2*atomicSize]
		binary.NativeEndian.PutUint64(upd, val)
		if target.write(upd, 0) != nil {
			return badDst, false
		}
	}
	return movedAll, false
}

// remote checks an RDMA or atomic request at the responder: what the QP allows,
// its resources, and the key, which a request of no bytes does not need (IBTA
// 1.4 §9.7.4.1.5). ok is false when it ends here.
func (x *exec) remote(p *QP, need hca.Access, n uint64) (v verdict, st hca.WCStatus, ok bool) {
	whole := isAtomic(x.op) || x.op == hca.OpAtomicWrite // eight bytes, where eight bytes lie
	p.r.mu.Lock()
	allowed := p.r.access&need == need && (!usesRdAtomic(x.op) || p.r.maxDest > 0)
	p.r.mu.Unlock()
	uc := x.q.typ == hca.QPTypeUC
	switch {
	case !allowed, whole && x.remoteAddr&7 != 0:
		st = hca.WCRemInvReqErr
		if !uc {
			p.toErr(hca.EventQPReqErr, &x.notes)
		}
	case n == 0 && x.op != hca.OpFlush:
		x.dst.segs, x.dst.n, x.dst.i, x.dst.off = x.dst.segs[:0], 0, 0, 0
		return 0, 0, true
	case !x.reaches(p, need, n):
		st = hca.WCRemAccessErr
		if !uc {
			p.toErr(hca.EventQPAccessErr, &x.notes)
		}
	case whole && x.dst.segs[0].addr&7 != 0:
		// Of a zero based window the request's address does not tell; rxe looks at
		// this one alone (atomic_reply).
		st = hca.WCRemInvReqErr
		if !uc {
			p.toErr(hca.EventQPReqErr, &x.notes)
		}
	default:
		return 0, 0, true
	}
	if uc { // the message is dropped (IBTA 1.4 table 59, class D)
		x.dropped(p)
		st = hca.WCSuccess
	}
	return finished, st, false
}

// reaches: does the request's key allow it, at its address? A flush of a whole region
// has none (check_rkey).
func (x *exec) reaches(p *QP, need hca.Access, n uint64) bool {
	pd := x.peerPD(p)
	if x.op == hca.OpFlush && x.flush().Level == hca.FlushMR {
		return pd.ctx.dev.mrs.allows(pd, p, x.rkey, need)
	}
	return x.dst.one(pd, p, x.rkey, x.remoteAddr, n, need)
}

func (x *exec) dropped(p *QP) {
	p.r.mu.Lock()
	p.r.count.dropped++
	p.r.mu.Unlock()
}

// finishRemote ends a request that takes no receive. rx is what the responder
// received, tx what it sent.
func (x *exec) finishRemote(p *QP, res moved, remoteErr hca.WCStatus, rx, tx uint64) (verdict, hca.WCStatus) {
	switch res {
	case badSrc:
		return finished, hca.WCLocProtErr
	case badDst:
		if x.q.typ == hca.QPTypeUC {
			return finished, hca.WCSuccess
		}
		p.toErr(hca.EventQPFatal, &x.notes)
		return finished, hca.WCRemOpErr
	case stopped:
		return x.noPeer()
	}
	p.r.mu.Lock()
	p.estLocked()
	p.r.count.rxBytes += rx
	p.r.count.rxPkts++
	p.r.count.txBytes += tx
	p.r.mu.Unlock()
	return finished, hca.WCSuccess
}

// estLocked raises EventCommEst for the first message in RTR, under r.mu.
func (q *QP) estLocked() {
	if q.r.state == hca.QPRTR && !q.r.commEst {
		q.r.commEst = true
		q.event(hca.EventCommEst)
	}
}
