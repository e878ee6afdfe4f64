package hcatest

import (
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// rowCases are failure classes of other implementations, by their number.
var rowCases = []testCase{
	{"Row10InvalidLKey", testInvalidLKey},
	{"Row11DestroyInWindow", testDestroyInWindow},
	{"Row20Outstanding", testOutstanding},
	{"Row20ResponderDepth0", testResponderDepth0},
	{"Row22EachOptional", testEachOptional},
	{"Row22WithoutState", testWithoutState},
	{"Row33OverrunOfMany", testOverrunOfMany},
	{"Row33OverrunByFlush", testOverrunByFlush},
}

// testInvalidLKey: a request with a key that is not its own completes with a
// local protection error, in its turn; the QP is then in ERR, or in SQE where
// there is that state, and what follows is flushed.
func testInvalidLKey(t *testing.T, p Pair) {
	keys := map[string]func(e *end) hca.SGE{
		"zero":         func(e *end) hca.SGE { s := e.sge(0, 8); s.LKey = 0; return s },
		"never issued": func(e *end) hca.SGE { s := e.sge(0, 8); s.LKey ^= 0x80; return s },
		"all ones":     func(e *end) hca.SGE { s := e.sge(0, 8); s.LKey = ^uint32(0); return s },
		"deregistered": func(e *end) hca.SGE {
			mr, err := e.pd.RegMR(hca.MRInit{Mem: e.mem, Start: memBase, Length: 64, IOVA: memBase, Access: allAcc})
			must(t, err)
			must(t, mr.Close())
			return hca.SGE{Addr: memBase, Length: 8, LKey: mr.LKey()}
		},
		"another PD": func(e *end) hca.SGE { return newEnd(t, p.A, defaults()).sge(0, 8) },
		"the end":    func(e *end) hca.SGE { return e.sge(memSize-7, 8) },
		"before":     func(e *end) hca.SGE { return e.sge(-1, 8) },
		"wraps":      func(e *end) hca.SGE { s := e.sge(0, 8); s.Addr = ^uint64(0) - 3; return s },
	}
	for _, typ := range []hca.QPType{rc, uc, ud} {
		for name, bad := range keys {
			for _, second := range []bool{false, true} { // the bad one after a good one
				a, b := pair(t, p, defaults().with(func(o *opts) { o.typ = typ }))
				w := a.send(2, 0, 8)
				first, last := a.send(1, 0, 8), a.send(3, 0, 8)
				if typ == ud {
					ah := a.ah(b)
					for _, w := range []*hca.SendWR{&w, &first, &last} {
						w.AH, w.RemoteQPN, w.RemoteQKey = ah, b.qp.Num(), testQKey
					}
				}
				w.SGE = []hca.SGE{bad(a)}
				if second {
					w.SGE = []hca.SGE{a.sge(0, 8), w.SGE[0]}
				}
				b.postRecv(10, b.sge(0, 64))
				b.postRecv(11, b.sge(0, 64))
				before := b.mem.Get(0, 128)
				a.postSend(first, w, last)
				one(t, a.scq, 1, hca.WCSuccess)
				one(t, a.scq, 2, hca.WCLocProtErr)
				one(t, a.scq, 3, hca.WCWRFlushErr)
				one(t, b.rcq, 10, hca.WCSuccess)
				none(t, b.rcq)
				if second {
					equal(t, b.mem.Get(64, 64), before[64:])
				}
				want := errS
				if typ != rc {
					want = sqe
				}
				if a.state() != want {
					t.Errorf("type %d, %s: state %d, want %d", typ, name, a.state(), want)
				}
			}
		}
	}
}

// testDestroyInWindow closes either end in the two windows that a timer ends:
// the sender waits for an answer that does not come, or for the RNR timer. The
// shortest timers fire while the close is under way.
func testDestroyInWindow(t *testing.T, p Pair) {
	o := defaults().with(func(o *opts) { o.minRNR, o.rnrRetry, o.timeout, o.retryCnt = 1, 6, 1, 7 })
	hub, away := newEnd(t, p.A, o), newEnd(t, p.B, o)
	fresh := func(e *end) *end {
		c := *e
		q, err := e.pd.CreateQP(hca.QPInit{Type: rc, SendCQ: e.scq, RecvCQ: e.rcq, Cap: e.o.cap, Handler: e.qev})
		must(t, err)
		c.qp = q
		return &c
	}
	for i := range *roundsFlag {
		a, b := fresh(hub), fresh(away)
		a.toInit()
		a.toRTR(b)
		if i&1 != 0 { // b is there, and has no receive
			b.toInit()
			b.toRTR(a)
		}
		a.toRTS()
		var wg sync.WaitGroup
		run := func(f func()) { wg.Go(f) }
		run(func() { _, _ = a.qp.PostSend([]hca.SendWR{a.send(1, 0, 8)}); a.qp.Run() })
		run(func() {
			if i&2 != 0 {
				_ = a.qp.Modify(&hca.QPAttr{State: errS}, hca.QPMaskState)
			}
			must(t, a.qp.Close())
		})
		if i&4 != 0 {
			run(func() { _, _ = b.qp.PostRecv([]hca.RecvWR{{SGE: []hca.SGE{b.sge(0, 8)}}}); b.qp.Run() })
		}
		if i&8 != 0 {
			run(func() { must(t, b.qp.Close()) })
		}
		wg.Wait()
		n := len(a.qev.ev)
		must(t, b.qp.Close())
		if m := len(a.qev.ev); i&8 == 0 && m != n {
			t.Fatalf("round %d: %d events after the close", i, m-n)
		}
		drain(a.scq)
		drain(b.rcq)
		for len(hub.qev.ev) > 0 {
			<-hub.qev.ev
		}
	}
	works(t, p)
}

// testOutstanding: a requester never has more reads and atomics under way than
// max_rd_atomic says, nor a responder more than its own number; the next one
// waits, and all are done, in order (IBTA 1.4 §11.2.4.2, §9.4.4).
func testOutstanding(t *testing.T, p Pair) {
	for _, c := range []struct{ rd, dest uint8 }{{1, 1}, {2, 2}, {4, 4}, {1, 4}, {4, 1}} {
		for _, op := range []hca.SendOpcode{hca.OpRDMARead, hca.OpAtomicFetchAdd} {
			depth := int(min(c.rd, c.dest))
			a, b := pairOf(t, p, defaults().with(func(o *opts) { o.rd = c.rd }), defaults().with(func(o *opts) { o.destRd = c.dest }))
			var ws []hca.SendWR
			for i := range depth + 3 {
				w := a.rdma(op, uint64(i), 8*i, b, 0, 8)
				w.CompareAdd = 1
				ws = append(ws, w)
			}
			g := b.mem.Block()
			must(t, errOf(a.qp.PostSend(ws)))
			done := make(chan struct{})
			go func() { defer close(done); a.qp.Run() }()
			signal(t, g.In, "access of the responder")
			works(t, p) // time for more of them to begin
			works(t, p)
			if n := 1 + len(g.In); n > depth {
				t.Errorf("max_rd_atomic %d, max_dest_rd_atomic %d: %d at a time", c.rd, c.dest, n)
			}
			none(t, a.scq)
			b.mem.Unblock()
			for i := range ws {
				one(t, a.scq, uint64(i), hca.WCSuccess)
				if op == hca.OpAtomicFetchAdd {
					equal(t, a.mem.Get(8*i, 8), word(uint64(i)))
				}
			}
			signal2(t, done)
			if a.state() != rts || b.state() != rts {
				t.Errorf("states %d and %d", a.state(), b.state())
			}
		}
	}
}

// testResponderDepth0: a responder without resources answers with an invalid
// request; writes and sends do not need them.
func testResponderDepth0(t *testing.T, p Pair) {
	for _, op := range []hca.SendOpcode{hca.OpRDMARead, hca.OpAtomicCmpSwap, hca.OpAtomicFetchAdd} {
		a, b := pairOf(t, p, defaults(), defaults().with(func(o *opts) { o.destRd = 0 }))
		b.mem.Set(0, word(7))
		b.postRecv(1, b.sge(64, 8))
		a.postSend(a.send(2, 0, 8), a.rdma(hca.OpRDMAWrite, 3, 0, b, 128, 8), a.rdma(op, 4, 8, b, 0, 8), a.send(5, 0, 8))
		one(t, a.scq, 2, hca.WCSuccess)
		one(t, a.scq, 3, hca.WCSuccess)
		one(t, a.scq, 4, hca.WCRemInvReqErr)
		one(t, a.scq, 5, hca.WCWRFlushErr)
		event(t, b.qev.ev, hca.EventQPReqErr)
		equal(t, b.mem.Get(0, 8), word(7))
		equal(t, a.mem.Get(8, 8), make([]byte, 8))
	}
}

// testEachOptional gives each optional attribute of each transition by itself.
func testEachOptional(t *testing.T, p Pair) {
	for _, mv := range kernelMoves {
		if (mv.typ == ini || mv.typ == tgt) && !p.A.Ops().Has(hca.OpXRC) {
			continue
		}
		for _, bit := range mv.opt {
			e := bring(t, p, mv.typ, mv.from)
			a := goodAttr(e, mv.from, mv.to)
			m := maskOf(mv.req) | 1<<bit | hca.QPMaskState
			switch {
			case bit == bCur && mv.from < rtr, bit == bMig && mv.to != rts && mv.to != sqd:
				wantErrno(t, e.qp.Modify(&a, m), unix.EINVAL)
				continue
			}
			if err := e.qp.Modify(&a, m); err != nil {
				t.Errorf("type %d, %d to %d with attribute %d: %v", mv.typ, mv.from, mv.to, bit, err)
			}
			if got := e.state(); got != mv.to {
				t.Errorf("type %d, %d to %d with attribute %d: state %d", mv.typ, mv.from, mv.to, bit, got)
			}
		}
	}
}

// testWithoutState: attributes without the state are held to the table's cell
// from the state to itself (ib_modify_qp in verbs.c); where there is none,
// nothing may be given.
func testWithoutState(t *testing.T, p Pair) {
	for _, typ := range []hca.QPType{rc, uc, ud} {
		for from := rst; from <= errS; from++ {
			if from == sqe && typ == rc {
				continue
			}
			mv, ok := findMove(from, from, typ)
			allowed := maskOf(mv.req) | maskOf(mv.opt)
			for bit := 1; bit <= bQPN; bit++ {
				e := bring(t, p, typ, from)
				a := goodAttr(e, from, from)
				m := hca.QPAttrMask(1) << bit
				err := e.qp.Modify(&a, m)
				switch want := ok && allowed&m != 0; {
				case want && err != nil:
					t.Errorf("type %d in %d, attribute %d: %v", typ, from, bit, err)
				case !want:
					wantErrno(t, err, unix.EINVAL)
				}
				if got := e.state(); got != from {
					t.Errorf("type %d, attribute %d: from state %d to %d", typ, bit, from, got)
				}
			}
		}
	}
}

// testOverrunOfMany: two QPs of one CQ. Each that has a completion for which
// there is no room goes to ERR; the CQ tells once, keeps what it has, takes
// nothing more however much room there is, and all can be closed.
func testOverrunOfMany(t *testing.T, p Pair) {
	hub := newEnd(t, p.A, defaults().with(func(o *opts) { o.cqe = 4 }))
	other := newEnd(t, p.A, defaults().with(func(o *opts) { o.shareCtx = hub }))
	apart := newEnd(t, p.A, defaults().with(func(o *opts) { o.shareCtx = hub }))
	other.scq = hub.scq
	other.qp = other.newQP()
	var peers []*end
	for _, e := range []*end{hub, other, apart} {
		b := newEnd(t, p.B, defaults())
		link(e, b)
		peers = append(peers, b)
	}
	room := hub.scq.Entries()
	for i := range room + 1 {
		hub.postSend(hub.rdma(hca.OpRDMAWrite, uint64(i), 0, peers[0], 0, 8))
	}
	event(t, hub.sev.ev, hca.EventCQErr)
	event(t, hub.qev.ev, hca.EventQPFatal)
	if other.state() != rts {
		t.Errorf("the other QP in state %d before it has a completion", other.state())
	}
	if p.A.Ops().Has(hca.OpResizeCQ) {
		must(t, hub.scq.Resize(4*room, nil)) // does not mend it
	}
	other.postSend(other.rdma(hca.OpRDMAWrite, 100, 0, peers[1], 0, 8))
	event(t, other.qev.ev, hca.EventQPFatal)
	if hub.state() != errS || other.state() != errS || apart.state() != rts {
		t.Errorf("states %d, %d and %d", hub.state(), other.state(), apart.state())
	}
	for i, wc := range take(t, hub.scq, room) {
		if wc.ID != uint64(i) || wc.Status != hca.WCSuccess {
			t.Errorf("completion %d: %+v", i, wc)
		}
	}
	other.setState(rst)
	none(t, hub.scq)
	quiet(t, hub.sev.ev, "second CQ error")
	apart.postSend(apart.rdma(hca.OpRDMAWrite, 1, 0, peers[2], 0, 8))
	one(t, apart.scq, 1, hca.WCSuccess)
	must(t, hub.qp.Close())
	must(t, other.qp.Close())
	quick(t, "close of an overrun CQ", func() { must(t, hub.scq.Close()) })
	works(t, p)
}

// testOverrunByFlush: more receives are flushed than the CQ has room for.
func testOverrunByFlush(t *testing.T, p Pair) {
	e := bring(t, p, rc, inS)
	w := newCQEvents()
	cq, err := e.ctx.CreateCQ(hca.CQInit{Entries: 4, Handler: w})
	must(t, err)
	t.Cleanup(func() { must(t, cq.Close()) })
	e.rcq = cq
	e.qp = e.newQP()
	e.toInit()
	for i := range uint64(cq.Entries()) + 4 {
		e.postRecv(i)
	}
	e.setState(errS)
	event(t, w.ev, hca.EventCQErr)
	for i, wc := range take(t, cq, cq.Entries()) {
		if wc.ID != uint64(i) || wc.Status != hca.WCWRFlushErr {
			t.Errorf("completion %d: %+v", i, wc)
		}
	}
	none(t, cq)
	e.postRecv(9)
	none(t, cq)
	quiet(t, w.ev, "second CQ error")
}
