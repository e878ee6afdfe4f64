package soft_test

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/rocetest"
	"github.com/uverbsd/uverbsd/hca/soft"
)

// A device whose peer is the test: packets are made by hand, and what comes back is
// looked at.

const (
	hostBase   = 0x7f0000200000
	hostRegion = 32 << 10 // bytes of memory that are registered
	hostGuard  = 32 << 10 // and beyond it, that are not
	hostMTU    = 256
	hostPSN    = 0xfffffd // both ways: it wraps at once
	peerQPN    = 0x700    // of the peer's end of the first QP
	hostWait   = 20 * time.Second
	hostAgain  = 500 * time.Millisecond
	hostStuck  = 50 * time.Millisecond // after which a copy counts as stuck
	hostAcc    = hca.AccessLocalWrite | hca.AccessRemoteWrite | hca.AccessRemoteRead | hca.AccessRemoteAtomic
)

// hostile is a device with one link, and the peer's link.
type hostile struct {
	t      testing.TB
	dev    *soft.Device
	l      *rocetest.Link
	peer   *rocetest.Link
	fenced *host // answers are in order: its tell that those before it have come
	qps    uint32
	in     chan roce.Packet // what comes to it
	bad    atomic.Bool
}

// host is a QP of the device, in RTS.
type host struct {
	h          *hostile
	ctx        hca.UContext
	pd         hca.PD
	scq, rcq   hca.CQ
	srq, other hca.SRQ // XRC: other is of another domain
	qp         hca.QP
	mem        *hcatest.Mem
	mr         hca.MR
	peerQPN    uint32
	psn        uint32 // what the peer sends next
	transport  roce.Opcode
	enter      func(hca.QPState) // by INIT, RTR and RTS
}

func newHostile(t testing.TB) *hostile {
	a, b := rocetest.NewPair(rocetest.Config{MTU: 4096})
	d, err := soft.New(loop.New(hca.LinkEthernet), soft.Config{GUID: hca.GUID{0, 2, 0xc9, 3, 7: 1}, Mapped: true, Link: a})
	if err != nil {
		t.Fatal(err)
	}
	h := &hostile{t: t, dev: d, l: a, peer: b, in: make(chan roce.Packet, 4096)}
	go h.listen()
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		b.Close()
		for range h.in { // until listen has ended
		}
		if n := a.Outstanding(); n != 0 {
			t.Errorf("%d packets were not given back", n)
		}
	})
	h.fenced = h.qp(hca.QPTypeRC, nil)
	return h
}

func ok[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// qp makes a QP; change, if there is any, changes the attributes of each move.
func (h *hostile) qp(typ hca.QPType, change func(*hca.QPAttr)) *host {
	h.t.Helper()
	t := h.t
	c := &host{h: h, mem: hcatest.NewMem(hostBase, hostRegion+hostGuard), peerQPN: peerQPN + h.qps, psn: hostPSN}
	h.qps++
	c.ctx = ok(h.dev.AllocUContext(nil))(t)
	c.pd = ok(c.ctx.AllocPD())(t)
	c.scq = ok(c.ctx.CreateCQ(hca.CQInit{Entries: 512}))(t)
	c.rcq = ok(c.ctx.CreateCQ(hca.CQInit{Entries: 512}))(t)
	c.mr = ok(c.pd.RegMR(hca.MRInit{Mem: c.mem, Start: hostBase, Length: hostRegion, IOVA: hostBase, Access: hostAcc}))(t)
	closers := []interface{ Close() error }{c.mr, c.rcq, c.scq, c.pd, c.ctx}
	in := hca.QPInit{Type: typ, SendCQ: c.scq, RecvCQ: c.rcq, Cap: hca.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 2, MaxRecvSGE: 2}}
	rcMask := hca.QPMaskMaxDestRdAtomic | hca.QPMaskMinRNRTimer
	rtsMask := hca.QPMaskTimeout | hca.QPMaskRetryCnt | hca.QPMaskRNRRetry | hca.QPMaskMaxRdAtomic
	switch typ {
	case hca.QPTypeXRCTgt:
		c.transport, rtsMask = roce.XRC, hca.QPMaskTimeout
		x := ok(h.dev.AllocXRCD())(t)
		y := ok(h.dev.AllocXRCD())(t)
		c.srq = ok(c.pd.CreateSRQ(hca.SRQInit{MaxWR: 64, MaxSGE: 2, XRCD: x, CQ: c.rcq}))(t)
		c.other = ok(c.pd.CreateSRQ(hca.SRQInit{MaxWR: 64, MaxSGE: 2, XRCD: y, CQ: c.rcq}))(t)
		c.qp = ok(x.CreateQP(hca.QPInit{Type: typ}))(t)
		closers = append([]interface{ Close() error }{c.srq, c.other, x, y}, closers...)
	case hca.QPTypeXRCIni:
		c.transport, rcMask = roce.XRC, 0
		in.RecvCQ = nil
		c.qp = ok(c.pd.CreateQP(in))(t)
	case hca.QPTypeUC:
		c.transport, rcMask, rtsMask = roce.UC, 0, 0
		c.qp = ok(c.pd.CreateQP(in))(t)
	case hca.QPTypeUD:
		c.transport, rcMask, rtsMask = roce.UD, 0, 0
		c.qp = ok(c.pd.CreateQP(in))(t)
	default:
		c.transport = roce.RC
		c.qp = ok(c.pd.CreateQP(in))(t)
	}
	t.Cleanup(func() {
		for _, o := range append([]interface{ Close() error }{c.qp}, closers...) {
			if err := o.Close(); err != nil {
				t.Error(err)
			}
		}
		for i, b := range c.mem.Get(hostRegion, hostGuard) {
			if b != 0 {
				t.Fatalf("byte %d after the region was written", i)
			}
		}
	})
	masks := map[hca.QPState]hca.QPAttrMask{
		hca.QPInitState: hca.QPMaskPort | hca.QPMaskPKeyIndex | hca.QPMaskAccess,
		hca.QPRTR:       hca.QPMaskAV | hca.QPMaskPathMTU | hca.QPMaskDestQPN | hca.QPMaskRQPSN | rcMask,
		hca.QPRTS:       hca.QPMaskSQPSN | rtsMask,
	}
	if typ == hca.QPTypeUD {
		masks[hca.QPInitState], masks[hca.QPRTR] = hca.QPMaskPort|hca.QPMaskPKeyIndex|hca.QPMaskQKey, 0
	}
	c.enter = func(state hca.QPState) {
		a := hca.QPAttr{
			State: state, Port: 1, Access: hostAcc, QKey: 0x11, PathMTU: 1, DestQPN: c.peerQPN, RQPSN: hostPSN, SQPSN: hostPSN,
			MaxDestRdAtomic: 4, MaxRdAtomic: 4, MinRNRTimer: 1, RetryCnt: 7, RNRRetry: 7,
			AH: hca.AHAttr{Port: 1, IsGlobal: true, DGID: h.peer.IPv4(), SGIDIndex: 1, HopLimit: 64},
		}
		if change != nil {
			change(&a)
		}
		check(t, c.qp.Modify(&a, masks[state]|hca.QPMaskState))
	}
	for _, s := range []hca.QPState{hca.QPInitState, hca.QPRTR, hca.QPRTS} {
		c.enter(s)
	}
	return c
}

// packet is a packet of the QP's peer.
func (c *host) packet(op roce.Opcode, psn uint32, n int) roce.Packet {
	k := roce.Packet{
		Src: c.h.peer.IPv4(), Dst: c.h.l.IPv4(), HopLimit: 64, TrafficClass: roce.ECT0, SrcPort: 0xc001, PKey: 0xffff,
		Op: c.transport | op, QPN: c.qp.Num(), PSN: psn & roce.PSNMask, VA: hostBase, RKey: c.mr.RKey(), DMALen: uint32(n),
		Payload: hcatest.Pattern(int(psn), n), AckReq: true, QKey: 0x11, SrcQP: c.peerQPN,
	}
	if c.srq != nil {
		k.SRQN = c.srq.Num()
	}
	return k
}

// raw is a packet's bytes, from the IP header on.
func raw(k *roce.Packet) []byte {
	var buf [roce.Headroom + roce.MaxPacket]byte
	at := k.Build(buf[:])
	return slices.Clone(roce.Seal(buf[:], at+copy(buf[at:], k.Payload))[roce.Headroom:])
}

// listen takes what comes from the device, until the link is closed.
func (h *hostile) listen() {
	defer close(h.in)
	var rs [1]roce.Received
	for {
		if _, err := h.peer.Recv(rs[:]); err != nil {
			return
		}
		var k roce.Packet
		ip := slices.Clone(rs[0].IP)
		rs[0].Release()
		if err := roce.Parse(ip, &k); err != nil {
			h.bad.Store(true)
		}
		h.in <- k
	}
}

// next is the next packet that comes from the device.
func (h *hostile) next() roce.Packet {
	h.t.Helper()
	k, came := h.within(hostWait)
	if !came {
		h.t.Fatal("no packet came")
	}
	return k
}

// within is next, for so long: then again is for what a busy machine has lost.
func (h *hostile) within(d time.Duration) (k roce.Packet, came bool) {
	h.t.Helper()
	late := time.NewTimer(d)
	defer late.Stop()
	select {
	case k, came = <-h.in:
		if !came || h.bad.Load() {
			h.t.Fatal("the link was closed, or the device has sent a bad packet")
		}
	case <-late.C:
	}
	return k, came
}

// short is a packet in short.
func short(k *roce.Packet) string {
	psn := (k.PSN - hostPSN) & roce.PSNMask
	switch op := k.Op.Operation(); {
	case k.Op == roce.CNP:
		return "cnp"
	case op == roce.Acknowledge && k.Syndrome&roce.SyndromeKind == roce.SyndromeACK:
		return fmt.Sprint("ack", psn)
	case op == roce.Acknowledge && k.Syndrome&roce.SyndromeKind == roce.SyndromeRNR:
		return fmt.Sprint("rnr", psn)
	case op == roce.Acknowledge:
		return fmt.Sprintf("nak%d:%d", k.Syndrome&roce.SyndromeCode, psn)
	case op == roce.AtomicAck:
		return fmt.Sprintf("atomic%d=%d", psn, k.Orig)
	case op >= roce.ReadRespFirst && op <= roce.ReadRespOnly:
		return fmt.Sprintf("read%d+%d", psn, len(k.Payload))
	case op == roce.ReadRequest:
		return fmt.Sprintf("get%d+%d", psn, k.DMALen)
	default:
		return fmt.Sprintf("op%d@%d", op, psn)
	}
}

// answers is what the device says up to now to the QP's peer, in short.
func (c *host) answers() string {
	c.h.t.Helper()
	f := c.h.fenced
	k := f.packet(roce.WriteOnly, f.psn, 0)
	f.psn++
	c.h.l.Inject(raw(&k))
	var said []string
	for tries := 0; ; {
		got, came := c.h.within(hostAgain)
		switch {
		case came && got.QPN == f.peerQPN && got.PSN == k.PSN:
			return strings.Join(said, " ")
		case !came && tries == 20:
			c.h.t.Fatal("the device is deaf")
		case !came:
			tries++
			c.h.l.Inject(raw(&k))
		case got.QPN == c.peerQPN:
			said = append(said, short(&got))
		}
	}
}

// done is what is in a CQ now, in short.
func done(cq hca.CQ) string {
	var said []string
	var wc [1]hca.WC
	for cq.Poll(wc[:]) == 1 {
		said = append(said, fmt.Sprintf("%d:%d", wc[0].ID, wc[0].Status))
	}
	return strings.Join(said, " ")
}

func (c *host) inject(ks ...roce.Packet) {
	for i := range ks {
		c.h.l.Inject(raw(&ks[i]))
	}
}

// recv posts receives of n bytes, numbered from 1.
func (c *host) recv(count, n int) {
	c.h.t.Helper()
	for i := range count {
		w := []hca.RecvWR{{ID: uint64(i + 1), SGE: []hca.SGE{{Addr: hostBase + 8192, Length: uint32(n), LKey: c.mr.LKey()}}}}
		var err error
		if c.srq != nil {
			_, err = c.srq.PostRecv(w)
		} else {
			_, err = c.qp.PostRecv(w)
		}
		if err != nil {
			c.h.t.Fatal(err)
		}
	}
}

func (c *host) state() hca.QPState { a, _ := c.qp.Query(); return a.State }
