package rxe_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/provider/rxe/rxetest"
)

const signaled = uint32(hca.SendSignaled)

// fill makes every place of a's ring a write to b, as a request of 64 bytes.
func fill(a, b *client) rxetest.Ring {
	r := a.qp.SendRing()
	for i := range r.Header().IndexMask + 1 {
		put(r, i, abi.RXESendWQE{
			WR:  abi.RXESendWR{WRID: uint64(i), Opcode: uint32(hca.OpRDMAWrite), SendFlags: signaled},
			DMA: abi.RXEDMAInfo{Length: 64, NumSGE: 1},
		}, func(d []byte) { rxetest.PutSGE(d, 0, abi.RXESGE(a.sge(0, 64))) })
		rxetest.PutRDMA(&r.Send(i).WR, memBase, b.mr.RKey())
	}
	return r
}

// Failure class 15: a request changes while the doorbell runs. Whatever is
// fetched, it is fetched once: each request has one completion, and memory that
// no key was checked for is not touched (mem says so).
func TestRow15RacingSends(t *testing.T) {
	a, b := pair(t, hca.QPTypeRC, smallCap, false)
	r := fill(a, b)
	mask := r.Header().IndexMask
	good := abi.RXESGE(a.sge(0, 64))
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() { // alone with the places from here on
		rnd := rand.New(rand.NewPCG(1, 2))
		for !stop.Load() {
			i := rnd.Uint32()
			w, g := r.Send(i), good
			g.LKey ^= rnd.Uint32() & 1
			g.Length = []uint32{64, 64, 1 << 31, memSize + 1}[rnd.IntN(4)]
			g.Addr += []uint64{0, 0, 0, memSize - 1}[rnd.IntN(4)]
			rxetest.PutSGE(r.SendData(i), rnd.IntN(4), g)
			w.DMA.Length = g.Length
			w.DMA.NumSGE = []uint32{1, 1, 2, 4, 5, 1 << 28, 1<<32 - 1}[rnd.IntN(7)]
			w.WR.SendFlags = signaled | uint32(hca.SendInline)*(rnd.Uint32()&1)
			w.WR.Opcode = []uint32{0, 0, 4, 5, 6, 7, 8, 77}[rnd.IntN(8)] // none that waits for a receive
			if rnd.IntN(2) == 0 {
				rxetest.PutSGE(r.SendData(i), 0, good)
				w.WR.Opcode, w.WR.SendFlags, w.DMA.Length, w.DMA.NumSGE = 0, signaled, 64, 1
			}
		}
	})
	var well, ill int
	for k := 0; k < 2000 || ill == 0; k++ {
		const n = 4
		a.ring((r.Producer() + n) & mask)
		for _, wc := range take(t, a.scq, n) {
			if wc.Status == hca.WCSuccess {
				well++
			} else {
				ill++
			}
		}
		none(t, a.scq)
		if a.state() != hca.QPRTS || b.state() != hca.QPRTS {
			renew(a, b)
		}
	}
	stop.Store(true)
	wg.Wait()
	if well == 0 {
		t.Error("none was well")
	}
}

// The same of a receive.
func TestRow15RacingReceives(t *testing.T) {
	for _, srq := range []bool{false, true} {
		a, b := pair(t, hca.QPTypeRC, smallCap, srq)
		r := b.qp.RecvRing()
		if srq {
			r = b.srq.RecvRing()
		}
		mask, good := r.Header().IndexMask, abi.RXESGE(b.sge(0, 64))
		var stop atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, 2))
			for !stop.Load() {
				i := rnd.Uint32()
				g := good
				g.LKey ^= rnd.Uint32() & 1
				g.Length = []uint32{64, 63, 1 << 31, memSize + 1}[rnd.IntN(4)]
				g.Addr += []uint64{0, 0, memSize - 1}[rnd.IntN(3)]
				rxetest.PutSGE(r.RecvData(i), rnd.IntN(4), g)
				r.Recv(i).DMA.NumSGE = []uint32{1, 2, 4, 5, 1 << 28, 1<<32 - 1}[rnd.IntN(6)]
				if rnd.IntN(2) == 0 {
					rxetest.PutSGE(r.RecvData(i), 0, good)
					r.Recv(i).DMA.NumSGE = 1
				}
			}
		})
		ill := 0
		for k := 0; k < 1000 || ill == 0; k++ {
			r.SetProducer((r.Producer() + 1) & mask)
			a.post(a.send(1, 64))
			take(t, a.scq, 1)
			if take(t, b.rcq, 1)[0].Status != hca.WCSuccess {
				ill++
			}
			none(t, b.rcq)
			if a.state() != hca.QPRTS || b.state() != hca.QPRTS {
				renew(a, b)
			}
		}
		stop.Store(true)
		wg.Wait()
	}
}

// Failure class 16: the client writes what it likes into the header of a queue. No
// memory is touched beyond the queue, no look is without end, and others work.
func TestRow16Headers(t *testing.T) {
	for name, f := range map[string]func(h *abi.RXEQueueBuf){
		"mask":           func(h *abi.RXEQueueBuf) { h.IndexMask = 1<<32 - 1 },
		"mask 0":         func(h *abi.RXEQueueBuf) { h.IndexMask = 0 },
		"element size":   func(h *abi.RXEQueueBuf) { h.Log2ElemSize = 31 },
		"consumer":       func(h *abi.RXEQueueBuf) { atomic.StoreUint32(&h.ConsumerIndex, 1<<31+5) },
		"producer":       func(h *abi.RXEQueueBuf) { atomic.StoreUint32(&h.ProducerIndex, 1<<32-1) },
		"all there is":   func(h *abi.RXEQueueBuf) { atomic.AddUint32(&h.ProducerIndex, 31) },
		"back":           func(h *abi.RXEQueueBuf) { atomic.AddUint32(&h.ProducerIndex, ^uint32(0)) },
		"once round":     func(h *abi.RXEQueueBuf) { atomic.AddUint32(&h.ProducerIndex, 32) },
		"nothing at all": func(h *abi.RXEQueueBuf) { *h = abi.RXEQueueBuf{} },
	} {
		for _, srq := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, srq %v", name, srq), func(t *testing.T) {
				a, b := pair(t, hca.QPTypeRC, smallCap, srq)
				for k := range b.rings() {
					b.recv(1, 2)
					a.post(a.send(1, 8))
					one(t, a.scq, 1, hca.WCSuccess)
					f(b.rings()[k].Header())
					for range 3 { // it gets what it wrote: receives of nobody, or none
						a.post(a.send(2, 0))
						check(t, b.qp.Doorbell())
						b.qp.Run()
					}
					a.set(hca.QPErr)
					b.set(hca.QPErr)
					b = newClient(t, a.dev, b.typ, smallCap, srq)
					renew(a, b)
				}
				a.post(a.write(7, b, 8))
				one(t, a.scq, 7, hca.WCSuccess)
			})
		}
	}
}

// rings are all of a client's queues.
func (e *client) rings() []rxetest.Ring {
	l := []rxetest.Ring{e.qp.SendRing(), e.scq.Ring, e.rcq.Ring}
	if e.srq != nil {
		return append(l, e.srq.RecvRing())
	}
	return append(l, e.qp.RecvRing())
}

// A producer that jumps has what lies in between done once, in order.
func TestRow16ProducerJumps(t *testing.T) {
	a, b := pair(t, hca.QPTypeRC, smallCap, false)
	r := fill(a, b)
	slots := r.Header().IndexMask + 1
	next := uint64(0)
	for _, to := range []uint32{5, 5 + slots, 4, 3 + 9*slots, 1<<32 - 1, 0, 1 << 31, 17} {
		want := int((to - uint32(next)) & (slots - 1))
		a.ring(to)
		for _, wc := range take(t, a.scq, want) {
			if wc.ID != next&uint64(slots-1) || wc.Status != hca.WCSuccess {
				t.Fatalf("to %#x: completion %+v, want %d", to, wc, next)
			}
			next++
		}
		none(t, a.scq)
		if c := r.Consumer(); c != uint32(next)&(slots-1) {
			t.Errorf("to %#x: consumer %d", to, c)
		}
	}
}

// A client that never stops writing does not keep a state change, or the flush in
// it, from its end.
func TestRow16EndlessProducer(t *testing.T) {
	for _, srq := range []bool{false, true} {
		a, b := pair(t, hca.QPTypeRC, smallCap, srq)
		fill(a, b)
		var stop atomic.Bool
		var wg sync.WaitGroup
		rings := []rxetest.Ring{a.qp.SendRing(), a.rings()[3]}
		for _, r := range rings {
			wg.Go(func() {
				for !stop.Load() {
					r.SetProducer(r.Consumer() - 1) // full
				}
			})
		}
		for range 20 {
			check(t, a.qp.Doorbell())
			a.qp.Run()
			a.set(hca.QPErr)
			check(t, a.qp.Doorbell())
			a.set(hca.QPErr)
			a.set(hca.QPReset)
			a.to(b)
		}
		stop.Store(true)
		wg.Wait()
	}
}

// Failure class 17: sums that wrap, and too much of everything. It fails in its
// turn, after what was before, and what comes after is flushed.
func TestRow17Lengths(t *testing.T) {
	type shape struct {
		flags, num, length uint32
		sge                uint32 // of each piece
	}
	in := uint32(hca.SendInline)
	for _, s := range []struct {
		shape
		want hca.WCStatus
	}{
		{shape{in, 1, 64, 0}, hca.WCSuccess},
		{shape{in, 0, 64, 0}, hca.WCSuccess}, // ibv_wr_set_inline_data
		{shape{in, 1, 65, 0}, hca.WCLocQPOpErr},
		{shape{in, 1, 512, 0}, hca.WCLocQPOpErr},
		{shape{in, 1, 1 << 31, 0}, hca.WCLocQPOpErr},
		{shape{in, 4, 1<<32 - 1, 0}, hca.WCLocQPOpErr},
		{shape{0, 4, 64, 16}, hca.WCSuccess},
		{shape{0, 0, 0, 0}, hca.WCSuccess},
		{shape{0, 4, 63, 16}, hca.WCLocQPOpErr},
		{shape{0, 0, 64, 0}, hca.WCLocQPOpErr},
		{shape{0, 5, 80, 16}, hca.WCLocQPOpErr},
		{shape{0, 1 << 28, 0, 16}, hca.WCLocQPOpErr}, // times 16 is 0
		{shape{0, 1<<32 - 1, 0, 16}, hca.WCLocQPOpErr},
		{shape{0, 4, 0, 1 << 30}, hca.WCLocProtErr}, // the sum is 0
		{shape{0, 4, 1<<32 - 4, 1<<32 - 1}, hca.WCLocProtErr},
	} {
		t.Run(fmt.Sprintf("%+v", s.shape), func(t *testing.T) {
			a, b := pair(t, hca.QPTypeRC, smallCap, false)
			r := fill(a, b)
			w := r.Send(1)
			w.WR.SendFlags |= s.flags
			w.DMA = abi.RXEDMAInfo{Length: s.length, NumSGE: s.num}
			for k := range min(s.num, 4) {
				rxetest.PutSGE(r.SendData(1), int(k), abi.RXESGE{Addr: memBase, Length: s.sge, LKey: a.mr.LKey()})
			}
			a.ring(3)
			one(t, a.scq, 0, hca.WCSuccess)
			one(t, a.scq, 1, s.want)
			after := hca.WCSuccess
			if s.want != hca.WCSuccess {
				after = hca.WCWRFlushErr
			}
			one(t, a.scq, 2, after)
			none(t, a.scq)
		})
	}
}

// All opcodes there are, and are not: one completion each.
func TestRow18Opcodes(t *testing.T) {
	for _, typ := range []hca.QPType{hca.QPTypeRC, hca.QPTypeUC, hca.QPTypeUD} {
		a, b := pair(t, typ, smallCap, false)
		for op := range uint32(260) {
			if op >= 256 {
				op = 1<<32 - 260 + op // the last ones
			}
			b.recv(1)
			r := a.qp.SendRing()
			at := r.Producer()
			put(r, at, abi.RXESendWQE{WR: abi.RXESendWR{WRID: 9, Opcode: op, SendFlags: signaled}}, nil)
			a.ring(r.Next(at))
			if wc := take(t, a.scq, 1)[0]; wc.ID != 9 {
				t.Fatalf("opcode %#x: %+v", op, wc)
			}
			none(t, a.scq)
			renew(a, b)
		}
	}
}

// A receive with more pieces than there may be fails at the receiver, and its
// sender is told.
func TestMalformedReceive(t *testing.T) {
	for _, n := range []uint32{5, 6, 1 << 28, 1<<32 - 1} {
		for _, srq := range []bool{false, true} {
			a, b := pair(t, hca.QPTypeRC, smallCap, srq)
			b.recv(3)
			b.rings()[3].Recv(0).DMA.NumSGE = n
			a.post(a.send(4, 8))
			one(t, b.rcq, 3, hca.WCLocQPOpErr)
			one(t, a.scq, 4, hca.WCRemOpErr)
			if a.state() != hca.QPErr || b.state() != hca.QPErr {
				t.Errorf("states %d and %d", a.state(), b.state())
			}
		}
	}
}
