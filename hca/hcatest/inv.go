package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

var invCases = []testCase{
	{"LocalInvRefused", needs(hca.OpMW, testLocalInvRefused)},
	{"SendInvWindow", needs(hca.OpMW, testSendInvWindow)},
	{"SendInvRefused", needs(hca.OpMW, testSendInvRefused)},
}

// noInv are keys that cannot be invalidated through b's QP.
func noInv(t *testing.T, p Pair) map[string]func(b *end) uint32 {
	return map[string]func(b *end) uint32{
		"no key":           func(b *end) uint32 { return 0 },
		"region":           func(b *end) uint32 { return b.mr.RKey() },
		"region with bind": func(b *end) uint32 { return b.regBind(b.mem).RKey() },
		"unbound type 1":   func(b *end) uint32 { return b.allocMW(hca.MWType1).RKey() },
		"unbound type 2":   func(b *end) uint32 { return b.allocMW(hca.MWType2).RKey() },
		"type 1":           func(b *end) uint32 { _, key := b.bound(hca.MWType1, 0, 8, windowAcc); return key },
		"stale key": func(b *end) uint32 {
			_, key := b.bound(hca.MWType2, 0, 8, windowAcc)
			return key&^0xff | (key-1)&0xff
		},
		"another QP's": func(b *end) uint32 {
			_, o := another(t, p, b)
			_, key := o.bound(hca.MWType2, 0, 8, windowAcc)
			return key
		},
		"another PD's": func(*end) uint32 {
			_, o := pair(t, p, defaults())
			_, key := o.bound(hca.MWType2, 0, 8, windowAcc)
			return key
		},
		"twice": func(b *end) uint32 {
			_, key := b.bound(hca.MWType2, 0, 8, windowAcc)
			b.postSend(invWR(800, key))
			one(t, b.scq, 800, hca.WCSuccess)
			return key
		},
	}
}

// testLocalInvRefused: as rxe_do_local_ops, a region of a client's among them.
func testLocalInvRefused(t *testing.T, p Pair) {
	for name, key := range noInv(t, p) {
		_, b := pair(t, p, defaults())
		b.postSend(invWR(1, key(b)), b.send(2, 0, 8))
		wcs := take(t, b.scq, 2)
		if wc := wcs[0]; wc.ID != 1 || wc.Status != hca.WCLocQPOpErr {
			t.Errorf("%s: %+v", name, wc)
		}
		if wc := wcs[1]; wc.ID != 2 || wc.Status != hca.WCWRFlushErr {
			t.Errorf("%s: %+v", name, wc)
		}
		if b.state() != errS {
			t.Errorf("%s: state %d", name, b.state())
		}
	}
}

// testSendInvWindow: the payload comes, the window is closed before the receiver
// knows of it, and its completion says so.
func testSendInvWindow(t *testing.T, p Pair) {
	for _, n := range []int{0, 8, 70000} {
		for _, srq := range []bool{false, true} {
			a, b := pairOf(t, p, defaults(), defaults().with(func(o *opts) {
				if srq {
					o.srq = &hca.SRQInit{MaxWR: 16, MaxSGE: 4}
				}
			}))
			mr := b.regBind(b.mem)
			w := b.allocMW(hca.MWType2)
			for range 2 { // and once more
				key := b.bind(w, mr, 0, 64, windowAcc)
				a.reaches(0, key)
				b.postRecv(1, b.sge(4096, 80000))
				a.mem.Set(0, Pattern(n, n))
				s := a.send(2, 0, n)
				s.Opcode, s.Imm = hca.OpSendInv, key
				a.postSend(s)
				one(t, a.scq, 2, hca.WCSuccess)
				wc := one(t, b.rcq, 1, hca.WCSuccess)
				if wc.Opcode != hca.WCRecv || wc.Flags != hca.WCWithInv || wc.Imm != key || int(wc.ByteLen) != n {
					t.Errorf("completion %+v", wc)
				}
				equal(t, b.mem.Get(4096, n), Pattern(n, n))
			}
			a.refused(0, w.RKey())
		}
	}
}

// testSendInvRefused: the payload is there, the sender is told of success, the
// receiver fails (rxe's RESPST_ERR_INVALIDATE_RKEY).
func testSendInvRefused(t *testing.T, p Pair) {
	for name, key := range noInv(t, p) {
		a, b := pair(t, p, defaults())
		k := key(b)
		b.postRecv(1, b.sge(0, 64))
		b.postRecv(2, b.sge(0, 64))
		a.mem.Set(0, Pattern(1, 8))
		s := a.send(3, 0, 8)
		s.Opcode, s.Imm = hca.OpSendInv, k
		a.postSend(s)
		one(t, a.scq, 3, hca.WCSuccess)
		wcs := take(t, b.rcq, 2)
		if wc := wcs[0]; wc.ID != 1 || wc.Status != hca.WCRemInvReqErr {
			t.Errorf("%s: %+v", name, wc)
		}
		if wc := wcs[1]; wc.ID != 2 || wc.Status != hca.WCWRFlushErr {
			t.Errorf("%s: %+v", name, wc)
		}
		if b.state() != errS {
			t.Errorf("%s: state %d", name, b.state())
		}
		equal(t, b.mem.Get(0, 8), Pattern(1, 8))
	}
}
