package dispatch_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

// A poll that waits is answered by whoever completes. Its client's memory never
// answers: who must not linger comes back at once, of those who may only a few
// stay, and all that is held is bounded.
func TestRow35WakeIntoStuckMemory(t *testing.T) {
	for _, c := range []struct {
		name        string
		linger      bool
		polls       int
		back, stuck int // Wakes that return, writes that hang
	}{
		{"event goroutine", false, 40, 40, 32},
		{"end of a post", true, 40, 38, 32},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newRig(t)
			cl := g.client(100)
			cl.context()
			var cqs []uint32
			for range c.polls {
				cqs = append(cqs, cl.cq(-1))
			}
			release := make(chan struct{})
			var stuck atomic.Int32
			hang := func() { stuck.Add(1); <-release }
			back := make(chan struct{}, c.polls)
			// Called when the poll has been told "none" and waits.
			g.hca.await = func(w hca.Waiter) bool {
				g.stick.Store(&hang)
				seen := make(chan struct{})
				go func() {
					close(seen)
					w.Wake(c.linger)
					back <- struct{}{}
				}()
				<-seen
				return true
			}
			answers := make(chan answer, c.polls)
			for _, cq := range cqs {
				// One at a time: the next one's "none" must not hang.
				g.stick.Store(nil)
				r := newRequest(100)
				cl.h.Write(r, pack(abi.CmdPollCQ, 56, raw(abi.PollCQ{Response: resp, CQHandle: cq, NE: 1})))
				go func() { answers <- <-r.ch }()
			}
			for range c.back {
				select {
				case <-back:
				case <-time.After(10 * time.Second):
					t.Fatalf("a Wake hangs; %d writes do", stuck.Load())
				}
			}
			if n := int(stuck.Load()); n > c.stuck {
				t.Errorf("%d goroutines hang, want at most %d", n, c.stuck)
			}
			close(release)
			for range c.polls {
				if a := <-answers; a.errno != 0 {
					t.Errorf("poll answered %v", a.errno)
				}
			}
			for range c.polls - c.back {
				<-back
			}
			g.stick.Store(nil)
			cl.h.Release()
			g.empty()
		})
	}
}
