package hcatest

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var windowRaceCases = []testCase{
	{"WindowBlocked", needs(hca.OpMW, testWindowBlocked)},
	{"WindowInvInTraffic", needs(hca.OpMW, testWindowInvInTraffic)},
	{"WindowRebindInTraffic", needs(hca.OpMW, testWindowRebindInTraffic)},
	{"WindowBindRace", needs(hca.OpMW, testWindowBindRace)},
	{"WindowDestroyRace", needs(hca.OpMW, testWindowDestroyRace)},
}

// testWindowBlocked: a binding ends although an access through it is stuck, and not
// even the next chunk is copied.
func testWindowBlocked(t *testing.T, p Pair) {
	for name, c := range map[string]struct {
		typ hca.MWType
		end func(b *end, w hca.MW, mr hca.MR)
	}{
		"invalidate": {hca.MWType2, func(b *end, w hca.MW, _ hca.MR) {
			b.postSend(invWR(1, w.RKey()))
			one(t, b.scq, 1, hca.WCSuccess)
		}},
		"unbind": {hca.MWType1, func(b *end, w hca.MW, mr hca.MR) { b.bind(w, mr, 0, 0, 0) }},
		"rebind": {hca.MWType1, func(b *end, w hca.MW, mr hca.MR) { b.bind(w, mr, 0, memSize, windowAcc) }},
		"close":  {hca.MWType2, func(_ *end, w hca.MW, _ hca.MR) { must(t, w.Close()) }},
		"close, then the region": {hca.MWType1, func(_ *end, w hca.MW, mr hca.MR) {
			must(t, w.Close())
			must(t, mr.Close())
		}},
		"close of the QP": {hca.MWType2, func(b *end, _ hca.MW, _ hca.MR) { must(t, b.qp.Close()) }},
	} {
		for _, op := range []hca.SendOpcode{hca.OpRDMAWrite, hca.OpRDMARead} {
			t.Log(name)
			a, b := pair(t, p, defaults())
			m := NewMem(memBase, memSize)
			mr := b.regBind(m)
			w := b.allocMW(c.typ)
			key := b.bind(w, mr, 0, memSize, windowAcc)
			free := stuck(t, a, m, a.reach(op, 2, memBase, memSize, key))
			quick(t, name, func() { c.end(b, w, mr) })
			before := m.calls.Load()
			free()
			if n := m.calls.Load(); n != before {
				t.Errorf("%s: %d accesses after it", name, n-before)
			}
			if name == "close of the QP" {
				continue // and its peer waits
			}
			one(t, a.scq, 2, hca.WCRemOpErr)
		}
	}
	works(t, p)
}

// slowMem takes its time, so that what does not wait for an access is found out.
type slowMem struct {
	*Mem
	inside atomic.Int32 // accesses under way
	begun  atomic.Int64 // accesses so far
}

func (m *slowMem) WriteAt(p []byte, addr uint64) error {
	m.begun.Add(1)
	m.inside.Add(1)
	defer m.inside.Add(-1)
	for range 50 {
		runtime.Gosched()
	}
	return m.Mem.WriteAt(p, addr)
}

// awaitAccess waits until an access is under way.
func (m *slowMem) awaitAccess(e *end) {
	for m.inside.Load() == 0 {
		e.qp.Query()
	}
}

// fewLate: accesses that were still under way when their binding had ended. A device
// need not wait for ever, and on a busy machine an access may take that long; but
// one that does not wait at all has one nearly every time.
func fewLate(t *testing.T, late, rounds int) {
	t.Helper()
	if late > rounds/4 {
		t.Errorf("%d accesses under way at the end of %d bindings", late, rounds)
	}
}

// regSlow registers all of m, with byte 0 at memBase.
func (e *end) regSlow(m *slowMem) hca.MR {
	e.t.Helper()
	mr, err := e.pd.RegMR(hca.MRInit{Mem: m, Start: m.Base, Length: uint64(len(m.b)), IOVA: memBase, Access: bindAcc})
	must(e.t, err)
	e.t.Cleanup(func() { must(e.t, mr.Close()) })
	return mr
}

// testWindowInvInTraffic opens and closes a window while it is written to. UC,
// because there a message that meets a closed window is lost and the connection
// stays.
func testWindowInvInTraffic(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.typ = uc }))
	m := &slowMem{Mem: NewMem(memBase, 4096)}
	mr := b.regSlow(m)
	w := b.allocMW(hca.MWType2)
	var key atomic.Uint32
	stop := repeat(func() {
		a.postSend(a.reach(hca.OpRDMAWrite, 1, memBase+64, 1024, key.Load()))
		one(t, a.scq, 1, hca.WCSuccess)
	})
	rounds, late := *roundsFlag/3, 0
	for range rounds {
		key.Store(b.bind(w, mr, 64, 1024, windowAcc))
		m.awaitAccess(b)
		b.postSend(invWR(1, w.RKey()))
		one(t, b.scq, 1, hca.WCSuccess)
		late += int(m.inside.Load())
		n := m.begun.Load()
		for range 20 {
			b.qp.Query()
		}
		if k := m.begun.Load(); k != n {
			t.Errorf("%d accesses after the end of the binding", k-n)
		}
	}
	stop()
	fewLate(t, late, rounds)
	if n := m.outside.Load(); n != 0 {
		t.Errorf("%d accesses outside", n)
	}
}

// testWindowRebindInTraffic moves a window of type 1 between two regions, under one
// key, while it is written to.
func testWindowRebindInTraffic(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.typ = uc }))
	mems := []*slowMem{{Mem: NewMem(memBase, 4096)}, {Mem: NewMem(8*memBase, 8192)}}
	var mrs []hca.MR
	for _, m := range mems {
		mrs = append(mrs, b.regSlow(m))
	}
	w := b.allocMW(hca.MWType1)
	rebind := func(i int) {
		wr := bindWR(1, w, mrs[i], 64*i, 4032, windowAcc)
		wr.Bind.RKey = w.RKey()
		b.postSend(wr)
		one(t, b.scq, 1, hca.WCSuccess)
	}
	rebind(0)
	key := w.RKey()
	stop := repeat(func() {
		a.postSend(a.reach(hca.OpRDMAWrite, 1, memBase+64, 3968, key))
		one(t, a.scq, 1, hca.WCSuccess)
	})
	rounds, late := *roundsFlag/3, 0
	for i := range rounds {
		old, now := mems[i%2], mems[(i+1)%2]
		old.awaitAccess(b)
		rebind((i + 1) % 2)
		late += int(old.inside.Load())
		n := old.begun.Load()
		now.awaitAccess(b)
		if k := old.begun.Load(); k != n {
			t.Errorf("%d accesses through the old binding", k-n)
		}
	}
	stop()
	fewLate(t, late, rounds)
	for _, m := range mems {
		if n := m.outside.Load(); n != 0 {
			t.Errorf("%d accesses to one memory at the other's addresses", n)
		}
	}
}

// testWindowBindRace: of two binds by one key at once one is done.
func testWindowBindRace(t *testing.T, p Pair) {
	_, hub := pair(t, p, defaults())
	mr := hub.regBind(hub.mem)
	for i := range *roundsFlag / 10 {
		w := hub.allocMW(mwTypes[i%2])
		var ends [2]*end
		for k := range ends {
			_, ends[k] = another(t, p, hub)
		}
		wr := bindWR(1, w, mr, 0, 64, windowAcc)
		var wg sync.WaitGroup
		for _, e := range ends {
			wg.Go(func() { e.postSend(wr) })
		}
		wg.Wait()
		var done, failed int
		for _, e := range ends {
			switch wc := take(t, e.scq, 1)[0]; wc.Status {
			case hca.WCSuccess:
				done++
			case hca.WCMWBindErr:
				failed++
			default:
				t.Fatalf("completion %+v", wc)
			}
		}
		if done != 1 || failed != 1 {
			t.Fatalf("%d done, %d refused", done, failed)
		}
	}
}

// testWindowDestroyRace closes window, region and QPs while one binds and the other
// reaches through what is bound.
func testWindowDestroyRace(t *testing.T, p Pair) {
	hub, far := newEnd(t, p.B, defaults()), newEnd(t, p.A, defaults())
	for i := range *roundsFlag {
		a, b := *far, *hub
		for _, e := range []*end{&a, &b} {
			q, err := e.pd.CreateQP(hca.QPInit{Type: rc, SendCQ: e.scq, RecvCQ: e.rcq, Cap: e.o.cap, Handler: e.qev})
			must(t, err)
			e.qp = q
		}
		link(&a, &b)
		m := NewMem(memBase, 4096)
		mr, err := b.pd.RegMR(hca.MRInit{Mem: m, Start: memBase, Length: 4096, IOVA: memBase, Access: bindAcc})
		must(t, err)
		w, err := b.pd.AllocMW(mwTypes[i%2])
		must(t, err)
		wr := bindWR(1, w, mr, 0, 4096, windowAcc)
		next := wr
		next.Bind.MW, next.Bind.RKey = w.RKey()&^0xff|wr.Bind.RKey&0xff, wr.Bind.RKey+1
		key := next.Bind.MW
		var wg sync.WaitGroup
		for _, f := range []func(){
			func() {
				_, _ = b.qp.PostSend([]hca.SendWR{wr, invWR(2, key), next})
				b.qp.Run()
			},
			func() {
				_, _ = a.qp.PostSend([]hca.SendWR{a.reach(hca.OpRDMAWrite, 3, memBase, 4096, key), a.reach(hca.OpRDMARead, 3, memBase, 4096, key)})
				a.qp.Run()
			},
			func() { must(t, w.Close()) },
			func() { _ = w.RKey() },
			func() {
				if err := mr.Close(); err != nil && !errors.Is(err, unix.EINVAL) {
					t.Error(err)
				}
			},
			func() {
				if i%3 == 0 {
					must(t, b.qp.Close())
				}
			},
		} {
			wg.Go(f)
		}
		wg.Wait()
		n := m.calls.Load()
		must(t, mr.Close()) // nothing is bound to it any more
		for range 5 {
			a.qp.Query()
		}
		if k := m.calls.Load(); k != n {
			t.Errorf("%d accesses after the close", k-n)
		}
		must(t, a.qp.Close())
		must(t, b.qp.Close())
		drain(a.scq)
		drain(b.scq)
	}
	works(t, p)
}
