package hcatest

import (
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
)

var blockCases = []testCase{
	{"Row35BlockedReceiver", testBlockedReceiver},
	{"Row35BlockedSender", testBlockedSender},
	{"Row35BlockedClose", testBlockedClose},
	{"Row35BlockedMR", testBlockedMR},
	{"Row35BlockedUD", testBlockedUD},
	{"Row35BlockedAtomic", testBlockedAtomic},
	{"Row35BlockedMany", testBlockedMany},
	{"Row35BlockedWake", testBlockedWake},
	{"Row35BlockedHandler", testBlockedHandler},
}

// soon is how long a close may take though a copy is stuck: far more than a
// device may wait, far less than for ever.
const soon = 5 * time.Second

func quick(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(soon):
		t.Fatalf("%s hangs", what)
	}
}

// works sends a message and an atomic between two fresh clients.
func works(t *testing.T, p Pair) {
	t.Helper()
	// Of time there is enough on a busy machine too.
	a, b := pair(t, p, defaults().with(func(o *opts) { o.timeout = 17 }))
	b.postRecv(1, b.sge(0, 9000))
	a.postSend(a.send(2, 0, 9000), a.rdma(hca.OpAtomicFetchAdd, 3, 0, b, 0, 8))
	one(t, a.scq, 2, hca.WCSuccess)
	one(t, a.scq, 3, hca.WCSuccess)
	one(t, b.rcq, 1, hca.WCSuccess)
}

// stuck posts w on a and runs it on a goroutine of its own until it blocks in m.
// The returned function lets it go on and waits for its end.
func stuck(t *testing.T, a *end, m *Mem, w ...hca.SendWR) func() {
	t.Helper()
	g := m.Block()
	n, err := a.qp.PostSend(w) // posting itself does not touch memory
	if err != nil || n != len(w) {
		t.Fatal(n, err)
	}
	done := make(chan struct{})
	go func() { defer close(done); a.qp.Run() }()
	signal(t, g.In, "blocked access")
	return func() {
		m.Unblock()
		signal2(t, done)
	}
}

func signal2(t *testing.T, done chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("the stuck runner did not end")
	}
}

// testBlockedReceiver: the receiver's memory blocks. Everybody else works, verbs
// on both QPs return, ERR flushes without the copy, which then changes nothing.
func testBlockedReceiver(t *testing.T, p Pair) {
	for _, n := range []int{8, 200000} {
		a, b := pair(t, p, defaults())
		b.postRecv(1, b.sge(0, n))
		b.postRecv(2, b.sge(0, n))
		free := stuck(t, a, b.mem, a.send(3, 0, n), a.send(4, 0, n))
		works(t, p)
		quick(t, "verbs", func() {
			a.qp.Query()
			b.qp.Query()
			must(t, errOf(a.qp.PostSend([]hca.SendWR{a.send(5, 0, 8)})))
			must(t, errOf(b.qp.PostRecv([]hca.RecvWR{{ID: 6}})))
			a.qp.Run()
			b.qp.Run()
		})
		none(t, a.scq)
		none(t, b.rcq)
		quick(t, "ERR of the receiver", func() { b.setState(errS) })
		for i, wc := range take(t, b.rcq, 3) {
			if want := []uint64{1, 2, 6}[i]; wc.ID != want || wc.Status != hca.WCWRFlushErr {
				t.Errorf("receive %d: %+v", i, wc)
			}
		}
		quick(t, "ERR of the sender", func() { a.setState(errS) })
		for i, wc := range take(t, a.scq, 3) {
			if wc.ID != uint64(3+i) || wc.Status != hca.WCWRFlushErr {
				t.Errorf("send %d: %+v", i, wc)
			}
		}
		// Both work again while the copy is still stuck elsewhere.
		b.setState(rst)
		a.setState(rst)
		link(a, b)
		free()
		none(t, a.scq)
		none(t, b.rcq)
		b.postRecv(10, b.sge(0, n))
		a.postSend(a.send(11, 0, n))
		one(t, a.scq, 11, hca.WCSuccess)
		one(t, b.rcq, 10, hca.WCSuccess)
	}
}

func testBlockedSender(t *testing.T, p Pair) {
	for _, op := range []hca.SendOpcode{hca.OpSend, hca.OpRDMAWrite, hca.OpRDMARead} {
		a, b := pair(t, p, defaults())
		b.postRecv(1, b.sge(0, 64))
		w := a.rdma(op, 2, 0, b, 0, 64)
		free := stuck(t, a, a.mem, w)
		works(t, p)
		// The other direction works: b's memory is not a's.
		quick(t, "ERR", func() { a.setState(errS) })
		one(t, a.scq, 2, hca.WCWRFlushErr)
		quick(t, "close", func() { must(t, a.qp.Close()) })
		free()
		none(t, a.scq)
		if b.state() != rts {
			t.Errorf("peer in state %d", b.state())
		}
	}
}

// testBlockedClose: QPs, CQs and regions close although a copy is stuck.
func testBlockedClose(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	b.postRecv(1, b.sge(0, 64))
	free := stuck(t, a, b.mem, a.send(2, 0, 64))
	quick(t, "close of the sender", func() { must(t, a.qp.Close()) })
	quick(t, "close of the receiver", func() { must(t, b.qp.Close()) })
	for _, cq := range []hca.CQ{a.scq, a.rcq, b.scq, b.rcq} {
		quick(t, "close of a CQ", func() { must(t, cq.Close()) })
	}
	quick(t, "close of a region", func() { must(t, b.mr.Close()) })
	quick(t, "close of a region", func() { must(t, a.mr.Close()) })
	works(t, p)
	free()
	none(t, a.scq)
	none(t, b.rcq)
}

// testBlockedMR: no copy starts after a region's close, not even the next chunk
// of one that was under way.
func testBlockedMR(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	b.postRecv(1, b.sge(0, memSize))
	free := stuck(t, a, b.mem, a.send(2, 0, memSize))
	quick(t, "close", func() { must(t, b.mr.Close()) })
	before := b.mem.calls.Load()
	free()
	one(t, a.scq, 2, hca.WCRemOpErr)
	one(t, b.rcq, 1, hca.WCLocProtErr)
	if n := b.mem.calls.Load(); n != before {
		t.Errorf("%d accesses after the close", n-before)
	}
}

// testBlockedUD: a datagram's receiver that blocks does not stop its sender.
func testBlockedUD(t *testing.T, p Pair) {
	a, b := pair(t, p, udOpts())
	good := newEnd(t, p.B, udOpts())
	good.toInit()
	good.toRTR(good)
	good.toRTS()
	for i := range 16 {
		b.postRecv(uint64(i), b.sge(0, 100))
		good.postRecv(uint64(i), good.sge(0, 100))
	}
	toBad, toGood := a.ah(b), a.ah(good)
	free := stuck(t, a, b.mem, a.dgram(1, 0, 8, b, toBad), a.dgram(2, 0, 8, good, toGood))
	one(t, a.scq, 1, hca.WCSuccess)
	one(t, a.scq, 2, hca.WCSuccess)
	one(t, good.rcq, 0, hca.WCSuccess)
	quick(t, "sending", func() {
		for i := range uint64(10) {
			a.postSend(a.dgram(10+i, 0, 8, b, toBad), a.dgram(10+i, 0, 8, good, toGood))
			take(t, a.scq, 2)
			one(t, good.rcq, 1+i, hca.WCSuccess)
		}
	})
	none(t, b.rcq)
	quick(t, "ERR", func() { b.setState(errS) })
	for _, wc := range take(t, b.rcq, 16) {
		if wc.Status != hca.WCWRFlushErr {
			t.Errorf("completion %+v", wc)
		}
	}
	free()
	none(t, b.rcq)
}

// testBlockedAtomic: an atomic that is stuck holds up only those on its own
// memory, and they go on after it.
func testBlockedAtomic(t *testing.T, p Pair) {
	hub := newEnd(t, p.B, defaults())
	peer := func() *end {
		a := newEnd(t, p.A, defaults())
		link(a, newEnd(t, p.B, defaults().with(func(o *opts) { o.shareCtx = hub })))
		return a
	}
	add := func(a *end) hca.SendWR {
		w := a.rdma(hca.OpAtomicFetchAdd, 1, 0, hub, 0, 8)
		w.CompareAdd = 1
		return w
	}
	a, c := peer(), peer()
	free := stuck(t, a, hub.mem, add(a))
	quick(t, "second atomic", func() { c.postSend(add(c)) })
	none(t, c.scq)
	works(t, p)
	free()
	one(t, a.scq, 1, hca.WCSuccess)
	one(t, c.scq, 1, hca.WCSuccess)
	equal(t, hub.mem.Get(0, 8), word(2))
}

// testBlockedMany: one client's blocking memory holds a bounded number of
// goroutines, however many QPs send to it; the rest waits without one.
func testBlockedMany(t *testing.T, p Pair) {
	hub := newEnd(t, p.B, defaults())
	g := hub.mem.Block()
	const senders = 80
	var as []*end
	done := make(chan struct{}, senders)
	for range senders {
		a := newEnd(t, p.A, defaults())
		b := newEnd(t, p.B, defaults().with(func(o *opts) { o.shareCtx = hub }))
		link(a, b)
		as = append(as, a)
		must(t, errOf(a.qp.PostSend([]hca.SendWR{a.rdma(hca.OpRDMAWrite, 1, 0, hub, 0, 8)})))
		go func() { a.qp.Run(); done <- struct{}{} }()
	}
	const bound = 32
	for range senders - bound { // they come back though nothing was written
		signal(t, done, "return of Run")
	}
	works(t, p)
	if n := len(g.In); n > bound {
		t.Errorf("%d accesses under way", n)
	}
	hub.mem.Unblock()
	for _, a := range as {
		one(t, a.scq, 1, hca.WCSuccess)
	}
	for range bound {
		signal(t, done, "return of Run")
	}
}

// testBlockedWake: a sender whose memory blocks, woken by its peer's receive,
// does not hold the peer.
func testBlockedWake(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	a.postSend(a.send(1, 0, 8)) // waits for a receive
	g := a.mem.Block()
	quick(t, "receiver", func() { b.postRecv(2, b.sge(0, 8)) })
	signal(t, g.In, "blocked access")
	quick(t, "receiver", func() { b.postRecv(3, b.sge(0, 8)) })
	works(t, p)
	a.mem.Unblock()
	one(t, a.scq, 1, hca.WCSuccess)
	one(t, b.rcq, 2, hca.WCSuccess)
}

// slowHandler blocks in Completion.
type slowHandler struct{ in, out chan struct{} }

func (h *slowHandler) Completion()           { h.in <- struct{}{}; <-h.out }
func (h *slowHandler) CQEvent(hca.EventType) {}

// testBlockedHandler: a handler that blocks, which it must not, does not stop
// the QP.
func testBlockedHandler(t *testing.T, p Pair) {
	a, b := newEnd(t, p.A, defaults()), newEnd(t, p.B, defaults())
	h := &slowHandler{in: make(chan struct{}, 8), out: make(chan struct{})}
	cq, err := a.ctx.CreateCQ(hca.CQInit{Entries: 64, Handler: h})
	must(t, err)
	t.Cleanup(func() { must(t, cq.Close()) })
	a.scq = cq
	a.qp = a.newQP()
	link(a, b)
	cq.ReqNotify(hca.NotifyNextComp)
	must(t, errOf(a.qp.PostSend([]hca.SendWR{a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, 8)})))
	done := make(chan struct{})
	go func() { defer close(done); a.qp.Run() }()
	signal(t, h.in, "completion")
	quick(t, "the queue", func() {
		a.postSend(a.rdma(hca.OpRDMAWrite, 2, 0, b, 0, 8))
		take(t, cq, 2)
	})
	close(h.out)
	signal2(t, done)
}
