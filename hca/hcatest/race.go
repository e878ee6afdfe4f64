package hcatest

import (
	"flag"
	"strconv"
	"sync"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

var raceCases = []testCase{
	{"Row11DestroyInWait", testDestroyInWait},
	{"Row11DestroyInTraffic", testDestroyInTraffic},
	{"Row11ErrInTraffic", testErrInTraffic},
	{"Row11DeregInTraffic", testDeregInTraffic},
	{"ConcurrentVerbs", testConcurrentVerbs},
}

// rounds makes the races long: go test -hcatest.rounds 100000.
var roundsFlag = flag.Int("hcatest.rounds", 300, "rounds of each of the races in hcatest")

// testDestroyInWait closes QPs while they wait for a receive or for a peer, with
// the timer about to fire.
func testDestroyInWait(t *testing.T, p Pair) {
	o := defaults().with(func(o *opts) { o.minRNR, o.rnrRetry, o.timeout, o.retryCnt = 1, 3, 1, 1 })
	hub, away := newEnd(t, p.A, o), newEnd(t, p.B, o)
	for i := range *roundsFlag {
		a, b := *hub, *away
		mk := func(e *end) {
			q, err := e.pd.CreateQP(hca.QPInit{Type: rc, SendCQ: e.scq, RecvCQ: e.rcq, Cap: e.o.cap, Handler: e.qev})
			must(t, err)
			e.qp = q
		}
		mk(&a)
		mk(&b)
		a.toInit()
		a.toRTR(&b)
		if i%2 == 0 {
			b.toInit()
			b.toRTR(&a)
		}
		a.toRTS()
		a.postSend(a.send(1, 0, 8))
		var wg sync.WaitGroup
		for _, f := range []func(){
			func() { must(t, a.qp.Close()) },
			func() { must(t, b.qp.Close()) },
			func() {
				if i%4 == 0 {
					_, _ = b.qp.PostRecv([]hca.RecvWR{{SGE: []hca.SGE{b.sge(0, 8)}}})
					b.qp.Run()
				}
			},
		} {
			wg.Add(1)
			go func() { defer wg.Done(); f() }()
		}
		wg.Wait()
		drain(a.scq)
		drain(b.rcq)
	}
	works(t, p)
}

func drain(cq hca.CQ) {
	var wc [64]hca.WC
	for cq.Poll(wc[:]) > 0 {
	}
}

// repeat runs each of fs again and again, on a goroutine of its own, until stop
// is called, which waits for them.
func repeat(fs ...func()) (stop func()) {
	end := make(chan struct{})
	var wg sync.WaitGroup
	for _, f := range fs {
		wg.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
					f()
				}
			}
		})
	}
	return func() {
		close(end)
		wg.Wait()
	}
}

// traffic sends in both directions until stop is called, whatever happens.
func traffic(a, b *end) (stop func()) {
	send := func(from, to *end) func() {
		return func() {
			_, _ = to.qp.PostRecv([]hca.RecvWR{{SGE: []hca.SGE{to.sge(0, 5000)}}})
			to.qp.Run()
			_, _ = from.qp.PostSend([]hca.SendWR{from.send(1, 0, 5000), from.rdma(hca.OpRDMARead, 2, 0, to, 0, 64)})
			from.qp.Run()
			for _, cq := range []hca.CQ{from.scq, from.rcq, to.scq, to.rcq} {
				drain(cq)
			}
		}
	}
	return repeat(send(a, b), send(b, a))
}

// inBatches runs n rounds in subtests of a few, since what a round makes is kept
// until its test ends.
func inBatches(t *testing.T, n int, round func(t *testing.T, i int)) {
	const batch = 25
	for from := 0; from < n; from += batch {
		t.Run(strconv.Itoa(from), func(t *testing.T) {
			for i := from; i < min(n, from+batch); i++ {
				round(t, i)
			}
		})
	}
}

func testDestroyInTraffic(t *testing.T, p Pair) {
	inBatches(t, *roundsFlag/10, func(t *testing.T, _ int) {
		a, b := pair(t, p, defaults())
		stop := traffic(a, b)
		must(t, a.qp.Close())
		drain(a.scq)
		drain(a.rcq)
		must(t, b.qp.Close())
		stop()
		drain(a.scq)
		drain(b.rcq)
		a.qp.Run() // of a closed QP: nothing
	})
	works(t, p)
}

func testErrInTraffic(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	stop := traffic(a, b)
	for i := range *roundsFlag / 5 {
		e := []*end{a, b}[i%2]
		_ = e.qp.Modify(&hca.QPAttr{State: errS}, hca.QPMaskState)
		a.setState(rst)
		b.setState(rst)
		link(a, b)
	}
	stop()
	works(t, p)
}

func testDeregInTraffic(t *testing.T, p Pair) {
	inBatches(t, *roundsFlag/10, func(t *testing.T, _ int) {
		a, b := pair(t, p, defaults())
		stop := traffic(a, b)
		must(t, a.mr.Close())
		n := a.mem.calls.Load()
		must(t, b.mr.Close())
		if m := a.mem.calls.Load(); m != n {
			t.Errorf("%d accesses after the close of the region", m-n)
		}
		stop()
	})
}

// testConcurrentVerbs calls everything on one QP and its CQ at once.
func testConcurrentVerbs(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	stop, stopVerbs := traffic(a, b), repeat(
		func() { a.qp.Query() },
		func() { _ = a.qp.Modify(&hca.QPAttr{MinRNRTimer: 3}, hca.QPMaskMinRNRTimer) },
		func() { _ = a.scq.Resize(600, nil) },
		func() { a.scq.ReqNotify(hca.NotifyNextComp) },
		func() { _, _ = p.A.Counters(1) },
		func() {
			w := newWaiter()
			if a.scq.Await(w) && !a.scq.Cancel(w) {
				<-w.c
			}
		},
		func() {
			select {
			case <-a.sev.comp:
			default:
			}
		},
	)
	for range *roundsFlag {
		_ = a.qp.Modify(&hca.QPAttr{State: hca.QPSQD}, hca.QPMaskState)
		_ = a.qp.Modify(&hca.QPAttr{State: hca.QPRTS}, hca.QPMaskState)
		a.qp.Run()
	}
	stopVerbs()
	stop()
}
