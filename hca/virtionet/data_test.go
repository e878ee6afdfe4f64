package virtionet_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/virtionet"
)

// kinds of device that data goes through.
var kinds = []struct {
	name string
	set  func(*device)
	o    virtionet.Options
}{
	{name: "ordinary"},
	{name: "no event index", set: func(d *device) { d.offered &^= fEventIdx }},
	{name: "INTx", set: func(d *device) { d.vectors, d.messages = 1, false }},
	{name: "INTx, no event index", set: func(d *device) { d.vectors, d.messages, d.offered = 1, false, d.offered&^fEventIdx }},
	{name: "one message", set: func(d *device) { d.vectors = 1 }},
	{name: "jumbo", set: func(d *device) { d.mtu = 9000 }},
	{name: "merged", set: func(d *device) { d.mtu = 9000; d.offered |= fMrgRxbuf }, o: virtionet.Options{RxBuffer: 512}},
	{name: "tiny rings", set: func(d *device) { d.q[0].max, d.q[1].max = 4, 2 }},
	{name: "bare", set: func(d *device) { d.offered = fVersion1 }},
}

// Frames go out and come back, sent and received by several goroutines, released by
// others; each that is not dropped comes once and whole.
func TestBothWays(t *testing.T) {
	const senders, receivers, each = 3, 3, 3000
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			d := newDevice(t)
			d.loop, d.quiet = true, true
			if k.set != nil {
				k.set(d)
			}
			p := open(t, d, k.o)
			var seen [senders][each]atomic.Bool
			var got atomic.Int64
			back := make(chan nic.Frame, 16)
			var rx, rel sync.WaitGroup
			for range receivers {
				rx.Go(func() {
					var fs [8]nic.Frame
					for {
						n, err := p.Recv(fs[:])
						if err != nil {
							if !errors.Is(err, nic.ErrClosed) {
								t.Errorf("receive: %v", err)
							}
							return
						}
						for i := range fs[:n] {
							f := &fs[i]
							who, nr := int(f.Data[0]), int(binary.LittleEndian.Uint32(f.Data[1:]))
							want := frameOf(who, nr, p.MaxFrame())
							if !bytes.Equal(f.Data, want) {
								t.Errorf("frame %d.%d: %d bytes came, not the %d sent", who, nr, len(f.Data), len(want))
							} else if seen[who][nr].Swap(true) {
								t.Errorf("frame %d.%d came twice", who, nr)
							}
							got.Add(1)
							back <- *f
						}
					}
				})
			}
			for range 2 {
				rel.Go(func() {
					for f := range back {
						f.Data[0]++ // they may be changed
						f.Release()
					}
				})
			}
			var tx sync.WaitGroup
			for s := range senders {
				tx.Go(func() {
					var batch [][]byte
					for nr := range each {
						batch = append(batch, frameOf(s, nr, p.MaxFrame()))
						if len(batch) < 1+nr%7 && nr < each-1 {
							continue
						}
						for len(batch) > 0 {
							n, err := p.Send(batch)
							if err != nil && !errors.Is(err, nic.ErrFull) {
								t.Errorf("send: %v", err)
								return
							}
							batch = batch[n:]
						}
					}
				})
			}
			tx.Wait()
			eventually(t, "all that was not dropped is received", func() bool {
				all := got.Load() + int64(p.Counters()["rx_dropped"])
				d.with(func() { all += int64(d.lost) }) // not around Counters: a notification has the queue's lock
				return all == senders*each
			})
			c := p.Counters()
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			rx.Wait()
			close(back)
			rel.Wait()
			if c["tx_packets"] != senders*each || c["rx_packets"] != uint64(got.Load()) || c["bad_descriptors"] != 0 || c["rx_bad_releases"] != 0 {
				t.Errorf("counters %v; %d received, %d lost", c, got.Load(), d.lost)
			}
			if got.Load() == 0 {
				t.Error("nothing came")
			}
		})
	}
}

func frameOf(who, nr, most int) []byte {
	b := payload(who+nr, 14+(nr*37)%(most-13))
	b[0] = byte(who)
	binary.LittleEndian.PutUint32(b[1:], uint32(nr))
	return b
}

func TestSendOrder(t *testing.T) {
	d := newDevice(t)
	p := open(t, d, virtionet.Options{})
	var frames [][]byte
	for i := range 2*virtionet.TxBatch + 5 {
		frames = append(frames, payload(i, 60+i))
	}
	if n, err := p.Send(frames); n != len(frames) || err != nil {
		t.Fatalf("sent %d: %v", n, err)
	}
	got := d.frames()
	if len(got) != len(frames) {
		t.Fatalf("%d of %d arrived", len(got), len(frames))
	}
	for i := range got {
		if !bytes.Equal(got[i], frames[i]) {
			t.Fatalf("frame %d is %x", i, got[i])
		}
	}
	if d.kicks[1] != 3 {
		t.Errorf("%d notifications for %d frames", d.kicks[1], len(frames))
	}
}

func TestSendRefuses(t *testing.T) {
	d := newDevice(t)
	p := open(t, d, virtionet.Options{})
	good := payload(0, 1518)
	for _, bad := range [][]byte{nil, make([]byte, 13), make([]byte, 1519)} {
		n, err := p.Send([][]byte{good, bad, good})
		if n != 1 || !errors.Is(err, unix.EINVAL) {
			t.Errorf("%d bytes: sent %d: %v", len(bad), n, err)
		}
	}
	if n, err := p.Send(nil); n != 0 || err != nil {
		t.Errorf("nothing: sent %d: %v", n, err)
	}
	if len(d.frames()) != 3 {
		t.Errorf("%d arrived", len(d.frames()))
	}
}

func TestRingFull(t *testing.T) {
	d := newDevice(t)
	p := open(t, d, virtionet.Options{TxEntries: 9}) // 8
	d.with(func() { d.hold = true })
	frames := make([][]byte, 10)
	for i := range frames {
		frames[i] = payload(i, 100)
	}
	if n, err := p.Send(frames[:5]); n != 5 || err != nil {
		t.Fatalf("sent %d: %v", n, err)
	}
	if n, err := p.Send(frames[5:]); n != 3 || !errors.Is(err, nic.ErrFull) {
		t.Fatalf("sent %d: %v", n, err)
	}
	if n, err := p.Send(frames[8:]); n != 0 || !errors.Is(err, nic.ErrFull) {
		t.Fatalf("sent %d: %v", n, err)
	}
	d.with(func() { d.hold = false; d.sendLocked() })
	if n, err := p.Send(frames[8:]); n != 2 || err != nil {
		t.Fatalf("sent %d: %v", n, err)
	}
	for i, f := range d.frames() {
		if !bytes.Equal(f, frames[i]) {
			t.Errorf("frame %d is wrong", i)
		}
	}
	if c := p.Counters(); c["tx_full"] != 2 || c["tx_packets"] != 10 || c["tx_bytes"] != 1000 {
		t.Errorf("counters %v", c)
	}
}

// What the callers keep the hardware does not have.
func TestAllBuffersOut(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			d := newDevice(t)
			if k.set != nil {
				k.set(d)
			}
			p := open(t, d, virtionet.Options{RxEntries: 8})
			var held []nic.Frame
			for i := range 8 {
				if !d.inject(payload(i, 64+i)) {
					t.Fatalf("no buffer for frame %d", i)
				}
			}
			fs := make([]nic.Frame, 16)
			for len(held) < 8 {
				n, err := p.Recv(fs)
				if err != nil {
					t.Fatal(err)
				}
				held = append(held, fs[:n]...)
			}
			if d.inject(payload(9, 64)) {
				t.Fatal("a buffer that is out was used")
			}
			end := waiters(t, p, 1)
			for i := range held {
				if !bytes.Equal(held[i].Data, payload(i, 64+i)) {
					t.Errorf("frame %d changed", i)
				}
				if cap(held[i].Data) != len(held[i].Data) {
					t.Error("a frame can be appended to, into its neighbour")
				}
				held[i].Release()
				// The waiter may be the one who posts it.
				eventually(t, "the buffer is posted", func() bool { return d.inject(payload(10+i, 80)) })
			}
			eventually(t, "they are received", func() bool { return p.Counters()["rx_packets"] == 16 })
			p.Close()
			ends(t, end, 1, nic.ErrClosed)
		})
	}
}

func TestRelease(t *testing.T) {
	d := newDevice(t)
	p := open(t, d, virtionet.Options{RxEntries: 2})
	d.inject(payload(1, 60))
	f := recv(t, p)
	again, buf := f, f.Buf
	f.Release()
	f.Release() // is none any more
	if f.Data != nil {
		t.Error("a released frame has data")
	}
	again.Release()
	buf.ReleaseFrame(-1)
	buf.ReleaseFrame(2)
	if n := p.Counters()["rx_bad_releases"]; n != 3 {
		t.Errorf("%d bad releases, want 3", n)
	}
	for i := range 5 { // each buffer is there once
		d.inject(payload(i, 60))
		f := recv(t, p)
		f.Release()
	}
}

// Frames that are none are dropped, and their buffers used again.
func TestRunts(t *testing.T) {
	d := newDevice(t)
	p := open(t, d, virtionet.Options{RxEntries: 4})
	for range 3 {
		for n := range 4 {
			if !d.inject(make([]byte, 13-n)) {
				t.Fatal("no buffer")
			}
		}
		d.with(func() { d.lost = 0 })
		fs := make([]nic.Frame, 1)
		done := make(chan error, 1)
		go func() {
			_, err := p.Recv(fs)
			done <- err
		}()
		eventually(t, "there is a buffer", func() bool { return d.inject(payload(3, 60)) })
		if err := soon(t, "a frame comes", done); err != nil {
			t.Fatal(err)
		}
		fs[0].Release()
	}
	if c := p.Counters(); c["rx_dropped"] != 12 || c["rx_packets"] != 3 {
		t.Errorf("counters %v", c)
	}
}

func TestMerged(t *testing.T) {
	d := newDevice(t)
	d.mtu, d.offered = 9000, d.offered|fMrgRxbuf
	p := open(t, d, virtionet.Options{RxEntries: 64, RxBuffer: 256})
	sizes := []int{14, 244, 245, 256, 500, 501, 9018}
	for i, n := range sizes {
		d.inject(payload(i, n))
		f := recv(t, p)
		if !bytes.Equal(f.Data, payload(i, n)) {
			t.Errorf("%d bytes: %d came", n, len(f.Data))
		}
		f.Release()
	}
	d.inject(make([]byte, 9019)) // longer than a spare
	var held []nic.Frame
	for i := range 20 { // more than there are spares
		d.inject(payload(i, 300))
		if i < 16 {
			held = append(held, recv(t, p))
		}
	}
	d.inject(payload(0, 60))
	held = append(held, recv(t, p))
	if c := p.Counters(); c["rx_dropped"] != 5 {
		t.Errorf("counters %v", c)
	}
	for i := range held {
		held[i].Release()
	}
	d.inject(payload(7, 300))
	f := recv(t, p)
	if !bytes.Equal(f.Data, payload(7, 300)) {
		t.Error("a spare that came back is not used")
	}
	// Spares stay too, and the function is closed with the last.
	p.Close()
	if !bytes.Equal(f.Data, payload(7, 300)) || d.times() != 0 {
		t.Errorf("frame changed, or function closed %d times", d.times())
	}
	f.Release()
}

// A device that sends no more interrupts than it was asked for interrupts once for
// each sleep.
func TestFewInterrupts(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			d := newDevice(t)
			if k.set != nil {
				k.set(d)
			}
			p := open(t, d, virtionet.Options{})
			fs := make([]nic.Frame, 1)
			for i := range 200 { // nobody sleeps
				d.inject(payload(i, 60))
				if _, err := p.Recv(fs); err != nil {
					t.Fatal(err)
				}
				fs[0].Release()
			}
			d.with(func() {
				if d.irqs > 1 {
					t.Errorf("%d interrupts, and nobody slept", d.irqs)
				}
			})
			if d.eventIdx() && d.kicks[0] > 1 {
				t.Errorf("%d notifications, and there always were buffers", d.kicks[0])
			}
		})
	}
}

// One frame after the other, each waited for: no wake-up is lost, whoever of several
// receivers took the last.
func TestPingPong(t *testing.T) {
	for _, k := range kinds {
		for _, receivers := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s, %d", k.name, receivers), func(t *testing.T) {
				d := newDevice(t)
				if k.set != nil {
					k.set(d)
				}
				p := open(t, d, k.o)
				came := make(chan int, 1)
				var wg sync.WaitGroup
				for range receivers {
					wg.Go(func() {
						var fs [2]nic.Frame
						for {
							n, err := p.Recv(fs[:])
							if err != nil {
								return
							}
							for i := range fs[:n] {
								fs[i].Release()
							}
							came <- n
						}
					})
				}
				for i := range 2000 {
					if !d.inject(payload(i, 60)) {
						t.Fatal("no buffer")
					}
					if n := soon(t, "the frame comes", came); n != 1 {
						t.Fatalf("%d frames came", n)
					}
				}
				p.Close()
				wg.Wait()
			})
		}
	}
}

// The rings' indices go round.
func TestIndicesWrap(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			d := newDevice(t)
			d.discard = true
			if k.set != nil {
				k.set(d)
			}
			p := open(t, d, virtionet.Options{RxEntries: 8, TxEntries: 8})
			frame := payload(1, 60)
			batch := [][]byte{frame}
			fs := make([]nic.Frame, 2)
			for i := range 1<<16 + 100 {
				if n, err := p.Send(batch); n != 1 || err != nil {
					t.Fatalf("frame %d: sent %d: %v", i, n, err)
				}
				if !d.inject(frame) {
					t.Fatalf("frame %d: no buffer", i)
				}
				if n, err := p.Recv(fs); n != 1 || err != nil {
					t.Fatalf("frame %d: received %d: %v", i, n, err)
				}
				fs[0].Release()
			}
			d.with(func() {
				if d.q[1].taken != 100 || d.q[0].used != 100 {
					t.Errorf("the device took %d, used %d", d.q[1].taken, d.q[0].used)
				}
			})
		})
	}
}
