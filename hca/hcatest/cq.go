package hcatest

import (
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var cqCases = []testCase{
	{"Row30NotifyNext", testNotifyNext},
	{"Row30NotifySolicited", testNotifySolicited},
	{"Row30NotifyErrors", testNotifyErrors},
	{"Row30NotifyFlush", testNotifyFlush},
	{"Row30NotifyNeverLost", testNotifyNeverLost},
	{"Row30Await", testAwait},
	{"Row30AwaitNeverLost", testAwaitNeverLost},
	{"Row33Overrun", testOverrun},
	{"Resize", testResize},
	{"Row30ContractOneHandler", testOneHandler},
}

func testNotifyNext(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	msg := func() {
		b.postRecv(1, b.sge(0, 8))
		a.postSend(a.send(2, 0, 8))
		one(t, a.scq, 2, hca.WCSuccess)
	}
	msg() // not armed
	quiet(t, b.rev.comp, "completion")
	// Already there: reported only to who asks, and no callback for it.
	if b.rcq.ReqNotify(hca.NotifyNextComp) {
		t.Error("missed completions reported without the flag")
	}
	if !b.rcq.ReqNotify(hca.NotifyNextComp | hca.ReportMissed) {
		t.Error("missed completion not reported")
	}
	quiet(t, b.rev.comp, "completion")
	msg()
	signal(t, b.rev.comp, "completion")
	msg() // once per arm
	quiet(t, b.rev.comp, "completion")
	take(t, b.rcq, 3)
	if b.rcq.ReqNotify(hca.NotifyNextComp | hca.ReportMissed) {
		t.Error("nothing was missed")
	}
	// The sender's side too.
	a.scq.ReqNotify(hca.NotifyNextComp)
	msg()
	signal(t, a.sev.comp, "send completion")
	signal(t, b.rev.comp, "completion")
}

func testNotifySolicited(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	msg := func(f hca.SendFlags) {
		b.postRecv(1, b.sge(0, 8))
		w := a.send(2, 0, 8)
		w.Flags |= f
		a.postSend(w)
		one(t, a.scq, 2, hca.WCSuccess)
		one(t, b.rcq, 1, hca.WCSuccess)
	}
	b.rcq.ReqNotify(hca.NotifySolicited)
	msg(0)
	quiet(t, b.rev.comp, "completion")
	msg(hca.SendSolicited)
	signal(t, b.rev.comp, "completion")
	msg(hca.SendSolicited)
	quiet(t, b.rev.comp, "completion")
	// An arm for the next one is not weakened.
	b.rcq.ReqNotify(hca.NotifyNextComp)
	b.rcq.ReqNotify(hca.NotifySolicited)
	msg(0)
	signal(t, b.rev.comp, "completion")
	// One for solicited ones is strengthened.
	b.rcq.ReqNotify(hca.NotifySolicited)
	b.rcq.ReqNotify(hca.NotifyNextComp)
	msg(0)
	signal(t, b.rev.comp, "completion")
}

func testNotifyErrors(t *testing.T, p Pair) {
	a, _ := pair(t, p, defaults())
	a.scq.ReqNotify(hca.NotifySolicited) // errors count as solicited
	w := a.send(1, 0, 8)
	w.SGE[0].LKey = 0
	a.postSend(w)
	signal(t, a.sev.comp, "completion")
	one(t, a.scq, 1, hca.WCLocProtErr)
}

// testNotifyFlush: what a verb completes is told too, and not from inside it.
func testNotifyFlush(t *testing.T, p Pair) {
	a, _ := pair(t, p, defaults())
	a.postRecv(1, a.sge(0, 8))
	a.rcq.ReqNotify(hca.NotifyNextComp)
	must(t, a.qp.Modify(&hca.QPAttr{State: errS}, hca.QPMaskState))
	signal(t, a.rev.comp, "completion") // without a Run
	one(t, a.rcq, 1, hca.WCWRFlushErr)
	a.rcq.ReqNotify(hca.NotifyNextComp)
	must(t, errOf(a.qp.PostRecv([]hca.RecvWR{{ID: 2}})))
	signal(t, a.rev.comp, "completion")
	w := newWaiter()
	one(t, a.rcq, 2, hca.WCWRFlushErr)
	if !a.rcq.Await(w) {
		t.Fatal("not armed")
	}
	must(t, errOf(a.qp.PostRecv([]hca.RecvWR{{ID: 3}})))
	signal(t, w.c, "wake")
}

// testNotifyNeverLost: arm, look, wait: a completion just before or just after
// arming is never missed.
func testNotifyNeverLost(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.cqe = 4096 })) // the sender may run ahead
	const total = 2000
	go func() {
		for i := range uint64(total) {
			b.postRecv(i, b.sge(0, 8))
			a.postSend(a.send(i, 0, 8))
			take(t, a.scq, 1)
		}
	}()
	var wc [8]hca.WC
	for got := 0; got < total; {
		if n := b.rcq.Poll(wc[:]); n > 0 {
			got += n
			continue
		}
		if b.rcq.ReqNotify(hca.NotifyNextComp | hca.ReportMissed) {
			continue
		}
		signal(t, b.rev.comp, "completion")
	}
}

func testAwait(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	w, w2 := newWaiter(), newWaiter()
	if !b.rcq.Await(w) {
		t.Fatal("not armed")
	}
	if b.rcq.Await(w2) {
		t.Fatal("two waiters armed")
	}
	if b.rcq.Cancel(w2) {
		t.Fatal("cancelled what was not armed")
	}
	b.postRecv(1, b.sge(0, 8))
	a.postSend(a.send(2, 0, 8))
	signal(t, w.c, "wake")
	if b.rcq.Cancel(w) {
		t.Fatal("cancelled after the wake")
	}
	if b.rcq.Await(w) {
		t.Fatal("armed though a completion is there")
	}
	one(t, b.rcq, 1, hca.WCSuccess)
	if !b.rcq.Await(w) || !b.rcq.Cancel(w) {
		t.Fatal("could not arm and cancel")
	}
	b.postRecv(3, b.sge(0, 8))
	a.postSend(a.send(4, 0, 8))
	one(t, b.rcq, 3, hca.WCSuccess)
	quiet(t, w.c, "wake")
}

func testAwaitNeverLost(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.cqe = 4096 })) // the sender may run ahead
	var wg sync.WaitGroup
	wg.Add(1)
	const total = 2000
	go func() {
		defer wg.Done()
		for i := range uint64(total) {
			one(t, b.rcq, i, hca.WCSuccess) // polls and awaits
		}
	}()
	for i := range uint64(total) {
		b.postRecv(i, b.sge(0, 8))
		a.postSend(a.send(i, 0, 8))
		one(t, a.scq, i, hca.WCSuccess)
	}
	wg.Wait()
}

func testOverrun(t *testing.T, p Pair) {
	a, b := pairOf(t, p, defaults(), defaults().with(func(o *opts) { o.cqe = 4 }))
	room := b.rcq.Entries()
	for i := range room + 2 {
		b.postRecv(uint64(i), b.sge(0, 8))
	}
	for i := range room + 1 {
		a.postSend(a.send(uint64(i), 0, 8))
	}
	event(t, b.rev.ev, hca.EventCQErr)
	event(t, b.qev.ev, hca.EventQPFatal)
	if b.state() != errS {
		t.Errorf("state %d", b.state())
	}
	wc := take(t, b.rcq, room) // none was overwritten
	for i := range wc {
		if wc[i].ID != uint64(i) || wc[i].Status != hca.WCSuccess {
			t.Errorf("completion %d: %+v", i, wc[i])
		}
	}
	none(t, b.rcq) // and nothing comes after it
	quiet(t, b.rev.ev, "second CQ error")
	// The send side.
	a, b = pairOf(t, p, defaults().with(func(o *opts) { o.cqe = 2 }), defaults())
	for i := range a.scq.Entries() + 1 {
		a.postSend(a.rdma(hca.OpRDMAWrite, uint64(i), 0, b, 0, 8))
	}
	event(t, a.sev.ev, hca.EventCQErr)
	event(t, a.qev.ev, hca.EventQPFatal)
	if a.state() != errS {
		t.Errorf("state %d", a.state())
	}
}

func testResize(t *testing.T, p Pair) {
	if !p.A.Ops().Has(hca.OpResizeCQ) {
		t.Skip("no resize")
	}
	a, b := pairOf(t, p, defaults(), defaults().with(func(o *opts) { o.cqe = 8 }))
	put := func(from, n int) {
		for i := range n {
			b.postRecv(uint64(from+i), b.sge(0, 8))
			a.postSend(a.send(0, 0, 8))
			one(t, a.scq, 0, hca.WCSuccess)
		}
	}
	put(0, 6)
	take(t, b.rcq, 3)
	put(6, 5) // the ring has wrapped
	wantErrno(t, b.rcq.Resize(7, nil), unix.EINVAL)
	wantErrno(t, b.rcq.Resize(0, nil), unix.EINVAL)
	wantErrno(t, b.rcq.Resize(int(p.B.Attr().MaxCQE)+1, nil), unix.EINVAL)
	must(t, b.rcq.Resize(8, nil))
	must(t, b.rcq.Resize(40, nil))
	put(11, 32)
	for i, wc := range take(t, b.rcq, 40) {
		if wc.ID != uint64(3+i) {
			t.Fatalf("completion %d has id %d", i, wc.ID)
		}
	}
	must(t, b.rcq.Resize(1, nil))
	if n := b.rcq.Entries(); n != 1 {
		t.Errorf("%d entries", n)
	}
	put(50, 1)
	take(t, b.rcq, 1)
}

// oneAtATime fails when it is entered twice.
type oneAtATime struct {
	t   *testing.T
	cq  hca.CQ
	mu  sync.Mutex
	got chan struct{}
}

func (h *oneAtATime) Completion() {
	if !h.mu.TryLock() {
		h.t.Error("two handlers of one CQ at a time")
		return
	}
	h.cq.ReqNotify(hca.NotifyNextComp) // the next may come while we are here
	for range 4 {
		runtime.Gosched()
	}
	record(h.got, struct{}{})
	h.mu.Unlock()
}
func (h *oneAtATime) CQEvent(hca.EventType) {}

func testOneHandler(t *testing.T, p Pair) {
	hub := newEnd(t, p.B, defaults())
	h := &oneAtATime{t: t, got: make(chan struct{}, 1<<16)}
	cq, err := hub.ctx.CreateCQ(hca.CQInit{Entries: 4096, Handler: h})
	must(t, err)
	t.Cleanup(func() { must(t, cq.Close()) })
	h.cq, hub.rcq = cq, cq
	cq.ReqNotify(hca.NotifyNextComp)
	var wg sync.WaitGroup
	const clients, msgs = 6, 200
	for range clients {
		a := newEnd(t, p.A, defaults())
		b := newEnd(t, p.B, defaults().with(func(o *opts) { o.shareCtx = hub }))
		b.rcq = cq
		b.qp = b.newQP()
		link(a, b)
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range uint64(msgs) {
				b.postRecv(i, hub.sge(0, 8))
				a.postSend(a.send(i, 0, 8))
				one(t, a.scq, i, hca.WCSuccess)
			}
		}()
	}
	wg.Wait()
	take(t, cq, clients*msgs)
	signal(t, h.got, "completion")
}
