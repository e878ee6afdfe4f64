package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

var windowCases = []testCase{
	{"WindowRights", needs(hca.OpMW, testWindowRights)},
	{"WindowBounds", needs(hca.OpMW, testWindowBounds)},
	{"WindowBindBounds", needs(hca.OpMW, testWindowBindBounds)},
	{"WindowRefused", needs(hca.OpMW, testWindowRefused)},
	{"WindowType1", needs(hca.OpMW, testWindowType1)},
	{"WindowType2", needs(hca.OpMW, testWindowType2)},
	{"WindowHoldsRegion", needs(hca.OpMW, testWindowHoldsRegion)},
	{"WindowClose", needs(hca.OpMW, testWindowClose)},
	{"WindowQPClose", needs(hca.OpMW, testWindowQPClose)},
	{"WindowKey", needs(hca.OpMW, testWindowKey)},
	{"WindowOrder", needs(hca.OpMW, testWindowOrder)},
	{"WindowCompletion", needs(hca.OpMW, testWindowCompletion)},
	{"WindowAtomicAlignment", needs(hca.OpMW, testWindowAtomicAlignment)},
	{"WindowNoLKey", needs(hca.OpMW, testWindowNoLKey)},
}

// bindAcc is a region's access that grants nobody anything from afar, but windows.
const bindAcc = hca.AccessLocalWrite | hca.AccessMWBind

const windowAcc = hca.AccessRemoteWrite | hca.AccessRemoteRead | hca.AccessRemoteAtomic

var mwTypes = []hca.MWType{hca.MWType1, hca.MWType2}

func (e *end) allocMW(typ hca.MWType) hca.MW {
	e.t.Helper()
	w, err := e.pd.AllocMW(typ)
	must(e.t, err)
	e.t.Cleanup(func() { must(e.t, w.Close()) })
	return w
}

// regBind is a region of all of m that windows can be bound to. A cleanup closes
// it, after those of the windows made later.
func (e *end) regBind(m *Mem) hca.MR { e.t.Helper(); return e.reg(m, bindAcc) }

// bindWR binds n bytes at an offset of a region at memBase, with the next key.
func bindWR(id uint64, w hca.MW, mr hca.MR, off, n int, acc hca.Access) hca.SendWR {
	return hca.SendWR{ID: id, Opcode: hca.OpBindMW, Flags: hca.SendSignaled, Bind: hca.Bind{
		MW: w.RKey(), MR: mr.LKey(), RKey: w.RKey() + 1, Access: acc, Addr: memBase + uint64(off), Length: uint64(n),
	}}
}

// bind posts such a request, which must succeed, and returns the new key.
func (e *end) bind(w hca.MW, mr hca.MR, off, n int, acc hca.Access) uint32 {
	e.t.Helper()
	wr := bindWR(900, w, mr, off, n, acc)
	e.postSend(wr)
	if wc := one(e.t, e.scq, 900, hca.WCSuccess); wc.Opcode != hca.WCBindMW || wc.ByteLen != 0 {
		e.t.Fatalf("completion %+v", wc)
	}
	if want := wr.Bind.MW&^0xff | wr.Bind.RKey&0xff; w.RKey() != want {
		e.t.Fatalf("key %#x after the bind, want %#x", w.RKey(), want)
	}
	return w.RKey()
}

// bound is a window on n bytes at an offset of a new region of e.mem, and its key. The
// region is made first, so that the window is closed before it.
func (e *end) bound(typ hca.MWType, off, n int, acc hca.Access) (hca.MW, uint32) {
	e.t.Helper()
	mr := e.regBind(e.mem)
	w := e.allocMW(typ)
	return w, e.bind(w, mr, off, n, acc)
}

func invWR(id uint64, key uint32) hca.SendWR {
	return hca.SendWR{ID: id, Opcode: hca.OpLocalInv, Flags: hca.SendSignaled, Imm: key}
}

// reach is op on n bytes at an address by a key.
func (e *end) reach(op hca.SendOpcode, id uint64, addr uint64, n int, key uint32) hca.SendWR {
	return hca.SendWR{ID: id, Opcode: op, Flags: hca.SendSignaled, SGE: []hca.SGE{e.sge(0, n)}, RemoteAddr: addr, RKey: key}
}

// reaches checks that 8 bytes can be written there, and does not that they cannot.
func (e *end) reaches(off int, key uint32) {
	e.t.Helper()
	e.postSend(e.reach(hca.OpRDMAWrite, 901, memBase+uint64(off), 8, key))
	one(e.t, e.scq, 901, hca.WCSuccess)
}

// refused checks that they cannot, which ends the connection.
func (e *end) refused(off int, key uint32) {
	e.t.Helper()
	e.postSend(e.reach(hca.OpRDMAWrite, 902, memBase+uint64(off), 8, key))
	one(e.t, e.scq, 902, hca.WCRemAccessErr)
}

// another is one more connected pair whose far end is in the PD of b.
func another(t *testing.T, p Pair, b *end) (a, b2 *end) {
	t.Helper()
	a = newEnd(t, p.A, b.o.with(func(o *opts) { o.shareCtx = nil }))
	b2 = newEnd(t, p.B, b.o.with(func(o *opts) { o.shareCtx = b }))
	link(a, b2)
	return a, b2
}

// remoteOps are what needs a right at the far end.
func remoteOps(p Pair) map[hca.SendOpcode]hca.Access {
	ops := map[hca.SendOpcode]hca.Access{
		hca.OpRDMAWrite: hca.AccessRemoteWrite, hca.OpRDMAWriteImm: hca.AccessRemoteWrite, hca.OpRDMARead: hca.AccessRemoteRead,
		hca.OpAtomicCmpSwap: hca.AccessRemoteAtomic, hca.OpAtomicFetchAdd: hca.AccessRemoteAtomic,
	}
	if p.A.Attr().MaskedAtomCap != 0 && p.B.Attr().MaskedAtomCap != 0 {
		ops[hca.OpMaskedAtomicCmpSwap], ops[hca.OpMaskedAtomicFetchAdd] = hca.AccessRemoteAtomic, hca.AccessRemoteAtomic
	}
	return ops
}

// testWindowRights: each right of a window allows what it is for and nothing else,
// whatever the region allows.
func testWindowRights(t *testing.T, p Pair) {
	for _, typ := range mwTypes {
		for op, need := range remoteOps(p) {
			for _, acc := range []hca.Access{0, hca.AccessRemoteWrite, hca.AccessRemoteRead, hca.AccessRemoteAtomic, windowAcc &^ need, windowAcc} {
				a, b := pair(t, p, defaults())
				mr := b.regBind(b.mem)
				if acc&need == 0 { // the region's own right does not help
					mr = b.reg(b.mem, bindAcc|windowAcc)
				}
				w := b.allocMW(typ)
				key := b.bind(w, mr, 64, 64, acc)
				b.postRecv(1)
				a.postSend(a.reach(op, 2, memBase+64, 8, key))
				if acc&need != 0 {
					one(t, a.scq, 2, hca.WCSuccess)
					continue
				}
				one(t, a.scq, 2, hca.WCRemAccessErr)
				event(t, b.qev.ev, hca.EventQPAccessErr)
				one(t, b.rcq, 1, hca.WCWRFlushErr)
			}
		}
	}
}

// testWindowBounds: to the byte.
func testWindowBounds(t *testing.T, p Pair) {
	const from, n = 1001, 99
	for _, typ := range mwTypes {
		for _, zero := range []bool{false, true} {
			if zero && typ == hca.MWType1 {
				continue
			}
			base, acc := uint64(memBase+from), windowAcc
			if zero {
				base, acc = 0, acc|hca.AccessZeroBased
			}
			for _, c := range []struct {
				addr uint64
				n    int
				ok   bool
			}{
				{base, n, true},
				{base, 1, true},
				{base + n - 1, 1, true},
				{base + n, 1, false},
				{base + n - 1, 2, false},
				{base, n + 1, false},
				{base - 1, 1, false},
				{base - 1, 2, false},
				{base - 1, n + 2, false},
				{^uint64(0), 2, false},
				{memBase, 1, false}, // in the region, not in the window
				{memBase + from, 1, !zero},
				{base + n, 0, true}, // no bytes: not looked at
			} {
				for _, op := range []hca.SendOpcode{hca.OpRDMAWrite, hca.OpRDMARead} {
					a, b := pair(t, p, defaults())
					_, key := b.bound(typ, from, n, acc)
					at := from + int(c.addr-base)
					b.mem.Set(from-1, Pattern(1, n+2))
					a.mem.Set(0, Pattern(2, n+2))
					if c.ok && c.n > 0 && op == hca.OpRDMARead {
						b.mem.Set(at, Pattern(3, c.n))
					}
					a.postSend(a.reach(op, 1, c.addr, c.n, key))
					switch {
					case !c.ok:
						one(t, a.scq, 1, hca.WCRemAccessErr)
						equal(t, b.mem.Get(from-1, n+2), Pattern(1, n+2))
						equal(t, a.mem.Get(0, n+2), Pattern(2, n+2))
					case op == hca.OpRDMARead:
						one(t, a.scq, 1, hca.WCSuccess)
						equal(t, a.mem.Get(0, c.n), b.mem.Get(at, c.n))
					default:
						one(t, a.scq, 1, hca.WCSuccess)
						equal(t, b.mem.Get(at, c.n), Pattern(2, n+2)[:c.n])
					}
				}
			}
		}
	}
}

// testWindowBindBounds: a window lies in its region, to the byte.
func testWindowBindBounds(t *testing.T, p Pair) {
	const iova, n = 0x10000, 4096
	for _, typ := range mwTypes {
		for _, acc := range []hca.Access{windowAcc, windowAcc | hca.AccessZeroBased} {
			if typ == hca.MWType1 && acc&hca.AccessZeroBased != 0 {
				continue
			}
			for _, c := range []struct {
				addr, n uint64
				ok      bool
			}{
				{iova, n, true}, {iova, 1, true}, {iova + n - 1, 1, true},
				{iova + n, 1, false}, {iova - 1, 1, false}, {iova - 1, 2, false}, {iova, n + 1, false}, {iova + 1, n, false},
				{iova - 1, n + 2, false}, {^uint64(0), 1, false}, {^uint64(0), 2, false},
				{iova, ^uint64(0), false}, {iova + 1, ^uint64(0), false}, {0, ^uint64(0), false},
			} {
				a, b := pair(t, p, defaults())
				mr, err := b.pd.RegMR(hca.MRInit{Mem: b.mem, Start: memBase + 100, Length: n, IOVA: iova, Access: bindAcc})
				must(t, err)
				t.Cleanup(func() { must(t, mr.Close()) })
				w := b.allocMW(typ)
				wr := bindWR(1, w, mr, 0, 0, acc)
				wr.Bind.Addr, wr.Bind.Length = c.addr, c.n
				b.postSend(wr)
				if !c.ok {
					one(t, b.scq, 1, hca.WCMWBindErr)
					continue
				}
				one(t, b.scq, 1, hca.WCSuccess)
				at := c.addr + c.n - 1
				if acc&hca.AccessZeroBased != 0 {
					at = c.n - 1
				}
				a.mem.Set(0, []byte{77})
				a.postSend(a.reach(hca.OpRDMAWrite, 2, at, 1, w.RKey()))
				one(t, a.scq, 2, hca.WCSuccess)
				equal(t, b.mem.Get(100+int(c.addr-iova+c.n-1), 1), []byte{77})
			}
		}
	}
}

// testWindowRefused: what a bind is refused for. The queue ends there, and the
// window is as it was.
func testWindowRefused(t *testing.T, p Pair) {
	type set struct {
		b, other *end
		w        hca.MW
		mr       hca.MR
	}
	both := []hca.MWType{hca.MWType1, hca.MWType2}
	for name, c := range map[string]struct {
		types []hca.MWType
		f     func(s *set, b *hca.Bind)
	}{
		"no such window":      {both, func(s *set, b *hca.Bind) { b.MW = 0 }},
		"stale window key":    {both, func(s *set, b *hca.Bind) { b.MW ^= 1 }},
		"region as window":    {both, func(s *set, b *hca.Bind) { b.MW = s.mr.LKey() }},
		"another PD's window": {both, func(s *set, b *hca.Bind) { b.MW = s.other.allocMW(hca.MWType2).RKey() }},
		"no such region":      {both, func(s *set, b *hca.Bind) { b.MR = 0 }},
		"stale region key":    {both, func(s *set, b *hca.Bind) { b.MR ^= 1 }},
		"window as region":    {both, func(s *set, b *hca.Bind) { b.MR = s.w.RKey() }},
		"another PD's region": {both, func(s *set, b *hca.Bind) { b.MR = s.other.regBind(s.other.mem).LKey() }},
		"no bind access":      {both, func(s *set, b *hca.Bind) { b.MR = s.b.reg(s.b.mem, allAcc).LKey() }},
		"write, region not": {both, func(s *set, b *hca.Bind) {
			b.MR, b.Access = s.b.reg(s.b.mem, hca.AccessMWBind|hca.AccessRemoteRead).LKey(), hca.AccessRemoteWrite
		}},
		"atomics, region not": {both, func(s *set, b *hca.Bind) {
			b.MR, b.Access = s.b.reg(s.b.mem, hca.AccessMWBind|hca.AccessRemoteRead).LKey(), hca.AccessRemoteAtomic
		}},
		"huge pages":     {both, func(s *set, b *hca.Bind) { b.Access |= hca.AccessHugetlb }},
		"unknown access": {both, func(s *set, b *hca.Bind) { b.Access |= 1 << 31 }},
		"zero based":     {mwTypes[:1], func(s *set, b *hca.Bind) { b.Access |= hca.AccessZeroBased }},
		"no bytes":       {mwTypes[1:], func(s *set, b *hca.Bind) { b.Length = 0 }},
		"bound already":  {mwTypes[1:], func(s *set, b *hca.Bind) { s.b.bind(s.w, s.mr, 0, 8, windowAcc); b.MW = s.w.RKey() }},
		"closed region": {both, func(s *set, b *hca.Bind) {
			mr, err := s.b.pd.RegMR(hca.MRInit{Mem: s.b.mem, Start: memBase, Length: 4096, IOVA: memBase, Access: bindAcc})
			must(t, err)
			must(t, mr.Close())
			b.MR = mr.LKey()
		}},
		"closed window": {both, func(s *set, b *hca.Bind) {
			w, err := s.b.pd.AllocMW(hca.MWType1)
			must(t, err)
			must(t, w.Close())
			b.MW = w.RKey()
		}},
	} {
		for _, typ := range c.types {
			for _, qpt := range []hca.QPType{rc, uc} {
				_, b := pair(t, p, defaults().with(func(o *opts) { o.typ = qpt }))
				s := &set{b: b, other: newEnd(t, p.B, defaults()), mr: b.regBind(b.mem)}
				s.w = b.allocMW(typ)
				wr := bindWR(1, s.w, s.mr, 64, 64, windowAcc)
				c.f(s, &wr.Bind)
				key := s.w.RKey()
				next := bindWR(2, s.w, s.mr, 0, 8, windowAcc)
				b.postSend(wr, next)
				wcs := take(t, b.scq, 2)
				if wc := wcs[0]; wc.ID != 1 || wc.Status != hca.WCMWBindErr {
					t.Fatalf("%s, type %d: %+v", name, typ, wc)
				}
				if wc := wcs[1]; wc.ID != 2 || wc.Status != hca.WCWRFlushErr {
					t.Fatalf("%s, type %d: %+v", name, typ, wc)
				}
				want := errS
				if qpt == uc {
					want = hca.QPSQE
				}
				if st := b.state(); st != want {
					t.Errorf("%s: state %d, want %d", name, st, want)
				}
				if s.w.RKey() != key {
					t.Errorf("%s: key %#x, was %#x", name, s.w.RKey(), key)
				}
			}
		}
	}
	// A region that is only read is good for a window that is only read, and what
	// was bound before stays so.
	a, b := pair(t, p, defaults())
	mr := b.reg(b.mem, hca.AccessMWBind)
	w := b.allocMW(hca.MWType1)
	key := b.bind(w, mr, 0, 64, hca.AccessRemoteRead)
	_, b2 := another(t, p, b)
	bad := bindWR(1, w, b.mr, 0, 64, windowAcc)
	b2.postSend(bad)
	one(t, b2.scq, 1, hca.WCMWBindErr)
	a.postSend(a.reach(hca.OpRDMARead, 2, memBase, 8, key))
	one(t, a.scq, 2, hca.WCSuccess)
}
