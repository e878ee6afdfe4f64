package caller

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// All that remote system calls need to know of x86-64. Another architecture follows with a file like this one and by
// leaving remote_linux_other.go's build line.

const remoteSupported = true

const (
	// redZone below the stack pointer belongs to the running function (System V psABI AMD64, 3.2.2).
	redZone = 128
	// userCS is the code segment of 64-bit user code (arch/x86/include/asm/segment.h __USER_CS); 32-bit code has 0x23.
	userCS = 0x33
	// x32Bit marks a system call number of the x32 ABI (__X32_SYSCALL_BIT).
	x32Bit = 0x40000000
	// noSyscall in orig_rax: the kernel restarts nothing (arch_do_signal_or_restart, handle_signal).
	noSyscall = ^uint64(0)
	// syscallInsn is 0F 05, two bytes.
	syscallInsn, syscallInsnLen = 0x050f, 2
)

// registers are the thread's at a stop.
type registers unix.PtraceRegs

func (r *registers) load(tid int) error {
	return unix.PtraceGetRegs(tid, (*unix.PtraceRegs)(r))
}

func (r *registers) store(tid int) error {
	return unix.PtraceSetRegs(tid, (*unix.PtraceRegs)(r))
}

// atWriteExit says whether this is native 64-bit code behind the syscall instruction of a write. (orig_rax is -1 at a
// stop that came from an interrupt or exception.) text reads the thread's memory.
func (r *registers) atWriteExit(text func(b []byte, addr uint64) error) bool {
	if r.Cs != userCS || r.Orig_rax&x32Bit != 0 {
		return false
	}
	switch r.Orig_rax {
	case unix.SYS_WRITE, unix.SYS_WRITEV, unix.SYS_PWRITE64, unix.SYS_PWRITEV, unix.SYS_PWRITEV2:
	default:
		return false
	}
	var insn [syscallInsnLen]byte
	return text(insn[:], r.Rip-syscallInsnLen) == nil && binary.LittleEndian.Uint16(insn[:]) == syscallInsn
}

func (r *registers) result() int64 { return int64(r.Rax) }
func (r *registers) fd() int       { return int(int32(r.Rdi)) }
func (r *registers) stack() uint64 { return r.Rsp - redZone }

// fail makes the system call that the thread is leaving return errno.
func (r *registers) fail(errno unix.Errno) { r.Rax = uint64(-int64(errno)) }

// call returns the registers with which the thread, when resumed, runs its syscall instruction again as system call nr.
func (r registers) call(nr uintptr, args *[6]uintptr) registers {
	r.Rip -= syscallInsnLen
	r.Rax, r.Orig_rax = uint64(nr), noSyscall
	r.Rdi, r.Rsi, r.Rdx = uint64(args[0]), uint64(args[1]), uint64(args[2])
	r.R10, r.R8, r.R9 = uint64(args[3]), uint64(args[4]), uint64(args[5])
	return r
}
