package hcatest

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
)

// contractCases hold a device to the rules that package hca's comment states.
// faulty_test.go shows that each of them can fail.
var contractCases = []testCase{
	{"ContractNoWaitForOthers", testNoWaitForOthers},
	{"ContractNoMemoryInVerbs", testNoMemoryInVerbs},
	{"ContractCallbacksElsewhere", testCallbacksElsewhere},
	{"ContractNoCallbackAfterClose", func(t *testing.T, p Pair) { testNoCallbackAfterClose(t, p, runtime.Gosched) }},
}

// testNoWaitForOthers: while a runner of each side is stuck in a client's memory
// and a handler does not return, no verb that may not sleep waits for either:
// it would, if it took a lock that is held across what blocks.
func testNoWaitForOthers(t *testing.T, p Pair) {
	st := newStage(t, p)
	h := &slowHandler{in: make(chan struct{}, 64), out: make(chan struct{})}
	cq, err := st.a.ctx.CreateCQ(hca.CQInit{Entries: 64, Handler: h})
	must(t, err)
	t.Cleanup(func() { must(t, cq.Close()) })
	st.a.scq = cq
	st.a.qp = st.a.newQP()
	st.b.qp = st.b.newQP()
	link(st.a, st.b)
	cq.ReqNotify(hca.NotifyNextComp)
	must(t, errOf(st.a.qp.PostSend([]hca.SendWR{st.a.rdma(hca.OpRDMAWrite, 1, 0, st.b, 0, 8)})))
	handler := make(chan struct{})
	go func() { defer close(handler); st.a.qp.Run() }()
	signal(t, h.in, "completion")
	st.b.postRecv(2, st.b.sge(0, 64))
	freeA := stuck(t, st.a, st.b.mem, st.a.send(3, 0, 64))
	st.a.postRecv(2, st.a.sge(0, 64))
	// Inline, as its own memory is not to be read now.
	freeB := stuck(t, st.b, st.a.mem, hca.SendWR{ID: 3, Opcode: hca.OpSend, Flags: hca.SendSignaled | hca.SendInline, Inline: make([]byte, 64)})
	for _, v := range atomicVerbs {
		quick(t, v.name+", while others are stuck,", func() {
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					for range 20 {
						v.call(st)
					}
				})
			}
			wg.Wait()
		})
	}
	close(h.out)
	signal2(t, handler)
	st.a.mem.Unblock() // the verbs have left more to do, in both memories
	freeA()
	freeB()
}

// testNoMemoryInVerbs: what a verb is to move, it leaves to Run.
func testNoMemoryInVerbs(t *testing.T, p Pair) {
	st := newStage(t, p)
	stack := &onStack{}
	for _, e := range []*end{st.a, st.b, st.u, st.s} {
		e.mem.stack = stack
	}
	for _, v := range atomicVerbs {
		for range 3 {
			stack.in(v.name, func() { v.call(st) })
		}
	}
	st.a.qp.Run()
	for _, e := range []*end{st.a, st.b, st.u, st.s} {
		if v := e.mem.inside.Load(); v != nil {
			t.Errorf("%s touches a client's memory", *v)
		}
	}
}

// watched is every kind of handler; it fails below a verb, and after gone.
type watched struct {
	t     *testing.T
	stack *onStack
	gone  atomic.Bool
	comp  chan struct{}
	ev    chan hca.EventType
}

func newWatched(t *testing.T, s *onStack) *watched {
	return &watched{t: t, stack: s, comp: make(chan struct{}, 64), ev: make(chan hca.EventType, 64)}
}

func (w *watched) called(what string) {
	if v := w.stack.below(); v != "" {
		w.t.Errorf("%s comes from inside %s", what, v)
	}
	if w.gone.Load() {
		w.t.Errorf("%s comes after the close", what)
	}
}

func (w *watched) Completion()               { w.called("a completion"); record(w.comp, struct{}{}) }
func (w *watched) Wake(bool)                 { w.called("a wake"); record(w.comp, struct{}{}) }
func (w *watched) CQEvent(ev hca.EventType)  { w.called("a CQ's event"); record(w.ev, ev) }
func (w *watched) QPEvent(ev hca.EventType)  { w.called("a QP's event"); record(w.ev, ev) }
func (w *watched) SRQEvent(ev hca.EventType) { w.called("an SRQ's event"); record(w.ev, ev) }

// under makes e's CQs and QP anew, with w as their handler.
func (e *end) under(w *watched) {
	e.t.Helper()
	for _, to := range []*hca.CQ{&e.scq, &e.rcq} {
		cq, err := e.ctx.CreateCQ(hca.CQInit{Entries: e.o.cqe, Handler: w})
		must(e.t, err)
		e.t.Cleanup(func() { must(e.t, cq.Close()) })
		*to = cq
	}
	q, err := e.pd.CreateQP(hca.QPInit{Type: e.o.typ, SendCQ: e.scq, RecvCQ: e.rcq, Cap: e.o.cap, Handler: w})
	must(e.t, err)
	e.t.Cleanup(func() { must(e.t, q.Close()) })
	e.qp = q
}

// testCallbacksElsewhere: whatever verb is the cause of a callback, it is made
// from another goroutine than the caller's, or from Run.
func testCallbacksElsewhere(t *testing.T, p Pair) {
	stack := &onStack{}
	w := newWatched(t, stack)
	verb := func(name string, f func() error) {
		t.Helper()
		stack.in(name, func() { must(t, f()) })
	}
	fresh := func() (a, b *end) {
		a, b = newEnd(t, p.A, defaults().with(func(o *opts) { o.cqe = 4 })), newEnd(t, p.B, defaults())
		a.under(w)
		link(a, b)
		a.scq.ReqNotify(hca.NotifyNextComp)
		a.rcq.ReqNotify(hca.NotifyNextComp)
		return a, b
	}
	toErr := func(e *end) func() error {
		return func() error { return e.qp.Modify(&hca.QPAttr{State: errS}, hca.QPMaskState) }
	}
	recv := func(e *end, n int) func() error {
		return func() error { return errOf(e.qp.PostRecv(make([]hca.RecvWR, n))) }
	}
	send := func(e, to *end) func() error {
		return func() error {
			return errOf(e.qp.PostSend([]hca.SendWR{e.rdma(hca.OpRDMAWrite, 1, 0, to, 0, 8)}))
		}
	}

	a, b := fresh()
	verb("PostRecv", recv(a, 1))
	verb("Modify to ERR", toErr(a))
	signal(t, w.comp, "completion of a flush")
	verb("ReqNotify", func() error { a.rcq.ReqNotify(hca.NotifyNextComp); return nil })
	verb("PostRecv in ERR", recv(a, 1))
	signal(t, w.comp, "completion of a receive in ERR")
	verb("PostSend in ERR", send(a, b))
	signal(t, w.comp, "completion of a send in ERR")
	verb("Poll", func() error { drain(a.rcq); drain(a.scq); return nil })
	if a.rcq.Await(w) {
		verb("PostRecv in ERR", recv(a, 1))
		signal(t, w.comp, "wake")
	}
	verb("PostRecv beyond the CQ", recv(a, a.rcq.Entries()+1))
	event(t, w.ev, hca.EventCQErr)

	a, _ = fresh()
	verb("Modify to SQD", func() error {
		return a.qp.Modify(&hca.QPAttr{State: sqd, EnSQDAsyncNotify: true}, hca.QPMaskState|hca.QPMaskEnSQDAsyncNotify)
	})
	event(t, w.ev, hca.EventSQDrained)
	for range 2 {
		verb("PostSend", send(a, b))
	}
	verb("Modify to ERR", toErr(a))
	signal(t, w.comp, "completion of a flush")

	if p.A.Ops().Has(hca.OpModifyCQ | hca.OpResizeCQ) {
		a, _ = fresh()
		verb("Modify of a CQ", func() error { return a.rcq.Modify(2, 0) })
		verb("PostRecv", recv(a, 1))
		verb("Modify to ERR", toErr(a))
		verb("Resize", func() error { return a.rcq.Resize(1, nil) }) // full: it is told
		signal(t, w.comp, "completion of a full CQ")
		verb("ReqNotify", func() error { a.rcq.ReqNotify(hca.NotifyNextComp); return nil })
	}
	a, _ = fresh()
	verb("Close of a QP", a.qp.Close)
	a.rcq.Await(w)
	verb("Close of a CQ", a.rcq.Close)
	signal(t, w.comp, "wake of a closed CQ")
}

// testNoCallbackAfterClose: none of an object's callbacks comes once its close
// has returned, though messages to it are under way. later is given the chance
// to let what is late come.
func testNoCallbackAfterClose(t *testing.T, p Pair, later func()) {
	for i := range 20 {
		wq, wc := newWatched(t, &onStack{}), newWatched(t, &onStack{})
		a, b := newEnd(t, p.A, defaults()), newEnd(t, p.B, defaults())
		b.under(wc)
		q, err := b.pd.CreateQP(hca.QPInit{Type: rc, SendCQ: b.scq, RecvCQ: b.rcq, Cap: b.o.cap, Handler: wq})
		must(t, err)
		b.qp = q
		link(a, b)
		b.rcq.ReqNotify(hca.NotifyNextComp)
		for range 8 {
			must(t, errOf(b.qp.PostRecv([]hca.RecvWR{{ID: 1, SGE: []hca.SGE{b.sge(0, 64)}}})))
			must(t, errOf(a.qp.PostSend([]hca.SendWR{a.send(2, 0, 64)})))
		}
		// A wrong key at the end: an event of the QP too.
		w := a.rdma(hca.OpRDMAWrite, 3, 0, b, 0, 8)
		w.RKey ^= 0x80
		must(t, errOf(a.qp.PostSend([]hca.SendWR{w})))
		var wg sync.WaitGroup
		wg.Go(a.qp.Run)
		for range i {
			runtime.Gosched()
		}
		must(t, q.Close())
		wq.gone.Store(true)
		must(t, b.scq.Close())
		must(t, b.rcq.Close())
		wc.gone.Store(true)
		wg.Wait()
		later()
	}
	works(t, p)
}

// hour is more of a bubble's time than any device lets pass by itself.
const hour = time.Hour
