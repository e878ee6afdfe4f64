package hcatest

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var udCases = []testCase{
	{"UDSizes", testUDSizes},
	{"UDGlobal", testUDGlobal},
	{"UDQKey", testUDQKey},
	{"UDDrops", testUDDrops},
	{"UDTooLong", testUDTooLong},
	{"UDErrors", testUDErrors},
	{"UDChecks", testUDChecks},
	{"UDMulticast", testUDMulticast},
	{"UDSRQ", testUDSRQ},
}

const grh = 40

func udOpts() opts {
	return defaults().with(func(o *opts) { o.typ = hca.QPTypeUD })
}

// ah makes an address handle for a peer.
func (e *end) ah(peer *end) hca.AH {
	e.t.Helper()
	h, err := e.pd.CreateAH(e.attrTo(peer))
	must(e.t, err)
	e.t.Cleanup(func() { must(e.t, h.Close()) })
	return h
}

func (e *end) dgram(id uint64, off, n int, peer *end, ah hca.AH) hca.SendWR {
	w := e.send(id, off, n)
	w.AH, w.RemoteQPN, w.RemoteQKey = ah, peer.qp.Num(), testQKey
	return w
}

func testUDSizes(t *testing.T, p Pair) {
	a, b := pair(t, p, udOpts())
	ah := a.ah(b)
	for i, n := range []int{0, 1, 64, 2048, 4095, 4096} {
		a.mem.Set(0, Pattern(i, n))
		b.mem.Set(0, make([]byte, n+grh))
		b.postRecv(1, b.sge(0, n+grh))
		w := a.dgram(2, 0, n, b, ah)
		w.Opcode, w.Imm = hca.OpSendImm, 0xabcd0000+uint32(i)
		a.postSend(w)
		one(t, a.scq, 2, hca.WCSuccess)
		wc := one(t, b.rcq, 1, hca.WCSuccess)
		want := hca.WC{ID: 1, Opcode: hca.WCRecv, ByteLen: uint32(n + grh), Imm: w.Imm, QPN: b.qp.Num(), SrcQP: a.qp.Num(),
			Flags: hca.WCWithImm, SLID: a.lid, SL: 3, Port: 1}
		if a.eth {
			want.Flags, want.SL = hca.WCWithImm|hca.WCGRH, 0
		}
		if wc != want {
			t.Errorf("completion\n%+v, want\n%+v", wc, want)
		}
		equal(t, b.mem.Get(grh, n), Pattern(i, n))
		if !a.eth {
			equal(t, b.mem.Get(0, grh), make([]byte, grh)) // left alone: no GRH came
		}
	}
	// Headers and payload over several pieces, and inline.
	b.postRecv(3, b.sge(0, 10), b.sge(100, 35), b.sge(200, 5), b.sge(300, 50))
	a.postSend(hca.SendWR{ID: 4, Opcode: hca.OpSend, Flags: hca.SendInline | hca.SendSignaled, Inline: Pattern(1, 60),
		AH: ah, RemoteQPN: b.qp.Num(), RemoteQKey: testQKey})
	one(t, a.scq, 4, hca.WCSuccess)
	one(t, b.rcq, 3, hca.WCSuccess)
	got := append(b.mem.Get(130, 5), b.mem.Get(200, 5)...)
	equal(t, append(got, b.mem.Get(300, 50)...), Pattern(1, 60))
}

func testUDGlobal(t *testing.T, p Pair) {
	a, b := pair(t, p, udOpts().with(func(o *opts) { o.global = true }))
	b.postRecv(1, b.sge(0, 200))
	a.postSend(a.dgram(2, 0, 101, b, a.ah(b)))
	one(t, a.scq, 2, hca.WCSuccess)
	wc := one(t, b.rcq, 1, hca.WCSuccess)
	if wc.Flags != hca.WCGRH || wc.ByteLen != 141 {
		t.Errorf("completion %+v", wc)
	}
	if a.eth {
		return // testEthernetHeaders looks at it
	}
	h := b.mem.Get(0, grh)
	if v := binary.BigEndian.Uint32(h); v != 6<<28|0x5a<<20|0x12345 {
		t.Errorf("version, class, label %#x", v)
	}
	if n := binary.BigEndian.Uint16(h[4:]); n != 12+8+104+4 {
		t.Errorf("payload length %d", n)
	}
	if h[6] != 0x1b || h[7] != 9 {
		t.Errorf("next header %#x, hop limit %d", h[6], h[7])
	}
	equal(t, h[8:24], a.gid[:])
	equal(t, h[24:], b.gid[:])
}

func testUDQKey(t *testing.T, p Pair) {
	a, b := pair(t, p, udOpts())
	ah := a.ah(b)
	for _, c := range []struct {
		qkey uint32
		ok   bool
	}{{testQKey, true}, {testQKey + 1, false}, {0, false}, {1 << 31, true} /* the sender's own */, {1<<31 | testQKey, true}} {
		b.postRecv(1, b.sge(0, 100))
		w := a.dgram(2, 0, 8, b, ah)
		w.RemoteQKey = c.qkey
		a.postSend(w)
		one(t, a.scq, 2, hca.WCSuccess)
		if c.ok {
			one(t, b.rcq, 1, hca.WCSuccess)
		} else {
			none(t, b.rcq)
		}
	}
}

// testUDDrops: datagrams that nobody takes are lost, and their sends succeed.
func testUDDrops(t *testing.T, p Pair) {
	a, b := pair(t, p, udOpts())
	ah := a.ah(b)
	a.postSend(a.dgram(1, 0, 8, b, ah)) // no receive
	one(t, a.scq, 1, hca.WCSuccess)
	w := a.dgram(2, 0, 8, b, ah)
	w.RemoteQPN = 0xfffffe
	a.postSend(w)
	one(t, a.scq, 2, hca.WCSuccess)
	to := a.attrTo(b)
	to.DLID = 0xbffe
	if a.eth {
		to.DGID[15]++ // nobody's, but of the same family
	}
	far, err := a.pd.CreateAH(to)
	must(t, err)
	a.postSend(a.dgram(3, 0, 8, b, far))
	must(t, far.Close()) // in use or not: an address handle may go at once
	one(t, a.scq, 3, hca.WCSuccess)
	rcEnd := newEnd(t, p.B, defaults())
	a.postSend(a.dgram(4, 0, 8, rcEnd, ah))
	one(t, a.scq, 4, hca.WCSuccess)
	b.postRecv(5, b.sge(0, 47)) // one byte short: the receive stays for the next
	a.postSend(a.dgram(6, 0, 8, b, ah), a.dgram(7, 0, 7, b, ah))
	one(t, a.scq, 6, hca.WCSuccess)
	one(t, a.scq, 7, hca.WCSuccess)
	if wc := one(t, b.rcq, 5, hca.WCSuccess); wc.ByteLen != 47 {
		t.Errorf("completion %+v", wc)
	}
	none(t, b.rcq)
	if b.state() != rts {
		t.Errorf("state %d", b.state())
	}
	b.setState(errS)
	a.postSend(a.dgram(8, 0, 8, b, ah))
	one(t, a.scq, 8, hca.WCSuccess)
}

func testUDTooLong(t *testing.T, p Pair) {
	a, b := pair(t, p, udOpts())
	ah := a.ah(b)
	b.postRecv(1, b.sge(0, 8192))
	w := a.dgram(2, 0, 4097, b, ah)
	if _, err := a.qp.PostSend([]hca.SendWR{w, a.dgram(3, 0, 8, b, ah)}); err != nil {
		wantErrno(t, err, unix.EINVAL)
		return
	}
	a.qp.Run()
	one(t, a.scq, 2, hca.WCLocLenErr)
	one(t, a.scq, 3, hca.WCWRFlushErr)
	none(t, b.rcq)
	sqeRecovers(t, a, b, func(id uint64) { a.postSend(a.dgram(id, 0, 8, b, ah)) })
}

// sqeRecovers: a QP in SQE still receives, flushes its sends and comes back.
func sqeRecovers(t *testing.T, a, b *end, send func(id uint64)) {
	t.Helper()
	if a.state() != sqe {
		t.Fatalf("state %d, want SQE", a.state())
	}
	send(20)
	one(t, a.scq, 20, hca.WCWRFlushErr)
	a.postRecv(21, a.sge(0, 200))
	back := b.send(22, 0, 8)
	if b.o.typ == ud {
		back.AH, back.RemoteQPN, back.RemoteQKey = b.ah(a), a.qp.Num(), testQKey
	}
	b.postSend(back)
	one(t, b.scq, 22, hca.WCSuccess)
	one(t, a.rcq, 21, hca.WCSuccess)
	a.setState(rts)
	send(23)
	one(t, a.scq, 23, hca.WCSuccess)
	take(t, b.rcq, 1)
}

func testUDErrors(t *testing.T, p Pair) {
	a, b := pair(t, p, udOpts())
	ah := a.ah(b)
	b.postRecv(1, b.sge(0, 100))
	w := a.dgram(2, 0, 8, b, ah)
	w.SGE[0].LKey = 0
	a.postSend(w)
	one(t, a.scq, 2, hca.WCLocProtErr)
	none(t, b.rcq)
	sqeRecovers(t, a, b, func(id uint64) { a.postSend(a.dgram(id, 0, 8, b, ah)) })
	// A receive with a bad key takes its own QP down, and nobody else.
	bad := b.sge(0, 100)
	bad.LKey = 0
	b.postRecv(3, bad)
	a.postSend(a.dgram(4, 0, 8, b, ah))
	one(t, a.scq, 4, hca.WCSuccess)
	one(t, b.rcq, 3, hca.WCLocProtErr)
	if a.state() != rts || b.state() != errS {
		t.Errorf("states %d and %d", a.state(), b.state())
	}
}

func testUDChecks(t *testing.T, p Pair) {
	for name, f := range map[string]func(a, b *end, w *hca.SendWR){
		"no AH":       func(_, _ *end, w *hca.SendWR) { w.AH = nil },
		"AH's PD":     func(a, b *end, w *hca.SendWR) { w.AH = a.foreignAH(b) },
		"write":       func(_, _ *end, w *hca.SendWR) { w.Opcode = hca.OpRDMAWrite },
		"read":        func(_, _ *end, w *hca.SendWR) { w.Opcode = hca.OpRDMARead },
		"atomic":      func(_, _ *end, w *hca.SendWR) { w.Opcode = hca.OpAtomicFetchAdd },
		"send w. inv": func(_, _ *end, w *hca.SendWR) { w.Opcode = hca.OpSendInv },
		"bind":        func(_, _ *end, w *hca.SendWR) { w.Opcode = hca.OpBindMW },
		"local inv":   func(_, _ *end, w *hca.SendWR) { w.Opcode = hca.OpLocalInv },
	} {
		refused(t, p, udOpts(), name, func(a, b *end) hca.SendWR {
			w := a.dgram(1, 0, 8, b, a.ah(b))
			f(a, b, &w)
			return w
		})
	}
}

// foreignAH is an address handle of another PD of the same client.
func (e *end) foreignAH(peer *end) hca.AH {
	e.t.Helper()
	pd, err := e.ctx.AllocPD()
	must(e.t, err)
	h, err := pd.CreateAH(e.attrTo(peer))
	must(e.t, err)
	e.t.Cleanup(func() {
		must(e.t, h.Close())
		must(e.t, pd.Close())
	})
	return h
}

func testUDMulticast(t *testing.T, p Pair) {
	if !p.A.Ops().Has(hca.OpMcast) {
		t.Skip("no multicast")
	}
	group := hca.GID{0xff, 0x12, 0xa0, 0x1b, 15: 7}
	const mlid = 0xc007
	ends := []*end{newEnd(t, p.A, udOpts()), newEnd(t, p.B, udOpts()), newEnd(t, p.A, udOpts()), newEnd(t, p.B, udOpts())}
	for _, e := range ends {
		e.toInit()
		e.toRTR(e)
		e.toRTS()
		e.postRecv(1, e.sge(0, 200))
		e.postRecv(2, e.sge(200, 200))
	}
	a, outsider := ends[0], ends[3]
	for _, e := range ends[:3] {
		must(t, e.qp.AttachMcast(group, mlid))
	}
	ah, err := a.pd.CreateAH(hca.AHAttr{DLID: mlid, Port: 1, IsGlobal: true, DGID: group})
	must(t, err)
	t.Cleanup(func() { must(t, ah.Close()) })
	a.mem.Set(4096, Pattern(1, 100))
	w := a.send(3, 4096, 100)
	w.AH, w.RemoteQPN, w.RemoteQKey = ah, 0xffffff, testQKey
	a.postSend(w)
	one(t, a.scq, 3, hca.WCSuccess)
	for _, e := range ends[1:3] {
		wc := one(t, e.rcq, 1, hca.WCSuccess)
		if wc.Flags&hca.WCGRH == 0 || wc.SrcQP != a.qp.Num() || wc.ByteLen != 140 {
			t.Errorf("completion %+v", wc)
		}
		if !e.eth {
			equal(t, e.mem.Get(24, 16), group[:])
		}
		equal(t, e.mem.Get(grh, 100), Pattern(1, 100))
	}
	none(t, a.rcq) // a sender does not hear itself
	none(t, outsider.rcq)
	must(t, ends[1].qp.DetachMcast(group, mlid))
	must(t, ends[0].qp.DetachMcast(group, mlid)) // sending needs no membership
	a.postSend(w)
	one(t, a.scq, 3, hca.WCSuccess)
	one(t, ends[2].rcq, 2, hca.WCSuccess)
	none(t, ends[1].rcq)
	must(t, ends[2].qp.Close()) // leaves the group
	a.postSend(w)
	one(t, a.scq, 3, hca.WCSuccess)
}

func testUDSRQ(t *testing.T, p Pair) {
	a, b := pairOf(t, p, udOpts(), udOpts().with(func(o *opts) { o.srq = &hca.SRQInit{MaxWR: 8, MaxSGE: 1} }))
	ah := a.ah(b)
	a.postSend(a.dgram(1, 0, 8, b, ah)) // dropped
	one(t, a.scq, 1, hca.WCSuccess)
	b.postRecv(2, b.sge(0, 100))
	none(t, b.rcq)
	a.postSend(a.dgram(3, 0, 8, b, ah))
	one(t, a.scq, 3, hca.WCSuccess)
	one(t, b.rcq, 2, hca.WCSuccess)
}
