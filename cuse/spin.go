package cuse

import (
	"sync"
	"time"
)

const (
	// spinWakes is how long a reader may look for the next request before it
	// sleeps, in wake-ups as this machine makes them (wakeCost): the client has to
	// be woken and to run before its next request comes, and what is saved is our
	// own wake-up.
	spinWakes = 8
	// spinMost and spinLeast bound it: on no machine is more worth a processor's
	// time, or less worth a try.
	spinMost  = 500 * time.Microsecond
	spinLeast = 20 * time.Microsecond
	// spinMin: below this one try is all there is time for.
	spinMin = 4 * time.Microsecond
	// spinFactor times the usual gap is worth waiting for.
	spinFactor = 3
	// spinHot sleeps in a row must have been short before spinning is tried: a
	// request that comes within spinNear times spinMax of falling asleep, wake-up
	// included, would perhaps have been caught.
	spinHot  = 4
	spinNear = 6
	// Spinning that fails is not tried again for spinBack sleeps, then twice as
	// many, up to spinBackMax: with as many busy threads as processors it only
	// takes time from the client.
	spinBack    = 16
	spinBackMax = 4096
	// spinWins in a row forgive earlier failures.
	spinWins = 64
)

// spinMax is measured once, when the first session starts to serve.
var spinMax = sync.OnceValue(func() time.Duration {
	return min(max(spinWakes*wakeCost(), spinLeast), spinMost)
})

// spinner decides how long to look for a request before sleeping. It belongs to
// the one reader that would otherwise sleep.
type spinner struct {
	off    bool          // one processor: only the client can make a request come
	max    time.Duration // spinMax's answer
	budget time.Duration // 0: sleep at once
	gap    time.Duration // usual wait, from spins that succeeded
	fails  int           // in a row
	wins   int           // in a row
	near   int           // short sleeps in a row
	hold   int           // sleeps to sit out
	back   int           // next hold
}

// caught: the spin found a request after d.
func (p *spinner) caught(d time.Duration) {
	p.fails = 0
	if p.wins++; p.wins >= spinWins {
		p.wins, p.back = 0, spinBack
	}
	p.gap += (d - p.gap) / 8
	p.budget = min(max(p.gap*spinFactor, spinMin), p.max)
}

// missed: the spin ran out.
func (p *spinner) missed() {
	p.wins = 0
	if p.fails++; p.fails < 2 {
		p.budget = p.max // once can be chance
		return
	}
	p.fails, p.near, p.budget = 0, 0, 0
	p.hold = max(p.back, spinBack)
	p.back = min(p.hold*2, spinBackMax)
}

// slept: a sleep, and any spin before it, took d.
func (p *spinner) slept(d time.Duration) {
	if d > spinNear*p.max || p.off {
		p.near = 0
	} else {
		p.near++
	}
	if p.hold > 0 {
		p.hold--
		return
	}
	if p.budget == 0 && p.near >= spinHot {
		p.budget, p.gap = p.max, p.max/spinFactor
	}
}
