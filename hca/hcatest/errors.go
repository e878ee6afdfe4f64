package hcatest

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var errorCases = []testCase{
	{"RemoteErrors", testRemoteErrors},
	{"ShortReceive", testShortReceive},
	{"Row10BadReceiveKey", testBadReceiveKey},
	{"Row10LocalAccess", testLocalAccess},
	{"ListBeyondMessage", testListBeyondMessage},
	{"ListBeyondAtomic", testListBeyondAtomic},
	{"MemoryFails", testMemoryFails},
	{"DeregisteredMidway", testDeregistered},
}

// remoteError runs one request that the responder refuses.
func remoteError(t *testing.T, p Pair, o opts, st hca.WCStatus, ev hca.EventType, f func(a, b *end) hca.SendWR) {
	t.Helper()
	a, b := pairOf(t, p, defaults(), o)
	b.postRecv(50, b.sge(0, 64))
	a.postRecv(51, a.sge(0, 64))
	a.postSend(f(a, b), a.send(2, 0, 8))
	one(t, a.scq, 1, st)
	one(t, a.scq, 2, hca.WCWRFlushErr)
	one(t, a.rcq, 51, hca.WCWRFlushErr)
	if a.state() != errS {
		t.Errorf("requester in state %d", a.state())
	}
	one(t, b.rcq, 50, hca.WCWRFlushErr)
	if b.state() != errS {
		t.Errorf("responder in state %d", b.state())
	}
	event(t, b.qev.ev, ev)
	quiet(t, b.rev.ev, "CQ event")
}

func testRemoteErrors(t *testing.T, p Pair) {
	noAcc := func(x hca.Access) opts { return defaults().with(func(o *opts) { o.access &^= x }) }
	ops := []struct {
		op  hca.SendOpcode
		acc hca.Access
	}{
		{hca.OpRDMAWrite, hca.AccessRemoteWrite}, {hca.OpRDMAWriteImm, hca.AccessRemoteWrite},
		{hca.OpRDMARead, hca.AccessRemoteRead},
		{hca.OpAtomicCmpSwap, hca.AccessRemoteAtomic}, {hca.OpAtomicFetchAdd, hca.AccessRemoteAtomic},
	}
	for _, c := range ops {
		req := func(a, b *end) hca.SendWR { return a.rdma(c.op, 1, 0, b, 0, 8) }
		// The QP does not allow it.
		remoteError(t, p, noAcc(c.acc), hca.WCRemInvReqErr, hca.EventQPReqErr, req)
		// The region does not allow it.
		remoteError(t, p, defaults(), hca.WCRemAccessErr, hca.EventQPAccessErr, func(a, b *end) hca.SendWR {
			w := req(a, b)
			acc := allAcc &^ c.acc
			if acc&hca.AccessNeedsLocal == 0 {
				acc |= hca.AccessLocalWrite
			}
			w.RKey = b.reg(b.mem, acc).RKey()
			return w
		})
		// No such key; a key of another PD; a key of the requester's own.
		for _, key := range []func(a, b *end) uint32{
			func(a, b *end) uint32 { return 0 },
			func(a, b *end) uint32 { return b.mr.RKey() ^ 0x80 },
			func(a, b *end) uint32 { return newEnd(t, p.B, defaults()).mr.RKey() },
		} {
			remoteError(t, p, defaults(), hca.WCRemAccessErr, hca.EventQPAccessErr, func(a, b *end) hca.SendWR {
				w := req(a, b)
				w.RKey = key(a, b)
				return w
			})
		}
		// Past the end.
		remoteError(t, p, defaults(), hca.WCRemAccessErr, hca.EventQPAccessErr, func(a, b *end) hca.SendWR {
			w := req(a, b)
			w.RemoteAddr = memBase + memSize // 8-byte aligned
			return w
		})
	}
	// Misaligned atomics, and a responder without resources.
	for _, op := range []hca.SendOpcode{hca.OpAtomicCmpSwap, hca.OpAtomicFetchAdd} {
		remoteError(t, p, defaults(), hca.WCRemInvReqErr, hca.EventQPReqErr, func(a, b *end) hca.SendWR {
			w := a.rdma(op, 1, 0, b, 0, 8)
			w.RemoteAddr += 4
			return w
		})
	}
	for _, op := range []hca.SendOpcode{hca.OpRDMARead, hca.OpAtomicFetchAdd} {
		remoteError(t, p, defaults().with(func(o *opts) { o.destRd = 0 }), hca.WCRemInvReqErr, hca.EventQPReqErr,
			func(a, b *end) hca.SendWR { return a.rdma(op, 1, 0, b, 0, 8) })
	}
	// No bytes, no key needed.
	a, b := pair(t, p, defaults())
	for i, op := range []hca.SendOpcode{hca.OpRDMAWrite, hca.OpRDMARead} {
		w := a.rdma(op, uint64(i), 0, b, 0, 0)
		w.RKey, w.RemoteAddr = 0, 0
		a.postSend(w)
		one(t, a.scq, uint64(i), hca.WCSuccess)
	}
}

func testShortReceive(t *testing.T, p Pair) {
	for _, n := range []int{65, 70000} {
		a, b := pair(t, p, defaults())
		b.postRecv(1, b.sge(0, 64))
		b.postRecv(2, b.sge(0, 64))
		a.postSend(a.send(3, 0, n))
		one(t, a.scq, 3, hca.WCRemInvReqErr)
		one(t, b.rcq, 1, hca.WCLocLenErr)
		one(t, b.rcq, 2, hca.WCWRFlushErr)
		event(t, b.qev.ev, hca.EventQPReqErr)
		equal(t, b.mem.Get(0, 64), make([]byte, 64))
	}
}

func testBadReceiveKey(t *testing.T, p Pair) {
	for _, f := range []func(b *end) hca.SGE{
		func(b *end) hca.SGE { s := b.sge(0, 64); s.LKey = 0; return s },
		func(b *end) hca.SGE { s := b.sge(0, 64); s.LKey = b.reg(b.mem, hca.AccessRemoteRead).LKey(); return s },
		func(b *end) hca.SGE { s := b.sge(0, 64); s.Addr = memBase + memSize - 1; return s },
	} {
		a, b := pair(t, p, defaults())
		b.postRecv(1, f(b))
		a.postSend(a.send(2, 0, 8))
		one(t, a.scq, 2, hca.WCRemOpErr)
		one(t, b.rcq, 1, hca.WCLocProtErr)
		if a.state() != errS || b.state() != errS {
			t.Errorf("states %d and %d", a.state(), b.state())
		}
	}
}

// testListBeyondMessage: of a receive only what the message fills is checked.
// perftest 25.01 rounds the receives of an SRQ up to whole MTUs, and over UD the
// last of them then ends behind its region (ctx_set_recv_wqes).
func testListBeyondMessage(t *testing.T, p Pair) {
	list := func(s ...hca.SGE) []hca.SGE { return s }
	bad := func(b *end, n int) hca.SGE { s := b.sge(0, n); s.LKey = 0; return s }
	types := []struct {
		name  string
		o     opts
		front int // room for the GRH
		sizes []int
	}{
		{"RC", defaults(), 0, []int{0, 8, 5000, 700000}},
		{"RC with SRQ", srqOpts(8), 0, []int{0, 8, 5000, 700000}},
		{"UC", defaults().with(func(o *opts) { o.typ = uc }), 0, []int{0, 8, 5000, 700000}},
		{"UD", udOpts(), 40, []int{0, 8, 4096}},
		{"UD with SRQ", srqOpts(8).with(func(o *opts) { o.typ = ud }), 40, []int{0, 8, 4096}},
	}
	// The message and its GRH are n bytes; at is where they start in the region.
	lists := []struct {
		name string
		sge  func(b *end, n int) ([]hca.SGE, int)
		ok   bool
	}{
		{"ends behind the region", func(b *end, n int) ([]hca.SGE, int) {
			return list(b.sge(memSize-n, n+4096)), memSize - n
		}, true},
		{"filled behind the region", func(b *end, n int) ([]hca.SGE, int) {
			return list(b.sge(memSize-n+1, n+4096)), 0
		}, false},
		{"bad key not reached", func(b *end, n int) ([]hca.SGE, int) {
			return list(b.sge(64, n), bad(b, 8)), 64
		}, true},
		{"bad key reached", func(b *end, n int) ([]hca.SGE, int) {
			return list(b.sge(64, n-1), bad(b, 8)), 0
		}, false},
	}
	for _, typ := range types {
		for _, n := range typ.sizes {
			for _, l := range lists {
				if n+typ.front == 0 && !l.ok {
					continue
				}
				t.Run(fmt.Sprintf("%s/%d bytes/%s", typ.name, n, l.name), func(t *testing.T) {
					a, b := pairOf(t, p, typ.o.with(func(o *opts) { o.srq = nil }), typ.o)
					sges, at := l.sge(b, n+typ.front)
					b.postRecv(1, sges...)
					a.mem.Set(0, Pattern(7, n))
					w := a.send(2, 0, n)
					if typ.o.typ == ud {
						w = a.dgram(2, 0, n, b, a.ah(b))
					}
					a.postSend(w)
					sent, received := hca.WCSuccess, hca.WCSuccess
					if !l.ok {
						received = hca.WCLocProtErr
						if typ.o.typ == rc {
							sent = hca.WCRemOpErr
						}
					}
					one(t, a.scq, 2, sent)
					one(t, b.rcq, 1, received)
					if l.ok {
						equal(t, b.mem.Get(at+typ.front, n), Pattern(7, n))
					}
				})
			}
		}
	}
}

// testListBeyondAtomic: the answer of an atomic is eight bytes, however long the
// list is.
func testListBeyondAtomic(t *testing.T, p Pair) {
	for name, f := range map[string]func(a *end) []hca.SGE{
		"ends behind the region": func(a *end) []hca.SGE { return []hca.SGE{a.sge(memSize-8, 16)} },
		"bad key not reached":    func(a *end) []hca.SGE { return []hca.SGE{a.sge(memSize-8, 8), {Length: 8}} },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, p, defaults())
			b.mem.Set(0, Pattern(3, 8))
			w := a.rdma(hca.OpAtomicFetchAdd, 1, 0, b, 0, 8)
			w.SGE = f(a)
			a.postSend(w)
			if wc := one(t, a.scq, 1, hca.WCSuccess); wc.ByteLen != 8 {
				t.Errorf("%d bytes", wc.ByteLen)
			}
			equal(t, a.mem.Get(memSize-8, 8), Pattern(3, 8))
		})
	}
}

func testLocalAccess(t *testing.T, p Pair) {
	for _, op := range []hca.SendOpcode{hca.OpRDMARead, hca.OpAtomicFetchAdd} {
		a, b := pair(t, p, defaults())
		w := a.rdma(op, 1, 0, b, 0, 8)
		w.SGE[0].LKey = a.reg(a.mem, 0).LKey() // read-only for the device
		a.postSend(w)
		one(t, a.scq, 1, hca.WCLocProtErr)
		if b.state() != rts {
			t.Errorf("responder in state %d", b.state())
		}
	}
	// Sending from it is fine.
	a, b := pair(t, p, defaults())
	w := a.send(1, 0, 8)
	w.SGE[0].LKey = a.reg(a.mem, 0).LKey()
	b.postRecv(2, b.sge(0, 8))
	a.postSend(w)
	one(t, a.scq, 1, hca.WCSuccess)
	one(t, b.rcq, 2, hca.WCSuccess)
}

// testMemoryFails: a process that has gone takes its own QP down; its peer gets
// an error, and never zeros for data.
func testMemoryFails(t *testing.T, p Pair) {
	for _, n := range []int{8, 200000} {
		a, b := pair(t, p, defaults()) // the sender's memory
		b.postRecv(1, b.sge(0, n))
		a.mem.Fail(true)
		a.postSend(a.send(2, 0, n))
		one(t, a.scq, 2, hca.WCLocProtErr)
		none(t, b.rcq)
		b.setState(errS)
		one(t, b.rcq, 1, hca.WCWRFlushErr)

		a, b = pair(t, p, defaults()) // the receiver's
		b.postRecv(1, b.sge(0, n))
		b.mem.Fail(true)
		a.postSend(a.send(2, 0, n))
		one(t, a.scq, 2, hca.WCRemOpErr)
		one(t, b.rcq, 1, hca.WCLocProtErr)

		for _, op := range []hca.SendOpcode{hca.OpRDMAWrite, hca.OpRDMARead} {
			a, b = pair(t, p, defaults())
			b.mem.Fail(true)
			a.postSend(a.rdma(op, 2, 0, b, 0, n))
			one(t, a.scq, 2, hca.WCRemOpErr)
			a, b = pair(t, p, defaults())
			a.mem.Fail(true)
			a.postSend(a.rdma(op, 2, 0, b, 0, n))
			one(t, a.scq, 2, hca.WCLocProtErr)
			if b.state() != rts {
				t.Errorf("responder in state %d", b.state())
			}
		}
	}
	a, b := pair(t, p, defaults())
	b.mem.Fail(true)
	a.postSend(a.rdma(hca.OpAtomicFetchAdd, 2, 0, b, 0, 8))
	one(t, a.scq, 2, hca.WCRemOpErr)
}

// testDeregistered: a region closed while a message waits is gone when it runs.
func testDeregistered(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	mr, err := a.pd.RegMR(hca.MRInit{Mem: a.mem, Start: memBase, Length: 64, IOVA: memBase, Access: allAcc})
	must(t, err)
	w := a.send(1, 0, 8)
	w.SGE[0].LKey = mr.LKey()
	a.postSend(w) // waits for a receive
	must(t, mr.Close())
	b.postRecv(2, b.sge(0, 8))
	one(t, a.scq, 1, hca.WCLocProtErr)
	none(t, b.rcq)
}

// refused: a new pair's request w is not posted, EINVAL, or, from a mapped queue,
// fails in its turn.
func refused(t *testing.T, p Pair, o opts, name string, w func(a, b *end) hca.SendWR) {
	t.Helper()
	a, b := pair(t, p, o)
	wr := w(a, b)
	wr.ID = 77
	n, err := a.qp.PostSend([]hca.SendWR{wr})
	a.qp.Run()
	switch {
	case err != nil && n == 0:
		wantErrno(t, err, unix.EINVAL)
		none(t, a.scq)
	case err == nil && p.Mapped:
		one(t, a.scq, 77, hca.WCLocQPOpErr)
	default:
		t.Errorf("%s: %d posted: %v", name, n, err)
	}
	none(t, b.rcq)
}
