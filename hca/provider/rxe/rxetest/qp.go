package rxetest

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

// wq is librxe's struct rxe_wq.
type wq struct {
	// mu is librxe's lock of the queue.
	mu     sync.Mutex
	Ring   Ring
	maxSGE uint32
	closed bool
}

func (q *wq) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
}

// post is rxe_post_one_recv for each.
func (q *wq) post(wrs []hca.RecvWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range wrs {
		w := &wrs[i]
		switch {
		case q.closed || uint32(len(w.SGE)) > q.maxSGE:
			return i, fmt.Errorf("post recv: %w", unix.EINVAL)
		case q.Ring.Full():
			return i, fmt.Errorf("post recv: %w", unix.ENOMEM)
		}
		at := q.Ring.Producer()
		e, data, sum := q.Ring.Recv(at), q.Ring.RecvData(at), uint32(0)
		e.WRID = w.ID
		for k, g := range w.SGE {
			PutSGE(data, k, abi.RXESGE(g))
			sum += g.Length
		}
		e.DMA = abi.RXEDMAInfo{Length: sum, Resid: sum, NumSGE: uint32(len(w.SGE))}
		q.Ring.SetProducer(q.Ring.Next(at))
	}
	return len(wrs), nil
}

// QP is librxe's side of a QP.
type QP struct {
	hca.QP
	c    *Context
	init hca.QPInit // as the client gave it
	s, r wq
	sq   hca.SendQueue // nil: XRC
	rq   hca.RecvQueue // nil: none, or an SRQ
	cap  hca.QPCap
	rung atomic.Bool // there was a command since the last Run
}

func (p *pd) CreateQP(in hca.QPInit) (hca.QP, error) {
	q := &QP{c: p.c, init: in}
	if c, ok := in.SendCQ.(*CQ); ok {
		in.SendCQ = c.CQ
	}
	if c, ok := in.RecvCQ.(*CQ); ok {
		in.RecvCQ = c.CQ
	}
	if s, ok := in.SRQ.(*SRQ); ok {
		in.SRQ = s.SRQ
	}
	var err error
	if in.Type == hca.QPTypeRC || in.Type == hca.QPTypeUC || in.Type == hca.QPTypeUD {
		err = q.makeQueues(&in)
	}
	if err == nil {
		q.QP, err = p.PD.CreateQP(in)
	}
	if err != nil {
		q.closeQueues()
		return nil, err
	}
	q.cap = q.QP.Cap()
	if q.sq != nil {
		a := Answer[abi.RXECreateQPResp](p.c.Queues.QPAnswer(q.rq, q.sq))
		q.s.Ring, q.s.maxSGE = p.c.ringOf(a.SQ), q.cap.MaxSendSGE
		if q.rq != nil {
			q.r.Ring, q.r.maxSGE = p.c.ringOf(a.RQ), q.cap.MaxRecvSGE
		}
	}
	return q, nil
}

// makeQueues leaves sizes that are no good to the device.
func (q *QP) makeQueues(in *hca.QPInit) error {
	c := in.Cap
	if c.MaxSendWR > 1<<15 || c.MaxRecvWR > 1<<15 || c.MaxSendSGE > 32 || c.MaxRecvSGE > 32 || c.MaxInline > 512 {
		return nil
	}
	var err error
	if q.sq, err = q.c.Queues.NewSendQueue(c); err != nil {
		return err
	}
	in.SQ = q.sq
	if in.SRQ != nil {
		return nil
	}
	if q.rq, err = q.c.Queues.NewRecvQueue(c.MaxRecvWR, c.MaxRecvSGE); err != nil {
		return err
	}
	in.RQ = q.rq
	return nil
}

func (q *QP) closeQueues() {
	if q.sq != nil {
		q.s.close()
		q.sq.Close()
	}
	if q.rq != nil {
		q.r.close()
		q.rq.Close()
	}
	q.sq, q.rq = nil, nil
}

// Close is rxe_destroy_qp.
func (q *QP) Close() error {
	if err := q.QP.Close(); err != nil {
		return err
	}
	if q.s.Ring.Mem == nil {
		return nil
	}
	q.s.mu.Lock()
	again := q.s.closed
	q.s.mu.Unlock()
	if !again {
		q.closeQueues()
	}
	return nil
}

// Query puts the client's own objects in.
func (q *QP) Query() (hca.QPAttr, hca.QPInit) {
	a, in := q.QP.Query()
	in.SendCQ, in.RecvCQ, in.SRQ = q.init.SendCQ, q.init.RecvCQ, q.init.SRQ
	return a, in
}

// Modify is a command, after which the device may look around.
func (q *QP) Modify(a *hca.QPAttr, m hca.QPAttrMask) error {
	q.rung.Store(true)
	return q.QP.Modify(a, m)
}

// Run follows a command only: nobody tells the device of a receive.
func (q *QP) Run() {
	if q.s.Ring.Mem == nil || q.rung.Swap(false) {
		q.QP.Run()
	}
}

// SendRing and RecvRing are the client's views, for tests that write into them by
// themselves.
func (q *QP) SendRing() Ring { return q.s.Ring }

// RecvRing is the receive queue's.
func (q *QP) RecvRing() Ring { return q.r.Ring }

// Doorbell is post_send_db.
func (q *QP) Doorbell() error {
	q.rung.Store(true)
	_, err := q.QP.PostSend(nil)
	return err
}

// PostSend is rxe_post_send.
func (q *QP) PostSend(wrs []hca.SendWR) (int, error) {
	if q.s.Ring.Mem == nil {
		return q.QP.PostSend(wrs)
	}
	var n int
	var err error
	q.s.mu.Lock()
	for n = range wrs {
		if err = q.postOne(&wrs[n]); err != nil {
			break
		}
	}
	q.s.mu.Unlock()
	if e := q.Doorbell(); e != nil {
		return 0, e
	}
	if err != nil {
		return n, err
	}
	return len(wrs), nil
}

// postOne is post_one_send: validate_send_wr, init_send_wqe and convert_send_wr. It
// does not look at where an atomic goes: ibv_wr_atomic_* do not either.
func (q *QP) postOne(w *hca.SendWR) error {
	length := uint64(len(w.Inline))
	for _, g := range w.SGE {
		length += uint64(g.Length)
	}
	atomics := w.Opcode == hca.OpAtomicCmpSwap || w.Opcode == hca.OpAtomicFetchAdd
	switch {
	case q.s.closed,
		uint32(len(w.SGE)) > q.s.maxSGE,
		atomics && length < 8,
		w.Flags&hca.SendInline != 0 && length > uint64(q.cap.MaxInline),
		w.Opcode == hca.OpBindMW && (length > 0 || len(w.SGE) > 0 || w.Imm != 0 || q.init.Type == hca.QPTypeUD):
		return fmt.Errorf("post send: %w", unix.EINVAL)
	case q.s.Ring.Full():
		return fmt.Errorf("post send: %w", unix.ENOMEM)
	}
	at := q.s.Ring.Producer()
	e, data := q.s.Ring.Send(at), q.s.Ring.SendData(at)
	*e = abi.RXESendWQE{WR: abi.RXESendWR{WRID: w.ID, Opcode: uint32(w.Opcode), SendFlags: uint32(w.Flags), Ex: w.Imm}}
	switch w.Opcode {
	case hca.OpRDMAWrite, hca.OpRDMAWriteImm, hca.OpRDMARead:
		*rdmaOf(&e.WR) = abi.RXERDMAWR{RemoteAddr: w.RemoteAddr, RKey: w.RKey}
	case hca.OpSend, hca.OpSendImm:
		if h, ok := w.AH.(*ah); ok && q.init.Type == hca.QPTypeUD {
			*udOf(&e.WR) = abi.RXEUDWR{RemoteQPN: w.RemoteQPN, RemoteQKey: w.RemoteQKey, AHNum: h.num}
		}
	case hca.OpAtomicCmpSwap, hca.OpAtomicFetchAdd:
		*atomicOf(&e.WR) = abi.RXEAtomicWR{RemoteAddr: w.RemoteAddr, CompareAdd: w.CompareAdd, Swap: w.Swap, RKey: w.RKey}
	case hca.OpAtomicWrite: // wr_atomic_write
		*rdmaOf(&e.WR) = abi.RXERDMAWR{RemoteAddr: w.RemoteAddr, RKey: w.RKey}
		length = 8
	case hca.OpFlush: // wr_flush
		*flushOf(&e.WR) = abi.RXEFlushWR{RemoteAddr: w.RemoteAddr, RKey: w.RKey, Type: w.Flush.Type, Level: w.Flush.Level}
		length = uint64(w.Flush.Length)
	case hca.OpBindMW:
		b := &w.Bind
		*mwOf(&e.WR) = abi.RXEMWWR{Addr: b.Addr, Length: b.Length, MRLKey: b.MR, MWRKey: b.MW, RKey: b.RKey, Access: uint32(b.Access)}
	}
	e.DMA = abi.RXEDMAInfo{Length: uint32(length), Resid: uint32(length), NumSGE: uint32(len(w.SGE))}
	switch {
	case w.Opcode == hca.OpAtomicWrite:
		binary.NativeEndian.PutUint64(data, w.Swap)
	case w.Flags&hca.SendInline != 0:
		copy(data, w.Inline)
		if length > 0 {
			e.DMA.NumSGE = 1
		}
	}
	for k, g := range w.SGE {
		PutSGE(data, k, abi.RXESGE(g))
	}
	q.s.Ring.SetProducer(q.s.Ring.Next(at))
	return nil
}

// PostRecv is rxe_post_recv. In ERR it rings the doorbell: whoever waits there for
// what he posts has to make the device look.
func (q *QP) PostRecv(wrs []hca.RecvWR) (int, error) {
	if q.s.Ring.Mem == nil {
		return q.QP.PostRecv(wrs)
	}
	a, _ := q.QP.Query()
	if q.r.Ring.Mem == nil || a.State == hca.QPReset {
		return 0, fmt.Errorf("post recv: %w", unix.EINVAL)
	}
	n, err := q.r.post(wrs)
	if a.State == hca.QPErr {
		if e := q.Doorbell(); e != nil {
			return 0, e
		}
	}
	return n, err
}
