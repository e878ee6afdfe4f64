package soft

import (
	"fmt"
	"sync"

	"github.com/uverbsd/uverbsd/hca"
)

// SRQ is a shared receive queue.
type SRQ struct {
	dev     *Device
	pd      *PD
	handler hca.SRQHandler
	guard   guard
	maxSGE  uint32
	waiters waitList // senders that found it empty; added to under mu

	// mu guards what is below. Inside QP.r.mu.
	mu    sync.Mutex
	ring  recvRing
	limit uint32
}

var _ hca.SRQ = (*SRQ)(nil)

// CreateSRQ: EINVAL for sizes of 0 or over the limits, ENOMEM when MaxSRQ exist.
func (p *PD) CreateSRQ(in hca.SRQInit) (hca.SRQ, error) {
	d := p.ctx.dev
	if in.MaxWR == 0 || in.MaxWR > d.attr.MaxSRQWR || in.MaxSGE == 0 || in.MaxSGE > d.attr.MaxSRQSGE {
		return nil, fmt.Errorf("create srq of %d WRs, %d SGEs: %w", in.MaxWR, in.MaxSGE, einval)
	}
	if err := take(&d.nSRQ, d.attr.MaxSRQ, "create srq"); err != nil {
		return nil, err
	}
	s := &SRQ{dev: d, pd: p, handler: in.Handler, maxSGE: in.MaxSGE, limit: in.Limit}
	s.ring.init(int(in.MaxWR), int(in.MaxSGE))
	s.waiters.ready = s.ready
	return s, nil
}

func (s *SRQ) ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ring.count > 0
}

// Attr reports the sizes; Limit is 0 once it has fired.
func (s *SRQ) Attr() hca.SRQAttr {
	s.mu.Lock()
	defer s.mu.Unlock()
	return hca.SRQAttr{MaxWR: uint32(s.ring.max), MaxSGE: s.maxSGE, Limit: s.limit}
}

// Modify: EINVAL for a size that is 0, over the limit or below what is queued,
// and for a limit over the size.
func (s *SRQ) Modify(a hca.SRQAttr, m hca.SRQAttrMask) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	maxWR, limit := uint32(s.ring.max), s.limit
	if m&hca.SRQMaxWR != 0 {
		maxWR = a.MaxWR
		if maxWR == 0 || maxWR > s.dev.attr.MaxSRQWR || int(maxWR) < s.ring.count {
			return fmt.Errorf("modify srq to %d WRs: %w", maxWR, einval)
		}
	}
	if m&hca.SRQLimit != 0 {
		limit = a.Limit
	}
	if limit > maxWR {
		return fmt.Errorf("modify srq: limit %d over %d WRs: %w", limit, maxWR, einval)
	}
	s.limit, s.ring.max = limit, int(maxWR)
	if len(s.ring.slots) > int(maxWR) {
		s.ring.resize(int(maxWR))
	}
	return nil
}

// PostRecv queues receives; see hca.SRQ.
func (s *SRQ) PostRecv(wrs []hca.RecvWR) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range wrs {
		if len(wrs[i].SGE) > int(s.maxSGE) {
			return i, fmt.Errorf("post srq recv: %d SGEs: %w", len(wrs[i].SGE), einval)
		}
		if !s.ring.push(&wrs[i]) {
			return i, fmt.Errorf("post srq recv: queue of %d is full: %w", s.ring.max, enomem)
		}
	}
	return len(wrs), nil
}

// pop is QP.popLocked for a QP with an SRQ; it raises the limit event.
func (s *SRQ) pop(x *exec, need uint64, unreliable bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.ring.peek()
	switch {
	case w == nil:
		if !unreliable {
			s.waiters.add(x.q)
		}
		return false
	case unreliable && w.total < need:
		return false
	}
	x.recv = s.ring.pop(x.rsge[:])
	if s.limit > 0 && s.ring.count < int(s.limit) {
		s.limit = 0
		if s.handler != nil {
			s.dev.events.add(event{guard: &s.guard, srq: s.handler, ev: hca.EventSRQLimitReached})
		}
	}
	return true
}

// Run wakes as many waiting senders as there are receives.
func (s *SRQ) Run() {
	if s.waiters.n.Load() > 0 {
		s.mu.Lock()
		n := s.ring.count
		s.mu.Unlock()
		for ; n > 0; n-- {
			q := s.waiters.pop()
			if q == nil {
				break
			}
			q.wakeFor(s.pd.ctx)
		}
	}
	s.dev.events.drain()
}

// Close frees the queue; no QP uses it any more.
func (s *SRQ) Close() error {
	s.guard.close()
	for {
		q := s.waiters.pop()
		if q == nil {
			break
		}
		q.wake()
	}
	s.dev.nSRQ.Add(-1)
	return nil
}
