package hcatest

import (
	"sync"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

var maskedCases = []testCase{
	{"MaskedAtomics", masked(testMaskedAtomics)},
	{"MaskedErrors", masked(testMaskedErrors)},
	{"MaskedAreAtomic", masked(testMaskedAreAtomic)},
}

// masked skips where there are no masked atomics.
func masked(run func(*testing.T, Pair)) func(*testing.T, Pair) {
	return func(t *testing.T, p Pair) {
		if p.A.Attr().MaskedAtomCap == 0 || p.B.Attr().MaskedAtomCap == 0 {
			t.Skip("no masked atomics")
		}
		run(t, p)
	}
}

func testMaskedAtomics(t *testing.T, p Pair) {
	const all = ^uint64(0)
	for name, c := range map[string]struct {
		op                    hca.SendOpcode
		before                uint64
		cmp, swap, cmask, swm uint64
		after                 uint64
	}{
		"swap all":            {hca.OpMaskedAtomicCmpSwap, 5, 5, 9, all, all, 9},
		"compare fails":       {hca.OpMaskedAtomicCmpSwap, 5, 6, 9, all, all, 5},
		"compare some":        {hca.OpMaskedAtomicCmpSwap, 0x1234, 0xff34, 0, 0xff, all, 0},
		"compare some, fails": {hca.OpMaskedAtomicCmpSwap, 0x1234, 0xff34, 0, 0xff00, all, 0x1234},
		"compare nothing":     {hca.OpMaskedAtomicCmpSwap, 0x1234, 99, 7, 0, all, 7},
		"swap some":           {hca.OpMaskedAtomicCmpSwap, 0x1122334455667788, 0x88, all, 0xff, 0xff00ff0000000000, 0xff22ff4455667788},
		"swap nothing":        {hca.OpMaskedAtomicCmpSwap, 5, 5, 9, all, 0, 5},
		"one field":           {hca.OpMaskedAtomicFetchAdd, 100, 5, 0, 0, 0, 105},
		"one field, top":      {hca.OpMaskedAtomicFetchAdd, all, 1, 0, 1 << 63, 0, 0},
		"two fields":          {hca.OpMaskedAtomicFetchAdd, 0x00000001_ffffffff, 0x00000002_00000003, 0, 1<<31 | 1<<63, 0, 0x00000003_00000002},
		"bytes":               {hca.OpMaskedAtomicFetchAdd, 0xff00ff00ff00ff7f, 0x0101010101010101, 0, 0x8080808080808080, 0, 0x0001000100010080},
		"single bits":         {hca.OpMaskedAtomicFetchAdd, 0xf0f0, 0xff00, 0, all, 0, 0x0ff0},
		"rest is a field":     {hca.OpMaskedAtomicFetchAdd, 0xffff_ffff_ffff_ff0f, 0x11, 0, 1 << 3, 0, 0xffff_ffff_ffff_ff10},
		"swap mask ignored":   {hca.OpMaskedAtomicFetchAdd, 1, 1, 9, 0, 0, 2},
	} {
		a, b := pair(t, p, defaults())
		b.mem.Set(64, word(c.before))
		w := a.rdma(c.op, 1, 8, b, 64, 8)
		w.CompareAdd, w.Swap, w.CompareAddMask, w.SwapMask = c.cmp, c.swap, c.cmask, c.swm
		a.postSend(w)
		wc := one(t, a.scq, 1, hca.WCSuccess)
		want := hca.WCMaskedCompSwap
		if c.op == hca.OpMaskedAtomicFetchAdd {
			want = hca.WCMaskedFetchAdd
		}
		if wc.Opcode != want || wc.ByteLen != 8 {
			t.Errorf("%s: completion %+v", name, wc)
		}
		if got := a.mem.Get(8, 8); string(got) != string(word(c.before)) {
			t.Errorf("%s: result % x", name, got)
		}
		if got := b.mem.Get(64, 8); string(got) != string(word(c.after)) {
			t.Errorf("%s: % x, want % x", name, got, word(c.after))
		}
		equal(t, b.mem.Get(72, 8), make([]byte, 8))
	}
}

// testMaskedErrors: as of plain atomics.
func testMaskedErrors(t *testing.T, p Pair) {
	for _, op := range []hca.SendOpcode{hca.OpMaskedAtomicCmpSwap, hca.OpMaskedAtomicFetchAdd} {
		req := func(a, b *end) hca.SendWR { return a.rdma(op, 1, 0, b, 0, 8) }
		o := defaults()
		remoteError(t, p, o.with(func(o *opts) { o.access &^= hca.AccessRemoteAtomic }), hca.WCRemInvReqErr, hca.EventQPReqErr, req)
		remoteError(t, p, o.with(func(o *opts) { o.destRd = 0 }), hca.WCRemInvReqErr, hca.EventQPReqErr, req)
		for name, f := range map[string]func(b *end, w *hca.SendWR){
			"access": func(b *end, w *hca.SendWR) { w.RKey = b.reg(b.mem, allAcc&^hca.AccessRemoteAtomic).RKey() },
			"key":    func(b *end, w *hca.SendWR) { w.RKey ^= 1 },
			"end":    func(b *end, w *hca.SendWR) { w.RemoteAddr = memBase + memSize },
		} {
			t.Log(name)
			remoteError(t, p, o, hca.WCRemAccessErr, hca.EventQPAccessErr, func(a, b *end) hca.SendWR {
				w := req(a, b)
				f(b, &w)
				return w
			})
		}
		remoteError(t, p, o, hca.WCRemInvReqErr, hca.EventQPReqErr, func(a, b *end) hca.SendWR {
			w := req(a, b)
			w.RemoteAddr += 4
			return w
		})
		a, b := pair(t, p, o)
		w := req(a, b)
		w.SGE[0].LKey = a.reg(a.mem, 0).LKey() // the result cannot be stored
		b.mem.Set(0, word(7))
		a.postSend(w)
		one(t, a.scq, 1, hca.WCLocProtErr)
		equal(t, b.mem.Get(0, 8), word(7))
		for _, e := range []opts{o.with(func(o *opts) { o.rd = 0 }), o.with(func(o *opts) { o.typ = uc })} {
			a, b = pair(t, p, e)
			if err := errOf(a.qp.PostSend([]hca.SendWR{req(a, b)})); err == nil {
				t.Errorf("opcode %d posted", op)
			}
		}
		a, b = pair(t, p, o)
		w = req(a, b)
		w.SGE[0].Length = 7
		if err := errOf(a.qp.PostSend([]hca.SendWR{w})); err == nil {
			t.Errorf("opcode %d posted with 7 bytes for the result", op)
		}
	}
}

// testMaskedAreAtomic: two counters and two flags in one word, by clients that each
// know one of them only.
func testMaskedAreAtomic(t *testing.T, p Pair) {
	const adds = 200
	const fields = uint64(1<<15 | 1<<31 | 1<<63)
	hub := newEnd(t, p.B, defaults())
	hub.mem.Set(128, word(0xffff)) // the low counter wraps at once
	var wg sync.WaitGroup
	for i := range 4 {
		a := newEnd(t, p.A, defaults())
		b := newEnd(t, p.B, defaults().with(func(o *opts) { o.shareCtx = hub }))
		link(a, b)
		wg.Go(func() {
			for k := range uint64(adds) {
				w := a.rdma(hca.OpMaskedAtomicFetchAdd, k, 0, hub, 128, 8)
				w.CompareAdd, w.CompareAddMask = 1<<(16*(i%2)), fields
				if i >= 2 { // a flag: set, then cleared
					w.Opcode = hca.OpMaskedAtomicCmpSwap
					bit := uint64(1) << (32 + i)
					w.CompareAdd, w.CompareAddMask, w.Swap, w.SwapMask = 0, bit, bit, bit
					if k%2 == 1 {
						w.CompareAdd, w.Swap = bit, 0
					}
				}
				a.postSend(w)
				one(t, a.scq, k, hca.WCSuccess)
			}
		})
	}
	wg.Wait()
	equal(t, hub.mem.Get(128, 8), word(adds<<16|(adds-1)))
}
