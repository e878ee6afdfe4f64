package ether

import (
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// clock is the clock that netstack is given: the usual one, but its timers do
// nothing after close, and close waits for those that run. netstack's own Wait does
// not know of them.
type clock struct {
	tcpip.Clock
	mu     sync.Mutex
	closed bool
	wg     sync.WaitGroup
}

func newClock() *clock { return &clock{Clock: tcpip.NewStdClock()} }

// AfterFunc implements tcpip.Clock. There is no timer of no time at all: in a test
// with a clock of its own (testing/synctest) the runtime runs such a one on its
// caller's thread, several at once, which the race detector does not bear.
func (c *clock) AfterFunc(d time.Duration, f func()) tcpip.Timer {
	return c.Clock.AfterFunc(max(d, 1), func() {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return
		}
		c.wg.Add(1)
		c.mu.Unlock()
		defer c.wg.Done()
		f()
	})
}

// close ends all timers. Not from one of them.
func (c *clock) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.wg.Wait()
}
