//go:build linux

package caller

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// procmapQuery is struct procmap_query, include/uapi/linux/fs.h, Linux 6.11.
type procmapQuery struct {
	Size        uint64
	QueryFlags  uint64
	QueryAddr   uint64
	VMAStart    uint64
	VMAEnd      uint64
	VMAFlags    uint64
	VMAPageSize uint64
	VMAOffset   uint64
	Inode       uint64
	DevMajor    uint32
	DevMinor    uint32
	VMANameSize uint32
	BuildIDSize uint32
	VMANameAddr uint64
	BuildIDAddr uint64
}

var _ [104]byte = [unsafe.Sizeof(procmapQuery{})]byte{}

const (
	// PROCMAP_QUERY is _IOWR(PROCFS_IOCTL_MAGIC 'f', 17, struct procmap_query).
	ioctlProcmapQuery = 3<<30 | 104<<16 | 'f'<<8 | 17

	// enum procmap_query_flags
	procmapQueryVMAReadable = 0x01
	procmapQueryVMAWritable = 0x02
)

// queryVMAEnd returns the end of the mapping that covers addr and has the permissions asked for. ENOENT when there is
// none, ENOTTY before Linux 6.11, ESRCH when the address space is gone.
func queryVMAEnd(maps int, addr, need uint64) (uint64, unix.Errno) {
	q := procmapQuery{Size: uint64(unsafe.Sizeof(procmapQuery{})), QueryFlags: need, QueryAddr: addr}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(maps), ioctlProcmapQuery, uintptr(unsafe.Pointer(&q)))
	return q.VMAEnd, errno
}
