package hcatest

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var mwCases = []testCase{
	{"MWAlloc", needs(hca.OpMW, testMWAlloc)},
	{"MWUnbound", needs(hca.OpMW, testMWUnbound)},
}

func testMWAlloc(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	if p.A.Attr().MaxMW == 0 {
		t.Error("max_mw is 0")
	}
	for _, typ := range []hca.MWType{0, 3, 255} {
		_, err := e.pd.AllocMW(typ)
		wantErrno(t, err, unix.EINVAL)
	}
	// No key is anything else's, while it lives and for a while after.
	seen := map[uint32]bool{e.mr.RKey(): true}
	once := func(key uint32) {
		t.Helper()
		if key == 0 || seen[key] {
			t.Fatalf("key %#x again", key)
		}
		seen[key] = true
	}
	for i := range 300 {
		mw, err := e.pd.AllocMW(hca.MWType(1 + i%2))
		must(t, err)
		once(mw.RKey())
		mr, err := e.pd.RegMR(hca.MRInit{Mem: e.mem, Start: memBase, Length: 64, IOVA: memBase})
		must(t, err)
		once(mr.RKey())
		must(t, mw.Close())
		must(t, mr.Close())
	}
}

// testMWUnbound: nothing is reached by the key of a window that is not bound.
func testMWUnbound(t *testing.T, p Pair) {
	for _, typ := range []hca.MWType{hca.MWType1, hca.MWType2} {
		a, b := pair(t, p, defaults())
		mw, err := b.pd.AllocMW(typ)
		must(t, err)
		t.Cleanup(func() { must(t, mw.Close()) })
		w := a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, 8)
		w.RKey = mw.RKey()
		a.postSend(w)
		one(t, a.scq, 1, hca.WCRemAccessErr)

		a, b = pair(t, p, defaults())
		mine, err := a.pd.AllocMW(typ)
		must(t, err)
		t.Cleanup(func() { must(t, mine.Close()) })
		b.postRecv(1, b.sge(0, 8))
		w = a.send(2, 0, 8)
		w.SGE[0].LKey = mine.RKey()
		a.postSend(w)
		one(t, a.scq, 2, hca.WCLocProtErr)
	}
}
