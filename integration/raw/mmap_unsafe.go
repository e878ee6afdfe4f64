package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmapAt maps size bytes at addr.
func mmapAt(addr uintptr, size int) ([]byte, error) {
	p, err := unix.MmapPtr(-1, 0, unsafe.Add(nil, addr), uintptr(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), size), nil
}

// uffdMissing makes a userfaultfd that nobody answers, over b.
func uffdMissing(b []byte) error {
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if e != 0 {
		return e
	}
	api := struct{ api, features, ioctls uint64 }{api: 0xaa}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, 0xc018aa3f, uintptr(unsafe.Pointer(&api))); e != 0 { // UFFDIO_API
		return e
	}
	reg := struct{ start, len, mode, ioctls uint64 }{uint64(uintptr(unsafe.Pointer(&b[0]))), uint64(len(b)), 1, 0}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, 0xc020aa00, uintptr(unsafe.Pointer(&reg))); e != 0 { // UFFDIO_REGISTER
		return e
	}
	return nil
}
