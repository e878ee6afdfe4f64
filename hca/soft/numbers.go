package soft

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// numbers gives out the numbers of one kind of object. A number given back
// rests: it comes again only after rest others were given back, or when there
// is no fresh one, so that the stale uses of it find nothing. Its owner's lock
// guards it. All it does takes constant time, and its memory is bounded by rest
// and by what is in use at a time.
type numbers struct {
	next, last uint32 // lowest fresh index, highest that there is
	rest       int

	// free is a ring of the numbers given back, oldest first. Its length is a
	// power of two.
	free        []uint32
	head, count int
}

// get returns a fresh index, or a number that was given back (used), which its
// owner turns into the next generation of the same index. ok is false when
// there is neither.
func (p *numbers) get() (n uint32, used, ok bool) {
	switch {
	case p.count > 0 && (p.count > p.rest || p.next > p.last):
		n = p.free[p.head]
		p.head = (p.head + 1) & (len(p.free) - 1)
		p.count--
		return n, true, true
	case p.next <= p.last:
		p.next++
		return p.next - 1, false, true
	}
	return 0, false, false
}

func (p *numbers) put(n uint32) {
	if p.count == len(p.free) {
		free := make([]uint32, max(2*p.count, 16))
		k := copy(free, p.free[p.head:])
		copy(free[k:], p.free[:p.head])
		p.free, p.head = free, 0
	}
	p.free[(p.head+p.count)&(len(p.free)-1)] = n
	p.count++
}

const (
	// The number of a QP or an XRC SRQ is generation<<17 | index: 10⁵ of them
	// with room to spare, and 128 generations. Index 0 and 1 stay free for QP0 and
	// QP1 of the port, the last one so that no number is the multicast QPN
	// 0xffffff.
	numIndexMin  = 2
	numIndexMax  = 1<<17 - 1
	numIndexMask = 1<<17 - 1
	numMask      = 1<<24 - 1
	numChunk     = 256
	// numRest keeps the tables small on small systems: a number is given out
	// again after 1024·128 others at the earliest.
	numRest = 1024
)

// numTable finds objects by 24-bit number without a lock.
type numTable[T any] struct {
	chunks [(numIndexMask + 1) / numChunk]atomic.Pointer[[numChunk]atomic.Pointer[T]]

	// mu guards the rest. Leaf.
	mu  sync.Mutex
	ids numbers
}

func (t *numTable[T]) init() {
	t.ids = numbers{next: numIndexMin, last: numIndexMax - 1, rest: numRest}
}

// insert stores the object's number in *num and makes the object found.
func (t *numTable[T]) insert(v *T, num *uint32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, used, ok := t.ids.get()
	if !ok {
		return fmt.Errorf("no number left: %w", enomem)
	}
	if used {
		n = (n + numIndexMask + 1) & numMask
	}
	*num = n
	i := n & numIndexMask
	c := &t.chunks[i/numChunk]
	if c.Load() == nil {
		c.Store(new([numChunk]atomic.Pointer[T]))
	}
	c.Load()[i%numChunk].Store(v)
	return nil
}

func (t *numTable[T]) remove(num uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := num & numIndexMask
	t.chunks[i/numChunk].Load()[i%numChunk].Store(nil)
	t.ids.put(num)
}

// at is the object at a number's index, nil if there is none: the caller
// compares the whole number.
func (t *numTable[T]) at(num uint32) *T {
	i := num & numIndexMask
	c := t.chunks[i/numChunk].Load()
	if c == nil {
		return nil
	}
	return c[i%numChunk].Load()
}

// list is all objects.
func (t *numTable[T]) list() []*T {
	var l []*T
	for i := range t.chunks {
		c := t.chunks[i].Load()
		if c == nil {
			continue
		}
		for j := range c {
			if v := c[j].Load(); v != nil {
				l = append(l, v)
			}
		}
	}
	return l
}

// qp finds the queue pair with a number; nil if there is none.
func (d *Device) qp(num uint32) *QP {
	q := d.qps.at(num)
	if q == nil || q.num != num {
		return nil
	}
	return q
}

// xrcSRQ finds the XRC SRQ with a number; nil if there is none.
func (d *Device) xrcSRQ(num uint32) *SRQ {
	s := d.srqs.at(num)
	if s == nil || s.num != num {
		return nil
	}
	return s
}
