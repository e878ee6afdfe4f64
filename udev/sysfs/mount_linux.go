package sysfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// mountFUSE mounts a new FUSE connection on dir and returns its end, which
// go-fuse takes over. go-fuse's own direct mount leaves that descriptor
// inheritable: a child of ours would keep the connection of a dead daemon
// alive, and its readers waiting for ever.
func mountFUSE(dir string) (int, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open /dev/fuse (is the fuse module there?): %w", err)
	}
	data := fmt.Sprintf("fd=%d,rootmode=%o,user_id=0,group_id=0,allow_other,default_permissions", fd, unix.S_IFDIR)
	err = unix.Mount(fsName, dir, "fuse."+fsName, unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, data)
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("mount the class tree on %s (needs CAP_SYS_ADMIN): %w", dir, err)
	}
	return fd, nil
}

// settlePoll makes the kernel learn that we have no POLL, by one poll from a
// plain system call. Else the first os.Open of a file of ours by this very
// process asks for it while it holds a processor of the Go runtime, and with
// few processors nobody is left to answer.
func settlePoll(file string) {
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
}

// detach takes the mount id, the topmost at dir, away with all that is mounted
// under it, busy or not. With force a FUSE connection is ended first. EINVAL if
// another mount is there by now: that one is left alone.
func detach(dir, id string, force bool) error {
	fd, err := openPath(dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// From fdinfo, for statx would ask the file system, and that one may be dead.
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return fmt.Errorf("which mount is %s: %w", dir, err)
	}
	if !strings.Contains(string(b), "mnt_id:\t"+id+"\n") {
		return fmt.Errorf("unmount %s: changed meanwhile: %w", dir, unix.EINVAL)
	}
	flags := unix.MNT_DETACH
	if force {
		flags |= unix.MNT_FORCE
	}
	if err := unix.Unmount(fdPath(fd), flags); err != nil {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}

// bind makes name of the directory dirfd appear on target as well, and returns
// an O_PATH descriptor of the mount that does it, for unbind.
func bind(dirfd int, name, target string) (int, error) {
	fd, err := unix.OpenTree(dirfd, name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return -1, fmt.Errorf("open_tree %s: %w", name, err)
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("mount %s on %s: %w", name, target, err)
	}
	return fd, nil
}

// unbind takes the mount of bind away, and closes fd. It goes by the
// descriptor, for the path to a class that went is ESTALE.
func unbind(fd int) error {
	defer unix.Close(fd)
	if err := unix.Unmount(fdPath(fd), unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount: %w", err)
	}
	return nil
}

// fdPath names what fd is, whatever lies over its path now.
func fdPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// openPath opens a directory only to name things in it.
func openPath(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", dir, err)
	}
	return fd, nil
}

// readDirAt lists name under dirfd.
func readDirAt(dirfd int, name string) ([]os.DirEntry, error) {
	fd, err := unix.Openat(dirfd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return f.ReadDir(-1)
}

// inoAt is the inode number of name under dirfd.
func inoAt(dirfd int, name string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dirfd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return 0, fmt.Errorf("stat %s: %w", name, err)
	}
	return st.Ino, nil
}

// makeLayer makes the overlay's own layer: nothing but two empty directories.
func makeLayer(dir string) error {
	for _, c := range classes {
		if err := os.MkdirAll(filepath.Join(dir, c), 0o755); err != nil {
			return fmt.Errorf("make the overlay's layer: %w", err)
		}
	}
	return nil
}

// removeLayer undoes makeLayer. It removes what makeLayer made and nothing else.
func removeLayer(dir string) error {
	var errs []error
	for _, d := range []string{filepath.Join(dir, ibClass), filepath.Join(dir, verbsClass), dir} {
		if err := os.Remove(d); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
