package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

// inputCases are small inputs from public reports. More of them stand where
// their subject is: SmallInput in a case's name.
var inputCases = []testCase{
	{"SmallInputMTUEdges", testMTUEdges},
	{"SmallInputCompareSwap", testCompareSwapAccess},
	{"SmallInputSRQIgnoresRecvSize", testSRQIgnoresRecvSize},
}

// testMTUEdges: k·MTU and one byte less and more, for every path MTU, five times
// each as `ib_write_lat -s 1025 -n 5` does.
func testMTUEdges(t *testing.T, p Pair) {
	for mtu := hca.MTU(1); mtu <= 5; mtu++ {
		a, b := newEnd(t, p.A, defaults()), newEnd(t, p.B, defaults())
		a.toInit()
		b.toInit()
		for _, x := range [][2]*end{{a, b}, {b, a}} {
			at, m := x[0].rtrAttr(x[1])
			at.PathMTU = mtu
			must(t, x[0].qp.Modify(&at, m))
		}
		a.toRTS()
		b.toRTS()
		for k := 1; k <= 4; k++ {
			for d := -1; d <= 1; d++ {
				n := k*mtu.Bytes() + d
				for i := range 5 {
					data := Pattern(n+i, n)
					a.mem.Set(0, data)
					a.postSend(a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, n), a.rdma(hca.OpRDMARead, 2, 100000, b, 0, n))
					one(t, a.scq, 1, hca.WCSuccess)
					one(t, a.scq, 2, hca.WCSuccess)
					equal(t, b.mem.Get(0, n), data)
					equal(t, a.mem.Get(100000, n), data)
					b.postRecv(3, b.sge(200000, n))
					a.postSend(a.send(4, 0, n))
					one(t, a.scq, 4, hca.WCSuccess)
					if wc := one(t, b.rcq, 3, hca.WCSuccess); int(wc.ByteLen) != n {
						t.Errorf("MTU %d: %d bytes came, want %d", mtu.Bytes(), wc.ByteLen, n)
					}
					equal(t, b.mem.Get(200000, n), data)
				}
			}
		}
	}
}

// testCompareSwapAccess: a region without REMOTE_ATOMIC is a remote access error,
// and its word stays; with it the old value comes in the host's order.
func testCompareSwapAccess(t *testing.T, p Pair) {
	const before, after = 0x0102030405060708, 0x1112131415161718
	for _, allowed := range []bool{true, false} {
		a, b := pair(t, p, defaults())
		b.mem.Set(64, word(before))
		w := a.rdma(hca.OpAtomicCmpSwap, 1, 8, b, 64, 8)
		w.CompareAdd, w.Swap = before, after
		if !allowed {
			w.RKey = b.reg(b.mem, allAcc&^hca.AccessRemoteAtomic).RKey()
		}
		a.postSend(w)
		if allowed {
			one(t, a.scq, 1, hca.WCSuccess)
			equal(t, a.mem.Get(8, 8), word(before))
			equal(t, b.mem.Get(64, 8), word(after))
			continue
		}
		one(t, a.scq, 1, hca.WCRemAccessErr)
		equal(t, a.mem.Get(8, 8), make([]byte, 8))
		equal(t, b.mem.Get(64, 8), word(before))
		event(t, b.qev.ev, hca.EventQPAccessErr)
	}
}

// testSRQIgnoresRecvSize: with an SRQ the size of the receive queue means nothing.
func testSRQIgnoresRecvSize(t *testing.T, p Pair) {
	hub, cs := fan(t, p, 1, 16)
	hub.o.cap.MaxRecvWR, hub.o.cap.MaxRecvSGE = ^uint32(0), ^uint32(0)
	hub.qp = hub.newQP()
	cs[0].qp = cs[0].newQP()
	link(cs[0], hub)
	hub.postRecv(1, hub.sge(0, 8))
	cs[0].postSend(cs[0].send(2, 0, 8))
	one(t, cs[0].scq, 2, hca.WCSuccess)
	one(t, hub.rcq, 1, hca.WCSuccess)
}
