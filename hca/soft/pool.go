package soft

import (
	"sync"
	"sync/atomic"
	"time"
)

// pool runs queue pairs that nobody's goroutine is there for: woken by another
// client, by a timer, or left over from a Run that had done its share. It has
// two lanes, so that large messages, of which a few keep all processors busy,
// leave room for small ones whoever sends them. In a lane the parties take turns:
// what one has queued does not make another wait longer than for one item.
type pool struct {
	// mu guards the rest, and QP.poolNext and poolQueued. Leaf.
	mu        sync.Mutex
	few, bulk lane
	watched   bool // the watcher runs
	stop      bool
	wg        sync.WaitGroup
}

// lane is a place of work. At most limit of its holders move; one that is stuck in
// a client's memory does not count, once the watcher has seen it.
type lane struct {
	p           *pool
	kind        int // of party.turns
	limit       int
	first, last *turn // parties with something queued, by turns
	holders     []*holder
	stuck       int // of the holders
	idle        []*worker
}

// turn is what one party has queued in one lane, under pool.mu: messages that have
// given up their place in the middle, then queue pairs.
type turn struct {
	paused     *holder // by holder.next
	head, tail *QP     // by QP.poolNext
	next       *turn
	queued     bool // in the lane's list
}

func (t *turn) empty() bool { return t.paused == nil && t.head == nil }

// holder is a place in a lane: of a worker, or, for the time of a large message,
// of a goroutine that posted it.
type holder struct {
	lane  *lane // nil: holds none
	i     int   // in lane.holders
	stuck bool
	seen  uint32 // the watcher's last look at beats
	beats atomic.Uint32

	next *holder       // in turn.paused
	turn chan struct{} // capacity 1: a paused one has its place back
}

// beat says that h moves.
func (h *holder) beat() {
	if h != nil {
		h.beats.Add(1)
	}
}

// worker is a goroutine of the pool's.
type worker struct {
	holder
	work chan *QP // capacity 1; nil ends it
}

func (p *pool) start(fewLimit, bulkLimit int) {
	p.few = lane{p: p, kind: 0, limit: fewLimit}
	p.bulk = lane{p: p, kind: 1, limit: bulkLimit}
}

// sched queues q for a Run, in no more than one lane at a time.
func (l *lane) sched(q *QP) {
	p := l.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stop || q.poolQueued {
		return
	}
	q.poolQueued = true
	t := &q.party().turns[l.kind]
	if t.tail == nil {
		t.head = q
	} else {
		t.tail.poolNext = q
	}
	t.tail = q
	l.queueLocked(t)
	l.feedLocked()
}

// queueLocked puts t at the end of those who wait for a turn.
func (l *lane) queueLocked(t *turn) {
	if t.queued {
		return
	}
	t.queued, t.next = true, nil
	if l.last == nil {
		l.first = t
	} else {
		l.last.next = t
	}
	l.last = t
}

// nextLocked takes the next item, whose party goes to the end: a holder that had
// paused, or a queue pair.
func (l *lane) nextLocked() (h *holder, q *QP) {
	t := l.first
	if l.first = t.next; l.first == nil {
		l.last = nil
	}
	t.queued = false
	if h = t.paused; h != nil {
		t.paused, h.next = h.next, nil
	} else {
		q = t.head
		if t.head = q.poolNext; t.head == nil {
			t.tail = nil
		}
		q.poolNext, q.poolQueued = nil, false
	}
	if !t.empty() {
		l.queueLocked(t)
	}
	return h, q
}

// feedLocked gives out what places there are.
func (l *lane) feedLocked() {
	p := l.p
	for l.first != nil && l.roomLocked() && !p.stop {
		h, q := l.nextLocked()
		if h != nil {
			l.holdLocked(h)
			h.turn <- struct{}{}
			continue
		}
		var w *worker
		if n := len(l.idle); n > 0 {
			w = l.idle[n-1]
			l.idle = l.idle[:n-1]
		} else {
			w = &worker{work: make(chan *QP, 1)}
			p.wg.Add(1)
			go l.run(w)
		}
		l.holdLocked(&w.holder)
		w.work <- q
	}
	if l.first != nil && !p.watched && !p.stop {
		p.watched = true
		p.wg.Add(1)
		go p.watch()
	}
}

func (l *lane) roomLocked() bool {
	return len(l.holders)-l.stuck < l.limit && len(l.holders) < maxStuck
}

func (l *lane) holdLocked(h *holder) {
	h.lane, h.i, h.stuck = l, len(l.holders), false
	h.seen = h.beats.Load() - 1 // a whole tick at least
	l.holders = append(l.holders, h)
}

func (l *lane) dropLocked(h *holder) {
	last := len(l.holders) - 1
	l.holders[h.i] = l.holders[last]
	l.holders[h.i].i = h.i
	l.holders[last] = nil
	l.holders = l.holders[:last]
	if h.stuck {
		l.stuck--
	}
	h.lane = nil
}

// enter takes a place for its caller; false when there is none, or others wait.
func (l *lane) enter(h *holder) bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	if l.first != nil || !l.roomLocked() {
		return false
	}
	l.holdLocked(h)
	return true
}

// leave gives back what enter took.
func (l *lane) leave(h *holder) {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.dropLocked(h)
	l.feedLocked()
}

// pause lets other parties have h's place, if one waits, and returns when h has one
// again. Only a worker may wait so, between two chunks.
func (l *lane) pause(h *holder, p *party) {
	l.p.mu.Lock()
	t := &p.turns[l.kind]
	if l.p.stop || l.first == nil || l.first == t && t.next == nil {
		l.p.mu.Unlock()
		return
	}
	if h.turn == nil {
		h.turn = make(chan struct{}, 1)
	}
	l.dropLocked(h)
	h.next, t.paused = t.paused, h
	l.queueLocked(t)
	l.feedLocked()
	l.p.mu.Unlock()
	<-h.turn
}

// run is a worker's life.
func (l *lane) run(w *worker) {
	p := l.p
	defer p.wg.Done()
	for {
		q := <-w.work
		if q == nil {
			return
		}
		q.run(&w.holder)
		p.mu.Lock()
		l.dropLocked(&w.holder)
		l.idle = append(l.idle, w)
		l.feedLocked()
		n := len(l.idle)
		if mine := n > 0 && l.idle[n-1] == w; mine && (p.stop || n > idleWorkers) {
			l.idle = l.idle[:n-1]
			p.mu.Unlock()
			return
		}
		p.mu.Unlock()
	}
}

// watch looks for holders that do not move, as long as a queue waits for a place.
func (p *pool) watch() {
	defer p.wg.Done()
	for {
		time.Sleep(watchTick)
		p.mu.Lock()
		if p.stop || p.few.first == nil && p.bulk.first == nil {
			p.watched = false
			p.mu.Unlock()
			return
		}
		p.few.watchLocked()
		p.bulk.watchLocked()
		p.mu.Unlock()
	}
}

func (l *lane) watchLocked() {
	l.stuck = 0
	for _, h := range l.holders {
		now := h.beats.Load()
		h.stuck, h.seen = now == h.seen, now
		if h.stuck {
			l.stuck++
		}
	}
	l.feedLocked()
}

// close stops the workers. One that is stuck in a client's memory is not waited
// for; it ends when the copy does.
func (p *pool) close() {
	p.mu.Lock()
	p.stop = true
	for _, l := range []*lane{&p.few, &p.bulk} {
		for l.first != nil {
			if h, _ := l.nextLocked(); h != nil {
				l.holdLocked(h)
				h.turn <- struct{}{}
			}
		}
		for _, w := range l.idle {
			w.work <- nil
		}
		l.idle = nil
	}
	p.mu.Unlock()
	done := make(chan struct{})
	go func() { p.wg.Wait(); close(done) }()
	waitUntil(func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
}
