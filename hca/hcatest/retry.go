package hcatest

import (
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
)

var retryCases = []testCase{
	{"Row21RNRWaits", testRNRWaits},
	{"Row21RNRFails", testRNRFails},
	{"Row21RNRTimer", testRNRTimer},
	{"Row21RNRDoesNotStarve", testRNRNoStarve},
	{"Row21PeerComesLater", testPeerLater},
	{"Row21NoPeer", testNoPeer},
	{"Row21PeerGoes", testPeerGoes},
}

// testRNRWaits: rnr_retry 7 waits for ever, and goes on when there is a receive.
func testRNRWaits(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.minRNR = 1 }))
	for i := range uint64(20) {
		a.mem.Set(0, Pattern(int(i), 8))
		a.postSend(a.send(i, 0, 8))
		none(t, a.scq)
		b.postRecv(100+i, b.sge(0, 8))
		one(t, a.scq, i, hca.WCSuccess)
		one(t, b.rcq, 100+i, hca.WCSuccess)
		equal(t, b.mem.Get(0, 8), Pattern(int(i), 8))
	}
}

func testRNRFails(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.rnrRetry = 0 }))
	a.postSend(a.send(1, 0, 8), a.send(2, 0, 8))
	one(t, a.scq, 1, hca.WCRNRRetryExcErr)
	one(t, a.scq, 2, hca.WCWRFlushErr)
	if a.state() != errS || b.state() != rts {
		t.Errorf("states %d and %d", a.state(), b.state())
	}
	b.postRecv(3, b.sge(0, 8))
	none(t, b.rcq)
}

// testRNRTimer: min_rnr_timer 0 is 655.36 ms, 13 is 0.96 ms. By the real clock, so
// only from below, and one against the other.
func testRNRTimer(t *testing.T, p Pair) {
	wait := func(code, retries uint8, least time.Duration) time.Duration {
		a, _ := pair(t, p, defaults().with(func(o *opts) { o.minRNR, o.rnrRetry = code, retries }))
		start := time.Now()
		a.postSend(a.send(1, 0, 8))
		one(t, a.scq, 1, hca.WCRNRRetryExcErr)
		d := time.Since(start)
		if d < least {
			t.Errorf("min_rnr_timer %d, %d retries: failed after %v, want at least %v", code, retries, d, least)
		}
		return d
	}
	long := wait(0, 1, 655360*time.Microsecond)
	short := wait(13, 2, 1920*time.Microsecond)
	for range 4 { // one of them without an interruption of that length
		short = min(short, wait(13, 2, 1920*time.Microsecond))
	}
	if short >= long {
		t.Errorf("two waits of min_rnr_timer 13 took %v, one of 0 %v", short, long)
	}
	// The retries begin anew with every message.
	a, b := pair(t, p, defaults().with(func(o *opts) { o.minRNR, o.rnrRetry = 20, 1 }))
	for i := range uint64(4) {
		a.postSend(a.send(i, 0, 8))
		b.postRecv(i, b.sge(0, 8))
		one(t, a.scq, i, hca.WCSuccess)
	}
}

// testRNRNoStarve: a hundred QPs that wait for ever do not slow others.
func testRNRNoStarve(t *testing.T, p Pair) {
	for range 100 {
		w, _ := pair(t, p, defaults())
		w.postSend(w.send(1, 0, 8))
	}
	a, b := pair(t, p, defaults())
	for i := range uint64(200) {
		b.postRecv(i, b.sge(0, 8))
		a.postSend(a.send(i, 0, 8))
		one(t, a.scq, i, hca.WCSuccess)
	}
}

// testPeerLater: the client of a ping-pong may send before its peer is ready.
func testPeerLater(t *testing.T, p Pair) {
	for _, timeout := range []uint8{0, 19} { // for ever, and 17 s
		o := defaults().with(func(o *opts) { o.timeout = timeout })
		a, b := newEnd(t, p.A, o), newEnd(t, p.B, o)
		a.toInit()
		a.toRTR(b)
		a.toRTS()
		a.mem.Set(0, Pattern(5, 5000))
		a.postSend(a.send(1, 0, 5000), a.rdma(hca.OpRDMAWrite, 2, 0, b, 10000, 100))
		none(t, a.scq)
		b.toInit()
		b.postRecv(3, b.sge(0, 5000))
		none(t, a.scq)
		b.toRTR(a)
		one(t, a.scq, 1, hca.WCSuccess)
		one(t, a.scq, 2, hca.WCSuccess)
		one(t, b.rcq, 3, hca.WCSuccess)
		equal(t, b.mem.Get(0, 5000), Pattern(5, 5000))
	}
}

func testNoPeer(t *testing.T, p Pair) {
	for name, f := range map[string]func(a, b *end, at *hca.QPAttr){
		"QPN":   func(a, b *end, at *hca.QPAttr) { at.DestQPN = 0xfffffe },
		"LID":   func(a, b *end, at *hca.QPAttr) { at.AH.DLID = 0xbfff; at.AH.DGID[15]++ }, // or the GID
		"type":  func(a, b *end, at *hca.QPAttr) { at.DestQPN = newEnd(t, p.B, udOpts()).qp.Num() },
		"state": func(a, b *end, at *hca.QPAttr) { at.DestQPN = newEnd(t, p.B, defaults()).qp.Num() },
		"other": func(a, b *end, at *hca.QPAttr) { // connected to somebody else
			c, _ := pair(t, Pair{A: p.B, B: p.A, Mapped: p.Mapped}, defaults())
			at.DestQPN = c.qp.Num()
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := defaults().with(func(o *opts) { o.timeout, o.retryCnt = 8, 2 })
			a, b := newEnd(t, p.A, o), newEnd(t, p.B, o)
			a.toInit()
			at, m := a.rtrAttr(b)
			f(a, b, &at)
			must(t, a.qp.Modify(&at, m))
			a.toRTS()
			start := time.Now()
			a.postSend(a.send(1, 0, 8), a.send(2, 0, 8))
			one(t, a.scq, 1, hca.WCRetryExcErr)
			one(t, a.scq, 2, hca.WCWRFlushErr)
			if d, least := time.Since(start), 2*4096*time.Nanosecond<<8; d < least {
				t.Errorf("gave up after %v, want at least %v", d, least)
			}
			if a.state() != errS {
				t.Errorf("state %d", a.state())
			}
		})
	}
}

// testPeerGoes: a peer that goes while a message waits for its receive.
func testPeerGoes(t *testing.T, p Pair) {
	o := defaults().with(func(o *opts) { o.timeout, o.retryCnt = 8, 1 })
	for name, f := range map[string]func(b *end){
		"err":   func(b *end) { b.setState(errS) },
		"reset": func(b *end) { b.setState(rst) },
		"close": func(b *end) { must(t, b.qp.Close()) },
	} {
		for _, srq := range []bool{false, true} {
			ob := o
			if srq {
				ob.srq = &hca.SRQInit{MaxWR: 4, MaxSGE: 1}
			}
			a, b := pairOf(t, p, o, ob)
			a.postSend(a.send(1, 0, 8))
			none(t, a.scq)
			f(b)
			if wc := one(t, a.scq, 1, hca.WCRetryExcErr); wc.Status != hca.WCRetryExcErr {
				t.Errorf("%s: %+v", name, wc)
			}
		}
	}
}
