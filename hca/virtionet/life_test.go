package virtionet_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/virtionet"
)

// Whatever the device does wrong in a ring ends the port, for all who wait.
func TestBadDevice(t *testing.T) {
	for _, tt := range []struct {
		name  string
		merge bool
		do    func(d *device) // under its lock
		send  bool            // shows in Send
	}{
		{name: "used index jumps", do: func(d *device) { d.q[0].used += 200; d.moveLocked(0) }},
		{name: "used index goes back", do: func(d *device) { d.q[0].used--; d.moveLocked(0); d.signal(1) }},
		{name: "descriptor beyond the ring", do: func(d *device) { d.useLocked(0, 8, 60); d.moveLocked(0) }},
		{name: "descriptor far beyond", do: func(d *device) { d.useLocked(0, 0xFFFFFFFF, 60); d.moveLocked(0) }},
		{name: "descriptor twice", do: func(d *device) {
			h, _ := d.take()
			d.useLocked(0, h, 60)
			d.useLocked(0, h, 60)
			d.moveLocked(0)
		}},
		{name: "too many bytes", do: func(d *device) {
			h, m := d.take()
			d.useLocked(0, h, uint32(len(m))+1)
			d.moveLocked(0)
		}},
		{name: "far too many bytes", do: func(d *device) { h, _ := d.take(); d.useLocked(0, h, 0xFFFFFFFF); d.moveLocked(0) }},
		{name: "less than a header", do: func(d *device) { h, _ := d.take(); d.useLocked(0, h, 11); d.moveLocked(0) }},
		{name: "no buffers in a frame", merge: true, do: func(d *device) { h, _ := d.take(); d.useLocked(0, h, 60); d.moveLocked(0) }},
		{name: "more buffers in a frame than used", merge: true, do: func(d *device) {
			h, m := d.take()
			binary.LittleEndian.PutUint16(m[10:], 2)
			d.useLocked(0, h, 60)
			d.moveLocked(0)
		}},
		{name: "merged with a wrong one", merge: true, do: func(d *device) {
			h, m := d.take()
			binary.LittleEndian.PutUint16(m[10:], 2)
			d.useLocked(0, h, 60)
			d.useLocked(0, h, 60)
			d.moveLocked(0)
		}},
		{name: "sent index jumps", send: true, do: func(d *device) { d.q[1].used += 100; d.moveLocked(1) }},
		{name: "sent what is not", send: true, do: func(d *device) { d.useLocked(1, 7, 0); d.moveLocked(1) }},
		{name: "sent what is none", send: true, do: func(d *device) { d.useLocked(1, 0x10000, 0); d.moveLocked(1) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDevice(t)
			o := virtionet.Options{RxEntries: 8, TxEntries: 8}
			if tt.merge {
				d.offered |= fMrgRxbuf
				o.RxBuffer = 512
			}
			p := open(t, d, o)
			// One frame that came before and stays, one under way.
			d.inject(payload(1, 60))
			f := recv(t, p)
			d.with(func() { d.hold = true })
			if _, err := p.Send([][]byte{payload(0, 60)}); err != nil {
				t.Fatal(err)
			}
			down := make(chan nic.State, 8)
			p.Watch(func(s nic.State) { down <- s })
			end := waiters(t, p, 3)
			d.with(func() { tt.do(d) })
			if tt.send {
				batch := make([][]byte, 8)
				for i := range batch {
					batch[i] = payload(i, 60)
				}
				if _, err := p.Send(batch); !errors.Is(err, nic.ErrGone) {
					t.Errorf("send: %v", err)
				}
			}
			ends(t, end, 3, nic.ErrGone)
			if s := soon(t, "the state changes", down); s.Up {
				t.Errorf("told %+v", s)
			}
			for range 2 {
				if _, err := p.Send([][]byte{payload(0, 60)}); !errors.Is(err, nic.ErrGone) {
					t.Errorf("send: %v", err)
				}
				if _, err := p.Recv(make([]nic.Frame, 1)); !errors.Is(err, nic.ErrGone) {
					t.Errorf("receive: %v", err)
				}
				if err := p.Multicast(nil); !errors.Is(err, nic.ErrGone) {
					t.Errorf("multicast: %v", err)
				}
			}
			if c := p.Counters(); c["bad_descriptors"] != 1 {
				t.Errorf("counters %v", c)
			}
			if !bytes.Equal(f.Data, payload(1, 60)) {
				t.Error("a frame changed")
			}
			f.Release()
			if p.State().Up {
				t.Error("the link is up")
			}
		})
	}
}

// A frame taken in the same breath as a bad one is not lost as a buffer: Close does
// not wait for it.
func TestBadAfterGood(t *testing.T) {
	d := newDevice(t)
	p := open(t, d, virtionet.Options{})
	d.inject(payload(1, 60))
	d.with(func() { d.useLocked(0, 999, 60); d.moveLocked(0) })
	if n, err := p.Recv(make([]nic.Frame, 4)); n != 0 || !errors.Is(err, nic.ErrGone) {
		t.Errorf("received %d: %v", n, err)
	}
}

func TestGone(t *testing.T) {
	for _, tt := range []struct {
		name string
		set  func(*device)
		do   func(*device)
	}{
		{name: "registers read as ones", do: func(d *device) { d.with(func() { d.ones = true }) }},
		{name: "told at once", do: func(d *device) { d.change(func() { d.ones = true }) }},
		{name: "needs a reset", do: func(d *device) { d.change(func() { d.status |= 64 }) }},
		{name: "reset behind our back", do: func(d *device) { d.with(func() { d.status = 0 }) }},
		{name: "asked back", do: func(d *device) { close(d.removed) }},
		{name: "INTx, ones", set: func(d *device) { d.vectors, d.messages = 1, false }, do: func(d *device) { d.change(func() { d.ones = true }) }},
		{name: "INTx cannot be unmasked", set: func(d *device) { d.vectors, d.messages, d.failUnmask = 1, false, unix.EIO }, do: func(d *device) { d.change(func() {}) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDevice(t)
			if tt.set != nil {
				tt.set(d)
			}
			p := open(t, d, virtionet.Options{})
			down := make(chan nic.State, 8)
			p.Watch(func(s nic.State) { down <- s })
			end := waiters(t, p, 3)
			tt.do(d)
			ends(t, end, 3, nic.ErrGone)
			if s := soon(t, "the state changes", down); s.Up {
				t.Errorf("told %+v", s)
			}
			if _, err := p.Send([][]byte{payload(0, 60)}); !errors.Is(err, nic.ErrGone) {
				t.Errorf("send: %v", err)
			}
			if err := p.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
			if _, err := p.Send([][]byte{payload(0, 60)}); !errors.Is(err, nic.ErrClosed) {
				t.Errorf("send after close: %v", err)
			}
		})
	}
}

func TestClose(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			d := newDevice(t)
			if k.set != nil {
				k.set(d)
			}
			p := open(t, d, k.o)
			d.inject(payload(1, 60))
			d.inject(payload(2, 60))
			one, two := recv(t, p), recv(t, p)
			two.Release()
			end := waiters(t, p, 4)
			for range 2 {
				if err := p.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			}
			ends(t, end, 4, nic.ErrClosed)
			if d.status != 0 || d.master {
				t.Errorf("status %#x, bus mastering %v", d.status, d.master)
			}
			if n := d.times(); n != 0 || !bytes.Equal(one.Data, payload(1, 60)) {
				t.Errorf("function closed %d times with a frame out, which is %x", n, one.Data)
			}
			for what, err := range map[string]error{
				"send":      second(p.Send([][]byte{payload(0, 60)})),
				"receive":   second(p.Recv(make([]nic.Frame, 1))),
				"multicast": p.Multicast(nil),
			} {
				if !errors.Is(err, nic.ErrClosed) {
					t.Errorf("%s after close: %v", what, err)
				}
			}
			p.Counters()
			p.State()
			done := make(chan struct{})
			go func() { one.Release(); close(done) }()
			soon(t, "the frame is released", done)
			if n := d.times(); n != 1 {
				t.Errorf("function closed %d times", n)
			}
		})
	}
}

func second[T any](_ T, err error) error { return err }

// Close while everything is under way.
func TestCloseInTraffic(t *testing.T) {
	for i := range 30 {
		d := newDevice(t)
		d.loop, d.quiet = true, true
		k := kinds[i%len(kinds)]
		if k.set != nil {
			k.set(d)
		}
		p, err := virtionet.Open(d, k.o)
		if err != nil {
			t.Fatal(err)
		}
		end := make(chan error, 4)
		started := make(chan struct{}, 4)
		for range 2 {
			go func() {
				batch := [][]byte{payload(0, 60), payload(1, 500), payload(2, 1000)}
				started <- struct{}{}
				for {
					if _, err := p.Send(batch); err != nil && !errors.Is(err, nic.ErrFull) {
						end <- err
						return
					}
				}
			}()
			go func() {
				fs := make([]nic.Frame, 8)
				started <- struct{}{}
				for {
					n, err := p.Recv(fs)
					if err != nil {
						end <- err
						return
					}
					for i := range fs[:n] {
						f := fs[i]
						go f.Release()
					}
				}
			}()
		}
		for range 4 {
			<-started
		}
		if i%3 > 0 {
			eventually(t, "traffic", func() bool { return p.Counters()["rx_packets"] > 50 })
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		ends(t, end, 4, nic.ErrClosed)
		eventually(t, "the last frame is back", func() bool { return d.times() == 1 })
	}
}

// A device that does not let itself be reset is told of, and cut off.
func TestCloseStuck(t *testing.T) {
	d := newDevice(t)
	p, err := virtionet.Open(d, virtionet.Options{})
	if err != nil {
		t.Fatal(err)
	}
	d.with(func() { d.stuckReset = true })
	for range 2 {
		if err := p.Close(); err == nil {
			t.Error("closed")
		}
	}
	if d.master || d.times() != 1 {
		t.Errorf("bus mastering %v, function closed %d times", d.master, d.times())
	}
}

func TestLink(t *testing.T) {
	for _, k := range kinds[:5] {
		t.Run(k.name, func(t *testing.T) {
			d := newDevice(t)
			d.offered |= fSpeed
			d.speed = 10000
			if k.set != nil {
				k.set(d)
			}
			p := open(t, d, k.o)
			told := make(chan nic.State, 8)
			p.Watch(func(s nic.State) { told <- s })
			for i := range 4 {
				d.change(func() { d.link = 0 })
				if s := soon(t, "it goes down", told); s.Up || p.State() != s {
					t.Fatalf("told %+v, state %+v", s, p.State())
				}
				if n, err := p.Send([][]byte{payload(0, 60), payload(1, 60)}); n != 2 || err != nil {
					t.Fatalf("sent %d: %v", n, err)
				}
				if n, err := p.Send([][]byte{payload(0, 60), nil}); n != 1 || !errors.Is(err, unix.EINVAL) {
					t.Fatalf("sent %d: %v", n, err)
				}
				d.change(func() { d.link = 1; d.speed = uint32(i) })
				if s := soon(t, "it comes up", told); s != (nic.State{Up: true, Mbps: i}) || p.State() != s {
					t.Fatalf("told %+v, state %+v", s, p.State())
				}
				if n, err := p.Send([][]byte{payload(0, 60)}); n != 1 || err != nil {
					t.Fatalf("sent %d: %v", n, err)
				}
			}
			d.change(func() {}) // nothing to tell
			if c := p.Counters(); c["tx_dropped"] != 12 || c["tx_packets"] != 4 || c["link_changes"] != 8 {
				t.Errorf("counters %v", c)
			}
			if n := len(d.frames()); n != 4 {
				t.Errorf("%d frames on the wire", n)
			}
			select {
			case s := <-told:
				t.Errorf("told %+v", s)
			default:
			}
		})
	}
}

func group(i int) nic.MAC { return nic.MAC{1, 0, 0x5E, 0, byte(i >> 8), byte(i)} }

func groups(n int) (l []nic.MAC) {
	for i := range n {
		l = append(l, group(i))
	}
	return l
}

func TestMulticast(t *testing.T) {
	const table, allMulti, promisc = 0x100, 0x001, 0x000
	own := nic.MAC{2, 0, 0, 0, 0, 9}
	for _, tt := range []struct {
		name          string
		o             virtionet.Options
		refuse        []uint16
		n             int
		all, promisc  bool
		multi, single int
		fails         bool
	}{
		{name: "none"},
		{name: "some", n: 3, multi: 3},
		{name: "as many as go", n: virtionet.MaxGroups, multi: virtionet.MaxGroups},
		{name: "too many", n: virtionet.MaxGroups + 1, all: true},
		{name: "no table", n: 3, refuse: []uint16{table}, all: true},
		{name: "no mode", n: 3, refuse: []uint16{table, allMulti}, promisc: true},
		{name: "nothing at all", n: 3, refuse: []uint16{table, allMulti, promisc}, fails: true},
		{name: "own address", o: virtionet.Options{MAC: own}, n: 2, multi: 2, single: 1},
		{name: "own address, no table", o: virtionet.Options{MAC: own}, n: 2, refuse: []uint16{table}, all: true, promisc: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDevice(t)
			p := open(t, d, tt.o)
			d.with(func() {
				for _, c := range tt.refuse {
					d.refuse[c] = true
				}
			})
			list := groups(tt.n)
			if err := p.Multicast(list); (err != nil) != tt.fails {
				t.Errorf("error %v", err)
			}
			d.with(func() {
				if d.allMulti != tt.all || d.promisc != tt.promisc {
					t.Errorf("all groups %v, promiscuous %v", d.allMulti, d.promisc)
				}
				if len(d.multi) != tt.multi || len(d.uni) != tt.single && len(tt.refuse) == 0 {
					t.Errorf("it filters %x, %x", d.uni, d.multi)
				}
				for i, g := range d.multi {
					if g != list[i] {
						t.Errorf("group %d is %x", i, g)
					}
				}
				clear(d.refuse)
			})
			// In place of those before, and narrow again.
			if err := p.Multicast(groups(1)); err != nil {
				t.Error(err)
			}
			d.with(func() {
				if d.allMulti || d.promisc || len(d.multi) != 1 {
					t.Errorf("all groups %v, promiscuous %v, %x", d.allMulti, d.promisc, d.multi)
				}
			})
			if err := p.Multicast([]nic.MAC{own}); !errors.Is(err, unix.EINVAL) {
				t.Errorf("a port's address: %v", err)
			}
		})
	}
}

func TestMulticastWithoutFilter(t *testing.T) {
	d := newDevice(t)
	d.offered &^= fCtrlRx
	p := open(t, d, virtionet.Options{})
	if err := p.Multicast(groups(5)); err != nil || len(d.cmds) != 0 {
		t.Errorf("%v, commands %v", err, d.cmds)
	}
}

// A device that stops answering commands costs one wait, not one for each.
func TestNoAnswer(t *testing.T) {
	d := newDevice(t)
	p := open(t, d, virtionet.Options{})
	d.with(func() { d.noAnswer = true })
	if err := p.Multicast(groups(1)); !errors.Is(err, unix.EIO) {
		t.Errorf("multicast: %v", err)
	}
	d.with(func() { d.noAnswer = false; d.commandLocked() }) // too late
	if err := p.Multicast(groups(1)); !errors.Is(err, unix.EIO) {
		t.Errorf("multicast: %v", err)
	}
	d.inject(payload(1, 60)) // frames go on
	f := recv(t, p)
	f.Release()
	if c := p.Counters(); c["ctrl_errors"] < 2 || c["bad_descriptors"] != 0 {
		t.Errorf("counters %v", c)
	}
}

func TestRecvNowhere(t *testing.T) {
	p := open(t, newDevice(t), virtionet.Options{})
	if _, err := p.Recv(nil); !errors.Is(err, unix.EINVAL) {
		t.Errorf("receive: %v", err)
	}
}

// Nothing that lies in a device's configuration space makes Open panic.
func FuzzOpen(f *testing.F) {
	d := newDevice(f)
	f.Add(d.cfg[:], uint64(fOrdinary), uint16(256), uint16(1500))
	f.Fuzz(func(t *testing.T, cfg []byte, offered uint64, size, mtu uint16) {
		d := newDevice(t)
		copy(d.cfg[:], cfg)
		d.offered, d.mtu = offered, mtu
		d.q[0].max, d.q[1].max = size, size
		d.lenient = true
		if p, err := virtionet.Open(d, virtionet.Options{RxEntries: 4, TxEntries: 4}); err == nil {
			p.Close()
		}
		if d.times() != 1 {
			t.Errorf("function closed %d times", d.times())
		}
	})
}
