package main

import "math/rand/v2"

// linkKind is the type of a link's queue pairs.
type linkKind uint8

const (
	linkRC linkKind = iota
	linkSRQ
	linkUC
	linkUD
)

func (k linkKind) String() string {
	return [...]string{"rc", "srq", "uc", "ud"}[k]
}

// srqQPs share one receive queue.
const srqQPs = 2

// qps is how many queue pairs an end of the link has.
func (k linkKind) qps() int {
	if k == linkSRQ {
		return srqQPs
	}
	return 1
}

// opKind is what a round does.
type opKind uint8

const (
	opSend opKind = iota
	opSendImm
	opWrite
	opWriteImm
	opRead
	opAtomic
	opBye // no round: the connection ends
)

func (o opKind) String() string {
	return [...]string{"send", "send with immediate", "write", "write with immediate", "read", "atomic", "bye"}[o]
}

// receives: the target's receive queue is used.
func (o opKind) receives() bool { return o == opSend || o == opSendImm || o == opWriteImm }

// opsOf are the operations of each kind (IBTA 1.4 table 50, and what has a place
// in a shared receive queue).
var opsOf = map[linkKind][]opKind{
	linkRC:  {opSend, opSendImm, opWrite, opWriteImm, opRead, opAtomic},
	linkSRQ: {opSend, opSendImm},
	linkUC:  {opSend, opSendImm, opWrite, opWriteImm},
	linkUD:  {opSend, opSendImm},
}

const (
	// depth is the most work requests of one round.
	depth = 4
	// maxMessage is what the engine copies in one step, and a byte.
	maxMessage = 64<<10 + 1
	// maxDatagram is the port's MTU.
	maxDatagram = 4096
	// maxOff moves an item about in its slot, so that alignments differ.
	maxOff = 64
	// slotLen holds the largest item at the largest offset, in whole pages.
	slotLen = 68 << 10
	// udHeader is the room in front of a datagram.
	udHeader = 40
	// srqHeader is how a receiver tells which item has arrived.
	srqHeader = 8
	// atomicLen is what an atomic reads back.
	atomicLen = 8
)

// edges are sizes about which something changes: words, MTUs, pages, chunks.
var edges = []int{0, 1, 7, 8, 64, 255, 1023, 1024, 1025, 2047, 2049, 3073, 4095, 4096, 4097, 8193, 65535, 65536, maxMessage}

// spec is what an end tells the other of a round; all else follows from it.
type spec struct {
	Op       opKind
	DialerTo bool // the dialling end is the active one
	Seed     uint64
	Flush    bool // opBye: end through the error state with receives posted
	Mess     bool // opBye: destroy in the midst of traffic
}

// newSpec draws one.
func newSpec(k linkKind, seed uint64) spec {
	r := rand.New(rand.NewPCG(seed, 1))
	ops := opsOf[k]
	return spec{Op: ops[r.IntN(len(ops))], DialerTo: r.IntN(2) == 0, Seed: mix(seed)}
}

// item is one work request of a round.
type item struct {
	key      uint64 // of its pattern
	size     int
	off      int // in its slot
	head     int // what the fabric puts in front
	split    int // bytes in the first of two scatter elements; 0: one element
	qp       int
	signaled bool
	imm      uint32
	// Atomics.
	cas   bool
	match bool   // the compare is what the cell holds
	add   uint64 // or what is swapped in
}

// room is what the item takes of a slot.
func (it item) room() int { return it.head + it.size }

// plan is a round's items. Both ends make the same.
func plan(k linkKind, sp spec) []item {
	r := rand.New(rand.NewPCG(sp.Seed, 2))
	items := make([]item, 1+r.IntN(depth))
	for i := range items {
		it := item{key: r.Uint64(), off: r.IntN(maxOff), imm: r.Uint32(), signaled: r.IntN(2) == 0}
		it.size = size(r)
		switch {
		case sp.Op == opAtomic:
			it.size, it.off = atomicLen, it.off&^7
			it.cas, it.match, it.add = r.IntN(2) == 0, r.IntN(2) == 0, r.Uint64()
			it.signaled = true // each has an answer to check
			if i > 0 {
				it.off = items[0].off // one cell for all
			}
		case k == linkUD:
			it.size, it.head = min(it.size, maxDatagram), udHeader
		case k == linkSRQ:
			it.size, it.off, it.qp, it.signaled = max(it.size, srqHeader), 0, r.IntN(srqQPs), true
		case sp.Op == opRead || sp.Op == opWrite:
			it.size = max(it.size, 1)
		}
		if it.size > 1 && sp.Op != opAtomic && r.IntN(2) == 0 {
			it.split = 1 + r.IntN(it.size-1)
		}
		items[i] = it
	}
	items[len(items)-1].signaled = true
	return items
}

// size is mostly small: large ones take the most time and find the least.
func size(r *rand.Rand) int {
	switch n := r.IntN(8); {
	case n == 0:
		return edges[r.IntN(len(edges))]
	case n < 3:
		return edges[r.IntN(len(edges)-3)]
	default:
		return 1 + r.IntN(6000)
	}
}
