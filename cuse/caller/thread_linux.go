package caller

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Thread is the id of a thread that is inside a write() to us right now: its request is read but not answered, so it
// can neither exit nor exec, and its id cannot belong to another. Once it is answered the value must not be used.
type Thread int

// Read fills b from addr, wholly or not at all as far as the caller may rely on b. EFAULT when any byte is not mapped
// readable, EPERM without CAP_SYS_PTRACE, ESRCH when the thread is gone. It does not allocate.
func (t Thread) Read(b []byte, addr uint64) error {
	if len(b) == 0 {
		return nil
	}
	if !validRange(addr, uint64(len(b))) {
		return opError("read memory of thread", int(t), unix.EFAULT)
	}
	local := [1]unix.Iovec{{Base: &b[0]}}
	local[0].SetLen(len(b))
	remote := [1]unix.RemoteIovec{{Base: uintptr(addr), Len: len(b)}}
	n, err := unix.ProcessVMReadv(int(t), local[:], remote[:], 0)
	if err == nil && n != len(b) {
		err = unix.EFAULT // mm/process_vm_access.c returns what it got before the fault
	}
	if err != nil {
		return opError("read memory of thread", int(t), err)
	}
	return nil
}

// Write copies b to addr. EFAULT when any byte is not mapped writable (the bytes before it may have been written),
// otherwise as Read. It does not allocate.
func (t Thread) Write(b []byte, addr uint64) error {
	if len(b) == 0 {
		return nil
	}
	if !validRange(addr, uint64(len(b))) {
		return opError("write memory of thread", int(t), unix.EFAULT)
	}
	local := [1]unix.Iovec{{Base: &b[0]}}
	local[0].SetLen(len(b))
	remote := [1]unix.RemoteIovec{{Base: uintptr(addr), Len: len(b)}}
	n, err := unix.ProcessVMWritev(int(t), local[:], remote[:], 0)
	if err == nil && n != len(b) {
		err = unix.EFAULT
	}
	if err != nil {
		return opError("write memory of thread", int(t), err)
	}
	return nil
}

const (
	// callPatience bounds the wait for a thread that has sent its request and is not asleep yet: it is on its way, at worst
	// without a processor for a while. callPause is between two looks.
	callPatience = time.Second
	callPause    = 200 * time.Microsecond
)

// ReadBehind fills b from behind the first written bytes of the buffer of the write(2) that the thread is in: old rdma-core
// says too small a count, and the kernel reads on. EFAULT when it is in no such call, or the memory cannot be read.
func (t Thread) ReadBehind(written int, b []byte) error {
	text, err := t.systemCall()
	if err != nil {
		return opError("system call of thread", int(t), err)
	}
	var nr int64
	var fd, buf, count uint64
	if n, _ := fmt.Sscanf(text, "%d 0x%x 0x%x 0x%x", &nr, &fd, &buf, &count); n != 4 || nr != unix.SYS_WRITE || count != uint64(written) {
		return opError("system call of thread", int(t), unix.EFAULT)
	}
	return t.Read(b, buf+uint64(written))
}

// systemCall is /proc/TID/syscall once the thread sleeps in one; until then it says "running".
func (t Thread) systemCall() (string, error) {
	for end := time.Now().Add(callPatience); ; time.Sleep(callPause) {
		text, err := os.ReadFile("/proc/" + strconv.Itoa(int(t)) + "/syscall")
		if err != nil {
			return "", goneError(err)
		}
		if !strings.HasPrefix(string(text), "running") || time.Now().After(end) {
			return string(text), nil
		}
	}
}

// maxUserAddr is above every user address of every architecture and fits a signed file offset, which is what pread on
// /proc/PID/mem takes.
const maxUserAddr = 1<<63 - 1

// validRange says whether addr+length neither wraps nor leaves what can be a user address at all.
func validRange(addr, length uint64) bool {
	return addr <= maxUserAddr && length <= maxUserAddr-addr
}
