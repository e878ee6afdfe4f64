package soft

import (
	"fmt"

	"github.com/uverbsd/uverbsd/hca"
)

// wcOpcode is the completion opcode of a send opcode.
func wcOpcode(op hca.SendOpcode) hca.WCOpcode {
	switch op {
	case hca.OpRDMAWrite, hca.OpRDMAWriteImm:
		return hca.WCRDMAWrite
	case hca.OpRDMARead:
		return hca.WCRDMARead
	case hca.OpAtomicCmpSwap:
		return hca.WCCompSwap
	case hca.OpAtomicFetchAdd:
		return hca.WCFetchAdd
	case hca.OpMaskedAtomicCmpSwap:
		return hca.WCMaskedCompSwap
	case hca.OpMaskedAtomicFetchAdd:
		return hca.WCMaskedFetchAdd
	case hca.OpBindMW:
		return hca.WCBindMW
	case hca.OpLocalInv:
		return hca.WCLocalInv
	case hca.OpFlush:
		return hca.WCFlush
	case hca.OpAtomicWrite:
		return hca.WCAtomicWrite
	}
	return hca.WCSend
}

// checkSend says why a work request cannot be posted; nil if it can. Keys and
// addresses are looked at when it is executed.
func (q *QP) checkSend(w *hca.SendWR) (*AH, error) {
	atomic := isAtomic(w.Opcode)
	rdAtomic := usesRdAtomic(w.Opcode)
	switch w.Opcode {
	case hca.OpSend, hca.OpSendImm:
	case hca.OpRDMAWrite, hca.OpRDMAWriteImm, hca.OpBindMW, hca.OpLocalInv:
		// Binding and invalidating on UC too, as ibv_post_send(3) has it; rxe does
		// not know the latter there.
		if q.typ == hca.QPTypeUD {
			return nil, fmt.Errorf("opcode %d on UD: %w", w.Opcode, einval)
		}
	case hca.OpSendInv:
		if !reliable(q.typ) {
			return nil, fmt.Errorf("send with invalidate: %w", einval)
		}
	default:
		if !rdAtomic {
			return nil, fmt.Errorf("opcode %d: %w", w.Opcode, einval)
		}
	}
	if rdAtomic && (!reliable(q.typ) || q.s.attr.MaxRdAtomic == 0) {
		return nil, fmt.Errorf("opcode %d without read and atomic resources: %w", w.Opcode, einval)
	}
	if len(w.SGE) > int(q.cap.MaxSendSGE) {
		return nil, fmt.Errorf("%d SGEs: %w", len(w.SGE), einval)
	}
	if atomic && (len(w.SGE) == 0 || w.SGE[0].Length < atomicSize) {
		return nil, fmt.Errorf("atomic without room for its result: %w", einval)
	}
	if (w.Opcode == hca.OpFlush || w.Opcode == hca.OpAtomicWrite) && (q.typ != hca.QPTypeRC || len(w.SGE) > 0) {
		return nil, fmt.Errorf("opcode %d with SGEs, or not on RC: %w", w.Opcode, einval)
	}
	if w.Flags&hca.SendInline != 0 {
		if rdAtomic || isLocal(w.Opcode) || len(w.SGE) > 0 || uint64(len(w.Inline)) > uint64(q.cap.MaxInline) {
			return nil, fmt.Errorf("%d bytes inline: %w", len(w.Inline), einval)
		}
	} else if len(w.Inline) > 0 {
		return nil, fmt.Errorf("inline bytes without the flag: %w", einval)
	}
	if q.typ != hca.QPTypeUD {
		return nil, nil
	}
	ah, ok := w.AH.(*AH)
	if !ok || ah == nil || ah.pd != q.pd {
		return nil, fmt.Errorf("address handle of another PD: %w", einval)
	}
	return ah, nil
}

// PostSend queues sends; see hca.QP. It allocates only while the ring grows.
func (q *QP) PostSend(wrs []hca.SendWR) (int, error) {
	var n notes
	if q.sq != nil {
		return q.doorbell(len(wrs), &n)
	}
	q.s.mu.Lock()
	done, err := q.postSendLocked(wrs, &n)
	q.s.mu.Unlock()
	if !n.empty() {
		n.later(q.dev)
	}
	return done, err
}

func (q *QP) postSendLocked(wrs []hca.SendWR, n *notes) (int, error) {
	state := q.s.attr.State
	if q.s.closed || state < hca.QPRTS || q.xrcd != nil {
		return 0, fmt.Errorf("post send in state %d: %w", state, einval)
	}
	for i := range wrs {
		w := &wrs[i]
		ah, err := q.checkSend(w)
		if err != nil {
			return i, fmt.Errorf("post send: %w", err)
		}
		// Flushed at once, unless a runner still has to flush what came before.
		if state >= hca.QPSQE && !q.sendBusyLocked() {
			if q.s.ring.max == 0 {
				return i, fmt.Errorf("post send: no send queue: %w", enomem)
			}
			q.pushSend(w.ID, w.Opcode, hca.WCWRFlushErr, 0, n)
			continue
		}
		if !q.s.ring.push(w, ah) {
			return i, fmt.Errorf("post send: queue of %d is full: %w", q.s.ring.max, enomem)
		}
	}
	return len(wrs), nil
}

// PostRecv queues receives; see hca.QP. EINVAL in RESET, on a QP with an SRQ or
// a mapped receive queue and on XRC.
func (q *QP) PostRecv(wrs []hca.RecvWR) (int, error) {
	var n notes
	q.r.mu.Lock()
	done, err := q.postRecvLocked(wrs, &n)
	q.r.mu.Unlock()
	if !n.empty() {
		n.later(q.dev)
	}
	return done, err
}

func (q *QP) postRecvLocked(wrs []hca.RecvWR, n *notes) (int, error) {
	r := &q.r
	if r.state == hca.QPReset || q.recvCQ == nil || q.srq != nil || q.rq != nil {
		return 0, fmt.Errorf("post recv in state %d: %w", r.state, einval)
	}
	for i := range wrs {
		w := &wrs[i]
		if len(w.SGE) > int(q.cap.MaxRecvSGE) {
			return i, fmt.Errorf("post recv: %d SGEs: %w", len(w.SGE), einval)
		}
		if r.state == hca.QPErr && r.claimer == nil {
			if r.ring.max == 0 {
				return i, fmt.Errorf("post recv: no receive queue: %w", enomem)
			}
			q.pushFlushedRecv(w.ID, n)
			continue
		}
		if !r.ring.push(w) {
			return i, fmt.Errorf("post recv: queue of %d is full: %w", r.ring.max, enomem)
		}
	}
	return len(wrs), nil
}

// pushSend completes a send; false if the CQ is overrun.
func (q *QP) pushSend(id uint64, op hca.SendOpcode, st hca.WCStatus, bytes uint32, n *notes) bool {
	wc := hca.WC{ID: id, Status: st, Opcode: wcOpcode(op), ByteLen: bytes, QPN: q.num}
	return q.sendCQ.push(&wc, false, n)
}
