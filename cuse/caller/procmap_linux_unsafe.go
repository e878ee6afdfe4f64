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
	procmapQueryVMAShared   = 0x08
	procmapQueryNextVMA     = 0x10
)

// queryVMAEnd returns the end of the mapping that covers addr and has the permissions asked for. ENOENT when there is
// none, ENOTTY before Linux 6.11, ESRCH when the address space is gone.
func queryVMAEnd(maps int, addr, need uint64) (uint64, unix.Errno) {
	q, errno := query(maps, addr, need)
	return q.VMAEnd, errno
}

// queryShared finds the first shared mapping that ends behind addr. Errors as queryVMAEnd.
func queryShared(maps int, addr uint64) (SharedRange, unix.Errno) {
	q, errno := query(maps, addr, procmapQueryVMAShared|procmapQueryNextVMA)
	return SharedRange{Start: q.VMAStart, End: q.VMAEnd, Dev: unix.Mkdev(q.DevMajor, q.DevMinor), Ino: q.Inode}, errno
}

func query(maps int, addr, flags uint64) (procmapQuery, unix.Errno) {
	q := procmapQuery{Size: uint64(unsafe.Sizeof(procmapQuery{})), QueryFlags: flags, QueryAddr: addr}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(maps), ioctlProcmapQuery, uintptr(unsafe.Pointer(&q)))
	return q, errno
}
