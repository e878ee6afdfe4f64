package soft_test

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
)

// flat is a client's memory at address 4096, without checks or locks.
type flat []byte

const flatBase = 4096

func (m *flat) ReadAt(p []byte, addr uint64) error  { copy(p, (*m)[addr-flatBase:]); return nil }
func (m *flat) WriteAt(p []byte, addr uint64) error { copy((*m)[addr-flatBase:], p); return nil }

type client struct {
	cq hca.CQ
	qp hca.QP
	mr hca.MR
	pd hca.PD
}

func newClient(t testing.TB, d hca.Device, typ hca.QPType, size int) *client {
	c := &client{}
	ctx, err := d.AllocUContext(nil)
	check(t, err)
	c.pd, err = ctx.AllocPD()
	check(t, err)
	c.cq, err = ctx.CreateCQ(hca.CQInit{Entries: 256})
	check(t, err)
	m := make(flat, size)
	c.mr, err = c.pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: uint64(size), IOVA: flatBase, Access: 15})
	check(t, err)
	c.qp, err = c.pd.CreateQP(hca.QPInit{Type: typ, SendCQ: c.cq, RecvCQ: c.cq,
		Cap: hca.QPCap{MaxSendWR: 128, MaxRecvWR: 128, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInline: 64}})
	check(t, err)
	t.Cleanup(func() {
		check(t, c.qp.Close())
		check(t, c.mr.Close())
		check(t, c.cq.Close())
		check(t, c.pd.Close())
		check(t, ctx.Close())
	})
	return c
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func connect(t testing.TB, a, b *client, typ hca.QPType) {
	t.Helper()
	for _, p := range [][2]*client{{a, b}, {b, a}} {
		q, peer := p[0].qp, p[1].qp
		at := hca.QPAttr{State: hca.QPInitState, Port: 1, Access: 15, QKey: 5}
		ma := hca.QPMaskPKeyIndex | hca.QPMaskPort
		if typ == hca.QPTypeUD {
			check(t, q.Modify(&at, hca.QPMaskState|ma|hca.QPMaskQKey))
			check(t, q.Modify(&hca.QPAttr{State: hca.QPRTR}, hca.QPMaskState))
			check(t, q.Modify(&hca.QPAttr{State: hca.QPRTS}, hca.QPMaskState|hca.QPMaskSQPSN))
			continue
		}
		check(t, q.Modify(&at, hca.QPMaskState|ma|hca.QPMaskAccess))
		check(t, q.Modify(&hca.QPAttr{State: hca.QPRTR, PathMTU: 5, DestQPN: peer.Num(), AH: hca.AHAttr{DLID: 1, Port: 1}, MaxDestRdAtomic: 4, MinRNRTimer: 12},
			hca.QPMaskState|hca.QPMaskAV|hca.QPMaskPathMTU|hca.QPMaskDestQPN|hca.QPMaskRQPSN|hca.QPMaskMaxDestRdAtomic|hca.QPMaskMinRNRTimer))
		check(t, q.Modify(&hca.QPAttr{State: hca.QPRTS, Timeout: 14, RetryCnt: 7, RNRRetry: 7, MaxRdAtomic: 4},
			hca.QPMaskState|hca.QPMaskTimeout|hca.QPMaskRetryCnt|hca.QPMaskRNRRetry|hca.QPMaskSQPSN|hca.QPMaskMaxRdAtomic))
	}
}

// loopMsg is one message's whole way: posts, runs and polls. Nothing escapes per
// call: the requests are made once.
type loopMsg struct {
	a, b *client
	send []hca.SendWR
	recv []hca.RecvWR
	wc   []hca.WC
}

func newLoop(t testing.TB, typ hca.QPType, op hca.SendOpcode, n int) *loopMsg {
	d := device(t, loop.New(), 1)
	a, b := newClient(t, d, typ, 1<<20), newClient(t, d, typ, 1<<20)
	connect(t, a, b, typ)
	l := &loopMsg{a: a, b: b, wc: make([]hca.WC, 4)}
	l.send = []hca.SendWR{{ID: 1, Opcode: op, Flags: hca.SendSignaled, RemoteAddr: flatBase, RKey: b.mr.RKey(),
		SGE: []hca.SGE{{Addr: flatBase, Length: uint32(n), LKey: a.mr.LKey()}}}}
	if op == hca.OpSend {
		l.recv = []hca.RecvWR{{ID: 2, SGE: []hca.SGE{{Addr: flatBase, Length: uint32(n + 40), LKey: b.mr.LKey()}}}}
	}
	if typ == hca.QPTypeUD {
		ah, err := a.pd.CreateAH(hca.AHAttr{DLID: 1, Port: 1})
		check(t, err)
		l.send[0].AH, l.send[0].RemoteQPN, l.send[0].RemoteQKey = ah, b.qp.Num(), 5
	}
	return l
}

func (l *loopMsg) step(t testing.TB) {
	if l.recv != nil {
		if _, err := l.b.qp.PostRecv(l.recv); err != nil {
			t.Fatal(err)
		}
		l.b.qp.Run()
	}
	if _, err := l.a.qp.PostSend(l.send); err != nil {
		t.Fatal(err)
	}
	l.a.qp.Run()
	if l.a.cq.Poll(l.wc) != 1 || l.wc[0].Status != 0 {
		t.Fatalf("send: %+v", l.wc[0])
	}
	if l.recv != nil && (l.b.cq.Poll(l.wc) != 1 || l.wc[0].Status != 0) {
		t.Fatalf("receive: %+v", l.wc[0])
	}
}

var loops = []struct {
	name string
	typ  hca.QPType
	op   hca.SendOpcode
	n    int
}{
	{"RCSend64", hca.QPTypeRC, hca.OpSend, 64},
	{"RCSend64K", hca.QPTypeRC, hca.OpSend, 65536},
	{"RCWrite64", hca.QPTypeRC, hca.OpRDMAWrite, 64},
	{"RCWrite64K", hca.QPTypeRC, hca.OpRDMAWrite, 65536},
	{"RCRead64", hca.QPTypeRC, hca.OpRDMARead, 64},
	{"RCRead64K", hca.QPTypeRC, hca.OpRDMARead, 65536},
	{"RCFetchAdd", hca.QPTypeRC, hca.OpAtomicFetchAdd, 8},
	{"UCSend64", hca.QPTypeUC, hca.OpSend, 64},
	{"UDSend64", hca.QPTypeUD, hca.OpSend, 64},
}

func BenchmarkMessage(b *testing.B) {
	for _, c := range loops {
		b.Run(c.name, func(b *testing.B) {
			l := newLoop(b, c.typ, c.op, c.n)
			b.SetBytes(int64(c.n))
			b.ReportAllocs()
			for b.Loop() {
				l.step(b)
			}
		})
	}
}

// BenchmarkParallel has one connected pair per goroutine: nothing global may
// slow them.
func BenchmarkParallel(b *testing.B) {
	d := device(b, loop.New(), 1)
	b.SetBytes(64)
	b.RunParallel(func(pb *testing.PB) {
		x, y := newClient(b, d, hca.QPTypeRC, 1<<16), newClient(b, d, hca.QPTypeRC, 1<<16)
		connect(b, x, y, hca.QPTypeRC)
		l := &loopMsg{a: x, b: y, wc: make([]hca.WC, 4),
			send: []hca.SendWR{{Opcode: hca.OpSend, Flags: hca.SendSignaled, SGE: []hca.SGE{{Addr: flatBase, Length: 64, LKey: x.mr.LKey()}}}},
			recv: []hca.RecvWR{{SGE: []hca.SGE{{Addr: flatBase, Length: 64, LKey: y.mr.LKey()}}}},
		}
		for pb.Next() {
			l.step(b)
		}
	})
}

func TestNoAllocs(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop values at random")
	}
	for _, c := range loops {
		t.Run(c.name, func(t *testing.T) {
			l := newLoop(t, c.typ, c.op, c.n)
			for range 300 { // the rings grow, the pools fill
				l.step(t)
			}
			if n := testing.AllocsPerRun(2000, func() { l.step(t) }); n != 0 {
				t.Errorf("%v allocations per message", n)
			}
		})
	}
}
