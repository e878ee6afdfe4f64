package hcatest

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// patience is how long a test waits for what must come. It is not a
// synchronisation: nothing is assumed to have happened after it.
const patience = 20 * time.Second

const (
	memBase  = 0x7f0000100000
	memSize  = 1 << 20
	allAcc   = hca.AccessLocalWrite | hca.AccessRemoteWrite | hca.AccessRemoteRead | hca.AccessRemoteAtomic
	testQKey = 0x11111111
	// firstPSN is what both ends of a connection begin with: near the end of the space.
	firstPSN = 0xfffff0
	// routeHops is the hop limit that a route gives every unicast path on Ethernet.
	routeHops = 64
)

// record sends without blocking: a handler must not block. Only the races, which
// do not look at what they cause, fill a channel.
func record[T any](c chan T, v T) {
	select {
	case c <- v:
	default:
	}
}

// cqEvents records a CQ's callbacks.
type cqEvents struct {
	comp chan struct{}
	ev   chan hca.EventType
}

func newCQEvents() *cqEvents {
	return &cqEvents{comp: make(chan struct{}, 4096), ev: make(chan hca.EventType, 256)}
}
func (c *cqEvents) Completion()              { record(c.comp, struct{}{}) }
func (c *cqEvents) CQEvent(ev hca.EventType) { record(c.ev, ev) }

// qpEvents records a QP's or an SRQ's callbacks.
type qpEvents struct{ ev chan hca.EventType }

func newQPEvents() *qpEvents                  { return &qpEvents{ev: make(chan hca.EventType, 256)} }
func (q *qpEvents) QPEvent(ev hca.EventType)  { record(q.ev, ev) }
func (q *qpEvents) SRQEvent(ev hca.EventType) { record(q.ev, ev) }

// waiter is an hca.Waiter on a channel.
type waiter struct{ c chan struct{} }

func newWaiter() *waiter    { return &waiter{c: make(chan struct{}, 1)} }
func (w *waiter) Wake(bool) { w.c <- struct{}{} }

// opts change what newEnd and connect do by default.
type opts struct {
	typ      hca.QPType // RC
	cap      hca.QPCap
	sigAll   bool
	srq      *hca.SRQInit
	cqe      int
	minRNR   uint8
	rnrRetry uint8
	timeout  uint8
	retryCnt uint8
	destRd   uint8
	rd       uint8
	noRd     bool
	access   hca.Access
	global   bool
	shareCtx *end     // use this end's context
	xrcd     hca.XRCD // of an XRC target; nil: its own
}

func (o opts) with(f func(*opts)) opts { f(&o); return o }

func defaults() opts {
	return opts{
		typ: hca.QPTypeRC,
		cap: hca.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 128},
		cqe: 512, minRNR: 12, rnrRetry: 7, timeout: 14, retryCnt: 7, destRd: 4, rd: 4, access: allAcc,
	}
}

// end is one client with a QP.
type end struct {
	t        testing.TB
	dev      hca.Device
	ctx      hca.UContext
	pd       hca.PD
	scq, rcq hca.CQ
	sev, rev *cqEvents
	srq      hca.SRQ
	srqEv    *qpEvents
	xrcd     hca.XRCD // of an XRC target
	srqn     uint32   // XRC: what send and rdma name
	qp       hca.QP
	qev      *qpEvents
	mem      *Mem
	mr       hca.MR
	o        opts
	lid      uint16
	eth      bool
	gid      hca.GID // the port's, at gidIndex: of its IPv4 address if it has one
	gidIndex uint8
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErrno(t testing.TB, err error, e unix.Errno) {
	t.Helper()
	if !errors.Is(err, e) {
		t.Fatalf("error %v, want %v", err, e)
	}
}

// newEnd makes a client with a QP in RESET and a region of memSize bytes.
func newEnd(t testing.TB, dev hca.Device, o opts) *end {
	t.Helper()
	e := &end{t: t, dev: dev, sev: newCQEvents(), rev: newCQEvents(), qev: newQPEvents(), srqEv: newQPEvents(), o: o}
	var err error
	if o.shareCtx != nil {
		e.ctx, e.pd = o.shareCtx.ctx, o.shareCtx.pd
	} else {
		e.ctx, err = dev.AllocUContext(nil)
		must(t, err)
		t.Cleanup(func() { must(t, e.ctx.Close()) })
		e.pd, err = e.ctx.AllocPD()
		must(t, err)
		t.Cleanup(func() { must(t, e.pd.Close()) })
	}
	e.scq, err = e.ctx.CreateCQ(hca.CQInit{Entries: o.cqe, Handler: e.sev})
	must(t, err)
	scq := e.scq // a test may put another in its place
	t.Cleanup(func() { must(t, scq.Close()) })
	e.rcq, err = e.ctx.CreateCQ(hca.CQInit{Entries: o.cqe, Handler: e.rev})
	must(t, err)
	rcq := e.rcq
	t.Cleanup(func() { must(t, rcq.Close()) })
	if o.typ == tgt {
		e.xrcd = o.xrcd
		if e.xrcd == nil {
			e.xrcd = newXRCD(t, dev)
		}
	}
	if o.srq != nil {
		in := *o.srq
		in.Handler = e.srqEv
		if o.typ == tgt {
			in.XRCD, in.CQ = e.xrcd, e.rcq
		}
		e.srq, err = e.pd.CreateSRQ(in)
		must(t, err)
		t.Cleanup(func() { must(t, e.srq.Close()) })
	}
	e.mem = NewMem(memBase, memSize)
	e.mr = e.reg(e.mem, allAcc)
	e.qp = e.newQP()
	p, err := dev.Port(1)
	must(t, err)
	e.lid, e.eth = p.LID, p.LinkLayer == hca.LinkEthernet
	e.gid, err = dev.GID(1, 0)
	must(t, err)
	if v4, err := dev.GID(1, 1); e.eth && err == nil && v4 != (hca.GID{}) {
		e.gid, e.gidIndex = v4, 1
	}
	return e
}

// newQP makes one more QP like the end's own.
func (e *end) newQP() hca.QP {
	e.t.Helper()
	in := hca.QPInit{Type: e.o.typ, SendCQ: e.scq, RecvCQ: e.rcq, Cap: e.o.cap, SigAll: e.o.sigAll, Handler: e.qev}
	create := e.pd.CreateQP
	switch {
	case e.o.typ == ini:
		in.RecvCQ = nil
	case e.o.typ == tgt:
		in = hca.QPInit{Type: tgt, Handler: e.qev}
		create = e.xrcd.CreateQP
	case e.srq != nil:
		in.SRQ = e.srq
	}
	q, err := create(in)
	must(e.t, err)
	e.t.Cleanup(func() { must(e.t, q.Close()) })
	return q
}

// reg registers all of m.
func (e *end) reg(m *Mem, acc hca.Access) hca.MR {
	e.t.Helper()
	mr, err := e.pd.RegMR(hca.MRInit{Mem: m, Start: m.Base, Length: uint64(len(m.b)), IOVA: m.Base, Access: acc})
	must(e.t, err)
	e.t.Cleanup(func() { must(e.t, mr.Close()) })
	return mr
}

// sge is n bytes at an offset of the end's region.
func (e *end) sge(off, n int) hca.SGE {
	return hca.SGE{Addr: memBase + uint64(off), Length: uint32(n), LKey: e.mr.LKey()}
}

// attrTo is the way to a peer, in the form in which the device reports it.
func (e *end) attrTo(peer *end) hca.AHAttr {
	if e.eth {
		return hca.AHAttr{Port: 1, IsGlobal: true, DGID: peer.gid, SGIDIndex: e.gidIndex, HopLimit: routeHops, TrafficClass: 0x5a, FlowLabel: 0x12345}
	}
	return hca.AHAttr{DLID: peer.lid, Port: 1, SL: 3, IsGlobal: e.o.global, DGID: peer.gid, HopLimit: 9, TrafficClass: 0x5a, FlowLabel: 0x12345}
}

func (e *end) toInit() {
	e.t.Helper()
	a := hca.QPAttr{State: hca.QPInitState, Port: 1, Access: e.o.access, QKey: testQKey}
	m := hca.QPMaskState | hca.QPMaskPort | hca.QPMaskPKeyIndex | hca.QPMaskAccess
	if e.o.typ == hca.QPTypeUD {
		m = hca.QPMaskState | hca.QPMaskPort | hca.QPMaskPKeyIndex | hca.QPMaskQKey
	}
	must(e.t, e.qp.Modify(&a, m))
}

func (e *end) rtrAttr(peer *end) (hca.QPAttr, hca.QPAttrMask) {
	a := hca.QPAttr{
		State: hca.QPRTR, PathMTU: 3, DestQPN: peer.qp.Num(), RQPSN: firstPSN, AH: e.attrTo(peer),
		MaxDestRdAtomic: e.o.destRd, MinRNRTimer: e.o.minRNR,
	}
	m := hca.QPMaskState | hca.QPMaskAV | hca.QPMaskPathMTU | hca.QPMaskDestQPN | hca.QPMaskRQPSN
	switch e.o.typ {
	case rc, tgt:
		m |= hca.QPMaskMaxDestRdAtomic | hca.QPMaskMinRNRTimer
	case ud:
		m = hca.QPMaskState
	}
	return a, m
}

func (e *end) toRTR(peer *end) {
	e.t.Helper()
	a, m := e.rtrAttr(peer)
	must(e.t, e.qp.Modify(&a, m))
}

func (e *end) rtsAttr() (hca.QPAttr, hca.QPAttrMask) {
	a := hca.QPAttr{
		State: hca.QPRTS, SQPSN: firstPSN, Timeout: e.o.timeout, RetryCnt: e.o.retryCnt,
		RNRRetry: e.o.rnrRetry, MaxRdAtomic: e.o.rd,
	}
	m := hca.QPMaskState | hca.QPMaskSQPSN
	switch e.o.typ {
	case rc, ini:
		m |= hca.QPMaskTimeout | hca.QPMaskRetryCnt | hca.QPMaskRNRRetry | hca.QPMaskMaxRdAtomic
	case tgt:
		m |= hca.QPMaskTimeout
	}
	return a, m
}

func (e *end) toRTS() {
	e.t.Helper()
	a, m := e.rtsAttr()
	must(e.t, e.qp.Modify(&a, m))
	e.qp.Run()
}

func (e *end) setState(s hca.QPState) {
	e.t.Helper()
	must(e.t, e.qp.Modify(&hca.QPAttr{State: s}, hca.QPMaskState))
	e.qp.Run()
}

func (e *end) state() hca.QPState {
	a, _ := e.qp.Query()
	return a.State
}

// pair makes two connected clients in RTS.
func pair(t testing.TB, p Pair, o opts) (a, b *end) {
	t.Helper()
	return pairOf(t, p, o, o)
}

func pairOf(t testing.TB, p Pair, oa, ob opts) (a, b *end) {
	t.Helper()
	a, b = newEnd(t, p.A, oa), newEnd(t, p.B, ob)
	link(a, b)
	return a, b
}

func link(a, b *end) {
	a.t.Helper()
	if b.srq != nil {
		a.srqn = b.srq.Num()
	}
	a.toInit()
	b.toInit()
	a.toRTR(b)
	b.toRTR(a)
	a.toRTS()
	b.toRTS()
}

func (e *end) postSend(w ...hca.SendWR) {
	e.t.Helper()
	n, err := e.qp.PostSend(w)
	if err != nil || n != len(w) {
		e.t.Fatalf("posted %d of %d sends: %v", n, len(w), err)
	}
	e.qp.Run()
}

func (e *end) postRecv(id uint64, sge ...hca.SGE) {
	e.t.Helper()
	w := []hca.RecvWR{{ID: id, SGE: sge}}
	var n int
	var err error
	if e.srq != nil {
		n, err = e.srq.PostRecv(w)
		e.srq.Run()
	} else {
		n, err = e.qp.PostRecv(w)
		e.qp.Run()
	}
	if err != nil || n != 1 {
		e.t.Fatalf("posted %d receives: %v", n, err)
	}
}

// send is a signaled send of n bytes at off.
func (e *end) send(id uint64, off, n int) hca.SendWR {
	return hca.SendWR{ID: id, Opcode: hca.OpSend, Flags: hca.SendSignaled, SGE: []hca.SGE{e.sge(off, n)}, RemoteSRQN: e.srqn}
}

// rdma is a signaled one-sided operation on n bytes: local at loff, at peer's roff.
func (e *end) rdma(op hca.SendOpcode, id uint64, loff int, peer *end, roff, n int) hca.SendWR {
	return hca.SendWR{
		ID: id, Opcode: op, Flags: hca.SendSignaled, SGE: []hca.SGE{e.sge(loff, n)},
		RemoteAddr: memBase + uint64(roff), RKey: peer.mr.RKey(), RemoteSRQN: e.srqn,
	}
}

// take waits for n completions and returns them.
func take(t testing.TB, cq hca.CQ, n int) []hca.WC {
	t.Helper()
	got := make([]hca.WC, 0, n)
	buf := make([]hca.WC, n)
	w := newWaiter()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for len(got) < n {
		k := cq.Poll(buf[:n-len(got)])
		got = append(got, buf[:k]...)
		if k > 0 || !cq.Await(w) {
			continue
		}
		select {
		case <-w.c:
		case <-deadline.C:
			t.Fatalf("%d of %d completions came: %+v", len(got), n, got)
		}
	}
	return got
}

// one waits for a completion and checks its id and status.
func one(t testing.TB, cq hca.CQ, id uint64, st hca.WCStatus) hca.WC {
	t.Helper()
	wc := take(t, cq, 1)[0]
	if wc.ID != id || wc.Status != st {
		t.Fatalf("completion %d with status %d, want %d with %d (%+v)", wc.ID, wc.Status, id, st, wc)
	}
	return wc
}

// none checks that nothing is in the CQ now.
func none(t testing.TB, cq hca.CQ) {
	t.Helper()
	var wc [1]hca.WC
	if cq.Poll(wc[:]) != 0 {
		t.Fatalf("unexpected completion %+v", wc[0])
	}
}

// event waits for an event.
func event(t testing.TB, c chan hca.EventType, want hca.EventType) {
	t.Helper()
	select {
	case ev := <-c:
		if ev != want {
			t.Fatalf("event %d, want %d", ev, want)
		}
	case <-time.After(patience):
		t.Fatalf("event %d did not come", want)
	}
}

// signal waits for a value.
func signal(t testing.TB, c chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatalf("%s did not come", what)
	}
}

// quiet checks that there is no value now.
func quiet[T any](t testing.TB, c chan T, what string) {
	t.Helper()
	select {
	case v := <-c:
		t.Fatalf("unexpected %s %v", what, v)
	default:
	}
}

func equal(t testing.TB, got, want []byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d bytes, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("byte %d is %#x, want %#x", i, got[i], want[i])
		}
	}
}
