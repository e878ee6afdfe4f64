package dispatch

import "unsafe"

// The ABI is in host byte order and its structs are laid out as the compiler
// lays out those of package abi, so decoding is a copy.

// bytesOf is the memory of *p, which must be a struct of package abi: no
// pointers, no implicit padding.
func bytesOf[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}

// at views 8-byte aligned scratch memory as a *T.
func at[T any](scratch []uint64) *T {
	var z T
	if unsafe.Sizeof(z) > uintptr(len(scratch))*8 {
		panic("dispatch: scratch too small for a request or response")
	}
	return (*T)(unsafe.Pointer(unsafe.SliceData(scratch)))
}

// sizeOf is the size of a T in bytes.
func sizeOf[T any]() int {
	var z T
	return int(unsafe.Sizeof(z))
}
