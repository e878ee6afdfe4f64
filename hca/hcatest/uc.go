package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

var ucCases = []testCase{
	{"UC", testUC},
	{"UCDrops", testUCDrops},
	{"UCErrors", testUCErrors},
}

func ucOpts() opts { return defaults().with(func(o *opts) { o.typ = hca.QPTypeUC }) }

func testUC(t *testing.T, p Pair) {
	a, b := pair(t, p, ucOpts())
	for i, n := range sizes {
		a.mem.Set(0, Pattern(i, n))
		b.postRecv(1, b.sge(0, n))
		a.postSend(a.send(2, 0, n))
		one(t, a.scq, 2, hca.WCSuccess)
		one(t, b.rcq, 1, hca.WCSuccess)
		equal(t, b.mem.Get(0, n), Pattern(i, n))
		a.mem.Set(0, Pattern(i+1, n))
		b.postRecv(3)
		w := a.rdma(hca.OpRDMAWriteImm, 4, 0, b, 64, n)
		w.Imm = 77
		a.postSend(w, a.rdma(hca.OpRDMAWrite, 5, 0, b, 0, 1))
		one(t, a.scq, 4, hca.WCSuccess)
		one(t, a.scq, 5, hca.WCSuccess)
		if wc := one(t, b.rcq, 3, hca.WCSuccess); wc.Opcode != hca.WCRecvImm || wc.Imm != 77 {
			t.Errorf("completion %+v", wc)
		}
		equal(t, b.mem.Get(64, n), Pattern(i+1, n))
	}
}

// testUCDrops: what the other side does not want is lost, and succeeds here.
func testUCDrops(t *testing.T, p Pair) {
	a, b := pair(t, p, ucOpts())
	lost := func(w hca.SendWR) {
		t.Helper()
		a.postSend(w)
		one(t, a.scq, w.ID, hca.WCSuccess)
		none(t, b.rcq)
		if b.state() != rts || a.state() != rts {
			t.Fatalf("states %d and %d", a.state(), b.state())
		}
	}
	a.mem.Set(0, Pattern(1, 128))
	lost(a.send(1, 0, 8))                              // no receive
	lost(a.rdma(hca.OpRDMAWriteImm, 2, 0, b, 1024, 8)) // nor for this: nothing is written
	equal(t, b.mem.Get(1024, 8), make([]byte, 8))
	w := a.rdma(hca.OpRDMAWrite, 3, 0, b, 1024, 8)
	w.RKey ^= 1
	lost(w)
	b.postRecv(4, b.sge(0, 64))
	lost(a.send(5, 0, 65)) // too long: the receive stays
	a.postSend(a.send(6, 0, 64))
	one(t, a.scq, 6, hca.WCSuccess)
	one(t, b.rcq, 4, hca.WCSuccess)
	b.setState(rst)
	a.postSend(a.send(7, 0, 8))
	one(t, a.scq, 7, hca.WCSuccess)
}

func testUCErrors(t *testing.T, p Pair) {
	a, b := pair(t, p, ucOpts())
	w := a.send(1, 0, 8)
	w.SGE[0].LKey = 0
	a.postSend(w, a.send(2, 0, 8))
	one(t, a.scq, 1, hca.WCLocProtErr)
	one(t, a.scq, 2, hca.WCWRFlushErr)
	b.postRecv(3, b.sge(0, 200))
	sqeRecovers(t, a, b, func(id uint64) { a.postSend(a.send(id, 0, 8)) })
}
