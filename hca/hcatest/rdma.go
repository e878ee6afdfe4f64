package hcatest

import (
	"encoding/binary"
	"sync"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

var rdmaCases = []testCase{
	{"WriteSizes", testWriteSizes},
	{"ReadSizes", testReadSizes},
	{"SmallInputWriteImm", testWriteImm},
	{"SmallInputAtomics", testAtomics},
	{"AtomicsAreAtomic", testAtomicsAreAtomic},
	{"IOVA", testIOVA},
	{"Row20ReadDepth", testReadDepth},
}

func testWriteSizes(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for i, n := range sizes {
		a.mem.Set(0, Pattern(i, n))
		b.mem.Set(0, make([]byte, n+2))
		a.postSend(a.rdma(hca.OpRDMAWrite, uint64(i), 0, b, 1, n))
		if wc := one(t, a.scq, uint64(i), hca.WCSuccess); wc.Opcode != hca.WCRDMAWrite {
			t.Errorf("completion %+v", wc)
		}
		got := b.mem.Get(0, n+2)
		equal(t, got[1:n+1], Pattern(i, n))
		if got[0] != 0 || got[n+1] != 0 {
			t.Errorf("%d bytes: written outside", n)
		}
	}
	none(t, b.rcq)
	// As ib_write_lat -s 1025 -n 5 does.
	for range 5 {
		a.postSend(a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, 1025))
		one(t, a.scq, 1, hca.WCSuccess)
	}
}

func testReadSizes(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for i, n := range sizes {
		b.mem.Set(1, Pattern(i, n))
		a.mem.Set(0, make([]byte, n+2))
		a.postSend(a.rdma(hca.OpRDMARead, uint64(i), 1, b, 1, n))
		if wc := one(t, a.scq, uint64(i), hca.WCSuccess); wc.Opcode != hca.WCRDMARead || int(wc.ByteLen) != n {
			t.Errorf("completion %+v", wc)
		}
		got := a.mem.Get(0, n+2)
		equal(t, got[1:n+1], Pattern(i, n))
		if got[0] != 0 || got[n+1] != 0 {
			t.Errorf("%d bytes: written outside", n)
		}
	}
	// Scattered over two pieces.
	w := a.rdma(hca.OpRDMARead, 1, 0, b, 1, 0)
	w.SGE = []hca.SGE{a.sge(1000, 3), a.sge(5000, 200000)}
	b.mem.Set(1, Pattern(9, 200003))
	a.postSend(w)
	one(t, a.scq, 1, hca.WCSuccess)
	equal(t, append(a.mem.Get(1000, 3), a.mem.Get(5000, 200000)...), Pattern(9, 200003))
}

func testWriteImm(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for i, n := range []int{0, 1, 4096, 70000} {
		a.mem.Set(0, Pattern(i, n))
		b.postRecv(1) // needs no room
		b.postRecv(2)
		w := a.rdma(hca.OpRDMAWriteImm, 3, 0, b, 64, n)
		w.Imm = 4194304
		a.postSend(w)
		one(t, a.scq, 3, hca.WCSuccess)
		wc := one(t, b.rcq, 1, hca.WCSuccess)
		if wc.Opcode != hca.WCRecvImm || wc.Imm != 4194304 || wc.Flags&hca.WCWithImm == 0 || int(wc.ByteLen) != n {
			t.Errorf("completion %+v", wc)
		}
		none(t, b.rcq) // one receive consumed, not two
		equal(t, b.mem.Get(64, n), Pattern(i, n))
		a.postSend(w)
		one(t, b.rcq, 2, hca.WCSuccess)
		one(t, a.scq, 3, hca.WCSuccess)
	}
	// Without a receive it waits, and writes nothing before it.
	b.mem.Set(64, make([]byte, 8))
	w := a.rdma(hca.OpRDMAWriteImm, 5, 0, b, 64, 8)
	a.postSend(w)
	equal(t, b.mem.Get(64, 8), make([]byte, 8))
	b.postRecv(6)
	one(t, b.rcq, 6, hca.WCSuccess)
	one(t, a.scq, 5, hca.WCSuccess)
}

func word(v uint64) []byte { return binary.NativeEndian.AppendUint64(nil, v) }

func testAtomics(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	b.mem.Set(64, word(100))
	for i, c := range []struct {
		op            hca.SendOpcode
		cmp, swp      uint64
		before, after uint64
		wc            hca.WCOpcode
	}{
		{hca.OpAtomicFetchAdd, 5, 0, 100, 105, hca.WCFetchAdd},
		{hca.OpAtomicFetchAdd, ^uint64(0), 0, 105, 104, hca.WCFetchAdd},
		{hca.OpAtomicCmpSwap, 1, 2, 104, 104, hca.WCCompSwap},
		{hca.OpAtomicCmpSwap, 104, 0x1122334455667788, 104, 0x1122334455667788, hca.WCCompSwap},
	} {
		w := a.rdma(c.op, uint64(i), 8, b, 64, 8)
		w.CompareAdd, w.Swap = c.cmp, c.swp
		a.postSend(w)
		if wc := one(t, a.scq, uint64(i), hca.WCSuccess); wc.Opcode != c.wc || wc.ByteLen != 8 {
			t.Errorf("completion %+v", wc)
		}
		equal(t, a.mem.Get(8, 8), word(c.before))
		equal(t, b.mem.Get(64, 8), word(c.after))
	}
}

func testAtomicsAreAtomic(t *testing.T, p Pair) {
	const clients, adds = 6, 300
	hub := newEnd(t, p.B, defaults())
	var wg sync.WaitGroup
	for range clients {
		a := newEnd(t, p.A, defaults())
		b := newEnd(t, p.B, defaults().with(func(o *opts) { o.shareCtx = hub }))
		link(a, b)
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range uint64(adds) {
				w := a.rdma(hca.OpAtomicFetchAdd, i, 0, hub, 128, 8)
				w.CompareAdd = 1
				a.postSend(w)
				one(t, a.scq, i, hca.WCSuccess)
			}
		}()
	}
	wg.Wait()
	equal(t, hub.mem.Get(128, 8), word(clients*adds))
}

// testIOVA: work requests name bytes by the region's own addresses.
func testIOVA(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	const iova = 0x1000
	mr, err := b.pd.RegMR(hca.MRInit{Mem: b.mem, Start: memBase + 4096, Length: 4096, IOVA: iova, Access: allAcc})
	must(t, err)
	defer mr.Close()
	a.mem.Set(0, Pattern(3, 16))
	w := a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, 16)
	w.RemoteAddr, w.RKey = iova+4080, mr.RKey()
	a.postSend(w)
	one(t, a.scq, 1, hca.WCSuccess)
	equal(t, b.mem.Get(8176, 16), Pattern(3, 16))
	w.RemoteAddr++
	a.postSend(w)
	one(t, a.scq, 1, hca.WCRemAccessErr)
}

// testReadDepth: more reads than max_rd_atomic are all done, in order.
func testReadDepth(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.rd, o.destRd = 1, 1 }))
	var ws []hca.SendWR
	for i := range 10 {
		b.mem.Set(64*i, Pattern(i, 64))
		ws = append(ws, a.rdma(hca.OpRDMARead, uint64(i), 64*i, b, 64*i, 64))
	}
	a.postSend(ws...)
	for i := range 10 {
		one(t, a.scq, uint64(i), hca.WCSuccess)
		equal(t, a.mem.Get(64*i, 64), Pattern(i, 64))
	}
}
