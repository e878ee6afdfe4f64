package e1000e_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca/e1000e"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// waiters start n goroutines in Recv; their errors come on the channel.
func waiters(p *e1000e.Port, n int) <-chan error {
	c := make(chan error, n)
	for range n {
		go func() {
			var fs [4]nic.Frame
			for {
				k, err := p.Recv(fs[:])
				if err != nil {
					c <- err
					return
				}
				release(fs[:k])
			}
		}()
	}
	return c
}

func asleep(t *testing.T, d *fake) {
	t.Helper()
	eventually(t, "asleep", func() (on bool) {
		d.with(func() { on = d.is(xIMS, iRXQ0|iRXT0) })
		return on
	})
}

func TestCloseEndsRecv(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			d := newFake(k.mode)
			d.vectors = k.vectors
			p := start(t, d, e1000e.Options{})
			c := waiters(p, 5)
			asleep(t, d)
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					if err := p.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			for range 5 {
				if err := wait(t, "Recv's end", c); !errors.Is(err, nic.ErrClosed) {
					t.Error(err)
				}
			}
			if _, err := p.Recv(make([]nic.Frame, 1)); !errors.Is(err, nic.ErrClosed) {
				t.Error("Recv:", err)
			}
			if _, err := p.Send([][]byte{frame(d.mac, 60, 0)}); !errors.Is(err, nic.ErrClosed) {
				t.Error("Send:", err)
			}
			if err := p.Multicast(nil); !errors.Is(err, nic.ErrClosed) {
				t.Error("Multicast:", err)
			}
			p.Counters()
			p.State()
		})
	}
}

// TestCloseUnderTraffic closes while frames go both ways.
func TestCloseUnderTraffic(t *testing.T) {
	for range 5 {
		d := newFake(msix)
		d.sink = true
		p := start(t, d, e1000e.Options{RxRing: 16, TxRing: 16})
		c := waiters(p, 3)
		var wg sync.WaitGroup
		wg.Go(func() {
			b := [][]byte{frame(d.mac, 60, 0), frame(d.mac, 1500, 0)}
			for {
				if _, err := p.Send(b); errors.Is(err, nic.ErrClosed) {
					return
				}
			}
		})
		for i := range uint32(300) {
			d.inject(frame(d.mac, 100, i))
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		for range 3 {
			if err := wait(t, "Recv's end", c); !errors.Is(err, nic.ErrClosed) {
				t.Error(err)
			}
		}
	}
}

// TestCloseWithFramesOut keeps the function until the last frame is back.
func TestCloseWithFramesOut(t *testing.T) {
	d := newFake(msix)
	p, err := e1000e.Open(d, e1000e.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint32(3) {
		d.inject(frame(d.mac, 500, i))
	}
	fs := recv(t, p, 3)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	for i := range fs {
		if d.closed != 0 {
			t.Fatalf("closed with %d frames out", len(fs)-i)
		}
		if _, err := check(fs[i].Data); err != nil {
			t.Error(err)
		}
		c := make(chan struct{})
		go func() { fs[i].Release(); close(c) }()
		<-c
	}
	finish(t, d, p)
}

func TestCloseStuck(t *testing.T) {
	for _, tt := range []struct {
		name string
		set  func(*fake)
		want string
	}{
		{"DMA", func(d *fake) { d.masterStuck = true }, "DMA does not end"},
		{"reset", func(d *fake) { d.resetStuck = true }, "reset does not end"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newFake(msix)
			p := start(t, d, e1000e.Options{})
			d.with(func() { tt.set(d) })
			if err := p.Close(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Close says %v", err)
			}
			if d.closed != 1 || d.master {
				t.Errorf("closed %d times, bus master %v", d.closed, d.master)
			}
		})
	}
}

// TestGone has the device vanish under everybody who waits.
func TestGone(t *testing.T) {
	for _, k := range kinds {
		for _, how := range []string{"removed", "all ones"} {
			t.Run(k.name+"/"+how, func(t *testing.T) {
				d := newFake(k.mode)
				d.vectors = k.vectors
				p := start(t, d, e1000e.Options{})
				c := waiters(p, 4)
				asleep(t, d)
				d.inject(frame(d.mac, 100, 1))
				if how == "removed" {
					close(d.removed)
				} else {
					// Found at the next look at the link, or serve's tick.
					d.with(func() {
						d.gone = true
						for _, fd := range d.events {
							signal(fd)
						}
					})
				}
				for range 4 {
					if err := wait(t, "Recv's end", c); !errors.Is(err, nic.ErrGone) {
						t.Error(err)
					}
				}
				if _, err := p.Recv(make([]nic.Frame, 1)); !errors.Is(err, nic.ErrGone) {
					t.Error("Recv:", err)
				}
				if _, err := p.Send([][]byte{frame(d.mac, 60, 0)}); !errors.Is(err, nic.ErrGone) {
					t.Error("Send:", err)
				}
				if err := p.Multicast(nil); !errors.Is(err, nic.ErrGone) {
					t.Error("Multicast:", err)
				}
				p.Counters()
				if err := p.Close(); err != nil {
					t.Error(err)
				}
				if _, err := p.Recv(make([]nic.Frame, 1)); !errors.Is(err, nic.ErrClosed) {
					t.Error("Recv after Close:", err)
				}
			})
		}
	}
	t.Run("unseen but by Counters", func(t *testing.T) {
		d := newFake(msix)
		p := start(t, d, e1000e.Options{})
		before := p.Counters()["rx_missed"]
		d.with(func() { d.gone = true })
		if after := p.Counters()["rx_missed"]; after != before {
			t.Errorf("counted %d", after)
		}
		if _, err := p.Recv(make([]nic.Frame, 1)); !errors.Is(err, nic.ErrGone) {
			t.Error(err)
		}
	})
	t.Run("when the line is unmasked", func(t *testing.T) {
		d := newFake(intx)
		p := start(t, d, e1000e.Options{})
		d.with(func() { d.failUnmask = nic.ErrGone })
		c := waiters(p, 1)
		asleep(t, d)
		d.inject(frame(d.mac, 100, 1))
		if err := wait(t, "Recv's end", c); !errors.Is(err, nic.ErrGone) {
			t.Error(err)
		}
	})
}

func TestLink(t *testing.T) {
	for _, k := range kinds {
		for _, receiver := range []bool{true, false} {
			name := k.name + "/received from"
			if !receiver {
				name = k.name + "/nobody receives"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				d := newFake(k.mode)
				d.vectors = k.vectors
				p := start(t, d, e1000e.Options{})
				states := make(chan nic.State, 16)
				p.Watch(func(s nic.State) { states <- s })
				if receiver {
					waiters(p, 2)
					asleep(t, d)
				}
				changes := []struct {
					up    bool
					speed uint32
					want  nic.State
				}{
					{false, 2, nic.State{}},
					{true, 1, nic.State{Up: true, Mbps: 100}},
					{true, 0, nic.State{Up: true, Mbps: 10}},
					{false, 0, nic.State{}},
					{true, 2, nic.State{Up: true, Mbps: 1000}},
				}
				if !receiver { // each takes a tick, where there is one vector
					changes = changes[:2]
				}
				down := uint64(0)
				for _, tt := range changes {
					d.link(tt.up, tt.speed)
					if s := wait(t, "a change", states); s != tt.want {
						t.Errorf("told %+v, want %+v", s, tt.want)
					}
					if s := p.State(); s != tt.want {
						t.Errorf("state %+v, want %+v", s, tt.want)
					}
					if !tt.up {
						down += 2
					}
					sent := d.sent
					if n, err := p.Send([][]byte{frame(d.mac, 60, 0), frame(d.mac, 60, 1)}); n != 2 || err != nil {
						t.Errorf("Send: %d, %v", n, err)
					}
					if got := d.sent - sent; (got == 2) != tt.up {
						t.Errorf("%d frames left, link up %v", got, tt.up)
					}
				}
				c := p.Counters()
				if c["tx_dropped"] != down || c["link_changes"] != uint64(len(changes)) {
					t.Errorf("dropped %d, %d changes", c["tx_dropped"], c["link_changes"])
				}
			})
		}
	}
}

// TestLinkFlaps quicker than anybody looks: the last state is told.
func TestLinkFlaps(t *testing.T) {
	d := newFake(msix)
	p := start(t, d, e1000e.Options{})
	var mu sync.Mutex
	var last nic.State
	busy := false
	p.Watch(func(s nic.State) {
		mu.Lock()
		if busy {
			t.Error("two calls at a time")
		}
		busy = true
		mu.Unlock()
		mu.Lock()
		defer mu.Unlock()
		last, busy = s, false
	})
	for i := range 501 {
		d.link(i%2 == 1, 2)
	}
	eventually(t, "the last state", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return last == (nic.State{}) && p.State() == last
	})
}

func TestStall(t *testing.T) {
	d := newFake(msix)
	d.mute = true
	p := start(t, d, e1000e.Options{TxRing: 16})
	if e1000e.Stalled(p) {
		t.Error("stalled with nothing to send")
	}
	b := [][]byte{frame(d.mac, 60, 0)}
	for range 15 {
		if _, err := p.Send(b); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.Send(b); !errors.Is(err, nic.ErrFull) {
		t.Error(err)
	}
	e1000e.Stalled(p) // sees it first
	if !e1000e.Stalled(p) {
		t.Error("not stalled")
	}
	eventually(t, "tx_stalls", func() bool {
		time.Sleep(time.Millisecond)
		return p.Counters()["tx_stalls"] > 0
	})
}

func TestCountersAddUp(t *testing.T) {
	d := newFake(msix)
	d.regs[xMPC/4] = 77 // from before
	p := start(t, d, e1000e.Options{})
	for range 3 {
		d.with(func() {
			d.regs[xMPC/4] = 5
			d.regs[xRNBC/4] = 6
			d.regs[xCRCERRS/4] = 7
			d.regs[0x4010+8/4] = 0
			d.regs[0x40AC/4] = ^uint32(0)
		})
		p.Counters()
	}
	c := p.Counters()
	for name, want := range map[string]uint64{
		"rx_missed": 15, "rx_dropped": 15, "rx_no_buffer": 18, "rx_crc_errors": 21,
		"rx_hw_oversize": 3 * 0xFFFFFFFF, "rx_errors": 21 + 3*0xFFFFFFFF,
	} {
		if c[name] != want {
			t.Errorf("%s %d, want %d", name, c[name], want)
		}
	}
}
