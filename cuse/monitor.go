package cuse

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// tickBusy is between two looks at a reader that is in a handler: one that is
	// in the same handler at both is taken for stuck.
	tickBusy = time.Millisecond
	// tickIdle is between two looks when no handler runs.
	tickIdle = 4 * time.Millisecond
	// tickKill is between two looks at interrupted requests, and how long a
	// handler is given to notice by itself.
	tickKill = 50 * time.Millisecond
)

// wakeMonitor is called when a handler is about to run.
func (s *Session) wakeMonitor() {
	if !s.awake.Load() && s.awake.CompareAndSwap(false, true) {
		s.kick <- struct{}{} // capacity 1, and the monitor takes it before it sleeps again
	}
}

// monitor watches over the readers while there is traffic, and sleeps otherwise.
func (s *Session) monitor() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var handled uint64
	for {
		select {
		case <-s.kick:
		case <-s.stop:
			return
		}
		for d := tickBusy; d > 0; {
			timer.Reset(d)
			select {
			case <-timer.C:
			case <-s.stop:
				return
			}
			d, handled = s.tick(handled)
			if d > 0 {
				continue
			}
			// Asleep. A request that came before it could see that is looked for.
			s.awake.Store(false)
			s.mu.Lock()
			more := s.nhandled != handled || s.ninterrupted > 0
			s.mu.Unlock()
			if more && s.awake.CompareAndSwap(false, true) {
				d = tickBusy
			}
		}
	}
}

// tick looks once, and says when to look again: 0 for not before a request.
func (s *Session) tick(handled uint64) (time.Duration, uint64) {
	s.mu.Lock()
	d := time.Duration(0)
	if s.nhandled != handled {
		handled = s.nhandled
		d = tickIdle
	}
	for i := 0; i < len(s.active); i++ {
		w := s.active[i]
		seq := w.seq.Load()
		if seq%2 == 0 {
			continue
		}
		if seq == w.seen {
			s.detachLocked(w) // changes s.active; what it moves is looked at next time
		}
		w.seen = seq
		d = tickBusy
	}
	var check []Request
	if s.ninterrupted > 0 {
		if d == 0 {
			d = tickKill
		}
		if now := time.Now(); now.Sub(s.killCheck) >= tickKill {
			s.killCheck = now
			check = s.outstandingLocked(func(st *request) bool {
				return !st.interrupted.IsZero() && now.Sub(st.interrupted) >= tickKill
			})
		}
	}
	s.mu.Unlock()
	for _, r := range check {
		if r.tid != 0 && s.cfg.Killed(r.tid) {
			s.abandon(r, unix.EINTR)
		}
	}
	return d, handled
}
