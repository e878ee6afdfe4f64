package soft_test

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
)

const windowAccess = hca.AccessRemoteWrite | hca.AccessRemoteRead

// regWindow makes a region that windows can be bound to, and a window.
func (c *client) regWindow(t testing.TB, typ hca.MWType) (hca.MR, hca.MW) {
	m := make(flat, 4096)
	mr, err := c.pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: 4096, IOVA: flatBase, Access: hca.AccessLocalWrite | hca.AccessMWBind})
	check(t, err)
	t.Cleanup(func() { check(t, mr.Close()) })
	w, err := c.pd.AllocMW(typ)
	check(t, err)
	t.Cleanup(func() { check(t, w.Close()) })
	return mr, w
}

func bindOf(w hca.MW, mr hca.MR) hca.SendWR {
	return hca.SendWR{ID: 3, Opcode: hca.OpBindMW, Bind: hca.Bind{MW: w.RKey(), MR: mr.LKey(), RKey: w.RKey(), Access: windowAccess, Addr: flatBase, Length: 4096}}
}

// windowLoops are requests with windows, by the key that the window has already, so
// that they can be posted again and again.
var windowLoops = []struct {
	name string
	make func(t testing.TB) func()
}{
	{"BindType1", func(t testing.TB) func() {
		l := newLoop(t, hca.QPTypeRC, hca.OpRDMAWrite, 64)
		mr, w := l.a.regWindow(t, hca.MWType1)
		l.send = []hca.SendWR{bindOf(w, mr)}
		l.send[0].Flags = hca.SendSignaled
		return func() { l.step(t) }
	}},
	{"BindInvType2", func(t testing.TB) func() {
		l := newLoop(t, hca.QPTypeRC, hca.OpRDMAWrite, 64)
		mr, w := l.a.regWindow(t, hca.MWType2)
		l.send = []hca.SendWR{bindOf(w, mr), {Opcode: hca.OpLocalInv, Flags: hca.SendSignaled, Imm: w.RKey()}}
		return func() { l.step(t) }
	}},
	{"Write64Window", func(t testing.TB) func() {
		l := newLoop(t, hca.QPTypeRC, hca.OpRDMAWrite, 64)
		mr, w := l.b.regWindow(t, hca.MWType2)
		_, err := l.b.qp.PostSend([]hca.SendWR{bindOf(w, mr)})
		check(t, err)
		l.b.qp.Run()
		l.send[0].RKey = w.RKey()
		return func() { l.step(t) }
	}},
	{"SendInv64", func(t testing.TB) func() {
		l := newLoop(t, hca.QPTypeRC, hca.OpSend, 64)
		mr, w := l.b.regWindow(t, hca.MWType2)
		bind := []hca.SendWR{bindOf(w, mr)}
		l.send[0].Opcode, l.send[0].Imm = hca.OpSendInv, w.RKey()
		return func() {
			if _, err := l.b.qp.PostSend(bind); err != nil {
				t.Fatal(err)
			}
			l.b.qp.Run()
			l.step(t)
		}
	}},
}

func BenchmarkWindow(b *testing.B) {
	for _, c := range windowLoops {
		b.Run(c.name, func(b *testing.B) {
			step := c.make(b)
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
		})
	}
}

func TestWindowNoAllocs(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop values at random")
	}
	for _, c := range windowLoops {
		t.Run(c.name, func(t *testing.T) {
			step := c.make(t)
			for range 300 {
				step()
			}
			if n := testing.AllocsPerRun(2000, step); n != 0 {
				t.Errorf("%v allocations per message", n)
			}
		})
	}
}

// TestKeysReused: where all places are taken, so that each is used again at once, it
// has another key than last time, also after a client has chosen one for a window.
func TestKeysReused(t *testing.T) {
	d, _, pd, cq := few(t) // three regions and three windows: six places
	m := make(flat, 64)
	reg := func() hca.MR {
		mr, err := pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: 64, IOVA: flatBase, Access: hca.AccessLocalWrite | hca.AccessMWBind})
		check(t, err)
		return mr
	}
	var full []closer
	for range 2 {
		full = append(full, reg())
	}
	for range 2 {
		w, err := pd.AllocMW(hca.MWType1)
		check(t, err)
		full = append(full, w)
	}
	var ends [2]client
	for i := range ends {
		q, err := pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: cq, RecvCQ: cq, Cap: hca.QPCap{MaxSendWR: 4}})
		check(t, err)
		ends[i].qp, ends[i].way = q, selfPath(t, d)
		full = append(full, q)
	}
	connect(t, &ends[0], &ends[1], hca.QPTypeRC)
	// Two places are left, which regions and windows have by turns.
	last, wc := make(map[uint32]uint32), make([]hca.WC, 1)
	see := func(key uint32, born bool) {
		t.Helper()
		if born && last[key>>8] == key {
			t.Fatalf("key %#x again", key)
		}
		last[key>>8] = key
	}
	for i := range 2000 {
		mr := reg()
		see(mr.RKey(), true)
		w, err := pd.AllocMW(hca.MWType1)
		check(t, err)
		see(w.RKey(), true)
		bind := bindOf(w, mr)
		bind.Flags, bind.Bind.Length, bind.Bind.RKey = hca.SendSignaled, 64, uint32(i)
		if _, err := ends[0].qp.PostSend([]hca.SendWR{bind}); err != nil {
			t.Fatal(err)
		}
		ends[0].qp.Run()
		if cq.Poll(wc) != 1 || wc[0].Status != hca.WCSuccess {
			t.Fatalf("bind: %+v", wc[0])
		}
		see(w.RKey(), false)
		check(t, w.Close())
		check(t, mr.Close())
	}
	if len(last) != 2 {
		t.Errorf("%d places, want 2", len(last))
	}
	for _, o := range full {
		check(t, o.Close())
	}
}

// TestWindowCapabilities: a device promises windows when its provider can bind.
func TestWindowCapabilities(t *testing.T) {
	const caps = 1<<17 | 1<<24 // IB_DEVICE_MEM_WINDOW, IB_DEVICE_MEM_WINDOW_TYPE_2B
	for _, on := range []bool{false, true} {
		d, err := soft.New(loop.New(hca.LinkInfiniBand), soft.Config{GUID: hca.GUID{7: 1}, Mapped: on})
		check(t, err)
		t.Cleanup(func() { check(t, d.Close()) })
		if got := d.Attr().CapFlags & caps; got != 0 && !on || got != caps && on {
			t.Errorf("capabilities %#x with %v", got, on)
		}
		if !d.Ops().Has(hca.OpMW) {
			t.Error("no windows")
		}
	}
}
