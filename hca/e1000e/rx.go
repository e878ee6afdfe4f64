package e1000e

import (
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca/nic"
)

const (
	// refillBatch is how many places of the ring are empty before it is filled: a
	// write of the tail costs an exit of the virtual machine under QEMU.
	refillBatch = 16
	// spareRings times the ring's size is what the pool has besides: so many frames
	// can be out before the hardware drops.
	spareRings = 2
	// bufferPad sets buffers apart by more than a power of two, so that headers do
	// not all fall into the same sets of a cache. It is a cache line.
	bufferPad = 64
)

// rxRing is the receive queue: n descriptors, of which those from head on, posted of
// them, are the hardware's. One stays empty: head = tail means none (DS 7.1.8).
type rxRing struct {
	desc     []byte // DMA
	mem      []byte // DMA: the buffers
	iova     uint64 // of mem
	n        int
	bufSize  int // what the hardware writes at most per buffer
	stride   int
	maxFrame int
	batch    int
	pool     *pool
	stats    *stats

	// peek is the word in which the next frame will show; nil while none is posted.
	peek atomic.Pointer[uint64]

	// mu guards what follows.
	mu     sync.Mutex
	slot   []int32 // the buffer at each place
	head   int
	tail   int
	posted int
	skip   bool // in the middle of a frame over several descriptors
	// of one harvest:
	lent, back, fresh []int32
}

// bufferSize is the smallest size that RCTL can say and that holds a frame with FCS, and the
// bits for it (DS 10.2.5).
func bufferSize(frame int) (size int, bits uint32) {
	switch frame += fcsSize; {
	case frame <= 2048:
		return 2048, 0
	case frame <= 4096:
		return 4096, 3<<rctlBSIZEBits | rctlBSEX
	case frame <= 8192:
		return 8192, 2<<rctlBSIZEBits | rctlBSEX
	default:
		return 16384, 1<<rctlBSIZEBits | rctlBSEX
	}
}

func (r *rxRing) buffer(t int32) []byte {
	off := int(t) * r.stride
	return r.mem[off : off+r.bufSize : off+r.bufSize]
}

// ready says whether the hardware wrote the next descriptor. It takes no lock.
func (r *rxRing) ready() bool {
	w := r.peek.Load()
	return w != nil && atomic.LoadUint64(w)&rxDD != 0
}

// harvest lends out frames that came and posts fresh buffers in their place.
func (r *rxRing) harvest(bar nic.BAR, fs []nic.Frame, owner nic.Releaser) int {
	if !r.ready() {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lent, r.back = r.lent[:0], r.back[:0]
	var bytes uint64
	for len(r.lent) < len(fs) && r.posted > 0 {
		w := loadWord(r.desc, r.head, 1)
		if w&rxDD == 0 {
			break
		}
		t := r.slot[r.head]
		r.posted--
		if r.head++; r.head == r.n {
			r.head = 0
		}
		size := int(w & rxLenMask)
		if !r.good(w, size) {
			r.back = append(r.back, t)
			continue
		}
		fs[len(r.lent)] = nic.Frame{Data: r.buffer(t)[:size:size], Buf: owner, Token: int(t)}
		r.lent = append(r.lent, t)
		bytes += uint64(size)
	}
	r.fillLocked(bar)
	n := len(r.lent)
	if n > 0 {
		r.stats.rxPackets.Add(uint64(n))
		r.stats.rxBytes.Add(bytes)
	}
	return n
}

// good says whether a written descriptor is a whole frame, and counts it if not.
func (r *rxRing) good(w uint64, size int) bool {
	whole := !r.skip
	eop := w&rxEOP != 0
	if size == 0 || size > r.bufSize {
		r.stats.rxBadDesc.Add(1)
		r.skip = !eop
		return false
	}
	r.skip = !eop
	switch {
	case !whole: // its first part was counted
	case !eop, size > r.maxFrame:
		r.stats.rxOversize.Add(1)
	case w>>rxErrorsShift&rxErrors != 0:
		r.stats.rxFrameErrors.Add(1)
	case size < ethHeader:
		r.stats.rxBadDesc.Add(1)
	default:
		return true
	}
	return false
}

// fillLocked posts buffers where enough places are empty, tells the pool what became
// of the harvest's, and sets peek.
func (r *rxRing) fillLocked(bar nic.BAR) {
	into := r.fresh[:0]
	if holes := r.n - 1 - r.posted; holes >= r.batch || r.posted < r.batch {
		into = r.fresh[:holes]
	}
	k := r.pool.swap(r.lent, r.back, into, r.posted, r.batch)
	for _, t := range into[:k] {
		r.slot[r.tail] = t
		storeWord(r.desc, r.tail, 1, 0)
		storeWord(r.desc, r.tail, 0, r.iova+uint64(t)*uint64(r.stride))
		if r.tail++; r.tail == r.n {
			r.tail = 0
		}
	}
	r.posted += k
	if k > 0 {
		bar.Store32(regRDT, uint32(r.tail))
	}
	if r.posted > 0 {
		r.peek.Store(descWord(r.desc, r.head, 1))
	} else {
		r.peek.Store(nil)
	}
}

// fill gives the ring the buffers that it waits for.
func (r *rxRing) fill(bar nic.BAR) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lent, r.back = r.lent[:0], r.back[:0]
	r.fillLocked(bar)
}
