package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

// Row 35 once more: many clients whose memory never answers, together.
var crowdCases = []testCase{
	{"row35 server of stuck clients", testServerOfStuck},
	{"row35 turns beside large messages", testTurns},
	{"row35 crowd of stuck clients", func(t *testing.T, p Pair) { testCrowd(t, p, 6, 20, 64) }},
	{"row35 stuck large messages", func(t *testing.T, p Pair) { testCrowd(t, p, 3, 4, 300000) }},
}

// testCrowd: of each of hubs clients the memory blocks, while senders write n
// bytes into each of them. Others go on, on whatever goroutines they need, with
// small and large messages.
func testCrowd(t *testing.T, p Pair, hubs, senders, n int) {
	var ends []*end
	var mems []*Mem
	done := make(chan struct{}, hubs*senders)
	for range hubs {
		hub := newEnd(t, p.B, defaults())
		hub.mem.Block()
		mems = append(mems, hub.mem)
		for range senders {
			// On a wire its time must not be over before the memory comes back.
			a := newEnd(t, p.A, defaults().with(func(o *opts) { o.timeout = 19 }))
			link(a, newEnd(t, p.B, defaults().with(func(o *opts) { o.shareCtx = hub })))
			must(t, errOf(a.qp.PostSend([]hca.SendWR{a.rdma(hca.OpRDMAWrite, 1, 0, hub, 0, n)})))
			go func() { a.qp.Run(); done <- struct{}{} }()
			ends = append(ends, a)
		}
	}
	for range 4 {
		works(t, p)
		large, peer := pair(t, p, defaults())
		large.postSend(large.rdma(hca.OpRDMAWrite, 1, 0, peer, 0, memSize), large.rdma(hca.OpRDMARead, 2, 0, peer, 0, memSize))
		one(t, large.scq, 1, hca.WCSuccess)
		one(t, large.scq, 2, hca.WCSuccess)
		// One that waits for its receive is woken by another client's post.
		late, poster := pair(t, p, defaults())
		late.postSend(late.send(1, 0, 8))
		quick(t, "receiver", func() { poster.postRecv(2, poster.sge(0, 8)) })
		one(t, late.scq, 1, hca.WCSuccess)
		one(t, poster.rcq, 2, hca.WCSuccess)
	}
	for _, m := range mems {
		m.Unblock()
	}
	for _, a := range ends {
		one(t, a.scq, 1, hca.WCSuccess)
	}
	for range ends {
		signal(t, done, "return of Run")
	}
}

// testServerOfStuck: clients whose memory blocks read from a server and write to
// it, more of them than messages may touch one memory at a time. The server's
// memory does not block: others reach it, and it reaches others.
func testServerOfStuck(t *testing.T, p Pair) {
	server := newEnd(t, p.B, defaults())
	hostile := newEnd(t, p.A, defaults())
	port := func(e *end) *end {
		q := newEnd(t, p.B, defaults().with(func(o *opts) { o.shareCtx = server }))
		link(e, q)
		return q
	}
	hostile.mem.Block()
	const senders = 40
	done := make(chan struct{}, senders)
	var ends []*end
	for i := range senders {
		a := newEnd(t, p.A, defaults().with(func(o *opts) { o.shareCtx = hostile }))
		port(a)
		op := []hca.SendOpcode{hca.OpRDMAWrite, hca.OpRDMARead}[i%2]
		w := a.rdma(op, 1, 0, server, 0, 8)
		w.SGE[0] = hostile.sge(0, 8)
		must(t, errOf(a.qp.PostSend([]hca.SendWR{w})))
		go func() { a.qp.Run(); done <- struct{}{} }()
		ends = append(ends, a)
	}
	for range 4 {
		good := newEnd(t, p.A, defaults())
		q := port(good)
		good.postSend(good.rdma(hca.OpRDMAWrite, 1, 0, server, 64, 8))
		one(t, good.scq, 1, hca.WCSuccess)
		good.postRecv(2, good.sge(0, 8))
		q.postSend(q.send(3, 0, 8))
		one(t, q.scq, 3, hca.WCSuccess)
		one(t, good.rcq, 2, hca.WCSuccess)
	}
	hostile.mem.Unblock()
	for _, a := range ends {
		one(t, a.scq, 1, hca.WCSuccess)
	}
	for range ends {
		signal(t, done, "return of Run")
	}
}

// testTurns: a large message of one client is done before all that another had
// queued on many QPs.
func testTurns(t *testing.T, p Pair) {
	hub := newEnd(t, p.B, defaults())
	const senders = 64
	g := hub.mem.Block() // so that all are queued when it begins
	done := make(chan struct{}, senders)
	var ends []*end
	for range senders {
		a := newEnd(t, p.A, defaults().with(func(o *opts) {
			if len(ends) > 0 {
				o.shareCtx = ends[0]
			}
		}))
		link(a, newEnd(t, p.B, defaults().with(func(o *opts) { o.shareCtx = hub })))
		for range 8 {
			must(t, errOf(a.qp.PostSend([]hca.SendWR{a.rdma(hca.OpRDMAWrite, 1, 0, hub, 0, memSize)})))
		}
		go func() { a.qp.Run(); done <- struct{}{} }()
		ends = append(ends, a)
	}
	signal(t, g.In, "blocked access")
	good, peer := pair(t, p, defaults())
	// The others are let go on when it is queued, and each of their accesses takes
	// its time: they cannot all be done by the time of its turn.
	hub.mem.Unblock()
	good.postSend(good.rdma(hca.OpRDMAWrite, 1, 0, peer, 0, memSize))
	one(t, good.scq, 1, hca.WCSuccess)
	left := 0
	for _, a := range ends {
		var wc [8]hca.WC
		left += len(wc) - a.scq.Poll(wc[:])
	}
	if left == 0 {
		t.Error("it came last")
	}
	for range ends {
		signal(t, done, "return of Run")
	}
}
