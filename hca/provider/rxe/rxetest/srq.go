package rxetest

import (
	"sync/atomic"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

// SRQ is librxe's side of an SRQ.
type SRQ struct {
	hca.SRQ
	c    *Context
	r    wq
	rq   hca.RecvQueue
	rung atomic.Bool
}

func (p *pd) CreateSRQ(in hca.SRQInit) (hca.SRQ, error) {
	if x, ok := in.XRCD.(xrcd); ok {
		in.XRCD = x.XRCD
	}
	if c, ok := in.CQ.(*CQ); ok {
		in.CQ = c.CQ
	}
	if in.MaxWR < 1 || in.MaxWR > 1<<15 || in.MaxSGE > 32 {
		return p.PD.CreateSRQ(in)
	}
	s := &SRQ{c: p.c}
	var err error
	if s.rq, err = p.c.Queues.NewRecvQueue(in.MaxWR, in.MaxSGE); err != nil {
		return nil, err
	}
	in.RQ = s.rq
	if s.SRQ, err = p.PD.CreateSRQ(in); err != nil {
		s.rq.Close()
		return nil, err
	}
	s.r.Ring = p.c.ringOf(Answer[abi.RXECreateSRQResp](p.c.Queues.SRQAnswer(s.rq, s.Num())).MI)
	s.r.maxSGE = in.MaxSGE
	return s, nil
}

// RecvRing is the client's view.
func (s *SRQ) RecvRing() Ring { return s.r.Ring }

// PostRecv is rxe_post_srq_recv.
func (s *SRQ) PostRecv(wrs []hca.RecvWR) (int, error) { return s.r.post(wrs) }

// Run follows a command only.
func (s *SRQ) Run() {
	if s.rung.Swap(false) {
		s.SRQ.Run()
	}
}

// Modify is rxe_modify_srq.
func (s *SRQ) Modify(a hca.SRQAttr, m hca.SRQAttrMask, _ hca.RecvQueue) error {
	s.rung.Store(true)
	if m&hca.SRQMaxWR == 0 || a.MaxWR < 1 || a.MaxWR > 1<<15 {
		return s.SRQ.Modify(a, m, nil)
	}
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	to, err := s.c.Queues.NewRecvQueue(a.MaxWR, s.r.maxSGE)
	if err != nil {
		return err
	}
	if err := s.SRQ.Modify(a, m, to); err != nil {
		to.Close()
		return err
	}
	s.rq.Close()
	s.rq = to
	s.r.Ring = s.c.ringOf(Answer[abi.RXEMMInfo](s.c.Queues.SRQResizeAnswer(to)))
	return nil
}

// Close is rxe_destroy_srq.
func (s *SRQ) Close() error {
	if err := s.SRQ.Close(); err != nil {
		return err
	}
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if !s.r.closed {
		s.r.closed = true
		s.rq.Close()
	}
	return nil
}
