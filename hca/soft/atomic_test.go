package soft

import (
	"math/rand/v2"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

// addBits adds bit by bit, from the lowest on: what a bit carries goes to the next
// unless it is the highest of its field.
func addBits(a, b, top uint64) uint64 {
	var sum, carry uint64
	for i := range 64 {
		s := a>>i&1 + b>>i&1 + carry
		sum |= s & 1 << i
		carry = s >> 1 &^ (top >> i)
	}
	return sum
}

func TestAddFields(t *testing.T) {
	check := func(a, b, top uint64) {
		if got, want := addFields(a, b, top), addBits(a, b, top); got != want {
			t.Fatalf("%#x + %#x with %#x: %#x, want %#x", a, b, top, got, want)
		}
	}
	// All there is on 5 bits, at the bottom, across the middle and at the top.
	const bits = 5
	for _, at := range []int{0, 30, 64 - bits} {
		for top := range uint64(1 << bits) {
			for a := range uint64(1 << bits) {
				for b := range uint64(1 << bits) {
					check(a<<at, b<<at, top<<at)
				}
			}
		}
	}
	for range 200000 {
		check(rand.Uint64(), rand.Uint64(), rand.Uint64()&rand.Uint64())
	}
}

// TestUpdate: every compare and swap on 3 bits, bit by bit.
func TestUpdate(t *testing.T) {
	const n = 1 << 3
	for _, at := range []int{0, 61} {
		for v := range uint64(n * n * n * n * n) {
			old, cmp, swap, cmask, smask := v%n<<at, v/n%n<<at, v/n/n%n<<at, v/n/n/n%n<<at, v/n/n/n/n<<at
			w := sendSlot{op: hca.OpMaskedAtomicCmpSwap, compareAdd: cmp, swap: swap, compareAddMask: cmask, swapMask: smask}
			want, equal := old, true
			for i := range 64 {
				bit := uint64(1) << i
				if cmask&bit != 0 && old&bit != cmp&bit {
					equal = false
				}
				if smask&bit != 0 {
					want = want&^bit | swap&bit
				}
			}
			if got, store := w.update(old); store != equal || got != want {
				t.Fatalf("%#x, %+v: %#x %v, want %#x %v", old, w, got, store, want, equal)
			}
			// The plain ones are the masked ones with all bits.
			w.op = hca.OpAtomicCmpSwap
			if got, store := w.update(old); got != swap || store != (old == cmp) {
				t.Fatalf("%#x, %+v: %#x %v", old, w, got, store)
			}
			w.op = hca.OpAtomicFetchAdd
			if got, store := w.update(old); got != old+cmp || !store {
				t.Fatalf("%#x, %+v: %#x %v", old, w, got, store)
			}
		}
	}
}
