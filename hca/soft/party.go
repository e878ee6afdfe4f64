package soft

import (
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
)

// party is all contexts of one owner on a device: what they can take from others
// is bounded for all of them together.
type party struct {
	refs  int // contexts; guarded by Device.mu
	touch touching
	turns [2]turn // in the pool's lanes, under pool.mu
	// away are its posters' goroutines in other parties' memory, guests those of
	// other parties in its own.
	away, guests atomic.Int32
	held         atomic.Int32 // as UContext.held
}

func newParty() *party {
	p := &party{}
	p.touch.init(partyTouchLimit)
	return p
}

// partyLocked is the party of an owner, with one more context, under Device.mu; nil is
// nobody else's.
func (d *Device) partyLocked(owner any) *party {
	p := d.parties[owner]
	if p == nil || owner == nil {
		p = newParty()
		if owner != nil {
			d.parties[owner] = p
		}
	}
	p.refs++
	return p
}

// party is who runs q's queue. An XRC target has no sends; its place is nobody's.
func (q *QP) party() *party {
	if q.pd == nil {
		return q.dev.nobody
	}
	return q.pd.ctx.party
}

// touching counts the accesses under way to the memory of one context, or of one
// party: it bounds the goroutines that this memory can hold for ever. A message is
// begun only while neither its sender's nor its receiver's are full; then each
// access counts for its own memory, and for no longer than it takes: what is stuck
// in one client's memory is no burden of another's.
type touching struct {
	limit   int32
	now     atomic.Int32
	waiters waitList
}

func (g *touching) init(limit int32) {
	g.limit = limit
	g.waiters.ready = g.free
}

func (g *touching) free() bool { return g.now.Load() < g.limit }

func (g *touching) enter() { g.now.Add(1) }

func (g *touching) leave() {
	if g.now.Add(-1) < g.limit && g.waiters.n.Load() > 0 {
		if q := g.waiters.pop(); q != nil {
			q.wake()
		}
	}
}

// freeOrPark parks q until there is room; true if there is.
func (g *touching) freeOrPark(q *QP) bool {
	if g.free() {
		return true
	}
	g.waiters.add(q)
	// It may have come free before q was in the list.
	if g.free() {
		q.unlink()
		return true
	}
	return false
}

// freeOrPark: may q begin a message that touches c's memory?
func (c *UContext) freeOrPark(q *QP) bool {
	return c.touch.freeOrPark(q) && c.party.touch.freeOrPark(q)
}

func (c *UContext) free() bool { return c.touch.free() && c.party.touch.free() }

func (c *UContext) enter() {
	c.touch.enter()
	c.party.touch.enter()
}

func (c *UContext) leave() {
	c.touch.leave()
	c.party.touch.leave()
}

// visit counts the goroutine of a post in, that is about to touch the memory of
// another context, which can hold it; false when there are enough of them, of the
// sender's or in that memory. Workers are free to.
func (x *exec) visit(ctx *UContext) bool {
	if x.worker {
		return true
	}
	own := x.q.pd.ctx
	if !under(&own.away, awayLimit) {
		return false
	}
	if ctx.party == own.party {
		return true
	}
	if under(&own.party.away, partyAwayLimit) {
		if under(&ctx.party.guests, guestLimit) {
			return true
		}
		own.party.away.Add(-1)
	}
	own.away.Add(-1)
	return false
}

// unvisit counts it out.
func (x *exec) unvisit(ctx *UContext) {
	if x.worker {
		return
	}
	own := x.q.pd.ctx
	own.away.Add(-1)
	if ctx.party != own.party {
		own.party.away.Add(-1)
		ctx.party.guests.Add(-1)
	}
}

// under adds one, up to a limit.
func under(n *atomic.Int32, limit int32) bool {
	if n.Add(1) <= limit {
		return true
	}
	n.Add(-1)
	return false
}

// ownerOf is whom n's context belongs to; nil: nobody says.
func ownerOf(n hca.Notifier) any {
	if o, ok := n.(hca.Owner); ok {
		return o.Owner()
	}
	return nil
}
