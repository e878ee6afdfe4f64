package rxe_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
	"github.com/uverbsd/uverbsd/hca/provider/rxe/rxetest"
)

// The sizes are the kernel's (rxe_queue_init, rxe_init_sq, rxe_init_rq): places a
// power of two, entries too.
func TestSizes(t *testing.T) {
	a := &rxetest.Arena{}
	q := rxe.Provider{}.NewQueues(a)
	size := func(m hca.Mapped, places, elem int) {
		t.Helper()
		if m.Len() != places-1 {
			t.Errorf("room for %d, want %d", m.Len(), places-1)
		}
		r := rxetest.Ring{Mem: a.Client(m.Info())}
		if h := r.Header(); h.IndexMask != uint32(places-1) || 1<<h.Log2ElemSize != elem {
			t.Errorf("header: mask %#x, elements of %d; want %d of %d", h.IndexMask, 1<<h.Log2ElemSize, places, elem)
		}
		if want := (384 + places*elem + 4095) &^ 4095; int(m.Info().Size) != want {
			t.Errorf("%d bytes, want %d", m.Info().Size, want)
		}
		m.Close()
	}
	for _, x := range []struct{ asked, places int }{{1, 2}, {2, 4}, {3, 4}, {4, 8}, {255, 256}, {256, 512}} {
		c, err := q.NewCompQueue(x.asked)
		check(t, err)
		size(c, x.places, 128)
	}
	for _, x := range []struct {
		in, out hca.QPCap
		elem    int
	}{
		{hca.QPCap{}, hca.QPCap{MaxSendWR: 0}, 256},
		{hca.QPCap{MaxSendWR: 1, MaxSendSGE: 1}, hca.QPCap{MaxSendWR: 1, MaxSendSGE: 1, MaxInline: 16}, 256},
		{hca.QPCap{MaxSendWR: 5, MaxSendSGE: 4}, hca.QPCap{MaxSendWR: 7, MaxSendSGE: 4, MaxInline: 64}, 512},
		{hca.QPCap{MaxSendWR: 8, MaxInline: 100}, hca.QPCap{MaxSendWR: 15, MaxSendSGE: 6, MaxInline: 100}, 512},
		{hca.QPCap{MaxSendWR: 8, MaxSendSGE: 32, MaxInline: 512}, hca.QPCap{MaxSendWR: 15, MaxSendSGE: 32, MaxInline: 512}, 1024},
	} {
		s, err := q.NewSendQueue(x.in)
		check(t, err)
		if s.Cap() != x.out {
			t.Errorf("%+v for %+v, want %+v", s.Cap(), x.in, x.out)
		}
		size(s, s.Len()+1, x.elem)
	}
	for _, x := range []struct{ wr, sge, places, elem int }{{1, 1, 2, 64}, {4, 2, 8, 128}, {100, 27, 128, 512}, {0, 0, 1, 64}, {3, 32, 4, 1024}} {
		r, err := q.NewRecvQueue(uint32(x.wr), uint32(x.sge))
		check(t, err)
		size(r, x.places, x.elem)
	}
	for _, err := range []error{
		errOf(q.NewSendQueue(hca.QPCap{MaxSendSGE: 33})), errOf(q.NewSendQueue(hca.QPCap{MaxInline: 513})),
		errOf(q.NewRecvQueue(1, 33)), errOf(q.NewCompQueue(-1)), errOf(q.NewCompQueue(1 << 30)),
	} {
		if err == nil {
			t.Error("made")
		}
	}
	if n := a.Left(); n != 0 {
		t.Errorf("%d queues left", n)
	}
}

func errOf[T any](_ T, err error) error { return err }

// poor is an arena that has nothing.
type poor struct{}

func (poor) Alloc(int) ([]byte, uint64, error) { return nil, 0, unix.ENOMEM }
func (poor) Free(uint64)                       {}

func TestNoMemory(t *testing.T) {
	q := rxe.Provider{}.NewQueues(poor{})
	for _, err := range []error{
		errOf(q.NewCompQueue(1)), errOf(q.NewSendQueue(hca.QPCap{})), errOf(q.NewRecvQueue(1, 1)),
	} {
		wantErrno(t, err, unix.ENOMEM)
	}
}

// The driver's parts of the answers.
func TestAnswers(t *testing.T) {
	a := &rxetest.Arena{}
	q := rxe.Provider{}.NewQueues(a)
	c, err := q.NewCompQueue(1)
	check(t, err)
	s, err := q.NewSendQueue(hca.QPCap{MaxSendWR: 9})
	check(t, err)
	r, err := q.NewRecvQueue(9, 1)
	check(t, err)
	mi := func(m hca.Mapped) abi.RXEMMInfo { return abi.RXEMMInfo{Offset: m.Info().Offset, Size: m.Info().Size} }
	if got := rxetest.Answer[abi.RXEMMInfo](q.CQAnswer(c)); got != mi(c) {
		t.Errorf("CQ: %+v", got)
	}
	for _, x := range []struct {
		r    hca.RecvQueue
		s    hca.SendQueue
		want abi.RXECreateQPResp
	}{
		{r, s, abi.RXECreateQPResp{RQ: mi(r), SQ: mi(s)}},
		{nil, s, abi.RXECreateQPResp{SQ: mi(s)}},
		{nil, nil, abi.RXECreateQPResp{}},
	} {
		if got := rxetest.Answer[abi.RXECreateQPResp](q.QPAnswer(x.r, x.s)); got != x.want {
			t.Errorf("QP: %+v, want %+v", got, x.want)
		}
	}
	if got := rxetest.Answer[abi.RXECreateSRQResp](q.SRQAnswer(r, 7)); got != (abi.RXECreateSRQResp{MI: mi(r), SRQNum: 7}) {
		t.Errorf("SRQ: %+v", got)
	}
	if got := rxetest.Answer[abi.RXEMMInfo](q.SRQResizeAnswer(r)); got != mi(r) {
		t.Errorf("resized SRQ: %+v", got)
	}
	if got := rxetest.Answer[abi.RXECreateAHResp](q.AHAnswer(8)); got != (abi.RXECreateAHResp{AHNum: 8}) {
		t.Errorf("AH: %+v", got)
	}
	for _, m := range []hca.Mapped{c, s, r} {
		m.Close()
	}
}

func wantErrno(t testing.TB, err error, want unix.Errno) {
	t.Helper()
	if err == nil || !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

// One doorbell for a whole queue, more than is taken at a time, and many for few.
func TestDoorbells(t *testing.T) {
	a, b := pair(t, hca.QPTypeRC, smallCap, false)
	depth := int(a.qp.Cap().MaxSendWR)
	wrs := make([]hca.SendWR, depth+1)
	for i := range wrs {
		wrs[i] = a.write(uint64(i), b, 64)
	}
	n, err := a.qp.PostSend(wrs) // as librxe: the rest is refused, what fits is rung for
	wantErrno(t, err, unix.ENOMEM)
	if n != depth {
		t.Fatalf("%d posted, want %d", n, depth)
	}
	for range 3 {
		check(t, a.qp.Doorbell())
	}
	a.qp.Run()
	for i, wc := range take(t, a.scq, depth) {
		if wc.ID != uint64(i) || wc.Status != hca.WCSuccess {
			t.Fatalf("completion %d: %+v", i, wc)
		}
	}
	check(t, a.qp.Doorbell())
	a.qp.Run()
	none(t, a.scq)
}

// What nobody is told of gives its place back all the same.
func TestUnsignaledRetire(t *testing.T) {
	a, b := pair(t, hca.QPTypeRC, smallCap, false)
	depth := int(a.qp.Cap().MaxSendWR)
	for range 3 * depth {
		w := a.write(1, b, 8)
		w.Flags = 0
		a.post(w)
	}
	none(t, a.scq)
	if r := a.qp.SendRing(); !r.Empty() {
		t.Errorf("producer %d, consumer %d", r.Producer(), r.Consumer())
	}
}

// A send's place is the client's again when it is completed, a receive's too, that
// of an SRQ's receive once a message has taken it.
func TestPlaces(t *testing.T) {
	for _, srq := range []bool{false, true} {
		a, b := pair(t, hca.QPTypeRC, smallCap, srq)
		recvs := b.rings()[3]
		b.recv(1)
		g := &gate{in: make(chan struct{}, 8), out: make(chan struct{})}
		b.mem.gate.Store(g)
		_, err := a.qp.PostSend([]hca.SendWR{a.send(2, 64)})
		check(t, err)
		done := make(chan struct{})
		go func() { defer close(done); a.qp.Run() }()
		<-g.in // the message is being written
		if a.qp.SendRing().Empty() || recvs.Empty() != srq {
			t.Errorf("srq %v: on the way: sends left %v, receives left %v", srq, !a.qp.SendRing().Empty(), !recvs.Empty())
		}
		b.mem.gate.Store(nil)
		close(g.out)
		<-done
		one(t, b.rcq, 1, hca.WCSuccess)
		one(t, a.scq, 2, hca.WCSuccess)
		if !a.qp.SendRing().Empty() || !recvs.Empty() {
			t.Errorf("srq %v: places are kept", srq)
		}
	}
}

// Who has seen a completion has the place back: it is given back before, also by a
// flush.
func TestPlaceBeforeCompletion(t *testing.T) {
	for _, flush := range []bool{false, true} {
		a, b := pair(t, hca.QPTypeRC, smallCap, false)
		const total = 20
		look := func(r rxetest.Ring, what string) func() {
			left := uint32(total)
			return func() {
				left--
				if n := (r.Producer() - r.Consumer()) & r.Header().IndexMask; n != left {
					t.Errorf("flush %v: at a completion %d %s keep their places, want %d", flush, n, what, left)
				}
			}
		}
		a.scq.OnPush = look(a.qp.SendRing(), "sends")
		b.rcq.OnPush = look(b.qp.RecvRing(), "receives")
		if !flush {
			b.recv(make([]uint64, total)...)
		}
		var wrs []hca.SendWR
		for range total {
			wrs = append(wrs, a.send(0, 8))
		}
		a.post(wrs...)
		if flush {
			a.set(hca.QPErr)
			b.recv(make([]uint64, total)...)
			b.set(hca.QPErr)
		}
		take(t, a.scq, total)
		take(t, b.rcq, total)
	}
}

// A queue's memory goes with its object, though a runner is still in a client's
// memory: when it comes back it touches nothing (the memory is unmapped).
func TestCloseWhileStuck(t *testing.T) {
	for _, srq := range []bool{false, true} {
		a, b := pair(t, hca.QPTypeRC, smallCap, srq)
		b.recv(1, 2)
		g := &gate{in: make(chan struct{}, 8), out: make(chan struct{})}
		b.mem.gate.Store(g)
		_, err := a.qp.PostSend([]hca.SendWR{a.send(3, 64), a.send(4, 64)})
		check(t, err)
		done := make(chan struct{})
		go func() { defer close(done); a.qp.Run() }()
		<-g.in
		for _, e := range []*client{a, b} {
			check(t, e.qp.Close())
			if srq {
				check(t, e.srq.Close())
			}
			check(t, e.scq.Close())
			check(t, e.rcq.Close())
			if n := e.ctx.Arena.Left(); n > 0 {
				t.Errorf("%d queues left", n)
			}
		}
		b.mem.gate.Store(nil)
		close(g.out)
		<-done
	}
}

// RESET empties both queues, whatever was posted.
func TestResetEmpties(t *testing.T) {
	a, b := pair(t, hca.QPTypeRC, smallCap, false)
	a.recv(1, 2, 3)
	for i := range uint64(20) {
		a.post(a.send(i, 8)) // there is no receive
	}
	a.set(hca.QPReset)
	if !a.qp.SendRing().Empty() || !a.qp.RecvRing().Empty() {
		t.Error("something is left")
	}
	b.set(hca.QPReset)
	a.to(b)
	b.to(a)
	b.recv(4)
	a.post(a.send(5, 8))
	one(t, a.scq, 5, hca.WCSuccess)
	one(t, b.rcq, 4, hca.WCSuccess)
	none(t, a.scq)
}

// A doorbell before RTS is refused; what was written stays and is found by the next
// one, as in the kernel.
func TestDoorbellBeforeRTS(t *testing.T) {
	a, b := pair(t, hca.QPTypeRC, smallCap, false)
	a.set(hca.QPReset)
	_, err := a.qp.PostSend([]hca.SendWR{a.write(1, b, 8)})
	wantErrno(t, err, unix.EINVAL)
	none(t, a.scq)
	a.to(b)
	a.post(a.write(2, b, 8))
	one(t, a.scq, 1, hca.WCSuccess)
	one(t, a.scq, 2, hca.WCSuccess)
}

// Receives that come in ERR are flushed when the QP is next looked at.
func TestLateReceives(t *testing.T) {
	for name, look := range map[string]func(e *client) error{
		"doorbell": func(e *client) error { return e.qp.Doorbell() },
		"modify":   func(e *client) error { return e.qp.Modify(&hca.QPAttr{State: hca.QPErr}, hca.QPMaskState) },
	} {
		t.Run(name, func(t *testing.T) {
			a, _ := pair(t, hca.QPTypeRC, smallCap, false)
			a.recv(1)
			a.set(hca.QPErr)
			one(t, a.rcq, 1, hca.WCWRFlushErr)
			r := a.qp.RecvRing()
			at := r.Producer()
			r.Recv(at).WRID = 2
			r.SetProducer(r.Next(at))
			check(t, look(a))
			one(t, a.rcq, 2, hca.WCWRFlushErr)
		})
	}
}

// Address handles go by number; what names none fails, and nothing else does.
func TestAddressHandles(t *testing.T) {
	a, b := pair(t, hca.QPTypeUD, smallCap, false)
	h, err := a.pd.CreateAH(hca.AHAttr{DLID: 1, Port: 1})
	check(t, err)
	gone, err := a.pd.CreateAH(hca.AHAttr{DLID: 1, Port: 1})
	check(t, err)
	check(t, gone.Close())
	for num, want := range map[uint32]hca.WCStatus{
		1: hca.WCSuccess, 0: hca.WCLocQPOpErr, 2: hca.WCLocQPOpErr, 3: hca.WCLocQPOpErr, 1<<32 - 1: hca.WCLocQPOpErr,
	} {
		b.recv(7)
		r := a.qp.SendRing()
		at := r.Producer()
		put(r, at, abi.RXESendWQE{WR: abi.RXESendWR{WRID: 8, Opcode: uint32(hca.OpSend), SendFlags: signaled}}, nil)
		rxetest.PutAH(&r.Send(at).WR, num, b.qp.Num(), 5)
		a.ring(r.Next(at))
		one(t, a.scq, 8, want)
		if want == hca.WCSuccess {
			one(t, b.rcq, 7, hca.WCSuccess)
		} else {
			none(t, b.rcq)
		}
		renew(a, b)
	}
	check(t, h.Close())
}

// Nobody is told of a receive: the sender finds it soon after the RNR wait, and
// when it has waited long, in proportion. It does not spin: there are few looks.
func TestReceiveWithoutDoorbell(t *testing.T) {
	for _, wait := range []time.Duration{0, 10 * time.Microsecond, time.Millisecond, 100 * time.Millisecond, time.Second, time.Minute, time.Hour} {
		for _, srq := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				a, b := pair(t, hca.QPTypeRC, smallCap, srq)
				a.post(a.send(1, 8))
				time.Sleep(wait)
				none(t, a.scq)
				b.recv(2)
				start := time.Now()
				one(t, a.scq, 1, hca.WCSuccess)
				one(t, b.rcq, 2, hca.WCSuccess)
				// The payload is read at each look.
				if n, most := a.mem.calls.Load(), int64(70+10*wait.Seconds()); n > most {
					t.Errorf("after %v: %d looks, want at most %d", wait, n, most)
				}
				if d, most := time.Since(start), max(100*time.Microsecond, min(wait/7, 100*time.Millisecond)); d > most {
					t.Errorf("after %v: found %v later, want at most %v", wait, d, most)
				}
			})
		}
	}
}

// The receiver's own doorbell says so sooner.
func TestDoorbellOfReceiver(t *testing.T) {
	for _, srq := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			a, b := pair(t, hca.QPTypeRC, smallCap, srq)
			a.post(a.send(1, 8))
			time.Sleep(time.Hour)
			b.recv(2)
			start := time.Now()
			b.post(b.write(3, a, 8))
			one(t, a.scq, 1, hca.WCSuccess)
			if d := time.Since(start); d > 0 {
				t.Errorf("found %v later", d)
			}
			one(t, b.scq, 3, hca.WCSuccess)
		})
	}
}

// An SRQ's limit counts what is queued, also what came since it was set.
func TestSRQLimit(t *testing.T) {
	a, b := pair(t, hca.QPTypeRC, smallCap, true)
	b.recv(1, 2, 3)
	check(t, b.srq.Modify(hca.SRQAttr{Limit: 3}, hca.SRQLimit, nil))
	b.recv(4)
	a.post(a.send(1, 8)) // 3 are left
	one(t, a.scq, 1, hca.WCSuccess)
	if l := b.srq.Attr().Limit; l != 3 {
		t.Errorf("limit %d", l)
	}
	a.post(a.send(2, 8))
	one(t, a.scq, 2, hca.WCSuccess)
	if l := b.srq.Attr().Limit; l != 0 {
		t.Errorf("limit %d has not fired", l)
	}
}

// What is taken and not done with is never more than there are places, however
// far ahead the client says it is.
func TestNextIsBounded(t *testing.T) {
	a := &rxetest.Arena{}
	q := rxe.Provider{}.NewQueues(a)
	s, err := q.NewSendQueue(hca.QPCap{MaxSendWR: 7})
	check(t, err)
	defer s.Close()
	r, err := q.NewRecvQueue(7, 0)
	check(t, err)
	defer r.Close()
	for name, x := range map[string]struct {
		m    hca.Mapped
		next func() bool
		done func(int)
	}{
		"send": {s, func() bool { return s.Next(&hca.SendWR{}) }, s.Done},
		"recv": {r, func() bool { ok, _ := r.Next(&hca.RecvWR{}); return ok }, r.Done},
	} {
		ring, n := rxetest.Ring{Mem: a.Client(x.m.Info())}, 0
		look := func() {
			for ring.SetProducer(uint32(n + 1)); x.next() && n < 100; n++ {
				ring.SetProducer(uint32(n + 2)) // one more each time
			}
		}
		look()
		if n != 7 {
			t.Errorf("%s: %d taken", name, n)
		}
		x.done(2)
		look()
		if n != 9 {
			t.Errorf("%s: %d taken, 2 of them done with", name, n)
		}
	}
}
