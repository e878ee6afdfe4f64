package soft

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
)

// waitKind says what the head of a send queue waits for.
type waitKind uint8

const (
	waitNone waitKind = iota
	waitRNR           // a receive at the peer
	waitPeer          // the peer itself
)

// requester is the half of a QP that sends. It also holds the attributes.
type requester struct {
	// mu guards the rest. Outermost but for QP.modMu.
	mu     sync.Mutex
	attr   hca.QPAttr // as Query reports it; attr.State is the QP's state
	ring   sendRing
	closed bool

	// owner is who runs the queue: the token. The head of the ring is his while
	// he has it. Nil when nobody does.
	owner   *exec
	started bool // the head was begun: SQD lets it finish
	drain   bool // SQD: EventSQDrained is still to come

	parked    bool     // the head waits; QP.woken ends that
	wait      waitKind // what for; waitUntil and rnrLeft belong to it
	waitUntil time.Time
	waitSince time.Time // waitRNR: when the head first found no receive
	rnrLeft   uint8
	absent    bool // parked in the fabric, under attr.DestQPN
	timer     *time.Timer

	wire *wire // to a peer on another host; else nil. Changed under responder.mu too.

	count counters // tx only
	heard heard    // since RESET
	mcast []hca.GID
}

// responder is the half of a QP that receives.
type responder struct {
	waiters waitList // senders that found no receive; added to under mu

	// mu guards the rest. Inside requester.mu of the same QP, or alone.
	mu    sync.Mutex
	state hca.QPState // mirror of requester.attr.State
	ring  recvRing    // empty with an SRQ

	// claimer is who fills the receive claimID: one at a time, because a
	// connected QP has one peer and a UD QP takes its datagrams one by one.
	claimer  *exec
	claimID  uint64
	claimSRQ *SRQ // XRC: whose receive it is
	refused  bool // somebody was turned away because of claimer
	rnrSRQ   *SRQ // XRC: where the sender last waited for a receive

	commEst bool // EventCommEst was raised since RTR
	destQPN uint32
	av      hca.AHAttr
	access  hca.Access
	qkey    uint32
	maxDest uint8 // max_dest_rd_atomic
	minRNR  uint8
	inq     []*dgram // UD: what came in and has no receive yet taken
	wire    *wire    // as requester.wire

	count counters // rx and dropped only
}

// QP is a queue pair.
type QP struct {
	dev            *Device
	pd             *PD   // nil on an XRC target
	xrcd           *XRCD // of an XRC target
	num            uint32
	typ            hca.QPType
	sendCQ, recvCQ *CQ // recvCQ is nil on XRC, both are on an XRC target
	srq            *SRQ
	sq             hca.SendQueue // mapped, else nil; used as s.ring's
	rq             hca.RecvQueue // mapped, else nil; used as r.ring's
	mapsRecv       bool          // its receives, or its SRQ's, come without a post
	handler        hca.QPHandler
	guard          guard
	sigAll         bool
	cap            hca.QPCap

	// era counts the transitions to RESET and ERR and the close: a copy that
	// began in another era stops at its next chunk.
	era atomic.Uint32

	// modMu serialises Modify and Close; it is held while they wait. Outermost.
	modMu sync.Mutex

	s requester
	r responder

	windows windowList // of type 2, bound by this QP

	woken              atomic.Bool              // what the head waited for may be there
	waitIn             atomic.Pointer[waitList] // list it is parked in; links under its mu
	waitPrev, waitNext *QP
	wokenBy            atomic.Pointer[waitList] // see passOn
	poolNext           *QP                      // under pool.mu
	poolQueued         bool
}

var _ hca.QP = (*QP)(nil)

// Values of enum ib_qp_type that package hca does not name.
const (
	qptRawIPv6      = 5
	qptRawEthertype = 6
)

// checkType is the switch of rvt_create_qp and rxe_qp_chk_init, whose default is
// EOPNOTSUPP; but what is no type at all is EINVAL, and so are SMI and GSI, for
// which a client cannot name a port, and an XRC target, which is made of a domain.
func checkType(t hca.QPType) error {
	switch t {
	case hca.QPTypeRC, hca.QPTypeUC, hca.QPTypeUD, hca.QPTypeXRCIni:
		return nil
	case hca.QPTypeRawPacket, qptRawIPv6, qptRawEthertype, hca.QPTypeDriver:
		return fmt.Errorf("type %d: %w", t, eopnotsupp)
	}
	return fmt.Errorf("type %d: %w", t, einval)
}

// CreateQP: see checkType; EINVAL for sizes over the limits, for queues of
// another device, for an XRC SRQ and for a receive queue of any kind on an XRC
// initiator; ENOMEM when MaxQP exist. With an SRQ the sizes of the receive queue
// are ignored (rvt_create_qp), and so they are on an XRC initiator (create_qp in
// uverbs_cmd.c).
func (p *PD) CreateQP(in hca.QPInit) (hca.QP, error) {
	q := &QP{dev: p.ctx.dev, pd: p, typ: in.Type, handler: in.Handler, sigAll: in.SigAll, cap: in.Cap}
	err := checkType(in.Type)
	if err == nil {
		err = q.setQueues(&in)
	}
	if err != nil {
		return nil, fmt.Errorf("create qp: %w", err)
	}
	if err := q.add(); err != nil {
		return nil, err
	}
	return q, nil
}

// setQueues checks and takes over the CQs, the SRQ and the sizes.
func (q *QP) setQueues(in *hca.QPInit) error {
	d, ini := q.dev, in.Type == hca.QPTypeXRCIni
	ownCQ := func(i hca.CQ) (*CQ, bool) {
		c, ok := i.(*CQ)
		return c, ok && c != nil && c.dev == d
	}
	var ok bool
	if q.sendCQ, ok = ownCQ(in.SendCQ); !ok {
		return fmt.Errorf("send CQ of another device: %w", einval)
	}
	if ini {
		if in.RecvCQ != nil || in.SRQ != nil {
			return fmt.Errorf("XRC initiator that receives: %w", einval)
		}
	} else if q.recvCQ, ok = ownCQ(in.RecvCQ); !ok {
		return fmt.Errorf("receive CQ of another device: %w", einval)
	}
	if in.SRQ != nil {
		srq, ok := in.SRQ.(*SRQ)
		if !ok || srq.dev != d || srq.xrcd != nil {
			return fmt.Errorf("SRQ of another device, or of an XRC domain: %w", einval)
		}
		q.srq = srq
	}
	if in.RQ != nil && (ini || in.SRQ != nil) {
		return fmt.Errorf("receive queue on an XRC initiator or beside an SRQ: %w", einval)
	}
	c, a := &q.cap, &d.attr
	if ini || q.srq != nil {
		c.MaxRecvWR, c.MaxRecvSGE = 0, 0
	}
	if c.MaxSendWR > a.MaxQPWR || c.MaxRecvWR > a.MaxQPWR || c.MaxSendSGE > a.MaxSGE ||
		c.MaxRecvSGE > a.MaxSGE || c.MaxInline > a.MaxInline ||
		c.MaxSendWR+c.MaxRecvWR+c.MaxSendSGE+c.MaxRecvSGE == 0 && q.srq == nil {
		return fmt.Errorf("sizes %+v: %w", in.Cap, einval)
	}
	q.sq, q.rq = in.SQ, in.RQ
	if q.sq != nil {
		m := q.sq.Cap()
		if m.MaxSendSGE > maxSGE || m.MaxInline > maxInline {
			return fmt.Errorf("mapped send queue of sizes %+v: %w", m, einval)
		}
		c.MaxSendWR, c.MaxSendSGE, c.MaxInline = m.MaxSendWR, m.MaxSendSGE, m.MaxInline
	}
	if q.rq != nil {
		c.MaxRecvWR = uint32(q.rq.Len())
	}
	q.mapsRecv = q.rq != nil || q.srq != nil && q.srq.mapped
	return nil
}

// add makes the QP's storage and gives it its number.
func (q *QP) add() error {
	d, c := q.dev, &q.cap
	if err := take(&d.nQP, d.attr.MaxQP, "create qp"); err != nil {
		return err
	}
	q.s.ring.init(int(c.MaxSendWR), int(c.MaxSendSGE), int(c.MaxInline), q.sq)
	q.r.ring.init(int(c.MaxRecvWR), int(c.MaxRecvSGE), q.rq)
	q.r.waiters.ready = q.recvReady
	q.resetAttrs()
	if err := d.qps.insert(q, &q.num); err != nil {
		d.nQP.Add(-1)
		return fmt.Errorf("create qp: %w", err)
	}
	return nil
}

// Num is the QP number, 24 bits.
func (q *QP) Num() uint32 { return q.num }

// Cap is what was asked for, or what mapped queues have.
func (q *QP) Cap() hca.QPCap { return q.cap }

func (q *QP) recvReady() bool {
	return q.posted() > 0
}

// posted is how many receives there are; none once the QP is closed.
func (q *QP) posted() int {
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	if q.r.state == hca.QPReset {
		return 0
	}
	return q.r.ring.posted()
}

// Query reports the attributes as they were set, and the state. Both halves are
// consistent: state changes take both locks.
func (q *QP) Query() (hca.QPAttr, hca.QPInit) {
	q.s.mu.Lock()
	a := q.s.attr
	a.CurState = a.State
	a.Cap = q.cap
	a.SQDraining = a.State == hca.QPSQD && q.s.started
	q.s.mu.Unlock()
	in := hca.QPInit{Type: q.typ, Cap: q.cap, SigAll: q.sigAll, Handler: q.handler}
	if q.sendCQ != nil {
		in.SendCQ = q.sendCQ
	}
	if q.recvCQ != nil {
		in.RecvCQ = q.recvCQ
	}
	if q.srq != nil {
		in.SRQ = q.srq
	}
	return a, in
}

func (q *QP) counters() counters {
	q.s.mu.Lock()
	c := q.s.count
	q.s.mu.Unlock()
	q.r.mu.Lock()
	c.add(&q.r.count)
	q.r.mu.Unlock()
	return c
}

// AttachMcast joins a group: EINVAL unless UD, past RESET, a multicast GID and, but
// for Ethernet, a multicast LID (ib_attach_mcast, rvt_attach_mcast); ENOMEM over the
// limits.
func (q *QP) AttachMcast(gid hca.GID, lid uint16) error {
	if err := q.checkMcast(gid, lid); err != nil {
		return fmt.Errorf("attach mcast: %w", err)
	}
	q.modMu.Lock()
	defer q.modMu.Unlock()
	q.s.mu.Lock()
	bad := q.s.closed || q.s.attr.State == hca.QPReset
	q.s.mu.Unlock()
	if bad {
		return fmt.Errorf("attach mcast in RESET: %w", einval)
	}
	f, a := q.dev.fabric, &q.dev.attr
	if m := f.Members(gid); len(m) >= int(a.MaxMcastQP) || len(m) == 0 && f.Groups() >= int(a.MaxMcastGrp) {
		return fmt.Errorf("attach mcast: %w", enomem)
	}
	if !f.Join(gid, q) {
		return nil
	}
	if l := q.dev.link; l != nil {
		if err := l.Join(gid); err != nil {
			f.Leave(gid, q)
			return fmt.Errorf("attach mcast: %w", err)
		}
	}
	q.s.mcast = append(q.s.mcast, gid)
	return nil
}

// DetachMcast leaves a group: EINVAL if the QP is not in it.
func (q *QP) DetachMcast(gid hca.GID, lid uint16) error {
	if err := q.checkMcast(gid, lid); err != nil {
		return fmt.Errorf("detach mcast: %w", err)
	}
	q.modMu.Lock()
	defer q.modMu.Unlock()
	if !q.leaveMcast(gid) {
		return fmt.Errorf("detach mcast %s: not attached: %w", gid, einval)
	}
	for i := range q.s.mcast {
		if q.s.mcast[i] == gid {
			q.s.mcast = append(q.s.mcast[:i], q.s.mcast[i+1:]...)
			break
		}
	}
	return nil
}

func (q *QP) leaveMcast(gid hca.GID) bool {
	if !q.dev.fabric.Leave(gid, q) {
		return false
	}
	if l := q.dev.link; l != nil {
		_ = l.Leave(gid) // closed: then it hears nothing anyway
	}
	return true
}

func (q *QP) checkMcast(gid hca.GID, lid uint16) error {
	// RoCE's annex has the LID ignored (is_valid_mcast_lid, verbs.c).
	badLID := !q.dev.ethernet() && (lid < loop.MulticastLIDBase || lid == loop.PermissiveLID)
	if q.typ != hca.QPTypeUD || !gid.IsMulticast() || badLID {
		return fmt.Errorf("group %s, LID %#x: %w", gid, lid, einval)
	}
	return nil
}

// Close destroys the QP: nothing is completed after it, and its windows of type 2
// are free. It waits, within stuckWait, for copies under way.
func (q *QP) Close() error {
	q.modMu.Lock()
	defer q.modMu.Unlock()
	q.s.mu.Lock()
	if q.s.closed {
		q.s.mu.Unlock()
		return nil
	}
	q.s.closed = true
	q.resetLocked()
	q.s.mu.Unlock()
	for _, gid := range q.s.mcast {
		q.leaveMcast(gid)
	}
	q.s.mcast = nil
	q.settle()
	q.windows.close(q)
	q.dev.qps.remove(q.num)
	q.guard.close()
	q.wakeWaiters()
	c := q.counters()
	q.dev.mu.Lock()
	q.dev.gone.add(&c)
	q.dev.mu.Unlock()
	q.dev.nQP.Add(-1)
	return nil
}

// wakeWaiters lets the senders that wait for a receive here look again: they
// find that the QP is not ready for them any more.
//
// With an SRQ they wait there, among the senders to its other QPs; all of them
// look again. On XRC it is the SRQ that the sender named.
func (q *QP) wakeWaiters() {
	srq := q.srq
	if q.xrcd != nil {
		q.r.mu.Lock()
		srq, q.r.rnrSRQ = q.r.rnrSRQ, nil
		q.r.mu.Unlock()
	}
	if srq != nil {
		for n := srq.waiters.n.Load(); n > 0; n-- {
			if o := srq.waiters.pop(); o != nil {
				o.wake()
			}
		}
	}
	for {
		o := q.r.waiters.pop()
		if o == nil {
			return
		}
		o.wake()
	}
}

// event queues an asynchronous event for the QP's handler. Under any lock.
func (q *QP) event(ev hca.EventType) {
	if q.handler != nil {
		q.dev.events.add(event{guard: &q.guard, qp: q.handler, ev: ev})
	}
}
