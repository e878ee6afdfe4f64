package e1000e

import "time"

// LoadWord and StoreWord are how both sides reach a descriptor.
var (
	LoadWord  = loadWord
	StoreWord = storeWord
)

// ServiceTick bounds how long a change goes unseen when no interrupt is taken.
const ServiceTick = serviceTick

// SpinTrace runs a spinner over what happens: a positive duration is a sleep, a negative
// one a spin that caught a frame, 0 a spin that missed. It gives the budgets after each.
func SpinTrace(off bool, events ...time.Duration) []time.Duration {
	s := spinner{off: off}
	var out []time.Duration
	for _, e := range events {
		switch {
		case e > 0:
			s.slept(e)
		case e < 0:
			s.caught(-e)
		default:
			s.missed()
		}
		out = append(out, s.budget)
	}
	return out
}

// Stalled is what serve asks each tick.
func Stalled(p *Port) bool { return p.tx.stalled() }
