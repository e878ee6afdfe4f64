package ring

import (
	"runtime"
	"time"
)

const (
	// spinMax is the longest look at a ring before its reader sleeps: several times
	// what an interrupt and the wake-up of a thread take in a guest, which is what a
	// look can save.
	spinMax = 50 * time.Microsecond
	// spinMin: below this one look is all there is time for.
	spinMin = 4 * time.Microsecond
	// spinFactor times the usual gap is worth waiting for.
	spinFactor = 3
	// spinHot sleeps in a row must have been shorter than spinNear times spinMax,
	// wake-up included, before a look is tried.
	spinHot  = 4
	spinNear = 6
	// Looks that fail are not tried again for spinBack sleeps, then twice as many,
	// up to spinBackMax.
	spinBack    = 16
	spinBackMax = 4096
	// spinWins in a row forgive earlier failures.
	spinWins = 64
)

// Spinner decides how long to look for the next frame before sleeping: briefly
// while they come close upon each other, not at all when they do not. It belongs to
// the one goroutine at a time that would sleep. The zero value does not spin yet.
type Spinner struct {
	budget time.Duration // 0: sleep at once
	gap    time.Duration // usual wait, from looks that succeeded
	fails  int           // in a row
	wins   int           // in a row
	near   int           // short sleeps in a row
	hold   int           // sleeps to sit out
	back   int           // next hold
}

// alone: on one processor nothing comes while we look.
var alone = runtime.NumCPU() < 2

// Budget is how long to look before sleeping; 0 is not at all.
func (p *Spinner) Budget() time.Duration { return p.budget }

// Caught says that a look found a frame after d.
func (p *Spinner) Caught(d time.Duration) {
	p.fails = 0
	if p.wins++; p.wins >= spinWins {
		p.wins, p.back = 0, spinBack
	}
	p.gap += (d - p.gap) / 8
	p.budget = min(max(p.gap*spinFactor, spinMin), spinMax)
}

// Missed says that a look took its budget and found nothing.
func (p *Spinner) Missed() {
	p.wins = 0
	if p.fails++; p.fails < 2 {
		p.budget = spinMax // once can be chance
		return
	}
	p.fails, p.near, p.budget = 0, 0, 0
	p.hold = max(p.back, spinBack)
	p.back = min(p.hold*2, spinBackMax)
}

// Slept says that a sleep, with any look before it, took d.
func (p *Spinner) Slept(d time.Duration) {
	if d > spinNear*spinMax || alone {
		p.near = 0
	} else {
		p.near++
	}
	if p.hold > 0 {
		p.hold--
		return
	}
	if p.budget == 0 && p.near >= spinHot {
		p.budget, p.gap = spinMax, spinMax/spinFactor
	}
}
