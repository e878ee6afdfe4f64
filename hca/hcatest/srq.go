package hcatest

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var srqCases = []testCase{
	{"SRQShared", testSRQShared},
	{"SRQLimitEvent", testSRQLimitEvent},
	{"SRQEmpty", testSRQEmpty},
	{"SRQLastWQE", testSRQLastWQE},
	{"SRQResize", testSRQResize},
}

func srqOpts(n uint32) opts {
	return defaults().with(func(o *opts) { o.srq = &hca.SRQInit{MaxWR: n, MaxSGE: 2} })
}

// fan makes n clients, each connected to a QP of one end with an SRQ.
func fan(t *testing.T, p Pair, n int, maxWR uint32) (hub *end, clients []*end) {
	hub = newEnd(t, p.B, srqOpts(maxWR))
	first := hub.qp
	for i := range n {
		if i > 0 {
			hub.qp = hub.newQP()
		}
		c := newEnd(t, p.A, defaults())
		link(c, hub)
		clients = append(clients, c)
	}
	hub.qp = first
	return hub, clients
}

func testSRQShared(t *testing.T, p Pair) {
	hub, cs := fan(t, p, 5, 64)
	for i := range 20 {
		hub.postRecv(uint64(i), hub.sge(i*64, 64))
	}
	wantErrno(t, errOf(hub.qp.PostRecv([]hca.RecvWR{{}})), unix.EINVAL) // not on the QP itself
	from := map[uint32]int{}
	for i, c := range cs {
		c.mem.Set(0, Pattern(i, 64))
		for j := range 4 {
			c.postSend(c.send(uint64(j), 0, 64))
			one(t, c.scq, uint64(j), hca.WCSuccess)
		}
	}
	seen := map[uint64]bool{}
	for _, wc := range take(t, hub.rcq, 20) {
		if seen[wc.ID] {
			t.Errorf("receive %d completed twice", wc.ID)
		}
		seen[wc.ID] = true
		from[wc.SrcQP]++
		for i, c := range cs {
			if c.qp.Num() == wc.SrcQP {
				equal(t, hub.mem.Get(int(wc.ID)*64, 64), Pattern(i, 64))
			}
		}
	}
	for _, c := range cs {
		if from[c.qp.Num()] != 4 {
			t.Errorf("%d messages from QP %#x", from[c.qp.Num()], c.qp.Num())
		}
	}
}

func testSRQLimitEvent(t *testing.T, p Pair) {
	hub, cs := fan(t, p, 1, 16)
	for i := range 4 {
		hub.postRecv(uint64(i), hub.sge(0, 64))
	}
	must(t, hub.srq.Modify(hca.SRQAttr{Limit: 3}, hca.SRQLimit, nil))
	c := cs[0]
	c.postSend(c.send(1, 0, 8)) // 3 left: not below the limit
	one(t, c.scq, 1, hca.WCSuccess)
	quiet(t, hub.srqEv.ev, "event")
	if l := hub.srq.Attr().Limit; l != 3 {
		t.Errorf("limit %d", l)
	}
	c.postSend(c.send(2, 0, 8))
	one(t, c.scq, 2, hca.WCSuccess)
	event(t, hub.srqEv.ev, hca.EventSRQLimitReached)
	c.postSend(c.send(3, 0, 8))
	one(t, c.scq, 3, hca.WCSuccess)
	quiet(t, hub.srqEv.ev, "second event") // it fires once
	if l := hub.srq.Attr().Limit; l != 0 {
		t.Errorf("limit %d after it fired", l)
	}
}

// testSRQEmpty: senders that wait at an empty SRQ all get their turn, however
// the receives come, and though one of them goes away.
func testSRQEmpty(t *testing.T, p Pair) {
	hub, cs := fan(t, p, 8, 64)
	for i, c := range cs {
		c.postSend(c.send(uint64(i), 0, 8))
		none(t, c.scq)
	}
	must(t, cs[0].qp.Close())
	cs[1].setState(errS)
	one(t, cs[1].scq, 1, hca.WCWRFlushErr)
	// Over a wire, what those two have sent before has come once this has.
	f, g := pair(t, p, defaults())
	f.postSend(f.rdma(hca.OpRDMAWrite, 99, 0, g, 0, 8))
	one(t, f.scq, 99, hca.WCSuccess)
	must(t, errOf(hub.srq.PostRecv(make([]hca.RecvWR, 0))))
	n, err := hub.srq.PostRecv([]hca.RecvWR{{ID: 1, SGE: []hca.SGE{hub.sge(0, 8)}}, {ID: 2, SGE: []hca.SGE{hub.sge(0, 8)}}})
	if err != nil || n != 2 {
		t.Fatal(n, err)
	}
	hub.srq.Run()
	take(t, hub.rcq, 2)
	for range 4 {
		hub.postRecv(3, hub.sge(0, 8))
		take(t, hub.rcq, 1)
	}
	for i, c := range cs[2:] {
		one(t, c.scq, uint64(i+2), hca.WCSuccess)
	}
}

func testSRQLastWQE(t *testing.T, p Pair) {
	hub, cs := fan(t, p, 1, 16)
	hub.postRecv(1, hub.sge(0, 8))
	hub.setState(errS)
	event(t, hub.qev.ev, hca.EventQPLastWQEReached)
	none(t, hub.rcq) // the receive stays with the SRQ
	// As does one after a remote error.
	hub, cs = fan(t, p, 2, 16)
	hub.postRecv(1, hub.sge(0, 8))
	w := cs[0].rdma(hca.OpRDMAWrite, 2, 0, hub, 0, 8)
	w.RKey ^= 1
	cs[0].postSend(w)
	one(t, cs[0].scq, 2, hca.WCRemAccessErr)
	event(t, hub.qev.ev, hca.EventQPAccessErr)
	event(t, hub.qev.ev, hca.EventQPLastWQEReached)
	cs[1].postSend(cs[1].send(3, 0, 8))
	one(t, cs[1].scq, 3, hca.WCSuccess)
	one(t, hub.rcq, 1, hca.WCSuccess)
}

func testSRQResize(t *testing.T, p Pair) {
	hub, cs := fan(t, p, 1, 4)
	for i := range 4 {
		hub.postRecv(uint64(i), hub.sge(0, 8))
	}
	must(t, hub.srq.Modify(hca.SRQAttr{MaxWR: 40}, hca.SRQMaxWR, nil))
	depth := hub.srq.Attr().MaxWR
	for i := range depth - 4 {
		hub.postRecv(uint64(4+i), hub.sge(0, 8))
	}
	wantErrno(t, errOf(hub.srq.PostRecv(make([]hca.RecvWR, 1))), unix.ENOMEM)
	for i := range uint64(depth) {
		cs[0].postSend(cs[0].send(i, 0, 8))
		one(t, cs[0].scq, i, hca.WCSuccess)
		one(t, hub.rcq, i, hca.WCSuccess)
	}
	must(t, hub.srq.Modify(hca.SRQAttr{MaxWR: 2}, hca.SRQMaxWR, nil))
	wantErrno(t, errOf(hub.srq.PostRecv(make([]hca.RecvWR, hub.srq.Attr().MaxWR+1))), unix.ENOMEM)
}
