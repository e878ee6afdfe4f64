package soft

import (
	"fmt"

	"github.com/uverbsd/uverbsd/hca"
)

// XRCD is an XRC domain: target QPs that belong to it reach the SRQs that belong
// to it (IBTA 1.2.1 annex A14).
//
// A target QP has neither PD nor receives: every request names an SRQ, whose
// receives, CQ and PD serve it. exec.srq is that SRQ while a request is
// executed, responder.claimSRQ while one of its receives is claimed. The SRQ can
// be closed meanwhile, because no QP holds it: SRQ.closed and SRQ.users are to
// it what MR.dead and MR.users are to a region.
type XRCD struct{ dev *Device }

var _ hca.XRCD = (*XRCD)(nil)

// AllocXRCD: ENOMEM when maxXRCD exist.
func (d *Device) AllocXRCD() (hca.XRCD, error) {
	if err := take(&d.nXRCD, maxXRCD, "alloc xrcd"); err != nil {
		return nil, err
	}
	return &XRCD{dev: d}, nil
}

// CreateQP makes a target QP; EINVAL for any other type, ENOMEM when MaxQP exist.
func (x *XRCD) CreateQP(in hca.QPInit) (hca.QP, error) {
	if in.Type != hca.QPTypeXRCTgt {
		return nil, fmt.Errorf("create qp: type %d in an XRC domain: %w", in.Type, einval)
	}
	q := &QP{dev: x.dev, xrcd: x, typ: in.Type, handler: in.Handler}
	if err := q.add(); err != nil {
		return nil, err
	}
	return q, nil
}

// Close frees the domain's place.
func (x *XRCD) Close() error {
	x.dev.nXRCD.Add(-1)
	return nil
}

// enter counts a request in; false once the SRQ is closed.
func (s *SRQ) enter() bool {
	s.users.Add(1)
	if s.closed.Load() {
		s.users.Add(-1)
		return false
	}
	return true
}

// push completes a receive of an XRC SRQ, unless it was closed; false on overrun
// of its CQ.
func (s *SRQ) push(wc *hca.WC, solicited bool, n *notes) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed.Load() {
		return true
	}
	return s.cq.push(wc, solicited, n)
}

// enterSRQ finds the SRQ that the request names at p and counts the request in
// until leaveSRQ. Without one in p's domain the responder fails: the
// requester is told of an invalid request, and the target QP has the event that
// the kernel's drivers have for an invalid XRCETH and for a domain violation
// (qedr_affiliated_event).
func (x *exec) enterSRQ(p *QP) bool {
	s := p.dev.xrcSRQ(x.srqn)
	if s == nil || s.xrcd != p.xrcd || !s.enter() {
		p.toErr(hca.EventQPAccessErr, &x.notes)
		return false
	}
	x.srq = s
	return true
}

func (x *exec) leaveSRQ() {
	x.srq.users.Add(-1)
	x.srq = nil
}

// peerPD is the domain whose regions the request may reach at p: a target QP has
// none, the SRQ's counts.
func (x *exec) peerPD(p *QP) *PD {
	if x.srq != nil {
		return x.srq.pd
	}
	return p.pd
}

// pushRecv completes the receive that x has claimed at p; false on overrun.
func (x *exec) pushRecv(p *QP, wc *hca.WC, solicited bool) bool {
	if x.srq != nil {
		return x.srq.push(wc, solicited, &x.notes)
	}
	return p.pushOwn(wc, solicited, &x.notes)
}

// reliable: the types that are acknowledged.
func reliable(t hca.QPType) bool {
	return t == hca.QPTypeRC || t == hca.QPTypeXRCIni || t == hca.QPTypeXRCTgt
}

// peerType is the type that a connected QP's peer has.
func peerType(t hca.QPType) hca.QPType {
	if t == hca.QPTypeXRCIni {
		return hca.QPTypeXRCTgt
	}
	return t
}
