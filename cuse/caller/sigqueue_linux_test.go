package caller

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// sigqueue is sigqueue(3): a queued signal that carries a value.
func sigqueue(pid int, sig unix.Signal, value int) error {
	var si [128]byte // siginfo_t
	*(*int32)(unsafe.Pointer(&si[0])) = int32(sig)
	*(*int32)(unsafe.Pointer(&si[8])) = -1 // si_code: SI_QUEUE
	*(*int32)(unsafe.Pointer(&si[16])) = int32(unix.Getpid())
	*(*int64)(unsafe.Pointer(&si[24])) = int64(value)
	_, _, errno := unix.Syscall(unix.SYS_RT_SIGQUEUEINFO, uintptr(pid), uintptr(sig), uintptr(unsafe.Pointer(&si)))
	if errno != 0 {
		return errno
	}
	return nil
}
