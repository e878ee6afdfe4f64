package soft_test

import (
	"fmt"
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
	cq  hca.CQ
	qp  hca.QP
	mr  hca.MR
	mem *flat
	pd  hca.PD
	srq hca.SRQ    // of an XRC target
	way hca.AHAttr // to the port itself
}

func newClient(t testing.TB, d hca.Device, typ hca.QPType, size int) *client {
	c := &client{way: selfPath(t, d)}
	ctx, err := d.AllocUContext(nil)
	check(t, err)
	c.pd, err = ctx.AllocPD()
	check(t, err)
	c.cq, err = ctx.CreateCQ(hca.CQInit{Entries: 256})
	check(t, err)
	m := make(flat, size)
	c.mem = &m
	c.mr, err = c.pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: uint64(size), IOVA: flatBase, Access: 15})
	check(t, err)
	in := hca.QPInit{Type: typ, SendCQ: c.cq, RecvCQ: c.cq,
		Cap: hca.QPCap{MaxSendWR: 128, MaxRecvWR: 128, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInline: 64}}
	create := c.pd.CreateQP
	switch typ {
	case hca.QPTypeXRCIni:
		in.RecvCQ = nil
	case hca.QPTypeXRCTgt:
		x, err := d.AllocXRCD()
		check(t, err)
		t.Cleanup(func() { check(t, x.Close()) })
		c.srq, err = c.pd.CreateSRQ(hca.SRQInit{MaxWR: 128, MaxSGE: 2, XRCD: x, CQ: c.cq})
		check(t, err)
		create = x.CreateQP
	}
	c.qp, err = create(in)
	check(t, err)
	t.Cleanup(func() {
		check(t, c.qp.Close())
		if c.srq != nil {
			check(t, c.srq.Close())
		}
		check(t, c.mr.Close())
		check(t, c.cq.Close())
		check(t, c.pd.Close())
		check(t, ctx.Close())
	})
	return c
}

// selfPath is the way from a port to itself.
func selfPath(t testing.TB, d hca.Device) hca.AHAttr {
	t.Helper()
	port, err := d.Port(1)
	check(t, err)
	if port.LinkLayer == hca.LinkInfiniBand {
		return hca.AHAttr{DLID: port.LID, Port: 1}
	}
	gid, err := d.GID(1, 1)
	check(t, err)
	return hca.AHAttr{Port: 1, IsGlobal: true, SGIDIndex: 1, DGID: gid}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func connect(t testing.TB, a, b *client, typ hca.QPType) {
	t.Helper()
	connectAt(t, a, b, typ, 5, 0)
}

// connectAt is connect with a path MTU (enum ib_mtu) and a first PSN.
func connectAt(t testing.TB, a, b *client, typ hca.QPType, mtu hca.MTU, psn uint32) {
	t.Helper()
	for _, p := range [][2]*client{{a, b}, {b, a}} {
		q, peer := p[0].qp, p[1].qp
		at := hca.QPAttr{State: hca.QPInitState, Port: 1, Access: 15, QKey: 5}
		ma := hca.QPMaskPKeyIndex | hca.QPMaskPort
		if typ == hca.QPTypeUD {
			check(t, q.Modify(&at, hca.QPMaskState|ma|hca.QPMaskQKey))
			check(t, q.Modify(&hca.QPAttr{State: hca.QPRTR}, hca.QPMaskState))
			check(t, q.Modify(&hca.QPAttr{State: hca.QPRTS, SQPSN: psn}, hca.QPMaskState|hca.QPMaskSQPSN))
			continue
		}
		check(t, q.Modify(&at, hca.QPMaskState|ma|hca.QPMaskAccess))
		toRTR := hca.QPMaskState | hca.QPMaskAV | hca.QPMaskPathMTU | hca.QPMaskDestQPN | hca.QPMaskRQPSN
		toRTS := hca.QPMaskState | hca.QPMaskSQPSN
		_, in := q.Query()
		if in.Type == hca.QPTypeRC || in.Type == hca.QPTypeXRCTgt {
			toRTR |= hca.QPMaskMaxDestRdAtomic | hca.QPMaskMinRNRTimer
		}
		switch in.Type {
		case hca.QPTypeRC, hca.QPTypeXRCIni:
			toRTS |= hca.QPMaskTimeout | hca.QPMaskRetryCnt | hca.QPMaskRNRRetry | hca.QPMaskMaxRdAtomic
		case hca.QPTypeXRCTgt:
			toRTS |= hca.QPMaskTimeout
		}
		check(t, q.Modify(&hca.QPAttr{State: hca.QPRTR, PathMTU: mtu, RQPSN: psn, DestQPN: peer.Num(), AH: p[0].way, MaxDestRdAtomic: 4, MinRNRTimer: 12}, toRTR))
		check(t, q.Modify(&hca.QPAttr{State: hca.QPRTS, SQPSN: psn, Timeout: 14, RetryCnt: 7, RNRRetry: 7, MaxRdAtomic: 4}, toRTS))
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
	return newLoopOn(t, device(t, loop.New(hca.LinkInfiniBand), 1), typ, op, n)
}

func newLoopOn(t testing.TB, d hca.Device, typ hca.QPType, op hca.SendOpcode, n int) *loopMsg {
	peer := typ
	if typ == hca.QPTypeXRCIni {
		peer = hca.QPTypeXRCTgt
	}
	a, b := newClient(t, d, typ, 1<<20), newClient(t, d, peer, 1<<20)
	connect(t, a, b, typ)
	l := &loopMsg{a: a, b: b, wc: make([]hca.WC, 4)}
	l.send = []hca.SendWR{{ID: 1, Opcode: op, Flags: hca.SendSignaled, RemoteAddr: flatBase, RKey: b.mr.RKey(),
		SGE: []hca.SGE{{Addr: flatBase, Length: uint32(n), LKey: a.mr.LKey()}}}}
	if op == hca.OpSend {
		l.recv = []hca.RecvWR{{ID: 2, SGE: []hca.SGE{{Addr: flatBase, Length: uint32(n + 40), LKey: b.mr.LKey()}}}}
	}
	if b.srq != nil {
		l.send[0].RemoteSRQN = b.srq.Num()
	}
	if typ == hca.QPTypeUD {
		ah, err := a.pd.CreateAH(a.way)
		check(t, err)
		l.send[0].AH, l.send[0].RemoteQPN, l.send[0].RemoteQKey = ah, b.qp.Num(), 5
	}
	return l
}

func (l *loopMsg) step(t testing.TB) {
	if l.recv != nil {
		var q interface {
			PostRecv([]hca.RecvWR) (int, error)
			Run()
		} = l.b.qp
		if l.b.srq != nil {
			q = l.b.srq
		}
		if _, err := q.PostRecv(l.recv); err != nil {
			t.Fatal(err)
		}
		q.Run()
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
	{"RCMaskedFetchAdd", hca.QPTypeRC, hca.OpMaskedAtomicFetchAdd, 8},
	{"UCSend64", hca.QPTypeUC, hca.OpSend, 64},
	{"UDSend64", hca.QPTypeUD, hca.OpSend, 64},
	{"XRCSend64", hca.QPTypeXRCIni, hca.OpSend, 64},
	{"XRCWrite64K", hca.QPTypeXRCIni, hca.OpRDMAWrite, 65536},
	{"XRCFetchAdd", hca.QPTypeXRCIni, hca.OpAtomicFetchAdd, 8},
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

// told is a handler that arms its CQ again.
type told struct{ cq hca.CQ }

func (h *told) Completion()           { h.cq.ReqNotify(hca.NotifyNextComp) }
func (h *told) CQEvent(hca.EventType) {}

// moderate gives l's receiver a CQ with a handler, moderated or not.
func (l *loopMsg) moderate(t testing.TB, d hca.Device, count, period uint16) {
	ctx, err := d.AllocUContext(nil)
	check(t, err)
	h := &told{}
	h.cq, err = ctx.CreateCQ(hca.CQInit{Entries: 256, Handler: h})
	check(t, err)
	check(t, h.cq.Modify(count, period))
	own := l.b.cq
	check(t, l.b.qp.Close())
	l.b.cq = h.cq
	l.b.qp, err = l.b.pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: h.cq, RecvCQ: h.cq,
		Cap: hca.QPCap{MaxSendWR: 128, MaxRecvWR: 128, MaxSendSGE: 2, MaxRecvSGE: 2}})
	check(t, err)
	check(t, l.a.qp.Modify(&hca.QPAttr{State: hca.QPReset}, hca.QPMaskState))
	connect(t, l.a, l.b, hca.QPTypeRC)
	h.cq.ReqNotify(hca.NotifyNextComp)
	t.Cleanup(func() { check(t, own.Close()); check(t, ctx.Close()) }) // the QP and its CQ are newClient's to close
}

var moderations = []struct {
	name          string
	count, period uint16
}{{"None", 0, 0}, {"Count16", 16, 0}, {"Both", 16, 1000}, {"Period", 0, 10}}

// BenchmarkNotify is RCSend64 with a receiver that is told of completions.
func BenchmarkNotify(b *testing.B) {
	for _, c := range moderations {
		b.Run(c.name, func(b *testing.B) {
			d := device(b, loop.New(hca.LinkInfiniBand), 1)
			l := newLoopOn(b, d, hca.QPTypeRC, hca.OpSend, 64)
			l.moderate(b, d, c.count, c.period)
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
	d := device(b, loop.New(hca.LinkInfiniBand), 1)
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
	for _, link := range []hca.LinkLayer{hca.LinkInfiniBand, hca.LinkEthernet} {
		for _, c := range loops {
			t.Run(fmt.Sprintf("%v/%s", link, c.name), func(t *testing.T) {
				l := newLoopOn(t, device(t, loop.New(link), 1), c.typ, c.op, c.n)
				for range 300 { // the rings grow, the pools fill
					l.step(t)
				}
				if n := testing.AllocsPerRun(2000, func() { l.step(t) }); n != 0 {
					t.Errorf("%v allocations per message", n)
				}
			})
		}
	}
	for _, c := range moderations {
		t.Run("Notify"+c.name, func(t *testing.T) {
			d := device(t, loop.New(hca.LinkInfiniBand), 1)
			l := newLoopOn(t, d, hca.QPTypeRC, hca.OpSend, 64)
			l.moderate(t, d, c.count, c.period)
			for range 300 {
				l.step(t)
			}
			if n := testing.AllocsPerRun(2000, func() { l.step(t) }); n != 0 {
				t.Errorf("%v allocations per message", n)
			}
		})
	}
}
