//go:build linux

package caller

import (
	"bytes"
	"unsafe"

	"golang.org/x/sys/unix"
)

// auxvMax is more than any auxiliary vector has (mm_types.h AT_VECTOR_SIZE: 2*(20+20+1) words at most).
const auxvMax = 1024

// sameImage says whether the process lives and runs the image that it had at open: its auxiliary vector, which exec makes anew with
// random addresses, is the same, and what may be read of it is. A client can make the vector what it wants by prctl(PR_SET_MM_MAP), and
// so what a program's will be without address randomisation; but one that it could not read by itself is not
// dumpable, and its files in /proc are root's (fs/proc/base.c task_dump_owner). After a true answer any process_vm_readv of p.pid that had ended before was of this
// image: a number is not given to another process while its owner lives, and no exec gives an old image back. Plain
// system calls and no allocation, for it stands beside payload.
func (p *Process) sameImage() bool {
	var b [auxvMax]byte
	fd, _, errno := unix.Syscall6(unix.SYS_OPENAT, ^uintptr(0), uintptr(unsafe.Pointer(&p.auxvPath[0])), unix.O_RDONLY|unix.O_CLOEXEC, 0, 0, 0)
	if errno != 0 {
		return false
	}
	// Not unix.Read, whose buffer escapes where the race detector is on.
	var st unix.Stat_t
	_, _, bad := unix.Syscall(unix.SYS_FSTAT, fd, uintptr(unsafe.Pointer(&st)), 0)
	n, _, errno := unix.Syscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&b[0])), auxvMax)
	unix.Close(int(fd))
	return bad == 0 && errno == 0 && n > 0 && bytes.Equal(b[:n], p.auxv) && st.Uid == p.procUID
}

// readVM is one process_vm_readv of a single range. It returns the bytes read.
func readVM(pid int, b []byte, addr uint64) (int, error) {
	local := unix.Iovec{Base: &b[0], Len: uint64(len(b))}
	remote := unix.RemoteIovec{Base: uintptr(addr), Len: len(b)}
	n, _, errno := unix.Syscall6(unix.SYS_PROCESS_VM_READV, uintptr(pid), uintptr(unsafe.Pointer(&local)), 1, uintptr(unsafe.Pointer(&remote)), 1, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// probe reads one byte of fd at off: pread(2) without a buffer that escapes, see sameImage.
func probe(fd int, off uint64) (int, error) {
	var b byte
	n, _, errno := unix.Syscall6(unix.SYS_PREAD64, uintptr(fd), uintptr(unsafe.Pointer(&b)), 1, uintptr(off), 0, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}
