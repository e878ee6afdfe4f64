package virtionet_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/virtionet"
)

// Features, as in the specification.
const (
	fMTU        = 1 << 3
	fMAC        = 1 << 5
	fMrgRxbuf   = 1 << 15
	fStatus     = 1 << 16
	fCtrlVQ     = 1 << 17
	fCtrlRx     = 1 << 18
	fMQ         = 1 << 22
	fMACAddr    = 1 << 23
	fIndirect   = 1 << 28
	fEventIdx   = 1 << 29
	fVersion1   = 1 << 32
	fPlatform   = 1 << 33
	fPacked     = 1 << 34
	fSpeed      = 1 << 63
	fOrdinary   = fMTU | fMAC | fStatus | fCtrlVQ | fCtrlRx | fEventIdx | fVersion1
	fCsumAndTSO = 1<<0 | 1<<1 | 1<<7 | 1<<11
)

// Where the structures are in the fake's BAR.
const (
	fakeBAR   = 4
	comAt     = 0x0000
	isrAt     = 0x1000
	devAt     = 0x2000
	notifyAt  = 0x3000
	barLen    = 0x4000
	notifyMul = 4
	firstIOVA = 0x1_0000_0000
)

// vq is the device's side of a virtqueue.
type vq struct {
	size, max            uint16
	vector               uint16
	enabled              bool
	notifyOff            uint16
	desc, driver, device uint64
	taken                uint16 // avail entries taken
	used                 uint16 // used idx
	told                 uint16 // used idx at the last interrupt
}

// device is a virtio network device with its PCI function.
type device struct {
	testing.TB

	// What it is; set before Open.
	cfg      [256]byte
	offered  uint64
	mac      nic.MAC
	mtu      uint16
	speed    uint32
	vectors  int
	messages bool // else one vector is INTx
	len      int  // of the BAR

	// How it misbehaves.
	stuckReset   bool
	refuseFeats  bool
	refuseVec    bool
	noAnswer     bool            // to control commands
	refuse       map[uint16]bool // control commands, class<<8|command
	failMap      error
	failAlloc    int // the n-th fails, from 1
	failIRQ      error
	failMaster   error
	failUnmask   error
	badCtrlUse   bool
	diesAtDriver bool // reads as ones from DRIVER_OK

	mu       sync.Mutex
	drvFeats uint64
	dfSel    uint32
	gfSel    uint32
	cfgVec   uint16
	status   uint8
	gen      uint8
	qsel     uint16
	q        [3]vq
	link     uint16
	isr      uint8
	masked   bool
	asserted bool
	ones     bool // gone
	mem      []nic.DMA
	next     uint64
	allocs   int
	fds      []int
	master   bool
	removed  chan struct{}
	closed   int

	hold     bool     // does not take what is sent
	loop     bool     // sends back what is sent
	sent     [][]byte // unless quiet
	quiet    bool
	discard  bool // sends without looking
	lenient  bool // unlikely structures are no mistake of the driver's
	chain    [2]chunk
	parts    [64]part
	nsent    int
	lost     int // found no buffer
	kicks    [3]int
	irqs     int // of receiving
	cmds     []string
	promisc  bool
	allMulti bool
	uni      []nic.MAC
	multi    []nic.MAC
}

func newDevice(t testing.TB) *device {
	d := &device{TB: t, offered: fOrdinary, mac: nic.MAC{0x52, 0x54, 0, 1, 2, 3}, mtu: 1500,
		vectors: 3, messages: true, link: 1, next: firstIOVA, len: barLen, removed: make(chan struct{}), refuse: map[uint16]bool{}}
	for i := range d.q {
		d.q[i].max, d.q[i].notifyOff = 256, uint16(i)
	}
	d.q[2].max = 64
	le := binary.LittleEndian
	le.PutUint16(d.cfg[0:], 0x1AF4)
	le.PutUint16(d.cfg[2:], 0x1041)
	d.cfg[6] = 1 << 4
	d.cfg[0x34] = 0x40
	d.cfg[0x40] = 0x11 // MSI-X, 12 bytes
	d.cfg[0x41] = 0x4C
	at := 0x4C
	for _, c := range []struct {
		kind      byte
		off, size uint32
	}{{5, 0, 0}, {1, comAt, 0x38}, {3, isrAt, 1}, {4, devAt, 0x1000}, {2, notifyAt, 0x1000}} {
		d.putCap(at, at+20, c.kind, fakeBAR, c.off, c.size)
		at += 20
	}
	le.PutUint32(d.cfg[at-4:], notifyMul)
	d.cfg[at-20+1] = 0
	return d
}

// putCap writes a capability of 20 bytes.
func (d *device) putCap(at, next int, kind, bar byte, off, size uint32) {
	c := d.cfg[at : at+20]
	c[0], c[1], c[2], c[3], c[4] = 9, byte(next), 20, kind, bar
	binary.LittleEndian.PutUint32(c[8:], off)
	binary.LittleEndian.PutUint32(c[12:], size)
}

// capAt is where the capability of a kind is.
func (d *device) capAt(kind byte) []byte {
	for at := int(d.cfg[0x34]); at != 0; at = int(d.cfg[at+1]) {
		if d.cfg[at] == 9 && d.cfg[at+3] == kind {
			return d.cfg[at:]
		}
	}
	panic("no such capability")
}

// nic.Function.

func (d *device) Name() string { return "0000:00:02.0" }

func (d *device) ReadConfig(off int64, p []byte) error {
	copy(p, d.cfg[off:])
	return nil
}

func (d *device) WriteConfig(int64, []byte) error { return errors.New("nobody writes here") }

func (d *device) BusMaster(on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.master = on
	if on {
		return d.failMaster
	}
	return nil
}

func (d *device) Map(bar int) (nic.BAR, error) {
	if d.failMap != nil || bar != fakeBAR {
		return nil, fmt.Errorf("BAR %d is I/O", bar)
	}
	return regs{d}, nil
}

func (d *device) Alloc(size int) (nic.DMA, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.allocs++; d.allocs == d.failAlloc {
		return nic.DMA{}, unix.ENOMEM
	}
	size = (size + 4095) &^ 4095
	m := nic.DMA{Mem: make([]byte, size), IOVA: d.next}
	d.next += uint64(size) + 4096
	d.mem = append(d.mem, m)
	return m, nil
}

func (d *device) Vectors() int { return d.vectors }

func (d *device) Interrupts(n int) ([]int, error) {
	if d.failIRQ != nil {
		return nil, d.failIRQ
	}
	for range n {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return nil, err
		}
		d.fds = append(d.fds, fd)
	}
	return d.fds, nil
}

func (d *device) UnmaskINTx() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.masked = false
	d.levelLocked()
	return d.failUnmask
}

func (d *device) Reset() error { return unix.EOPNOTSUPP }

func (d *device) Removed() <-chan struct{} { return d.removed }

func (d *device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed++
	for _, fd := range d.fds {
		_ = unix.Close(fd)
	}
	d.fds = nil
	// Who reads or writes a frame's memory from here on shows as a race.
	for _, m := range d.mem {
		clear(m.Mem)
	}
	d.mem = nil
	return nil
}

func (d *device) times() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// with does something to the device.
func (d *device) with(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// regs is the BAR.
type regs struct{ d *device }

func (r regs) Len() int                  { return r.d.len }
func (r regs) Load8(off int) uint8       { return uint8(r.load(off, 1)) }
func (r regs) Load16(off int) uint16     { return uint16(r.load(off, 2)) }
func (r regs) Load32(off int) uint32     { return uint32(r.load(off, 4)) }
func (r regs) Load64(off int) uint64     { panic("no 64-bit access (4.1.3.1)") }
func (r regs) Store64(int, uint64)       { panic("no 64-bit access (4.1.3.1)") }
func (r regs) Store8(off int, v uint8)   { r.store(off, 1, uint64(v)) }
func (r regs) Store16(off int, v uint16) { r.store(off, 2, uint64(v)) }
func (r regs) Store32(off int, v uint32) { r.store(off, 4, uint64(v)) }

func (r regs) check(off, width int) {
	if off%width != 0 || off < 0 || off+width > r.d.len {
		panic(fmt.Sprintf("access of %d bytes at %#x", width, off))
	}
	if r.d.closed > 0 {
		panic("access after Close")
	}
}

func (r regs) load(off, width int) uint64 {
	d := r.d
	d.mu.Lock()
	defer d.mu.Unlock()
	r.check(off, width)
	if d.ones || d.lenient && d.stray(off, width) {
		return ^uint64(0)
	}
	q := &vq{}
	if int(d.qsel) < len(d.q) {
		q = &d.q[d.qsel]
	}
	switch {
	case off == comAt+0x04:
		return d.offered >> (32 * d.dfSel) & 0xFFFFFFFF
	case off == comAt+0x10:
		return uint64(d.cfgVec)
	case off == comAt+0x12:
		return uint64(len(d.q))
	case off == comAt+0x14:
		return uint64(d.status)
	case off == comAt+0x15:
		return uint64(d.gen)
	case off == comAt+0x18:
		if !q.enabled && q.size == 0 {
			return uint64(q.max)
		}
		return uint64(q.size)
	case off == comAt+0x1A:
		return uint64(q.vector)
	case off == comAt+0x1E:
		return uint64(q.notifyOff)
	case off == isrAt:
		v := d.isr
		d.isr, d.asserted = 0, false
		return uint64(v)
	case off >= devAt && off+width <= devAt+16:
		var c [16]byte
		copy(c[:], d.mac[:])
		binary.LittleEndian.PutUint16(c[6:], d.link)
		binary.LittleEndian.PutUint16(c[10:], d.mtu)
		binary.LittleEndian.PutUint32(c[12:], d.speed)
		var v [8]byte
		copy(v[:width], c[off-devAt:])
		return binary.LittleEndian.Uint64(v[:])
	}
	panic(fmt.Sprintf("load of %d bytes at %#x", width, off))
}

// stray says that nothing is there.
func (d *device) stray(off, width int) bool {
	return off >= comAt+0x38 && off != isrAt && (off < devAt || off+width > devAt+16) ||
		width != regWidth(off)
}

// regWidth is the width of the register there, as wide as any where that is free.
func regWidth(off int) int {
	switch {
	case off < 0x10, off >= 0x20 && off < 0x38:
		return 4
	case off == 0x14, off == 0x15, off == isrAt:
		return 1
	case off < 0x20:
		return 2
	case off < devAt+6:
		return 1
	case off < devAt+12:
		return 2
	}
	return 4
}

func half(v *uint64, high bool, with uint64) {
	if high {
		*v = *v&0xFFFFFFFF | with<<32
	} else {
		*v = *v&^0xFFFFFFFF | with
	}
}

func (r regs) store(off, width int, v uint64) {
	d := r.d
	d.mu.Lock()
	defer d.mu.Unlock()
	r.check(off, width)
	if d.ones || d.lenient && (d.stray(off, width) || off >= isrAt) {
		return
	}
	q := &d.q[min(int(d.qsel), len(d.q)-1)]
	switch off {
	case comAt + 0x00:
		d.dfSel = uint32(v)
	case comAt + 0x08:
		d.gfSel = uint32(v)
	case comAt + 0x0C:
		half(&d.drvFeats, d.gfSel == 1, v)
	case comAt + 0x10:
		d.cfgVec = d.vectorLocked(v)
	case comAt + 0x14:
		d.statusLocked(uint8(v))
	case comAt + 0x16:
		d.qsel = uint16(v)
	case comAt + 0x18:
		q.size = uint16(v)
	case comAt + 0x1A:
		q.vector = d.vectorLocked(v)
	case comAt + 0x1C:
		q.enabled = v == 1
	case comAt + 0x20, comAt + 0x24:
		half(&q.desc, off == comAt+0x24, v)
	case comAt + 0x28, comAt + 0x2C:
		half(&q.driver, off == comAt+0x2C, v)
	case comAt + 0x30, comAt + 0x34:
		half(&q.device, off == comAt+0x34, v)
	default:
		if off < notifyAt {
			panic(fmt.Sprintf("store of %d bytes at %#x", width, off))
		}
		if n := (off - notifyAt) / notifyMul; n != int(v) || d.status&4 == 0 {
			d.Errorf("notification %d at the doorbell of queue %d, status %#x", v, n, d.status)
		}
		d.kicks[v]++
		d.kickedLocked(int(v))
	}
}

func (d *device) vectorLocked(v uint64) uint16 {
	if d.refuseVec || !d.messages {
		return 0xFFFF
	}
	return uint16(v)
}

func (d *device) statusLocked(v uint8) {
	if v == 0 {
		if !d.stuckReset {
			d.status, d.isr, d.qsel = 0, 0, 0
			for i := range d.q {
				d.q[i] = vq{max: d.q[i].max, notifyOff: d.q[i].notifyOff}
			}
		}
		return
	}
	if d.refuseFeats {
		v &^= 8
	}
	if v&4 != 0 && !d.master {
		d.Errorf("DRIVER_OK before bus mastering is on")
	}
	d.status = v
	d.ones = d.ones || d.diesAtDriver && v&4 != 0
	d.promisc = true
}

// dma is size bytes at an address that the driver gave.
func (d *device) dma(iova uint64, size int) []byte {
	for _, m := range d.mem {
		if iova >= m.IOVA && iova+uint64(size) <= m.IOVA+uint64(len(m.Mem)) {
			return m.Mem[iova-m.IOVA:][:size]
		}
	}
	panic(fmt.Sprintf("DMA of %d bytes at %#x", size, iova))
}

func (d *device) eventIdx() bool { return d.drvFeats&fEventIdx != 0 }

// part is what of a buffer a frame took.
type part struct{ head, n int }

// chunk is what a descriptor points to.
type chunk struct {
	mem   []byte
	write bool
}

// takeLocked takes the next available chain. When there is none it asks to be told.
func (d *device) takeLocked(n int) (head int, chain []chunk) {
	q := &d.q[n]
	avail := d.dma(q.driver, 4+2*int(q.size)+4)
	for again := false; uint16(virtionet.Load32(avail, 0)>>16) == q.taken; again = true {
		if again {
			return -1, nil
		}
		if d.eventIdx() {
			used := d.dma(q.device, 4+8*int(q.size)+4)
			virtionet.Store32(used, 4+8*int(q.size), uint32(q.taken))
		}
	}
	head = int(binary.LittleEndian.Uint16(avail[4+2*int(q.taken%q.size):]))
	q.taken++
	table := d.dma(q.desc, 16*int(q.size))
	chain = d.chain[:0]
	for i := head; ; {
		e := table[16*i:]
		flags := binary.LittleEndian.Uint16(e[12:])
		chain = append(chain, chunk{d.dma(binary.LittleEndian.Uint64(e), int(binary.LittleEndian.Uint32(e[8:]))), flags&2 != 0})
		if flags&1 == 0 {
			return head, chain
		}
		i = int(binary.LittleEndian.Uint16(e[14:]))
	}
}

// useLocked writes a used element; moveLocked shows it.
func (d *device) useLocked(n int, id, size uint32) {
	q := &d.q[n]
	used := d.dma(q.device, 4+8*int(q.size)+4)
	at := 4 + 8*int(q.used%q.size)
	virtionet.Store32(used, at, id)
	virtionet.Store32(used, at+4, size)
	q.used++
}

func (d *device) moveLocked(n int) {
	q := &d.q[n]
	virtionet.Store32(d.dma(q.device, 4), 0, uint32(q.used)<<16)
	avail := d.dma(q.driver, 4+2*int(q.size)+4)
	want := virtionet.Load32(avail, 0)&1 == 0
	if d.eventIdx() {
		event := uint16(virtionet.Load32(avail, 4+2*int(q.size)))
		want = q.used-event-1 < q.used-q.told
	}
	q.told = q.used
	if want {
		if n == 0 {
			d.irqs++
		}
		d.raiseLocked(q.vector, 1)
	}
}

// raiseLocked interrupts.
func (d *device) raiseLocked(vector uint16, isr uint8) {
	if d.messages {
		d.isr |= isr & 2
		if vector != 0xFFFF {
			d.signal(int(vector))
		}
		return
	}
	d.isr |= isr
	d.asserted = true
	d.levelLocked()
}

func (d *device) levelLocked() {
	if d.asserted && !d.masked && len(d.fds) > 0 {
		d.masked = true
		d.signal(0)
	}
}

func (d *device) signal(vector int) {
	one := [8]byte{1}
	if vector < len(d.fds) {
		_, _ = unix.Write(d.fds[vector], one[:])
	}
}

func (d *device) kickedLocked(n int) {
	switch n {
	case 1:
		d.sendLocked()
	case 2:
		for d.commandLocked() {
		}
	}
}

var zeros [12]byte

// sendLocked takes what is to be sent.
func (d *device) sendLocked() {
	took := false
	for !d.hold {
		head, c := d.takeLocked(1)
		if head < 0 {
			break
		}
		took = true
		if d.discard {
			d.useLocked(1, uint32(head), 0)
			continue
		}
		if len(c) != 1 || c[0].write || !bytes.Equal(c[0].mem[:12], zeros[:]) {
			d.Errorf("sent %d descriptors, header %x", len(c), c[0].mem[:12])
		}
		frame := c[0].mem[12:]
		d.nsent++
		if !d.quiet {
			d.sent = append(d.sent, bytes.Clone(frame))
		}
		if d.loop {
			d.injectLocked(frame)
		}
		d.useLocked(1, uint32(head), 0)
	}
	if took {
		d.moveLocked(1)
	}
}

// injectLocked receives a frame, over as many buffers as it takes; false if there
// are none.
func (d *device) injectLocked(frame []byte) bool {
	var hdr [12]byte
	parts := d.parts[:0]
	var first []byte
	q, rest := &d.q[0], frame
	taken := q.taken
	for len(parts) == 0 || len(rest) > 0 {
		head, c := d.takeLocked(0)
		if head < 0 || len(parts) > 0 && d.drvFeats&fMrgRxbuf == 0 {
			q.taken = taken
			d.lost++
			return false
		}
		m, n := c[0].mem, 0
		if !c[0].write || len(c) != 1 {
			d.Errorf("receive buffer of %d descriptors, write %v", len(c), c[0].write)
		}
		if len(parts) == 0 {
			first, n = m, 12
			m = m[12:]
		}
		k := copy(m, rest)
		rest = rest[k:]
		parts = append(parts, part{head, n + k})
	}
	binary.LittleEndian.PutUint16(hdr[10:], uint16(len(parts)))
	copy(first, hdr[:])
	for _, p := range parts {
		d.useLocked(0, uint32(p.head), uint32(p.n))
	}
	d.moveLocked(0)
	return true
}

func (d *device) inject(frame []byte) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.injectLocked(frame)
}

// take takes one receive buffer, for a test to use as it likes.
func (d *device) take() (head uint32, mem []byte) {
	h, c := d.takeLocked(0)
	if h < 0 {
		panic("no buffer")
	}
	return uint32(h), c[0].mem
}

// commandLocked does a control command, if there is one.
func (d *device) commandLocked() bool {
	head, c := d.takeLocked(2)
	if head < 0 || d.noAnswer {
		return false
	}
	if d.badCtrlUse {
		head = 7
	}
	b, ack := c[0].mem, byte(0)
	if len(c) != 2 || !c[1].write || len(c[1].mem) != 1 {
		d.Errorf("command of %d descriptors", len(c))
	}
	d.cmds = append(d.cmds, fmt.Sprintf("%d.%d", b[0], b[1]))
	switch what := uint16(b[0])<<8 | uint16(b[1]); {
	case d.refuse[what]:
		ack = 1
	case what == 0x000:
		d.promisc = b[2] == 1
	case what == 0x001:
		d.allMulti = b[2] == 1
	case what == 0x100:
		b = b[2:]
		for _, list := range []*[]nic.MAC{&d.uni, &d.multi} {
			n := int(binary.LittleEndian.Uint32(b))
			*list = nil
			for b = b[4:]; n > 0; n-- {
				*list = append(*list, nic.MAC(b[:6]))
				b = b[6:]
			}
		}
		if len(b) != 0 {
			d.Errorf("filter has %d bytes too many", len(b))
		}
	case what == 0x101:
		d.mac = nic.MAC(b[2:])
	default:
		ack = 1
	}
	c[1].mem[0] = ack
	d.useLocked(2, uint32(head), 1)
	d.moveLocked(2)
	return true
}

// change tells the driver that the configuration changed.
func (d *device) change(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
	d.gen++
	d.raiseLocked(d.cfgVec, 3)
}

func (d *device) frames() [][]byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.sent)
}
