package caller

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// File is a file that a client has open, held without opening it (O_PATH): as long as it is, its inode is not another's.
type File struct {
	fd       int
	Dev, Ino uint64
}

// OpenFile takes hold of the file behind descriptor n of thread tid, which must be inside a request to us. EBADF when
// there is none; EACCES or EPERM without CAP_SYS_PTRACE. It asks no file system for anything, so that one whose server
// sleeps cannot hold it up.
func OpenFile(tid int, n int32) (*File, error) {
	if n < 0 {
		return nil, opError("descriptor of thread", tid, unix.EBADF)
	}
	path := "/proc/" + strconv.Itoa(tid) + "/fd/" + strconv.Itoa(int(n))
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		err = unix.EBADF
	}
	if err != nil {
		return nil, opError("descriptor of thread", tid, err)
	}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &st); err != nil {
		_ = unix.Close(fd)
		return nil, opError("descriptor of thread", tid, fmt.Errorf("statx: %w", err))
	}
	return &File{fd: fd, Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino}, nil
}

// Close lets go of the file, once.
func (f *File) Close() { _ = unix.Close(f.fd) }

// kcmpFile is KCMP_FILE (uapi/linux/kcmp.h): do two descriptors share a file description?
const kcmpFile = 0

// SameFile says whether descriptors a and b of thread tid are one open file: the kernel knows a completion channel by its
// file, whatever the number. No where kcmp(2) is not there.
func SameFile(tid int, a, b int32) bool {
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(tid), uintptr(tid), kcmpFile, uintptr(uint32(a)), uintptr(uint32(b)), 0)
	return errno == 0 && r == 0
}
