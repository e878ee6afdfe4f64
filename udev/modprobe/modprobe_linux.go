package modprobe

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// onSysfs reports whether path exists and is on the kernel's own sysfs. A file
// system whose daemon died (ENOTCONN) is not.
func onSysfs(path string) (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	switch {
	case err == nil:
		return st.Type == unix.SYSFS_MAGIC, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.ESTALE):
		return false, nil
	}
	return false, fmt.Errorf("look at %s: %w", path, err)
}
