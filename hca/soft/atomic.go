package soft

import "github.com/uverbsd/uverbsd/hca"

func isAtomic(op hca.SendOpcode) bool {
	switch op {
	case hca.OpAtomicCmpSwap, hca.OpAtomicFetchAdd, hca.OpMaskedAtomicCmpSwap, hca.OpMaskedAtomicFetchAdd:
		return true
	}
	return false
}

// usesRdAtomic: requests that the responder answers with more than an
// acknowledgement, and has resources for, of which there are as many as both sides
// have agreed.
func usesRdAtomic(op hca.SendOpcode) bool {
	return op == hca.OpRDMARead || op == hca.OpFlush || op == hca.OpAtomicWrite || isAtomic(op)
}

// update is what an atomic makes of old; store is false if a comparison failed.
//
// The masked ones are the extended atomics that the kernel knows (struct
// ib_atomic_wr, mlx4 and mlx5): compare and swap looks at the bits of one mask and
// changes those of another.
func (w *sendSlot) update(old uint64) (val uint64, store bool) {
	switch w.op {
	case hca.OpAtomicWrite:
		return w.swap, true
	case hca.OpAtomicCmpSwap:
		return w.swap, old == w.compareAdd
	case hca.OpMaskedAtomicCmpSwap:
		return old&^w.swapMask | w.swap&w.swapMask, (old^w.compareAdd)&w.compareAddMask == 0
	case hca.OpMaskedAtomicFetchAdd:
		return addFields(old, w.compareAdd, w.compareAddMask), true
	}
	return old + w.compareAdd, true
}

// addFields adds field by field: top has the highest bit of each field, out of
// which nothing is carried. Bits above the last of them are one more field.
func addFields(a, b, top uint64) uint64 {
	// With the top bits out of the way each sum ends in its own field; then they
	// are added without their carry.
	return (a&^top + b&^top) ^ (a^b)&top
}
