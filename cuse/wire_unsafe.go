package cuse

import "unsafe"

// load copies a wire struct off the front of b, and says whether b held one. A
// copy, because b may be unaligned.
func load[T any](dst *T, b []byte) bool {
	n := int(unsafe.Sizeof(*dst))
	return copy(unsafe.Slice((*byte)(unsafe.Pointer(dst)), n), b) == n
}

// bytesOf views a wire struct as bytes. Callers declare it with var and set
// fields one by one: that zeroes the padding, which a composite literal need not.
func bytesOf[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), int(unsafe.Sizeof(*p)))
}
