package soft

import (
	"encoding/binary"
	"sync"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/capture"
)

// This file is what listeners hear of messages between queue pairs of one fabric
// (Config.Tap). These never are packets: for a listener they are made into those of
// RoCE v2 that a wire would carry, requests and answers. While nobody listens that
// costs one atomic load a message and device, and nothing else.
//
// Payload is taken from the buffer that the copy goes through, so that listening
// touches no client's memory. It follows that:
//   - of a message that is refused before its payload was read, only the first packet
//     is shown, cut off after its headers if there was payload in it;
//   - a message whose peer is not there, or not ready, is not shown until it is, but
//     for datagrams, which are shown as sent whoever takes them;
//   - the numbers of packets (PSN) and messages (MSN) begin at the QP's own, and count
//     what was heard;
//   - what RoCE has no packets for is not shown: masked atomics, FLUSH, ATOMIC WRITE.
//
// A port on InfiniBand, where a path need not have GIDs, has that made of its GUID.
//
// A listener at a device hears each packet once: as Out if the device sends it, else as
// In. A packet over a link is shown by the link's own tap.

// heard is what a QP's messages have been counted to, for listeners.
type heard struct{ psn, msn uint32 }

// ear is what a runner keeps while somebody listens to its message.
type ear struct {
	out, in *capture.Tap // of the sender's device, of the receiver's; nil: nobody there
	same    bool         // they are one, and its tap is out
	wants   int          // bytes of a packet
	head    roce.Packet  // of requests
	answer  roce.Packet  // of what the responder sends
	mtu     int
	at      heard // the message's own numbers
	n       uint64
	asked   bool   // the first request packet was shown
	off     uint64 // of the payload that was shown
	room    [roce.Headroom + roce.MaxPacket]byte
}

var ears = sync.Pool{New: func() any { return new(ear) }}

// listening is d's tap, if somebody listens, and how many bytes of a packet he wants.
func (d *Device) listening() (*capture.Tap, int) {
	if d.tap == nil {
		return nil, 0
	}
	if n := d.tap.Wants(); n > 0 {
		return d.tap, n
	}
	return nil, 0
}

// hasPackets: can the request be shown?
func hasPackets(op hca.SendOpcode) bool {
	switch op {
	case hca.OpMaskedAtomicCmpSwap, hca.OpMaskedAtomicFetchAdd, hca.OpFlush, hca.OpAtomicWrite:
		return false
	}
	return true
}

// newEar is an ear for x's message to a device; nil if nobody listens at either end.
func (x *exec) newEar(to *Device) *ear {
	d := x.q.dev
	out, n := d.listening()
	var in *capture.Tap
	if to != d {
		var m int
		in, m = to.listening()
		n = max(n, m)
	}
	if n == 0 || !hasPackets(x.op) {
		return nil
	}
	e := ears.Get().(*ear)
	e.out, e.in, e.wants, e.n = out, in, n, x.length
	e.same, e.asked, e.off = to == d, false, 0
	e.head = d.heardPath(&x.dest)
	e.head.SrcPort, e.head.Migrated, e.head.QPN = sourcePort(x.q.num, x.qpn), true, x.qpn
	q := x.q
	q.s.mu.Lock()
	e.at = heard{(q.s.attr.SQPSN + q.s.heard.psn) & roce.PSNMask, q.s.heard.msn}
	e.mtu = q.s.attr.PathMTU.Bytes()
	q.s.mu.Unlock()
	return e
}

// heardPath is pathOut for a listener, whatever the link layer. What cannot be in one
// packet, addresses of two families, is shown as from another address of the port.
func (d *Device) heardPath(a *hca.AHAttr) roce.Packet {
	k := d.pathOut(a)
	if a.IsGlobal {
		_, to4 := k.Dst.IPv4()
		for _, g := range d.gids.Load() {
			if k.V4() == to4 {
				break
			}
			if _, v4 := g.IPv4(); v4 == to4 && g != (hca.GID{}) {
				k.Src = g
			}
		}
		return k
	}
	k.Src, k.TrafficClass, k.FlowLabel, k.HopLimit = d.gid(0), 0, 0, routeHopLimit
	if p := d.fabric.Resolve(a); p != nil {
		if to, ok := p.Endpoint().(*Device); ok {
			k.Dst = to.gid(0)
		}
	}
	return k
}

// listen begins to show x's message to p, if somebody listens.
func (x *exec) listen(p *QP) {
	e := x.newEar(p.dev)
	if e == nil {
		return
	}
	e.head.Op = roce.RC
	switch x.q.typ {
	case hca.QPTypeUC:
		e.head.Op = roce.UC
	case hca.QPTypeXRCIni:
		e.head.Op = roce.XRC
	}
	if e.mtu == 0 {
		e.mtu = smallSize
	}
	e.head.PSN = e.at.psn
	e.answer = e.head
	e.answer.Src, e.answer.Dst = e.head.Dst, e.head.Src
	e.answer.QPN, e.answer.SrcPort = x.q.num, sourcePort(p.num, x.q.num)
	x.ear = e
}

// packets is how many packets n bytes are.
func (e *ear) packets(n uint64) uint32 {
	return uint32(max((n+uint64(e.mtu)-1)/uint64(e.mtu), 1))
}

// hear shows payload of x's message that was read from where it comes from: of a send
// or a write, or of the answer to a read. All but the last are whole packets.
func (x *exec) hear(data []byte) {
	if x.ear == nil {
		return
	}
	if x.op == hca.OpRDMARead {
		x.hearAnswer(data)
		return
	}
	x.hearRequest(data, len(data))
}

// hearRequest shows the next n bytes of a send or a write, of which data is the
// beginning.
func (x *exec) hearRequest(data []byte, n int) {
	e := x.ear
	k := &e.head
	transport := k.Op.Transport()
	for more := true; more; more = n > 0 {
		size := min(n, e.mtu)
		part := data[:min(len(data), size)]
		first, last := e.off == 0, e.off+uint64(size) >= e.n
		x.shape(k, transport, first, last)
		k.AckReq = last && transport != roce.UC
		e.show(k, true, part, size)
		k.PSN = (k.PSN + 1) & roce.PSNMask
		e.off += uint64(size)
		data, n = data[len(part):], n-size
	}
	e.asked = true
}

// hearAnswer shows the next bytes of the answer to a read.
func (x *exec) hearAnswer(data []byte) {
	e := x.ear
	x.hearAsk()
	k := &e.answer
	transport := k.Op.Transport()
	k.Syndrome, k.MSN = ackCredits, (e.at.msn+1)&roce.PSNMask
	for more := true; more; more = len(data) > 0 {
		size := min(len(data), e.mtu)
		first, last := e.off == 0, e.off+uint64(size) >= e.n
		op := roce.ReadRespMiddle
		switch {
		case first && last:
			op = roce.ReadRespOnly
		case first:
			op = roce.ReadRespFirst
		case last:
			op = roce.ReadRespLast
		}
		k.Op = transport | op
		e.show(k, false, data[:size], size)
		k.PSN = (k.PSN + 1) & roce.PSNMask
		e.off += uint64(size)
		data = data[size:]
	}
}

// hearAsk shows the first packet of the request, if that was not done. The payload, if
// there is one in it, was not read: the packet is cut off.
func (x *exec) hearAsk() {
	e := x.ear
	if e.asked {
		return
	}
	e.asked = true
	k := &e.head
	transport := k.Op.Transport()
	switch {
	case x.op == hca.OpRDMARead:
		k.Op = transport | roce.ReadRequest
		k.DMALen = uint32(e.n)
	case x.op == hca.OpAtomicCmpSwap:
		k.Op = transport | roce.CompareSwap
		k.Swap, k.Compare = x.swap, x.compareAdd
	case x.op == hca.OpAtomicFetchAdd:
		k.Op = transport | roce.FetchAdd
		k.Swap = x.compareAdd
	default:
		x.hearRequest(nil, int(min(e.n, uint64(e.mtu))))
		return
	}
	k.VA, k.RKey, k.SRQN, k.AckReq = x.remoteAddr, x.rkey, x.srqn, true
	e.show(k, true, nil, 0)
}

// listened ends what listen began: it shows what the responder answers.
func (x *exec) listened(v verdict, st hca.WCStatus) {
	e := x.ear
	if e == nil {
		return
	}
	defer x.unlisten()
	transport := e.head.Op.Transport()
	k := &e.answer
	k.MSN = e.at.msn
	nak := uint8(0)
	switch {
	case v == needRecv:
		nak = roce.SyndromeRNR | x.minR&roce.SyndromeCode
	case v != finished: // the peer is gone, or somebody else is at the place
		return
	case transport == roce.UC:
		if st != hca.WCSuccess { // it could not be read to its end
			x.q.hearOn((e.head.PSN - e.at.psn) & roce.PSNMask)
			return
		}
		x.hearAsk() // what the responder dropped
		x.q.hearOn(e.packets(e.n))
		return
	case st == hca.WCRemInvReqErr:
		nak = roce.SyndromeNAK | roce.NAKInvalidReq
	case st == hca.WCRemAccessErr:
		nak = roce.SyndromeNAK | roce.NAKRemoteAccess
	case st == hca.WCRemOpErr:
		nak = roce.SyndromeNAK | roce.NAKRemoteOp
		if e.off > 0 && x.op != hca.OpRDMARead {
			k.PSN = (e.head.PSN - 1) & roce.PSNMask
		}
	case st != hca.WCSuccess && !isAtomic(x.op): // the requester's own fault
		return
	}
	x.hearAsk()
	k.Op = transport | roce.Acknowledge
	if nak != 0 {
		k.Syndrome = nak
		e.show(k, false, nil, 0)
		return
	}
	k.Syndrome, k.MSN = ackCredits, (e.at.msn+1)&roce.PSNMask
	n := e.packets(e.n)
	switch {
	case isAtomic(x.op): // also of one whose answer has no place at the requester
		n = 1
		k.Op, k.Orig = transport|roce.AtomicAck, binary.NativeEndian.Uint64(x.small[:])
	case x.op == hca.OpRDMARead:
		if e.n == 0 {
			x.hearAnswer(nil)
		}
		x.q.hearOn(n)
		return
	default:
		k.PSN = (e.at.psn + n - 1) & roce.PSNMask
	}
	e.show(k, false, nil, 0)
	x.q.hearOn(n)
}

func (x *exec) unlisten() {
	e := x.ear
	x.ear, e.out, e.in = nil, nil, nil
	ears.Put(e)
}

// hearOn counts a message of n packets.
func (q *QP) hearOn(n uint32) {
	q.s.mu.Lock()
	q.s.heard.psn += n
	q.s.heard.msn++
	q.s.mu.Unlock()
}

// hearDatagram shows a datagram as it leaves, and at the device of its receiver p,
// which is nil if there is none.
func (x *exec) hearDatagram(d *dgram, qkey uint32, p *QP) {
	to := x.q.dev
	if p != nil {
		to = p.dev
	}
	if x.ear = x.newEar(to); x.ear == nil {
		return
	}
	x.shapeDatagram(d, qkey)
	x.ear.show(&x.ear.head, true, d.buf[:d.n], d.n)
	x.q.hearOn(1)
	x.unlisten()
}

// hearGroup shows a datagram to a group: as it leaves, unless a link's tap shows that,
// and once at each other device that has members.
func (x *exec) hearGroup(d *dgram, qkey uint32, members []loop.Member, overLink bool) {
	own := x.q.dev
	hear := func(to *Device, tap *capture.Tap, wants int) {
		e := x.ear
		if e == nil {
			if e = x.newEar(to); e == nil { // he has gone
				return
			}
			x.ear = e
			x.shapeDatagram(d, qkey)
		}
		e.out, e.in, e.wants = nil, tap, wants
		if e.same = to == own; e.same {
			e.out, e.in = tap, nil
		}
		e.show(&e.head, true, d.buf[:d.n], d.n)
	}
	if tap, n := own.listening(); tap != nil && !overLink {
		hear(own, tap, n)
	}
	for i, m := range members {
		p, ok := m.(*QP)
		if !ok || p.dev == own {
			continue
		}
		if tap, n := p.dev.listening(); tap != nil && !hasDevice(members[:i], p.dev) {
			hear(p.dev, tap, n)
		}
	}
	if x.ear != nil {
		x.q.hearOn(1)
		x.unlisten()
	}
}

// hasDevice: is one of the members a queue pair of d?
func hasDevice(members []loop.Member, d *Device) bool {
	for _, m := range members {
		if p, ok := m.(*QP); ok && p.dev == d {
			return true
		}
	}
	return false
}

// shapeDatagram fills in the header of a datagram.
func (x *exec) shapeDatagram(d *dgram, qkey uint32) {
	k := &x.ear.head
	k.Op, k.Solicited = roce.UD|roce.SendOnly, d.solicited
	k.QKey, k.SrcQP, k.PSN = qkey, x.q.num, x.ear.at.psn
	if x.op == hca.OpSendImm {
		k.Op, k.Imm = roce.UD|roce.SendOnlyImm, x.imm
	}
	if loop.IsMulticast(&x.dest) {
		k.QPN = mcastQPN
	}
}

// show makes one packet, with so much of its n bytes of payload as is there and
// wanted, and shows it to those who listen.
func (e *ear) show(k *roce.Packet, request bool, payload []byte, n int) {
	at := k.Build(e.room[:])
	have := copy(e.room[at:at+n], payload[:min(len(payload), max(e.wants+roce.Headroom-at, 0))])
	// The sum of what is not there, a few bytes of an older packet, is cut off below.
	ip := roce.Seal(e.room[:], at+n)[roce.Headroom:]
	whole := len(ip)
	if have < n {
		ip = ip[:at-roce.Headroom+have]
	}
	if e.out != nil {
		dir := capture.In
		if request || e.same {
			dir = capture.Out
		}
		e.out.Note(dir, ip, whole)
	}
	if e.in != nil {
		dir := capture.Out
		if request {
			dir = capture.In
		}
		e.in.Note(dir, ip, whole)
	}
}
