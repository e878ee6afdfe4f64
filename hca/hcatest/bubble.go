package hcatest

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/uverbsd/uverbsd/hca"
)

// bubbleCases need a clock that only goes on when nothing else can.
var bubbleCases = []testCase{
	{"ContractNeverSleeps", testNeverSleeps},
	{"ContractNothingComesLate", func(t *testing.T, p Pair) {
		testNoCallbackAfterClose(t, p, func() {
			synctest.Wait()
			time.Sleep(hour)
		})
	}},
	{"Row21RNRTimes", testRNRTimes},
	{"Row21RNRForEver", testRNRForEver},
	{"Row21RNRZeroFailsAtOnce", testRNRZero},
	{"Row21TransportTimes", testTransportTimes},
	{"Row21SmallInputSlowReceiver", testSlowReceiver},
}

// bubbleLimit is real time: what hangs in a bubble in a way that the bubble does
// not see, in a mutex above all, would hang until go test's own limit.
const bubbleLimit = 2 * time.Minute

// RunInBubble runs what needs an injected clock: the suite's cases about time and
// about sleeping, each in a bubble of testing/synctest. It is for devices that
// are made of goroutines only; one that waits for a file descriptor does not
// work in a bubble. open is called inside.
func RunInBubble(t *testing.T, open func(t testing.TB) Pair) {
	for _, c := range bubbleCases {
		t.Run(c.name, func(t *testing.T) {
			stop := time.AfterFunc(bubbleLimit, func() {
				panic(fmt.Sprintf("%s: somebody waits for a lock that is held across a sleep", t.Name()))
			})
			defer stop.Stop()
			synctest.Test(t, func(t *testing.T) { c.run(t, open(t)) })
		})
	}
}

// testNeverSleeps calls the verbs that must not sleep when everything is idle and
// when everything is stuck: once the bubble stands still each has returned, and
// no time has passed.
func testNeverSleeps(t *testing.T, p Pair) {
	st := newStage(t, p)
	check := func(when string) {
		t.Helper()
		for _, v := range atomicVerbs {
			done, start := make(chan struct{}), time.Now()
			go func() { defer close(done); v.call(st) }()
			synctest.Wait()
			select {
			case <-done:
			default:
				t.Errorf("%s sleeps, %s", v.name, when)
				<-done
			}
			if d := time.Since(start); d != 0 {
				t.Errorf("%s took %v, %s", v.name, d, when)
			}
		}
	}
	check("idle")
	for range 70 { // queues are full
		check("busy")
	}
	drain(st.a.scq)
	drain(st.b.rcq)
	st.a.setState(rst)
	st.b.setState(rst)
	link(st.a, st.b)
	st.b.postRecv(1, st.b.sge(0, 64))
	free := stuck(t, st.a, st.b.mem, st.a.send(2, 0, 64))
	check("with a runner stuck in memory")
	free()
	st.a.setState(errS)
	st.b.setState(errS)
	check("in ERR")
}

// rnrMicros are IBTA 1.4 table 45 in units of 10 µs, by code.
var rnrMicros = []int{
	65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
	6144, 8192, 12288, 16384, 24576, 32768, 49152,
}

func rnrOf(code int) time.Duration { return time.Duration(rnrMicros[code]) * 10 * time.Microsecond }

// atLeast checks a time by the bubble's clock: never less than what the attributes
// say, and the same thing, not another.
func atLeast(t *testing.T, what string, got, want time.Duration) {
	t.Helper()
	if got < want || got > 2*want+time.Microsecond {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// testRNRTimes: every code of min_rnr_timer, and every count of retries.
func testRNRTimes(t *testing.T, p Pair) {
	for code := range rnrMicros {
		a, _ := pair(t, p, defaults().with(func(o *opts) { o.minRNR, o.rnrRetry = uint8(code), 1 }))
		start := time.Now()
		a.postSend(a.send(1, 0, 8))
		one(t, a.scq, 1, hca.WCRNRRetryExcErr)
		atLeast(t, fmt.Sprintf("code %d", code), time.Since(start), rnrOf(code))
	}
	for n := uint8(0); n < 7; n++ {
		a, _ := pair(t, p, defaults().with(func(o *opts) { o.minRNR, o.rnrRetry = 20, n }))
		start := time.Now()
		a.postSend(a.send(1, 0, 8))
		one(t, a.scq, 1, hca.WCRNRRetryExcErr)
		atLeast(t, fmt.Sprintf("%d retries", n), time.Since(start), time.Duration(n)*rnrOf(20))
	}
}

// testRNRForEver: 7 retries are without end.
func testRNRForEver(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.minRNR, o.rnrRetry = 1, 7 }))
	a.postSend(a.send(1, 0, 8))
	for range 24 {
		time.Sleep(hour)
		none(t, a.scq)
	}
	works(t, p)
	b.postRecv(2, b.sge(0, 8))
	one(t, a.scq, 1, hca.WCSuccess)
	one(t, b.rcq, 2, hca.WCSuccess)
}

// testRNRZero: without retries the first NAK is the end, whatever the timer.
func testRNRZero(t *testing.T, p Pair) {
	a, _ := pair(t, p, defaults().with(func(o *opts) { o.minRNR, o.rnrRetry = 0, 0 }))
	start := time.Now()
	a.postSend(a.send(1, 0, 8))
	one(t, a.scq, 1, hca.WCRNRRetryExcErr)
	if d := time.Since(start); d >= rnrOf(1) {
		t.Errorf("failed after %v", d)
	}
}

// testTransportTimes: a peer that does not answer: each try has its 4.096 µs ·
// 2^timeout (IBTA 1.4 §9.7.6.1.3), and 0 is for ever.
func testTransportTimes(t *testing.T, p Pair) {
	for _, timeout := range []uint8{1, 2, 8, 14, 18} {
		for _, retries := range []uint8{0, 1, 7} {
			o := defaults().with(func(o *opts) { o.timeout, o.retryCnt = timeout, retries })
			a, b := newEnd(t, p.A, o), newEnd(t, p.B, o) // b stays in RESET
			a.toInit()
			a.toRTR(b)
			a.toRTS()
			start := time.Now()
			a.postSend(a.send(1, 0, 8))
			one(t, a.scq, 1, hca.WCRetryExcErr)
			atLeast(t, fmt.Sprintf("timeout %d, %d retries", timeout, retries), time.Since(start),
				time.Duration(retries+1)*(4096*time.Nanosecond<<timeout))
		}
	}
	o := defaults().with(func(o *opts) { o.timeout, o.retryCnt = 0, 0 })
	a, b := newEnd(t, p.A, o), newEnd(t, p.B, o)
	a.toInit()
	a.toRTR(b)
	a.toRTS()
	a.postSend(a.send(1, 0, 8))
	time.Sleep(24 * hour)
	none(t, a.scq)
}

// testSlowReceiver: who is told that there is no receive waits at least
// min_rnr_timer before the next try (IBTA 1.4 §9.7.5.2.8), though a receive comes
// earlier: about 655 ms with code 0, about 1 ms with 13.
func testSlowReceiver(t *testing.T, p Pair) {
	for _, retries := range []uint8{3, 7} {
		for _, code := range []uint8{0, 13} {
			for _, srq := range []bool{false, true} {
				o := defaults().with(func(o *opts) { o.minRNR, o.rnrRetry = code, retries })
				ob := o
				if srq {
					ob.srq = &hca.SRQInit{MaxWR: 4, MaxSGE: 1}
				}
				a, b := pairOf(t, p, o, ob)
				start := time.Now()
				a.postSend(a.send(1, 0, 8), a.send(2, 0, 8))
				time.Sleep(500 * time.Microsecond)
				b.postRecv(3, b.sge(0, 8))
				b.postRecv(4, b.sge(0, 8))
				one(t, a.scq, 1, hca.WCSuccess)
				atLeast(t, fmt.Sprintf("min_rnr_timer %d, rnr_retry %d, SRQ %v", code, retries, srq), time.Since(start), rnrOf(int(code)))
				one(t, a.scq, 2, hca.WCSuccess) // its receive was there
			}
		}
	}
}
