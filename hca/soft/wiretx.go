package soft

import (
	"encoding/binary"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// wireTx is the requester's half of a wire, under QP.s.mu. PSNs go from una, the
// oldest that is not acknowledged, over at, the next to be sent, to next, the first
// that no request has yet. Requests are numbered as they come: base is the one at
// the head of the send queue, begun the first that has no PSNs.
type wireTx struct {
	base, begun uint32
	reqs        []wireReq // of base to begun, by number modulo its length
	una         uint32
	at          uint32
	next        uint32
	high        uint32 // after the highest that was ever sent
	gen         uint32 // counts the times that at went back

	// reads are the last PSNs of the reads and atomics on their way, oldest first.
	reads  [savedAtomics]uint32
	nreads int
	taking bool // somebody writes an answer to the client's memory

	window   int  // packets on their way at a time
	slow     bool // slow start: the window doubles
	grown    int  // acknowledged since it last grew
	easing   bool // a congestion notification has halved the window, until una is at eased
	eased    uint32
	tries    uint8
	rnrLeft  uint8
	lost     bool      // at went back to una, and una has not moved since
	deadline time.Time // of the oldest packet on its way
	rnrUntil time.Time // nothing is sent before
	timer    *time.Timer
	timed    time.Time // when the timer goes off; zero: it does not

	failed hca.WCStatus // of request begun, once those before it are done
}

// wireReq is a request's PSNs.
type wireReq struct {
	first, last uint32
	answered    bool // a read or an atomic
}

func (t *wireTx) req(n uint32) *wireReq { return &t.reqs[n%uint32(len(t.reqs))] }

// beginLocked gives the next request in the queue its PSNs; false if there is none, or
// it has to wait.
func (q *QP) beginLocked(w *wire) bool {
	s, t := &q.s, &w.tx
	if t.failed != 0 || s.attr.State != hca.QPRTS {
		return false
	}
	i := int(t.begun - t.base)
	if i >= s.ring.count && (q.refillLocked() == 0 || i >= s.ring.count) {
		return false
	}
	slot := s.ring.at(i)
	answered := usesRdAtomic(slot.op)
	switch {
	case isLocal(slot.op) || slot.op == hca.OpInvalid:
		// They wait until all is done before them, and take no PSN.
		return false
	case slot.flags&hca.SendFence != 0 && t.answersLocked():
		return false
	case slot.total+uint64(slot.ninline) > maxMsg:
		t.failed = hca.WCLocLenErr
		return false
	}
	n := uint32(1)
	if !isAtomic(slot.op) {
		n = w.packetsOf(slot.total + uint64(slot.ninline))
	}
	if roce.PSNDiff(t.next, t.una)+int32(n) > halfPSNs {
		return false // its PSNs would run into those on their way
	}
	if i >= len(t.reqs) {
		t.growLocked()
	}
	*t.req(t.begun) = wireReq{first: t.next, last: (t.next + n - 1) & roce.PSNMask, answered: answered}
	t.next = (t.next + n) & roce.PSNMask
	t.begun++
	s.started = true
	return true
}

func (t *wireTx) growLocked() {
	old := t.reqs
	reqs := make([]wireReq, max(2*len(old), initialRing))
	for n := t.base; n != t.begun; n++ {
		reqs[n%uint32(len(reqs))] = old[n%uint32(len(old))]
	}
	t.reqs = reqs
}

// answersLocked: is a read or an atomic not answered yet?
func (t *wireTx) answersLocked() bool {
	for n := t.base; n != t.begun; n++ {
		if t.req(n).answered {
			return true
		}
	}
	return false
}

// plan is a run of packets of one request that are to be sent.
type plan struct {
	psn   uint32
	n     int    // packets; of a read, those of the answer
	off   uint64 // payload before them
	last  bool   // the request ends with them
	first bool
	gen   uint32
	ask   bool // for an acknowledgement with the last of them
}

// planLocked finds what is to be sent next; false if there is nothing now.
func (x *exec) planLocked(q *QP, w *wire) bool {
	s, t := &q.s, &w.tx
	state := s.attr.State
	if s.closed || state != hca.QPRTS && state != hca.QPSQD {
		return false
	}
	if !t.rnrUntil.IsZero() {
		if time.Now().Before(t.rnrUntil) {
			return false
		}
		t.rnrUntil = time.Time{}
	}
	room := t.window - int(roce.PSNDiff(t.at, t.una))
	if room <= 0 {
		return false
	}
	if t.at == t.next && !q.beginLocked(w) {
		return false
	}
	n := t.begun - 1 // that of at: mostly the last, else after a loss
	for ; n != t.base && roce.PSNDiff(t.req(n).first, t.at) > 0; n-- {
	}
	rq := t.req(n)
	left := int(roce.PSNDiff(rq.last, t.at)) + 1
	p := plan{psn: t.at, gen: t.gen, off: uint64(uint32(roce.PSNDiff(t.at, rq.first))) * uint64(w.mtu), first: t.at == rq.first}
	if rq.answered {
		if t.nreads >= min(int(s.attr.MaxRdAtomic), savedAtomics) {
			return false
		}
		// The same pieces again after a loss, or shorter ones: a responder knows a
		// request that comes again by lying within the first.
		p.n = min(left, readPiece-int(roce.PSNDiff(t.at, rq.first))%readPiece)
		p.last = true
	} else {
		p.n = min(left, room, txBatch)
		p.last = p.n == left
		p.ask = p.n == room || p.last && (n+1-t.base >= uint32(s.ring.count) || n%ackEvery == 0)
	}
	slot, sges, inline := s.ring.entry(int(n - t.base))
	p.ask = p.ask || p.last && slot.flags&hca.SendSignaled != 0 || q.sigAll && p.last
	x.q, x.era, x.peer, x.plan, x.sendSlot = q, q.era.Load(), nil, p, *slot
	x.src.sges = append(x.src.sges[:0], sges...)
	copy(x.inl[:], inline)
	x.length = slot.total + uint64(slot.ninline)
	if isAtomic(slot.op) {
		x.length = atomicSize
	}
	// Now, because the answer can be there before sentLocked is.
	if end := (p.psn + uint32(p.n)) & roce.PSNMask; roce.PSNDiff(end, t.high) > 0 {
		t.high = end
	}
	return true
}

// sentLocked takes note of the packets that were planned and made.
func (x *exec) sentLocked(q *QP, w *wire) {
	t, p := &w.tx, &x.plan
	end := (p.psn + uint32(p.n)) & roce.PSNMask
	if p.gen != t.gen || roce.PSNDiff(end, t.at) <= 0 {
		return // it went back meanwhile
	}
	if usesRdAtomic(x.op) {
		t.reads[t.nreads] = (end - 1) & roce.PSNMask
		t.nreads++
	}
	first := t.at == t.una
	t.at = end
	if first {
		q.startClockLocked(w)
	}
	if q.typ == hca.QPTypeUC {
		q.ackedLocked(w, (end-1)&roce.PSNMask, &x.notes)
	}
}

// runWire is runSend for a QP whose peer is on the wire.
func (q *QP) runWire(h *holder, w *notes) {
	s := &q.s
	s.mu.Lock()
	wi := s.wire
	if wi == nil || s.owner != nil || s.closed || s.attr.State < hca.QPRTS {
		s.mu.Unlock()
		return
	}
	if !q.pendingLocked() {
		s.mu.Unlock()
		return
	}
	x := getExec()
	x.hold, x.worker = h, h != nil
	var b *batch
	s.owner = x
	for n := 0; s.owner == x; n++ {
		if s.wire != wi || q.failedLocked(wi, x) || !x.planLocked(q, wi) {
			if b != nil && b.n > 0 { // they go before the token does
				s.mu.Unlock()
				b.send(wi)
				s.mu.Lock()
				continue
			}
			if s.owner == x && s.wire == wi && q.localLocked(wi, x) {
				continue
			}
			break
		}
		if n >= runBatchWRs { // others wait for this goroutine
			q.dev.pool.few.sched(q)
			break
		}
		s.mu.Unlock()
		if b == nil {
			b = batches.Get().(*batch)
		}
		st := x.build(wi, b)
		x.hold.beat()
		s.mu.Lock()
		if s.owner != x {
			break
		}
		if st != hca.WCSuccess {
			// What was begun of it is never ended: it fails when its turn comes.
			if s.wire == wi && x.plan.gen == wi.tx.gen {
				wi.tx.cutLocked(x.plan.psn, st)
			}
			continue
		}
		if s.wire == wi {
			x.sentLocked(q, wi)
			if len(x.notes.more) > 0 || !x.notes.empty() {
				s.mu.Unlock()
				x.notes.tell(w)
				s.mu.Lock()
			}
		}
	}
	if s.owner == x {
		if b != nil && b.n > 0 {
			s.mu.Unlock()
			b.send(wi)
			s.mu.Lock()
		}
		if s.owner == x {
			s.owner = nil
			if s.attr.State == hca.QPErr && !q.sendBusyLocked() {
				q.flushSQLocked(&x.notes)
			}
		}
	}
	s.mu.Unlock()
	x.notes.tell(w)
	if b != nil {
		b.n = 0
		batches.Put(b)
	}
	x.put()
}

// cutLocked: the request that has psn cannot be sent whole. It, and all after it, get
// their PSNs back; the queue fails once what was sent before is done.
func (t *wireTx) cutLocked(psn uint32, st hca.WCStatus) {
	for t.begun != t.base {
		rq := t.req(t.begun - 1)
		t.begun--
		t.next = rq.first
		if roce.PSNDiff(rq.first, psn) <= 0 {
			break
		}
	}
	t.failed = st
	if roce.PSNDiff(t.at, t.next) > 0 {
		t.at = t.next
	}
	if roce.PSNDiff(t.una, t.next) > 0 {
		t.una = t.next
	}
	if roce.PSNDiff(t.high, t.next) > 0 {
		t.high = t.next
	}
}

// failedLocked ends the queue if the request at its head has failed on this side. What
// is before that one is seen to first, also if it has to be sent again.
func (q *QP) failedLocked(w *wire, x *exec) bool {
	t := &w.tx
	if t.failed == 0 {
		return false
	}
	if t.base == t.begun && q.s.ring.count > 0 && !q.s.closed && (q.s.attr.State == hca.QPRTS || q.s.attr.State == hca.QPSQD) {
		q.s.owner = nil
		q.failHeadLocked(t.failed, &x.notes)
		return true
	}
	return false
}

// localLocked does a request that needs no peer, if it is at the head. s.mu is given
// up meanwhile.
func (q *QP) localLocked(w *wire, x *exec) bool {
	s := &q.s
	if s.attr.State != hca.QPRTS || w.tx.base != w.tx.begun || s.ring.count == 0 {
		return false
	}
	if slot := s.ring.at(0); !isLocal(slot.op) && slot.op != hca.OpInvalid {
		return false
	}
	x.takeLocked(q)
	s.mu.Unlock()
	_, st := x.perform()
	s.mu.Lock()
	if s.owner != x || s.wire != w {
		return false
	}
	if st != hca.WCSuccess {
		s.owner = nil
		q.failHeadLocked(st, &x.notes)
		return false
	}
	q.doneHeadLocked(w, st, &x.notes)
	return s.owner == x
}

// doneHeadLocked completes the request at the head.
func (q *QP) doneHeadLocked(w *wire, st hca.WCStatus, n *notes) {
	s := &q.s
	slot := s.ring.at(0)
	id, op, flags := slot.id, slot.op, slot.flags
	bytes := slot.total + uint64(slot.ninline)
	if isAtomic(op) || op == hca.OpAtomicWrite {
		bytes = atomicSize
	}
	s.ring.drop()
	if w.tx.begun == w.tx.base { // a local one, or one that was cut
		w.tx.begun++
	}
	w.tx.base++
	s.started = w.tx.base != w.tx.begun
	if st == hca.WCSuccess {
		if !isLocal(op) {
			s.count.txBytes += bytes
			s.count.txPkts += uint64(w.packetsOf(bytes))
		}
		if !q.sigAll && flags&hca.SendSignaled == 0 {
			q.drainedLocked()
			return
		}
	}
	if !q.pushSend(id, op, st, uint32(bytes), n) && s.attr.State != hca.QPErr {
		q.event(hca.EventQPFatal)
		q.errLocked(n)
		return
	}
	q.drainedLocked()
}

// failHeadLocked completes the head with an error, and the QP is in ERR, or in SQE.
func (q *QP) failHeadLocked(st hca.WCStatus, n *notes) {
	q.doneHeadLocked(q.s.wire, st, n)
	switch {
	case q.s.attr.State != hca.QPRTS && q.s.attr.State != hca.QPSQD:
	case reliable(q.typ):
		q.errLocked(n)
	default:
		q.s.wire.tx.failed = 0
		q.sqeLocked(n)
		q.s.wire.tx.begun = q.s.wire.tx.base
	}
}

// build makes the planned packets, reading their payload from the client's memory,
// and sends what fills a batch.
func (x *exec) build(w *wire, b *batch) hca.WCStatus {
	p, q := &x.plan, x.q
	k := *w.head.Load()
	transport := k.Op
	k.PSN = p.psn
	switch {
	case x.op == hca.OpRDMARead:
		if !x.src.resolve(q.pd, hca.AccessLocalWrite, everything) {
			return hca.WCLocProtErr
		}
		k.Op |= roce.ReadRequest
		k.VA, k.RKey = x.remoteAddr+p.off, x.rkey
		k.DMALen = uint32(min(x.length-p.off, uint64(p.n)*uint64(w.mtu)))
		k.AckReq, k.SRQN = true, x.srqn
		x.add(w, b, &k, nil)
		return hca.WCSuccess
	case isAtomic(x.op):
		if !x.src.resolve(q.pd, hca.AccessLocalWrite, atomicSize) {
			return hca.WCLocProtErr
		}
		k.Op |= roce.CompareSwap
		k.Swap, k.Compare = x.swap, x.compareAdd
		switch x.op {
		case hca.OpAtomicFetchAdd:
			k.Op = transport | roce.FetchAdd
			k.Swap, k.Compare = x.compareAdd, 0
		case hca.OpMaskedAtomicCmpSwap, hca.OpMaskedAtomicFetchAdd:
			return hca.WCLocQPOpErr // RoCE has no packet for them
		}
		k.VA, k.RKey, k.AckReq, k.SRQN = x.remoteAddr, x.rkey, true, x.srqn
		x.add(w, b, &k, nil)
		return hca.WCSuccess
	}
	if x.op == hca.OpFlush || x.op == hca.OpAtomicWrite {
		f := x.flush()
		k.VA, k.RKey, k.AckReq = x.remoteAddr, x.rkey, true
		if x.op == hca.OpFlush {
			k.Op |= roce.Flush
			k.FlushType, k.FlushLevel, k.DMALen = f.Type, f.Level, f.Length
			x.add(w, b, &k, nil)
			return hca.WCSuccess
		}
		k.Op |= roce.AtomicWrite
		k.DMALen = atomicSize
		word := x.small[:atomicSize]
		binary.NativeEndian.PutUint64(word, x.swap)
		x.add(w, b, &k, word)
		return hca.WCSuccess
	}
	if x.ninline == 0 {
		if !x.src.resolve(q.pd, 0, everything) {
			return hca.WCLocProtErr
		}
		x.src.skip(p.off)
	}
	off := p.off
	for i := range p.n {
		n := int(min(x.length-off, uint64(w.mtu)))
		x.shape(&k, transport, p.first && i == 0, p.last && i == p.n-1)
		k.PSN = (p.psn + uint32(i)) & roce.PSNMask
		k.AckReq = i == p.n-1 && p.ask || k.PSN%ackEvery == 0 && !k.Op.IsLast()
		if !x.addPayload(w, b, &k, off, n) {
			return hca.WCLocProtErr
		}
		off += uint64(n)
		if x.q.era.Load() != x.era {
			return hca.WCSuccess // nobody will look at it
		}
	}
	return hca.WCSuccess
}

// shape sets opcode and extended headers of a packet of a send or a write.
func (x *exec) shape(k *roce.Packet, transport roce.Opcode, first, last bool) {
	var op roce.Opcode
	k.Solicited = last && x.flags&hca.SendSolicited != 0
	write := x.op == hca.OpRDMAWrite || x.op == hca.OpRDMAWriteImm
	switch {
	case first && last:
		op = roce.SendOnly
	case first:
		op = roce.SendFirst
	case last:
		op = roce.SendLast
	default:
		op = roce.SendMiddle
	}
	if write {
		op += roce.WriteFirst - roce.SendFirst
		k.VA, k.RKey, k.DMALen = x.remoteAddr, x.rkey, uint32(x.length)
	}
	k.SRQN = x.srqn
	if last {
		switch x.op {
		case hca.OpSendImm, hca.OpRDMAWriteImm:
			op++
			k.Imm = x.imm
		case hca.OpSendInv:
			k.Invalidate = x.imm
			if op == roce.SendLast {
				op = roce.SendLastInv
			} else {
				op = roce.SendOnlyInv
			}
		}
	}
	k.Op = transport | op
}

// add makes a packet with that payload.
func (x *exec) add(w *wire, b *batch, k *roce.Packet, payload []byte) {
	at := k.Build(b.next())
	b.seal(at + copy(b.next()[at:], payload))
	if b.full() {
		b.send(w)
	}
}

// addPayload makes a packet of n bytes at off of the message; false if they cannot
// be read.
func (x *exec) addPayload(w *wire, b *batch, k *roce.Packet, off uint64, n int) bool {
	room := b.next()
	at := k.Build(room)
	if x.ninline > 0 {
		copy(room[at:at+n], x.inl[off:x.ninline])
	} else if x.src.read(room[at:at+n]) != nil {
		return false
	}
	b.seal(at + n)
	if b.full() {
		b.send(w)
	}
	return true
}
