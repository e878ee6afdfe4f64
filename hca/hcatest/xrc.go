package hcatest

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var xrcCases = []testCase{
	{"XRCObjects", needs(hca.OpXRC, testXRCObjects)},
	{"Row22XRCMatrix", needs(hca.OpXRC, testXRCMatrix)},
	{"XRCPosts", needs(hca.OpXRC, testXRCPosts)},
	{"XRCSend", needs(hca.OpXRC, testXRCSend)},
	{"XRCOneSided", needs(hca.OpXRC, testXRCOneSided)},
	{"XRCManySRQs", needs(hca.OpXRC, testXRCManySRQs)},
	{"XRCProtection", needs(hca.OpXRC, testXRCProtection)},
	{"XRCWrongSRQ", needs(hca.OpXRC, testXRCWrongSRQ)},
	{"XRCWaits", needs(hca.OpXRC, testXRCWaits)},
	{"XRCGoes", needs(hca.OpXRC, testXRCGoes)},
	{"Row35XRCBlocked", needs(hca.OpXRC, testXRCBlocked)},
	{"Row11XRCInTraffic", needs(hca.OpXRC, testXRCInTraffic)},
}

func newXRCD(t testing.TB, d hca.Device) hca.XRCD {
	t.Helper()
	x, err := d.AllocXRCD()
	must(t, err)
	t.Cleanup(func() { must(t, x.Close()) })
	return x
}

func iniOpts() opts { return defaults().with(func(o *opts) { o.typ = ini }) }

func tgtOpts() opts {
	return defaults().with(func(o *opts) { o.typ, o.srq = tgt, &hca.SRQInit{MaxWR: 64, MaxSGE: 4} })
}

// xrcPair is an initiator and a target with an SRQ in its domain.
func xrcPair(t testing.TB, p Pair) (a, b *end) {
	t.Helper()
	return pairOf(t, p, iniOpts(), tgtOpts())
}

// sibling is one more client of b's domain: an SRQ in a PD of its own.
func sibling(t testing.TB, p Pair, b *end) *end {
	t.Helper()
	return newEnd(t, p.B, tgtOpts().with(func(o *opts) { o.xrcd = b.xrcd }))
}

func testXRCObjects(t *testing.T, p Pair) {
	e := newEnd(t, p.A, tgtOpts())
	srq := hca.SRQInit{MaxWR: 4, MaxSGE: 1}
	for name, f := range map[string]func(*hca.SRQInit){
		"no CQ":   func(in *hca.SRQInit) { in.XRCD = e.xrcd },
		"no XRCD": func(in *hca.SRQInit) { in.CQ = e.rcq },
	} {
		in := srq
		f(&in)
		if _, err := e.pd.CreateSRQ(in); err == nil {
			t.Fatalf("%s: no error", name)
		} else {
			wantErrno(t, err, unix.EINVAL)
		}
	}
	if p.A != p.B {
		o := newEnd(t, p.B, tgtOpts())
		for _, in := range []hca.SRQInit{{XRCD: o.xrcd, CQ: e.rcq}, {XRCD: e.xrcd, CQ: o.rcq}} {
			in.MaxWR, in.MaxSGE = 4, 1
			_, err := e.pd.CreateSRQ(in)
			wantErrno(t, err, unix.EINVAL)
		}
	}
	seen := map[uint32]bool{e.srq.Num(): true}
	for range 1000 {
		in := srq
		in.XRCD, in.CQ = e.xrcd, e.rcq
		s, err := e.pd.CreateSRQ(in)
		must(t, err)
		if n := s.Num(); n == 0 || n >= 1<<24 || seen[n] {
			t.Fatalf("SRQ number %#x", n)
		}
		seen[s.Num()] = true
		must(t, s.Close())
	}
	// Each type where it belongs, with what belongs to it.
	for name, in := range map[string]hca.QPInit{
		"target in a PD":           {Type: tgt, SendCQ: e.scq, RecvCQ: e.rcq},
		"plain with an XRC SRQ":    {Type: rc, SendCQ: e.scq, RecvCQ: e.rcq, SRQ: e.srq},
		"initiator receives":       {Type: ini, SendCQ: e.scq, RecvCQ: e.rcq},
		"initiator with an SRQ":    {Type: ini, SendCQ: e.scq, SRQ: e.srq},
		"initiator without a CQ":   {Type: ini},
		"initiator with no queues": {Type: ini, SendCQ: e.scq, Cap: hca.QPCap{}},
	} {
		if name != "initiator with no queues" {
			in.Cap = e.o.cap
		}
		if _, err := e.pd.CreateQP(in); err == nil {
			t.Fatalf("%s: no error", name)
		} else {
			wantErrno(t, err, unix.EINVAL)
		}
	}
	for _, typ := range []hca.QPType{rc, uc, ud, ini} {
		_, err := e.xrcd.CreateQP(hca.QPInit{Type: typ, SendCQ: e.scq, RecvCQ: e.rcq, Cap: e.o.cap})
		wantErrno(t, err, unix.EINVAL)
	}
	if _, in := e.qp.Query(); in.Type != tgt || in.SendCQ != nil || in.RecvCQ != nil || in.SRQ != nil {
		t.Errorf("target is %+v", in)
	}
	i := newEnd(t, p.A, iniOpts())
	if _, in := i.qp.Query(); in.Type != ini || in.SendCQ != i.scq || in.RecvCQ != nil || in.SRQ != nil || in.Cap.MaxRecvWR != 0 {
		t.Errorf("initiator is %+v", in)
	}
}

func testXRCMatrix(t *testing.T, p Pair) { matrix(t, p, ini, tgt) }

// testXRCPosts: nothing can be posted to a target, no receive to an initiator.
func testXRCPosts(t *testing.T, p Pair) {
	for _, s := range []hca.QPState{rst, inS, rtr, rts, sqd, errS} {
		b := bring(t, p, tgt, s)
		wantErrno(t, errOf(b.qp.PostSend([]hca.SendWR{b.send(1, 0, 8)})), unix.EINVAL)
		wantErrno(t, errOf(b.qp.PostRecv([]hca.RecvWR{{ID: 1}})), unix.EINVAL)
		b.qp.Run()
		a := bring(t, p, ini, s)
		wantErrno(t, errOf(a.qp.PostRecv([]hca.RecvWR{{ID: 1}})), unix.EINVAL)
		err := errOf(a.qp.PostSend([]hca.SendWR{a.send(2, 0, 8)}))
		if s == rst || s == inS || s == rtr {
			wantErrno(t, err, unix.EINVAL)
			continue
		}
		must(t, err)
		a.qp.Run()
		if s == errS {
			one(t, a.scq, 2, hca.WCWRFlushErr)
		}
	}
}

func testXRCSend(t *testing.T, p Pair) {
	a, b := xrcPair(t, p)
	b.rcq.ReqNotify(hca.NotifySolicited)
	for i, n := range sizes {
		a.mem.Set(0, Pattern(i, n))
		b.mem.Set(0, make([]byte, n+1))
		b.postRecv(uint64(100+i), b.sge(0, n+1))
		w := a.send(uint64(i), 0, n)
		w.Opcode, w.Imm, w.Flags = hca.OpSendImm, uint32(i), w.Flags|hca.SendSolicited
		a.postSend(w)
		one(t, a.scq, uint64(i), hca.WCSuccess)
		wc := one(t, b.rcq, uint64(100+i), hca.WCSuccess)
		if wc.Opcode != hca.WCRecv || int(wc.ByteLen) != n || wc.QPN != b.qp.Num() || wc.SrcQP != a.qp.Num() ||
			wc.Flags != hca.WCWithImm || wc.Imm != uint32(i) || wc.SLID != a.lid {
			t.Errorf("receive completion %+v", wc)
		}
		equal(t, b.mem.Get(0, n+1), append(Pattern(i, n), 0))
	}
	signal(t, b.rev.comp, "completion")
	// The errors of a receive are a connected QP's.
	b.postRecv(1, b.sge(0, 4))
	a.postSend(a.send(2, 0, 8))
	one(t, a.scq, 2, hca.WCRemInvReqErr)
	if wc := one(t, b.rcq, 1, hca.WCLocLenErr); wc.QPN != b.qp.Num() {
		t.Errorf("receive completion %+v", wc)
	}
	if a.state() != errS || b.state() != errS {
		t.Errorf("states %d and %d", a.state(), b.state())
	}
}

func testXRCOneSided(t *testing.T, p Pair) {
	a, b := xrcPair(t, p)
	for i, n := range []int{0, 1, 4096, 70000} {
		a.mem.Set(0, Pattern(i, n))
		a.postSend(a.rdma(hca.OpRDMAWrite, 1, 0, b, 64, n))
		one(t, a.scq, 1, hca.WCSuccess)
		equal(t, b.mem.Get(64, n), Pattern(i, n))
		a.postSend(a.rdma(hca.OpRDMARead, 2, 200000, b, 64, n))
		one(t, a.scq, 2, hca.WCSuccess)
		equal(t, a.mem.Get(200000, n), Pattern(i, n))
		none(t, b.rcq)
		b.postRecv(3)
		w := a.rdma(hca.OpRDMAWriteImm, 4, 0, b, 100000, n)
		w.Imm = 77
		a.postSend(w)
		one(t, a.scq, 4, hca.WCSuccess)
		wc := one(t, b.rcq, 3, hca.WCSuccess)
		if wc.Opcode != hca.WCRecvImm || wc.Imm != 77 || int(wc.ByteLen) != n || wc.QPN != b.qp.Num() {
			t.Errorf("completion %+v", wc)
		}
		equal(t, b.mem.Get(100000, n), Pattern(i, n))
	}
	b.mem.Set(0, word(5))
	w := a.rdma(hca.OpAtomicFetchAdd, 5, 8, b, 0, 8)
	w.CompareAdd = 3
	a.postSend(w)
	one(t, a.scq, 5, hca.WCSuccess)
	equal(t, a.mem.Get(8, 8), word(5))
	w = a.rdma(hca.OpAtomicCmpSwap, 6, 8, b, 0, 8)
	w.CompareAdd, w.Swap = 8, 9
	a.postSend(w)
	one(t, a.scq, 6, hca.WCSuccess)
	equal(t, b.mem.Get(0, 8), word(9))
	// What the target QP does not allow.
	for _, c := range []struct {
		op  hca.SendOpcode
		acc hca.Access
	}{
		{hca.OpRDMAWrite, hca.AccessRemoteWrite}, {hca.OpRDMARead, hca.AccessRemoteRead}, {hca.OpAtomicFetchAdd, hca.AccessRemoteAtomic},
	} {
		a, b := pairOf(t, p, iniOpts(), tgtOpts().with(func(o *opts) { o.access &^= c.acc }))
		a.postSend(a.rdma(c.op, 1, 0, b, 0, 8))
		one(t, a.scq, 1, hca.WCRemInvReqErr)
		event(t, b.qev.ev, hca.EventQPReqErr)
	}
}

// testXRCManySRQs: one connection reaches every SRQ of the domain, each with its
// own client's memory and CQ.
func testXRCManySRQs(t *testing.T, p Pair) {
	a, b := xrcPair(t, p)
	ends := []*end{b, sibling(t, p, b), sibling(t, p, b)}
	for round := range 5 {
		for i, e := range ends {
			id := uint64(10*round + i)
			a.mem.Set(0, Pattern(int(id), 64))
			e.postRecv(id, e.sge(64*i, 64))
			w := a.send(id, 0, 64)
			w.RemoteSRQN = e.srq.Num()
			a.postSend(w)
			one(t, a.scq, id, hca.WCSuccess)
			wc := one(t, e.rcq, id, hca.WCSuccess)
			if wc.QPN != b.qp.Num() {
				t.Errorf("completion %+v", wc)
			}
			equal(t, e.mem.Get(64*i, 64), Pattern(int(id), 64))
			w = a.rdma(hca.OpRDMAWrite, id, 0, e, 5000, 64)
			w.RemoteSRQN = e.srq.Num()
			a.postSend(w)
			one(t, a.scq, id, hca.WCSuccess)
			equal(t, e.mem.Get(5000, 64), Pattern(int(id), 64))
		}
	}
}

// testXRCProtection: the PD of the SRQ that a request names is the one that
// counts, for receives and for remote keys.
func testXRCProtection(t *testing.T, p Pair) {
	for _, op := range []hca.SendOpcode{hca.OpRDMAWrite, hca.OpRDMARead, hca.OpAtomicFetchAdd} {
		a, b := xrcPair(t, p)
		o := sibling(t, p, b)
		a.postSend(a.rdma(op, 1, 0, o, 0, 8)) // o's key, b's SRQ
		one(t, a.scq, 1, hca.WCRemAccessErr)
		event(t, b.qev.ev, hca.EventQPAccessErr)
		if n := o.mem.calls.Load(); n != 0 || b.state() != errS {
			t.Errorf("%d accesses, target in state %d", n, b.state())
		}
	}
	a, b := xrcPair(t, p)
	o := sibling(t, p, b)
	b.postRecv(1, o.sge(0, 8))
	a.postSend(a.send(2, 0, 8))
	one(t, a.scq, 2, hca.WCRemOpErr)
	one(t, b.rcq, 1, hca.WCLocProtErr)
}

// testXRCWrongSRQ: a number that names no SRQ of the domain fails the request
// and the connection, whatever the request is.
func testXRCWrongSRQ(t *testing.T, p Pair) {
	for name, f := range map[string]func(b *end) uint32{
		"none":         func(*end) uint32 { return 0 },
		"unknown":      func(b *end) uint32 { return b.srq.Num() ^ 1<<20 },
		"too large":    func(b *end) uint32 { return b.srq.Num() | 1<<24 },
		"other domain": func(*end) uint32 { return newEnd(t, p.B, tgtOpts()).srq.Num() },
		"closed": func(b *end) uint32 {
			s, err := b.pd.CreateSRQ(hca.SRQInit{MaxWR: 1, MaxSGE: 1, XRCD: b.xrcd, CQ: b.rcq})
			must(t, err)
			must(t, s.Close())
			return s.Num()
		},
	} {
		for _, op := range []hca.SendOpcode{hca.OpSend, hca.OpRDMAWrite, hca.OpRDMARead, hca.OpAtomicFetchAdd} {
			a, b := xrcPair(t, p)
			b.postRecv(1, b.sge(0, 8))
			w := a.rdma(op, 2, 0, b, 0, 8)
			w.RemoteSRQN = f(b)
			a.postSend(w, a.send(3, 0, 8))
			if wc := one(t, a.scq, 2, hca.WCRemInvReqErr); wc.Status != hca.WCRemInvReqErr {
				t.Errorf("%s: %+v", name, wc)
			}
			one(t, a.scq, 3, hca.WCWRFlushErr)
			event(t, b.qev.ev, hca.EventQPAccessErr)
			if a.state() != errS || b.state() != errS {
				t.Errorf("%s: states %d and %d", name, a.state(), b.state())
			}
			none(t, b.rcq) // the receive stays with the SRQ
		}
	}
}

// testXRCWaits: for a receive, and for the target.
func testXRCWaits(t *testing.T, p Pair) {
	a, b := newEnd(t, p.A, iniOpts()), newEnd(t, p.B, tgtOpts())
	a.srqn = b.srq.Num()
	a.toInit()
	a.toRTR(b)
	a.toRTS()
	a.postSend(a.send(1, 0, 8))
	none(t, a.scq)
	b.toInit()
	b.toRTR(a) // a target need not get further
	for i := range uint64(20) {
		b.postRecv(100+i, b.sge(0, 8))
		one(t, a.scq, 1+i, hca.WCSuccess)
		one(t, b.rcq, 100+i, hca.WCSuccess)
		a.postSend(a.send(2+i, 0, 8))
		none(t, a.scq)
	}
	a, b = pairOf(t, p, iniOpts().with(func(o *opts) { o.rnrRetry = 0 }), tgtOpts())
	a.postSend(a.send(1, 0, 8))
	one(t, a.scq, 1, hca.WCRNRRetryExcErr)
	if b.state() != rts {
		t.Errorf("target in state %d", b.state())
	}
}

// testXRCGoes: the target or the SRQ goes while a message waits for its receive.
func testXRCGoes(t *testing.T, p Pair) {
	for name, c := range map[string]struct {
		f  func(b *end)
		st hca.WCStatus
	}{
		"err":   {func(b *end) { b.setState(errS) }, hca.WCRetryExcErr},
		"reset": {func(b *end) { b.setState(rst) }, hca.WCRetryExcErr},
		"close": {func(b *end) { must(t, b.qp.Close()) }, hca.WCRetryExcErr},
		"SRQ":   {func(b *end) { must(t, b.srq.Close()) }, hca.WCRemInvReqErr},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pairOf(t, p, iniOpts().with(func(o *opts) { o.timeout, o.retryCnt = 8, 1 }), tgtOpts())
			a.postSend(a.send(1, 0, 8))
			none(t, a.scq)
			c.f(b)
			one(t, a.scq, 1, c.st)
		})
	}
}

// testXRCBlocked: the memory of an SRQ's client blocks. The others that share the
// target's domain and device go on, everything closes, and nothing is completed
// or copied after it.
func testXRCBlocked(t *testing.T, p Pair) {
	for name, c := range map[string]struct {
		f   func(a, b *end)
		end hca.WCStatus
	}{
		"SRQ":    {func(a, b *end) { must(t, b.srq.Close()) }, hca.WCRemInvReqErr},
		"target": {func(a, b *end) { b.setState(errS) }, hca.WCRetryExcErr},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pairOf(t, p, iniOpts().with(func(o *opts) { o.timeout, o.retryCnt = 8, 1 }), tgtOpts())
			b.postRecv(1, b.sge(0, memSize))
			free := stuck(t, a, b.mem, a.send(2, 0, memSize))
			works(t, p)
			quick(t, name, func() { c.f(a, b) })
			if name == "target" { // its receive is flushed
				one(t, b.rcq, 1, hca.WCWRFlushErr)
			}
			before := b.mem.calls.Load()
			free()
			one(t, a.scq, 2, c.end)
			if n := b.mem.calls.Load(); n != before {
				t.Errorf("%d accesses after it", n-before)
			}
			none(t, b.rcq)
		})
	}
}

// testXRCInTraffic closes SRQs and targets under traffic.
func testXRCInTraffic(t *testing.T, p Pair) {
	inBatches(t, *roundsFlag/10, func(t *testing.T, i int) {
		a, b := xrcPair(t, p)
		stop := repeat(func() {
			_, _ = b.srq.PostRecv([]hca.RecvWR{{SGE: []hca.SGE{b.sge(0, 5000)}}})
			b.srq.Run()
			_, _ = a.qp.PostSend([]hca.SendWR{a.send(1, 0, 5000), a.rdma(hca.OpRDMARead, 2, 0, b, 0, 64)})
			a.qp.Run()
			drain(a.scq)
			drain(b.rcq)
		})
		if i%2 == 0 {
			must(t, b.srq.Close())
			n := b.mem.calls.Load()
			must(t, b.qp.Close())
			if m := b.mem.calls.Load(); m != n {
				t.Errorf("%d accesses after the close of the SRQ", m-n)
			}
		} else {
			must(t, b.qp.Close())
			must(t, b.srq.Close())
		}
		stop()
	})
	works(t, p)
}
