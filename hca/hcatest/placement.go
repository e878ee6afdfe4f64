package hcatest

import (
	"slices"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

// Flushes and atomic writes (IBTA 1.5 annex A19).
var placementCases = []testCase{
	{"AtomicWrite", with(hca.CapAtomicWrite, testAtomicWrite)},
	{"AtomicWriteErrors", with(hca.CapAtomicWrite, testAtomicWriteErrors)},
	{"Flush", with(hca.CapFlushGlobal, testFlush)},
	{"FlushErrors", with(hca.CapFlushGlobal, testFlushErrors)},
}

// with skips where a device lacks a capability.
func with(capability uint64, run func(*testing.T, Pair)) func(*testing.T, Pair) {
	return func(t *testing.T, p Pair) {
		if p.A.Attr().CapFlags&p.B.Attr().CapFlags&capability == 0 {
			t.Skip("no such capability")
		}
		run(t, p)
	}
}

const flushAcc = allAcc | hca.AccessFlushGlobal

// flushable lets a QP's peer flush.
func flushable(o *opts) { o.access |= hca.AccessFlushGlobal | hca.AccessFlushPersist }

func (e *end) atomicWrite(id uint64, to *end, off int, val uint64) hca.SendWR {
	w := e.rdma(hca.OpAtomicWrite, id, 0, to, off, 8)
	w.SGE, w.Swap = nil, val
	return w
}

func (e *end) flush(id uint64, addr uint64, key uint32, f hca.Flush) hca.SendWR {
	return hca.SendWR{ID: id, Opcode: hca.OpFlush, Flags: hca.SendSignaled, RemoteAddr: addr, RKey: key, Flush: f}
}

func testAtomicWrite(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	b.mem.Set(56, slices.Concat(word(1), word(2), word(3)))
	a.postSend(a.atomicWrite(1, b, 64, 0x1122334455667788))
	if wc := one(t, a.scq, 1, hca.WCSuccess); wc.Opcode != hca.WCAtomicWrite {
		t.Errorf("completion %+v", wc)
	}
	equal(t, b.mem.Get(56, 8), word(1))
	equal(t, b.mem.Get(64, 8), word(0x1122334455667788))
	equal(t, b.mem.Get(72, 8), word(3))
	// In order with what is before and after it.
	a.mem.Set(0, word(7))
	read := a.rdma(hca.OpRDMARead, 4, 8, b, 64, 8)
	a.postSend(a.rdma(hca.OpRDMAWrite, 2, 0, b, 64, 8), a.atomicWrite(3, b, 64, 9), read)
	for _, id := range []uint64{2, 3, 4} {
		one(t, a.scq, id, hca.WCSuccess)
	}
	equal(t, a.mem.Get(8, 8), word(9))
	// Through a window.
	mr := b.regBind(b.mem)
	w := a.atomicWrite(5, b, 64, 10)
	w.RKey = b.bind(b.allocMW(hca.MWType2), mr, 64, 8, hca.AccessRemoteWrite)
	a.postSend(w)
	one(t, a.scq, 5, hca.WCSuccess)
	equal(t, b.mem.Get(64, 8), word(10))
}

func testAtomicWriteErrors(t *testing.T, p Pair) {
	req := func(a, b *end) hca.SendWR { return a.atomicWrite(1, b, 0, 1) }
	o := defaults()
	remoteError(t, p, o.with(func(o *opts) { o.access &^= hca.AccessRemoteWrite }), hca.WCRemInvReqErr, hca.EventQPReqErr, req)
	remoteError(t, p, o.with(func(o *opts) { o.destRd = 0 }), hca.WCRemInvReqErr, hca.EventQPReqErr, req)
	for name, c := range map[string]struct {
		st hca.WCStatus
		ev hca.EventType
		f  func(b *end, w *hca.SendWR)
	}{
		"misaligned": {hca.WCRemInvReqErr, hca.EventQPReqErr, func(_ *end, w *hca.SendWR) { w.RemoteAddr += 4 }},
		"access": {hca.WCRemAccessErr, hca.EventQPAccessErr, func(b *end, w *hca.SendWR) {
			w.RKey = b.reg(b.mem, allAcc&^hca.AccessRemoteWrite).RKey()
		}},
		"key": {hca.WCRemAccessErr, hca.EventQPAccessErr, func(_ *end, w *hca.SendWR) { w.RKey ^= 1 }},
		"end": {hca.WCRemAccessErr, hca.EventQPAccessErr, func(_ *end, w *hca.SendWR) { w.RemoteAddr = memBase + memSize }},
	} {
		t.Log(name)
		remoteError(t, p, o, c.st, c.ev, func(a, b *end) hca.SendWR {
			w := req(a, b)
			c.f(b, &w)
			return w
		})
	}
}

func testFlush(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(flushable))
	mr := b.reg(b.mem, flushAcc)
	bound := b.reg(b.mem, flushAcc|hca.AccessMWBind)
	window := b.bind(b.allocMW(hca.MWType2), bound, 64, 8, hca.AccessFlushGlobal)
	a.mem.Set(0, word(77))
	for name, c := range map[string]struct {
		addr uint64
		key  uint32
		f    hca.Flush
	}{
		"range":           {memBase + 64, mr.RKey(), hca.Flush{Length: 8, Type: hca.FlushGlobal}},
		"all of it":       {memBase, mr.RKey(), hca.Flush{Length: memSize, Type: hca.FlushGlobal}},
		"nothing":         {memBase, mr.RKey(), hca.Flush{Type: hca.FlushGlobal}},
		"to nowhere":      {memBase, mr.RKey(), hca.Flush{Length: 8}},
		"the region":      {0, mr.RKey(), hca.Flush{Type: hca.FlushGlobal, Level: hca.FlushMR}},
		"whatever length": {1, mr.RKey(), hca.Flush{Length: 1 << 31, Type: hca.FlushGlobal, Level: hca.FlushMR}},
		"window":          {memBase + 64, window, hca.Flush{Length: 8, Type: hca.FlushGlobal}},
		"whole window":    {0, window, hca.Flush{Type: hca.FlushGlobal, Level: hca.FlushMR}},
	} {
		b.mem.Set(64, word(0))
		a.postSend(a.rdma(hca.OpRDMAWrite, 1, 0, b, 64, 8), a.flush(2, c.addr, c.key, c.f))
		one(t, a.scq, 1, hca.WCSuccess)
		if wc := one(t, a.scq, 2, hca.WCSuccess); wc.Opcode != hca.WCFlush {
			t.Errorf("%s: completion %+v", name, wc)
		}
		equal(t, b.mem.Get(64, 8), word(77))
	}
}

func testFlushErrors(t *testing.T, p Pair) {
	o := defaults().with(flushable)
	global := hca.Flush{Length: 8, Type: hca.FlushGlobal}
	remoteError(t, p, defaults(), hca.WCRemInvReqErr, hca.EventQPReqErr, func(a, b *end) hca.SendWR {
		return a.flush(1, memBase, b.reg(b.mem, flushAcc).RKey(), global)
	})
	remoteError(t, p, o.with(func(o *opts) { o.destRd = 0 }), hca.WCRemInvReqErr, hca.EventQPReqErr, func(a, b *end) hca.SendWR {
		return a.flush(1, memBase, b.reg(b.mem, flushAcc).RKey(), global)
	})
	for name, f := range map[string]func(b *end, w *hca.SendWR){
		"key":                func(_ *end, w *hca.SendWR) { w.RKey ^= 1 },
		"key, of nothing":    func(_ *end, w *hca.SendWR) { w.RKey, w.Flush.Length = w.RKey^1, 0 },
		"key, of a region":   func(_ *end, w *hca.SendWR) { w.RKey, w.Flush.Level = w.RKey^1, hca.FlushMR },
		"end":                func(_ *end, w *hca.SendWR) { w.RemoteAddr = memBase + memSize - 7 },
		"access":             func(b *end, w *hca.SendWR) { w.RKey = b.reg(b.mem, allAcc).RKey() },
		"access, a region":   func(b *end, w *hca.SendWR) { w.RKey, w.Flush.Level = b.reg(b.mem, allAcc).RKey(), hca.FlushMR },
		"persistent":         func(_ *end, w *hca.SendWR) { w.Flush.Type = hca.FlushPersistent },
		"persistent as well": func(_ *end, w *hca.SendWR) { w.Flush.Type |= hca.FlushPersistent },
		"another PD's":       func(b *end, w *hca.SendWR) { w.RKey = newEnd(t, p.B, o).reg(b.mem, flushAcc).RKey() },
		"another PD's, region": func(b *end, w *hca.SendWR) {
			w.RKey, w.Flush.Level = newEnd(t, p.B, o).reg(b.mem, flushAcc).RKey(), hca.FlushMR
		},
		"unbound window": func(b *end, w *hca.SendWR) { w.RKey, w.Flush.Level = b.allocMW(hca.MWType2).RKey(), hca.FlushMR },
	} {
		t.Log(name)
		remoteError(t, p, o, hca.WCRemAccessErr, hca.EventQPAccessErr, func(a, b *end) hca.SendWR {
			w := a.flush(1, memBase, b.reg(b.mem, flushAcc).RKey(), global)
			f(b, &w)
			return w
		})
	}
	// There is no persistent memory to register.
	a := newEnd(t, p.A, o)
	if _, err := a.pd.RegMR(hca.MRInit{Mem: a.mem, Start: memBase, Length: 4096, IOVA: memBase, Access: hca.AccessFlushPersist}); err == nil {
		t.Error("a persistent region")
	}
}
