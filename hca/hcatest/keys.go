package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

var keyCases = []testCase{
	{"KeysUnguessable", testKeysUnguessable},
	{"Row10InvalidLKeyOfEachOp", testInvalidLKeyOps},
}

// testKeysUnguessable: from the keys that a client has got it cannot tell those of
// others. Nothing random is asked for that fails more often than once in 10⁹ runs.
func testKeysUnguessable(t *testing.T, p Pair) {
	a := newEnd(t, p.A, defaults())
	region := func() uint32 {
		return a.reg(a.mem, allAcc).RKey()
	}
	makers := map[string]func() uint32{"regions": region}
	if p.A.Ops().Has(hca.OpMW) {
		makers["windows"] = func() uint32 { return a.allocMW(hca.MWType2).RKey() }
	}
	for name, mk := range makers {
		const n = 400
		var keys []uint32
		for range n {
			keys = append(keys, mk())
		}
		steps, xors, lows, up := map[uint32]int{}, map[uint32]int{}, map[uint32]int{}, 0
		for i := 1; i < n; i++ {
			steps[(keys[i]>>8-keys[i-1]>>8)&0xffffff]++
			xors[keys[i]>>8^keys[i-1]>>8]++
			lows[keys[i]&0xff]++
			if keys[i] > keys[i-1] {
				up++
			}
		}
		for what, m := range map[string]map[uint32]int{"difference": steps, "exclusive or": xors} {
			for d, k := range m {
				// 399 of 2^24: one value three times is a matter of 10⁻⁸.
				if k > 3 {
					t.Errorf("%s: %s %#x between neighbours %d times", name, what, d, k)
				}
			}
		}
		if up < n/4 || up > 3*n/4 {
			t.Errorf("%s: %d of %d keys above their predecessors", name, up, n)
		}
		if len(lows) < 100 { // 202 expected
			t.Errorf("%s: %d low bytes", name, len(lows))
		}
		for _, k := range keys {
			if k>>8 == 0 {
				t.Errorf("%s: key %#x", name, k)
			}
		}
	}
	// Two devices, or one asked twice: no common order.
	if p.A != p.B {
		b, c := newEnd(t, p.A, defaults()), newEnd(t, p.B, defaults())
		same := 0
		for range 50 {
			if b.reg(b.mem, 0).LKey()>>8 == c.reg(c.mem, 0).LKey()>>8 {
				same++
			}
		}
		if same > 5 {
			t.Errorf("%d of 50 keys of two devices are the same", same)
		}
	}
}

// testInvalidLKeyOps: a key that is not the client's completes with a local
// protection error, then the QP is in ERR, and nothing has happened at the other
// end.
func testInvalidLKeyOps(t *testing.T, p Pair) {
	keys := map[string]func(a *end) uint32{
		"0":         func(*end) uint32 { return 0 },
		"all ones":  func(*end) uint32 { return ^uint32(0) },
		"low byte":  func(a *end) uint32 { return a.mr.LKey() ^ 1 },
		"neighbour": func(a *end) uint32 { return a.mr.LKey() + 256 },
		"other PD":  func(*end) uint32 { return newEnd(t, p.A, defaults()).mr.LKey() },
		"closed": func(a *end) uint32 {
			mr, err := a.pd.RegMR(hca.MRInit{Mem: a.mem, Start: memBase, Length: memSize, IOVA: memBase, Access: allAcc})
			must(t, err)
			must(t, mr.Close())
			return mr.LKey()
		},
	}
	ops := []hca.SendOpcode{hca.OpSend, hca.OpSendImm, hca.OpRDMAWrite, hca.OpRDMAWriteImm, hca.OpRDMARead, hca.OpAtomicCmpSwap, hca.OpAtomicFetchAdd}
	for name, key := range keys {
		for _, op := range ops {
			for _, second := range []bool{false, true} { // first or last element
				if second && (op == hca.OpAtomicCmpSwap || op == hca.OpAtomicFetchAdd) {
					continue // its answer ends in the first element: testListBeyondAtomic
				}
				a, b := pair(t, p, defaults())
				b.postRecv(1, b.sge(0, 64))
				a.postRecv(2, a.sge(0, 64))
				b.mem.Set(0, Pattern(1, 64))
				w := a.rdma(op, 3, 0, b, 0, 8)
				bad := w.SGE[0]
				bad.LKey = key(a)
				if second {
					w.SGE = append(w.SGE, bad)
				} else {
					w.SGE[0] = bad
				}
				before := b.mem.calls.Load()
				a.postSend(w, a.send(4, 0, 8))
				if wc := take(t, a.scq, 1)[0]; wc.ID != 3 || wc.Status != hca.WCLocProtErr {
					t.Fatalf("%s, opcode %d: %+v", name, op, wc)
				}
				one(t, a.scq, 4, hca.WCWRFlushErr)
				one(t, a.rcq, 2, hca.WCWRFlushErr)
				if a.state() != errS || b.state() != rts {
					t.Errorf("%s, opcode %d: states %d and %d", name, op, a.state(), b.state())
				}
				none(t, b.rcq)
				if n := b.mem.calls.Load(); n != before {
					t.Errorf("%s, opcode %d: %d accesses at the other end", name, op, n-before)
				}
				equal(t, b.mem.Get(0, 64), Pattern(1, 64))
			}
		}
	}
}
