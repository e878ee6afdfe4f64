package hcatest

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var rcCases = []testCase{
	{"SendSizes", testSendSizes},
	{"SendSGEs", testSendSGEs},
	{"SendInline", testSendInline},
	{"SendImm", testSendImm},
	{"SendInv", testSendInv},
	{"Signaling", testSignaling},
	{"SmallInputSQDepth", testSQDepth},
	{"RQDepth", testRQDepth},
	{"PostChecks", testPostChecks},
	{"Order", testOrder},
	{"SelfConnected", testSelfConnected},
	{"ManyPairs", testManyPairs},
	{"CommEst", testCommEst},
	{"Counters", testCounters},
}

// sizes has the edges of MTUs, of small messages and of chunks.
var sizes = []int{0, 1, 7, 8, 64, 255, 256, 257, 1023, 1024, 1025, 2049, 4095, 4096, 4097, 8192, 65535, 65536, 65537, 131072, 300001, 524288}

func testSendSizes(t *testing.T, p Pair) {
	for _, global := range []bool{false, true} {
		a, b := pair(t, p, defaults().with(func(o *opts) { o.global = global }))
		for i, n := range sizes {
			a.mem.Set(0, Pattern(i, n))
			b.mem.Set(0, make([]byte, n+1))
			b.postRecv(uint64(100+i), b.sge(0, n+1))
			a.postSend(a.send(uint64(i), 0, n))
			s := one(t, a.scq, uint64(i), hca.WCSuccess)
			r := one(t, b.rcq, uint64(100+i), hca.WCSuccess)
			if s.Opcode != hca.WCSend || s.QPN != a.qp.Num() || int(s.ByteLen) != n {
				t.Errorf("send completion %+v", s)
			}
			if r.Opcode != hca.WCRecv || int(r.ByteLen) != n || r.QPN != b.qp.Num() || r.SrcQP != a.qp.Num() || r.SLID != a.lid || r.Flags != 0 {
				t.Errorf("receive completion %+v", r)
			}
			equal(t, b.mem.Get(0, n+1), append(Pattern(i, n), 0))
		}
	}
}

func testSendSGEs(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for _, unit := range []int{3, 1000, 50000} {
		n := 6 * unit
		data := Pattern(unit, n)
		a.mem.Set(0, make([]byte, memSize))
		b.mem.Set(0, make([]byte, memSize))
		// Pieces of 1, 0, 2 and 3 units go into pieces of 4, 1, 0 and 1.
		a.mem.Set(0, data[:unit])
		a.mem.Set(300000, data[unit:3*unit])
		a.mem.Set(500000, data[3*unit:])
		b.postRecv(1, b.sge(400000, 4*unit), b.sge(7, unit), hca.SGE{}, b.sge(800000, unit))
		w := a.send(2, 0, 0)
		w.SGE = []hca.SGE{a.sge(0, unit), {LKey: 99}, a.sge(300000, 2*unit), a.sge(500000, 3*unit)}
		a.postSend(w)
		one(t, a.scq, 2, hca.WCSuccess)
		one(t, b.rcq, 1, hca.WCSuccess)
		got := append(b.mem.Get(400000, 4*unit), b.mem.Get(7, unit)...)
		equal(t, append(got, b.mem.Get(800000, unit)...), data)
	}
}

func testSendInline(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for _, n := range []int{0, 1, 127, 128} {
		data := Pattern(n, n)
		b.postRecv(1, b.sge(0, 256))
		a.postSend(hca.SendWR{ID: 2, Opcode: hca.OpSend, Flags: hca.SendSignaled | hca.SendInline, Inline: data})
		one(t, a.scq, 2, hca.WCSuccess)
		if wc := one(t, b.rcq, 1, hca.WCSuccess); int(wc.ByteLen) != n {
			t.Errorf("%d bytes came, want %d", wc.ByteLen, n)
		}
		equal(t, b.mem.Get(0, n), data)
		a.postSend(hca.SendWR{ID: 3, Opcode: hca.OpRDMAWrite, Flags: hca.SendSignaled | hca.SendInline, Inline: data,
			RemoteAddr: memBase + 512, RKey: b.mr.RKey()})
		one(t, a.scq, 3, hca.WCSuccess)
		equal(t, b.mem.Get(512, n), data)
	}
	// The bytes are taken when posted.
	buf := []byte("first")
	must(t, errOf(a.qp.PostSend([]hca.SendWR{{ID: 4, Opcode: hca.OpSend, Flags: hca.SendSignaled | hca.SendInline, Inline: buf}})))
	copy(buf, "other")
	b.postRecv(5, b.sge(0, 16))
	a.qp.Run()
	one(t, b.rcq, 5, hca.WCSuccess)
	equal(t, b.mem.Get(0, 5), []byte("first"))
	one(t, a.scq, 4, hca.WCSuccess)
	for _, w := range []hca.SendWR{
		{Opcode: hca.OpSend, Flags: hca.SendInline, Inline: make([]byte, 129)},
		{Opcode: hca.OpSend, Flags: hca.SendInline, Inline: make([]byte, 1<<20)},
		{Opcode: hca.OpSend, Flags: hca.SendInline, SGE: []hca.SGE{{Length: 0xffffffff}, {Length: 0xffffffff}}},
		{Opcode: hca.OpSend, Inline: []byte{1}},
		{Opcode: hca.OpRDMARead, Flags: hca.SendInline, Inline: []byte{1}},
	} {
		if p.Mapped && len(w.Inline) == 1 && w.Opcode == hca.OpSend {
			continue // no such thing can be written
		}
		refused(t, p, defaults(), fmt.Sprintf("%d bytes inline", len(w.Inline)), func(a, b *end) hca.SendWR { return w })
	}
}

func testSendImm(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for _, imm := range []uint32{0, 1, 4194304, 0xffffffff, 0x01020304} {
		b.postRecv(1, b.sge(0, 64))
		w := a.send(2, 0, 32)
		w.Opcode, w.Imm = hca.OpSendImm, imm
		a.postSend(w)
		one(t, a.scq, 2, hca.WCSuccess)
		wc := one(t, b.rcq, 1, hca.WCSuccess)
		if wc.Opcode != hca.WCRecv || wc.Imm != imm || wc.Flags != hca.WCWithImm || wc.ByteLen != 32 {
			t.Errorf("completion %+v", wc)
		}
	}
}

// testSendInv: a region that was registered by its owner cannot be invalidated
// from afar; the receiver fails, as with the kernel's rxe.
func testSendInv(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	b.postRecv(1, b.sge(0, 64))
	w := a.send(2, 0, 8)
	w.Opcode, w.Imm = hca.OpSendInv, b.mr.RKey()
	if _, err := a.qp.PostSend([]hca.SendWR{w}); err != nil {
		wantErrno(t, err, unix.EINVAL) // a device may lack it
		return
	}
	a.qp.Run()
	take(t, a.scq, 1)
	one(t, b.rcq, 1, hca.WCRemInvReqErr)
	if b.state() != errS {
		t.Errorf("state %d", b.state())
	}
}

func testSignaling(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	for i := range 10 {
		b.postRecv(uint64(i), b.sge(0, 8))
	}
	for i := range 9 {
		w := a.send(uint64(i), 0, 8)
		w.Flags = 0
		a.postSend(w)
	}
	take(t, b.rcq, 9)
	none(t, a.scq)
	a.postSend(a.send(9, 0, 8))
	one(t, a.scq, 9, hca.WCSuccess)
	// An error completes though it was not asked for.
	w := a.send(10, 0, 8)
	w.Flags, w.SGE[0].LKey = 0, 0
	a.postSend(w)
	one(t, a.scq, 10, hca.WCLocProtErr)
	// All are signaled when the QP says so.
	a, b = pair(t, p, defaults().with(func(o *opts) { o.sigAll = true }))
	b.postRecv(1, b.sge(0, 8))
	w = a.send(2, 0, 8)
	w.Flags = 0
	a.postSend(w)
	one(t, a.scq, 2, hca.WCSuccess)
}

func testSQDepth(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	depth := int(a.qp.Cap().MaxSendWR)
	var ws []hca.SendWR
	for i := range depth + 3 {
		w := a.send(uint64(i), 0, 8)
		if i != depth-1 {
			w.Flags = 0
		}
		ws = append(ws, w)
	}
	n, err := a.qp.PostSend(ws) // nobody runs them yet
	wantErrno(t, err, unix.ENOMEM)
	if n != depth {
		t.Fatalf("%d posted, want %d", n, depth)
	}
	a.qp.Run()
	for i := range depth {
		b.postRecv(uint64(i), b.sge(0, 8))
	}
	take(t, b.rcq, depth) // the earlier ones run
	one(t, a.scq, uint64(depth-1), hca.WCSuccess)
	// Unsignaled ones have given their places back, again and again.
	for range 5 * depth {
		b.postRecv(0, b.sge(0, 8))
		a.postSend(ws[0])
		take(t, b.rcq, 1)
	}
	none(t, a.scq)
}

func testRQDepth(t *testing.T, p Pair) {
	e := bring(t, p, rc, inS)
	depth := int(e.qp.Cap().MaxRecvWR)
	n, err := e.qp.PostRecv(make([]hca.RecvWR, depth+1))
	wantErrno(t, err, unix.ENOMEM)
	if n != depth {
		t.Fatalf("%d posted, want %d", n, depth)
	}
}

func testPostChecks(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	good := func() hca.SendWR { return a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, 8) }
	for name, f := range map[string]func(*hca.SendWR){
		"opcode":         func(w *hca.SendWR) { w.Opcode = 77 },
		"bind":           func(w *hca.SendWR) { w.Opcode, w.SGE, w.Flags = hca.OpBindMW, nil, hca.SendInline },
		"local inv":      func(w *hca.SendWR) { w.Opcode, w.SGE, w.Flags = hca.OpLocalInv, nil, hca.SendInline },
		"sges":           func(w *hca.SendWR) { w.SGE = make([]hca.SGE, a.qp.Cap().MaxSendSGE+1) },
		"atomic no sge":  func(w *hca.SendWR) { w.Opcode, w.SGE = hca.OpAtomicFetchAdd, nil },
		"atomic too few": func(w *hca.SendWR) { w.Opcode, w.SGE[0].Length = hca.OpAtomicCmpSwap, 7 },
	} {
		refused(t, p, defaults(), name, func(a, b *end) hca.SendWR {
			w := a.rdma(hca.OpRDMAWrite, 1, 0, b, 0, 8)
			f(&w)
			return w
		})
		w := good()
		f(&w)
		n, err := a.qp.PostSend([]hca.SendWR{good(), w, good()})
		a.qp.Run()
		one(t, a.scq, 1, hca.WCSuccess)
		if err == nil && p.Mapped {
			one(t, a.scq, w.ID, hca.WCLocQPOpErr)
			one(t, a.scq, 1, hca.WCWRFlushErr)
			a, b = pair(t, p, defaults())
			continue
		}
		wantErrno(t, err, unix.EINVAL)
		if n != 1 {
			t.Errorf("%s: %d posted", name, n)
		}
	}
	n, err := a.qp.PostRecv([]hca.RecvWR{{ID: 1}, {SGE: make([]hca.SGE, 5)}})
	wantErrno(t, err, unix.EINVAL)
	if n != 1 {
		t.Errorf("%d receives posted", n)
	}
	noRd, onUC := defaults().with(func(o *opts) { o.rd = 0 }), defaults().with(func(o *opts) { o.typ = uc })
	for _, op := range []hca.SendOpcode{hca.OpRDMARead, hca.OpAtomicCmpSwap, hca.OpAtomicFetchAdd} {
		w := func(a, b *end) hca.SendWR { return a.rdma(op, 1, 0, b, 0, 8) }
		refused(t, p, noRd, fmt.Sprintf("opcode %d without resources", op), w)
		refused(t, p, onUC, fmt.Sprintf("opcode %d on UC", op), w)
	}
	refused(t, p, onUC, "invalidate on UC", func(a, b *end) hca.SendWR { return a.rdma(hca.OpSendInv, 1, 0, b, 0, 8) })
}

func testOrder(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	const total = 3000
	done := make(chan struct{})
	go func() { // the receiver, on its own goroutine
		defer close(done)
		next := uint64(0)
		for range 32 {
			b.postRecv(next, b.sge(int(next%32)*64, 64))
			next++
		}
		for i := range uint64(total) {
			wc := take(t, b.rcq, 1)[0]
			if wc.ID != i || wc.Imm != uint32(i) || wc.Status != hca.WCSuccess {
				t.Errorf("receive %d: %+v", i, wc)
				return
			}
			b.postRecv(next, b.sge(int(next%32)*64, 64))
			next++
		}
	}()
	sent, completed := uint64(0), uint64(0)
	for completed < total {
		for sent < total && sent-completed < 48 {
			w := a.send(sent, 0, 64)
			w.Opcode, w.Imm = hca.OpSendImm, uint32(sent)
			a.postSend(w)
			sent++
		}
		if wc := take(t, a.scq, 1)[0]; wc.ID != completed || wc.Status != hca.WCSuccess {
			t.Fatalf("send %d: %+v", completed, wc)
		}
		completed++
	}
	<-done
}

func testSelfConnected(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	e.toInit()
	e.toRTR(e)
	e.toRTS()
	e.mem.Set(0, Pattern(1, 100))
	e.postRecv(1, e.sge(1000, 100))
	e.postSend(e.send(2, 0, 100), e.rdma(hca.OpRDMAWrite, 3, 0, e, 2000, 100))
	one(t, e.rcq, 1, hca.WCSuccess)
	one(t, e.scq, 2, hca.WCSuccess)
	one(t, e.scq, 3, hca.WCSuccess)
	equal(t, e.mem.Get(1000, 100), Pattern(1, 100))
	equal(t, e.mem.Get(2000, 100), Pattern(1, 100))
	w := e.rdma(hca.OpRDMAWrite, 4, 0, e, 0, 8)
	w.RKey++
	e.postSend(w)
	one(t, e.scq, 4, hca.WCRemAccessErr)
}

// testManyPairs has traffic in both directions on many QPs from many goroutines.
func testManyPairs(t *testing.T, p Pair) {
	const pairs, rounds = 8, 400
	done := make(chan struct{}, 2*pairs)
	for i := range pairs {
		a, b := pair(t, p, defaults())
		for _, e := range []*end{a, b} {
			go func() {
				defer func() { done <- struct{}{} }()
				e.mem.Set(0, Pattern(i, 6000))
				for range 16 {
					e.postRecv(0, e.sge(100000, 6000))
				}
				for r := range rounds {
					e.postSend(e.send(uint64(r), 0, 16+r*13%5900))
					one(t, e.scq, uint64(r), hca.WCSuccess)
					take(t, e.rcq, 1)
					e.postRecv(0, e.sge(100000, 6000))
				}
			}()
		}
	}
	for range 2 * pairs {
		<-done
	}
}

func testCommEst(t *testing.T, p Pair) {
	a, b := newEnd(t, p.A, defaults()), newEnd(t, p.B, defaults())
	a.toInit()
	b.toInit()
	b.postRecv(1, b.sge(0, 8))
	b.postRecv(2, b.sge(0, 8))
	a.toRTR(b)
	b.toRTR(a)
	a.toRTS() // b stays in RTR
	a.postSend(a.send(3, 0, 8), a.send(4, 0, 8))
	take(t, b.rcq, 2)
	take(t, a.scq, 2)
	event(t, b.qev.ev, hca.EventCommEst)
	quiet(t, b.qev.ev, "event")
	quiet(t, a.qev.ev, "event")
}

func testCounters(t *testing.T, p Pair) {
	before, err := p.A.Counters(1)
	must(t, err)
	a, b := pair(t, p, defaults())
	b.postRecv(1, b.sge(0, 10000))
	a.postSend(a.send(2, 0, 10000))
	one(t, a.scq, 2, hca.WCSuccess)
	after, err := p.A.Counters(1)
	must(t, err)
	if d := after["port_xmit_data"] - before["port_xmit_data"]; d != 2500 {
		t.Errorf("port_xmit_data rose by %d words", d)
	}
	if d := after["port_xmit_packets"] - before["port_xmit_packets"]; d < 3 {
		t.Errorf("port_xmit_packets rose by %d", d)
	}
	after, err = p.B.Counters(1)
	must(t, err)
	if after["port_rcv_data"] < 2500 {
		t.Errorf("port_rcv_data %d", after["port_rcv_data"])
	}
}
