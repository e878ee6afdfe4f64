package e1000e_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/uverbsd/uverbsd/hca/e1000e"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// The model's register offsets, from the datasheet on their own, so that a slip of the driver's
// shows.
const (
	xCTRL, xSTATUS, xEECD, xEERD, xCTRLEXT, xMDIC        = 0x0, 0x8, 0x10, 0x14, 0x18, 0x20
	xICR, xICS, xIMS, xIMC, xEIAC, xIAM, xIVAR           = 0xC0, 0xC8, 0xD0, 0xD8, 0xDC, 0xE0, 0xE4
	xRCTL, xTCTL, xEXTCNF                                = 0x100, 0x400, 0xF00
	xRDBAL, xRDBAH, xRDLEN, xRDH, xRDT                   = 0x2800, 0x2804, 0x2808, 0x2810, 0x2818
	xTDBAL, xTDBAH, xTDLEN, xTDH, xTDT                   = 0x3800, 0x3804, 0x3808, 0x3810, 0x3818
	xMTA, xRAL, xRAH                                     = 0x5200, 0x5400, 0x5404
	xCRCERRS, xMPC, xRNBC                                = 0x4000, 0x4010, 0x40A0
	xStats, xStatsEnd                                    = 0x4000, 0x4130
	iLSC, iRXT0, iRXQ0, iOTHER                    uint32 = 1 << 2, 1 << 7, 1 << 20, 1 << 24
)

// mode is how the function interrupts.
type mode int

const (
	msix mode = iota
	msi
	intx
)

// fake is an 82574 behind a Function. All of it is under mu, as a device's registers are
// one at a time.
type fake struct {
	mode    mode
	mac     nic.MAC
	noRAL   bool // the address is in the EEPROM alone
	eeprom  [3]uint16
	keep    bool // a reset keeps the registers, as QEMU's
	removed chan struct{}

	// how it misbehaves; set before Open or under mu
	resetStuck, masterStuck, noAutoRead, eerdStuck, phyStuck, noOwner bool
	goneAfter                                                         int // register accesses; 0: never
	failAlloc, failInterrupts, failMap, failBusMaster, failUnmask     error
	device                                                            uint16
	barLen, vectors                                                   int

	mu       sync.Mutex
	regs     [128 << 10 / 4]uint32
	bmcr     uint16
	dma      []dma
	next     uint64
	events   []int
	masked   bool   // INTx, by the kernel until unmasked
	level    bool   // INTx, MSI
	told     uint32 // MSI-X: causes whose message was sent
	master   bool
	gone     bool
	accesses int
	closed   int
	faults   []string
	wire     [][]byte // sent
	hold     bool     // transmits wait for flush
	mute     bool     // transmits are not reported
	sink     bool     // transmits are counted, not kept
	sent     int
	rdt      int // writes of it
	tdt      int
	deaf     bool // interrupts get lost
}

type dma struct {
	mem  []byte
	iova uint64
}

func newFake(m mode) *fake {
	return &fake{
		mode: m, mac: nic.MAC{0x52, 0x54, 0, 0x12, 0x34, 0x56}, next: 1<<32 - 64<<10, removed: make(chan struct{}),
		device: 0x10d3, barLen: 128 << 10, vectors: map[mode]int{msix: 5, msi: 1, intx: 1}[m],
		bmcr: 0x1140,
	}
}

func (d *fake) fault(format string, a ...any) {
	d.faults = append(d.faults, fmt.Sprintf(format, a...))
}

// ---- Function

func (d *fake) Name() string { return "0000:00:02.0" }

func (d *fake) ReadConfig(off int64, p []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone {
		return nic.ErrGone
	}
	var cfg [256]byte
	binary.LittleEndian.PutUint16(cfg[0:], 0x8086)
	binary.LittleEndian.PutUint16(cfg[2:], d.device)
	copy(p, cfg[off:])
	return nil
}

func (d *fake) WriteConfig(int64, []byte) error { return errors.New("not for this driver") }

func (d *fake) BusMaster(on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failBusMaster != nil {
		return d.failBusMaster
	}
	d.master = on
	return nil
}

func (d *fake) Map(bar int) (nic.BAR, error) {
	if d.failMap != nil || bar != 0 {
		return nil, d.failMap
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.resetLocked(true)
	d.regs[xSTATUS/4] = 0x80083 // up, full duplex, 1000 Mbit/s, master enabled
	return d, nil
}

func (d *fake) Alloc(size int) (nic.DMA, error) {
	if d.failAlloc != nil {
		return nic.DMA{}, d.failAlloc
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	mem := pages(size)
	a := dma{mem, d.next}
	d.next += uint64(len(mem)) + 64<<10
	d.dma = append(d.dma, a)
	return nic.DMA{Mem: mem, IOVA: a.iova}, nil
}

func (d *fake) Vectors() int { return d.vectors }

func (d *fake) Interrupts(n int) ([]int, error) {
	if d.failInterrupts != nil {
		return nil, d.failInterrupts
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for range n {
		d.events = append(d.events, eventfd())
	}
	return slices.Clone(d.events), nil
}

func (d *fake) UnmaskINTx() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failUnmask != nil {
		return d.failUnmask
	}
	if d.mode == intx {
		d.masked = false
		d.interruptLocked()
	}
	return nil
}

func (d *fake) Reset() error { return nil }

func (d *fake) Removed() <-chan struct{} { return d.removed }

func (d *fake) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed++
	for _, fd := range d.events {
		closeFD(fd)
	}
	d.events = nil
	return nil
}

// ---- BAR

func (d *fake) Len() int                  { return d.barLen }
func (d *fake) Load8(int) uint8           { panic("32 bits only") }
func (d *fake) Load16(int) uint16         { panic("32 bits only") }
func (d *fake) Load64(int) uint64         { panic("32 bits only") }
func (d *fake) Store8(int, uint8)         { panic("32 bits only") }
func (d *fake) Store16(int, uint16)       { panic("32 bits only") }
func (d *fake) Store64(int, uint64)       { panic("32 bits only") }
func (d *fake) reg(off int) *uint32       { return &d.regs[off/4] }
func (d *fake) is(off int, b uint32) bool { return d.regs[off/4]&b != 0 }

func (d *fake) accessLocked() bool {
	if d.closed > 0 {
		d.fault("register used after Close")
	}
	d.accesses++
	if d.goneAfter > 0 && d.accesses > d.goneAfter {
		d.gone = true
	}
	return !d.gone
}

func (d *fake) Load32(off int) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.accessLocked() {
		return ^uint32(0)
	}
	v := *d.reg(off)
	switch {
	case off == xICR:
		// Cleared by a read if nothing is unmasked or an interrupt was asserted, not in MSI-X.
		if d.regs[xIMS/4] == 0 || d.mode != msix && v&d.regs[xIMS/4] != 0 {
			*d.reg(xICR) = 0
			d.interruptLocked()
		}
	case off >= xStats && off < xStatsEnd:
		*d.reg(off) = 0
	}
	return v
}

func (d *fake) Store32(off int, v uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.accessLocked() {
		return
	}
	switch off {
	case xCTRL:
		d.ctrlLocked(v)
	case xSTATUS, xEECD, xICS:
		d.fault("register %#x written", off)
	case xEERD:
		if w := v >> 2 & 0x3FFF; v&1 != 0 && !d.eerdStuck && w < 3 {
			v |= 2 | uint32(d.eeprom[w])<<16
		}
		*d.reg(off) = v
	case xEXTCNF:
		if d.noOwner {
			v &^= 1 << 5
		}
		*d.reg(off) = v
	case xMDIC:
		d.mdicLocked(v)
	case xICR:
		if v&iOTHER != 0 {
			v |= iLSC
		}
		*d.reg(xICR) &^= v
		d.interruptLocked()
	case xIMS:
		*d.reg(xIMS) |= v
		d.interruptLocked()
	case xIMC:
		*d.reg(xIMS) &^= v
		d.interruptLocked()
	case xRDT:
		if v >= *d.reg(xRDLEN)/16 {
			d.fault("RDT %d of %d", v, *d.reg(xRDLEN)/16)
		}
		*d.reg(off) = v
		d.rdt++
	case xTDT:
		if v >= *d.reg(xTDLEN)/16 && v != 0 {
			d.fault("TDT %d of %d", v, *d.reg(xTDLEN)/16)
		}
		*d.reg(off) = v
		d.tdt++
		if !d.hold {
			d.transmitLocked()
		}
	case xRDLEN, xTDLEN:
		if v%128 != 0 {
			d.fault("ring of %d bytes", v)
		}
		*d.reg(off) = v
	default:
		*d.reg(off) = v
	}
}

func (d *fake) resetLocked(cold bool) {
	if cold || !d.keep {
		clear(d.regs[xICR/4:])
	}
	*d.reg(xEECD) = 1 << 9
	if d.noAutoRead {
		*d.reg(xEECD) = 0
	}
	*d.reg(xRAL), *d.reg(xRAH) = 0, 0
	if !d.noRAL {
		*d.reg(xRAL) = binary.LittleEndian.Uint32(d.mac[:])
		*d.reg(xRAH) = uint32(binary.LittleEndian.Uint16(d.mac[4:])) | 1<<31
	}
}

func (d *fake) ctrlLocked(v uint32) {
	if v&(1<<2) != 0 && !d.masterStuck {
		*d.reg(xSTATUS) &^= 1 << 19
	} else {
		*d.reg(xSTATUS) |= 1 << 19
	}
	if v&(1<<26) != 0 {
		d.resetLocked(false)
		if !d.resetStuck {
			v &^= 1 << 26
		}
	}
	*d.reg(xCTRL) = v
}

func (d *fake) mdicLocked(v uint32) {
	if !d.is(xEXTCNF, 1<<5) {
		d.fault("PHY used without owning it")
	}
	if !d.phyStuck {
		switch {
		case v>>21&31 != 1 || v>>16&31 != 0:
			v |= 1 << 30
		case v&(2<<26) != 0:
			v = v&^0xFFFF | uint32(d.bmcr)
		default:
			d.bmcr = uint16(v) &^ (1 << 9)
		}
		v |= 1 << 28
	}
	*d.reg(xMDIC) = v
}

// interruptLocked sends what is pending and unmasked.
func (d *fake) interruptLocked() {
	if d.mode == msix && d.is(xICR, iLSC) {
		*d.reg(xICR) |= iOTHER
	}
	pending := *d.reg(xICR) & *d.reg(xIMS)
	if len(d.events) == 0 {
		return
	}
	switch d.mode {
	case intx:
		d.level = pending != 0
		if d.level && !d.masked {
			d.masked = true
			d.signalLocked(0)
		}
	case msi:
		// Sent when it becomes pending.
		if pending != 0 && !d.level {
			d.signalLocked(0)
		}
		d.level = pending != 0
	case msix:
		// A message goes when a cause becomes pending.
		ivar := *d.reg(xIVAR)
		d.told &= pending
		fresh := pending &^ d.told
		d.told |= fresh
		if fresh&iRXQ0 != 0 && ivar&8 != 0 {
			d.sendLocked(int(ivar&7), iRXQ0)
		}
		if fresh&iOTHER != 0 && ivar&(1<<19) != 0 {
			d.sendLocked(int(ivar>>16&7), iOTHER)
		}
	}
}

func (d *fake) signalLocked(i int) {
	if !d.deaf {
		signal(d.events[i])
	}
}

func (d *fake) sendLocked(vector int, cause uint32) {
	if vector >= len(d.events) {
		d.fault("message on vector %d", vector)
		return
	}
	d.signalLocked(vector)
	*d.reg(xICR) &^= cause & *d.reg(xEIAC)
	d.told &^= cause & *d.reg(xEIAC)
	if d.is(xCTRLEXT, 1<<24) {
		*d.reg(xIMS) &^= cause & *d.reg(xIAM)
	}
}

// at is the memory behind an address of the function's.
func (d *fake) at(iova uint64, n int) []byte {
	for _, a := range d.dma {
		if iova >= a.iova && iova+uint64(n) <= a.iova+uint64(len(a.mem)) {
			return a.mem[iova-a.iova:][:n]
		}
	}
	d.fault("DMA to %#x, %d bytes", iova, n)
	return nil
}

func (d *fake) ring(base int) []byte {
	n := int(*d.reg(base + 8))
	return d.at(uint64(*d.reg(base))|uint64(*d.reg(base + 4))<<32, n)
}

func (d *fake) transmitLocked() {
	n := *d.reg(xTDLEN) / 16
	if n == 0 || !d.is(xTCTL, 2) || !d.master || d.is(xCTRL, 1<<2) {
		return
	}
	ring := d.ring(xTDBAL)
	for h := d.reg(xTDH); *h != *d.reg(xTDT) && ring != nil; *h = (*h + 1) % n {
		w := e1000e.LoadWord(ring, int(*h), 1)
		if w&(1<<24) == 0 || w&(1<<25) == 0 || w&(1<<29) != 0 {
			d.fault("transmit descriptor %#x", w)
		}
		f := d.at(e1000e.LoadWord(ring, int(*h), 0), int(w&0xFFFF))
		d.sent++
		if !d.sink {
			d.wire = append(d.wire, bytes.Clone(f))
		}
		if w&(1<<27) != 0 && !d.mute {
			e1000e.StoreWord(ring, int(*h), 1, w|1<<32)
		}
	}
}

// ---- the test's side

// flush does the transmits that were held back.
func (d *fake) flush() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.transmitLocked()
}

func (d *fake) with(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// link is plugged in or out, at a speed of STATUS's bits 7:6.
func (d *fake) link(up bool, speed uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.reg(xSTATUS)
	*s &^= 2 | 3<<6
	*s |= speed << 6
	if up {
		*s |= 2
	}
	*d.reg(xICR) |= iLSC
	d.interruptLocked()
}

func (d *fake) buffer() int {
	rctl := *d.reg(xRCTL)
	size := 2048 >> (rctl >> 16 & 3)
	if rctl&(1<<25) != 0 {
		size *= 16
	}
	return size
}

func (d *fake) wantsLocked(f []byte) bool {
	rctl := *d.reg(xRCTL)
	if len(f) > 1518 && rctl&(1<<5) == 0 {
		return false
	}
	switch {
	case bytes.Equal(f[:6], []byte{255, 255, 255, 255, 255, 255}):
		return rctl&(1<<15) != 0
	case f[0]&1 != 0:
		h := (uint32(f[5])<<8 | uint32(f[4])) >> (4 - rctl>>12&3) & 0xFFF
		return d.is(xMTA+int(h>>5)*4, 1<<(h&31))
	}
	for i := range 16 {
		var a [8]byte
		binary.LittleEndian.PutUint32(a[:], *d.reg(xRAL + 8*i))
		binary.LittleEndian.PutUint32(a[4:], *d.reg(xRAH + 8*i))
		if a[7]&0x80 != 0 && bytes.Equal(a[:6], f[:6]) {
			return true
		}
	}
	return false
}

// inject receives a frame, over as many descriptors as it needs. It says whether there
// was room.
func (d *fake) inject(f []byte) bool {
	return d.injectWith(f, func(w uint64) uint64 { return w })
}

// injectWith has edit change what is written into each descriptor's second word.
func (d *fake) injectWith(f []byte, edit func(uint64) uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone || !d.is(xRCTL, 2) || !d.is(xSTATUS, 2) || !d.master || !d.wantsLocked(f) {
		return false
	}
	if !d.is(xRCTL, 1<<26) {
		d.fault("frames come with FCS")
	}
	n := *d.reg(xRDLEN) / 16
	ring := d.ring(xRDBAL)
	size := d.buffer()
	h := d.reg(xRDH)
	if need, have := (len(f)+size-1)/size, int(*d.reg(xRDT)+n-*h)%int(n); need > have {
		*d.reg(xMPC)++
		*d.reg(xRNBC)++
		return false
	}
	for len(f) > 0 {
		k := min(len(f), size)
		b := d.at(e1000e.LoadWord(ring, int(*h), 0), size)
		if b == nil {
			return false
		}
		copy(b, f[:k])
		f = f[k:]
		w := uint64(k) | 1<<32
		if len(f) == 0 {
			w |= 1 << 33
		}
		if old := e1000e.LoadWord(ring, int(*h), 1); old != 0 {
			d.fault("receive descriptor posted with %#x", old)
		}
		e1000e.StoreWord(ring, int(*h), 1, edit(w))
		*h = (*h + 1) % n
	}
	if d.mode == msix {
		*d.reg(xICR) |= iRXQ0
	} else {
		*d.reg(xICR) |= iRXT0
	}
	d.interruptLocked()
	return true
}
