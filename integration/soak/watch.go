package main

import (
	"fmt"
	"slices"
	"time"
)

const (
	// maxWarm is when the daemon has its size: the collector's pace, pools and
	// rings have then seen the worst of the load. A short run is warm at half.
	maxWarm = 2 * time.Minute
	// rssGrowth is what resident memory may grow by after that. What a leak of
	// one small object per connection would add in ten minutes is some 10 MiB;
	// the collector, which sets its next goal at twice the live heap, and the
	// stacks of threads swing by less than half of this.
	rssGrowth = 16 << 10 // KiB
	// threadSlack are threads that the Go runtime may have made meanwhile, of
	// which it never gives one back: one for each engine worker in a copy at once
	// (maxWorkers of package soft).
	threadSlack = 64
	// goroutineSlack are those that wait for the next request or queue: of the
	// engine's and the sessions' workers a few stay when there is nothing to do,
	// and how many is chance. A leak comes with every connection or kill, of which
	// a run of ten minutes has thousands and hundreds.
	goroutineSlack = 8
	// restTick is between two looks at a daemon that should come to rest.
	restTick = 100 * time.Millisecond
)

// sample is the daemon at rest.
type sample struct {
	at time.Duration // since the start
	usage
}

// watch is what the daemon had at each rest.
type watch struct {
	d       *daemon
	warm    time.Duration
	samples []sample
}

// rest waits until the daemon has, with all clients gone, what it had at the
// first rest.
func (w *watch) rest(at time.Duration) error {
	for limit := time.Now().Add(patience); ; time.Sleep(restTick) {
		u, err := w.d.usage()
		if err != nil {
			return err
		}
		if why := w.restless(u); why == "" {
			w.samples = append(w.samples, sample{at, u})
			fmt.Printf("%4.0f s: %v\n", at.Seconds(), u)
			return nil
		} else if time.Now().After(limit) {
			return fmt.Errorf("%v after the clients' end the daemon has %v: %s", patience, u, why)
		}
	}
}

// restless says what the daemon has too much of.
func (w *watch) restless(u usage) string {
	if u.contexts != 0 || u.pinned != 0 {
		return "contexts"
	}
	if len(w.samples) == 0 {
		return ""
	}
	first := w.samples[0]
	switch {
	case u.fds > first.fds:
		return fmt.Sprintf("%d descriptors at the first rest", first.fds)
	case u.goroutines > first.goroutines+goroutineSlack:
		return fmt.Sprintf("%d goroutines at the first rest", first.goroutines)
	}
	return ""
}

// flat says that memory and threads have not grown since the daemon was warm.
func (w *watch) flat() error {
	i := slices.IndexFunc(w.samples, func(s sample) bool { return s.at >= w.warm })
	if i < 0 || i == len(w.samples)-1 {
		return fmt.Errorf("too short: %d rests, none after one at %v", len(w.samples), w.warm)
	}
	base := w.samples[i]
	for _, s := range w.samples[i+1:] {
		if s.rssKiB > base.rssKiB+rssGrowth {
			return fmt.Errorf("RSS was %d KiB at %v and is %d KiB at %v", base.rssKiB, base.at, s.rssKiB, s.at)
		}
		if s.threads > base.threads+threadSlack {
			return fmt.Errorf("%d threads at %v, %d at %v", base.threads, base.at, s.threads, s.at)
		}
	}
	return nil
}
