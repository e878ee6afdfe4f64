package e1000e

import (
	"fmt"
	"sync"

	"github.com/uverbsd/uverbsd/hca/nic"
)

// reportEvery is how many descriptors at most go without a report: a long batch frees
// its slots bit by bit.
const reportEvery = 32

// txRing is the transmit queue: n descriptors, each with a slot for one frame. Those
// from clean to tail are the hardware's; one stays empty (DS 7.2).
type txRing struct {
	desc     []byte // DMA
	mem      []byte // DMA: the slots
	iova     uint64 // of mem
	n        int
	stride   int
	maxFrame int
	stats    *stats

	// mu guards what follows. It is held for a batch's copying.
	mu    sync.Mutex
	tail  int
	used  int // descriptors that are the hardware's
	clean int // the oldest of these
	// marks are the descriptors that ask for a report, oldest first, a ring of n.
	marks        []int32
	mark, nmarks int
	cleaned      uint64 // how many were taken back, ever
	// what stalled saw the last time:
	seenCleaned uint64
	seenUsed    bool
}

// send copies frames into slots and rings the bell once.
func (r *txRing) send(bar nic.BAR, frames [][]byte) (n int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n-1-r.used < len(frames) {
		r.reclaimLocked()
	}
	var bytes uint64
	var word uint64 // of the last descriptor, to have a report added
	since := 0
	for _, f := range frames {
		if len(f) < ethHeader || len(f) > r.maxFrame {
			err = fmt.Errorf("send a frame of %d bytes: it takes %d to %d", len(f), ethHeader, r.maxFrame)
			break
		}
		if r.used == r.n-1 {
			r.stats.txFull.Add(1)
			err = nic.ErrFull
			break
		}
		off := r.tail * r.stride
		slot := r.mem[off : off+r.stride]
		size := copy(slot, f)
		if size < minFrame {
			clear(slot[size:minFrame])
			size = minFrame
		}
		word = uint64(size) | txCmdEOP | txCmdIFCS
		if since++; since == reportEvery {
			word |= txCmdRS
			r.markLocked(r.tail)
			since = 0
		}
		storeWord(r.desc, r.tail, 0, r.iova+uint64(off))
		storeWord(r.desc, r.tail, 1, word)
		if r.tail++; r.tail == r.n {
			r.tail = 0
		}
		r.used++
		n++
		bytes += uint64(len(f))
	}
	if n == 0 {
		return 0, err
	}
	if since > 0 {
		last := r.tail - 1
		if last < 0 {
			last = r.n - 1
		}
		storeWord(r.desc, last, 1, word|txCmdRS)
		r.markLocked(last)
	}
	r.stats.txPackets.Add(uint64(n))
	r.stats.txBytes.Add(bytes)
	bar.Store32(regTDT, uint32(r.tail))
	return n, err
}

func (r *txRing) markLocked(i int) {
	at := r.mark + r.nmarks
	if at >= r.n {
		at -= r.n
	}
	r.marks[at] = int32(i)
	r.nmarks++
}

// reclaimLocked takes back what the hardware reported done; a report is for all before it
// too, as it works in order.
func (r *txRing) reclaimLocked() {
	for r.nmarks > 0 {
		i := int(r.marks[r.mark])
		if loadWord(r.desc, i, 1)&txDD == 0 {
			return
		}
		if r.mark++; r.mark == r.n {
			r.mark = 0
		}
		r.nmarks--
		k := i + 1 - r.clean
		if k <= 0 {
			k += r.n
		}
		r.used -= k
		r.cleaned += uint64(k)
		if r.clean = i + 1; r.clean == r.n {
			r.clean = 0
		}
	}
}

// stalled says whether frames were waiting for the wire since the last call, and
// none of them left.
func (r *txRing) stalled() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reclaimLocked()
	bad := r.seenUsed && r.used > 0 && r.cleaned == r.seenCleaned
	r.seenCleaned, r.seenUsed = r.cleaned, r.used > 0
	return bad
}
