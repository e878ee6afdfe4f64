package rxe

import (
	"math/bits"

	"github.com/uverbsd/uverbsd/hca"
)

// EndAll puts a last completion, a fatal error, into every queue of a context's
// memory whose daemon was killed: who polls in memory asks nobody whether there
// still is a daemon. Nothing says where the queues are, so whatever looks like the
// beginning of one is taken for one. That may be a send or receive queue, which
// nobody reads any more, or bytes of the client's, whose own memory it is.
func EndAll(mem []byte) {
	for off := 0; off+headerSize <= len(mem); off += pageSize {
		var q compQueue
		q.mem = mem[off:]
		h := q.header()
		shift, mask := h.Log2ElemSize, h.IndexMask
		slots := uint64(mask) + 1
		if shift < uint32(bits.Len(minElem-1)) || shift > 12 || slots > maxSlots || slots&(slots-1) != 0 || slots < 2 ||
			uint64(headerSize)+slots<<shift > uint64(len(q.mem)) {
			continue
		}
		q.shift, q.mask = shift, mask
		q.prod = q.producer() & mask
		q.Push(&hca.WC{Status: hca.WCFatalErr}, true)
	}
}
