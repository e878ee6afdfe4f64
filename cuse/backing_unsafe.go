package cuse

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// backingOpen is ioctl(FUSE_DEV_IOC_BACKING_OPEN), which returns the id.
func (c *Channel) backingOpen(fd int) (int32, unix.Errno) {
	if !c.acquire() {
		return 0, unix.ENODEV
	}
	defer c.release()
	var m abi.FuseBackingMap
	m.Fd = int32(fd)
	id, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), abi.FuseDevIocBackingOpen, uintptr(unsafe.Pointer(&m)))
	return int32(id), errno
}

// backingClose is ioctl(FUSE_DEV_IOC_BACKING_CLOSE).
func (c *Channel) backingClose(id int32) unix.Errno {
	if !c.acquire() {
		return 0 // the kernel let go of all ids when the channel was closed
	}
	defer c.release()
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), abi.FuseDevIocBackingClose, uintptr(unsafe.Pointer(&id)))
	return errno
}
