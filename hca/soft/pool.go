package soft

import (
	"sync"
	"sync/atomic"
	"time"
)

// pool runs queue pairs that nobody's goroutine is there for: woken by another
// client, by a timer, or left over from a Run that had done its share. It has
// two lanes, so that large messages, of which a few keep all processors busy,
// leave room for small ones whoever sends them.
type pool struct {
	// mu guards the rest, and QP.poolNext and poolQueued. Leaf.
	mu        sync.Mutex
	few, bulk lane
	watched   bool // the watcher runs
	stop      bool
	wg        sync.WaitGroup
}

// lane is a queue of queue pairs and those who run them. At most limit of these
// move; one that is stuck in a client's memory does not count, once the watcher
// has seen it.
type lane struct {
	p          *pool
	limit      int
	head, tail *QP // linked by QP.poolNext
	holders    []*holder
	stuck      int // of the holders
	idle       int // workers that wait
	cond       *sync.Cond
}

// holder is a place in a lane: of a worker, or, for the time of a large message,
// of a goroutine that posted it.
type holder struct {
	lane  *lane // nil: holds none
	i     int   // in lane.holders
	stuck bool
	seen  uint32 // the watcher's last look at beats
	beats atomic.Uint32
}

// beat says that h moves.
func (h *holder) beat() {
	if h != nil {
		h.beats.Add(1)
	}
}

func (p *pool) start(bulkLimit int) {
	for l, limit := range map[*lane]int{&p.few: maxWorkers, &p.bulk: bulkLimit} {
		l.p, l.limit, l.cond = p, limit, sync.NewCond(&p.mu)
	}
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
	if l.tail == nil {
		l.head = q
	} else {
		l.tail.poolNext = q
	}
	l.tail = q
	l.feedLocked()
}

// feedLocked gets somebody to the queue, if there is a place.
func (l *lane) feedLocked() {
	p := l.p
	switch {
	case l.head == nil || p.stop:
	case l.idle > 0 && l.roomLocked():
		l.cond.Signal()
	case l.roomLocked():
		h := &holder{}
		l.holdLocked(h)
		p.wg.Add(1)
		go l.work(h)
	case !p.watched:
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
	if l.head != nil || !l.roomLocked() {
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

// work is a worker's life.
func (l *lane) work(h *holder) {
	p := l.p
	defer p.wg.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.stop {
		// Those who were stuck and move again may be too many.
		if q := l.head; q != nil && len(l.holders)-l.stuck <= l.limit {
			l.head, q.poolNext = q.poolNext, nil
			if l.head == nil {
				l.tail = nil
			}
			q.poolQueued = false
			p.mu.Unlock()
			q.run(h)
			h.beat()
			p.mu.Lock()
			if h.stuck {
				h.stuck = false
				l.stuck--
			}
			continue
		}
		l.dropLocked(h)
		if l.idle >= idleWorkers {
			return
		}
		l.idle++
		for !p.stop && (l.head == nil || !l.roomLocked()) {
			l.cond.Wait()
		}
		l.idle--
		l.holdLocked(h)
	}
	l.dropLocked(h)
}

// watch looks for holders that do not move, as long as a queue waits for a place.
func (p *pool) watch() {
	defer p.wg.Done()
	for {
		time.Sleep(watchTick)
		p.mu.Lock()
		if p.stop || p.few.head == nil && p.bulk.head == nil {
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
	for _, h := range l.holders {
		now := h.beats.Load()
		if now == h.seen && !h.stuck {
			h.stuck = true
			l.stuck++
		}
		h.seen = now
	}
	l.feedLocked()
}

// close stops the workers. One that is stuck in a client's memory is not waited
// for; it ends when the copy does.
func (p *pool) close() {
	p.mu.Lock()
	p.stop = true
	for _, l := range []*lane{&p.few, &p.bulk} {
		l.head, l.tail = nil, nil
		l.cond.Broadcast()
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
