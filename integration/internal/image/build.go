package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// buildLimit bounds one image build, which takes about a minute on two cores with a near mirror.
const buildLimit = 15 * time.Minute

// The files of an image's folder.
const (
	rootFile     = "root.ext4"
	kernelFile   = "vmlinuz"
	modulesFile  = "modules.cpio"
	manifestFile = "manifest.json"
)

// Image is a built image, protected from being pruned until Close.
type Image struct {
	Dir     string
	Root    string // ext4 file system, to be used read-only or with a throw-away overlay
	Kernel  string
	Modules string // cpio archive with the modules needed to mount Root
	lock    *os.File
}

// Close gives the image up; another process may then delete it if it is outdated.
func (i *Image) Close() error { return i.lock.Close() }

// Manifest is what manifest.json keeps for people: it decides nothing.
type Manifest struct {
	Recipe        *Recipe
	KernelVersion string
	Built         time.Time
	Seconds       float64
}

// Open returns the image of recipe r in the folder dir, building it first if it is not there. progress gets one line
// at a time. Two processes may call it at once: one builds, the other waits. An interrupted build leaves only a
// folder that the next build removes.
func Open(ctx context.Context, dir string, r *Recipe, progress func(string)) (*Image, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, buildLimit, fmt.Errorf("image of %s not built within %v", r.Suite, buildLimit))
	defer cancel()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create image folder: %w", err)
	}
	held, err := lock(ctx, filepath.Join(dir, "."+r.Key()+".lock"), func() {
		progress("waiting for another process that builds the " + r.Suite + " image")
	})
	if err != nil {
		return nil, err
	}
	defer func() { _ = held.Close() }()
	final := filepath.Join(dir, r.Name())
	if _, err := os.Stat(final); errors.Is(err, fs.ErrNotExist) {
		if err := build(ctx, dir, final, r, progress); err != nil {
			return nil, fmt.Errorf("build the %s image: %w", r.Suite, err)
		}
		prune(dir, r, progress)
	} else if err != nil {
		return nil, fmt.Errorf("look for the %s image: %w", r.Suite, err)
	}
	shared, err := tryLock(final, unix.LOCK_SH)
	if err != nil {
		return nil, fmt.Errorf("hold the %s image: %w", r.Suite, err)
	}
	return &Image{
		Dir:     final,
		Root:    filepath.Join(final, rootFile),
		Kernel:  filepath.Join(final, kernelFile),
		Modules: filepath.Join(final, modulesFile),
		lock:    shared,
	}, nil
}

// prune removes what builds of r's key left behind, except images in use. The key's lock is held. It is a courtesy:
// what cannot be removed stays, with a line that says so.
func prune(dir string, r *Recipe, progress func(string)) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		progress(fmt.Sprintf("old images stay: %v", err))
		return
	}
	for _, e := range entries {
		unfinished := strings.HasPrefix(e.Name(), ".tmp-"+r.Key()+"-")
		outdated := strings.HasPrefix(e.Name(), r.Key()+"-") && e.Name() != r.Name()
		if !unfinished && !outdated {
			continue
		}
		path := filepath.Join(dir, e.Name())
		held, err := tryLock(path, unix.LOCK_EX)
		if errors.Is(err, errLocked) {
			continue
		}
		if err == nil {
			err = os.RemoveAll(path)
			_ = held.Close()
		}
		if err != nil {
			progress(fmt.Sprintf("old image %s stays: %v", path, err))
		}
	}
}

// build makes the image in a temporary folder and renames it to final.
func build(ctx context.Context, dir, final string, r *Recipe, progress func(string)) error {
	if os.Geteuid() != 0 {
		return errors.New("mmdebstrap must run as root: run this once as root, later runs use the cached image")
	}
	start := time.Now()
	tmp, err := os.MkdirTemp(dir, ".tmp-"+r.Key()+"-")
	if err != nil {
		return fmt.Errorf("create folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(tmp) }() // after the rename there is nothing left to remove
	root := filepath.Join(tmp, "root")
	progress(fmt.Sprintf("building the %s image with mmdebstrap, about a minute", r.Suite))
	if err := run(ctx, "mmdebstrap", r.mmdebstrapArgs(root)...); err != nil {
		return err
	}
	version, err := kernelVersion(root)
	if err != nil {
		return err
	}
	if err := writeModules(filepath.Join(tmp, modulesFile), filepath.Join(root, "lib/modules", version), r.Modules); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(root, "boot/vmlinuz-"+version), filepath.Join(tmp, kernelFile)); err != nil {
		return fmt.Errorf("take the kernel: %w", err)
	}
	size, err := treeMiB(root)
	if err != nil {
		return fmt.Errorf("measure the root file system: %w", err)
	}
	// No journal: a guest's writes are thrown away. No lazy initialisation: the guest would have to do it.
	err = run(ctx, "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=0",
		"-d", root, filepath.Join(tmp, rootFile), fmt.Sprintf("%dM", size+r.SpareMiB))
	if err != nil {
		return err
	}
	if err := os.RemoveAll(root); err != nil {
		return fmt.Errorf("remove the unpacked root: %w", err)
	}
	took := time.Since(start)
	manifest, err := json.MarshalIndent(Manifest{r, version, start.UTC(), took.Seconds()}, "", "  ")
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	if err := os.WriteFile(filepath.Join(tmp, manifestFile), manifest, 0o644); err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return fmt.Errorf("open the image to others: %w", err)
	}
	if err := os.Rename(tmp, final); err != nil {
		return fmt.Errorf("put the image in place: %w", err)
	}
	progress(fmt.Sprintf("built %s (kernel %s) in %.0f s", final, version, took.Seconds()))
	return nil
}

// kernelVersion finds the one kernel in root.
func kernelVersion(root string) (string, error) {
	found, err := filepath.Glob(filepath.Join(root, "boot/vmlinuz-*"))
	if err != nil {
		return "", fmt.Errorf("look for the kernel: %w", err)
	}
	if len(found) != 1 {
		return "", fmt.Errorf("found %d kernels in the image, want exactly one", len(found))
	}
	return strings.TrimPrefix(filepath.Base(found[0]), "vmlinuz-"), nil
}

// treeMiB is the space that root's files take on ext4, in MiB, with a tenth for its own structures.
func treeMiB(root string) (int, error) {
	var bytes int64
	err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		const block = 4096
		bytes += block + (info.Size()+block-1)/block*block
		return nil
	})
	return int(bytes*11/10>>20) + 1, err
}

// lastLines is the end of s, at most n lines.
func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
