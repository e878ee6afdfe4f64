package soft_test

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// work is a request of the device's to the peer.
func (c *host) work(id uint64, op hca.SendOpcode, n int) hca.SendWR {
	return hca.SendWR{
		ID: id, Opcode: op, Flags: hca.SendSignaled, SGE: []hca.SGE{{Addr: hostBase + 4096, Length: uint32(n), LKey: c.mr.LKey()}},
		RemoteAddr: 0x1000, RKey: 7, RemoteQPN: 9, RemoteQKey: 0x11,
	}
}

func (c *host) post(ws ...hca.SendWR) {
	c.h.t.Helper()
	if n, err := c.qp.PostSend(ws); err != nil {
		c.h.t.Fatalf("posted %d: %v", n, err)
	}
	c.qp.Run()
}

// reply is an answer of the peer's.
func (c *host) reply(op roce.Opcode, i int, syndrome uint8, n int) roce.Packet {
	k := c.packet(op, uint32(hostPSN+i), n)
	k.Syndrome, k.Orig = syndrome, 42
	return k
}

// TestHostileAnswers: what a requester makes of answers. sent is what it has sent
// before them, said what after.
func TestHostileAnswers(t *testing.T) {
	const ack, rnr, nak = roce.SyndromeACK | roce.CreditsUnlimited, roce.SyndromeRNR | 1, roce.SyndromeNAK
	const rts, errs = hca.QPRTS, hca.QPErr
	send, read, add := hca.OpSend, hca.OpRDMARead, hca.OpAtomicFetchAdd
	type w = hca.SendWR
	for _, c := range []struct {
		name  string
		post  func(q *host) []w
		sent  string
		reply func(q *host) []roce.Packet
		said  string
		done  string
		state hca.QPState
	}{
		{"ack", func(q *host) []w { return []w{q.work(1, send, 1), q.work(2, send, 600)} }, "op4@0 op0@1 op1@2 op2@3",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.Acknowledge, 3, ack, 0)} }, "", "1:0 2:0", rts},
		{"ack of what was not sent", func(q *host) []w { return []w{q.work(1, send, 1)} }, "op4@0",
			func(q *host) []roce.Packet {
				return []roce.Packet{q.reply(roce.Acknowledge, 1, ack, 0), q.reply(roce.Acknowledge, -1, ack, 0), q.reply(roce.Acknowledge, 1<<23, ack, 0), q.reply(roce.Acknowledge, 1, nak|1, 0)}
			}, "", "", rts},
		{"ack twice", func(q *host) []w { return []w{q.work(1, send, 1)} }, "op4@0",
			func(q *host) []roce.Packet {
				return []roce.Packet{q.reply(roce.Acknowledge, 0, ack, 0), q.reply(roce.Acknowledge, 0, ack, 0)}
			}, "", "1:0", rts},
		{"sequence NAK storm", func(q *host) []w { return []w{q.work(1, send, 1), q.work(2, send, 1)} }, "op4@0 op4@1",
			func(q *host) []roce.Packet {
				return slices.Repeat([]roce.Packet{q.reply(roce.Acknowledge, 1, nak, 0)}, 200)
			}, "op4@1", "1:0", rts},
		{"invalid request", func(q *host) []w { return []w{q.work(1, send, 1), q.work(2, send, 1)} }, "op4@0 op4@1",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.Acknowledge, 1, nak|1, 0)} }, "", "1:0 2:9", errs},
		{"remote access", func(q *host) []w { return []w{q.work(1, send, 1)} }, "op4@0",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.Acknowledge, 0, nak|2, 0)} }, "", "1:10", errs},
		{"remote operation", func(q *host) []w { return []w{q.work(1, send, 1)} }, "op4@0",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.Acknowledge, 0, nak|3, 0)} }, "", "1:11", errs},
		{"reserved codes", func(q *host) []w { return []w{q.work(1, send, 1)} }, "op4@0",
			func(q *host) []roce.Packet {
				var ks []roce.Packet
				for s := 4; s < 32; s++ {
					ks = append(ks, q.reply(roce.Acknowledge, 0, uint8(nak|s), 0), q.reply(roce.Acknowledge, 0, uint8(0x40|s), 0), q.reply(roce.Acknowledge, 0, uint8(0x80|s), 0))
				}
				return ks
			}, "", "", rts},
		{"read", func(q *host) []w { return []w{q.work(1, read, 300)} }, "get0+300",
			func(q *host) []roce.Packet {
				return []roce.Packet{q.reply(roce.ReadRespFirst, 0, ack, 256), q.reply(roce.ReadRespLast, 1, ack, 44)}
			}, "", "1:0", rts},
		{"ack in a read", func(q *host) []w { return []w{q.work(1, read, 300)} }, "get0+300",
			func(q *host) []roce.Packet {
				return []roce.Packet{q.reply(roce.ReadRespFirst, 0, ack, 256), q.reply(roce.Acknowledge, 1, ack, 0), q.reply(roce.Acknowledge, 1, ack, 0)}
			}, "get1+44", "", rts},
		{"answer too short", func(q *host) []w { return []w{q.work(1, read, 300)} }, "get0+300",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.ReadRespOnly, 0, ack, 255)} }, "", "1:7", errs},
		{"answer too long", func(q *host) []w { return []w{q.work(1, read, 1)} }, "get0+1",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.ReadRespOnly, 0, ack, 2)} }, "", "1:7", errs},
		{"answer out of order", func(q *host) []w { return []w{q.work(1, read, 600)} }, "get0+600",
			func(q *host) []roce.Packet {
				return []roce.Packet{q.reply(roce.ReadRespLast, 2, ack, 88), q.reply(roce.ReadRespMiddle, 1, ack, 256)}
			}, "get0+600", "", rts},
		{"too many answers", func(q *host) []w { return []w{q.work(1, read, 1)} }, "get0+1",
			func(q *host) []roce.Packet {
				return []roce.Packet{q.reply(roce.ReadRespOnly, 0, ack, 1), q.reply(roce.ReadRespOnly, 0, ack, 1), q.reply(roce.ReadRespOnly, 1, ack, 1)}
			}, "", "1:0", rts},
		{"bytes for a send", func(q *host) []w { return []w{q.work(1, send, 1)} }, "op4@0",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.ReadRespOnly, 0, ack, 1)} }, "", "1:7", errs},
		{"bytes for an atomic", func(q *host) []w { return []w{q.work(1, add, 8)} }, "op20@0",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.ReadRespOnly, 0, ack, 8)} }, "", "1:7", errs},
		{"atomic answer for a read", func(q *host) []w { return []w{q.work(1, read, 8)} }, "get0+8",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.AtomicAck, 0, ack, 0)} }, "", "1:7", errs},
		{"atomic", func(q *host) []w { return []w{q.work(1, add, 8)} }, "op20@0",
			func(q *host) []roce.Packet {
				return []roce.Packet{q.reply(roce.AtomicAck, 0, ack, 0), q.reply(roce.AtomicAck, 0, ack, 0)}
			}, "", "1:0", rts},
		{"a read's answer in a NAK's clothes", func(q *host) []w { return []w{q.work(1, read, 8)} }, "get0+8",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.ReadRespOnly, 0, nak|2, 8)} }, "", "1:10", errs},
		{"depth", func(q *host) []w {
			return []w{q.work(1, read, 1), q.work(2, read, 1), q.work(3, read, 1), q.work(4, add, 8), q.work(5, read, 1), q.work(6, send, 1)}
		}, "get0+1 get1+1 get2+1 op20@3",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.ReadRespOnly, 0, ack, 1)} }, "get4+1 op4@5", "1:0", rts},
		{"requests as answers", func(q *host) []w { return []w{q.work(1, send, 1)} }, "op4@0",
			func(q *host) []roce.Packet { return []roce.Packet{q.packet(roce.SendOnly, hostPSN+1, 1)} }, "nak0:0", "", rts},
		// What is before a request that cannot be made is sent again all the same.
		{"bad key behind a loss", func(q *host) []w {
			bad := q.work(2, send, 1)
			bad.SGE[0].LKey++
			return []w{q.work(1, send, 1), bad}
		}, "op4@0",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.Acknowledge, 0, nak, 0)} }, "op4@0", "", rts},
		{"bad key behind a read", func(q *host) []w {
			bad := q.work(2, send, 1)
			bad.SGE[0].LKey++
			return []w{q.work(1, read, 1), bad, q.work(3, send, 1)}
		}, "get0+1",
			func(q *host) []roce.Packet { return []roce.Packet{q.reply(roce.ReadRespOnly, 0, ack, 1)} }, "", "1:0 2:4 3:5", errs},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHostile(t)
			q := h.qp(hca.QPTypeRC, nil)
			q.post(c.post(q)...)
			if got := q.answers(); got != c.sent {
				t.Fatalf("sent %q, want %q", got, c.sent)
			}
			q.inject(c.reply(q)...)
			if got := q.answers(); got != c.said {
				t.Errorf("said %q, want %q", got, c.said)
			}
			if got := done(q.scq); got != c.done {
				t.Errorf("completions %q, want %q", got, c.done)
			}
			if got := q.state(); got != c.state {
				t.Errorf("state %d, want %d", got, c.state)
			}
		})
	}
}

// TestHostileRNR: an RNR NAK storm neither fails the request nor is answered with one.
func TestHostileRNR(t *testing.T) {
	h := newHostile(t)
	q := h.qp(hca.QPTypeRC, nil)
	q.post(q.work(1, hca.OpSend, 1))
	if got := q.answers(); got != "op4@0" {
		t.Fatal(got)
	}
	for range 500 {
		q.inject(q.reply(roce.Acknowledge, 0, roce.SyndromeRNR|1, 0))
	}
	for k := h.next(); k.QPN != q.peerQPN; k = h.next() { // it comes again, when its time is over
	}
	q.inject(q.reply(roce.Acknowledge, 0, roce.SyndromeACK, 0))
	q.answers()
	if got := done(q.scq); got != "1:0" {
		t.Fatalf("completions %q", got)
	}
	// With no retries the first one ends it.
	q = h.qp(hca.QPTypeRC, func(a *hca.QPAttr) { a.RNRRetry = 0 })
	q.post(q.work(1, hca.OpSend, 1), q.work(2, hca.OpSend, 1))
	q.answers()
	q.inject(q.reply(roce.Acknowledge, 0, roce.SyndromeRNR|1, 0))
	q.answers()
	if got := done(q.scq); got != "1:13 2:5" {
		t.Fatalf("completions %q", got)
	}
}

// TestHostileStates: whatever comes in whatever state, what was posted is completed
// once and nothing goes out that should not.
func TestHostileStates(t *testing.T) {
	all := func(q *host) (ks []roce.Packet) {
		for op := range 256 {
			for _, i := range []int{-1, 0, 1} {
				k := q.packet(0, uint32(hostPSN+i), 256)
				k.Op = roce.Opcode(op)
				if k.Op.IsKnown() {
					if op := k.Op.Operation(); k.Op == roce.CNP || op >= roce.ReadRequest && (op < roce.ReadRespFirst || op > roce.ReadRespOnly) && op < roce.SendLastInv {
						k.Payload = nil
					}
					ks = append(ks, k)
				}
			}
		}
		return ks
	}
	for _, typ := range []hca.QPType{hca.QPTypeRC, hca.QPTypeUC, hca.QPTypeUD, hca.QPTypeXRCTgt, hca.QPTypeXRCIni} {
		for _, to := range []hca.QPState{hca.QPReset, hca.QPInitState, hca.QPRTR, hca.QPRTS, hca.QPSQD, hca.QPErr} {
			t.Run(fmt.Sprintf("%d to %d", typ, to), func(t *testing.T) {
				h := newHostile(t)
				q := h.qp(typ, nil)
				if to == hca.QPInitState || to == hca.QPRTR {
					check(t, q.qp.Modify(&hca.QPAttr{State: hca.QPReset}, hca.QPMaskState))
					for s := hca.QPInitState; s <= to; s++ {
						q.enter(s)
					}
				}
				if typ != hca.QPTypeXRCIni {
					q.recv(4, 1024)
				}
				if to != q.state() {
					check(t, q.qp.Modify(&hca.QPAttr{State: to}, hca.QPMaskState))
				}
				q.inject(all(q)...)
				said := q.answers()
				if (to < hca.QPRTR || to == hca.QPErr) && said != "" {
					t.Errorf("said %q", said)
				}
				if got := done(q.rcq); to < hca.QPRTR && got != "" {
					t.Errorf("receives %q", got)
				}
			})
		}
	}
}

// TestHostileBounds: a peer that asks on and on while the client's memory does not
// answer makes no queue long, and finds nobody else held up.
func TestHostileBounds(t *testing.T) {
	h := newHostile(t)
	q, free := h.qp(hca.QPTypeRC, nil), h.qp(hca.QPTypeRC, nil)
	g := q.mem.Block()
	t.Cleanup(q.mem.Unblock)
	k := q.packet(roce.ReadRequest, hostPSN, 0)
	k.DMALen = 8
	q.inject(k)
	<-g.In
	var sent []roce.Packet
	for i := range 2000 {
		k.PSN = uint32(hostPSN+1+i%3) & roce.PSNMask
		q.inject(k)
		k.PSN = hostPSN
		q.inject(k)
		f := free.packet(roce.WriteOnly, uint32(hostPSN+i), 1)
		free.inject(f)
		sent = append(sent, f)
		for i%100 == 99 {
			k, came := h.within(hostAgain)
			if !came {
				free.inject(sent...)
			}
			if k.QPN == free.peerQPN && k.PSN == f.PSN {
				sent = sent[:0]
				break
			}
		}
	}
}

// stopper is memory whose n-th reading waits for out.
type stopper struct {
	*hcatest.Mem
	left    atomic.Int32
	in, out chan struct{}
}

func (s *stopper) ReadAt(p []byte, addr uint64) error {
	if s.left.Add(-1) == 0 {
		close(s.in)
		<-s.out
	}
	return s.Mem.ReadAt(p, addr)
}

// TestHostileQueue: as TestHostileBounds, when it is a worker that is held up. What
// waits behind the answer stays short.
func TestHostileQueue(t *testing.T) {
	const most = 70 // 64 answers, and those that are always let in
	h := newHostile(t)
	q := h.qp(hca.QPTypeRC, nil)
	m := &stopper{Mem: q.mem, in: make(chan struct{}), out: make(chan struct{})}
	m.left.Store(80)
	mr := ok(q.pd.RegMR(hca.MRInit{Mem: m, Start: hostBase, Length: hostRegion, IOVA: hostBase, Access: hostAcc}))(t)
	t.Cleanup(func() { check(t, mr.Close()) })
	k := q.packet(roce.ReadRequest, hostPSN, 0)
	k.RKey, k.DMALen = mr.RKey(), 100*hostMTU
	q.inject(k)
	<-m.in
	k.DMALen = 0
	for range 300 {
		for i := range 3 {
			k.PSN = uint32(hostPSN+100+5+i) & roce.PSNMask
			q.inject(k)
		}
		k.PSN = (hostPSN + 100) & roce.PSNMask
		for range 6 {
			q.inject(k)
			k.PSN++
		}
	}
	q.answers()
	close(m.out)
	last := q.packet(roce.ReadRequest, 0, 0)
	last.PSN, last.DMALen = (hostPSN+99)&roce.PSNMask, 0
	n := 0
	for k := h.next(); ; k = h.next() {
		if k.QPN != q.peerQPN || k.Op.Operation() != roce.Acknowledge && k.PSN != (hostPSN+99)&roce.PSNMask {
			continue
		}
		if n == 0 { // the answer's end has come: what follows is what has waited
			q.inject(q.packet(roce.WriteOnly, hostPSN, 0))
		}
		if n++; k.Syndrome == roce.SyndromeACK|roce.CreditsUnlimited && k.Op.Operation() == roce.Acknowledge {
			break
		}
	}
	if n > most {
		t.Errorf("%d answers had waited", n)
	}
}

// TestHostileLeaders: packets that stop one leader and then the next, all of one batch,
// hold up no third client, whose completion was noted before them.
func TestHostileLeaders(t *testing.T) {
	h := newHostile(t)
	a, b, c := h.qp(hca.QPTypeRC, nil), h.qp(hca.QPTypeRC, nil), h.qp(hca.QPTypeRC, nil)
	z := h.qp(hca.QPTypeRC, nil)
	zg := z.mem.Block()
	c.recv(2, 16)
	w := wakes(make(chan struct{}, 1))
	if !c.rcq.Await(w) {
		t.Fatal("not armed")
	}
	z.inject(z.packet(roce.WriteOnly, hostPSN, 1)) // so that what follows is one batch
	<-zg.In
	ag, bg := a.mem.Block(), b.mem.Block()
	t.Cleanup(func() { z.mem.Unblock(); a.mem.Unblock(); b.mem.Unblock() })
	c.inject(c.packet(roce.SendOnly, hostPSN, 1))
	a.inject(a.packet(roce.WriteOnly, hostPSN, 1))
	b.inject(b.packet(roce.WriteOnly, hostPSN, 1))
	c.inject(c.packet(roce.SendOnly, hostPSN+1, 1))
	<-ag.In
	<-bg.In
	if got := c.answers(); got != "ack0 ack1" {
		t.Errorf("answers %q", got)
	}
	select {
	case <-w:
	case <-time.After(hostWait):
		t.Error("the completion before the stuck ones was not told")
	}
	if got := done(c.rcq); got != "1:0 2:0" {
		t.Errorf("receives %q", got)
	}
}

type wakes chan struct{}

func (w wakes) Wake(bool) { w <- struct{}{} }

// TestHostileLateRead: an answer that is being written when the QP goes to ERR is
// not written after the read was flushed, unless it is stuck.
func TestHostileLateRead(t *testing.T) {
	h := newHostile(t)
	q := h.qp(hca.QPTypeRC, nil)
	q.post(q.work(1, hca.OpRDMARead, 8), q.work(2, hca.OpSend, 8))
	q.answers()
	g := q.mem.Block()
	q.inject(q.reply(roce.ReadRespOnly, 0, roce.SyndromeACK, 8))
	t.Cleanup(q.mem.Unblock)
	<-g.In
	began, done1 := time.Now(), make(chan error, 1)
	go func() { done1 <- q.qp.Modify(&hca.QPAttr{State: hca.QPErr}, hca.QPMaskState) }()
	for q.state() != hca.QPErr {
		runtime.Gosched()
	}
	if got := done(q.scq); got != "" && time.Since(began) < hostStuck/2 {
		t.Errorf("completions %q while the answer is written", got)
		return
	}
	q.mem.Unblock()
	if err := <-done1; err != nil {
		t.Fatal(err)
	}
	if got := done(q.scq); got != "1:5 2:5" {
		t.Errorf("completions %q", got)
	}
}

// TestHostilePath: a path that changes while packets are on their way takes none of
// them away.
func TestHostilePath(t *testing.T) {
	h := newHostile(t)
	q := h.qp(hca.QPTypeRC, func(a *hca.QPAttr) { a.Timeout = 10 })
	q.recv(1, 1024)
	q.inject(q.packet(roce.SendFirst, hostPSN, 256))
	q.post(q.work(1, hca.OpSend, 8))
	q.answers()
	if err := q.qp.Modify(&hca.QPAttr{State: hca.QPSQD}, hca.QPMaskState); err != nil {
		t.Fatal(err)
	}
	a := hca.QPAttr{AH: hca.AHAttr{Port: 1, IsGlobal: true, DGID: h.peer.IPv4(), SGIDIndex: 1, HopLimit: 64, TrafficClass: 0x10}}
	if err := q.qp.Modify(&a, hca.QPMaskAV); err != nil {
		t.Fatal(err)
	}
	k := h.next()
	for k.QPN != q.peerQPN || k.TrafficClass&^roce.ECNMask != 0x10 { // sent again, the new way
		k = h.next()
	}
	q.inject(q.packet(roce.SendLast, hostPSN+1, 8), q.reply(roce.Acknowledge, 0, roce.SyndromeACK, 0))
	q.answers()
	if r, s := done(q.rcq), done(q.scq); r != "1:0" || s != "1:0" {
		t.Errorf("receives %q, sends %q", r, s)
	}
}

// TestHostileBytes: packets that are short or padded, and every opcode (row 18).
func TestHostileBytes(t *testing.T) {
	h := newHostile(t)
	q := h.qp(hca.QPTypeRC, nil)
	q.recv(1, 1024)
	k := q.packet(roce.SendOnly, hostPSN+5, 64)
	whole := raw(&k)
	for n := range len(whole) {
		h.l.Inject(whole[:n])
	}
	for op := range 256 {
		for pad := range byte(4) {
			for n := range 65 {
				var buf [roce.Headroom + roce.MaxPacket]byte
				at := k.Build(buf[:])
				ip := buf[roce.Headroom:]
				bth := ip[28:]
				bth[0], bth[1] = byte(op), bth[1]|pad<<4
				end := at - 0 + n
				if n > 0 && n%3 == 0 { // shorter than its headers
					end = roce.Headroom + 28 + 12 + n/3
				}
				for end&3 != roce.Headroom&3 {
					end++
				}
				p := roce.Seal(buf[:], end)
				h.l.Inject(p[roce.Headroom:])
				if n%16 == 1 {
					p[len(p)-1] ^= 1
					h.l.Inject(p[roce.Headroom:])
				}
			}
		}
		q.answers() // what is queued stays short
	}
	binary.BigEndian.PutUint16(whole[2:], 0xffff)
	h.l.Inject(whole)
	q.answers()
	if st := q.state(); st != hca.QPRTS {
		t.Errorf("state %d", st)
	}
}

// TestHostileDatagram: a datagram that does not fit the link is not sent, and its
// sender is told.
func TestHostileDatagram(t *testing.T) {
	h := newHostile(t)
	q := h.qp(hca.QPTypeUD, nil)
	h.l.SetState(func(s *roce.LinkState) { s.MTU = 1024 })
	ah := ok(q.pd.CreateAH(hca.AHAttr{Port: 1, IsGlobal: true, DGID: h.peer.IPv4(), SGIDIndex: 1, HopLimit: 64}))(t)
	t.Cleanup(func() { check(t, ah.Close()) })
	fits, not := q.work(1, hca.OpSend, 1024), q.work(2, hca.OpSend, 1025)
	fits.AH, not.AH, fits.RemoteQPN = ah, ah, q.peerQPN
	q.post(fits, not)
	if got := q.answers(); got != "op4@0" {
		t.Errorf("sent %q", got)
	}
	if got := done(q.scq); got != "1:0 2:1" {
		t.Errorf("completions %q", got)
	}
}
