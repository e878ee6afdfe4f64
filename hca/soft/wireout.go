package soft

import (
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// answerOut sends what the responder has to say, unless somebody does. Of long answers
// it leaves the rest to a worker.
func (q *QP) answerOut(w *wire) {
	r, rx := &q.r, &w.rx
	r.mu.Lock()
	if rx.sending || len(rx.out) == 0 {
		r.mu.Unlock()
		return
	}
	rx.sending = true
	gone := false
	b := batches.Get().(*batch)
	sent := 0
loop:
	for len(rx.out) > 0 && r.wire == w {
		if sent >= respBatch {
			q.dev.pool.few.sched(q)
			break
		}
		a := &rx.out[0]
		k := *w.head.Load()
		k.PSN, k.MSN, k.Syndrome, k.Orig = a.psn, a.msn, a.syndrome, a.orig
		k.Op |= a.op
		done, ok := true, true
		if a.x == nil {
			at := k.Build(b.next())
			b.seal(at)
			sent++
			r.count.txPkts++
		} else {
			x, off := a.x, a.off
			switch {
			case !rx.dead && !rx.busy && x.era != q.era.Load(): // in ERR nothing but what comes before a NAK
				off = x.length
			case q.pd != nil && !q.pd.ctx.free(): // its memory holds others up: the requester asks again
				off = x.length
			default:
				r.mu.Unlock()
				var n int
				n, ok = w.respond(b, x, &k, off)
				r.mu.Lock()
				if r.wire != w {
					break loop
				}
				a = &rx.out[0]
				sent += n
				r.count.txPkts += uint64(n)
				off += uint64(n) * uint64(w.mtu)
				r.count.txBytes += min(uint64(n)*uint64(w.mtu), x.length)
				if x.length == 0 {
					off = 0
				}
			}
			a.off, a.psn = off, k.PSN
			done = off >= x.length || !ok
			if done {
				x.put()
			}
		}
		if done {
			copy(rx.out, rx.out[1:])
			rx.out[len(rx.out)-1] = answer{}
			rx.out = rx.out[:len(rx.out)-1]
		}
		if !ok { // what is to be read is gone meanwhile
			gone, rx.dead = true, true
			k.Op, k.Syndrome = k.Op.Transport()|roce.Acknowledge, roce.SyndromeNAK|roce.NAKRemoteOp
			b.seal(k.Build(b.next()))
		}
		if b.full() || b.n > 0 && len(rx.out) == 0 {
			r.mu.Unlock()
			b.send(w)
			r.mu.Lock()
		}
	}
	if b.n > 0 {
		r.mu.Unlock()
		b.send(w)
		r.mu.Lock()
	}
	rx.sending = false
	if r.wire != w { // nobody sends them any more
		for i := range rx.out {
			if x := rx.out[i].x; x != nil {
				x.put()
			}
		}
		rx.out = nil
	}
	r.mu.Unlock()
	batches.Put(b)
	if gone {
		var n notes
		q.toErr(hca.EventQPFatal, &n)
		n.later(q.dev)
	}
}

// wireAnswers goes on with answers that were left to a worker.
func (q *QP) wireAnswers() {
	q.r.mu.Lock()
	w := q.r.wire
	q.r.mu.Unlock()
	if w != nil {
		q.answerOut(w)
	}
}

// respond makes packets of the answer to a read, from off on, until the batch is full
// or the answer is done; k.PSN is then that of the next. ok is false if the memory
// cannot be read.
func (w *wire) respond(b *batch, x *exec, k *roce.Packet, off uint64) (n int, ok bool) {
	for !b.full() {
		size := int(min(x.length-off, uint64(w.mtu)))
		last := off+uint64(size) == x.length
		op := roce.ReadRespMiddle
		switch {
		case off == 0 && last:
			op = roce.ReadRespOnly
		case off == 0:
			op = roce.ReadRespFirst
		case last:
			op = roce.ReadRespLast
		}
		k.Op = k.Op.Transport() | op
		room := b.next()
		at := k.Build(room)
		if x.dst.read(room[at:at+size]) != nil {
			return n, false
		}
		b.seal(at + size)
		k.PSN = (k.PSN + 1) & roce.PSNMask
		off += uint64(size)
		n++
		if last {
			break
		}
	}
	return n, true
}
