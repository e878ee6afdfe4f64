package dispatch

import (
	"sync"
	"time"
)

const (
	// sweepTick bounds how long an empty POLL_CQ waits: one to two ticks. Long
	// enough to cover a message's way, so that a client which spins pays one
	// command for it and leaves its CPU to its peer; short enough for one that
	// polls between its own work.
	sweepTick = time.Millisecond
	// sweepIdle ticks without a waiting poll end the sweeping.
	sweepIdle = 20
)

// sweeper ends the waits of polls: one sleep per tick for all of a device, where
// a timer for each would wake a thread of the runtime at every command.
type sweeper struct {
	// mu guards the members below. Leaf.
	mu      sync.Mutex
	young   []parked // since the last tick
	old     []parked // since the one before
	running bool
}

// parked is one wait: seq tells it from later ones of the same poller.
type parked struct {
	p   *poller
	seq uint64
}

func (s *sweeper) add(w parked) {
	s.mu.Lock()
	s.young = append(s.young, w)
	start := !s.running
	s.running = true
	s.mu.Unlock()
	if start {
		go s.run()
	}
}

func (s *sweeper) run() {
	for idle := 0; ; {
		time.Sleep(sweepTick)
		s.mu.Lock()
		due := s.old
		s.old, s.young = s.young, nil
		if len(s.old) > 0 || len(due) > 0 {
			idle = 0
		} else if idle++; idle > sweepIdle {
			s.running = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		for _, w := range due {
			w.p.expire(w.seq)
		}
	}
}
