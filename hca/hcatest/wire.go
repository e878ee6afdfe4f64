package hcatest

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var wireCases = []testCase{
	{"WireSQDrain", testWireSQDrain},
	{"WirePeerComesLater", testWirePeerLater},
}

// testWireSQDrain: what was begun is done before the queue is drained, and nothing
// else is.
func testWireSQDrain(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	a.postSend(a.send(1, 0, 8), a.send(2, 0, 8)) // begun, and waiting for receives
	must(t, a.qp.Modify(&hca.QPAttr{State: sqd, EnSQDAsyncNotify: true}, hca.QPMaskState|hca.QPMaskEnSQDAsyncNotify))
	a.qp.Run()
	a.postSend(a.send(3, 0, 8))
	if at, _ := a.qp.Query(); !at.SQDraining || at.State != sqd {
		t.Fatalf("draining %v in state %d", at.SQDraining, at.State)
	}
	wantErrno(t, a.qp.Modify(&hca.QPAttr{State: rts}, hca.QPMaskState), unix.EINVAL)
	quiet(t, a.qev.ev, "event")
	for i := range uint64(3) {
		b.postRecv(10+i, b.sge(0, 8))
	}
	one(t, a.scq, 1, hca.WCSuccess)
	one(t, a.scq, 2, hca.WCSuccess)
	event(t, a.qev.ev, hca.EventSQDrained)
	none(t, a.scq)
	a.setState(rts)
	one(t, a.scq, 3, hca.WCSuccess)
}

// testWirePeerLater: who sends before his peer is there sends again.
func testWirePeerLater(t *testing.T, p Pair) {
	o := defaults().with(func(o *opts) { o.timeout = 16 })
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

// lossyCases are reliable traffic.
var lossyCases = []testCase{
	{"LossySends", testLossySends},
	{"LossyRDMA", testLossyRDMA},
	{"LossyAtomics", testLossyAtomics},
	{"LossyAll", testLossyAll},
}

// RunLossy runs reliable traffic between two devices with a bad network between
// them: every byte arrives, once and in order.
func RunLossy(t *testing.T, open func(t testing.TB) Pair) {
	for _, c := range lossyCases {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
}

var lossySizes = []int{0, 1, 100, 1023, 1024, 1025, 5000, 65536, 300000}

func testLossySends(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for round := range 20 {
		for i, n := range lossySizes {
			id := uint64(round*len(lossySizes) + i)
			a.mem.Set(0, Pattern(int(id), n))
			if i%2 == 0 { // else the sender finds no receive at first
				b.postRecv(id, b.sge(0, memSize))
			}
			w := a.send(id, 0, n)
			w.Opcode, w.Imm = hca.OpSendImm, uint32(id)
			a.postSend(w)
			if i%2 != 0 {
				b.postRecv(id, b.sge(0, memSize))
			}
			wc := one(t, b.rcq, id, hca.WCSuccess)
			if wc.ByteLen != uint32(n) || wc.Imm != uint32(id) {
				t.Fatalf("completion %+v of %d bytes", wc, n)
			}
			one(t, a.scq, id, hca.WCSuccess)
			equal(t, b.mem.Get(0, n), Pattern(int(id), n))
		}
	}
}

func testLossyRDMA(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for round := range 10 {
		for i, n := range lossySizes {
			id := uint64(round*len(lossySizes) + i)
			a.mem.Set(0, Pattern(int(id), n))
			a.mem.Set(400000, make([]byte, n))
			a.postSend(a.rdma(hca.OpRDMAWrite, id, 0, b, 100, n), a.rdma(hca.OpRDMARead, id+1000, 400000, b, 100, n))
			one(t, a.scq, id, hca.WCSuccess)
			one(t, a.scq, id+1000, hca.WCSuccess)
			equal(t, b.mem.Get(100, n), Pattern(int(id), n))
			equal(t, a.mem.Get(400000, n), Pattern(int(id), n))
		}
	}
}

// testLossyAtomics: none is done twice, and each has an answer of its own.
func testLossyAtomics(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	const count = 400
	b.mem.Set(0, word(0))
	for i := range uint64(count) {
		w := a.rdma(hca.OpAtomicFetchAdd, i, int(i%32)*8, b, 0, 8)
		w.CompareAdd = 1
		a.postSend(w)
		if i%32 == 31 {
			for k := i - 31; k <= i; k++ {
				one(t, a.scq, k, hca.WCSuccess)
				equal(t, a.mem.Get(int(k%32)*8, 8), word(k))
			}
		}
	}
	take(t, a.scq, count%32)
	equal(t, b.mem.Get(0, 8), word(count))
}

// testLossyAll: everything at once, both ways, several deep.
func testLossyAll(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	const rounds, n = 60, 20000
	for _, e := range []*end{a, b} {
		for i := range uint64(16) {
			e.postRecv(i, e.sge(500000, n))
		}
	}
	for r := range rounds {
		for _, d := range []struct{ from, to *end }{{a, b}, {b, a}} {
			f, to := d.from, d.to
			f.mem.Set(0, Pattern(r, n))
			add := f.rdma(hca.OpAtomicFetchAdd, 4, 200000, to, 300000, 8)
			add.CompareAdd = 1
			f.postSend(f.rdma(hca.OpRDMAWrite, 1, 0, to, 100000, n), f.send(2, 0, n), f.rdma(hca.OpRDMARead, 3, 150000, to, 100000, n), add)
		}
		for _, d := range []struct{ from, to *end }{{a, b}, {b, a}} {
			for id := uint64(1); id <= 4; id++ {
				one(t, d.from.scq, id, hca.WCSuccess)
			}
			wc := take(t, d.to.rcq, 1)[0]
			if wc.Status != hca.WCSuccess || wc.ByteLen != n {
				t.Fatalf("completion %+v", wc)
			}
			equal(t, d.to.mem.Get(500000, n), Pattern(r, n))
			equal(t, d.to.mem.Get(100000, n), Pattern(r, n))
			equal(t, d.from.mem.Get(150000, n), Pattern(r, n))
			equal(t, d.from.mem.Get(200000, 8), word(uint64(r)))
			d.to.postRecv(0, d.to.sge(500000, n))
		}
	}
}
