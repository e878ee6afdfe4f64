//go:build linux

package caller

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// All of these must come from the OS thread that seized tid (kernel/ptrace.c ptrace_check_attach). ESRCH means that the
// thread is dead, dying, or not stopped.

func ptrace(request, tid int, addr, data uintptr) error {
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(tid), addr, data, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// ptraceSeize attaches without stopping. TRACESYSGOOD tells system call stops from others. Never EXITKILL: when the daemon
// dies, its clients must go on.
func ptraceSeize(tid int) error {
	return ptrace(unix.PTRACE_SEIZE, tid, 0, unix.PTRACE_O_TRACESYSGOOD)
}

func ptraceInterrupt(tid int) error { return ptrace(unix.PTRACE_INTERRUPT, tid, 0, 0) }

// ptraceDetach resumes the thread, with a signal if it is in a signal-delivery-stop.
func ptraceDetach(tid int, sig unix.Signal) error {
	return ptrace(unix.PTRACE_DETACH, tid, 0, uintptr(sig))
}

// ptraceSyscall resumes the thread until the next entry or exit of a system call.
func ptraceSyscall(tid int, sig unix.Signal) error {
	return ptrace(unix.PTRACE_SYSCALL, tid, 0, uintptr(sig))
}

// sigset is the kernel's sigset_t: 64 signals on every architecture but MIPS.
type sigset uint64

func ptraceGetSigmask(tid int) (m sigset, err error) {
	err = ptrace(unix.PTRACE_GETSIGMASK, tid, unsafe.Sizeof(m), uintptr(unsafe.Pointer(&m)))
	return m, err
}

// ptraceSetSigmask: the kernel leaves SIGKILL and SIGSTOP out.
func ptraceSetSigmask(tid int, m sigset) error {
	return ptrace(unix.PTRACE_SETSIGMASK, tid, unsafe.Sizeof(m), uintptr(unsafe.Pointer(&m)))
}

// waitState is what waitid(2) told of a thread: si_code and si_status, or a code of 0 when nothing has changed.
type waitState struct {
	code, status int32
}

const cldTrapped = 4 // CLD_TRAPPED, include/uapi/asm-generic/siginfo.h

// waitPeek looks at the state of a tracee, or of a child, without consuming it. ECHILD when tid is neither.
func waitPeek(tid int) (waitState, error) {
	// siginfo_t of SIGCHLD on 64-bit architectures.
	var si struct {
		signo, errno, code, _ int32
		pid, uid, status      int32
		_                     [100]byte
	}
	_, _, errno := unix.Syscall6(unix.SYS_WAITID, unix.P_PID, uintptr(tid), uintptr(unsafe.Pointer(&si)),
		unix.WEXITED|unix.WSTOPPED|unix.WNOHANG|unix.WNOWAIT|unix.WALL, 0, 0)
	if errno != 0 {
		return waitState{}, errno
	}
	return waitState{si.code, si.status}, nil
}
