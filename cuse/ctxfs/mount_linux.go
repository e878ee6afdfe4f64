package ctxfs

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
)

const (
	device  = "/dev/fuse"
	subtype = "uverbsd"
	fsType  = "fuse." + subtype // as mountinfo shows it

	// aliveWait is how long a server found at the mount point is given to prove
	// that it is none.
	aliveWait = 2 * time.Second

	// stackMax bounds the mounts that Clean takes off one place.
	stackMax = 64
)

// New mounts a file system at dir, which is made if it is not there, and shakes
// hands with the kernel; Serve must follow. Clients must be able to search the
// directories above. What a dead daemon left there is taken away; a living one's is
// EBUSY. Without passthrough it is EOPNOTSUPP. Config.Name may be empty.
func New(dir string, cfg cuse.Config) (*FS, error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return nil, fmt.Errorf("ctxfs: %w", err)
	}
	dir, err := resolve(dir)
	if err != nil {
		return nil, fmt.Errorf("ctxfs: %w", err)
	}
	if err := makeWay(dir); err != nil {
		return nil, fmt.Errorf("ctxfs: %s: %w", dir, err)
	}
	if cfg.Name == "" {
		cfg.Name = dir
	}
	fs, mnt, err := start(dir, cfg)
	if err != nil {
		return nil, err
	}
	defer unix.Close(mnt)
	if err = os.MkdirAll(dir, 0o755); err == nil {
		err = unix.MoveMount(mnt, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err != nil {
		fs.dir = ""
		_ = fs.Close()
		return nil, fmt.Errorf("ctxfs: mount at %s: %w", dir, err)
	}
	return fs, nil
}

// Supported says in one line why this machine cannot do it, nil if it can. It
// tries, with a mount that nobody sees.
func Supported() error {
	fs, mnt, err := start("", cuse.Config{Name: "ctxfs (trial)"})
	if err != nil {
		return err
	}
	_ = unix.Close(mnt)
	return fs.Close()
}

// start makes an FS whose mount is nowhere yet: it is the returned fd.
func start(dir string, cfg cuse.Config) (*FS, int, error) {
	dev, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return nil, -1, fmt.Errorf("ctxfs: open %s: %w: the fuse module is not loaded; run: modprobe fuse", device, err)
	case err != nil:
		return nil, -1, fmt.Errorf("ctxfs: open %s: %w", device, err)
	}
	mnt, err := mount(dev)
	if err != nil {
		_ = unix.Close(dev)
		return nil, -1, err
	}
	fs := newFS(dir, cfg.Log)
	ch, err := cuse.NewChannel(dev)
	if err != nil {
		_ = unix.Close(mnt)
		return nil, -1, err
	}
	fs.s = cuse.NewMounted(ch, fs, cfg)
	if err = fs.s.Handshake(); err == nil {
		err = fs.tryBacking()
	}
	if err != nil {
		_ = unix.Close(mnt)
		_ = fs.s.Close()
		return nil, -1, err
	}
	return fs, mnt, nil
}

// mount makes a mount of dev that is nowhere yet. Not by mount(2): so it is seen
// only when it is known to work.
func mount(dev int) (int, error) {
	fail := func(what string, err error) (int, error) {
		return -1, fmt.Errorf("ctxfs: mount: %s: %w", what, err)
	}
	fd, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fail("fsopen", err)
	}
	defer unix.Close(fd)
	for _, o := range [][2]string{
		{"source", subtype},
		{"subtype", subtype},
		{"fd", strconv.Itoa(dev)},
		{"rootmode", strconv.FormatUint(dirMode, 8)},
		{"user_id", "0"},
		{"group_id", "0"},
	} {
		if err := unix.FsconfigSetString(fd, o[0], o[1]); err != nil {
			return fail(o[0], err)
		}
	}
	// Others than root are clients; the kernel checks the owner before it asks us.
	for _, o := range []string{"allow_other", "default_permissions"} {
		if err := unix.FsconfigSetFlag(fd, o); err != nil {
			return fail(o, err)
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return fail("create", err)
	}
	mnt, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return fail("fsmount", err)
	}
	return mnt, nil
}

// tryBacking has the kernel take a memfd as what is behind a file.
func (fs *FS) tryBacking() error {
	fd, err := unix.MemfdCreate("uverbsd-trial", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("ctxfs: memfd_create: %w", err)
	}
	defer unix.Close(fd)
	id, err := fs.s.OpenBacking(fd)
	if err != nil {
		return fmt.Errorf("ctxfs: %w", err)
	}
	return fs.s.CloseBacking(id)
}

// Clean takes away what is mounted of ours at dir, dead or alive, and dir itself.
// It asks no server, so that a stuck one does not hold it up. For `uverbsd clean`
// and the keeper process.
func Clean(dir string) error {
	dir, err := resolve(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ctxfs: %w", err)
	}
	if err := detach(dir); err != nil {
		return err
	}
	if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT {
		return fmt.Errorf("ctxfs: remove %s: %w", dir, err)
	}
	return nil
}

// detach takes all mounts of ours off dir.
func detach(dir string) error {
	for range stackMax {
		ours, err := mounted(dir)
		if err != nil || !ours {
			return err
		}
		if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL {
			return fmt.Errorf("ctxfs: unmount %s: %w", dir, err)
		}
	}
	return fmt.Errorf("ctxfs: unmount %s: %w", dir, unix.EBUSY)
}

// makeWay detaches what a dead daemon left at dir.
func makeWay(dir string) error {
	ours, err := mounted(dir)
	if err != nil || !ours {
		return err
	}
	// The only way to ask is to ask the server, which may not answer.
	answer := make(chan error, 1)
	go func() {
		var st unix.Statfs_t
		answer <- unix.Statfs(dir, &st)
	}()
	timer := time.NewTimer(aliveWait)
	defer timer.Stop()
	select {
	case err := <-answer:
		if err != unix.ENOTCONN && err != unix.ECONNABORTED {
			return fmt.Errorf("another daemon serves it: %w", unix.EBUSY)
		}
	case <-timer.C:
		return fmt.Errorf("another daemon is there, and stuck: %w", unix.EBUSY)
	}
	return detach(dir)
}

// resolve makes dir as mountinfo names it, without a look at dir itself, where a
// dead server may be.
func resolve(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	parent, err := filepath.EvalSymlinks(filepath.Dir(dir))
	if err != nil {
		return "", err
	}
	return filepath.Join(parent, filepath.Base(dir)), nil
}

// mounted says whether the mount at dir that one sees is ours.
func mounted(dir string) (bool, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return false, fmt.Errorf("ctxfs: %w", err)
	}
	defer f.Close()
	ours := false
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// id parent major:minor root point options ... - type source options
		at, kind, ok := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(at)
		if !ok || len(fields) < 5 || unescape(fields[4]) != dir {
			continue
		}
		kind, _, _ = strings.Cut(kind, " ")
		ours = kind == fsType // the last line is the uppermost
	}
	return ours, nil
}

// unescape undoes what mountinfo does to blanks and backslashes.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}
