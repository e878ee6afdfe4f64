package caller

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// File is a file that a client has open, held without opening it (O_PATH): as long as it is, its inode is not another's.
type File struct {
	fd       int
	Dev, Ino uint64
}

// OpenFile takes hold of the file behind descriptor n of thread tid, which must be inside a request to us. EBADF when
// there is none, or one that is only a path (O_PATH), as fdget has it; EACCES or EPERM without CAP_SYS_PTRACE. It asks no
// file system for anything, so that one whose server sleeps cannot hold it up.
func OpenFile(tid int, n int32) (*File, error) {
	f, err := openFile(tid, n)
	if err != nil {
		return nil, opError("descriptor of thread", tid, err)
	}
	return f, nil
}

func openFile(tid int, n int32) (*File, error) {
	if n < 0 {
		return nil, unix.EBADF
	}
	proc := "/proc/" + strconv.Itoa(tid)
	fd, err := unix.Open(proc+"/fd/"+strconv.Itoa(int(n)), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		err = unix.EBADF
	}
	if err != nil {
		return nil, err
	}
	f := &File{fd: fd}
	if err := f.check(proc, n); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// check finds out the inode, and that descriptor n is more than a path to it: another thread may put another file there
// at any time, so its flags count only together with the inode that they come with.
func (f *File) check(proc string, n int32) error {
	flags, theirs, err := fdInfo(proc, n)
	if err != nil {
		return err
	}
	_, ours, err := fdInfo("/proc/self", int32(f.fd))
	if err != nil {
		return err
	}
	if theirs != ours || flags&unix.O_PATH != 0 {
		return unix.EBADF
	}
	var st unix.Statx_t
	if err := unix.Statx(f.fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &st); err != nil {
		return fmt.Errorf("statx: %w", err)
	}
	f.Dev, f.Ino = unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino
	return nil
}

// inode is what fdinfo says of a file's place: its inode's number on which mount.
type inode struct{ ino, mount uint64 }

// fdInfo reads what the kernel says, at one time, of one descriptor (fs/proc/fd.c seq_show; ino came with Linux 5.15).
func fdInfo(proc string, n int32) (flags int, at inode, err error) {
	text, err := os.ReadFile(proc + "/fdinfo/" + strconv.Itoa(int(n)))
	if err != nil {
		return 0, at, unix.EBADF
	}
	found := 0
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		base := 10
		if name == "flags" {
			base = 8
		}
		v, err := strconv.ParseUint(value, base, 64)
		if err != nil {
			continue
		}
		switch name {
		case "flags":
			flags = int(v)
		case "mnt_id":
			at.mount = v
		case "ino":
			at.ino = v
		default:
			continue
		}
		found++
	}
	if found != 3 {
		return 0, at, unix.EBADF
	}
	return flags, at, nil
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
