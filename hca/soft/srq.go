package soft

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
)

// SRQ is a shared receive queue.
type SRQ struct {
	dev     *Device
	pd      *PD
	xrcd    *XRCD // XRC: the domain, the CQ and the number; else nil and 0
	cq      *CQ
	num     uint32
	handler hca.SRQHandler
	guard   guard
	maxSGE  uint32
	mapped  bool     // its receives come without a post
	waiters waitList // senders that found it empty; added to under mu

	users  atomic.Int32 // XRC: requests under way that name it
	closed atomic.Bool  // set under mu

	// mu guards what is below. Inside QP.r.mu.
	mu    sync.Mutex
	ring  recvRing
	limit uint32
}

var _ hca.SRQ = (*SRQ)(nil)

// CreateSRQ: EINVAL for sizes of 0 or over the limits, for an XRC domain without
// a CQ or the other way round, and for either of another device; ENOMEM when
// MaxSRQ exist.
func (p *PD) CreateSRQ(in hca.SRQInit) (hca.SRQ, error) {
	d := p.ctx.dev
	if in.MaxWR == 0 || in.MaxWR > d.attr.MaxSRQWR || in.MaxSGE == 0 || in.MaxSGE > d.attr.MaxSRQSGE {
		return nil, fmt.Errorf("create srq of %d WRs, %d SGEs: %w", in.MaxWR, in.MaxSGE, einval)
	}
	s := &SRQ{dev: d, pd: p, handler: in.Handler, maxSGE: in.MaxSGE, limit: in.Limit, mapped: in.RQ != nil}
	if s.mapped {
		in.MaxWR = uint32(in.RQ.Len())
	}
	if in.XRCD != nil || in.CQ != nil {
		x, ok1 := in.XRCD.(*XRCD)
		c, ok2 := in.CQ.(*CQ)
		if !ok1 || !ok2 || x.dev != d || c.dev != d {
			return nil, fmt.Errorf("create srq: XRC domain and CQ, both of this device, are needed: %w", einval)
		}
		s.xrcd, s.cq = x, c
	}
	if err := take(&d.nSRQ, d.attr.MaxSRQ, "create srq"); err != nil {
		return nil, err
	}
	s.ring.init(int(in.MaxWR), int(in.MaxSGE), in.RQ)
	s.waiters.ready = s.ready
	if s.xrcd != nil {
		if err := d.srqs.insert(s, &s.num); err != nil {
			d.nSRQ.Add(-1)
			return nil, fmt.Errorf("create srq: %w", err)
		}
	}
	return s, nil
}

// Num is an XRC SRQ's number, 0 of a plain one.
func (s *SRQ) Num() uint32 { return s.num }

func (s *SRQ) ready() bool { return s.posted() > 0 }

func (s *SRQ) posted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed.Load() {
		return 0
	}
	return s.ring.posted()
}

// Attr reports the sizes; Limit is 0 once it has fired.
func (s *SRQ) Attr() hca.SRQAttr {
	s.mu.Lock()
	defer s.mu.Unlock()
	return hca.SRQAttr{MaxWR: uint32(s.ring.max), MaxSGE: s.maxSGE, Limit: s.limit}
}

// Modify: EINVAL for a size that is 0, over the limit or below what is queued,
// for a limit over the size, and without a new queue for a mapped one's size.
func (s *SRQ) Modify(a hca.SRQAttr, m hca.SRQAttrMask, to hca.RecvQueue) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed.Load() || (to != nil) != (s.mapped && m&hca.SRQMaxWR != 0) {
		return fmt.Errorf("modify srq: closed, or not mapped alike: %w", einval)
	}
	maxWR, limit := uint32(s.ring.max), s.limit
	if m&hca.SRQMaxWR != 0 {
		maxWR = a.MaxWR
		if maxWR == 0 || maxWR > s.dev.attr.MaxSRQWR || int(maxWR) < s.ring.posted() {
			return fmt.Errorf("modify srq to %d WRs: %w", maxWR, einval)
		}
		if to != nil {
			maxWR = uint32(to.Len())
		}
	}
	if m&hca.SRQLimit != 0 {
		limit = a.Limit
	}
	if limit > maxWR {
		return fmt.Errorf("modify srq: limit %d over %d WRs: %w", limit, maxWR, einval)
	}
	if to != nil {
		if !s.ring.queue.MoveTo(to) {
			return fmt.Errorf("modify srq to %d WRs: more are queued: %w", maxWR, einval)
		}
		s.ring.queue = to
	}
	s.limit, s.ring.max = limit, int(maxWR)
	if len(s.ring.slots) > int(maxWR) {
		s.ring.resize(int(maxWR))
	}
	return nil
}

// PostRecv queues receives; see hca.SRQ.
func (s *SRQ) PostRecv(wrs []hca.RecvWR) (int, error) {
	if s.mapped {
		return 0, fmt.Errorf("post srq recv: they are mapped: %w", einval)
	}
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
	if s.closed.Load() { // XRC: the sender looks again and does not find it
		x.q.woken.Store(true)
		return false
	}
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
	s.ring.done()
	if s.limit > 0 && s.ring.posted() < int(s.limit) {
		s.limit = 0
		if s.handler != nil {
			s.dev.events.add(event{guard: &s.guard, srq: s.handler, ev: hca.EventSRQLimitReached})
		}
	}
	return true
}

// Run wakes as many waiting senders as there are receives.
func (s *SRQ) Run() {
	var w notes
	s.kick(nil, &w)
	s.dev.events.drain()
	w.wake()
}

func (s *SRQ) kick(h *holder, w *notes) {
	if s.waiters.n.Load() == 0 {
		return
	}
	for n := s.posted(); n > 0; n-- {
		q := s.waiters.pop()
		if q == nil {
			return
		}
		q.wakeFor(s.pd.ctx, h, w)
	}
}

// Close frees the queue; no QP uses it any more. But requests can name an XRC
// SRQ: it waits, within stuckWait, for those under way, and whatever becomes of
// them nothing is completed after it.
func (s *SRQ) Close() error {
	s.mu.Lock()
	again := s.closed.Swap(true)
	s.mu.Unlock()
	if again {
		return nil
	}
	if s.xrcd != nil {
		s.dev.srqs.remove(s.num)
	}
	s.guard.close()
	for {
		q := s.waiters.pop()
		if q == nil {
			break
		}
		q.wake()
	}
	waitUntil(func() bool { return s.users.Load() == 0 })
	s.dev.nSRQ.Add(-1)
	return nil
}
