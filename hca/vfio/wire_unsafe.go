package vfio

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// load copies a wire struct off the front of b, and says whether b held one.
func load[T any](dst *T, b []byte) bool {
	n := int(unsafe.Sizeof(*dst))
	return copy(unsafe.Slice((*byte)(unsafe.Pointer(dst)), n), b) == n
}

// bytesOf views a wire struct, which has no padding, as bytes.
func bytesOf[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), int(unsafe.Sizeof(*p)))
}

// addressOf is where b lies. For mapped memory only: the collector moves none of it.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func mmap(fd int, off int64, n, prot, flags int) ([]byte, error) {
	p, err := unix.MmapPtr(fd, off, nil, uintptr(n), prot, flags)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), n), nil
}

func (linux) ioctl(fd int, req uint, arg []byte) (int, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(unsafe.Pointer(unsafe.SliceData(arg))))
		if errno == 0 {
			return int(r), nil
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
}

func (linux) call(fd int, req uint, arg int) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg))
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}
