package rxe_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/provider/rxe/rxetest"
)

const (
	memBase = 1 << 20
	memSize = 1 << 18
)

// mem is a client's memory of memSize bytes at memBase. What is asked for beyond
// those is a fault of the engine.
type mem struct {
	mu      sync.Mutex
	b       []byte
	outside atomic.Int64
	calls   atomic.Int64
	gate    atomic.Pointer[gate]
}

// gate holds up who touches the memory.
type gate struct{ in, out chan struct{} }

func (m *mem) at(n int, addr uint64) ([]byte, error) {
	m.calls.Add(1)
	if g := m.gate.Load(); g != nil {
		g.in <- struct{}{}
		<-g.out
	}
	if addr < memBase || addr > memBase+memSize || uint64(n) > memBase+memSize-addr {
		m.outside.Add(1)
		return nil, unix.EFAULT
	}
	return m.b[addr-memBase:][:n], nil
}

func (m *mem) ReadAt(p []byte, addr uint64) error {
	b, err := m.at(len(p), addr)
	if err == nil {
		m.mu.Lock()
		copy(p, b)
		m.mu.Unlock()
	}
	return err
}

func (m *mem) WriteAt(p []byte, addr uint64) error {
	b, err := m.at(len(p), addr)
	if err == nil {
		m.mu.Lock()
		copy(b, p)
		m.mu.Unlock()
	}
	return err
}

// client has a QP whose queues it maps.
type client struct {
	t        testing.TB
	dev      hca.Device
	typ      hca.QPType
	ctx      *rxetest.Context
	pd       hca.PD
	scq, rcq *rxetest.CQ
	srq      *rxetest.SRQ
	qp       *rxetest.QP
	mr       hca.MR
	mem      *mem
}

var smallCap = hca.QPCap{MaxSendWR: 31, MaxRecvWR: 31, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64}

func newClient(t testing.TB, d hca.Device, typ hca.QPType, c hca.QPCap, srq bool) *client {
	t.Helper()
	e := &client{t: t, dev: d, typ: typ, mem: &mem{b: make([]byte, memSize)}}
	u, err := d.AllocUContext(nil)
	check(t, err)
	e.ctx = u.(*rxetest.Context)
	t.Cleanup(func() { check(t, u.Close()) })
	e.pd, err = u.AllocPD()
	check(t, err)
	t.Cleanup(func() { check(t, e.pd.Close()) })
	for _, to := range []**rxetest.CQ{&e.scq, &e.rcq} {
		cq, err := u.CreateCQ(hca.CQInit{Entries: 1023})
		check(t, err)
		t.Cleanup(func() { check(t, cq.Close()) })
		*to = cq.(*rxetest.CQ)
	}
	e.mr, err = e.pd.RegMR(hca.MRInit{Mem: e.mem, Start: memBase, Length: memSize, IOVA: memBase, Access: 15})
	check(t, err)
	t.Cleanup(func() {
		check(t, e.mr.Close())
		if n := e.mem.outside.Load(); n > 0 {
			t.Errorf("%d accesses beyond the memory", n)
		}
	})
	in := hca.QPInit{Type: typ, SendCQ: e.scq, RecvCQ: e.rcq, Cap: c}
	if srq {
		s, err := e.pd.CreateSRQ(hca.SRQInit{MaxWR: 31, MaxSGE: 4})
		check(t, err)
		t.Cleanup(func() { check(t, s.Close()) })
		in.SRQ, e.srq = s, s.(*rxetest.SRQ)
	}
	q, err := e.pd.CreateQP(in)
	check(t, err)
	t.Cleanup(func() { check(t, q.Close()) })
	e.qp = q.(*rxetest.QP)
	return e
}

// to takes the QP to RTS, connected to peer.
func (e *client) to(peer *client) {
	e.t.Helper()
	q, port := e.qp, hca.QPMaskState|hca.QPMaskPKeyIndex|hca.QPMaskPort
	if e.typ == hca.QPTypeUD {
		check(e.t, q.Modify(&hca.QPAttr{State: hca.QPInitState, Port: 1, QKey: 5}, port|hca.QPMaskQKey))
		check(e.t, q.Modify(&hca.QPAttr{State: hca.QPRTR}, hca.QPMaskState))
		check(e.t, q.Modify(&hca.QPAttr{State: hca.QPRTS}, hca.QPMaskState|hca.QPMaskSQPSN))
		q.Run()
		return
	}
	check(e.t, q.Modify(&hca.QPAttr{State: hca.QPInitState, Port: 1, Access: 15}, port|hca.QPMaskAccess))
	rtr := hca.QPMaskState | hca.QPMaskAV | hca.QPMaskPathMTU | hca.QPMaskDestQPN | hca.QPMaskRQPSN
	rts := hca.QPMaskState | hca.QPMaskSQPSN
	if e.typ == hca.QPTypeRC {
		rtr |= hca.QPMaskMaxDestRdAtomic | hca.QPMaskMinRNRTimer
		rts |= hca.QPMaskTimeout | hca.QPMaskRetryCnt | hca.QPMaskRNRRetry | hca.QPMaskMaxRdAtomic
	}
	check(e.t, q.Modify(&hca.QPAttr{State: hca.QPRTR, PathMTU: 5, DestQPN: peer.qp.Num(), AH: hca.AHAttr{DLID: 1, Port: 1}, MaxDestRdAtomic: 4, MinRNRTimer: 1}, rtr))
	check(e.t, q.Modify(&hca.QPAttr{State: hca.QPRTS, Timeout: 14, RetryCnt: 7, RNRRetry: 7, MaxRdAtomic: 4}, rts))
	q.Run()
}

func (e *client) state() hca.QPState {
	a, _ := e.qp.Query()
	return a.State
}

func (e *client) set(s hca.QPState) {
	e.t.Helper()
	check(e.t, e.qp.Modify(&hca.QPAttr{State: s}, hca.QPMaskState))
	e.qp.Run()
}

// pair is two connected clients of one device.
func pair(t testing.TB, typ hca.QPType, c hca.QPCap, srq bool) (a, b *client) {
	t.Helper()
	d := device(t, loop.New(hca.LinkInfiniBand), 1)
	a, b = newClient(t, d, typ, c, srq), newClient(t, d, typ, c, srq)
	a.to(b)
	b.to(a)
	return a, b
}

// renew takes a pair through RESET to RTS.
func renew(a, b *client) {
	for _, e := range []*client{a, b} {
		e.set(hca.QPReset)
		drain(e)
	}
	a.to(b)
	b.to(a)
}

func drain(e *client) {
	var wc [64]hca.WC
	for e.scq.Poll(wc[:])+e.rcq.Poll(wc[:]) > 0 {
	}
}

func (e *client) sge(off, n int) hca.SGE {
	return hca.SGE{Addr: memBase + uint64(off), Length: uint32(n), LKey: e.mr.LKey()}
}

func (e *client) write(id uint64, peer *client, n int) hca.SendWR {
	return hca.SendWR{ID: id, Opcode: hca.OpRDMAWrite, Flags: hca.SendSignaled, SGE: []hca.SGE{e.sge(0, n)}, RemoteAddr: memBase, RKey: peer.mr.RKey()}
}

func (e *client) send(id uint64, n int) hca.SendWR {
	return hca.SendWR{ID: id, Opcode: hca.OpSend, Flags: hca.SendSignaled, SGE: []hca.SGE{e.sge(0, n)}}
}

func (e *client) post(w ...hca.SendWR) {
	e.t.Helper()
	if n, err := e.qp.PostSend(w); err != nil || n != len(w) {
		e.t.Fatalf("posted %d of %d: %v", n, len(w), err)
	}
	e.qp.Run()
}

func (e *client) recv(ids ...uint64) {
	e.t.Helper()
	for _, id := range ids {
		w := []hca.RecvWR{{ID: id, SGE: []hca.SGE{e.sge(1024, 1024)}}}
		var err error
		if e.srq != nil {
			_, err = e.srq.PostRecv(w)
		} else {
			_, err = e.qp.PostRecv(w)
		}
		check(e.t, err)
	}
}

// ring says that the client has written up to an index, and rings the doorbell.
func (e *client) ring(producer uint32) {
	e.t.Helper()
	e.qp.SendRing().SetProducer(producer)
	check(e.t, e.qp.Doorbell())
	e.qp.Run()
}

type wake chan struct{}

func (w wake) Wake(bool) { w <- struct{}{} }

// take waits for n completions.
func take(t testing.TB, cq *rxetest.CQ, n int) []hca.WC {
	t.Helper()
	got, buf, w := []hca.WC(nil), make([]hca.WC, n), make(wake, 1)
	for len(got) < n {
		k := cq.Poll(buf[:n-len(got)])
		got = append(got, buf[:k]...)
		if k > 0 || !cq.Await(w) {
			continue
		}
		select {
		case <-w:
		case <-time.After(20 * time.Second):
			t.Fatalf("%d of %d completions came: %+v", len(got), n, got)
		}
	}
	return got
}

func one(t testing.TB, cq *rxetest.CQ, id uint64, st hca.WCStatus) {
	t.Helper()
	if wc := take(t, cq, 1)[0]; wc.ID != id || wc.Status != st {
		t.Fatalf("completion %+v, want %d with status %d", wc, id, st)
	}
}

func none(t testing.TB, cq *rxetest.CQ) {
	t.Helper()
	var wc [1]hca.WC
	if cq.Poll(wc[:]) > 0 {
		t.Fatalf("completion %+v", wc[0])
	}
}

// put writes a send into a place of the ring, as it is.
func put(r rxetest.Ring, at uint32, w abi.RXESendWQE, data func(b []byte)) {
	*r.Send(at) = w
	if data != nil {
		data(r.SendData(at))
	}
}
