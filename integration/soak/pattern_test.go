package main

import (
	"strings"
	"testing"
)

// What is written is found right, and any one wrong byte is found.
func TestPattern(t *testing.T) {
	for _, n := range []int{0, 1, 7, 8, 9, 63, 4097} {
		b := make([]byte, n)
		fill(b, 42)
		if err := check(b, 42); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		for i := 0; i < n; i += max(1, n/50) {
			b[i] ^= 1
			if check(b, 42) == nil {
				t.Errorf("%d bytes: a wrong byte %d passes", n, i)
			}
			b[i] ^= 1
		}
		if n > 0 && check(b, 43) == nil {
			t.Errorf("%d bytes: another pattern passes", n)
		}
		wipe(b)
		if err := checkBlank(b); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		if n > 0 {
			b[n-1] = 0
			if checkBlank(b) == nil {
				t.Errorf("%d bytes: a touched byte passes", n)
			}
		}
	}
}

// Both ends plan the same round from its seed, and every item fits.
func TestPlan(t *testing.T) {
	for _, k := range []linkKind{linkRC, linkSRQ, linkUC, linkUD} {
		seen := map[opKind]bool{}
		for seed := range uint64(2000) {
			sp := newSpec(k, seed)
			seen[sp.Op] = true
			a, b := plan(k, sp), plan(k, sp)
			if len(a) == 0 || len(a) > depth {
				t.Fatalf("%v, seed %d: %d items", k, seed, len(a))
			}
			for i := range a {
				if a[i] != b[i] {
					t.Fatalf("%v, seed %d: two plans: %+v, %+v", k, seed, a[i], b[i])
				}
				if a[i].off+a[i].room() > slotLen || k == linkUD && a[i].size > maxDatagram {
					t.Errorf("%v, seed %d: an item of %d bytes at %d", k, seed, a[i].size, a[i].off)
				}
			}
			if !a[len(a)-1].signaled {
				t.Errorf("%v, seed %d: nothing tells of the round's end", k, seed)
			}
		}
		if len(seen) != len(opsOf[k]) {
			t.Errorf("%v: %d of %d operations in 2000 rounds", k, len(seen), len(opsOf[k]))
		}
	}
}

func TestKinds(t *testing.T) {
	n := 0
	for _, k := range processLinks {
		n += k.qps()
		if strings.Contains(k.String(), "?") {
			t.Errorf("kind %d has no name", k)
		}
	}
	if n*2*pairs != wantQPs {
		t.Errorf("%d queue pairs, want %d", n*2*pairs, wantQPs)
	}
}
