package virtionet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/uverbsd/uverbsd/hca/nic"
)

// Identity (§4.1.2) and the parts of configuration space that are looked at (PCI
// Local Bus 3.0 §6.1, §6.7).
const (
	vendorVirtio = 0x1AF4
	deviceNet    = 0x1041
	deviceTrans  = 0x1000 // transitional: has the modern interface too

	cfgStatus     = 0x06
	cfgStatusCaps = 1 << 4
	cfgCaps       = 0x34
	cfgFirstCap   = 0x40 // capabilities come after the header
	cfgSize       = 0x100
	capVendor     = 0x09
	capMin        = 16 // struct virtio_pci_cap (§4.1.4)
	capNotify     = 20 // struct virtio_pci_notify_cap (§4.1.4.4)
	// maxCaps of the least size, 4 bytes, fit: a longer list goes in a circle.
	maxCaps = (cfgSize - cfgFirstCap) / 4
	numBARs = 6
)

// Values of cfg_type (§4.1.4).
const (
	kindCommon = 1 + iota
	kindNotify
	kindISR
	kindDevice
	numKinds
)

// kinds says what each structure needs: bytes, and alignment of its offset.
var kinds = [numKinds]struct {
	name  string
	size  int
	align int
}{
	kindCommon: {"common configuration", comSize, 4},
	kindNotify: {"notification", 2, 2},
	kindISR:    {"ISR status", 1, 1},
	kindDevice: {"network configuration", netMinSize, 4},
}

// struct virtio_pci_common_cfg (§4.1.4.3).
const (
	comDevFeatSel  = 0x00
	comDevFeat     = 0x04
	comDrvFeatSel  = 0x08
	comDrvFeat     = 0x0C
	comConfigVec   = 0x10
	comNumQueues   = 0x12
	comStatus      = 0x14
	comGeneration  = 0x15
	comQueueSel    = 0x16
	comQueueSize   = 0x18
	comQueueVec    = 0x1A
	comQueueEnable = 0x1C
	comQueueNotify = 0x1E
	comQueueDesc   = 0x20
	comQueueDriver = 0x28
	comQueueDevice = 0x30
	comSize        = 0x38
)

// Device status (§2.1).
const (
	statusAcknowledge = 1
	statusDriver      = 2
	statusDriverOK    = 4
	statusFeaturesOK  = 8
	statusNeedsReset  = 64
	statusFailed      = 128
	allOnes8          = 0xFF
	noVector          = 0xFFFF // VIRTIO_MSI_NO_VECTOR (§4.1.4.3)
)

const isrConfig = 2 // a bit of ISR status (§4.1.4.5)

// region is one structure in a BAR, checked to lie in it.
type region struct {
	bar  nic.BAR
	off  int
	size int
}

func (r region) load8(off int) uint8       { return r.bar.Load8(r.off + off) }
func (r region) load16(off int) uint16     { return r.bar.Load16(r.off + off) }
func (r region) load32(off int) uint32     { return r.bar.Load32(r.off + off) }
func (r region) store8(off int, v uint8)   { r.bar.Store8(r.off+off, v) }
func (r region) store16(off int, v uint16) { r.bar.Store16(r.off+off, v) }
func (r region) store32(off int, v uint32) { r.bar.Store32(r.off+off, v) }
func (r region) storeAddr(off int, v uint64) { // 64-bit fields are two of 32 (§4.1.3.1)
	r.store32(off, uint32(v))
	r.store32(off+4, uint32(v>>32))
}

// transport is the device as PCI shows it.
type transport struct {
	fn                  nic.Function
	common, notify, isr region
	device              region
	notifyMul           uint32
	bars                [numBARs]nic.BAR
}

// capability is one struct virtio_pci_cap.
type capability struct {
	kind, bar uint8
	off, size uint32
	mul       uint32 // notify_off_multiplier
}

// newTransport finds the structures. Of each kind it takes the first that it can
// use: others may lie in I/O space (§4.1.4).
func newTransport(fn nic.Function) (*transport, error) {
	caps, err := capabilities(fn)
	if err != nil {
		return nil, err
	}
	t := &transport{fn: fn}
	for kind := kindCommon; kind < numKinds; kind++ {
		err := fmt.Errorf("no capability for its %s: it has no modern interface; in QEMU set disable-modern=off", kinds[kind].name)
		for _, c := range caps {
			if int(c.kind) != kind {
				continue
			}
			if err = t.use(c); err == nil {
				break
			}
		}
		if err != nil {
			return nil, err
		}
	}
	return t, nil
}

// capabilities walks the list.
func capabilities(fn nic.Function) ([]capability, error) {
	var cfg [cfgSize]byte
	if err := fn.ReadConfig(0, cfg[:]); err != nil {
		return nil, fmt.Errorf("read configuration space: %w", err)
	}
	le := binary.LittleEndian
	switch v, d := le.Uint16(cfg[0:]), le.Uint16(cfg[2:]); {
	case v == 0xFFFF:
		return nil, fmt.Errorf("read configuration space: all ones: %w", nic.ErrGone)
	case v != vendorVirtio || d != deviceNet && d != deviceTrans:
		return nil, fmt.Errorf("it is %04x:%04x, no virtio network device (%04x:%04x)", v, d, vendorVirtio, deviceNet)
	}
	if le.Uint16(cfg[cfgStatus:])&cfgStatusCaps == 0 {
		return nil, errors.New("no capability list: it has no modern interface; in QEMU set disable-modern=off")
	}
	var caps []capability
	at := int(cfg[cfgCaps]) &^ 3
	for n := 0; at != 0; n++ {
		if at < cfgFirstCap || n == maxCaps {
			return nil, fmt.Errorf("capability list is broken at %#x", at)
		}
		c := cfg[at:]
		next, size := int(c[1])&^3, 0
		if c[0] == capVendor && len(c) >= capMin {
			size = min(int(c[2]), len(c))
		}
		if size >= capMin && c[4] < numBARs && c[3] >= kindCommon && c[3] < numKinds {
			v := capability{kind: c[3], bar: c[4], off: le.Uint32(c[8:]), size: le.Uint32(c[12:])}
			if v.kind == kindNotify && size >= capNotify {
				v.mul = le.Uint32(c[capMin:])
			}
			caps = append(caps, v)
		}
		at = next
	}
	return caps, nil
}

// use maps what c names, if it is sound.
func (t *transport) use(c capability) error {
	k := kinds[c.kind]
	if t.bars[c.bar] == nil {
		b, err := t.fn.Map(int(c.bar))
		if err != nil {
			return fmt.Errorf("map BAR %d for its %s: %w", c.bar, k.name, err)
		}
		t.bars[c.bar] = b
	}
	b := t.bars[c.bar]
	if end := uint64(c.off) + uint64(c.size); end > uint64(b.Len()) || int(c.size) < k.size || int(c.off)%k.align != 0 {
		return fmt.Errorf("its %s is said to be %d bytes at %#x of BAR %d, which has %#x", k.name, c.size, c.off, c.bar, b.Len())
	}
	r := region{bar: b, off: int(c.off), size: int(c.size)}
	switch c.kind {
	case kindCommon:
		t.common = r
	case kindNotify:
		t.notify, t.notifyMul = r, c.mul
	case kindISR:
		t.isr = r
	case kindDevice:
		t.device = r
	}
	return nil
}

// reset resets the device and waits for it (§4.1.4.3.2). A device that is gone
// already needs none.
func (t *transport) reset() error {
	t.common.store8(comStatus, 0)
	for end := time.Now().Add(resetWait); ; time.Sleep(resetWait / 1000) {
		switch s := t.common.load8(comStatus); {
		case s == 0:
			return nil
		case s == allOnes8:
			return fmt.Errorf("reset: registers read as ones: %w", nic.ErrGone)
		case time.Now().After(end):
			return fmt.Errorf("reset: status is still %#x after %v: reset its host or unplug it", s, resetWait)
		}
	}
}

func (t *transport) addStatus(bits uint8) {
	t.common.store8(comStatus, t.common.load8(comStatus)|bits)
}

func (t *transport) offered() uint64 {
	var f uint64
	for i := range uint32(2) {
		t.common.store32(comDevFeatSel, i)
		f |= uint64(t.common.load32(comDevFeat)) << (32 * i)
	}
	return f
}

// accept settles the features (§3.1.1 steps 4 to 6).
func (t *transport) accept(f uint64) error {
	for i := range uint32(2) {
		t.common.store32(comDrvFeatSel, i)
		t.common.store32(comDrvFeat, uint32(f>>(32*i)))
	}
	t.addStatus(statusFeaturesOK)
	if s := t.common.load8(comStatus); s&statusFeaturesOK == 0 || s == allOnes8 {
		return fmt.Errorf("features %#x are refused: status is %#x", f, s)
	}
	return nil
}

// queueSize is the entries of queue i: most, or what the device can.
func (t *transport) queueSize(i uint16, most int) (int, error) {
	if total := t.common.load16(comNumQueues); i >= total {
		return 0, fmt.Errorf("queue %d: it has %d", i, total)
	}
	t.common.store16(comQueueSel, i)
	n := int(t.common.load16(comQueueSize))
	if n < minEntries || n&(n-1) != 0 {
		return 0, fmt.Errorf("queue %d: it says to have %d entries", i, n)
	}
	return min(n, most), nil
}

// enable tells the device where queue i lies, and finds its doorbell (§4.1.5.1.3).
// vector is noVector for none. strict: it must be taken.
func (t *transport) enable(i uint16, q *virtq, vector uint16, strict bool) error {
	c := t.common
	c.store16(comQueueSel, i)
	c.store16(comQueueSize, uint16(q.n))
	c.store16(comQueueVec, vector)
	if got := c.load16(comQueueVec); got != vector && strict {
		return fmt.Errorf("queue %d: interrupt vector %d is refused", i, vector)
	}
	c.storeAddr(comQueueDesc, q.dma.IOVA)
	c.storeAddr(comQueueDriver, q.dma.IOVA+uint64(q.avail))
	c.storeAddr(comQueueDevice, q.dma.IOVA+uint64(q.used))
	off := uint64(c.load16(comQueueNotify)) * uint64(t.notifyMul)
	if off+2 > uint64(t.notify.size) || off%2 != 0 {
		return fmt.Errorf("queue %d: its doorbell is said to be at %#x of %#x bytes", i, off, t.notify.size)
	}
	q.index, q.bar, q.doorbell = i, t.notify.bar, t.notify.off+int(off)
	c.store16(comQueueEnable, 1)
	return nil
}

// configVector has changes of the configuration interrupt with that vector.
func (t *transport) configVector(vector uint16, strict bool) error {
	t.common.store16(comConfigVec, vector)
	if got := t.common.load16(comConfigVec); got != vector && strict {
		return fmt.Errorf("configuration: interrupt vector %d is refused", vector)
	}
	return nil
}

// consistent reads fields of the configuration that belong together (§2.5.1). It
// gives up after some tries: what changes all the time is as good as any.
func (t *transport) consistent(read func()) {
	for range 8 {
		before := t.common.load8(comGeneration)
		read()
		if t.common.load8(comGeneration) == before {
			return
		}
	}
}
