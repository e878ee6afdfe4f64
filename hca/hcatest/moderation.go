package hcatest

import (
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var moderationCases = []testCase{
	{"ModerationChecks", needs(hca.OpModifyCQ, testModerationChecks)},
	{"ModerationCount", needs(hca.OpModifyCQ, testModerationCount)},
	{"ModerationPeriod", needs(hca.OpModifyCQ, testModerationPeriod)},
	{"ModerationSolicited", needs(hca.OpModifyCQ, testModerationSolicited)},
	{"ModerationChange", needs(hca.OpModifyCQ, testModerationChange)},
	{"ModerationFull", needs(hca.OpModifyCQ, testModerationFull)},
	{"ModerationNeverLost", needs(hca.OpModifyCQ, testModerationNeverLost)},
	{"ModerationCloses", needs(hca.OpModifyCQ, testModerationCloses)},
}

// long is a period in microseconds that is over well within patience.
const long = 20000

func testModerationChecks(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	a := p.A.Attr()
	if a.MaxCQCount == 0 || a.MaxCQPeriod == 0 {
		t.Fatalf("bounds %d and %d", a.MaxCQCount, a.MaxCQPeriod)
	}
	must(t, e.scq.Modify(a.MaxCQCount, a.MaxCQPeriod))
	if a.MaxCQCount < 1<<16-1 {
		wantErrno(t, e.scq.Modify(a.MaxCQCount+1, 0), unix.EINVAL)
	}
	if a.MaxCQPeriod < 1<<16-1 {
		wantErrno(t, e.scq.Modify(0, a.MaxCQPeriod+1), unix.EINVAL)
	}
	must(t, e.scq.Modify(0, 0))
}

// msgs makes n completions in b's receive CQ, with flags f at the sender.
func msgs(t *testing.T, a, b *end, n int, f hca.SendFlags) {
	t.Helper()
	for range n {
		b.postRecv(1, b.sge(0, 8))
		w := a.send(2, 0, 8)
		w.Flags |= f
		a.postSend(w)
		one(t, a.scq, 2, hca.WCSuccess)
	}
}

func testModerationCount(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	must(t, b.rcq.Modify(3, 0))
	msgs(t, a, b, 5, 0) // before the arm: they do not count
	for range 3 {
		b.rcq.ReqNotify(hca.NotifyNextComp)
		msgs(t, a, b, 2, 0)
		quiet(t, b.rev.comp, "completion")
		b.rcq.ReqNotify(hca.NotifyNextComp) // again: what came still counts
		msgs(t, a, b, 1, 0)
		signal(t, b.rev.comp, "completion")
		msgs(t, a, b, 4, 0) // once per arm
		quiet(t, b.rev.comp, "completion")
	}
	// A waiter is not held back.
	take(t, b.rcq, 26)
	w := newWaiter()
	if !b.rcq.Await(w) {
		t.Fatal("not armed")
	}
	msgs(t, a, b, 1, 0)
	signal(t, w.c, "wake")
	// 0 and 0, or 1, is at once.
	for _, c := range []uint16{0, 1} {
		must(t, b.rcq.Modify(c, 0))
		b.rcq.ReqNotify(hca.NotifyNextComp)
		msgs(t, a, b, 1, 0)
		signal(t, b.rev.comp, "completion")
	}
}

func testModerationPeriod(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for _, count := range []uint16{0, 100} {
		must(t, b.rcq.Modify(count, long))
		for range 2 {
			b.rcq.ReqNotify(hca.NotifyNextComp)
			start := time.Now()
			msgs(t, a, b, 2, 0)
			signal(t, b.rev.comp, "completion")
			if d := time.Since(start); d < long*time.Microsecond {
				t.Errorf("told after %v, before the period was over", d)
			}
		}
	}
	// Whichever is earlier: the count, and then the period of what comes after.
	must(t, b.rcq.Modify(2, long))
	b.rcq.ReqNotify(hca.NotifyNextComp)
	msgs(t, a, b, 2, 0)
	signal(t, b.rev.comp, "completion")
	b.rcq.ReqNotify(hca.NotifyNextComp)
	start := time.Now()
	msgs(t, a, b, 1, 0)
	signal(t, b.rev.comp, "completion")
	if d := time.Since(start); d < long*time.Microsecond {
		t.Errorf("told after %v, before the period was over", d)
	}
	quiet(t, b.rev.comp, "completion")
}

func testModerationSolicited(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	must(t, b.rcq.Modify(2, 0))
	b.rcq.ReqNotify(hca.NotifySolicited)
	msgs(t, a, b, 1, hca.SendSolicited)
	msgs(t, a, b, 3, 0)
	quiet(t, b.rev.comp, "completion")
	msgs(t, a, b, 1, hca.SendSolicited)
	signal(t, b.rev.comp, "completion")
}

// testModerationChange: what is held back is told when less is asked for.
func testModerationChange(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for _, to := range [][2]uint16{{0, 0}, {1, 0}, {2, 0}, {10, 50}, {0, 50}, {2, long}} {
		must(t, b.rcq.Modify(10, 0))
		b.rcq.ReqNotify(hca.NotifyNextComp)
		msgs(t, a, b, 2, 0)
		quiet(t, b.rev.comp, "completion")
		must(t, b.rcq.Modify(to[0], to[1]))
		signal(t, b.rev.comp, "completion")
	}
	// More: the two that were held count towards it.
	must(t, b.rcq.Modify(3, 0))
	b.rcq.ReqNotify(hca.NotifyNextComp)
	msgs(t, a, b, 2, 0)
	must(t, b.rcq.Modify(5, 0))
	msgs(t, a, b, 2, 0)
	quiet(t, b.rev.comp, "completion")
	msgs(t, a, b, 1, 0)
	signal(t, b.rev.comp, "completion")
}

// testModerationFull: when nothing more can come, nothing more is waited for.
func testModerationFull(t *testing.T, p Pair) {
	a, b := pairOf(t, p, defaults(), defaults().with(func(o *opts) { o.cqe = 4 }))
	must(t, b.rcq.Modify(1000, 0))
	b.rcq.ReqNotify(hca.NotifyNextComp)
	n := b.rcq.Entries()
	msgs(t, a, b, n-1, 0)
	quiet(t, b.rev.comp, "completion")
	msgs(t, a, b, 1, 0)
	signal(t, b.rev.comp, "completion")
	if p.B.Ops().Has(hca.OpResizeCQ) {
		take(t, b.rcq, n)
		must(t, b.rcq.Resize(8, nil))
		b.rcq.ReqNotify(hca.NotifyNextComp)
		msgs(t, a, b, 3, 0)
		quiet(t, b.rev.comp, "completion")
		must(t, b.rcq.Resize(3, nil))
		signal(t, b.rev.comp, "completion")
	}
}

// testModerationNeverLost: arm, look, wait loses nothing, whatever the moderation
// is and however it changes, and there is one handler at a time.
func testModerationNeverLost(t *testing.T, p Pair) {
	a, b := newEnd(t, p.A, defaults()), newEnd(t, p.B, defaults())
	h := &oneAtATime{t: t, got: make(chan struct{}, 1<<16)}
	cq, err := b.ctx.CreateCQ(hca.CQInit{Entries: 4096, Handler: h}) // the sender may run ahead
	must(t, err)
	t.Cleanup(func() { must(t, cq.Close()) })
	h.cq, b.rcq = cq, cq
	b.qp = b.newQP()
	link(a, b)
	cq.ReqNotify(hca.NotifyNextComp)
	const total = 2000
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range uint64(total) {
			b.postRecv(i, b.sge(0, 8))
			a.postSend(a.send(i, 0, 8))
			take(t, a.scq, 1)
		}
	})
	i := 0
	stop := repeat(func() {
		must(t, cq.Modify(uint16(i%7), uint16(20+i%50)))
		i++
	})
	var wc [8]hca.WC
	for got := 0; got < total; {
		if n := cq.Poll(wc[:]); n > 0 {
			got += n
			continue
		}
		signal(t, h.got, "completion")
	}
	stop()
	wg.Wait()
}

// testModerationCloses: CQs close, and are resized, with their timers about to
// fire; nothing is told after it.
func testModerationCloses(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for i := range *roundsFlag {
		ev := newCQEvents()
		cq, err := b.ctx.CreateCQ(hca.CQInit{Entries: 64, Handler: ev})
		must(t, err)
		must(t, cq.Modify(100, uint16(1+i%100)))
		q, err := b.pd.CreateQP(hca.QPInit{Type: rc, SendCQ: cq, RecvCQ: cq, Cap: b.o.cap})
		must(t, err)
		e := *b
		e.qp = q
		e.toInit()
		e.toRTR(a)
		e.toRTS()
		cq.ReqNotify(hca.NotifyNextComp)
		w := e.send(1, 0, 8)
		w.SGE[0].LKey = 0 // completes at once, in error
		e.postSend(w)
		if p.B.Ops().Has(hca.OpResizeCQ) {
			must(t, cq.Resize(32, nil))
		}
		must(t, q.Close())
		must(t, cq.Close())
		n := len(ev.comp)
		if i%2 == 0 {
			a.qp.Query()
		}
		if m := len(ev.comp); m != n || m > 1 {
			t.Errorf("%d completions told, %d of them after the close", m, m-n)
		}
	}
}
