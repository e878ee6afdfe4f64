package rxe

import (
	"encoding/binary"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

// compQueue is what the client polls.
type compQueue struct {
	ring
	prod uint32 // the daemon's: where the next one goes
	wc   abi.WC // what Push writes
}

var _ hca.CompQueue = (*compQueue)(nil)

// Push writes a completion: the members of struct ib_uverbs_wc, as rxe_poll_cq of
// librxe copies them.
func (q *compQueue) Push(wc *hca.WC, solicited bool) bool {
	next := (q.prod + 1) & q.mask
	if next == q.consumer() {
		return false
	}
	q.wc = abi.WC{
		WRID: wc.ID, Status: uint32(wc.Status), Opcode: uint32(wc.Opcode), VendorErr: wc.VendorErr,
		ByteLen: wc.ByteLen, Imm: wc.Imm, QPNum: wc.QPN, SrcQP: wc.SrcQP, WCFlags: uint32(wc.Flags),
		PKeyIndex: wc.PKeyIndex, SLID: wc.SLID, SL: wc.SL, DLIDPathBits: wc.DLIDPathBit, PortNum: wc.Port,
	}
	copyWC(q.entry(q.prod), &q.wc)
	q.prod = next
	q.setProducer(next)
	return true
}

// Queued is how many the client says it has not taken.
func (q *compQueue) Queued() int { return int((q.prod - q.consumer()) & q.mask) }

// MoveTo is rxe_queue.c's resize_finish.
func (q *compQueue) MoveTo(to hca.CompQueue) bool {
	c, ok := to.(*compQueue)
	if !ok {
		return false
	}
	n, ok := q.copyFrom(&c.ring, q.consumer(), q.prod)
	if !ok {
		return false
	}
	c.prod = n
	c.setConsumer(0)
	c.setProducer(n)
	return true
}

// atomicSize is what an atomic write carries in bytes. Every entry has room for it: one
// without pieces is 208 bytes, and takes 256.
const atomicSize = 8

// sendQueue is where the client writes sends.
type sendQueue struct {
	inbox
	queues            *queues
	maxSGE, maxInline uint32
	wqe               abi.RXESendWQE // the copy of the request at hand
}

var _ hca.SendQueue = (*sendQueue)(nil)

// Cap is what the queue has.
func (q *sendQueue) Cap() hca.QPCap {
	return hca.QPCap{MaxSendWR: q.mask, MaxSendSGE: q.maxSGE, MaxInline: q.maxInline}
}

// Next copies the next request.
func (q *sendQueue) Next(w *hca.SendWR) bool {
	e := q.take()
	if e == nil {
		return false
	}
	copySend(&q.wqe, e)
	wr := &q.wqe.WR
	w.ID, w.Opcode, w.Flags, w.Imm = wr.WRID, hca.SendOpcode(wr.Opcode), hca.SendFlags(wr.SendFlags), wr.Ex
	payload := true
	switch w.Opcode {
	case hca.OpRDMAWrite, hca.OpRDMAWriteImm, hca.OpRDMARead:
		f := rdmaOf(wr)
		w.RemoteAddr, w.RKey = f.RemoteAddr, f.RKey
	case hca.OpSend, hca.OpSendImm:
		// Which are a UD QP's; of any other these are not looked at. An address in
		// the request itself (ah_num 0) is for kernels that give handles no number.
		f := udOf(wr)
		w.RemoteQPN, w.RemoteQKey, w.RemotePKIdx = f.RemoteQPN, f.RemoteQKey, f.PKeyIndex
		w.AH = q.queues.ah(f.AHNum)
	case hca.OpSendInv:
	case hca.OpAtomicCmpSwap, hca.OpAtomicFetchAdd:
		f := atomicOf(wr)
		w.RemoteAddr, w.RKey, w.CompareAdd, w.Swap = f.RemoteAddr, f.RKey, f.CompareAdd, f.Swap
	case hca.OpAtomicWrite:
		// The eight bytes are where others have their pieces (wr_atomic_write).
		payload = false
		f := rdmaOf(wr)
		w.RemoteAddr, w.RKey = f.RemoteAddr, f.RKey
		if q.wqe.DMA.Length != atomicSize {
			w.Opcode = hca.OpInvalid
		}
		w.Swap = binary.NativeEndian.Uint64(e[sendWQESize:])
	case hca.OpFlush:
		payload = false
		f := flushOf(wr) // whose length librxe does not set
		w.RemoteAddr, w.RKey = f.RemoteAddr, f.RKey
		w.Flush = hca.Flush{Length: q.wqe.DMA.Length, Type: f.Type, Level: f.Level}
	case hca.OpLocalInv:
		payload = false
	case hca.OpBindMW:
		payload = false
		f := mwOf(wr)
		w.Bind = hca.Bind{MW: f.MWRKey, MR: f.MRLKey, RKey: f.RKey, Access: hca.Access(f.Access), Addr: f.Addr, Length: f.Length}
	default:
		w.Opcode = hca.OpInvalid
		return true
	}
	w.SGE, w.Inline = w.SGE[:0], w.Inline[:0]
	if payload && !q.payload(w, e[sendWQESize:]) {
		w.SGE, w.Inline, w.Opcode = w.SGE[:0], w.Inline[:0], hca.OpInvalid
	}
	return true
}

// payload copies the pieces or the inline bytes; false if they are too many, or
// if the length that the client gives, of 32 bits, is not theirs.
func (q *sendQueue) payload(w *hca.SendWR, e []byte) bool {
	d := &q.wqe.DMA
	if w.Flags&hca.SendInline != 0 {
		if d.Length > q.maxInline || int(d.Length) > cap(w.Inline) {
			return false
		}
		w.Inline = w.Inline[:d.Length]
		copy(w.Inline, e)
		return true
	}
	if d.NumSGE > q.maxSGE || int(d.NumSGE) > cap(w.SGE) {
		return false
	}
	w.SGE = w.SGE[:d.NumSGE]
	copySGEs(w.SGE, e)
	var sum uint32
	for i := range w.SGE {
		sum += w.SGE[i].Length
	}
	return sum == d.Length
}

// recvQueue is where the client writes receives.
type recvQueue struct {
	inbox
	maxSGE uint32
	wqe    abi.RXERecvWQE // the copy of the receive at hand
}

var _ hca.RecvQueue = (*recvQueue)(nil)

// Next copies the next receive. Its length is not looked at: it is what its pieces
// have.
func (q *recvQueue) Next(w *hca.RecvWR) (ok, bad bool) {
	e := q.take()
	if e == nil {
		return false, false
	}
	copyRecv(&q.wqe, e)
	w.ID, w.SGE = q.wqe.WRID, w.SGE[:0]
	n := q.wqe.DMA.NumSGE
	if n > q.maxSGE || int(n) > cap(w.SGE) {
		return true, true
	}
	w.SGE = w.SGE[:n]
	copySGEs(w.SGE, e[recvWQESize:])
	return true, false
}

// MoveTo is rxe_queue.c's resize_finish.
func (q *recvQueue) MoveTo(to hca.RecvQueue) bool {
	r, ok := to.(*recvQueue)
	return ok && r.maxSGE == q.maxSGE && q.moveTo(&r.inbox)
}
