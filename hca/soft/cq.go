package soft

import (
	"fmt"
	"sync"

	"github.com/uverbsd/uverbsd/hca"
)

// CQ is a completion queue: a ring that starts small and doubles up to what was
// asked for, or the client's mapped queue, which it empties itself.
type CQ struct {
	dev     *Device
	handler hca.CQHandler
	guard   guard // of CQEvent

	// mu guards what is below. Inside QP and SRQ locks; only leaves inside it.
	mu      sync.Mutex
	queue   hca.CompQueue // mapped; ring is then empty, and there are no waiters
	out     hca.WC        // what queue.Push writes
	ring    []hca.WC
	entries int
	head    int
	count   int
	armed   hca.NotifyFlags // NotifySolicited, NotifyNextComp or 0
	due     bool            // a Completion has to be made
	calling bool            // somebody is in Completion
	failed  bool            // overrun: takes nothing more (IBTA 1.4 §11.6.3.1)
	closed  bool
	waiter  hca.Waiter
	mod     *moderation // nil: never was moderated
}

var _ hca.CQ = (*CQ)(nil)

// CreateCQ: EINVAL for entries outside 1 … MaxCQE and for a vector that does
// not exist, ENOMEM when MaxCQ exist.
func (c *UContext) CreateCQ(in hca.CQInit) (hca.CQ, error) {
	d := c.dev
	if err := d.checkCQE(in.Entries); err != nil {
		return nil, fmt.Errorf("create cq: %w", err)
	}
	if in.Vector < 0 || in.Vector >= d.attr.CompVectors {
		return nil, fmt.Errorf("create cq: vector %d: %w", in.Vector, einval)
	}
	if err := take(&d.nCQ, d.attr.MaxCQ, "create cq"); err != nil {
		return nil, err
	}
	if in.Queue != nil {
		return &CQ{dev: d, handler: in.Handler, queue: in.Queue, entries: in.Queue.Len()}, nil
	}
	return &CQ{
		dev: d, handler: in.Handler, entries: in.Entries,
		ring: make([]hca.WC, min(in.Entries, initialRing)),
	}, nil
}

func (d *Device) checkCQE(n int) error {
	if n < 1 || uint64(n) > uint64(d.attr.MaxCQE) {
		return fmt.Errorf("%d entries: %w", n, einval)
	}
	return nil
}

// Entries is what was asked for, or what a mapped queue has.
func (c *CQ) Entries() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entries
}

// push appends a completion; false on overrun, and ever after. When somebody
// has to be told, c is added to n.
func (c *CQ) push(wc *hca.WC, solicited bool, n *notes) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return true
	}
	if c.failed || !c.putLocked(wc, solicited) {
		if !c.failed {
			c.failed = true
			if c.handler != nil {
				c.dev.events.add(event{guard: &c.guard, cqh: c.handler, ev: hca.EventCQErr})
			}
		}
		return false
	}
	if c.armed&hca.NotifyNextComp != 0 ||
		c.armed&hca.NotifySolicited != 0 && (solicited || wc.Status != hca.WCSuccess) {
		if c.mod == nil || c.holdLocked() {
			c.tellLocked()
			if c.due {
				n.add(c)
			}
		}
	}
	if c.waiter != nil {
		n.add(c)
	}
	return true
}

// putLocked queues a completion; false if there is no room.
func (c *CQ) putLocked(wc *hca.WC, solicited bool) bool {
	if c.queue != nil {
		c.out = *wc // or wc itself would escape
		return c.queue.Push(&c.out, solicited)
	}
	if c.count == c.entries {
		return false
	}
	if c.count == len(c.ring) {
		c.resizeLocked(min(2*c.count, c.entries))
	}
	i := c.head + c.count
	if i >= len(c.ring) {
		i -= len(c.ring)
	}
	c.ring[i] = *wc
	c.count++
	return true
}

// queuedLocked is how many completions nobody has taken yet.
func (c *CQ) queuedLocked() int {
	if c.queue != nil {
		return c.queue.Queued()
	}
	return c.count
}

// tellLocked ends the arm: the Completion is due.
func (c *CQ) tellLocked() {
	c.armed = 0
	c.due = c.handler != nil
	if c.mod != nil {
		c.mod.untold = 0
	}
}

func (c *CQ) resizeLocked(n int) {
	ring := make([]hca.WC, n)
	for i := range c.count {
		ring[i] = c.ring[(c.head+i)%len(c.ring)]
	}
	c.ring, c.head = ring, 0
}

// wake wakes the waiter. linger: see hca.Waiter.
func (c *CQ) wake(linger bool) {
	c.mu.Lock()
	w := c.waiter
	if w == nil || c.count == 0 && !c.closed {
		c.mu.Unlock()
		return
	}
	c.waiter = nil
	c.mu.Unlock()
	w.Wake(linger)
}

// tell makes the Completion that is due, and says whether a waiter is to be
// woken. Whoever is in Completion already makes the next one too, so that there
// is one at a time.
func (c *CQ) tell() (waits bool) {
	c.mu.Lock()
	for c.due && !c.calling && !c.closed {
		c.due, c.calling = false, true
		c.mu.Unlock()
		c.handler.Completion()
		c.mu.Lock()
		c.calling = false
	}
	waits = c.waiter != nil
	c.mu.Unlock()
	return waits
}

// Poll takes completions out, oldest first.
func (c *CQ) Poll(wc []hca.WC) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(wc), c.count)
	for i := range n {
		wc[i] = c.ring[c.head]
		c.head++
		if c.head == len(c.ring) {
			c.head = 0
		}
	}
	c.count -= n
	return n
}

// ReqNotify arms the handler for one Completion. An arm for the next completion
// is not weakened to one for a solicited completion (IBTA 1.4 §11.4.2.2).
func (c *CQ) ReqNotify(f hca.NotifyFlags) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.armed&hca.NotifyNextComp == 0 {
		c.armed = f & (hca.NotifySolicited | hca.NotifyNextComp)
	}
	return f&hca.ReportMissed != 0 && !c.closed && c.queuedLocked() > 0
}

// Await arms w, see hca.CQ. Close wakes an armed waiter.
func (c *CQ) Await(w hca.Waiter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.count > 0 || c.waiter != nil || c.closed || c.failed || c.queue != nil {
		return false
	}
	c.waiter = w
	return true
}

// Cancel takes w back.
func (c *CQ) Cancel(w hca.Waiter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiter != w {
		return false
	}
	c.waiter = nil
	return true
}

// Resize: EINVAL for entries outside 1 … MaxCQE or fewer than are queued, and for a
// mapped queue in the place of one that is not, or the other way round.
func (c *CQ) Resize(entries int, to hca.CompQueue) error {
	if err := c.dev.checkCQE(entries); err != nil {
		return fmt.Errorf("resize cq: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed || (to == nil) != (c.queue == nil):
		return fmt.Errorf("resize cq: closed, or not mapped alike: %w", einval)
	case to != nil:
		if !c.queue.MoveTo(to) {
			return fmt.Errorf("resize cq: more than %d entries are queued: %w", to.Len(), einval)
		}
		c.queue, c.entries = to, to.Len()
	case entries < c.count:
		return fmt.Errorf("resize cq: %d entries are queued: %w", c.count, einval)
	default:
		c.entries = entries
		if len(c.ring) > entries {
			c.resizeLocked(entries)
		}
	}
	if c.mod != nil {
		c.tellIfDueLocked()
	}
	return nil
}

// Close drops what is queued. It waits, within stuckWait, for a handler that is
// running; none starts after it.
func (c *CQ) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed, c.due, c.armed = true, false, 0
	if c.mod != nil && c.mod.timer != nil {
		c.mod.timer.Stop()
	}
	wake := c.waiter != nil
	c.mu.Unlock()
	if wake {
		c.dev.events.add(event{cq: c})
	}
	c.guard.close()
	waitUntil(func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return !c.calling
	})
	c.dev.nCQ.Add(-1)
	return nil
}

// notes collects the CQs to be told, while locks are held; they are told when
// they are not.
type notes struct {
	n    int
	few  [4]*CQ
	more []*CQ
}

func (n *notes) add(c *CQ) {
	for _, o := range n.few[:n.n] {
		if o == c {
			return
		}
	}
	if n.n < len(n.few) {
		n.few[n.n] = c
		n.n++
		return
	}
	n.more = append(n.more, c)
}

func (n *notes) empty() bool { return n.n == 0 }

// each empties n into f.
func (n *notes) each(f func(*CQ)) {
	for i, c := range n.few[:n.n] {
		n.few[i] = nil
		f(c)
	}
	for _, c := range n.more {
		f(c)
	}
	n.n, n.more = 0, nil
}

// merge moves what is in o to n.
func (n *notes) merge(o *notes) { o.each(n.add) }

// tell makes the callbacks on this goroutine, under no lock, and leaves the
// waiters to w.
func (n *notes) tell(w *notes) {
	n.each(func(c *CQ) {
		if c.tell() {
			w.add(c)
		}
	})
}

// wake wakes the waiters, as the last that its goroutine does for anybody.
func (n *notes) wake() {
	n.each(func(c *CQ) { c.wake(true) })
}

// later leaves the callbacks to Run or the event goroutine: for verbs.
func (n *notes) later(d *Device) {
	n.each(func(c *CQ) { d.events.add(event{cq: c}) })
}
