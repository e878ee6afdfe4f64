package soft_test

import (
	"sync/atomic"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/loop"
)

// TestBubbleDevice runs the suite's cases about time and sleeping.
func TestBubbleDevice(t *testing.T) {
	hcatest.RunInBubble(t, func(t testing.TB) hcatest.Pair {
		f := loop.New(hca.LinkInfiniBand)
		return hcatest.Pair{A: device(t, f, 1), B: device(t, f, 2)}
	})
}

// portEvents tells of each event, and waits to be let go on.
type portEvents struct {
	in, out chan struct{}
	closed  atomic.Bool
	late    atomic.Bool
}

func (p *portEvents) PortEvent(hca.EventType, uint8) {
	if p.closed.Load() {
		p.late.Store(true)
	}
	p.in <- struct{}{}
	<-p.out
}

// Failure class 14: a context that is closed while an event for it is queued
// behind another's is not told any more.
func TestRow14NoPortEventAfterClose(t *testing.T) {
	d := device(t, loop.New(hca.LinkInfiniBand), 1)
	slow := &portEvents{in: make(chan struct{}), out: make(chan struct{})}
	quick := &portEvents{in: make(chan struct{}, 8), out: make(chan struct{})}
	close(quick.out)
	a, err := d.AllocUContext(slow)
	if err != nil {
		t.Fatal(err)
	}
	d.SetPort(false)
	<-slow.in // the only one so far
	b, err := d.AllocUContext(quick)
	if err != nil {
		t.Fatal(err)
	}
	d.SetPort(true) // queued for both
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	quick.closed.Store(true)
	d.SetPort(false) // for the slow one, behind them
	slow.out <- struct{}{}
	for range 2 {
		<-slow.in
		slow.out <- struct{}{}
	}
	if quick.late.Load() {
		t.Error("an event after the close")
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
}
