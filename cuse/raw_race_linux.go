//go:build race

package cuse

import "golang.org/x/sys/unix"

// Under the race detector x/sys's calls are used: they tell it that what
// happened before a write happened before the read of it.

func rawRead(fd int, p []byte) (int, unix.Errno) {
	n, err := unix.Read(fd, p)
	return n, toErrno(err)
}

func rawWrite(fd int, p []byte) (int, unix.Errno) {
	n, err := unix.Write(fd, p)
	return n, toErrno(err)
}

func toErrno(err error) unix.Errno {
	if err == nil {
		return 0
	}
	if errno, ok := err.(unix.Errno); ok {
		return errno
	}
	return unix.EIO
}
