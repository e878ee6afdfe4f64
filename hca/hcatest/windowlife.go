package hcatest

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// testWindowType1: bound anew at will, by and for any QP of the PD.
func testWindowType1(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	a2, b2 := another(t, p, b)
	mr, mr2 := b.regBind(b.mem), b2.regBind(b2.mem)
	w := b.allocMW(hca.MWType1)
	first := b.bind(w, mr, 0, 64, windowAcc)
	a.reaches(56, first)
	a2.reaches(0, first) // of the PD, not of the QP
	second := b2.bind(w, mr2, 64, 64, windowAcc)
	a.mem.Set(0, Pattern(1, 8))
	a.reaches(64, second)
	equal(t, b2.mem.Get(64, 8), Pattern(1, 8)) // the other region
	equal(t, b.mem.Get(64, 8), make([]byte, 8))
	a.refused(64, first)

	// Unbound; the key changes all the same, and can be bound from there.
	unbind := bindWR(3, w, mr, 0, 0, 0)
	unbind.Bind.MR = 0
	b2.postSend(unbind)
	one(t, b2.scq, 3, hca.WCSuccess)
	third := w.RKey()
	if third == second {
		t.Errorf("key %#x again", third)
	}
	a2.refused(64, second)
	a, b = another(t, p, b)
	a.refused(64, third)
	a, b = another(t, p, b)
	fourth := b.bind(w, mr, 0, 8, windowAcc)
	a.reaches(0, fourth)

	// A QP of another PD.
	c, _ := pair(t, p, defaults())
	c.refused(0, fourth)
	a.reaches(0, fourth)
}

// testWindowType2: only through the QP that bound it.
func testWindowType2(t *testing.T, p Pair) {
	for _, typ := range []hca.QPType{rc, uc} {
		a, b := pair(t, p, defaults().with(func(o *opts) { o.typ = typ }))
		mr := b.regBind(b.mem)
		w := b.allocMW(hca.MWType2)
		key := b.bind(w, mr, 0, 64, windowAcc)
		a.reaches(0, key)
		a2, b2 := another(t, p, b)
		if typ == rc {
			a2.refused(0, key)
			a2, b2 = another(t, p, b)
		}
		b2.postSend(invWR(1, key)) // not the QP's to invalidate either
		one(t, b2.scq, 1, hca.WCLocQPOpErr)
		a.reaches(0, key)

		b.postSend(invWR(2, key))
		if wc := one(t, b.scq, 2, hca.WCSuccess); wc.Opcode != hca.WCLocalInv {
			t.Errorf("completion %+v", wc)
		}
		if w.RKey() != key {
			t.Errorf("key %#x, was %#x", w.RKey(), key)
		}
		// Free: another QP may have it.
		_, b2 = another(t, p, b)
		second := b2.bind(w, mr, 0, 64, windowAcc)
		_ = a2
		if typ == rc {
			a.refused(0, second)
		}
	}
}

// testWindowHoldsRegion: a region with windows stays as it is.
func testWindowHoldsRegion(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	reg := func() hca.MR {
		mr, err := b.pd.RegMR(hca.MRInit{Mem: b.mem, Start: memBase, Length: 4096, IOVA: memBase, Access: bindAcc | windowAcc})
		must(t, err)
		return mr
	}
	mr, mr2 := reg(), reg()
	w1, w2 := b.allocMW(hca.MWType1), b.allocMW(hca.MWType2)
	k1, k2 := b.bind(w1, mr, 0, 64, windowAcc), b.bind(w2, mr, 64, 64, windowAcc)
	busy := func() {
		t.Helper()
		wantErrno(t, mr.Close(), unix.EINVAL)
		if p.B.Ops().Has(hca.OpReregMR) {
			_, err := mr.Rereg(hca.MRRereg{Flags: hca.ReregAccess, Access: bindAcc})
			wantErrno(t, err, unix.EINVAL)
		}
		a.reaches(4088, mr.RKey()) // nothing has changed
	}
	busy()
	a.reaches(0, k1)
	a.reaches(64, k2)
	b.postSend(invWR(1, k2))
	one(t, b.scq, 1, hca.WCSuccess)
	busy()
	b.bind(w1, mr2, 0, 8, windowAcc) // moves away
	if p.B.Ops().Has(hca.OpReregMR) {
		n, err := mr.Rereg(hca.MRRereg{Flags: hca.ReregAccess, Access: bindAcc})
		must(t, err)
		mr = n
	}
	must(t, mr.Close())
	wantErrno(t, mr2.Close(), unix.EINVAL)
	must(t, w1.Close())
	must(t, mr2.Close())
	must(t, mr2.Close())
}

func testWindowClose(t *testing.T, p Pair) {
	for _, typ := range mwTypes {
		a, b := pair(t, p, defaults())
		mr := b.regBind(b.mem)
		w, err := b.pd.AllocMW(typ)
		must(t, err)
		key := b.bind(w, mr, 0, 64, windowAcc)
		a.reaches(0, key)
		must(t, w.Close())
		must(t, w.Close())
		a.refused(0, key)
	}
}

// testWindowQPClose: windows of type 2 are free when their QP is gone, those of
// type 1 stay.
func testWindowQPClose(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	mr, err := b.pd.RegMR(hca.MRInit{Mem: b.mem, Start: memBase, Length: 4096, IOVA: memBase, Access: bindAcc})
	must(t, err)
	var free []hca.MW
	for range 5 {
		w := b.allocMW(hca.MWType2)
		b.bind(w, mr, 0, 64, windowAcc)
		free = append(free, w)
	}
	b.postSend(invWR(1, free[2].RKey())) // from the middle
	one(t, b.scq, 1, hca.WCSuccess)
	stays := b.allocMW(hca.MWType1)
	key := b.bind(stays, mr, 0, 64, windowAcc)
	// ERR and RESET do not end a binding.
	b.setState(errS)
	b.setState(rst)
	a.setState(rst)
	link(a, b)
	a.reaches(0, free[0].RKey())
	must(t, b.qp.Close())
	a2, b2 := another(t, p, b)
	a2.reaches(0, key)
	for _, w := range free {
		k := b2.bind(w, mr, 64, 64, windowAcc)
		a2.reaches(64, k)
		b2.postSend(invWR(1, k))
		one(t, b2.scq, 1, hca.WCSuccess)
	}
	must(t, stays.Close())
	must(t, mr.Close())
}

// testWindowKey: the low 8 bits are the request's, the others the window's.
func testWindowKey(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	mr := b.regBind(b.mem)
	for _, typ := range mwTypes {
		w := b.allocMW(typ)
		top := w.RKey() &^ 0xff
		for _, key := range []uint32{0, 0xff, ^uint32(0), w.RKey(), w.RKey(), 0x1234} {
			wr := bindWR(1, w, mr, 0, 64, windowAcc)
			wr.Bind.RKey = key
			b.postSend(wr)
			one(t, b.scq, 1, hca.WCSuccess)
			if w.RKey() != top|key&0xff {
				t.Fatalf("key %#x after a bind with %#x", w.RKey(), key)
			}
			a.reaches(0, w.RKey())
			if typ == hca.MWType2 {
				b.postSend(invWR(2, w.RKey()))
				one(t, b.scq, 2, hca.WCSuccess)
			}
		}
	}
}

// testWindowOrder: binds are done in the order of their queue, also with what else
// is in it, by the keys that hold then.
func testWindowOrder(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	mr := b.regBind(b.mem)
	w := b.allocMW(hca.MWType2)
	key := w.RKey()
	var ws []hca.SendWR
	for i := range 20 {
		bd := bindWR(uint64(2*i), w, mr, 64*i, 64, windowAcc)
		bd.Bind.MW = key
		key = key&^0xff | (key+1)&0xff
		bd.Bind.RKey = key
		ws = append(ws, bd, invWR(uint64(2*i+1), key))
	}
	b.postSend(ws[:len(ws)-1]...)
	for i := range len(ws) - 1 {
		one(t, b.scq, uint64(i), hca.WCSuccess)
	}
	if w.RKey() != key {
		t.Fatalf("key %#x, want %#x", w.RKey(), key)
	}
	a.reaches(64*19, key)

	// Behind a message that waits for its receive.
	b.postSend(b.send(1, 0, 8), invWR(2, key), b.send(3, 0, 8))
	none(t, b.scq)
	a.reaches(64*19, key)
	a.postRecv(4, a.sge(0, 8))
	one(t, b.scq, 1, hca.WCSuccess)
	one(t, b.scq, 2, hca.WCSuccess)
	a.refused(64*19, key)
}

// testWindowCompletion: signaled or not, and flushed.
func testWindowCompletion(t *testing.T, p Pair) {
	_, b := pair(t, p, defaults())
	mr := b.regBind(b.mem)
	w := b.allocMW(hca.MWType2)
	wr := bindWR(1, w, mr, 0, 8, windowAcc)
	wr.Flags = 0
	sent := func() uint64 {
		c, err := p.B.Counters(1)
		must(t, err)
		return c["port_xmit_packets"]
	}
	before := sent()
	b.postSend(wr)
	inv := invWR(2, w.RKey())
	inv.Flags = 0
	b.postSend(inv)
	none(t, b.scq)
	if n := sent(); n != before {
		t.Errorf("%d packets sent", n-before)
	}
	b.bind(w, mr, 0, 8, windowAcc) // both were done
	b.setState(errS)
	b.postSend(inv, bindWR(3, w, mr, 0, 8, windowAcc))
	one(t, b.scq, 2, hca.WCWRFlushErr)
	one(t, b.scq, 3, hca.WCWRFlushErr)

	_, b = pair(t, p, defaults().with(func(o *opts) { o.sigAll = true }))
	mr = b.regBind(b.mem)
	wr = bindWR(1, b.allocMW(hca.MWType1), mr, 0, 8, windowAcc)
	wr.Flags = 0
	b.postSend(wr)
	one(t, b.scq, 1, hca.WCSuccess)
}

// testWindowAtomicAlignment: an atomic in a zero based window is aligned in memory,
// and by its own address.
func testWindowAtomicAlignment(t *testing.T, p Pair) {
	for off, addrs := range map[int][]uint64{64: {0, 8}, 68: {0, 4, 8}, 65: {7, 8}} {
		for _, addr := range addrs {
			a, b := pair(t, p, defaults())
			_, key := b.bound(hca.MWType2, off, 64, windowAcc|hca.AccessZeroBased)
			a.postSend(a.reach(hca.OpAtomicFetchAdd, 1, addr, 8, key))
			if off%8 == 0 {
				one(t, a.scq, 1, hca.WCSuccess)
				continue
			}
			one(t, a.scq, 1, hca.WCRemInvReqErr)
			event(t, b.qev.ev, hca.EventQPReqErr)
		}
	}
}

// testWindowNoLKey: a window's key is no local key, though it is bound.
func testWindowNoLKey(t *testing.T, p Pair) {
	for _, typ := range mwTypes {
		a, b := pair(t, p, defaults())
		_, key := a.bound(typ, 0, 4096, windowAcc)
		b.postRecv(1, b.sge(0, 8))
		s := a.send(2, 0, 8)
		s.SGE[0].LKey = key
		a.postSend(s)
		one(t, a.scq, 2, hca.WCLocProtErr)
		none(t, b.rcq)

		a, b = pair(t, p, defaults())
		_, key = b.bound(typ, 0, 4096, windowAcc)
		g := b.sge(0, 8)
		g.LKey = key
		b.postRecv(3, g)
		a.postSend(a.send(4, 0, 8))
		one(t, a.scq, 4, hca.WCRemOpErr)
		one(t, b.rcq, 3, hca.WCLocProtErr)
	}
}
