package e1000e

import (
	"sync/atomic"
	"unsafe"
)

// descWord is word 0 (address) or 1 (the rest) of the i-th descriptor in DMA memory,
// which is page aligned. It panics if there is none. The hardware is little endian, as
// are the machines that this runs on.
func descWord(mem []byte, i, word int) *uint64 {
	off := i*descSize + word*8
	return (*uint64)(unsafe.Pointer(unsafe.SliceData(mem[off : off+8])))
}

func loadWord(mem []byte, i, word int) uint64 {
	return atomic.LoadUint64(descWord(mem, i, word))
}

func storeWord(mem []byte, i, word int, v uint64) {
	atomic.StoreUint64(descWord(mem, i, word), v)
}
