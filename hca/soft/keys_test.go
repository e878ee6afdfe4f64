package soft

import (
	"math/rand/v2"
	"testing"
)

// TestKeyPerm: every place has a key and every key one place, 0 left out.
func TestKeyPerm(t *testing.T) {
	var p keyPerm
	for range 3 {
		p.init()
		check := func(i uint32) {
			n := p.scramble(i)
			if n == 0 || n > 1<<24-1 || p.index(n) != i {
				t.Fatalf("place %#x: %#x, back at %#x", i, n, p.index(n))
			}
		}
		for i := uint32(1); i < 1<<20; i++ {
			check(i)
		}
		for i := uint32(1<<24 - 1<<16); i < 1<<24; i++ {
			check(i)
		}
		// Those that 0 is about: the place whose number it would be, and the one
		// that the number of place 0 is of.
		if z := p.back(0); z != 0 {
			if p.scramble(z) != p.forward(0) {
				t.Errorf("place %#x has %#x", z, p.scramble(z))
			}
			check(z)
		}
		_ = p.index(0) // a client may ask
	}
}

// TestKeyPermMixes: neighbouring places differ in every bit half of the time.
func TestKeyPermMixes(t *testing.T) {
	var p keyPerm
	p.init()
	const n = 1 << 14
	var flips [24]int
	for i := uint32(1); i <= n; i++ {
		d := p.scramble(i) ^ p.scramble(i+1)
		for b := range flips {
			flips[b] += int(d >> b & 1)
		}
	}
	for b, k := range flips {
		if k < n*45/100 || k > n*55/100 { // 12 standard deviations
			t.Errorf("bit %d changes %d of %d times", b, k, n)
		}
	}
}

func TestRandomBytes(t *testing.T) {
	var r randomBytes
	var seen [256]bool
	for range 1 << 14 {
		prev := r.next()
		b := r.after(prev)
		if b == prev {
			t.Fatalf("%d after itself", b)
		}
		seen[b] = true
	}
	for b, ok := range seen {
		if !ok {
			t.Errorf("%d did not come in 2^14", b)
		}
	}
}

var sink *MR

// BenchmarkLookup finds regions by their keys, in random order.
func BenchmarkLookup(b *testing.B) {
	for _, c := range []struct {
		name string
		n    int
	}{{"1", 1}, {"64", 64}, {"4096", 4096}, {"100000", 100000}} {
		b.Run(c.name, func(b *testing.B) {
			var t mrTable
			t.init(1<<20, 0)
			mem := new(nowhere)
			keys := make([]uint32, c.n)
			for i := range keys {
				m := &MR{mem: mem}
				if err := t.insert(m); err != nil {
					b.Fatal(err)
				}
				keys[i] = m.key
			}
			rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				sink = t.lookup(keys[i])
				if i++; i == len(keys) {
					i = 0
				}
			}
			if sink == nil {
				b.Fatal("not found")
			}
		})
	}
}

type nowhere struct{ _ int }

func (*nowhere) ReadAt([]byte, uint64) error  { return nil }
func (*nowhere) WriteAt([]byte, uint64) error { return nil }
