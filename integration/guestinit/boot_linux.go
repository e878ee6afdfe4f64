package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/integration/internal/payload"
)

const (
	rootDisk  = "/dev/vda"
	newRoot   = "/mnt"
	diskWait  = 20 * time.Second // until the root disk must have appeared
	diskTick  = 10 * time.Millisecond
	stageFail = "boot: "
)

// moduleCompressed is MODULE_INIT_COMPRESSED_FILE of linux/module.h: the kernel itself unpacks the module.
const moduleCompressed = 4

// boot goes from the initramfs to the root disk and continues there as "guestinit pid1".
func boot() error {
	for _, m := range []mount{
		{"devtmpfs", "/dev", "devtmpfs", 0, ""},
		{"proc", "/proc", "proc", 0, ""},
		{"sysfs", "/sys", "sysfs", 0, ""},
	} {
		if err := m.do(); err != nil {
			return fmt.Errorf(stageFail+"%w", err)
		}
	}
	if err := loadModules(payload.ModuleList); err != nil {
		return fmt.Errorf(stageFail+"%w", err)
	}
	if err := awaitFile(rootDisk, diskWait); err != nil {
		return fmt.Errorf(stageFail+"root disk: %w", err)
	}
	for _, m := range []mount{
		{rootDisk, newRoot, "ext4", unix.MS_NOATIME, "noinit_itable"},
		// Now, because the host's files may go there.
		{"tmpfs", newRoot + "/run", "tmpfs", nosuid, "mode=0755"},
		{"tmpfs", newRoot + "/tmp", "tmpfs", nosuid, "mode=1777"},
	} {
		if err := m.do(); err != nil {
			return fmt.Errorf(stageFail+"%w", err)
		}
	}
	if err := moveTree(payload.Root, newRoot); err != nil {
		return fmt.Errorf(stageFail+"copy the host's files: %w", err)
	}
	if err := switchRoot(); err != nil {
		return fmt.Errorf(stageFail+"enter the root disk: %w", err)
	}
	err := unix.Exec(payload.Init, []string{payload.Init, "pid1"}, os.Environ())
	return fmt.Errorf(stageFail+"exec %s: %w", payload.Init, err)
}

// loadModules loads the modules that the list names, in its order.
func loadModules(list string) error {
	f, err := os.Open(list)
	if err != nil {
		return fmt.Errorf("read module list: %w", err)
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		if err := loadModule(s.Text()); err != nil {
			return err
		}
	}
	return nil
}

func loadModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("load module: %w", err)
	}
	defer func() { _ = f.Close() }()
	flags := 0
	if !strings.HasSuffix(file, ".ko") {
		flags = moduleCompressed
	}
	if err := unix.FinitModule(int(f.Fd()), "", flags); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load module %s: %w", file, err)
	}
	return nil
}

func awaitFile(path string, limit time.Duration) error {
	for deadline := time.Now().Add(limit); ; time.Sleep(diskTick) {
		_, err := os.Stat(path)
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not there after %v: %w", limit, err)
		}
	}
}

// moveTree copies the tree at from over the one at to, removing each file once it is copied: the initramfs is memory
// that the guest needs. Existing directories keep their modes.
func moveTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		dst, err := insideRoot(to, rel)
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			if err := os.MkdirAll(dst, 0o755); err != nil {
				return err
			}
			return nil
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			_ = os.Remove(dst)
			return os.Symlink(target, dst)
		}
		if err := copyFile(path, dst); err != nil {
			return err
		}
		return os.Remove(path)
	})
}

// insideRoot is the place of rel below root with the links in its folders followed as the guest will see them:
// /lib is a link to usr/lib, and an absolute link must not lead into the initramfs.
func insideRoot(root, rel string) (string, error) {
	dir, err := os.OpenRoot(root)
	if err != nil {
		return "", err
	}
	defer func() { _ = dir.Close() }()
	parent := filepath.Dir(rel)
	if _, err := dir.Stat(parent); err != nil {
		return "", fmt.Errorf("folder of /%s in the guest: %w", rel, err)
	}
	return filepath.Join(root, rel), nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	_ = os.Remove(to) // an executable of the image may be a link to something else
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		_ = out.Close()
		return fmt.Errorf("copy to %s: %w", to, err)
	}
	if err := out.Chmod(info.Mode().Perm()); err != nil {
		_ = out.Close()
		return err
	}
	return out.Close()
}

// switchRoot makes the mounted disk the root, as switch_root(8) does.
func switchRoot() error {
	for _, d := range []string{"dev", "proc", "sys"} {
		if err := unix.Mount("/"+d, filepath.Join(newRoot, d), "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move /%s: %w", d, err)
		}
	}
	if err := unix.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}
