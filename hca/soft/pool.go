package soft

import "sync"

// pool runs queue pairs that nobody's goroutine is there for: woken by another
// client, by a timer, or left over from a Run that had done its share.
type pool struct {
	// mu guards the rest. Leaf.
	mu         sync.Mutex
	cond       *sync.Cond
	head, tail *QP // linked by QP.poolNext
	idle, n    int
	stop       bool
	wg         sync.WaitGroup
}

func (p *pool) start() { p.cond = sync.NewCond(&p.mu) }

// sched queues q for a Run. A queue pair is queued once at a time.
func (p *pool) sched(q *QP) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stop || q.poolQueued {
		return
	}
	q.poolQueued = true
	if p.tail == nil {
		p.head = q
	} else {
		p.tail.poolNext = q
	}
	p.tail = q
	if p.idle > 0 {
		p.cond.Signal()
		return
	}
	if p.n < maxWorkers {
		p.n++
		p.wg.Add(1)
		go p.worker()
	}
}

func (p *pool) worker() {
	defer p.wg.Done()
	p.mu.Lock()
	for {
		if p.head != nil && !p.stop {
			q := p.head
			p.head, q.poolNext = q.poolNext, nil
			if p.head == nil {
				p.tail = nil
			}
			q.poolQueued = false
			p.mu.Unlock()
			q.Run()
			p.mu.Lock()
			continue
		}
		if p.stop || p.idle >= idleWorkers {
			p.n--
			p.mu.Unlock()
			return
		}
		p.idle++
		p.cond.Wait()
		p.idle--
	}
}

// close stops the workers. One that is stuck in a client's memory is not waited
// for; it ends when the copy does.
func (p *pool) close() {
	p.mu.Lock()
	p.stop = true
	p.head, p.tail = nil, nil
	p.cond.Broadcast()
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
