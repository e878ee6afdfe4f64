package dispatch

import (
	"errors"

	"golang.org/x/sys/unix"
)

// errnoOf is the one place where an error becomes the errno that the client
// sees. An error without one is a fault of ours: EIO.
func errnoOf(err error) unix.Errno {
	var e unix.Errno
	if errors.As(err, &e) && e != 0 {
		return e
	}
	return unix.EIO
}
