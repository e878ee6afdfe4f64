package soft

import (
	"fmt"
	"sync"
	"sync/atomic"
)

const (
	// A QP number is generation<<16 | index. Index 0 and 1 stay free for QP0
	// and QP1 of the port, the last one so that no number is the multicast
	// QPN 0xffffff.
	qpIndexMin  = 2
	qpIndexMax  = 1<<16 - 1
	qpIndexMask = 1<<16 - 1
	qpnMask     = 1<<24 - 1
	qpChunk     = 256
)

// qpTable finds queue pairs by number without a lock. A number comes back only
// after its index was given out 256 times, and an index rests until all that
// were given back before it have been used.
type qpTable struct {
	chunks [(qpIndexMask + 1) / qpChunk]atomic.Pointer[[qpChunk]atomic.Pointer[QP]]

	// mu guards the rest. Leaf.
	mu   sync.Mutex
	next uint32
	free []uint32 // numbers given back, oldest first
}

// freshQPs is how many indices are used for the first time before numbers are
// taken from the free list: the table stays small on small systems.
const freshQPs = 1024

func (t *qpTable) init() { t.next = qpIndexMin }

func (t *qpTable) insert(q *QP) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case len(t.free) > 0 && t.next > freshQPs:
		old := t.free[0]
		t.free = t.free[1:]
		q.num = (old + qpIndexMask + 1) & qpnMask
	case t.next < qpIndexMax:
		q.num = t.next
		t.next++
	case len(t.free) > 0:
		old := t.free[0]
		t.free = t.free[1:]
		q.num = (old + qpIndexMask + 1) & qpnMask
	default:
		return fmt.Errorf("no QP number left: %w", enomem)
	}
	i := q.num & qpIndexMask
	c := &t.chunks[i/qpChunk]
	if c.Load() == nil {
		c.Store(new([qpChunk]atomic.Pointer[QP]))
	}
	c.Load()[i%qpChunk].Store(q)
	return nil
}

func (t *qpTable) remove(q *QP) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := q.num & qpIndexMask
	t.chunks[i/qpChunk].Load()[i%qpChunk].Store(nil)
	t.free = append(t.free, q.num)
}

// lookup finds the queue pair with a number; nil if there is none.
func (t *qpTable) lookup(num uint32) *QP {
	if num > qpnMask {
		return nil
	}
	i := num & qpIndexMask
	c := t.chunks[i/qpChunk].Load()
	if c == nil {
		return nil
	}
	q := c[i%qpChunk].Load()
	if q == nil || q.num != num {
		return nil
	}
	return q
}

// list is all queue pairs, for counters.
func (t *qpTable) list() []*QP {
	var l []*QP
	for i := range t.chunks {
		c := t.chunks[i].Load()
		if c == nil {
			continue
		}
		for j := range c {
			if q := c[j].Load(); q != nil {
				l = append(l, q)
			}
		}
	}
	return l
}
