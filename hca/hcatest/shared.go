package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

var sharedCases = []testCase{
	{"AtomicsOnSharedMemory", testAtomicsOnSharedMemory},
	{"AtomicsOnDemand", testAtomicsOnDemand},
	{"AtomicsOfOneSpace", testAtomicsOfOneSpace},
	{"AtomicsAfterRereg", testAtomicsAfterRereg},
}

// twin is the same bytes as m at another address, as another process's mapping of
// one file: nothing but the device keeps accesses by the two apart, and the race
// detector looks.
func (m *Mem) twin(base uint64) *Mem { return &Mem{Base: base, b: m.b} }

// hub is a region that end e's requests go to.
type hub struct {
	e  *end
	b  *end // whom e is linked to
	mr hca.MR
	at uint64
}

// newHub makes a linked pair whose second end has m's bytes registered as in says.
func newHub(t *testing.T, p Pair, m *Mem, in hca.MRInit) *hub {
	t.Helper()
	e, b := pair(t, p, defaults())
	in.Mem, in.Start, in.Length, in.IOVA, in.Access = m, m.Base, uint64(len(m.b)), m.Base, allAcc
	mr, err := b.pd.RegMR(in)
	must(t, err)
	return &hub{e, b, mr, m.Base}
}

// adders do n fetch-and-adds of 1 on the first word through each hub at once.
func adders(t *testing.T, n int, hubs ...*hub) {
	t.Helper()
	done := make(chan struct{})
	for _, h := range hubs {
		go func() {
			defer func() { done <- struct{}{} }()
			for i := range n {
				w := hca.SendWR{ID: uint64(i), Opcode: hca.OpAtomicFetchAdd, Flags: hca.SendSignaled, SGE: []hca.SGE{h.e.sge(0, 8)},
					RemoteAddr: h.at, RKey: h.mr.RKey(), CompareAdd: 1}
				if _, err := h.e.qp.PostSend([]hca.SendWR{w}); err != nil {
					t.Error(err)
					return
				}
				h.e.qp.Run()
				one(t, h.e.scq, uint64(i), hca.WCSuccess)
			}
		}()
	}
	for range hubs {
		<-done
	}
}

func testAtomicsOnSharedMemory(t *testing.T, p Pair) {
	const n = 300
	m := NewMem(memBase, 4096)
	o := m.twin(memBase + 1<<20)
	piece := func(base uint64) []hca.SharedPiece {
		return []hca.SharedPiece{{Start: base + 2048, End: base + 4096, Key: "another"}, {Start: base, End: base + 2048, Key: "file"}}
	}
	a, b := newHub(t, p, m, hca.MRInit{Shared: piece(m.Base)}), newHub(t, p, o, hca.MRInit{Shared: piece(o.Base)})
	adders(t, n, a, b)
	equal(t, m.b[:8], word(2*n))
	must(t, a.mr.Close())
	must(t, b.mr.Close())
}

// testAtomicsOnDemand: what an address shares is found out at each atomic; the other
// region knows it from the start.
func testAtomicsOnDemand(t *testing.T, p Pair) {
	const n = 300
	m := NewMem(memBase, 4096)
	o := m.twin(memBase)
	at := func(addr uint64) any {
		if addr < memBase+4096 {
			return "file"
		}
		return nil
	}
	piece := []hca.SharedPiece{{Start: memBase, End: memBase + 4096, Key: "file"}}
	a, b, c := newHub(t, p, m, hca.MRInit{SharedAt: at}), newHub(t, p, o, hca.MRInit{SharedAt: at}), newHub(t, p, m.twin(memBase), hca.MRInit{Shared: piece})
	adders(t, n, a, b, c)
	equal(t, m.b[:8], word(3*n))
}

// testAtomicsOfOneSpace: one process's memory, reached through two files.
func testAtomicsOfOneSpace(t *testing.T, p Pair) {
	const n = 300
	m := NewMem(memBase, 4096)
	a, b := newHub(t, p, m, hca.MRInit{Space: "process"}), newHub(t, p, m.twin(memBase), hca.MRInit{Space: "process"})
	adders(t, n, a, b)
	equal(t, m.b[:8], word(2*n))
	must(t, a.mr.Close())
	must(t, b.mr.Close())
}

// testAtomicsAfterRereg: a change of access or range brings its own pieces.
func testAtomicsAfterRereg(t *testing.T, p Pair) {
	if !p.B.Ops().Has(hca.OpReregMR) {
		t.Skip("the device has no rereg_mr")
	}
	const n = 100
	m := NewMem(memBase, 4096)
	o := m.twin(memBase)
	piece := []hca.SharedPiece{{Start: memBase, End: memBase + 4096, Key: "file"}}
	a, b := newHub(t, p, m, hca.MRInit{Shared: piece}), newHub(t, p, o, hca.MRInit{})
	var err error
	b.mr, err = b.mr.Rereg(hca.MRRereg{Flags: hca.ReregAccess, Access: allAcc, Shared: piece})
	must(t, err)
	adders(t, n, a, b)
	b.mr, err = b.mr.Rereg(hca.MRRereg{Flags: hca.ReregPD, PD: b.b.pd})
	must(t, err)
	adders(t, n, a, b)
	a.mr, err = a.mr.Rereg(hca.MRRereg{Flags: hca.ReregTrans, Mem: m, Start: memBase, Length: 4096, IOVA: memBase, Shared: piece})
	must(t, err)
	adders(t, n, a, b)
	equal(t, m.b[:8], word(6*n))
	must(t, a.mr.Close())
	must(t, b.mr.Close())
}
