package soft

import (
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
)

// dgram is a datagram between a sender that is done with it and its receivers.
// A UD receiver may be anybody's, so nobody's send queue waits for its memory.
type dgram struct {
	refs      atomic.Int32
	n         int // payload bytes
	wc        hca.WC
	solicited bool
	global    bool
	grh       [grhSize]byte
	buf       [smallSize]byte
}

var dgrams = sync.Pool{New: func() any { return new(dgram) }}

func (d *dgram) put() {
	if d.refs.Add(-1) == 0 {
		dgrams.Put(d)
	}
}

// datagram does SEND on UD: the payload is read, and queued at the receivers.
// Nobody answers: the send succeeds whether or not somebody gets it.
func (x *exec) datagram() (verdict, hca.WCStatus) {
	q := x.q
	out := q.dev.leadsOut(&x.dest)
	if x.length > smallSize || out && x.length > uint64(q.dev.link.State().MTU) {
		return finished, hca.WCLocLenErr
	}
	d := dgrams.Get().(*dgram)
	d.refs.Store(1)
	defer d.put()
	d.n = int(x.length)
	if x.ninline > 0 {
		copy(d.buf[:], x.inl[:x.ninline])
	} else if x.src.read(d.buf[:d.n]) != nil {
		return finished, hca.WCLocProtErr
	}
	if x.stale() {
		return finished, hca.WCSuccess // nobody will look at the status
	}
	x.header(d)
	qkey := x.qkey
	if qkey>>31 != 0 { // IBTA 1.4 §10.2.5
		qkey = x.ownKey
	}
	if !loop.IsMulticast(&x.dest) {
		if out {
			x.sendOut(d, qkey)
			return finished, hca.WCSuccess
		}
		p := x.lookup()
		x.hearDatagram(d, qkey, p)
		if p != nil {
			x.post(p, d, qkey)
		}
		return finished, hca.WCSuccess
	}
	if out {
		x.sendOut(d, qkey)
	}
	members := q.dev.fabric.Members(x.dest.DGID)
	x.hearGroup(d, qkey, members, out)
	for _, m := range members {
		// A sender does not hear itself.
		if p, ok := m.(*QP); ok && p != q && p.dev.up.Load() && q.dev.up.Load() {
			x.post(p, d, qkey)
		}
	}
	return finished, hca.WCSuccess
}

// header fills in what the receiver's completion and GRH say.
func (x *exec) header(d *dgram) {
	q := x.q
	d.wc = hca.WC{
		Opcode: hca.WCRecv, ByteLen: uint32(d.n + grhSize), SrcQP: q.num,
		SLID: q.dev.port.LID(), SL: x.dest.SL, Port: physPort,
	}
	if x.op == hca.OpSendImm {
		d.wc.Imm, d.wc.Flags = x.imm, hca.WCWithImm
	}
	d.solicited = x.flags&hca.SendSolicited != 0
	d.global = x.dest.IsGlobal
	if !d.global {
		return
	}
	d.wc.Flags |= hca.WCGRH
	// BTH, DETH, immediate, padded payload, ICRC.
	const headers, immLen = 12 + 8 + 4, 4
	n := headers + (d.n+3)&^3
	if x.op == hca.OpSendImm {
		n += immLen
	}
	if q.dev.ethernet() {
		putRoCE(&d.grh, q.dev.gid(int(x.dest.SGIDIndex)), &x.dest, n)
		return
	}
	// IBTA 1.4 §8.3: version 6, class, label; length of what follows; next header
	// 0x1B.
	const ver, nextHdr = 6, 0x1B
	g := d.grh[:]
	binary.BigEndian.PutUint32(g, ver<<28|uint32(x.dest.TrafficClass)<<20|x.dest.FlowLabel&0xfffff)
	binary.BigEndian.PutUint16(g[4:], uint16(n))
	g[6], g[7] = nextHdr, x.dest.HopLimit
	from := q.dev.gid(int(x.dest.SGIDIndex))
	copy(g[8:], from[:])
	copy(g[24:], x.dest.DGID[:])
}

// post queues d at p, if p takes datagrams with this Q_Key and has room.
func (x *exec) post(p *QP, d *dgram, qkey uint32) {
	if p.enqueue(d, qkey) && !slices.Contains(x.targets, p) {
		x.targets = append(x.targets, p)
	}
}

// enqueue queues d at q; false if it is dropped.
func (q *QP) enqueue(d *dgram, qkey uint32) bool {
	r := &q.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if q.typ != hca.QPTypeUD || !canReceive(r.state) || r.qkey != qkey || len(r.inq) >= inboundMax {
		r.count.dropped++
		return false
	}
	d.refs.Add(1)
	r.inq = append(r.inq, d)
	return true
}

// deliverTargets lets the receivers of x's datagrams take them: the last one,
// and those of the sender's own context, here; the others on workers, so that
// none waits for another's memory.
func (x *exec) deliverTargets(w *notes) {
	for i, p := range x.targets {
		ctx := p.pd.ctx
		switch {
		case ctx == x.q.pd.ctx:
			p.runInbound(w)
		case i == len(x.targets)-1 && x.visit(ctx):
			p.runInbound(w)
			x.unvisit(ctx)
		default:
			p.dev.pool.few.sched(p)
		}
		x.targets[i] = nil
	}
	x.targets = x.targets[:0]
}

// dropInboundLocked drops the datagrams that nobody has taken, under r.mu.
func (q *QP) dropInboundLocked() {
	for i, d := range q.r.inq {
		q.r.inq[i] = nil
		q.r.count.dropped++
		d.put()
	}
	q.r.inq = q.r.inq[:0]
}

// runInbound puts queued datagrams into receives, unless somebody is at it.
// Waiters are added to w, see runSend.
func (q *QP) runInbound(w *notes) {
	r := &q.r
	var x *exec
	r.mu.Lock()
	for len(r.inq) > 0 && r.claimer == nil && canReceive(r.state) {
		if !q.pd.ctx.free() {
			// The context's memory has too many copies under way already.
			q.dropInboundLocked()
			break
		}
		d := r.inq[0]
		copy(r.inq, r.inq[1:])
		r.inq[len(r.inq)-1] = nil
		r.inq = r.inq[:len(r.inq)-1]
		if x == nil {
			x = getExec()
			x.q = q
		}
		x.era, x.peer = q.era.Load(), nil
		if q.popLocked(x, uint64(d.n+grhSize)) {
			r.claimer, r.claimID = x, x.recv.id
			q.estLocked()
			r.mu.Unlock()
			q.takeDatagram(x, d)
			x.notes.tell(w)
			r.mu.Lock()
		} else {
			r.count.dropped++
		}
		d.put()
	}
	r.mu.Unlock()
	if x != nil {
		x.put()
	}
}

// takeDatagram fills the receive that x has claimed at q and completes it.
func (q *QP) takeDatagram(x *exec, d *dgram) {
	x.length = uint64(d.n + grhSize)
	st := x.checkRecv(q)
	res := movedAll
	if st == hca.WCSuccess {
		if d.global {
			if x.dst.write(d.grh[:]) != nil {
				res = badDst
			}
		} else {
			x.dst.skip(grhSize)
		}
		if res == movedAll && !x.stale() && x.dst.write(d.buf[:d.n]) != nil {
			res = badDst
		}
		if res == badDst {
			st = hca.WCLocProtErr
		}
	}
	x.op, x.flags = hca.OpSend, 0
	if st != hca.WCSuccess {
		x.failRecv(q, st, hca.EventQPFatal)
		return
	}
	x.wc = d.wc
	x.wc.ID, x.wc.QPN = x.recv.id, q.num
	if d.solicited {
		x.flags = hca.SendSolicited
	}
	q.completeDatagram(x)
}

// completeDatagram is finishRecv for a datagram: there is no sender to answer.
func (q *QP) completeDatagram(x *exec) {
	q.r.mu.Lock()
	ok := true
	if x.releaseLocked(q) {
		switch {
		case q.r.state == hca.QPErr:
			q.flushClaimLocked(&x.notes)
			q.flushRQLocked(&x.notes)
		case canReceive(q.r.state):
			q.r.count.rxBytes += x.length
			q.r.count.rxPkts++
			ok = q.pushOwn(&x.wc, x.flags&hca.SendSolicited != 0, &x.notes)
		}
	}
	q.r.mu.Unlock()
	if !ok {
		q.toErr(hca.EventQPFatal, &x.notes)
	}
}
