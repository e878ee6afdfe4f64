package vfio

import (
	"cmp"
	"slices"
)

const (
	// minIOVA is the lowest I/O address given out: 0 is what some hardware takes for
	// "none", and the first MiB is where old hardware has addresses of its own.
	minIOVA = 1 << 20
	// The message window of x86, to which no memory can be mapped (Intel SDM 3A §12.11.1),
	// and the least width of VT-d's addresses: what is taken for valid where the kernel
	// does not tell (before Linux 5.4).
	msiStart, msiEnd = 0xfee00000, 0xfef00000
	narrowIOMMU      = 1 << 39
	// maxIOVA is the end of all addresses given out, so that sums do not wrap.
	maxIOVA = 1 << 62
)

// span is the I/O addresses from start to before end.
type span struct{ start, end uint64 }

// iovaSpace are the free I/O addresses of a container: in order, none touching another.
// The lowest that fit are given out, so that they suit whatever number of bits IOMMU
// and function have.
type iovaSpace struct{ free []span }

// defaultSpans are the valid addresses where the kernel tells none.
var defaultSpans = []span{{0, msiStart}, {msiEnd, narrowIOMMU}}

// newIOVASpace has free what lies in valid, in whole pages.
func newIOVASpace(valid []span, page uint64) *iovaSpace {
	s := &iovaSpace{}
	for _, v := range valid {
		v.start, v.end = max(v.start, minIOVA), min(v.end, maxIOVA)
		v.start, v.end = (v.start+page-1)&^(page-1), v.end&^(page-1)
		if v.start < v.end {
			s.put(v)
		}
	}
	return s
}

// take gives size bytes at a multiple of align, a power of two.
func (s *iovaSpace) take(size, align uint64) (uint64, bool) {
	for i, f := range s.free {
		start := (f.start + align - 1) &^ (align - 1)
		if start >= f.end || f.end-start < size {
			continue
		}
		var rest []span
		for _, r := range []span{{f.start, start}, {start + size, f.end}} {
			if r.start < r.end {
				rest = append(rest, r)
			}
		}
		s.free = slices.Replace(s.free, i, i+1, rest...)
		return start, true
	}
	return 0, false
}

// put makes addresses free; those that are so already stay so.
func (s *iovaSpace) put(n span) {
	i, _ := slices.BinarySearchFunc(s.free, n.start, func(f span, start uint64) int { return cmp.Compare(f.end, start) })
	j := i
	for ; j < len(s.free) && s.free[j].start <= n.end; j++ {
		n.start, n.end = min(n.start, s.free[j].start), max(n.end, s.free[j].end)
	}
	s.free = slices.Replace(s.free, i, j, n)
}
