package main

import (
	"testing"
	"time"
)

// What a daemon at rest may not have, and what may not grow.
func TestWatch(t *testing.T) {
	first := usage{fds: 20, goroutines: 15, threads: 10, rssKiB: 40 << 10}
	for _, c := range []struct {
		name string
		u    usage
		rest bool
	}{
		{"as at first", first, true},
		{"less", usage{fds: 19, goroutines: 14}, true},
		{"a context", usage{contexts: 1, fds: 20, goroutines: 15}, false},
		{"pinned memory", usage{pinned: 4096, fds: 20, goroutines: 15}, false},
		{"a descriptor", usage{fds: 21, goroutines: 15}, false},
		{"idle workers", usage{fds: 20, goroutines: 15 + goroutineSlack}, true},
		{"goroutines", usage{fds: 20, goroutines: 16 + goroutineSlack}, false},
	} {
		w := watch{samples: []sample{{0, first}}}
		if why := w.restless(c.u); (why == "") != c.rest {
			t.Errorf("%s: %q", c.name, why)
		}
	}
	for _, c := range []struct {
		name string
		rss  []int // KiB, one a minute
		flat bool
	}{
		{"warming up", []int{10 << 10, 60 << 10, 70 << 10, 71 << 10, 70 << 10}, true},
		{"growing", []int{10 << 10, 60 << 10, 70 << 10, 71 << 10, 70<<10 + rssGrowth + 1}, false},
		{"a peak", []int{10 << 10, 60 << 10, 70 << 10, 90 << 10, 70 << 10}, false},
		{"too short", []int{10 << 10, 60 << 10, 70 << 10}, false},
	} {
		w := watch{warm: maxWarm}
		for i, rss := range c.rss {
			w.samples = append(w.samples, sample{time.Duration(i) * time.Minute, usage{rssKiB: rss}})
		}
		if err := w.flat(); (err == nil) != c.flat {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
