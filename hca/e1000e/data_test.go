package e1000e_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/uverbsd/uverbsd/hca/e1000e"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// kinds of interrupts that the data path is tried with.
var kinds = []struct {
	name    string
	mode    mode
	vectors int
}{
	{"MSI-X", msix, 5}, {"MSI-X of one", msix, 1}, {"MSI", msi, 1}, {"INTx", intx, 1},
}

// TestBothWays has two ports send to each other, several goroutines on each side, with frames
// that are released by others than who got them.
func TestBothWays(t *testing.T) {
	const frames, batch = 4000, 7
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			var ds [2]*fake
			var ps [2]*e1000e.Port
			for i := range ds {
				ds[i] = newFake(k.mode)
				ds[i].vectors = k.vectors
				ds[i].mac[5] = byte(i)
				ps[i] = start(t, ds[i], e1000e.Options{MTU: 4200, RxRing: 32, TxRing: 32})
			}
			var wg, all sync.WaitGroup
			all.Add(2)
			for i := range ds {
				var got atomic.Int64
				seen := make([]atomic.Bool, frames)
				lent := make(chan nic.Frame, 16)
				end := make(chan struct{})
				wg.Go(func() { // sends
					defer close(end)
					next, to := uint32(0), ds[1-i]
					for next < frames {
						var b [][]byte
						for j := next; j < frames && len(b) < batch; j++ {
							b = append(b, frame(ds[1-i].mac, 60+int(j*131)%4100, j))
						}
						n, err := ps[i].Send(b)
						if err != nil && !errors.Is(err, nic.ErrFull) {
							t.Error(err)
							return
						}
						next += uint32(n)
						var wire [][]byte
						ds[i].with(func() { wire, ds[i].wire = ds[i].wire, nil })
						for _, f := range wire {
							for !to.inject(f) {
								runtime.Gosched()
							}
						}
					}
				})
				var rx sync.WaitGroup
				for range 3 {
					rx.Go(func() {
						fs := make([]nic.Frame, 5)
						for {
							n, err := ps[1-i].Recv(fs)
							if err != nil {
								if !errors.Is(err, nic.ErrClosed) {
									t.Error(err)
								}
								return
							}
							for _, f := range fs[:n] {
								lent <- f
							}
						}
					})
				}
				wg.Go(func() { // releases
					for f := range lent {
						seq, err := check(f.Data)
						if err != nil {
							t.Error(err)
						} else if seq >= frames || seen[seq].Swap(true) {
							t.Errorf("frame %d came twice or is none", seq)
						}
						f.Data[20]++ // it is ours
						f.Release()
						got.Add(1)
					}
				})
				wg.Go(func() {
					<-end
					eventually(t, "all frames", func() bool { return got.Load() == frames || t.Failed() })
					all.Done()
					all.Wait()
					if err := ps[1-i].Close(); err != nil {
						t.Error(err)
					}
					rx.Wait()
					close(lent)
				})
			}
			wg.Wait()
			for i := range ds {
				c := ps[i].Counters()
				if c["rx_packets"] != frames || c["tx_packets"] != frames || c["rx_bytes"] != c["tx_bytes"] {
					t.Errorf("counters %v", c)
				}
				if c["rx_packets"]+1 < c["interrupts"] {
					t.Errorf("%d interrupts for %d frames", c["interrupts"], c["rx_packets"])
				}
				if c["rx_buffers_lent"] != 0 || c["rx_errors"] != 0 {
					t.Errorf("%d lent, %d errors", c["rx_buffers_lent"], c["rx_errors"])
				}
			}
		})
	}
}

// TestWakes sends single frames to a port whose only receiver sleeps.
func TestWakes(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			d := newFake(k.mode)
			d.vectors = k.vectors
			p := start(t, d, e1000e.Options{})
			for i := range uint32(50) {
				c := make(chan error, 1)
				go func() {
					fs := make([]nic.Frame, 4)
					n, err := p.Recv(fs)
					if err == nil {
						var seq uint32
						if seq, err = check(fs[0].Data); seq != i || n != 1 {
							err = fmt.Errorf("frame %d of %d, want %d", seq, n, i)
						}
						release(fs[:n])
					}
					c <- err
				}()
				if i%2 == 0 { // when it sleeps
					eventually(t, "unmasked", func() (on bool) {
						d.with(func() { on = d.is(xIMS, iRXQ0|iRXT0) })
						return on
					})
				}
				if !d.inject(frame(d.mac, 100, i)) {
					t.Fatal("no room")
				}
				if err := wait(t, "a frame", c); err != nil {
					t.Fatal(err)
				}
			}
			if n := counter(t, p, "interrupts"); n == 0 {
				t.Error("no interrupt was counted")
			}
			if n := counter(t, p, "rx_missed_interrupts"); n != 0 {
				t.Errorf("%d frames without an interrupt", n)
			}
		})
	}
}

func TestLostInterrupt(t *testing.T) {
	d := newFake(msix)
	d.deaf = true
	p := start(t, d, e1000e.Options{})
	c := make(chan []nic.Frame, 1)
	go func() { c <- recv(t, p, 1) }()
	eventually(t, "unmasked", func() (on bool) {
		d.with(func() { on = d.is(xIMS, iRXQ0) })
		return on
	})
	d.inject(frame(d.mac, 100, 1))
	release(wait(t, "a frame nobody told of", c))
	if n := counter(t, p, "rx_missed_interrupts"); n > 1 {
		t.Errorf("missed %d", n)
	}
}

func TestSendFull(t *testing.T) {
	d := newFake(msix)
	d.hold = true
	p := start(t, d, e1000e.Options{TxRing: 16})
	var b [][]byte
	for i := range uint32(20) {
		b = append(b, frame(nic.MAC{2}, 100, i))
	}
	for round := range 5 {
		n, err := p.Send(b)
		if n != 15 || !errors.Is(err, nic.ErrFull) {
			t.Fatalf("round %d: %d, %v", round, n, err)
		}
		if n, err := p.Send(b[n:]); n != 0 || !errors.Is(err, nic.ErrFull) {
			t.Fatalf("round %d, full: %d, %v", round, n, err)
		}
		d.flush()
		if n, err := p.Send(b[15:]); n != 5 || err != nil {
			t.Fatalf("round %d, the rest: %d, %v", round, n, err)
		}
		d.flush()
		d.with(func() {
			if len(d.wire) != 20 {
				t.Fatalf("round %d: %d on the wire", round, len(d.wire))
			}
			for i, f := range d.wire {
				if seq, err := check(f); err != nil || seq != uint32(i) {
					t.Errorf("frame %d: %d, %v", i, seq, err)
				}
			}
			d.wire = nil
		})
	}
	if n := counter(t, p, "tx_full"); n != 10 {
		t.Errorf("tx_full %d", n)
	}
}

func TestSendBatchRingsOnce(t *testing.T) {
	d := newFake(msix)
	p := start(t, d, e1000e.Options{})
	before := d.tdt
	b := make([][]byte, 100)
	for i := range b {
		b[i] = frame(nic.MAC{2}, 64, uint32(i))
	}
	if n, err := p.Send(b); n != 100 || err != nil {
		t.Fatal(n, err)
	}
	if d.tdt != before+1 {
		t.Errorf("%d writes of the tail", d.tdt-before)
	}
	if n, err := p.Send(nil); n != 0 || err != nil {
		t.Error(n, err)
	}
}

func TestSendBadFrame(t *testing.T) {
	d := newFake(msix)
	p := start(t, d, e1000e.Options{})
	good := frame(nic.MAC{2}, 1518, 3)
	for _, size := range []int{0, 13, 1519, 70000} {
		n, err := p.Send([][]byte{good, make([]byte, size), good})
		if n != 1 || err == nil || errors.Is(err, nic.ErrFull) {
			t.Errorf("%d bytes: %d, %v", size, n, err)
		}
		if n, err := p.Send([][]byte{make([]byte, size)}); n != 0 || err == nil {
			t.Errorf("%d bytes alone: %d, %v", size, n, err)
		}
	}
	if len(d.wire) != 4 {
		t.Errorf("%d frames on the wire", len(d.wire))
	}
}

// TestShortFrames are padded, with nothing of what a slot held before.
func TestShortFrames(t *testing.T) {
	d := newFake(msix)
	p := start(t, d, e1000e.Options{TxRing: 16})
	for i := range uint32(40) {
		if _, err := p.Send([][]byte{frame(nic.MAC{2}, 200, i)}); err != nil {
			t.Fatal(err)
		}
	}
	d.wire = nil
	for range 40 {
		if _, err := p.Send([][]byte{frame(nic.MAC{2}, 14, 0)}); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range d.wire {
		if len(f) != 60 {
			t.Fatalf("%d bytes", len(f))
		}
		for i, b := range f[14:] {
			if b != 0 {
				t.Fatalf("byte %d is %#x", 14+i, b)
			}
		}
	}
}

// TestDry lends out every buffer. The hardware drops then; one that comes back goes
// to the ring although the only receiver sleeps.
func TestDry(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			d := newFake(k.mode)
			d.vectors = k.vectors
			p := start(t, d, e1000e.Options{RxRing: 16})
			var out []nic.Frame
			for i := uint32(0); d.inject(frame(d.mac, 100, i)); i++ {
				out = append(out, recv(t, p, 1)...)
			}
			if len(out) != 48 {
				t.Errorf("%d frames out, of 48 buffers", len(out))
			}
			c := make(chan []nic.Frame, 1)
			go func() { c <- recv(t, p, 1) }()
			eventually(t, "asleep", func() (on bool) {
				d.with(func() { on = d.is(xIMS, iRXQ0|iRXT0) })
				return on
			})
			for i, f := range out {
				if seq, err := check(f.Data); err != nil || seq != uint32(i) {
					t.Errorf("frame %d: %d, %v", i, seq, err)
				}
			}
			if n := counter(t, p, "rx_dropped"); n != 1 {
				t.Errorf("dropped %d", n)
			}
			release(out[:1])
			if !d.inject(frame(d.mac, 100, 99)) {
				t.Error("still no buffer")
			}
			release(wait(t, "a frame again", c))
			release(out[1:])
			// And full speed again.
			for i := range uint32(100) {
				if !d.inject(frame(d.mac, 100, i)) {
					t.Fatalf("frame %d finds no buffer", i)
				}
				release(recv(t, p, 1))
			}
			if c := p.Counters(); c["rx_dropped"] != 1 || c["rx_no_buffer"] != 1 || c["rx_buffers_lent"] != 0 {
				t.Errorf("counters %v", c)
			}
		})
	}
}

// TestHostile has the device write what cannot be.
func TestHostile(t *testing.T) {
	const dd, eop = uint64(1) << 32, uint64(1) << 33
	for _, tt := range []struct {
		name    string
		size    int
		edit    func(uint64) uint64
		counter string
	}{
		{"no length", 100, func(w uint64) uint64 { return w &^ 0xFFFF }, "rx_bad_descriptors"},
		{"beyond the buffer", 100, func(w uint64) uint64 { return w | 0xFFFF }, "rx_bad_descriptors"},
		{"no header", 100, func(w uint64) uint64 { return w&^0xFFFF | 13 }, "rx_bad_descriptors"},
		{"larger than MaxFrame", 100, func(w uint64) uint64 { return w&^0xFFFF | 2019 }, "rx_oversize"},
		{"CRC", 100, func(w uint64) uint64 { return w | 1<<40 }, "rx_bad_frames"},
		{"receive error", 100, func(w uint64) uint64 { return w | 1<<47 }, "rx_bad_frames"},
		{"over three descriptors", 5000, func(w uint64) uint64 { return w }, "rx_oversize"},
		{"over three, one bad", 5000, func(w uint64) uint64 {
			if w&eop != 0 {
				return w &^ 0xFFFF
			}
			return w
		}, "rx_oversize"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newFake(msix)
			p := start(t, d, e1000e.Options{MTU: 2000, RxRing: 16})
			for i := range uint32(200) { // far more than there are buffers
				if !d.injectWith(frame(d.mac, tt.size, 0), tt.edit) {
					t.Fatalf("round %d: no room", i)
				}
				if !d.inject(frame(d.mac, 100, i)) {
					t.Fatalf("round %d: no room for a good one", i)
				}
				fs := recv(t, p, 1)
				if seq, err := check(fs[0].Data); err != nil || seq != i {
					t.Fatalf("round %d: %d, %v", i, seq, err)
				}
				release(fs)
			}
			c := p.Counters()
			if c[tt.counter] < 200 || tt.counter != "rx_oversize" && c[tt.counter] != 200 {
				t.Errorf("%s %d", tt.counter, c[tt.counter])
			}
			if c["rx_errors"] < 200 || c["rx_packets"] != 200 {
				t.Errorf("counters %v", c)
			}
		})
	}
	t.Run("never an end", func(t *testing.T) {
		d := newFake(msix)
		p := start(t, d, e1000e.Options{RxRing: 16})
		c := make(chan []nic.Frame, 1)
		go func() { c <- recv(t, p, 1) }()
		for range 500 {
			f := frame(d.mac, 100, 0)
			eventually(t, "room", func() bool { return d.injectWith(f, func(w uint64) uint64 { return w &^ eop }) })
		}
		eventually(t, "room", func() bool { return d.inject(frame(d.mac, 100, 1)) }) // the end of it
		eventually(t, "room", func() bool { return d.inject(frame(d.mac, 100, 2)) })
		fs := wait(t, "a frame", c)
		if seq, err := check(fs[0].Data); seq != 2 || err != nil {
			t.Error(seq, err)
		}
		release(fs)
	})
	t.Run("what it does not own", func(t *testing.T) {
		d := newFake(msix)
		p := start(t, d, e1000e.Options{RxRing: 16})
		d.with(func() {
			ring := d.ring(xRDBAL)
			for i := range 16 {
				e1000e.StoreWord(ring, i, 1, dd|eop|64)
				e1000e.StoreWord(ring, i, 0, ^uint64(0)) // nobody reads this back
			}
		})
		// It gets what it was given: 15 frames, and the ring goes on.
		fs := recv(t, p, 15)
		release(fs)
	})
	t.Run("transmits done that are not", func(t *testing.T) {
		d := newFake(msix)
		d.hold = true
		p := start(t, d, e1000e.Options{TxRing: 16})
		b := make([][]byte, 15)
		for i := range b {
			b[i] = frame(nic.MAC{2}, 100, uint32(i))
		}
		for range 20 {
			if n, err := p.Send(b); n != 15 || err != nil {
				t.Fatal(n, err)
			}
			d.with(func() {
				ring := d.ring(xTDBAL)
				for i := range 16 {
					e1000e.StoreWord(ring, i, 1, ^uint64(0))
				}
			})
		}
	})
}

func TestBadRelease(t *testing.T) {
	d := newFake(msix)
	p := start(t, d, e1000e.Options{})
	d.inject(frame(d.mac, 100, 1))
	fs := recv(t, p, 1)
	again := fs[0]
	fs[0].Release()
	again.Release()
	p.ReleaseFrame(-1)
	p.ReleaseFrame(1 << 30)
	if n := counter(t, p, "rx_bad_releases"); n != 3 {
		t.Errorf("counted %d", n)
	}
	if n := counter(t, p, "rx_buffers_lent"); n != 0 {
		t.Errorf("%d lent", n)
	}
	if n, err := p.Recv(nil); n != 0 || err != nil {
		t.Error(n, err)
	}
}

func TestMulticast(t *testing.T) {
	d := newFake(msix)
	p := start(t, d, e1000e.Options{})
	a, b := nic.MAC{0x33, 0x33, 0, 0, 0, 1}, nic.MAC{1, 0, 0x5e, 1, 2, 3}
	all := nic.MAC{255, 255, 255, 255, 255, 255}
	other := nic.MAC{2, 2, 2, 2, 2, 2}
	gets := func(m nic.MAC) bool {
		if !d.inject(frame(m, 64, 0)) {
			return false
		}
		release(recv(t, p, 1))
		return true
	}
	for i, tt := range []struct {
		groups []nic.MAC
		a, b   bool
	}{
		{nil, false, false}, {[]nic.MAC{a}, true, false}, {[]nic.MAC{a, b, a}, true, true}, {[]nic.MAC{b}, false, true}, {nil, false, false},
	} {
		if err := p.Multicast(tt.groups); err != nil {
			t.Fatal(err)
		}
		if gets(a) != tt.a || gets(b) != tt.b {
			t.Errorf("step %d: not as asked", i)
		}
		if !gets(all) || !gets(d.mac) || gets(other) {
			t.Errorf("step %d: broadcast, ours or others' not as ever", i)
		}
	}
	if err := p.Multicast([]nic.MAC{a, other}); err == nil {
		t.Error("took one that is no group")
	}
}

// TestScribble has a device write nonsense into its rings while frames go both ways.
func TestScribble(t *testing.T) {
	d := newFake(msix)
	d.sink = true
	p := start(t, d, e1000e.Options{RxRing: 16, TxRing: 16})
	c := waiters(p, 2)
	var wg sync.WaitGroup
	wg.Go(func() {
		b := [][]byte{frame(d.mac, 60, 0), frame(d.mac, 1500, 0)}
		for {
			if _, err := p.Send(b); errors.Is(err, nic.ErrClosed) {
				return
			}
		}
	})
	rnd := rand.New(rand.NewPCG(1, 2))
	nonsense := func() {
		d.with(func() {
			ring := d.ring(xRDBAL)
			if rnd.IntN(4) == 0 {
				ring = d.ring(xTDBAL)
			}
			w := rnd.Uint64()
			if rnd.IntN(2) == 0 {
				w = w&^0xFFFFFF00FFFFF800 | 3<<32
			}
			e1000e.StoreWord(ring, rnd.IntN(16), 1, w)
			if rnd.IntN(8) == 0 {
				signal(d.events[rnd.IntN(2)])
			}
		})
	}
	eventually(t, "nonsense of all kinds", func() bool {
		for range 200 {
			nonsense()
		}
		got := p.Counters()
		return got["rx_packets"] > 50 && got["rx_bad_descriptors"] > 20 && got["rx_oversize"] > 20
	})
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	for range 2 {
		if err := wait(t, "Recv's end", c); !errors.Is(err, nic.ErrClosed) {
			t.Error(err)
		}
	}
	d.with(func() { d.faults = nil }) // the model read its own nonsense
	if got := p.Counters(); got["rx_buffers_lent"] != 0 {
		t.Errorf("counters %v", got)
	}
}
