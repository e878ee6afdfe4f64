package rxe

import (
	"fmt"
	"math/bits"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

const (
	pageSize = 4096
	// minElem is the smallest entry in bytes, a cache line.
	minElem = 64
	// maxSlots bounds a ring far over what any device's limits ask for, so that its
	// size in bytes is an int32's; the arena has the bound that counts.
	maxSlots = 1 << 21
)

// ring is the memory of one queue. The sizes, and one of the indices, are the
// daemon's: what the client makes of the copies in the header is not looked at.
type ring struct {
	arena hca.Arena
	mem   []byte // header and entries
	info  hca.MapInfo
	shift uint32 // log2 of an entry's size
	mask  uint32
}

// init makes a ring of at least n entries of size bytes: a power of two of places,
// of which one stays empty.
func (r *ring) init(a hca.Arena, n, size int) error {
	if n < 0 || n >= maxSlots || size < 0 || size > 1<<12 {
		return fmt.Errorf("queue of %d entries of %d bytes: %w", n, size, unix.EINVAL)
	}
	slots := 1 << bits.Len(uint(n)) // n+1, rounded up
	r.shift = uint32(bits.Len(uint(max(size, minElem) - 1)))
	r.mask = uint32(slots - 1)
	bytes := headerSize + slots<<r.shift
	mem, off, err := a.Alloc(bytes)
	if err != nil {
		return fmt.Errorf("queue of %d bytes: %w", bytes, err)
	}
	r.arena, r.mem = a, mem[:bytes:bytes]
	r.info = hca.MapInfo{Offset: off, Size: uint32((bytes + pageSize - 1) &^ (pageSize - 1))}
	h := r.header()
	h.Log2ElemSize, h.IndexMask = r.shift, r.mask
	return nil
}

// Info is what the client maps.
func (r *ring) Info() hca.MapInfo { return r.info }

// Len is one less than the places, or a full ring would look empty.
func (r *ring) Len() int { return int(r.mask) }

// Close gives the memory back.
func (r *ring) Close() {
	r.mem = nil
	r.arena.Free(r.info.Offset)
}

// entry is the place at an index, which is within the mask.
func (r *ring) entry(i uint32) []byte {
	off := headerSize + int(i&r.mask)<<r.shift
	return r.mem[off : off+1<<r.shift : off+1<<r.shift]
}

// inbox is a ring that the client fills. taken and done are the daemon's: the next
// entry to take, and the oldest that is not done with, which is what the client is
// told.
type inbox struct {
	ring
	taken, done uint32
}

// take gives the next entry; nil if there is none, or if the client claims more
// than there are places.
func (b *inbox) take() []byte {
	next := (b.taken + 1) & b.mask
	if b.taken == b.producer() || next == b.done {
		return nil
	}
	e := b.entry(b.taken)
	b.taken = next
	return e
}

// Done gives the n oldest entries that were taken back to the client.
func (b *inbox) Done(n int) {
	b.done = (b.done + uint32(n)) & b.mask
	b.setConsumer(b.done)
}

// Queued is how many are not done with.
func (b *inbox) Queued() int { return int((b.producer() - b.done) & b.mask) }

// Reset takes everything and is done with it (rxe_qp_reset's flushes).
func (b *inbox) Reset() {
	b.taken = b.producer()
	b.done = b.taken
	b.setConsumer(b.done)
}

// moveTo copies what is not done with to the beginning of an empty ring; false if
// there is no room. What an entry holds is the client's affair before and after.
func (b *inbox) moveTo(to *inbox) bool {
	n, ok := b.copyFrom(&to.ring, b.done, b.producer())
	if !ok {
		return false
	}
	to.done = 0
	to.taken = min((b.taken-b.done)&b.mask, n)
	to.setConsumer(0)
	to.setProducer(n)
	return true
}

// copyFrom copies the entries from one index to another to the beginning of an
// empty ring with entries as large, and says how many.
func (r *ring) copyFrom(to *ring, from, end uint32) (n uint32, ok bool) {
	n = (end - from) & r.mask
	if to.shift != r.shift || n > to.mask {
		return 0, false
	}
	for i := range n {
		copy(to.entry(i), r.entry(from+i))
	}
	return n, true
}
