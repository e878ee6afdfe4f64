package e1000e_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca/e1000e"
	"github.com/uverbsd/uverbsd/hca/nic"
)

func TestOpen(t *testing.T) {
	for _, tt := range []struct {
		name  string
		set   func(*fake)
		o     e1000e.Options
		frame int
		bsize int
		lpe   bool
	}{
		{"defaults", nil, e1000e.Options{}, 1518, 2048, false},
		{"82574LA", func(d *fake) { d.device = 0x10f6 }, e1000e.Options{}, 1518, 2048, false},
		{"keeps its registers", func(d *fake) { d.keep = true }, e1000e.Options{}, 1518, 2048, false},
		{"a message vector", func(d *fake) { d.mode, d.vectors = msi, 1 }, e1000e.Options{MTU: 2000}, 2018, 2048, true},
		{"a line", func(d *fake) { d.mode, d.vectors = intx, 1 }, e1000e.Options{MTU: 4000}, 4018, 4096, true},
		{"RoCE of 4096", nil, e1000e.Options{MTU: 4200}, 4218, 8192, true},
		{"jumbo", nil, e1000e.Options{MTU: 9000, RxRing: 64, TxRing: 32}, 9018, 16384, true},
		{"address in the EEPROM", func(d *fake) { d.noRAL, d.eeprom = true, [3]uint16{0x5452, 0x1200, 0x5634} }, e1000e.Options{}, 1518, 2048, false},
		{"PHY not given", func(d *fake) { d.noOwner = true }, e1000e.Options{}, 1518, 2048, false},
		{"PHY stuck", func(d *fake) { d.phyStuck = true }, e1000e.Options{}, 1518, 2048, false},
		{"master stuck", func(d *fake) { d.masterStuck = true }, e1000e.Options{}, 1518, 2048, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newFake(msix)
			if tt.set != nil {
				tt.set(d)
			}
			p := start(t, d, tt.o)
			if p.MAC() != (nic.MAC{0x52, 0x54, 0, 0x12, 0x34, 0x56}) {
				t.Errorf("MAC %x", p.MAC())
			}
			if p.MaxFrame() != tt.frame {
				t.Errorf("MaxFrame %d, want %d", p.MaxFrame(), tt.frame)
			}
			if s := p.State(); s != (nic.State{Up: true, Mbps: 1000}) {
				t.Errorf("state %+v", s)
			}
			d.with(func() {
				if d.buffer() != tt.bsize || d.is(xRCTL, 1<<5) != tt.lpe {
					t.Errorf("RCTL %#x: buffers of %d, want %d, large frames %v", d.regs[xRCTL/4], d.buffer(), tt.bsize, tt.lpe)
				}
				if !d.is(xCTRL, 1<<6) || d.is(xCTRL, 1<<11|1<<12|1<<2) {
					t.Errorf("CTRL %#x", d.regs[xCTRL/4])
				}
			})
			if !d.inject(frame(d.mac, tt.frame, 7)) {
				t.Fatal("the largest frame finds no room")
			}
			fs := recv(t, p, 1)
			if _, err := check(fs[0].Data); err != nil || len(fs[0].Data) != tt.frame {
				t.Errorf("%d bytes, %v", len(fs[0].Data), err)
			}
			release(fs)
		})
	}
}

func TestPHYIsWoken(t *testing.T) {
	for _, tt := range []struct {
		name       string
		bmcr, want uint16
	}{
		{"runs", 0x1140, 0x1140},
		{"powered down", 0x1940, 0x1140},
		{"isolated", 0x1540, 0x1140},
		{"forced", 0x0140, 0x1140},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newFake(msix)
			d.bmcr = tt.bmcr
			start(t, d, e1000e.Options{})
			if d.bmcr != tt.want {
				t.Errorf("BMCR %#x, want %#x", d.bmcr, tt.want)
			}
			if d.is(xEXTCNF, 1<<5) {
				t.Error("the PHY is still ours")
			}
		})
	}
}

func TestOpenFails(t *testing.T) {
	removed := func(d *fake) { d.gone = true }
	for _, tt := range []struct {
		name string
		set  func(*fake)
		o    e1000e.Options
		want string
		is   error
	}{
		{"reset never ends", func(d *fake) { d.resetStuck = true }, e1000e.Options{}, "reset does not end", nil},
		{"EEPROM never read", func(d *fake) { d.noAutoRead = true }, e1000e.Options{}, "EEPROM is not read", nil},
		{"EEPROM silent", func(d *fake) { d.noRAL, d.eerdStuck = true, true }, e1000e.Options{}, "EEPROM's word 0", nil},
		{"no address", func(d *fake) { d.noRAL = true }, e1000e.Options{}, "no Ethernet address", nil},
		{"group address", func(d *fake) { d.mac[0] = 1 }, e1000e.Options{}, "no Ethernet address", nil},
		{"not ours", func(d *fake) { d.device = 0x100e }, e1000e.Options{}, "8086:100e is no 82574", nil},
		{"small BAR", func(d *fake) { d.barLen = 4096 }, e1000e.Options{}, "BAR 0", nil},
		{"no BAR", func(d *fake) { d.failMap = errNo }, e1000e.Options{}, "map its registers", errNo},
		{"no memory", func(d *fake) { d.failAlloc = errNo }, e1000e.Options{}, "receive ring", errNo},
		{"no vectors", func(d *fake) { d.vectors = 0 }, e1000e.Options{}, "no interrupt", nil},
		{"no interrupts", func(d *fake) { d.failInterrupts = errNo }, e1000e.Options{}, "turn on 2", errNo},
		{"no DMA", func(d *fake) { d.failBusMaster = errNo }, e1000e.Options{}, "allow DMA", errNo},
		{"gone", removed, e1000e.Options{}, "gone", nic.ErrGone},
		{"small MTU", nil, e1000e.Options{MTU: 60}, "MTU", nil},
		{"large MTU", nil, e1000e.Options{MTU: 9001}, "MTU", nil},
		{"odd ring", nil, e1000e.Options{RxRing: 33}, "ring of 33", nil},
		{"small ring", nil, e1000e.Options{TxRing: 8}, "ring of 8", nil},
		{"large ring", nil, e1000e.Options{TxRing: 8192}, "ring of 8192", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newFake(msix)
			if tt.set != nil {
				tt.set(d)
			}
			p, err := e1000e.Open(d, tt.o)
			if err == nil {
				_ = p.Close()
				t.Fatal("opened")
			}
			if !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), d.Name()) || strings.Contains(err.Error(), "\n") {
				t.Errorf("says %q, want %q in it", err, tt.want)
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("%v is not %v", err, tt.is)
			}
			if d.closed != 0 || d.master {
				t.Errorf("closed %d times, bus master %v", d.closed, d.master)
			}
			_ = d.Close()
		})
	}
}

// TestGoneAnywhere takes the device away after every so many register accesses of Open.
func TestGoneAnywhere(t *testing.T) {
	d := newFake(msix)
	start(t, d, e1000e.Options{})
	total := d.accesses
	for n := 1; n < total; n += 1 + n/4 {
		d := newFake(msix)
		d.goneAfter = n
		p, err := e1000e.Open(d, e1000e.Options{})
		if err == nil {
			// It went between the last look and the end.
			_ = p.Close()
			continue
		}
		if !errors.Is(err, nic.ErrGone) {
			t.Errorf("after %d accesses: %v", n, err)
		}
		if d.master || d.closed != 0 {
			t.Errorf("after %d accesses: bus master %v, closed %d times", n, d.master, d.closed)
		}
		_ = d.Close()
	}
}

func TestSpinner(t *testing.T) {
	const near, far = 50 * time.Microsecond, time.Second
	four := []time.Duration{near, near, near, near}
	last := func(off bool, e ...time.Duration) time.Duration {
		b := e1000e.SpinTrace(off, e...)
		return b[len(b)-1]
	}
	if b := last(false, near, near, near); b != 0 {
		t.Errorf("spins after three sleeps: %v", b)
	}
	if b := last(false, four...); b == 0 {
		t.Error("does not spin when hot")
	}
	if b := last(true, four...); b != 0 {
		t.Errorf("one processor spins %v", b)
	}
	if b := last(false, near, near, near, far, near); b != 0 {
		t.Errorf("spins when not hot: %v", b)
	}
	if b := last(false, append(four, 0)...); b == 0 {
		t.Error("one miss ends it")
	}
	if b := last(false, append(four, 0, 0)...); b != 0 {
		t.Errorf("two misses do not end it: %v", b)
	}
	if b := last(false, append(append(four, 0, 0), four...)...); b != 0 {
		t.Errorf("tried again at once: %v", b)
	}
	long := append([]time.Duration{}, four...)
	for range 200 {
		long = append(long, -time.Microsecond)
	}
	if b := last(false, long...); b <= 0 || b > 10*time.Microsecond {
		t.Errorf("a budget of %v for gaps of 1µs", b)
	}
}

// TestVectors: frames are not held back, and each cause has a vector there is.
func TestVectors(t *testing.T) {
	for _, k := range kinds {
		d := newFake(k.mode)
		d.vectors = k.vectors
		start(t, d, e1000e.Options{})
		d.with(func() {
			ivar, other := d.regs[xIVAR/4], uint32(0)
			if k.vectors > 1 {
				other = 1
			}
			if ivar != 8|other<<16|1<<19 {
				t.Errorf("%s: IVAR %#x", k.name, ivar)
			}
			if d.regs[0xC4/4] != 0 || d.regs[0xE8/4] != 0 {
				t.Errorf("%s: frames are throttled", k.name)
			}
			if got := d.regs[0xEC/4] != 0; got != (other == 1) {
				t.Errorf("%s: all else throttled: %v", k.name, got)
			}
			if d.regs[xEIAC/4]&iOTHER != 0 {
				t.Errorf("%s: EIAC %#x", k.name, d.regs[xEIAC/4])
			}
		})
	}
}
