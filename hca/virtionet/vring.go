package virtionet

import (
	"encoding/binary"
	"fmt"

	"github.com/uverbsd/uverbsd/hca/nic"
)

// Layout of a split virtqueue (§2.7).
const (
	descSize     = 16 // le64 addr, le32 len, le16 flags, le16 next (§2.7.5)
	descLen      = 8
	descFlags    = 12
	descNext     = 14
	ringIdx      = 4 // of flags and idx, in front of both rings (§2.7.6, §2.7.8)
	usedElem     = 8 // le32 id, le32 len
	usedAlign    = 64
	fNext        = 1 // VIRTQ_DESC_F_NEXT
	fWrite       = 2 // VIRTQ_DESC_F_WRITE
	fNoNotify    = 1 // VIRTQ_USED_F_NO_NOTIFY
	fNoInterrupt = 1 // VIRTQ_AVAIL_F_NO_INTERRUPT
)

// badDevice is what the device has done wrong: the port is gone.
type badDevice string

func (b badDevice) Error() string { return string(b) }

// virtq is one split virtqueue, driver's side. It has no lock: its owner has.
//
// flags and idx of a ring are one aligned word together, since nothing but the
// whole word can be stored atomically; the side that writes one writes both.
type virtq struct {
	dma      nic.DMA
	n        int
	avail    int // offsets in dma.Mem; the descriptors are at 0
	used     int
	eventIdx bool

	index    uint16 // of the queue in the device
	bar      nic.BAR
	doorbell int // offset in bar

	idx   uint16 // where the next entry of the available ring goes
	shown uint16 // idx as the device knows it
	last  uint16 // up to where the used ring is read
	flags uint16 // of the available ring

	out  []bool // heads that the device has
	nout int
}

// ringBytes is the memory for a queue of n entries. The used ring has a cache line
// of its own; both rings end with a word for an event index (§2.7.7, §2.7.10).
func ringBytes(n int) (avail, used, size int) {
	avail = n * descSize
	used = (avail + ringIdx + 2*n + 4 + usedAlign - 1) &^ (usedAlign - 1)
	return avail, used, used + ringIdx + usedElem*n + 4
}

func newVirtq(fn nic.Function, n int, eventIdx bool) (*virtq, error) {
	q := &virtq{n: n, eventIdx: eventIdx, out: make([]bool, n)}
	var size int
	q.avail, q.used, size = ringBytes(n)
	var err error
	if q.dma, err = alloc(fn, size); err != nil {
		return nil, err
	}
	q.disarm()
	return q, nil
}

// alloc is fn.Alloc, whose answer is checked once.
func alloc(fn nic.Function, size int) (nic.DMA, error) {
	d, err := fn.Alloc(size)
	if err != nil {
		return d, fmt.Errorf("allocate %d bytes for DMA: %w", size, err)
	}
	if len(d.Mem) < size {
		return d, fmt.Errorf("allocate %d bytes for DMA: got %d", size, len(d.Mem))
	}
	return d, nil
}

// describe writes descriptor i.
func (q *virtq) describe(i int, addr uint64, size int, flags, next uint16) {
	d := q.dma.Mem[i*descSize : (i+1)*descSize]
	binary.LittleEndian.PutUint64(d, addr)
	binary.LittleEndian.PutUint32(d[descLen:], uint32(size))
	binary.LittleEndian.PutUint16(d[descFlags:], flags)
	binary.LittleEndian.PutUint16(d[descNext:], next)
}

// resize changes the length in descriptor i.
func (q *virtq) resize(i, size int) {
	binary.LittleEndian.PutUint32(q.dma.Mem[i*descSize+descLen:], uint32(size))
}

// push makes descriptor i available, once publish is called (§2.7.13).
func (q *virtq) push(i int) {
	binary.LittleEndian.PutUint16(q.dma.Mem[q.avail+ringIdx+2*(int(q.idx)&(q.n-1)):], uint16(i))
	q.idx++
	q.out[i] = true
	q.nout++
}

// publish shows the device what was pushed, and rings if it wants that.
func (q *virtq) publish() {
	if old := q.shown; q.idx != old {
		q.shown = q.idx
		q.storeHead()
		if q.wanted(old) {
			q.ring()
		}
	}
}

func (q *virtq) ring() { q.bar.Store16(q.doorbell, q.index) }

func (q *virtq) storeHead() {
	store32(q.dma.Mem, q.avail, uint32(q.shown)<<16|uint32(q.flags))
}

// wanted says whether the device asks for a notification after idx went from old
// to shown (§2.7.10).
func (q *virtq) wanted(old uint16) bool {
	if !q.eventIdx {
		return load32(q.dma.Mem, q.used)&fNoNotify == 0
	}
	event := uint16(load32(q.dma.Mem, q.used+ringIdx+usedElem*q.n))
	return q.shown-event-1 < q.shown-old
}

// disarm asks for no interrupt. With an event index it is enough not to move that
// on (§2.7.7).
func (q *virtq) disarm() {
	if !q.eventIdx && q.flags == 0 {
		q.flags = fNoInterrupt
		q.storeHead()
	}
}

// arm asks for an interrupt at the next used buffer. Look once more after it.
func (q *virtq) arm() {
	if q.eventIdx {
		store32(q.dma.Mem, q.avail+ringIdx+2*q.n, uint32(q.last))
	} else if q.flags != 0 {
		q.flags = 0
		q.storeHead()
	}
}

// pending is how many used buffers there are to pop.
func (q *virtq) pending() (int, error) {
	n := int(uint16(load32(q.dma.Mem, q.used)>>16) - q.last)
	if n > q.nout {
		return 0, badDevice(fmt.Sprintf("queue %d: the device used %d buffers of %d", q.index, n, q.nout))
	}
	return n, nil
}

// pop takes the next used buffer: its descriptor, and the bytes the device says
// to have written, which the caller checks. Only if one is pending.
func (q *virtq) pop() (i int, size uint32, err error) {
	at := q.used + ringIdx + usedElem*(int(q.last)&(q.n-1))
	id := load32(q.dma.Mem, at)
	size = load32(q.dma.Mem, at+4)
	if id >= uint32(q.n) || !q.out[id] {
		return 0, 0, badDevice(fmt.Sprintf("queue %d: the device used descriptor %d, which it does not have", q.index, id))
	}
	q.out[id] = false
	q.nout--
	q.last++
	return int(id), size, nil
}
