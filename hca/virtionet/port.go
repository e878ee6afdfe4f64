package virtionet

import (
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca/internal/ring"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// Features that are taken when offered (§5.1.3, §6). Offloads are not: what comes
// and goes are plain frames.
const (
	fMTU            = 1 << 3
	fMAC            = 1 << 5
	fMrgRxbuf       = 1 << 15 // only where buffers are smaller than frames
	fStatus         = 1 << 16
	fCtrlVQ         = 1 << 17
	fCtrlRx         = 1 << 18
	fCtrlMACAddr    = 1 << 23 // only where the address is not the device's
	fEventIdx       = 1 << 29
	fVersion1       = 1 << 32
	fAccessPlatform = 1 << 33
	fOrderPlatform  = 1 << 36
	fSpeedDuplex    = 1 << 63
)

// struct virtio_net_config (§5.1.4).
const (
	netMAC       = 0
	netStatus    = 6
	netMTU       = 10
	netSpeed     = 12
	netMinSize   = netStatus // to hold the address, which always exists
	netLinkUp    = 1         // VIRTIO_NET_S_LINK_UP
	speedUnknown = 0x7fffffff
)

// Queues without multiqueue (§5.1.2).
const (
	rxIndex   = 0
	txIndex   = 1
	ctrlIndex = 2
)

// Options of a port. The zero value is good for all of them.
type Options struct {
	// MTU is the largest payload of an Ethernet frame in bytes, 68 to 9216. The
	// device's own limit holds if that is lower. 0: what the device says, 1500 if it
	// says nothing.
	MTU int
	// MAC is the port's address. Zero: the device's, one of our own making if it has
	// none.
	MAC nic.MAC
	// RxEntries and TxEntries are the buffers in each direction, 2 to 512, rounded
	// down to a power of 2; fewer if the device has fewer. 0: 256.
	RxEntries, TxEntries int
	// RxBuffer is the bytes of a receive buffer, struct virtio_net_hdr included; at
	// least 64. What holds no whole frame saves memory and costs a copy of each longer
	// frame, and needs a device that can do it. 0: a whole frame.
	RxBuffer int
}

// minRxBuffer keeps the headers of a frame in its first buffer.
const minRxBuffer = 64

// ending is why a port is over.
type ending struct{ err error }

// Port is an Ethernet port on a virtio network device (nic.Port).
type Port struct {
	t        *transport
	features uint64
	mac      nic.MAC
	maxFrame int
	shared   bool // one interrupt for everything

	rx   *rxQueue
	tx   *txQueue
	ctrl *ctrlQueue // nil: none
	own  []nic.MAC  // our address, if the device does not know it

	link    atomic.Uint64 // nic.State, packed
	vec     *ring.Event   // watch's
	end     atomic.Pointer[ending]
	ended   chan struct{} // closed once end is set
	endOnce sync.Once     // closes it
	threads sync.WaitGroup

	// refs are the frames that are out after Close, and Close itself.
	refs    atomic.Int64
	closing sync.Once
	closed  error

	cfgIRQs, changes atomic.Uint64

	// watchMu guards told and is held while it is called.
	watchMu sync.Mutex
	told    func(nic.State)
}

var _ nic.Port = (*Port)(nil)

// Open takes over fn, a virtio network function, and starts the port. If it fails
// fn is closed.
func Open(fn nic.Function, o Options) (*Port, error) {
	p := &Port{ended: make(chan struct{})}
	p.refs.Store(1)
	err := p.open(fn, o)
	if err == nil {
		return p, nil
	}
	err = fmt.Errorf("virtio network port on %s: %w", fn.Name(), err)
	if p.t == nil {
		_ = fn.Close()
		return nil, err
	}
	if p.end.Load() == nil { // not gone: let it know (§2.1.1)
		p.t.addStatus(statusFailed)
	}
	_ = p.Close()
	return nil, err
}

func (p *Port) open(fn nic.Function, o Options) error {
	if err := o.check(); err != nil {
		return err
	}
	t, err := newTransport(fn)
	if err != nil {
		return err
	}
	p.t = t
	if err := t.reset(); err != nil {
		return err
	}
	t.addStatus(statusAcknowledge)
	t.addStatus(statusDriver)
	if err := p.negotiate(&o); err != nil {
		return err
	}
	if err := p.makeQueues(o); err != nil {
		return err
	}
	if err := p.connect(); err != nil {
		return err
	}
	if err := fn.BusMaster(true); err != nil {
		return fmt.Errorf("allow DMA: %w", err)
	}
	t.addStatus(statusDriverOK)
	if err := p.alive(); err != nil {
		return err
	}
	p.rx.fill()
	if err := p.address(o); err != nil {
		return err
	}
	p.link.Store(pack(p.readLink()))
	p.threads.Add(2)
	go p.watch()
	go p.watchRemoval()
	return nil
}

func (o *Options) check() error {
	for _, v := range []struct {
		name          string
		val, min, max int
	}{
		{"MTU", o.MTU, minMTU, maxMTU},
		{"RxEntries", o.RxEntries, minEntries, maxEntries},
		{"TxEntries", o.TxEntries, minEntries, maxEntries},
		{"RxBuffer", o.RxBuffer, minRxBuffer, netHdr + ethHeader + vlanTag + maxMTU},
	} {
		if v.val != 0 && (v.val < v.min || v.val > v.max) {
			return fmt.Errorf("%s is %d: set it to %d to %d, or leave it out", v.name, v.val, v.min, v.max)
		}
	}
	if o.MAC[0]&1 != 0 {
		return fmt.Errorf("MAC %x is a group's: set that of one port, or leave it out", o.MAC)
	}
	return nil
}

// negotiate settles the features, and what follows from the configuration. Some of
// that has to be known before (§3.1.1 step 4).
func (p *Port) negotiate(o *Options) error {
	offered := p.t.offered()
	if offered&fVersion1 == 0 {
		return errors.New("it does not offer VIRTIO_F_VERSION_1: in QEMU set disable-modern=off")
	}
	want := uint64(fMTU | fMAC | fStatus | fCtrlVQ | fCtrlRx | fEventIdx | fVersion1 | fAccessPlatform | fOrderPlatform | fSpeedDuplex)
	if offered&fCtrlVQ == 0 {
		want &^= fCtrlRx // needs it (§5.1.3.1)
	} else if o.MAC != (nic.MAC{}) {
		want |= fCtrlMACAddr
	}
	for _, f := range []struct {
		bit uint64
		end int
	}{{fStatus, netStatus + 2}, {fMTU, netMTU + 2}, {fSpeedDuplex, netSpeed + 4}} {
		if p.t.device.size < f.end {
			want &^= f.bit // says to have what there is no room for
		}
	}
	p.features = offered & want
	mtu := o.MTU
	if p.features&fMTU != 0 {
		has := int(p.t.device.load16(netMTU))
		if has < minMTU {
			return fmt.Errorf("its MTU is said to be %d: at least %d is possible", has, minMTU)
		}
		if mtu == 0 || mtu > has {
			mtu = min(has, maxMTU)
		}
	}
	if mtu == 0 {
		mtu = defaultMTU
	}
	p.maxFrame = mtu + ethHeader + vlanTag
	if whole := netHdr + p.maxFrame; o.RxBuffer == 0 || o.RxBuffer >= whole {
		o.RxBuffer = whole
	} else if p.features |= offered & fMrgRxbuf; p.features&fMrgRxbuf == 0 {
		return fmt.Errorf("it cannot spread frames (VIRTIO_NET_F_MRG_RXBUF): receive buffers of %d bytes do for MTU %d, not %d", whole, mtu, o.RxBuffer)
	}
	return p.t.accept(p.features)
}

// entries is how long a ring to ask for.
func entries(asked int) int {
	if asked == 0 {
		asked = defaultEntries
	}
	n := minEntries
	for 2*n <= asked {
		n *= 2
	}
	return n
}

func (p *Port) makeQueues(o Options) error {
	n, err := p.t.queueSize(rxIndex, entries(o.RxEntries))
	if err == nil {
		p.rx, err = newRxQueue(p, n, o.RxBuffer, p.features&fMrgRxbuf != 0)
	}
	if err != nil {
		return err
	}
	if n, err = p.t.queueSize(txIndex, entries(o.TxEntries)); err == nil {
		p.tx, err = newTxQueue(p, n)
	}
	if err != nil || p.features&fCtrlVQ == 0 {
		return err
	}
	if n, err = p.t.queueSize(ctrlIndex, ctrlEntries); err == nil {
		p.ctrl, err = newCtrlQueue(p, n)
	}
	return err
}

// connect gives the queues and interrupts to the device: one vector for the
// configuration and one for receiving, or one for both. There is none for the
// others, which are polled.
func (p *Port) connect() error {
	fn := p.t.fn
	n := min(fn.Vectors(), 2)
	if n < 1 {
		return errors.New("it can raise no interrupt")
	}
	fds, err := fn.Interrupts(n)
	if err != nil {
		return fmt.Errorf("turn on %d interrupts: %w", n, err)
	}
	if len(fds) != n {
		return fmt.Errorf("turn on %d interrupts: got %d", n, len(fds))
	}
	p.shared = n == 1
	if p.vec, err = ring.OpenEvent(fds[0]); err != nil {
		return err
	}
	if p.shared {
		p.rx.event, err = ring.NewEvent()
	} else {
		p.rx.event, err = ring.OpenEvent(fds[1])
	}
	if err != nil {
		return err
	}
	// A function with INTx takes no vector, and needs none (§4.1.5.3).
	strict := !p.shared
	if err := p.t.configVector(0, strict); err != nil {
		return err
	}
	if err := p.t.enable(rxIndex, p.rx.q, uint16(n-1), strict); err != nil {
		return err
	}
	if err := p.t.enable(txIndex, p.tx.q, noVector, true); err != nil {
		return err
	}
	if p.ctrl != nil {
		return p.t.enable(ctrlIndex, p.ctrl.q, noVector, true)
	}
	return nil
}

// address settles the port's own and sets the receive filter. A device that refuses
// either still gets its frames to us, with others.
func (p *Port) address(o Options) error {
	if p.features&fMAC != 0 {
		p.t.consistent(func() {
			for i := range p.mac {
				p.mac[i] = p.t.device.load8(netMAC + i)
			}
		})
	}
	has := p.mac
	if o.MAC != (nic.MAC{}) {
		p.mac = o.MAC
	} else if p.mac[0]&1 != 0 || p.mac == (nic.MAC{}) {
		_, _ = rand.Read(p.mac[:]) // never fails
		p.mac[0] = p.mac[0]&^1 | 2 // one port's, locally administered (§5.1.4.2)
	}
	if p.mac != has {
		if p.features&fCtrlMACAddr == 0 || p.ctrl.setMAC(p.mac) != nil {
			p.own = []nic.MAC{p.mac}
		}
	}
	if p.features&fCtrlRx != 0 {
		p.ctrl.allMulti, p.ctrl.promisc = true, true // whatever it is after a reset
		_ = p.ctrl.filter(p.own, nil)
	}
	return p.over()
}

// MAC is the port's own address.
func (p *Port) MAC() nic.MAC { return p.mac }

// MaxFrame is the MTU with an Ethernet header and a VLAN tag, in bytes.
func (p *Port) MaxFrame() int { return p.maxFrame }

// State is the link as the device last told it. Without VIRTIO_NET_F_STATUS it is
// up, until the device is gone.
func (p *Port) State() nic.State { return unpack(p.link.Load()) }

// Watch has f called when the state changes; f may not call Close, which waits for
// it.
func (p *Port) Watch(f func(nic.State)) {
	p.watchMu.Lock()
	p.told = f
	p.watchMu.Unlock()
}

// Multicast sets the groups to receive. An error is EINVAL (wrapped) for an address
// that is no group's, ErrClosed, ErrGone, or what the device refused at last;
// one without VIRTIO_NET_F_CTRL_RX receives everything.
func (p *Port) Multicast(groups []nic.MAC) error {
	if err := p.over(); err != nil {
		return err
	}
	for _, g := range groups {
		if g[0]&1 == 0 {
			return fmt.Errorf("multicast on %s: %x is no group's address: %w", p.t.fn.Name(), g, einval)
		}
	}
	if p.features&fCtrlRx == 0 {
		return nil
	}
	if err := p.ctrl.filter(p.own, groups); err != nil {
		return fmt.Errorf("multicast on %s: %w", p.t.fn.Name(), err)
	}
	return nil
}

// Send copies frames to the transmit ring. A frame shorter than an Ethernet header
// or longer than MaxFrame ends it with EINVAL (wrapped), after those before it.
func (p *Port) Send(frames [][]byte) (int, error) {
	if err := p.over(); err != nil {
		return 0, err
	}
	n, bad := sendable(frames, p.maxFrame)
	if p.link.Load()&linkUp == 0 {
		p.tx.drop(n)
		return n, bad
	}
	for sent := 0; sent < n; {
		k, err := p.tx.send(frames[sent:min(n, sent+txBatch)])
		if sent += k; err != nil {
			return sent, err
		}
	}
	return n, bad
}

// Recv waits for frames.
func (p *Port) Recv(fs []nic.Frame) (int, error) {
	if err := p.over(); err != nil {
		return 0, err
	}
	if len(fs) == 0 {
		return 0, fmt.Errorf("receive on %s: no room for a frame: %w", p.t.fn.Name(), einval)
	}
	return p.rx.recv(fs)
}

// Counters are this driver's; a virtio device has none. rx_dropped are frames too
// short, too long, or merged with no room to copy them; those that found no buffer
// the device keeps to itself. bad_descriptors is what it did wrong.
func (p *Port) Counters() map[string]uint64 {
	c := map[string]uint64{
		"rx_interrupts":     p.rx.irqs.Load(),
		"config_interrupts": p.cfgIRQs.Load(),
		"link_changes":      p.changes.Load(),
		"rx_bad_releases":   p.rx.foul.Load(),
	}
	p.rx.mu.Lock()
	c["rx_packets"], c["rx_bytes"], c["rx_dropped"], c["bad_descriptors"] = p.rx.packets, p.rx.bytes, p.rx.dropped, p.rx.bad
	p.rx.mu.Unlock()
	p.tx.mu.Lock()
	c["tx_packets"], c["tx_bytes"], c["tx_dropped"], c["tx_full"] = p.tx.packets, p.tx.bytes, p.tx.dropped, p.tx.full
	c["bad_descriptors"] += p.tx.bad
	p.tx.mu.Unlock()
	if p.ctrl != nil {
		p.ctrl.mu.Lock()
		c["ctrl_commands"], c["ctrl_errors"] = p.ctrl.commands, p.ctrl.errors
		c["bad_descriptors"] += p.ctrl.bad
		p.ctrl.mu.Unlock()
	}
	return c
}
