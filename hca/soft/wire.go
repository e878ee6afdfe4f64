package soft

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// This file and its neighbours wire*.go are how queue pairs reach those of other
// hosts: the requests and answers of the verbs engine as packets of RoCE v2. Queue
// pairs of one fabric do without.
//
// A connected QP whose path leads out has a wire, made when the path is set and gone
// with RESET. Its requester half (wireTx, under QP.s.mu) sends what is in the send
// queue, several requests ahead of their acknowledgements, and goes back to the
// oldest packet that is missing when the peer or a timer says so. Its responder half
// (wireRx, under QP.r.mu) takes packets in order only. Payload is read from, and
// written to, the client's memory packet by packet, under no lock: by whoever has
// QP.s.owner, wireTx.taking, wireRx.busy or wireRx.sending, one goroutine each.
//
// Packets come in by one goroutine of the device's at a time, the leader
// (wireport.go), and are handled there; answers, and what an acknowledgement lets go
// on, are sent from there too. Should a client's memory hold it up, another
// takes over.

const (
	// windowMax is how many packets may be unacknowledged at a time: rxe's
	// RXE_MAX_UNACKED_PSNS, enough for half a megabyte at the largest MTU.
	windowMax = 128
	// windowMin is what loss and congestion leave.
	windowMin = 2
	// windowStart is a first guess; it doubles until the first loss.
	windowStart = 32
	// txBatch is how many packets are handed to the link at a time.
	txBatch = 16
	// ackEvery is how many packets of a message go without asking for an
	// acknowledgement.
	ackEvery = 16
	// readPiece is the packets that one read request on the wire asks for. A long
	// read is made of several, because its answer comes as fast as the responder
	// can, whatever the requester's buffers.
	readPiece = 32
	// respBatch is how many packets of an answer are sent before the queue goes to a
	// worker, for the sake of who else waits for packets.
	respBatch = 64
	// timerFloor is the least that a retransmission timer waits: below it is only
	// the time that a busy machine takes to run a thread.
	timerFloor = 2 * time.Millisecond
	// backOff bounds how often the retransmission time doubles: IBTA 1.4 §9.7.6.1.3
	// allows four times the time that was set.
	backOff = 2
	// cnpGap is the least time between two congestion notifications to one peer.
	cnpGap = 50 * time.Microsecond
	// savedAtomics is how many answers are kept for requests that come again: as many
	// as a responder can have under way (DefaultAttr's MaxQPRdAtom).
	savedAtomics = 16
	// halfPSNs is how many packets may be between the oldest one unacknowledged and the
	// last that a request has: beyond that it cannot be told which is earlier (§9.7.1).
	halfPSNs = 1 << 23
	// mcastQPN is the destination of datagrams to a group (IBTA 1.4 §9.6.1.3.1).
	mcastQPN = 0xffffff
	// pkeyBase is the P_Key without its membership bit.
	pkeyBase = 0x7fff
)

// wire is a connected QP's way to a peer on another host.
type wire struct {
	link roce.Link
	mtu  int // of the path, in bytes; constant
	// head is what all packets of the QP have in common. What it points to is constant;
	// another path has another.
	head atomic.Pointer[roce.Packet]

	tx wireTx // under QP.s.mu
	rx wireRx // under QP.r.mu
}

// pathOut is the part of a packet that an address says.
func (d *Device) pathOut(a *hca.AHAttr) roce.Packet {
	return roce.Packet{
		Src: d.gid(int(a.SGIDIndex)), Dst: a.DGID, TrafficClass: a.TrafficClass, FlowLabel: a.FlowLabel,
		HopLimit: max(a.HopLimit, 1), PKey: defaultPKey,
	}
}

// sourcePort spreads the flows of QPs over the paths of a network: it stays the same
// for a flow (Annex A17.4.5), and within the dynamic ports as rxe's and others' do.
func sourcePort(qpn, dest uint32) uint16 {
	h := qpn*0x9e3779b1 ^ dest*0x85ebca6b
	return 0xC000 | uint16(h>>16)&0x3fff
}

// leadsOut: does a path go over the link?
func (d *Device) leadsOut(a *hca.AHAttr) bool {
	return d.link != nil && a.IsGlobal && d.fabric.Resolve(a) == nil
}

// setWireLocked makes or ends q's wire for its path, under s.mu and r.mu.
func (q *QP) setWireLocked() {
	a := &q.s.attr
	if q.typ == hca.QPTypeUD || !q.dev.leadsOut(&a.AH) {
		q.s.wire, q.r.wire = nil, nil
		return
	}
	h := q.wireHead()
	if w := q.s.wire; w != nil { // another path for the same connection, in whose packets somebody may be
		w.head.Store(&h)
		return
	}
	w := &wire{link: q.dev.link, mtu: min(a.PathMTU.Bytes(), q.dev.link.State().MTU)}
	w.head.Store(&h)
	w.rx.epsn = a.RQPSN
	q.s.wire, q.r.wire = w, w
}

func (q *QP) wireHead() roce.Packet {
	a := &q.s.attr
	h := q.dev.pathOut(&a.AH)
	h.QPN, h.SrcPort, h.Migrated = a.DestQPN, sourcePort(q.num, a.DestQPN), true
	h.TrafficClass = h.TrafficClass&^roce.ECNMask | roce.ECT0
	switch q.typ {
	case hca.QPTypeUC:
		h.Op = roce.UC
	case hca.QPTypeXRCIni, hca.QPTypeXRCTgt:
		h.Op = roce.XRC
	default:
		h.Op = roce.RC
	}
	return h
}

// startWireLocked sets the requester's first PSN, when the QP enters RTS from RTR.
func (q *QP) startWireLocked() {
	if w := q.s.wire; w != nil {
		t := &w.tx
		psn := q.s.attr.SQPSN
		*t = wireTx{una: psn, at: psn, next: psn, high: psn, window: windowStart, slow: true, tries: q.s.attr.RetryCnt, rnrLeft: q.s.attr.RNRRetry}
	}
}

// stopWireLocked ends the wire's timer, under s.mu.
func (q *QP) stopWireLocked() {
	if w := q.s.wire; w != nil && w.tx.timer != nil {
		w.tx.timer.Stop()
	}
}

// sendBusyLocked: is somebody at the requester's half, so that he flushes what is in
// it? Under s.mu.
func (q *QP) sendBusyLocked() bool {
	return q.s.owner != nil || q.s.wire != nil && q.s.wire.tx.taking
}

// wireBusyLocked: is somebody at a packet for the responder's half? Under r.mu.
func (q *QP) wireBusyLocked() bool { return q.r.wire != nil && q.r.wire.rx.busy }

// packetsOf is how many packets n bytes take.
func (w *wire) packetsOf(n uint64) uint32 {
	return uint32(max((n+uint64(w.mtu)-1)/uint64(w.mtu), 1))
}

// batch is packets on their way to the link. Whoever has one sends it before he
// gives up the token under which he made them, so that they go in order.
type batch struct {
	n    int
	out  [txBatch]roce.Buffer
	room [txBatch][roce.Headroom + roce.MaxPacket]byte
}

var batches = sync.Pool{New: func() any { return new(batch) }}

// next is the room for one more packet; the batch must not be full.
func (b *batch) next() []byte { return b.room[b.n][:] }

// seal ends the packet in next's room, whose payload ends at end.
func (b *batch) seal(end int) {
	b.out[b.n] = roce.Seal(b.next(), end)
	b.n++
}

func (b *batch) full() bool { return b.n == txBatch }

// send sends what there is. What the link cannot send is lost.
func (b *batch) send(w *wire) { b.sendTo(w.link, w.head.Load().Dst) }

func (b *batch) sendTo(l roce.Link, dst hca.GID) {
	if b.n > 0 {
		_ = l.Send(dst, b.out[:b.n]) // closed or gone: as good as lost
		b.n = 0
	}
}

// wirePort is the device's end of its link: it receives.
type wirePort struct {
	dev  *Device
	link roce.Link
	gone func() // nil: nobody wants to know
	wg   sync.WaitGroup

	inside  atomic.Bool   // the leader is at a packet
	beats   atomic.Uint32 // it moves
	watched atomic.Bool

	leader  atomic.Pointer[inbound]   // the others end; changed under mu
	current atomic.Pointer[rxPackets] // what the leader is at

	// mu guards stop, inbound.stuck, UContext.late, and changes of the leader and of
	// the counts of who is held. Leaf.
	mu   sync.Mutex
	stop bool

	bad     atomic.Uint64 // packets that Parse refused
	dropped atomic.Uint64 // good ones for which there was no taker
}

const (
	// leadTick is how often the watcher looks at the leader while packets come, and
	// leadTicks after how many looks without a packet done the leader counts as stuck in
	// a client's memory: that is how long a client can hold up all others, once for each
	// of its contexts.
	leadTick  = 5 * time.Millisecond
	leadTicks = 2
	// heldLimit is how many contexts of a party may hold a leader at a time, before
	// packets for the others are dropped.
	heldLimit = 4
	// lateLimit is how many packets wait for a context that holds a leader: as many as
	// two connections have on their way.
	lateLimit = 2 * windowMax
	// rxBatch is how many packets are taken from the link at a time.
	rxBatch = 32
)

func newWirePort(d *Device, l roce.Link, gone func()) *wirePort {
	p := &wirePort{dev: d, link: l, gone: gone}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.startLocked()
	return p
}

// startLocked makes a new leader.
func (p *wirePort) startLocked() {
	in := &inbound{port: p}
	p.leader.Store(in)
	p.wg.Add(1)
	go p.lead(in)
}

// lead receives until the link is closed, or another leads.
func (p *wirePort) lead(in *inbound) {
	defer p.wg.Done()
	defer p.catchUp(in)
	if b := p.current.Load(); b != nil { // what a stuck one before it has left
		p.inside.Store(true)
		p.watch()
		p.work(in, b)
	}
	for p.leader.Load() == in {
		n, err := p.link.Recv(in.own.rs[:])
		if err != nil {
			if p.gone != nil && errors.Is(err, roce.ErrGone) && p.leader.CompareAndSwap(in, nil) {
				p.gone()
			}
			return
		}
		in.own.n.Store(int32(n))
		in.own.next.Store(0)
		p.current.Store(&in.own)
		p.inside.Store(true)
		p.watch()
		p.work(in, &in.own)
	}
}

// work handles what is left of b, as long as in leads.
func (p *wirePort) work(in *inbound, b *rxPackets) {
	for {
		i := b.next.Add(1) - 1
		if i >= b.n.Load() {
			p.inside.Store(false)
			break
		}
		in.ip = b.rs[i].IP
		p.handle(in)
		b.rs[i].Release()
		if !p.leads(in) {
			break
		}
	}
	in.tell()
}

// rxPackets is what one Recv has brought. Whoever takes a number from next has that
// packet; n is not changed before all are taken.
type rxPackets struct {
	rs      [rxBatch]roce.Received
	n, next atomic.Int32
}

// leads: is in still the leader, after a packet?
func (p *wirePort) leads(in *inbound) bool {
	p.beats.Add(1)
	in.ctx.Store(nil)
	return p.leader.Load() == in
}

// catchUp is the last that a leader does which another has replaced: it handles the
// packets that have come meanwhile for the context in whose memory it was stuck.
func (p *wirePort) catchUp(in *inbound) {
	for {
		p.mu.Lock()
		c := in.stuck
		if c == nil {
			p.mu.Unlock()
			return
		}
		if len(c.late) == 0 || p.stop {
			c.late, in.stuck = nil, nil
			c.held.Add(-1)
			c.party.held.Add(-1)
			p.mu.Unlock()
			break
		}
		in.ip = c.late[0]
		c.late = c.late[1:]
		p.mu.Unlock()
		in.late = c
		p.handle(in)
	}
	in.tell()
}

// tell tells of the completions that in has made.
func (in *inbound) tell() {
	in.notes.tell(&in.waits)
	in.port.dev.events.drain()
	in.waits.wake()
}

// watch has somebody look after the leader while packets come.
func (p *wirePort) watch() {
	if p.watched.Load() || !p.watched.CompareAndSwap(false, true) {
		return
	}
	p.wg.Add(1)
	go func() {
		defer p.wg.Done()
		seen, still, idle := p.beats.Load(), 0, 0
		for idle < leadTicks {
			time.Sleep(leadTick)
			now := p.beats.Load()
			switch {
			case !p.inside.Load():
				idle, still = idle+1, 0
			case now != seen:
				idle, still = 0, 0
			default:
				if still++; still >= leadTicks {
					still = 0
					p.replace()
				}
			}
			seen = now
		}
		p.watched.Store(false)
		if p.inside.Load() {
			p.watch()
		}
	}()
}

// replace puts another in the place of a leader that is stuck in a context's memory.
func (p *wirePort) replace() {
	p.mu.Lock()
	defer p.mu.Unlock()
	in := p.leader.Load()
	if in == nil || p.stop {
		return
	}
	c := in.ctx.Load()
	if c == nil {
		return
	}
	in.stuck = c
	c.held.Add(1)
	c.party.held.Add(1)
	p.inside.Store(false)
	p.startLocked()
}

// withheld: is in's packet, which is for c, not to be handled now, because c's memory
// holds a leader, or enough of its party's do? The former's waits, if it may.
func (p *wirePort) withheld(in *inbound, c *UContext, waits bool) bool {
	if in.late == c || c.held.Load() == 0 && c.party.held.Load() < heldLimit {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case c.held.Load() == 0 && c.party.held.Load() < heldLimit:
		return false
	case c.held.Load() == 0 || !waits || len(c.late) >= lateLimit:
		p.dropped.Add(1)
	default:
		c.late = append(c.late, bytes.Clone(in.ip)) // the link's buffers are few
	}
	return true
}

// close ends the receiving; the link is closed with it. A leader that is stuck
// in a client's memory is not waited for.
func (p *wirePort) close() {
	p.mu.Lock()
	p.stop = true
	p.mu.Unlock()
	_ = p.link.Close()
	done := make(chan struct{})
	go func() { p.wg.Wait(); close(done) }()
	waitUntil(func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
}

// inbound is a packet being handled, with what its handler needs.
type inbound struct {
	port  *wirePort
	ctx   atomic.Pointer[UContext] // whose memory the handler may touch
	last  *UContext                // the one before: what is in notes and waits is its
	own   rxPackets
	ip    []byte
	stuck *UContext // in whose memory it was when another took over; under wirePort.mu
	late  *UContext // it is not the leader any more, and does what waits for this
	pkt   roce.Packet
	notes notes
	waits notes
}

// enter says whose memory the handler is about to touch. Should it be held up there,
// nobody else's completions may be left with it.
func (in *inbound) enter(c *UContext) {
	if in.last != c {
		in.last = c
		if !in.notes.empty() {
			in.notes.tell(&in.waits)
		}
		if !in.waits.empty() {
			in.waits.later(in.port.dev)
		}
	}
	in.ctx.Store(c)
}

// handle does one packet.
func (p *wirePort) handle(in *inbound) {
	if roce.Parse(in.ip, &in.pkt) != nil {
		p.bad.Add(1)
		return
	}
	k := &in.pkt
	if k.PKey&pkeyBase != pkeyBase {
		p.dropped.Add(1)
		return
	}
	if k.Op.Transport() == roce.UD {
		p.datagram(in)
		return
	}
	q := p.dev.qp(k.QPN)
	if q == nil {
		p.dropped.Add(1)
		return
	}
	ok := false
	pd := q.pd
	if s := p.dev.xrcSRQ(k.SRQN); s != nil && k.Op.Transport() == roce.XRC && !k.Op.IsResponse() {
		pd = s.pd
	}
	if pd != nil {
		if p.withheld(in, pd.ctx, true) {
			return
		}
		in.enter(pd.ctx)
	}
	switch {
	case k.Op == roce.CNP:
		ok = q.congested(k)
	case k.Op.IsResponse():
		ok = q.takeAnswer(in)
	default:
		ok = q.takeRequest(in)
	}
	if !ok {
		p.dropped.Add(1)
	}
}

// fromPeer: is k from whom the QP is connected to?
func (w *wire) fromPeer(k *roce.Packet) bool {
	h := w.head.Load()
	return k.Src == h.Dst && k.Dst == h.Src && (k.Op == roce.CNP || k.Op.Transport() == h.Op)
}

// datagram gives a packet of UD to whom it is for.
func (p *wirePort) datagram(in *inbound) {
	k := &in.pkt
	d := dgrams.Get().(*dgram)
	d.refs.Store(1)
	defer d.put()
	d.n = copy(d.buf[:], k.Payload)
	d.global, d.solicited = true, k.Solicited
	d.wc = hca.WC{Opcode: hca.WCRecv, ByteLen: uint32(d.n + grhSize), SrcQP: k.SrcQP, Port: physPort, Flags: hca.WCGRH}
	if k.Op.Operation() == roce.SendOnlyImm {
		d.wc.Imm = k.Imm
		d.wc.Flags |= hca.WCWithImm
	}
	clear(d.grh[:])
	if k.V4() { // the last 20 bytes, see putRoCE
		copy(d.grh[grhSize-ipv4HeaderSize:], in.ip[:ipv4HeaderSize])
	} else {
		copy(d.grh[:], in.ip[:grhSize])
	}
	if k.QPN != mcastQPN {
		if q := p.dev.qp(k.QPN); q != nil && p.dev.hasGID(k.Dst) {
			q.hear(d, k.QKey, in)
			return
		}
		p.dropped.Add(1)
		return
	}
	for _, m := range p.dev.fabric.Members(k.Dst) {
		if q, ok := m.(*QP); ok && q.dev == p.dev {
			q.hear(d, k.QKey, in)
			if !p.leads(in) { // it was held up there: the others have lost it
				return
			}
		}
	}
}

// hear queues a datagram from the wire, and has it received.
func (q *QP) hear(d *dgram, qkey uint32, in *inbound) {
	if q.typ != hca.QPTypeUD { // others may have no PD
		in.port.dropped.Add(1)
		return
	}
	if in.port.withheld(in, q.pd.ctx, in.pkt.QPN != mcastQPN) {
		return
	}
	if q.enqueue(d, qkey) {
		in.enter(q.pd.ctx)
		q.runInbound(&in.notes)
	}
}

// sendOut sends a datagram over the link.
func (x *exec) sendOut(d *dgram, qkey uint32) {
	q := x.q
	k := q.dev.pathOut(&x.dest)
	k.Op, k.Solicited, k.Migrated = roce.UD|roce.SendOnly, d.solicited, true
	k.QPN, k.QKey, k.SrcQP, k.SrcPort = x.qpn, qkey, q.num, sourcePort(q.num, x.qpn)
	if loop.IsMulticast(&x.dest) {
		k.QPN = mcastQPN
	}
	if x.op == hca.OpSendImm {
		k.Op, k.Imm = roce.UD|roce.SendOnlyImm, x.imm
	}
	q.s.mu.Lock()
	k.PSN = q.s.attr.SQPSN
	q.s.attr.SQPSN = (k.PSN + 1) & roce.PSNMask
	q.s.mu.Unlock()
	b := batches.Get().(*batch)
	at := k.Build(b.next())
	b.seal(at + copy(b.next()[at:], d.buf[:d.n]))
	b.sendTo(q.dev.link, x.dest.DGID)
	batches.Put(b)
}
