package e1000e_test

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pages is zeroed memory at a page's border, on the heap, where the race detector sees it.
func pages(size int) []byte {
	const page = 4096
	size = (size + page - 1) &^ (page - 1)
	b := make([]byte, size+page)
	off := -int(uintptr(unsafe.Pointer(&b[0]))) & (page - 1)
	return b[off : off+size : off+size]
}

func eventfd() int {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		panic(err)
	}
	return fd
}

func signal(fd int) {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], 1)
	_, _ = unix.Write(fd, b[:])
}

func closeFD(fd int) { _ = unix.Close(fd) }
