package soft

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/capture"
)

// Config describes a device to New. Zero limits mean the defaults.
type Config struct {
	GUID     hca.GUID // node and port GUID; must be unique on the fabric
	NodeDesc string   // at most 63 bytes; the rest is cut off
	BoardID  string
	// Address, unless it is 0, gives the port an IPv4 GID too; it must be unique on the
	// fabric, which must be Ethernet (EINVAL).
	Address [4]byte
	// Link, unless it is nil, is how the port reaches other hosts; what is on its fabric
	// it reaches without. The fabric must be Ethernet, Address 0 (EINVAL). The port has
	// the link's GIDs, MTU and state. The device closes it.
	Link roce.Link
	// LinkGone is called, once at most and from a goroutine of the device's, when the
	// link is gone for good. It may not block.
	LinkGone func()
	// Tap, unless it is nil, is shown what the port's queue pairs say to others of the
	// fabric, made into packets (see tap.go). It may be Link. The device closes it.
	Tap *capture.Tap
	// VendorID and VendorPartID are what query_device reports.
	VendorID, VendorPartID uint32
	// Limits; each is at most what DefaultAttr says.
	MaxQP, MaxQPWR, MaxCQ, MaxCQE, MaxMR, MaxMW, MaxPD, MaxAH, MaxSRQ uint32
	// MaxSRQSGE likewise.
	MaxSRQSGE uint32
	// Without are optional methods that the device does not have, because its
	// provider's library could not use them.
	Without hca.OpSet
	// Mapped reports the capabilities of what only mapped queues carry: binding of
	// memory windows, flushes and atomic writes. The engine does them in any case; but
	// requests that go through write() cannot ask for them.
	Mapped bool
}

const (
	physPort    = 1 // the only port
	gidTableLen = 8
	defaultPKey = 0xffff
	subnetID    = 0xfe80 // first two bytes of the default GID prefix (IBTA 1.4 §4.1.1)

	mtu4096       = 5
	stateDown     = 1
	stateActive   = 4
	physLinkUp    = 5
	physPolling   = 2
	width4x       = 2
	speedEDR      = 32
	portCapFlags  = 0x02000000 // IB_PORT_CLIENT_REG_SUP
	vlCount       = 1
	subnetTimeout = 18
)

// Device is a software HCA with one port, whose link layer is its fabric's.
type Device struct {
	attr   hca.DeviceAttr
	ops    hca.OpSet
	fabric *loop.Fabric
	port   *loop.Port
	gids   atomic.Pointer[[gidTableLen]hca.GID] // of the port; zeros where it has none
	link   roce.Link                            // nil: none
	tap    *capture.Tap                         // nil: none
	wire   *wirePort                            // of the link

	mrs    mrTable
	qps    numTable[QP]
	srqs   numTable[SRQ] // XRC SRQs only
	events events
	pool   pool

	// What exists, against attr's limits and maxXRCD.
	nPD, nCQ, nQP, nAH, nSRQ, nMW, nXRCD atomic.Int32

	up atomic.Bool // changed under mu

	// mu guards what is below. Leaf.
	mu       sync.Mutex
	contexts map[*UContext]struct{}
	parties  map[any]*party // by owner
	nobody   *party         // of what has no context
	gone     counters       // of queue pairs that are closed
}

var _ hca.Device = (*Device)(nil)

// DefaultAttr is what a device with a zero Config reports, without names.
func DefaultAttr() hca.DeviceAttr {
	return hca.DeviceAttr{
		FWVer:         1 << 32,
		MaxMRSize:     1 << 63,
		PageSizeCap:   0xfffff000,
		HWVer:         1,
		MaxQP:         numIndexMax - numIndexMin,
		MaxQPWR:       16384,
		CapFlags:      capFlags,
		MaxSGE:        maxSGE,
		MaxSGERD:      maxSGE,
		MaxCQ:         1 << 18,
		MaxCQE:        1 << 20,
		MaxMR:         1 << 20,
		MaxMW:         1 << 20,
		MaxPD:         1 << 18,
		MaxQPRdAtom:   16,
		MaxResRdAtom:  16 * (numIndexMax - numIndexMin),
		MaxQPInitRd:   16,
		AtomicCap:     1, // IB_ATOMIC_HCA
		MaskedAtomCap: 1,
		MaxMcastGrp:   8192,
		MaxMcastQP:    256,
		MaxTotMcastQP: 8192 * 256,
		MaxAH:         1 << 20,
		MaxSRQ:        65536,
		MaxSRQWR:      32768,
		MaxSRQSGE:     maxSGE,
		MaxPKeys:      1,
		LocalCAAckDel: 15,
		PhysPortCnt:   1,
		CompVectors:   1,
		MaxInline:     maxInline,
		MaxCQCount:    1<<16 - 1, // 16 bits, as mlx5's
		MaxCQPeriod:   1<<16 - 1,
		ODP:           odpCaps,
		GIDTableLen:   gidTableLen,
		PKeyTableLen:  1,
	}
}

// odpCaps: whatever can be done with memory can be done with memory that comes on
// demand, since nothing is pinned and every copy goes through the client's page
// tables.
var odpCaps = hca.ODPCaps{
	General: hca.ODPSupport | hca.ODPImplicit,
	RC:      odpDatagram | hca.ODPWrite | hca.ODPRead | hca.ODPAtomic,
	UC:      odpDatagram | hca.ODPWrite,
	UD:      odpDatagram,
	XRC:     odpDatagram | hca.ODPWrite | hca.ODPRead | hca.ODPAtomic,
}

const odpDatagram = hca.ODPSend | hca.ODPRecv | hca.ODPSRQRecv

// capFlags: BAD_PKEY_CNTR, BAD_QKEY_CNTR, UD_AV_PORT_ENFORCE,
// CURR_QP_STATE_MOD, PORT_ACTIVE_EVENT, SYS_IMAGE_GUID, RC_RNR_NAK_GEN,
// SRQ_RESIZE (enum ib_device_cap_flags), as the kernel's software drivers, and
// XRC.
const capFlags = 1<<1 | 1<<2 | 1<<6 | 1<<7 | 1<<10 | 1<<11 | 1<<12 | 1<<13 | capXRC

const capXRC = 1 << 20

// capWindows: MEM_WINDOW and MEM_WINDOW_TYPE_2B, as rxe. They promise a client that
// it can bind, see Config.Mapped.
const capWindows = 1<<17 | 1<<24

// New attaches a device to the fabric, with its port up.
func New(fabric *loop.Fabric, cfg Config) (*Device, error) {
	d := &Device{fabric: fabric, ops: Ops &^ cfg.Without, tap: cfg.Tap, contexts: make(map[*UContext]struct{}), parties: make(map[any]*party), nobody: newParty()}
	d.up.Store(true)
	a := DefaultAttr()
	a.NodeGUID, a.SysImageGUID = cfg.GUID, cfg.GUID
	a.NodeDesc = cfg.NodeDesc[:min(len(cfg.NodeDesc), 63)]
	a.BoardID, a.VendorID, a.VendorPartID = cfg.BoardID, cfg.VendorID, cfg.VendorPartID
	if cfg.Mapped {
		a.CapFlags |= capWindows | hca.CapFlushGlobal | hca.CapAtomicWrite
	}
	if cfg.Without.Has(hca.OpXRC) {
		a.CapFlags &^= capXRC
	}
	if cfg.Without.Has(hca.OpModifyCQ) {
		a.MaxCQCount, a.MaxCQPeriod = 0, 0
	}
	for _, l := range []struct {
		to   *uint32
		want uint32
		name string
	}{
		{&a.MaxQP, cfg.MaxQP, "MaxQP"}, {&a.MaxQPWR, cfg.MaxQPWR, "MaxQPWR"},
		{&a.MaxCQ, cfg.MaxCQ, "MaxCQ"}, {&a.MaxCQE, cfg.MaxCQE, "MaxCQE"},
		{&a.MaxMR, cfg.MaxMR, "MaxMR"}, {&a.MaxMW, cfg.MaxMW, "MaxMW"}, {&a.MaxPD, cfg.MaxPD, "MaxPD"},
		{&a.MaxAH, cfg.MaxAH, "MaxAH"}, {&a.MaxSRQ, cfg.MaxSRQ, "MaxSRQ"}, {&a.MaxSRQSGE, cfg.MaxSRQSGE, "MaxSRQSGE"},
	} {
		if l.want > *l.to {
			return nil, fmt.Errorf("new device: %s %d is over %d: %w", l.name, l.want, *l.to, einval)
		}
		if l.want != 0 {
			*l.to = l.want
		}
	}
	d.attr = a
	if (cfg.Address != ([4]byte{}) || cfg.Link != nil) && !d.ethernet() {
		return nil, fmt.Errorf("new device: an address or a link, on %v: %w", fabric.Link(), einval)
	}
	if cfg.Address != ([4]byte{}) && cfg.Link != nil {
		return nil, fmt.Errorf("new device: an address beside those of the link: %w", einval)
	}
	d.mrs.init(a.MaxMR, a.MaxMW)
	d.qps.init()
	d.srqs.init()
	p, err := fabric.Attach(d, d.initGIDs(&cfg)...)
	if err != nil {
		return nil, fmt.Errorf("new device: %w", err)
	}
	d.port = p
	d.events.start()
	d.pool.start(max(2*runtime.GOMAXPROCS(0), 4), max(runtime.GOMAXPROCS(0)-1, 1))
	if d.link = cfg.Link; d.link != nil {
		d.link.Watch(d.linkChanged)
		d.linkChanged(d.link.State())
		d.wire = newWirePort(d, d.link, cfg.LinkGone)
	}
	return d, nil
}

func gidOf(g hca.GUID) hca.GID {
	var gid hca.GID
	gid[0], gid[1] = subnetID>>8, subnetID&0xff
	copy(gid[8:], g[:])
	return gid
}

// Close takes the device off the fabric and ends its goroutines. Its clients
// have closed everything by then.
func (d *Device) Close() error {
	d.port.Detach()
	if d.wire != nil {
		d.wire.close()
	}
	d.pool.close()
	d.events.close()
	if d.tap != nil && d.link != roce.Link(d.tap) {
		return d.tap.Close()
	}
	return nil
}

// Ops are the optional methods that a device of this package has, but for those that
// its Config takes from it.
const Ops = hca.OpReqNotify | hca.OpResizeCQ | hca.OpSRQ | hca.OpModifySRQ | hca.OpMcast | hca.OpAH |
	hca.OpMW | hca.OpXRC | hca.OpReregMR | hca.OpModifyCQ

// Ops are the optional methods that work.
func (d *Device) Ops() hca.OpSet { return d.ops }

// Attr is constant.
func (d *Device) Attr() *hca.DeviceAttr { return &d.attr }

// Port reports the port's live state.
func (d *Device) Port(port uint8) (hca.PortAttr, error) {
	if port != physPort {
		return hca.PortAttr{}, fmt.Errorf("query port %d: %w", port, einval)
	}
	a := hca.PortAttr{
		PortCapFlags: portCapFlags, MaxMsgSize: maxMsg,
		GIDTableLen: gidTableLen, PKeyTableLen: 1,
		LID: d.port.LID(), SMLID: 1, State: stateActive,
		MaxMTU: mtu4096, ActiveMTU: mtu4096, MaxVLNum: vlCount,
		SubnetTimeout: subnetTimeout,
		ActiveWidth:   width4x, ActiveSpeed: speedEDR,
		PhysState: physLinkUp, LinkLayer: hca.LinkInfiniBand,
	}
	if d.ethernet() {
		ethernetPort(&a)
	}
	if d.link != nil {
		s := d.link.State()
		a.ActiveMTU, a.NetDev = mtuEnum(s.MTU), s.NetDev
		a.MaxMTU = a.ActiveMTU
	}
	if !d.up.Load() {
		a.State, a.PhysState = stateDown, physPolling
	}
	return a, nil
}

// GID 0 is made of the GUID; on Ethernet, GID 1 is the IPv4 address's if there is
// one. The others are empty.
func (d *Device) GID(port uint8, index int) (hca.GID, error) {
	if port != physPort || index < 0 || index >= gidTableLen {
		return hca.GID{}, fmt.Errorf("query GID %d of port %d: %w", index, port, einval)
	}
	return d.gid(index), nil
}

// PKey 0 is the default key with full membership.
func (d *Device) PKey(port uint8, index int) (uint16, error) {
	if port != physPort || index != 0 {
		return 0, fmt.Errorf("query pkey %d of port %d: %w", index, port, einval)
	}
	return defaultPKey, nil
}

// SetPort takes the port down or up: messages to and from it stop or go on, and
// every context is told.
func (d *Device) SetPort(up bool) {
	d.mu.Lock()
	if d.up.Load() == up {
		d.mu.Unlock()
		return
	}
	d.up.Store(up)
	d.mu.Unlock()
	ev := hca.EventPortErr
	if up {
		ev = hca.EventPortActive
	}
	d.tellPort(ev)
	if !up {
		return
	}
	for _, q := range d.qps.list() {
		q.wake()
		d.fabric.Announce(q.num)
	}
}

// tellPort raises an event of the port at every context.
func (d *Device) tellPort(ev hca.EventType) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.contexts {
		if c.notifier != nil {
			d.events.add(event{guard: &c.guard, port: c.notifier, num: physPort, ev: ev})
		}
	}
}

// mtuEnum is the number of enum ib_mtu for a size in bytes, at least the least.
func mtuEnum(bytes int) uint8 {
	n := uint8(1)
	for n < mtu4096 && 256<<n <= bytes {
		n++
	}
	return n
}

// counters count what went through a queue pair.
type counters struct {
	txBytes, txPkts, rxBytes, rxPkts, dropped uint64
}

func (c *counters) add(o *counters) {
	c.txBytes += o.txBytes
	c.txPkts += o.txPkts
	c.rxBytes += o.rxBytes
	c.rxPkts += o.rxPkts
	c.dropped += o.dropped
}

// packets is how many packets a message of n bytes takes at the port's MTU.
func packets(n uint64) uint64 { return max((n+smallSize-1)/smallSize, 1) }

// Counters sums over the queue pairs, so that the data path shares no counter.
func (d *Device) Counters(port uint8) (map[string]uint64, error) {
	if port != physPort {
		return nil, fmt.Errorf("counters of port %d: %w", port, einval)
	}
	d.mu.Lock()
	c := d.gone
	d.mu.Unlock()
	for _, q := range d.qps.list() {
		one := q.counters()
		c.add(&one)
	}
	m := map[string]uint64{
		"port_xmit_data": c.txBytes / 4, "port_rcv_data": c.rxBytes / 4,
		"port_xmit_packets": c.txPkts, "port_rcv_packets": c.rxPkts,
		"port_xmit_discards": c.dropped,
	}
	for _, name := range zeroCounters {
		m[name] = 0
	}
	if d.wire != nil {
		m["port_rcv_errors"] = d.wire.bad.Load()
	}
	return m, nil
}

// zeroCounters exist in the kernel's ports/P/counters; a loop has no link errors.
var zeroCounters = []string{
	"symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
	"port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors",
	"port_xmit_constraint_errors", "port_rcv_constraint_errors",
	"local_link_integrity_errors", "excessive_buffer_overrun_errors",
	"VL15_dropped", "port_xmit_wait",
}

// take counts one more object against a limit; ENOMEM, as the kernel's drivers.
func take(n *atomic.Int32, limit uint32, what string) error {
	if n.Add(1) > int32(min(limit, 1<<31-1)) {
		n.Add(-1)
		return fmt.Errorf("%s: %d exist already: %w", what, limit, enomem)
	}
	return nil
}
