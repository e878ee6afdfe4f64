package main

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls go to the kernel directly: what the Go scheduler adds to a
// call that blocks is not what is measured.

func rawWrite(fd int, b []byte) (int, unix.Errno) {
	n, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), e
}

func rawRead(fd int, b []byte) (int, unix.Errno) {
	n, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), e
}

var (
	one  [1]byte
	null [8]byte // command 0 with in_words 0: EINVAL from the header check
)

func pingPong(there, back int) error {
	if _, e := rawWrite(there, one[:]); e != 0 {
		return fmt.Errorf("pipe: %w", e)
	}
	if n, e := rawRead(back, one[:]); e != 0 || n != 1 {
		return fmt.Errorf("pipe: %d bytes, %w", n, e)
	}
	return nil
}

func nullCommand(fd int) error {
	if _, e := rawWrite(fd, null[:]); e != unix.EINVAL {
		return fmt.Errorf("null command: errno %d, want EINVAL", e)
	}
	return nil
}

// echo is the other process of the ping-pong.
func echo(in, out int) {
	for {
		if n, e := rawRead(in, one[:]); e != 0 || n != 1 {
			return
		}
		if _, e := rawWrite(out, one[:]); e != 0 {
			return
		}
	}
}
