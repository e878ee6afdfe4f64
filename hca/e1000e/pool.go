package e1000e

import "sync"

// pool holds the receive buffers that are neither in the ring nor lent out, by number.
// Valid moves of a buffer: free -> ring (take) -> lent or back to free (give) ->
// free (put).
type pool struct {
	// mu guards all of it. It is a leaf.
	mu      sync.Mutex
	free    []int32
	lent    []bool // by number
	nlent   int
	want    int  // free buffers from which on the dry ring is to be filled; 0: it is not dry
	stopped bool // no ring takes buffers any more
}

func newPool(n int) *pool {
	p := &pool{free: make([]int32, 0, n), lent: make([]bool, n)}
	for i := n - 1; i >= 0; i-- {
		p.free = append(p.free, int32(i))
	}
	return p
}

// swap takes what a harvest made: the buffers that were lent, those that go back
// unused; and moves up to len(into) free ones there. If there are fewer, put will say when
// there are batch, or any while the ring, which has posted so far, has less than batch.
func (p *pool) swap(lent, back, into []int32, posted, batch int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range lent {
		p.lent[t] = true
	}
	p.nlent += len(lent)
	p.free = append(p.free, back...)
	n := min(len(into), len(p.free))
	copy(into, p.free[len(p.free)-n:])
	p.free = p.free[:len(p.free)-n]
	p.want = 0
	if n < len(into) {
		p.want = batch
		if posted+n < batch {
			p.want = 1
		}
	}
	return n
}

// put takes back a lent buffer. fill says that the ring needs it, last that no frame is
// out any more after the stop, ok that the buffer was lent at all.
func (p *pool) put(t int) (fill, last, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t < 0 || t >= len(p.lent) || !p.lent[t] {
		return false, false, false
	}
	p.lent[t] = false
	p.nlent--
	p.free = append(p.free, int32(t))
	return p.want > 0 && len(p.free) >= p.want && !p.stopped, p.stopped && p.nlent == 0, true
}

// stop says whether no frame is out; if some are, put will say when the last is back.
func (p *pool) stop() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	return p.nlent == 0
}

// counts are for the tests and the counters.
func (p *pool) counts() (free, lent int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free), p.nlent
}
