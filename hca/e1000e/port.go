package e1000e

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca/nic"
)

const (
	// defaultRing frames are 3 ms of 4 KiB packets at 1 Gbit/s.
	defaultRing = 256
	// maxVectors are used: one for frames, one for the link.
	maxVectors = 2
	// closing is added to Port.users by Close: more than calls can be under way.
	closing = 1 << 40
)

// Options of a Port; zero values are defaults.
type Options struct {
	// MTU is the Ethernet MTU in bytes, 68 to MaxMTU; 0 means 1500. MaxFrame is
	// 18 bytes more.
	MTU int
	// RxRing and TxRing are descriptors: a multiple of 8 from 16 to 4096; 0 means 256.
	// The port allocates three times RxRing buffers of 2, 4, 8 or 16 KiB, the
	// smallest that hold MTU + 22 bytes, and TxRing slots of MaxFrame.
	RxRing, TxRing int
}

// minMTU is what IPv4 asks of every link (RFC 791 §3.2).
const minMTU = 68

func (o *Options) complete() error {
	if o.MTU == 0 {
		o.MTU = defaultMTU
	}
	if o.MTU < minMTU || o.MTU > MaxMTU {
		return fmt.Errorf("MTU of %d bytes: give %d to %d", o.MTU, minMTU, MaxMTU)
	}
	for _, r := range []*int{&o.RxRing, &o.TxRing} {
		if *r == 0 {
			*r = defaultRing
		}
		if *r < minRing || *r > maxRing || *r%ringAlign != 0 {
			return fmt.Errorf("ring of %d descriptors: give a multiple of %d from %d to %d", *r, ringAlign, minRing, maxRing)
		}
	}
	return nil
}

// Port is an 82574. Use Open.
type Port struct {
	device
	mac      nic.MAC
	maxFrame int
	several  bool // vectors: the link has its own
	rxCauses uint32
	rx       rxRing
	tx       txRing
	stats    stats

	link  atomic.Uint32 // linkUp, and the speed
	watch atomic.Pointer[func(nic.State)]

	// cfg guards hw and mta, and their registers.
	cfg sync.Mutex
	hw  [len(hwCounters)]uint64
	mta [mtaWords]uint32

	// lead is who waits for frames: it holds the one token, and with it spin, poll.
	lead        chan struct{}
	spin        spinner
	poll        *poller
	ready, quit func() bool

	linkPoll   *poller // serve's
	wake, kick event   // wake: everybody, for good; kick: serve

	// users are the calls that may touch the hardware, plus closing.
	users    atomic.Int64
	drained  chan struct{} // one token when the last left after closing
	gone     atomic.Bool
	doneOnce sync.Once
	done     chan struct{} // closed by Close, or when the device is gone
	wg       sync.WaitGroup

	closeOnce sync.Once
	closeErr  error
}

var _ nic.Port = (*Port)(nil)
var _ nic.Releaser = (*Port)(nil)

// Open resets the function, an 82574, and starts it. The port owns fn from then on: Close
// closes it. If Open fails fn stays the caller's, stopped, to be closed.
//
// It takes some 30 ms, at most half a second; a link comes up later, by autonegotiation.
func Open(fn nic.Function, o Options) (*Port, error) {
	if err := o.complete(); err != nil {
		return nil, fmt.Errorf("open NIC %s: %w", fn.Name(), err)
	}
	p := newPort(fn, o)
	if err := p.open(o); err != nil {
		if p.bar != nil && !errors.Is(err, nic.ErrGone) && p.bar.Load32(regSTATUS) == allOnes {
			err = fmt.Errorf("%w: %w", nic.ErrGone, err)
		}
		return nil, fmt.Errorf("open NIC %s: %w", fn.Name(), err)
	}
	return p, nil
}

func newPort(fn nic.Function, o Options) *Port {
	p := &Port{
		device:   device{fn: fn},
		maxFrame: o.MTU + ethHeader + vlanHeader,
		lead:     make(chan struct{}, 1),
		drained:  make(chan struct{}, 1),
		done:     make(chan struct{}),
		wake:     event{-1},
		kick:     event{-1},
	}
	p.lead <- struct{}{}
	p.spin.off = runtime.GOMAXPROCS(0) < 2
	p.ready = p.rx.ready
	p.quit = func() bool { return p.over() != nil }
	return p
}

func (p *Port) open(o Options) (err error) {
	fn := p.fn
	defer func() {
		if err != nil {
			p.wake.close()
			p.kick.close()
		}
	}()
	if err := p.identify(); err != nil {
		return err
	}
	if err := p.reset(); err != nil {
		return err
	}
	if p.mac, err = p.readMAC(); err != nil {
		return err
	}
	p.startPHY()
	if err := p.makeRings(o); err != nil {
		return err
	}
	if p.wake, err = newEvent(); err != nil {
		return err
	}
	if p.kick, err = newEvent(); err != nil {
		return err
	}
	vectors := min(fn.Vectors(), maxVectors)
	if vectors < 1 {
		return errors.New("it has no interrupt: bind it so that it has INTx, MSI or MSI-X")
	}
	p.several = vectors > 1
	if err := fn.BusMaster(true); err != nil {
		return fmt.Errorf("allow DMA: %w", err)
	}
	defer func() {
		if err != nil {
			_ = p.quiesce()
		}
	}()
	fds, err := fn.Interrupts(vectors)
	if err != nil {
		return fmt.Errorf("turn on %d interrupts: %w", vectors, err)
	}
	if len(fds) != vectors {
		return fmt.Errorf("turn on %d interrupts: it gave %d", vectors, len(fds))
	}
	p.poll = newPoller(fds[0], p.wake.fd)
	if p.several {
		p.linkPoll = newPoller(fds[1], p.kick.fd, p.wake.fd)
	} else {
		p.linkPoll = newPoller(p.kick.fd, p.wake.fd)
	}
	p.start(o)
	if !p.alive() {
		return nic.ErrGone
	}
	p.link.Store(linkOf(p.bar.Load32(regSTATUS)))
	p.wg.Add(2)
	go p.serve()
	go p.watchRemoval()
	return nil
}

// makeRings allocates all DMA memory and describes the rings; the hardware does not
// know of them yet.
func (p *Port) makeRings(o Options) error {
	size, _ := bufferSize(p.maxFrame)
	r := &p.rx
	r.n, r.bufSize, r.stride, r.maxFrame = o.RxRing, size, size+bufferPad, p.maxFrame
	r.batch = min(refillBatch, r.n/4)
	r.stats = &p.stats
	buffers := r.n * (1 + spareRings)
	r.pool = newPool(buffers)
	r.slot = make([]int32, r.n)
	r.lent, r.back, r.fresh = make([]int32, 0, r.n), make([]int32, 0, r.n), make([]int32, r.n)
	t := &p.tx
	t.n, t.maxFrame, t.stats = o.TxRing, p.maxFrame, &p.stats
	t.stride = (max(p.maxFrame, minFrame) + 63) &^ 63
	t.marks = make([]int32, t.n)
	for _, a := range []struct {
		what string
		size int
		mem  *[]byte
		iova *uint64
	}{
		{"receive ring", r.n * descSize, &r.desc, &p.rxBase},
		{"receive buffers", buffers * r.stride, &r.mem, &r.iova},
		{"transmit ring", t.n * descSize, &t.desc, &p.txBase},
		{"transmit slots", t.n * t.stride, &t.mem, &t.iova},
	} {
		d, err := p.fn.Alloc(a.size)
		if err != nil {
			return fmt.Errorf("allocate %d bytes for the %s: %w", a.size, a.what, err)
		}
		if len(d.Mem) < a.size {
			return fmt.Errorf("allocate %d bytes for the %s: got %d", a.size, a.what, len(d.Mem))
		}
		*a.mem, *a.iova = d.Mem, d.IOVA
	}
	return nil
}

// enter begins a call that may touch the hardware, if there is any left.
func (p *Port) enter() error {
	if p.users.Add(1) >= closing {
		p.leave()
		return nic.ErrClosed
	}
	if p.gone.Load() {
		p.leave()
		return nic.ErrGone
	}
	return nil
}

func (p *Port) leave() {
	if p.users.Add(-1) == closing {
		select {
		case p.drained <- struct{}{}:
		default:
		}
	}
}

// over is why the port works no more; nil if it does.
func (p *Port) over() error {
	switch {
	case p.users.Load() >= closing:
		return nic.ErrClosed
	case p.gone.Load():
		return nic.ErrGone
	}
	return nil
}

// stop ends all waits.
func (p *Port) stop() {
	p.doneOnce.Do(func() {
		close(p.done)
		p.wake.set() // nobody reads it: it stays
	})
}

// lost is called when the device does not answer any more.
func (p *Port) lost() {
	p.gone.Store(true)
	p.stop()
}

// alive says whether the device answers; if not, everybody is told. STATUS has
// bits that are always zero (DS 10.2.2).
func (p *Port) alive() bool {
	if p.bar.Load32(regSTATUS) == allOnes {
		p.lost()
		return false
	}
	return true
}

func (p *Port) watchRemoval() {
	defer p.wg.Done()
	select {
	case <-p.fn.Removed():
		p.lost()
	case <-p.done:
	}
}

// MAC is the port's own address.
func (p *Port) MAC() nic.MAC { return p.mac }

// MaxFrame is the MTU and 18 bytes for the header and a VLAN tag.
func (p *Port) MaxFrame() int { return p.maxFrame }

// Send copies frames, pads them to 60 bytes, and starts the hardware once for all of
// them. While the link is down they are dropped, and count as taken.
func (p *Port) Send(frames [][]byte) (int, error) {
	if err := p.enter(); err != nil {
		return 0, err
	}
	defer p.leave()
	if len(frames) == 0 {
		return 0, nil
	}
	if p.link.Load()&linkUp == 0 {
		p.stats.txDropped.Add(uint64(len(frames)))
		return len(frames), nil
	}
	return p.tx.send(p.bar, frames)
}

// Close stops the hardware and ends every wait. The function is closed then or, if frames
// are still out, by the last one's Release. Not from within Watch's callback.
func (p *Port) Close() error {
	p.closeOnce.Do(func() {
		busy := p.users.Add(closing) != closing
		p.stop()
		if busy {
			<-p.drained // they are in no wait but those that stop ended
		}
		p.wg.Wait()
		err := p.quiesce()
		if p.rx.pool.stop() {
			err = errors.Join(err, p.release())
		}
		if err != nil {
			p.closeErr = fmt.Errorf("close NIC %s: %w", p.fn.Name(), err)
		}
	})
	return p.closeErr
}

// release gives back what frames and waits needed.
func (p *Port) release() error {
	p.wake.close()
	p.kick.close()
	return p.fn.Close()
}
