package rawverbs

import "unsafe"

// Bytes is v's own memory: the structs of package abi have no padding.
func Bytes[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

// SizeOf is the size of a T in bytes.
func SizeOf[T any]() int {
	var v T
	return int(unsafe.Sizeof(v))
}

// Decode copies a T out of b, which may be shorter.
func Decode[T any](b []byte) (v T) {
	copy(Bytes(&v), b)
	return v
}

// Join is the bytes of parts, one after another.
func Join(parts ...[]byte) (b []byte) {
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}
