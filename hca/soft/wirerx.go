package soft

import (
	"encoding/binary"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// wireRx is the responder's half of a wire, under QP.r.mu.
type wireRx struct {
	epsn uint32 // expected next
	msn  uint32 // messages done
	nak  bool   // the peer was told that epsn is missing, or has to come again
	busy bool   // somebody is at a packet, outside the lock
	dead bool   // the QP has failed, the peer was told

	// msg is the message in progress, nil between two. Its receive, if it has
	// taken one, is claimed by orphaned while nobody is at a packet of it.
	msg     *exec
	off     uint64 // bytes of it that have come
	dropped bool   // UC: the rest of the message is of no use

	saved  [savedAtomics]savedAtomic // the last answers to atomics
	nsaved int

	out     []answer // oldest first
	sending bool     // somebody is at out[0], outside the lock
	cnp     time.Time
}

type savedAtomic struct {
	psn  uint32
	orig uint64
	ok   bool
}

// answer is something to send to the requester.
type answer struct {
	op       roce.Opcode // Acknowledge, AtomicAck or ReadRespOnly for a read
	psn      uint32
	msn      uint32
	syndrome uint8
	orig     uint64

	x   *exec // of a read: what is read, from dst's cursor on
	off uint64
}

const ackCredits = roce.SyndromeACK | roce.CreditsUnlimited

// fate is what becomes of a request's packet.
type fate uint8

const (
	taken   fate = iota // it was what was expected
	again               // the requester is to come again: nothing has changed
	refused             // the QP is done for, NAK has been queued
	lost                // nothing happens
)

// takeRequest does a request's packet; false if it is none of q's.
func (q *QP) takeRequest(in *inbound) bool {
	r, k := &q.r, &in.pkt
	r.mu.Lock()
	w := r.wire
	if w == nil || q.typ == hca.QPTypeXRCIni || !canReceive(r.state) || w.rx.busy || w.rx.dead || !w.fromPeer(k) {
		r.mu.Unlock()
		return false
	}
	rx := &w.rx
	congested := k.TrafficClass&roce.ECNMask == roce.CE && rx.cnpDue()
	diff := roce.PSNDiff(k.PSN, rx.epsn)
	ok := true
	switch {
	case q.typ == hca.QPTypeUC:
		if diff != 0 { // some are missing: the message is of no use (§9.8.2.2.1)
			q.abandonLocked(rx)
			rx.epsn = k.PSN
		}
		q.expectedLocked(w, in)
	case diff > 0:
		if !rx.nak && len(rx.out) < maxAnswers {
			rx.nak = true
			rx.say(answer{op: roce.Acknowledge, psn: rx.epsn, msn: rx.msn, syndrome: roce.SyndromeNAK | roce.NAKSequence})
		}
	case diff < 0:
		ok = q.repeatedLocked(w, k)
	default:
		rx.nak = false
		q.expectedLocked(w, in)
	}
	r.mu.Unlock()
	if congested {
		w.notify()
	}
	q.answerOut(w)
	return ok
}

// say queues an answer. An acknowledgement makes one before it that is still there
// superfluous.
func (rx *wireRx) say(a answer) {
	if n := len(rx.out); a.op == roce.Acknowledge && a.syndrome == ackCredits && n > 0 {
		if l := &rx.out[n-1]; l.op == roce.Acknowledge && l.syndrome == ackCredits && !(n == 1 && rx.sending) {
			*l = a
			return
		}
	}
	rx.out = append(rx.out, a)
}

// maxAnswers bounds the queue of answers: what a requester that keeps the rules can
// have outstanding, and acknowledgements between them. Packets for which there is no
// room are dropped.
const maxAnswers = 4 * savedAtomics

// cnpDue: may the peer be told of congestion again?
func (rx *wireRx) cnpDue() bool {
	now := time.Now()
	if now.Sub(rx.cnp) < cnpGap {
		return false
	}
	rx.cnp = now
	return true
}

// notify tells the peer of congestion (Annex A17.9.3).
func (w *wire) notify() {
	k := *w.head.Load()
	k.Op, k.BECN, k.PSN = roce.CNP, true, 0
	b := batches.Get().(*batch)
	b.seal(k.Build(b.next()))
	b.send(w)
	batches.Put(b)
}

// abandonLocked gives up the message in progress, of UC. Its receive stays claimed
// for the next.
func (q *QP) abandonLocked(rx *wireRx) {
	rx.dropped = true
	if x := rx.msg; x != nil && q.r.claimer != orphaned {
		rx.msg = nil
		x.put()
	}
}

// sequenceOK: may k follow what is in progress (§9.7.4.1.2)? A message of XRC goes to
// one SRQ.
func sequenceOK(k *roce.Packet, msg *exec) bool {
	op, inSend, inWrite := k.Op.Operation(), false, false
	if msg != nil {
		if k.SRQN != msg.srqn {
			return false
		}
		inWrite = msg.op == hca.OpRDMAWrite
		inSend = !inWrite
	}
	switch op {
	case roce.SendMiddle, roce.SendLast, roce.SendLastImm, roce.SendLastInv:
		return inSend
	case roce.WriteMiddle, roce.WriteLast, roce.WriteLastImm:
		return inWrite
	}
	return msg == nil
}

// lengthOK: does a payload of n bytes go with op (§9.7.4.1.6)?
func lengthOK(op roce.Opcode, n, mtu int) bool {
	switch op {
	case roce.SendFirst, roce.SendMiddle, roce.WriteFirst, roce.WriteMiddle:
		return n == mtu
	case roce.SendLast, roce.SendLastImm, roce.SendLastInv, roce.WriteLast, roce.WriteLastImm:
		return n >= 1 && n <= mtu
	}
	return n <= mtu
}

// expectedLocked does the packet that comes next in order. r.mu is given up
// meanwhile.
func (q *QP) expectedLocked(w *wire, in *inbound) {
	r, rx, k := &q.r, &w.rx, &in.pkt
	op, uc := k.Op.Operation(), q.typ == hca.QPTypeUC
	begins := op == roce.SendFirst || op == roce.WriteFirst || op == roce.SendOnly || op == roce.SendOnlyImm ||
		op == roce.WriteOnly || op == roce.WriteOnlyImm || op == roce.SendOnlyInv
	if uc {
		if begins {
			rx.dropped = false
			if rx.msg != nil { // cut short, with its receive
				rx.off = 0
			}
		}
		if rx.dropped {
			rx.epsn = (k.PSN + 1) & roce.PSNMask
			r.count.dropped++
			return
		}
	}
	if len(rx.out) >= maxAnswers {
		return
	}
	if !(uc && begins) && !sequenceOK(k, rx.msg) || !lengthOK(op, len(k.Payload), w.mtu) {
		if uc {
			q.abandonLocked(rx)
			rx.epsn = (k.PSN + 1) & roce.PSNMask
			r.count.dropped++
			return
		}
		q.refuseLocked(w, k.PSN, roce.NAKInvalidReq)
		rx.busy = true
		r.mu.Unlock()
		q.toErr(hca.EventQPReqErr, &in.notes)
		r.mu.Lock()
		rx.busy = false
		return
	}
	if len(k.Payload) > 0 && q.pd != nil && !q.pd.ctx.free() {
		rx.nak = false
		return // as good as lost: its memory holds others up already
	}
	q.estLocked()
	rx.busy = true
	claimer := r.claimer
	r.mu.Unlock()
	x := rx.msg
	if x != nil && begins && claimer != orphaned { // UC: a write that was cut short
		x.put()
		x = nil
	}
	var f fate
	var nak uint8
	switch op {
	case roce.ReadRequest:
		f, nak = q.readAsked(w, in)
	case roce.CompareSwap, roce.FetchAdd, roce.AtomicWrite:
		f, nak = q.atomicAsked(w, in)
	case roce.Flush:
		f, nak = q.flushAsked(w, in)
	default:
		f, nak = q.part(w, in, x, begins)
	}
	r.mu.Lock()
	rx.busy = false
	if r.wire != w {
		return
	}
	switch f {
	case again:
		rx.nak = true // what comes behind it is out of sequence now, which he knows
		rx.say(answer{op: roce.Acknowledge, psn: k.PSN, msn: rx.msn, syndrome: roce.SyndromeRNR | r.minRNR&roce.SyndromeCode})
	case refused:
		if !uc {
			q.refuseLocked(w, k.PSN, nak)
			break
		}
		q.abandonLocked(rx)
		rx.epsn = (k.PSN + 1) & roce.PSNMask
		r.count.dropped++
	case taken:
		switch op {
		case roce.ReadRequest, roce.CompareSwap, roce.FetchAdd, roce.AtomicWrite, roce.Flush: // did it all
			return
		}
		rx.epsn = (k.PSN + 1) & roce.PSNMask
		if k.Op.IsLast() {
			rx.msn = (rx.msn + 1) & roce.PSNMask
		}
		if k.AckReq && !uc {
			rx.say(answer{op: roce.Acknowledge, psn: k.PSN, msn: rx.msn, syndrome: ackCredits})
		}
	}
}

// refuseLocked queues a NAK that ends the connection.
func (q *QP) refuseLocked(w *wire, psn uint32, code uint8) {
	w.rx.dead = true
	w.rx.say(answer{op: roce.Acknowledge, psn: psn, msn: w.rx.msn, syndrome: roce.SyndromeNAK | code})
}

// part does a packet of a send or a write, under no lock.
func (q *QP) part(w *wire, in *inbound, x *exec, begins bool) (fate, uint8) {
	k, rx := &in.pkt, &w.rx
	if begins {
		kept := x != nil // UC: the receive of a message that was cut short
		if !kept {
			x = getExec()
		}
		f, nak := q.begin(w, in, x, kept)
		if f != taken {
			in.notes.merge(&x.notes)
			if !kept {
				x.put()
			}
			return f, nak
		}
	}
	op := k.Op.Operation()
	var f fate
	var nak uint8
	if x.op == hca.OpRDMAWrite {
		f, nak = q.partOfWrite(w, in, x)
	} else {
		f, nak = q.partOfSend(w, in, x)
	}
	if f == taken {
		rx.off += uint64(len(k.Payload))
	}
	x.leaveWireSRQ()
	in.notes.merge(&x.notes)
	q.r.mu.Lock()
	// A message of one packet that is to come again leaves nothing in progress. One of
	// UC that is dropped leaves its receive for the next.
	keep := f == taken && !op.IsLast() || f == again && !begins || q.r.claimer == orphaned && q.typ == hca.QPTypeUC
	rx.msg = nil
	if keep {
		rx.msg = x
	}
	q.r.mu.Unlock()
	if !keep {
		x.put()
	}
	return f, nak
}

// begin starts a message with its first packet.
func (q *QP) begin(w *wire, in *inbound, x *exec, kept bool) (fate, uint8) {
	k, rx := &in.pkt, &w.rx
	x.q, x.era, x.peer, x.srqn = q, q.era.Load(), nil, k.SRQN
	rx.off, x.length = 0, 0
	op := k.Op.Operation()
	if op >= roce.WriteFirst && op <= roce.WriteOnlyImm {
		if kept {
			q.unclaim(x)
		}
		x.op, x.rkey, x.remoteAddr, x.length = hca.OpRDMAWrite, k.RKey, k.VA, uint64(k.DMALen)
		if !x.enterWireSRQ(q) {
			return refused, roce.NAKInvalidReq
		}
		if x.length > maxMsg {
			x.leaveWireSRQ()
			if q.typ != hca.QPTypeUC {
				q.toErr(hca.EventQPReqErr, &in.notes)
			}
			return refused, roce.NAKInvalidReq
		}
		_, st, ok := x.remote(q, hca.AccessRemoteWrite, x.length)
		if !ok {
			x.leaveWireSRQ()
			in.notes.merge(&x.notes)
			return refused, nakOf(st)
		}
		return taken, 0
	}
	x.op = hca.OpSend
	if !x.enterWireSRQ(q) {
		return refused, roce.NAKInvalidReq
	}
	if kept {
		return taken, 0
	}
	if !q.claimWire(x) {
		x.leaveWireSRQ()
		return q.noReceive(), 0
	}
	return taken, 0
}

// unclaim gives up the receive that a message of UC has left behind: it fails.
func (q *QP) unclaim(x *exec) {
	q.r.mu.Lock()
	if q.r.claimer == orphaned {
		q.r.claimer = nil
		wc := hca.WC{ID: q.r.claimID, Status: hca.WCRemInvReqErr, Opcode: hca.WCRecv, QPN: q.num}
		q.pushOwn(&wc, true, &x.notes)
	}
	q.r.mu.Unlock()
}

// noReceive: on UC the message is dropped.
func (q *QP) noReceive() fate {
	if q.typ == hca.QPTypeUC {
		return refused
	}
	return again
}

// enterWireSRQ finds the SRQ that an XRC request names, for the time of a packet; true
// also if it needs none.
func (x *exec) enterWireSRQ(q *QP) bool {
	if q.typ != hca.QPTypeXRCTgt || x.srq != nil {
		return true
	}
	return x.enterSRQ(q)
}

func (x *exec) leaveWireSRQ() {
	if x.srq != nil {
		x.leaveSRQ()
	}
}

// claimWire takes the oldest receive for a message from the wire.
func (q *QP) claimWire(x *exec) bool {
	r := &q.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.claimer != nil || !canReceive(r.state) {
		return false
	}
	switch {
	case x.srq != nil:
		if !x.srq.pop(x, 0, true) {
			return false
		}
	case q.srq != nil:
		if !q.srq.pop(x, 0, true) {
			return false
		}
	case r.ring.peek() == nil:
		return false
	default:
		x.recv = r.ring.pop(x.rsge[:])
	}
	r.claimer, r.claimID, r.claimSRQ = orphaned, x.recv.id, x.srq
	x.wc = hca.WC{ID: x.recv.id, QPN: q.num, SrcQP: q.r.destQPN, Port: physPort}
	return true
}

// hold takes a message's receive for a packet of it; false if it was taken away.
func (q *QP) holdWire(x *exec) bool {
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	if q.r.claimer != orphaned || q.era.Load() != x.era {
		return false
	}
	q.r.claimer = x
	return true
}

// partOfSend puts a packet of a send into its receive.
func (q *QP) partOfSend(w *wire, in *inbound, x *exec) (fate, uint8) {
	k, rx := &in.pkt, &w.rx
	if !x.enterWireSRQ(q) {
		return refused, roce.NAKInvalidReq
	}
	if !q.holdWire(x) {
		return lost, 0
	}
	defer in.notes.merge(&x.notes)
	x.length = rx.off + uint64(len(k.Payload))
	st := x.checkRecv(q)
	if st == hca.WCSuccess && x.length > maxMsg { // however long the receive is
		st = hca.WCLocLenErr
	}
	if st == hca.WCSuccess {
		x.dst.skip(rx.off)
		if x.dst.write(k.Payload) != nil {
			st = hca.WCLocProtErr
		}
	}
	if st != hca.WCSuccess {
		if st == hca.WCLocLenErr && q.typ == hca.QPTypeUC {
			q.r.mu.Lock() // the receive stays for the next (§9.8.2.2.3)
			if q.r.claimer == x {
				q.r.claimer = orphaned
			}
			q.r.mu.Unlock()
			return refused, 0
		}
		code, ev := uint8(roce.NAKRemoteOp), hca.EventQPFatal
		if st == hca.WCLocLenErr {
			code, ev = roce.NAKInvalidReq, hca.EventQPReqErr
		}
		x.failRecv(q, st, ev)
		return refused, code
	}
	if !k.Op.IsLast() {
		return q.keepWire(x), 0
	}
	x.wc.Opcode, x.wc.ByteLen = hca.WCRecv, uint32(x.length)
	switch k.Op.Operation() {
	case roce.SendLastImm, roce.SendOnlyImm:
		x.wc.Imm, x.wc.Flags = k.Imm, hca.WCWithImm
	case roce.SendLastInv, roce.SendOnlyInv:
		if !q.invalidate(k.Invalidate) {
			// See send: the payload is there, the sender is told of success.
			x.failRecv(q, hca.WCRemInvReqErr, hca.EventQPAccessErr)
			return taken, 0
		}
		x.wc.Imm, x.wc.Flags = k.Invalidate, hca.WCWithInv
	}
	return q.doneWire(w, k, x), 0
}

// keepWire gives a message's receive back until its next packet.
func (q *QP) keepWire(x *exec) fate {
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	switch {
	case q.r.claimer != x:
		return lost
	case q.r.state == hca.QPErr:
		q.r.claimer = nil
		q.flushClaimLocked(&x.notes)
		q.flushRQLocked(&x.notes)
		return lost
	}
	q.r.claimer = orphaned
	return taken
}

// doneWire completes a message's receive.
func (q *QP) doneWire(w *wire, k *roce.Packet, x *exec) fate {
	r := &q.r
	r.mu.Lock()
	if !x.releaseLocked(q) || !canReceive(r.state) {
		if r.state == hca.QPErr && r.claimer == nil {
			q.flushClaimLocked(&x.notes)
			q.flushRQLocked(&x.notes)
		}
		r.mu.Unlock()
		return lost
	}
	r.count.rxBytes += x.length
	r.count.rxPkts += uint64(w.packetsOf(x.length))
	ok := x.pushRecv(q, &x.wc, k.Solicited)
	r.mu.Unlock()
	if !ok {
		q.toErr(hca.EventQPFatal, &x.notes)
	}
	return taken
}

// partOfWrite puts a packet of a write where it belongs.
func (q *QP) partOfWrite(w *wire, in *inbound, x *exec) (fate, uint8) {
	k, rx := &in.pkt, &w.rx
	if q.era.Load() != x.era {
		return lost, 0
	}
	defer in.notes.merge(&x.notes)
	n := uint64(len(k.Payload))
	op := k.Op.Operation()
	if rx.off+n > x.length || k.Op.IsLast() && rx.off+n != x.length {
		if q.typ != hca.QPTypeUC {
			q.toErr(hca.EventQPReqErr, &x.notes)
		}
		return refused, roce.NAKInvalidReq
	}
	imm := op == roce.WriteLastImm || op == roce.WriteOnlyImm
	if imm {
		// Taken first, see write.
		if !x.enterWireSRQ(q) {
			return refused, roce.NAKInvalidReq
		}
		if !q.claimWire(x) {
			return q.noReceive(), 0
		}
		if !q.holdWire(x) {
			return lost, 0
		}
	}
	if n > 0 && x.dst.write(k.Payload) != nil {
		if q.typ == hca.QPTypeUC {
			if imm {
				x.orphan(q)
			}
			return refused, 0
		}
		if imm {
			x.failRecv(q, hca.WCLocProtErr, hca.EventQPFatal)
		} else {
			q.toErr(hca.EventQPFatal, &x.notes)
		}
		return refused, roce.NAKRemoteOp
	}
	if !k.Op.IsLast() {
		return taken, 0
	}
	if imm {
		x.wc.Opcode, x.wc.ByteLen = hca.WCRecvImm, uint32(x.length)
		x.wc.Imm, x.wc.Flags = k.Imm, hca.WCWithImm
		return q.doneWire(w, k, x), 0
	}
	q.r.mu.Lock()
	q.r.count.rxBytes += x.length
	q.r.count.rxPkts += uint64(w.packetsOf(x.length))
	q.r.mu.Unlock()
	return taken, 0
}

// nakOf is the NAK for what a request is refused with.
func nakOf(st hca.WCStatus) uint8 {
	switch st {
	case hca.WCRemAccessErr:
		return roce.NAKRemoteAccess
	case hca.WCRemInvReqErr:
		return roce.NAKInvalidReq
	}
	return roce.NAKRemoteOp
}

// readAsked queues the answer to a read.
func (q *QP) readAsked(w *wire, in *inbound) (fate, uint8) {
	k, rx := &in.pkt, &w.rx
	x, f, nak := q.readSource(in)
	if f != taken {
		return f, nak
	}
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	reads := 0
	for i := range rx.out {
		if rx.out[i].x != nil {
			reads++
		}
	}
	if q.r.wire != w || reads > int(q.r.maxDest) {
		x.put()
		return lost, 0 // more than was agreed: it will come again
	}
	rx.epsn = (k.PSN + w.packetsOf(x.length)) & roce.PSNMask
	rx.msn = (rx.msn + 1) & roce.PSNMask
	q.r.count.rxPkts++
	rx.say(answer{op: roce.ReadRespOnly, psn: k.PSN, msn: rx.msn, syndrome: ackCredits, x: x})
	return taken, 0
}

// readSource checks what a read asks for. On taken x has it.
func (q *QP) readSource(in *inbound) (*exec, fate, uint8) {
	k := &in.pkt
	x := getExec()
	x.q, x.era, x.peer, x.srqn = q, q.era.Load(), nil, k.SRQN
	x.op, x.rkey, x.remoteAddr, x.length = hca.OpRDMARead, k.RKey, k.VA, uint64(k.DMALen)
	if x.length > maxMsg {
		q.toErr(hca.EventQPReqErr, &in.notes)
		x.put()
		return nil, refused, roce.NAKInvalidReq
	}
	if !x.enterWireSRQ(q) {
		in.notes.merge(&x.notes)
		x.put()
		return nil, refused, roce.NAKInvalidReq
	}
	_, st, ok := x.remote(q, hca.AccessRemoteRead, x.length)
	x.leaveWireSRQ()
	if !ok {
		in.notes.merge(&x.notes)
		x.put()
		return nil, refused, nakOf(st)
	}
	return x, taken, 0
}

// atomicAsked does an atomic and queues its answer.
func (q *QP) atomicAsked(w *wire, in *inbound) (fate, uint8) {
	k, rx := &in.pkt, &w.rx
	x := getExec()
	defer x.put()
	defer in.notes.merge(&x.notes)
	x.q, x.era, x.peer, x.srqn = q, q.era.Load(), nil, k.SRQN
	x.op, x.rkey, x.remoteAddr, x.length = hca.OpAtomicCmpSwap, k.RKey, k.VA, atomicSize
	x.compareAdd, x.swap = k.Compare, k.Swap
	need := hca.AccessRemoteAtomic
	switch k.Op.Operation() {
	case roce.FetchAdd:
		x.op, x.compareAdd = hca.OpAtomicFetchAdd, k.Swap
	case roce.AtomicWrite:
		if len(k.Payload) != atomicSize || k.DMALen != atomicSize {
			q.toErr(hca.EventQPReqErr, &x.notes)
			return refused, roce.NAKInvalidReq
		}
		x.op, x.swap, need = hca.OpAtomicWrite, binary.NativeEndian.Uint64(k.Payload), hca.AccessRemoteWrite
	}
	if !x.enterWireSRQ(q) {
		return refused, roce.NAKInvalidReq
	}
	defer x.leaveWireSRQ()
	if _, st, ok := x.remote(q, need, atomicSize); !ok {
		return refused, nakOf(st)
	}
	word := x.small[:atomicSize]
	res, busy := x.exchange(word, func(s *space) bool { return s.tryLock() })
	switch {
	case busy:
		return again, 0
	case res == stopped:
		return lost, 0
	case res != movedAll:
		q.toErr(hca.EventQPFatal, &x.notes)
		return refused, roce.NAKRemoteOp
	}
	orig := binary.NativeEndian.Uint64(word)
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	if q.r.wire != w {
		return lost, 0
	}
	if x.op == hca.OpAtomicWrite {
		rx.doneLocked(q, k, atomicSize)
		return taken, 0
	}
	rx.epsn = (k.PSN + 1) & roce.PSNMask
	rx.msn = (rx.msn + 1) & roce.PSNMask
	rx.saved[rx.nsaved%savedAtomics] = savedAtomic{psn: k.PSN, orig: orig, ok: true}
	rx.nsaved++
	q.r.count.rxBytes += atomicSize
	q.r.count.rxPkts++
	rx.say(answer{op: roce.AtomicAck, psn: k.PSN, msn: rx.msn, syndrome: ackCredits, orig: orig})
	return taken, 0
}

// doneLocked is the end of a flush or an atomic write, whose answer is that of a read
// of no bytes (annex A19; rxe_resp.c, send_read_response_ack).
func (rx *wireRx) doneLocked(q *QP, k *roce.Packet, bytes uint64) {
	rx.epsn = (k.PSN + 1) & roce.PSNMask
	rx.msn = (rx.msn + 1) & roce.PSNMask
	q.r.count.rxBytes += bytes
	q.r.count.rxPkts++
	rx.say(answer{op: roce.ReadRespOnly, psn: k.PSN, msn: rx.msn, syndrome: ackCredits})
}

// flushAsked checks a flush, see flushRemote, and queues its answer.
func (q *QP) flushAsked(w *wire, in *inbound) (fate, uint8) {
	k := &in.pkt
	x := getExec()
	defer x.put()
	defer in.notes.merge(&x.notes)
	x.q, x.era, x.peer = q, q.era.Load(), nil
	x.op, x.rkey, x.remoteAddr, x.length = hca.OpFlush, k.RKey, k.VA, 0
	x.setFlush(&hca.Flush{Length: k.DMALen, Type: k.FlushType, Level: k.FlushLevel})
	f := x.flush()
	if _, st, ok := x.remote(q, f.Access(), uint64(f.Length)); !ok {
		return refused, nakOf(st)
	}
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	if q.r.wire != w {
		return lost, 0
	}
	w.rx.doneLocked(q, k, 0)
	return taken, 0
}

// repeatedLocked answers a request that was done already (§9.7.4.1.7); false if it
// cannot be. r.mu is given up meanwhile.
func (q *QP) repeatedLocked(w *wire, k *roce.Packet) bool {
	rx := &w.rx
	if len(rx.out) >= maxAnswers {
		return false
	}
	switch k.Op.Operation() {
	case roce.ReadRequest:
		last := (k.PSN + w.packetsOf(uint64(k.DMALen)) - 1) & roce.PSNMask
		if roce.PSNDiff(last, rx.epsn) >= 0 || k.DMALen > maxMsg {
			return false
		}
		access, maxDest := q.r.access, q.r.maxDest
		rx.busy = true
		q.r.mu.Unlock()
		x := q.readAgain(k, access&hca.AccessRemoteRead != 0 && maxDest > 0)
		q.r.mu.Lock()
		rx.busy = false
		switch {
		case x == nil:
			return false
		case q.r.wire != w:
			x.put()
			return false
		}
		rx.say(answer{op: roce.ReadRespOnly, psn: k.PSN, msn: rx.msn, syndrome: ackCredits, x: x})
		return true
	case roce.CompareSwap, roce.FetchAdd:
		for i := range rx.saved {
			if s := &rx.saved[i]; s.ok && s.psn == k.PSN {
				rx.say(answer{op: roce.AtomicAck, psn: k.PSN, msn: rx.msn, syndrome: ackCredits, orig: s.orig})
				return true
			}
		}
		return false
	}
	switch k.Op.Operation() {
	case roce.Flush, roce.AtomicWrite:
		rx.say(answer{op: roce.ReadRespOnly, psn: k.PSN, msn: rx.msn, syndrome: ackCredits})
		return true
	}
	// A send or a write: what came last is acknowledged again.
	rx.say(answer{op: roce.Acknowledge, psn: (rx.epsn - 1) & roce.PSNMask, msn: rx.msn, syndrome: ackCredits})
	return true
}

// readAgain is readSource for a read that was answered before; nil if it cannot be
// any more. That is no error: the packet may be a late copy, of a region that has gone
// in good order since.
func (q *QP) readAgain(k *roce.Packet, allowed bool) *exec {
	x := getExec()
	x.q, x.era, x.peer, x.srqn = q, q.era.Load(), nil, k.SRQN
	x.op, x.rkey, x.remoteAddr, x.length = hca.OpRDMARead, k.RKey, k.VA, uint64(k.DMALen)
	pd := q.pd
	if q.typ == hca.QPTypeXRCTgt {
		if s := q.dev.xrcSRQ(k.SRQN); s != nil && s.xrcd == q.xrcd {
			pd = s.pd
		}
	}
	x.dst.segs, x.dst.n, x.dst.i, x.dst.off = x.dst.segs[:0], 0, 0, 0
	if allowed && pd != nil && (x.length == 0 || x.dst.one(pd, q, x.rkey, x.remoteAddr, x.length, hca.AccessRemoteRead)) {
		return x
	}
	x.put()
	return nil
}
