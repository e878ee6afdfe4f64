package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlIfreq is the one form of interface request that golang.org/x/sys/unix has no function for.
func ioctlIfreq(fd int, request uintptr, req *unix.Ifreq) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(req))); errno != 0 {
		return errno
	}
	return nil
}
