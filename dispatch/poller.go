package dispatch

import (
	"sync"

	"github.com/uverbsd/uverbsd/hca"
)

// After missesMax waits in a row that ended with nothing, only one empty poll in
// missesSkip+1 is made to wait: this client polls in between other work, or
// another queue is the one that matters to it.
const (
	missesMax  = 2
	missesSkip = 3
	// lentMax bounds the goroutines of other clients that one user's answers may
	// hold up, and answersMax all goroutines that they hold.
	lentMax    = 2
	answersMax = 32
)

// poller holds the one POLL_CQ that waits on a CQ. That there is nothing was
// written into the client before it began to wait: so the waits of all clients
// can be ended by one goroutine, which no client's memory can hold up. A late
// interrupt may end a later wait early: that client is then told "none", which
// it may be told at any time.
type poller struct {
	sys       System
	cq        hca.CQ
	sweeper   *sweeper
	interrupt func() // end, made once
	user      *account

	// mu guards the members below; r is nil when no request waits. Leaf.
	mu     sync.Mutex
	r      Request
	tid    int
	size   int // bytes of the write(), which its answer counts
	resp   uint64
	ne     uint32
	seq    uint64 // counts waits
	misses int    // waits in a row that ended with nothing
	skip   int    // empty polls to be answered at once
}

func (p *poller) init(f *File, cq hca.CQ) {
	d := f.dev
	p.sys, p.cq, p.sweeper, p.user = d.cfg.System, cq, &d.sweeper, f.user
	p.interrupt = p.end
}

// wants says whether an empty poll is to wait.
func (p *poller) wants() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.r != nil || p.skip > 0 {
		p.skip = max(p.skip-1, 0)
		return false
	}
	return true
}

// park takes over r's answer; its client has been told that there is nothing.
// False: it did not, since there is something to poll or another request waits.
func (p *poller) park(r Request, tid, size int, resp uint64, ne uint32) bool {
	p.mu.Lock()
	if p.r != nil {
		p.mu.Unlock()
		return false
	}
	p.seq++
	p.r, p.tid, p.size, p.resp, p.ne = r, tid, size, resp, ne
	seq := p.seq
	p.mu.Unlock()
	r.OnInterrupt(p.interrupt) // first: r is not touched once it may be answered
	p.sweeper.add(parked{p, seq})
	waits := p.cq.Await(p)
	p.mu.Lock()
	mine := p.seq == seq && p.r != nil
	if mine && !waits {
		p.r = nil
	}
	p.mu.Unlock()
	if waits && !mine {
		p.cq.Cancel(p) // it was ended quicker: nobody waits any more
	}
	return waits || !mine
}

// expire ends wait seq, if it is the one that goes on.
func (p *poller) expire(seq uint64) {
	p.mu.Lock()
	due := p.seq == seq && p.r != nil
	p.mu.Unlock()
	if due {
		p.end()
	}
}

// end answers the request that waits, if one does: there was nothing.
func (p *poller) end() {
	p.mu.Lock()
	r, size := p.r, p.size
	p.r = nil
	if r != nil {
		if p.misses++; p.misses >= missesMax {
			p.skip = missesSkip
		}
	}
	p.mu.Unlock()
	if r == nil {
		return
	}
	p.cq.Cancel(p)
	r.ReplyWrite(size)
}

// Wake is called by the CQ when a completion is there, on the goroutine of
// whoever made it. It answers the request that waits, if one does, with what
// there is. The answer goes into the client's memory, which can hold it up: a
// goroutine that may linger is lent for it as long as the client's user has few
// of them, otherwise it is made on one of its own; beyond answersMax the client
// keeps the answer that it has, that there is nothing, and asks again.
func (p *poller) Wake(linger bool) {
	p.mu.Lock()
	a := parkedPoll{p.r, p.tid, p.size, p.resp, p.ne}
	p.r, p.misses, p.skip = nil, 0, 0
	p.mu.Unlock()
	if a.r == nil {
		return
	}
	p.cq.Cancel(p)
	switch n := p.user.answers.Add(1); {
	case linger && n <= lentMax:
		p.answer(a)
	case n <= answersMax:
		go p.answer(a)
	default:
		p.user.answers.Add(-1)
		a.r.ReplyWrite(a.size)
	}
}

// parkedPoll is a request that waited.
type parkedPoll struct {
	r         Request
	tid, size int
	resp      uint64
	ne        uint32
}

func (p *poller) answer(a parkedPoll) {
	defer p.user.answers.Add(-1)
	if _, err := deliverWC(p.sys, a.r, a.tid, p.cq, a.resp, a.ne, true); err != nil {
		a.r.ReplyError(errnoOf(err))
		return
	}
	a.r.ReplyWrite(a.size)
}
