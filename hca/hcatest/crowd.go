package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

// Row 35 once more: many clients whose memory never answers, together.
var crowdCases = []testCase{
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
			a := newEnd(t, p.A, defaults())
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
