package virtionet

import (
	"encoding/binary"
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// The rings are little endian whatever the host (§1.4).
var swapped = binary.NativeEndian.Uint16([]byte{1, 0}) != 1

func little(v uint32) uint32 {
	if swapped {
		return bits.ReverseBytes32(v)
	}
	return v
}

// load32 and store32 are one access each to an aligned word of memory that the
// device shares, in order with all accesses before and after (sync/atomic is
// sequentially consistent; §2.7.13 needs no more).

func load32(b []byte, off int) uint32 {
	return little(atomic.LoadUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(b[off : off+4])))))
}

func store32(b []byte, off int, v uint32) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(b[off:off+4]))), little(v))
}
