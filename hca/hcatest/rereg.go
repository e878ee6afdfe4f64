package hcatest

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var reregCases = []testCase{
	{"ReregChecks", needs(hca.OpReregMR, testReregChecks)},
	{"Rereg", needs(hca.OpReregMR, testRereg)},
	{"Row35ReregBlocked", needs(hca.OpReregMR, testReregBlocked)},
	{"ReregInTraffic", needs(hca.OpReregMR, testReregInTraffic)},
}

// needs skips a test where a device lacks what it is about.
func needs(ops hca.OpSet, run func(*testing.T, Pair)) func(*testing.T, Pair) {
	return func(t *testing.T, p Pair) {
		if !p.A.Ops().Has(ops) || !p.B.Ops().Has(ops) {
			t.Skipf("operations %#x are not there", ops)
		}
		run(t, p)
	}
}

// testReregChecks: what is refused changes nothing.
func testReregChecks(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	const top = ^uint64(0)
	trans := func(start, length, iova uint64) hca.MRRereg {
		return hca.MRRereg{Flags: hca.ReregTrans, Mem: b.mem, Start: start, Length: length, IOVA: iova}
	}
	for name, c := range map[string]struct {
		in    hca.MRRereg
		errno unix.Errno
	}{
		"nothing":         {hca.MRRereg{}, unix.EINVAL},
		"unknown flag":    {hca.MRRereg{Flags: 1 << 3}, unix.EOPNOTSUPP},
		"one more flag":   {hca.MRRereg{Flags: hca.ReregAccess | 1<<31, Access: allAcc}, unix.EOPNOTSUPP},
		"start wraps":     {trans(top, 2, 0), unix.EINVAL},
		"iova wraps":      {trans(memBase, 2, top), unix.EINVAL},
		"too large":       {trans(0, p.B.Attr().MaxMRSize+1, 0), unix.EINVAL},
		"no memory":       {hca.MRRereg{Flags: hca.ReregTrans, Length: 8}, unix.EINVAL},
		"remote write":    {hca.MRRereg{Flags: hca.ReregAccess, Access: hca.AccessRemoteWrite}, unix.EINVAL},
		"remote atomic":   {hca.MRRereg{Flags: hca.ReregAccess, Access: hca.AccessRemoteAtomic}, unix.EINVAL},
		"access":          {hca.MRRereg{Flags: hca.ReregAccess, Access: hca.AccessFlushPersist}, unix.EOPNOTSUPP},
		"no PD":           {hca.MRRereg{Flags: hca.ReregPD}, unix.EINVAL},
		"good PD, bad MR": {hca.MRRereg{Flags: hca.ReregPD | hca.ReregTrans, PD: a.pd, Start: 8}, unix.EINVAL},
	} {
		if _, err := b.mr.Rereg(c.in); err == nil {
			t.Fatalf("%s: no error", name)
		} else {
			wantErrno(t, err, c.errno)
		}
	}
	if p.A != p.B {
		_, err := b.mr.Rereg(hca.MRRereg{Flags: hca.ReregPD, PD: a.pd})
		wantErrno(t, err, unix.EINVAL)
	}
	for _, op := range []hca.SendOpcode{hca.OpRDMAWrite, hca.OpRDMARead} {
		a.postSend(a.rdma(op, 1, 0, b, memSize-8, 8))
		one(t, a.scq, 1, hca.WCSuccess)
	}
	mr, err := b.pd.RegMR(hca.MRInit{Mem: b.mem, Start: memBase, Length: 8, IOVA: memBase})
	must(t, err)
	must(t, mr.Close())
	_, err = mr.Rereg(hca.MRRereg{Flags: hca.ReregAccess})
	wantErrno(t, err, unix.EINVAL)
}

// testRereg: every combination of flags changes what they name and nothing else.
func testRereg(t *testing.T, p Pair) {
	for flags := hca.ReregFlags(1); flags <= hca.ReregSupported; flags++ {
		a, b := pair(t, p, defaults())
		other := newEnd(t, p.B, defaults())
		old, err := b.pd.RegMR(hca.MRInit{Mem: b.mem, Start: memBase, Length: 4096, IOVA: memBase, Access: allAcc})
		must(t, err)
		const iova = 0x10000
		mr, err := old.Rereg(hca.MRRereg{
			Flags: flags, PD: other.pd,
			Mem: other.mem, Start: memBase + 100, Length: 64, IOVA: iova,
			Access: hca.AccessLocalWrite | hca.AccessRemoteWrite,
		})
		must(t, err)
		t.Cleanup(func() { must(t, mr.Close()) })
		if mr.RKey() != old.RKey() || mr.LKey() != old.LKey() {
			t.Errorf("flags %#x: keys %#x and %#x, were %#x and %#x", flags, mr.LKey(), mr.RKey(), old.LKey(), old.RKey())
		}
		must(t, old.Close()) // of what is closed: nothing
		owner, mem, addr, at, n := b, b.mem, uint64(memBase), 0, 4096
		if flags&hca.ReregTrans != 0 {
			mem, addr, at, n = other.mem, iova, 100, 64
		}
		if flags&hca.ReregPD != 0 {
			// The key is nothing to the PD that it has left.
			a.postSend(withKey(a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, 8), addr, mr))
			one(t, a.scq, 1, hca.WCRemAccessErr)
			a = newEnd(t, p.A, defaults())
			owner = other
			link(a, owner)
		}
		a.mem.Set(0, Pattern(int(flags), 8))
		a.postSend(withKey(a.rdma(hca.OpRDMAWrite, 2, 0, owner, 0, 8), addr+uint64(n)-8, mr))
		one(t, a.scq, 2, hca.WCSuccess)
		equal(t, mem.Get(at+n-8, 8), Pattern(int(flags), 8))
		// The last check kills the QP.
		bad := withKey(a.rdma(hca.OpRDMAWrite, 3, 0, owner, 0, 8), addr+uint64(n)-7, mr)
		if flags&hca.ReregAccess != 0 {
			bad = withKey(a.rdma(hca.OpRDMARead, 3, 0, owner, 0, 8), addr, mr)
		}
		a.postSend(bad)
		one(t, a.scq, 3, hca.WCRemAccessErr)
	}
}

func withKey(w hca.SendWR, addr uint64, mr hca.MR) hca.SendWR {
	w.RemoteAddr, w.RKey = addr, mr.RKey()
	return w
}

// testReregBlocked: Rereg returns although a copy through the old translation is
// stuck, and not even its next chunk is copied.
func testReregBlocked(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	fresh := NewMem(memBase, memSize)
	free := stuck(t, a, b.mem, a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, memSize))
	var mr hca.MR
	quick(t, "rereg", func() {
		var err error
		mr, err = b.mr.Rereg(hca.MRRereg{Flags: hca.ReregTrans, Mem: fresh, Start: memBase, Length: memSize, IOVA: memBase})
		must(t, err)
	})
	t.Cleanup(func() { must(t, mr.Close()) })
	before := b.mem.calls.Load()
	free()
	one(t, a.scq, 1, hca.WCRemOpErr)
	if n := b.mem.calls.Load() - before; n != 0 || fresh.calls.Load() != 0 {
		t.Errorf("%d accesses to the old memory, %d to the new", n, fresh.calls.Load())
	}
}

// testReregInTraffic moves a region between two memories at two addresses while
// it is written to. UC, because there a message that meets a closed region is
// lost and the connection stays.
func testReregInTraffic(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.typ = uc }))
	mems := []*Mem{NewMem(memBase, 4096), NewMem(8*memBase, 8192)}
	to := func(m *Mem) hca.MRRereg {
		return hca.MRRereg{Flags: hca.ReregTrans, Mem: m, Start: m.Base, Length: uint64(len(m.b)), IOVA: memBase}
	}
	in := to(mems[0])
	mr, err := b.pd.RegMR(hca.MRInit{Mem: in.Mem, Start: in.Start, Length: in.Length, IOVA: in.IOVA, Access: allAcc})
	must(t, err)
	w := withKey(a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, 4096), memBase, mr)
	stop := repeat(func() {
		a.postSend(w)
		one(t, a.scq, 1, hca.WCSuccess)
	})
	for i := range *roundsFlag {
		old, now := mems[i%2], mems[(i+1)%2]
		mr, err = mr.Rereg(to(now))
		must(t, err)
		n := old.calls.Load()
		for k := now.calls.Load(); now.calls.Load() == k; { // the new translation is in use
			a.qp.Query()
		}
		if m := old.calls.Load(); m != n {
			t.Errorf("%d accesses through the old translation", m-n)
		}
	}
	stop()
	must(t, mr.Close())
	for _, m := range mems {
		if n := m.outside.Load(); n != 0 {
			t.Errorf("%d accesses to one memory at the other's addresses", n)
		}
	}
}
