package e1000e

import (
	"runtime"
	"time"
)

const (
	// spinMax is how long a leader may look for the next frame before it sleeps: a
	// few wake-ups of a thread, with the interrupt in front of it, on a slow machine.
	spinMax = 100 * time.Microsecond
	spinMin = 4 * time.Microsecond
	// spinFactor times the usual gap is worth waiting for.
	spinFactor = 3
	// spinHot sleeps in a row shorter than spinNear are worth a try: some
	// of their frames would have been caught.
	spinHot  = 4
	spinNear = 6 * spinMax
	// A spin that fails twice is not tried again for spinBack sleeps, then for twice as
	// many, up to spinBackMax: with as many busy threads as processors it is a loss.
	spinBack    = 16
	spinBackMax = 4096
	// spinWins in a row forgive earlier failures.
	spinWins = 64
	// spinLooks between two looks at the clock.
	spinLooks = 16
)

// spinner decides how long to look before sleeping. It is the leader's.
type spinner struct {
	off               bool          // one processor: who sends needs it
	budget            time.Duration // 0: sleep at once
	gap               time.Duration // usual wait, from spins that caught a frame
	fails, wins, near int           // in a row
	hold, back        int           // sleeps to sit out, and next time
}

// spin looks until ready, or stop, or the budget is used up.
func (s *spinner) spin(ready, stop func() bool) bool {
	if s.budget == 0 {
		return false
	}
	start := time.Now()
	for i := 1; ; i++ {
		if ready() {
			s.caught(time.Since(start))
			return true
		}
		if i%spinLooks != 0 {
			continue
		}
		if stop() {
			return false
		}
		if time.Since(start) > s.budget {
			s.missed()
			return false
		}
		runtime.Gosched()
	}
}

func (s *spinner) caught(d time.Duration) {
	s.fails = 0
	if s.wins++; s.wins >= spinWins {
		s.wins, s.back = 0, spinBack
	}
	s.gap += (d - s.gap) / 8
	s.budget = min(max(s.gap*spinFactor, spinMin), spinMax)
}

func (s *spinner) missed() {
	s.wins = 0
	if s.fails++; s.fails < 2 {
		s.budget = spinMax // once can be chance
		return
	}
	s.fails, s.near, s.budget = 0, 0, 0
	s.hold = max(s.back, spinBack)
	s.back = min(s.hold*2, spinBackMax)
}

// slept: a sleep took d.
func (s *spinner) slept(d time.Duration) {
	if d > spinNear || s.off {
		s.near = 0
	} else {
		s.near++
	}
	if s.hold > 0 {
		s.hold--
		return
	}
	if s.budget == 0 && s.near >= spinHot {
		s.budget, s.gap = spinMax, spinMax/spinFactor
	}
}
