// Package guest boots test guests: a Debian release under QEMU with its own kernel and rdma-core, and, if asked for,
// with today's uverbsd running in it.
//
// One guest runs many steps:
//
//	vm, err := guest.Start(ctx, guest.Config{Release: guest.Trixie, Daemon: true})
//	if err != nil { ... }
//	defer vm.Close()
//	res, err := vm.Exec(ctx, guest.Command{Script: "ibv_devinfo", User: "tester"})
//
// err is about the guest, the agent or a time limit; a script that ran and failed is res.ExitCode. Every wait is
// bounded: by the context, by BootTimeout, by a command's Timeout, and by the guest's own end.
package guest

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/payload"
)

// Release is a Debian release that guests can run.
type Release string

// The releases: Debian 12 (kernel 6.1, rdma-core 44) and Debian 13 (kernel 6.12, rdma-core 56).
const (
	Bookworm Release = "bookworm"
	Trixie   Release = "trixie"
)

// Releases are all releases, oldest first.
var Releases = []Release{Bookworm, Trixie}

// Accel chooses how QEMU runs the guest's processor.
type Accel string

// AccelEnv is an environment variable that replaces AccelAuto by "kvm" or "tcg", for hosts whose KVM is worse than
// the probe can tell.
const AccelEnv = "UVERBSD_GUEST_ACCEL"

// AccelAuto uses KVM where it really boots a guest and emulation elsewhere.
const (
	AccelAuto Accel = ""
	AccelKVM  Accel = "kvm"
	AccelTCG  Accel = "tcg"
)

// The defaults of a Config's zero fields.
const (
	DefaultCPUs         = 2
	DefaultMemMiB       = 2048
	DefaultBootTimeout  = 3 * time.Minute // an idle machine needs about 10 s; tests share it with compilers
	DefaultReadyTimeout = 20 * time.Second
	DefaultRunTimeout   = 10 * time.Minute
)

// The daemon's signs of readiness, in the guest.
const (
	DaemonNode  = "/dev/infiniband/uverbs0"
	DaemonClass = "/sys/class/infiniband_verbs/uverbs0/ibdev"
)

// Config describes a guest. The zero value of every field but Release is usable.
type Config struct {
	Release  Release
	Packages []string // Debian packages beyond the base image's; each set has an image of its own
	Files    []File   // brought into the guest before it starts

	Daemon             bool          // start the daemon and wait until it is ready
	DaemonBinary       string        // on the host; default build/uverbsd
	DaemonArgs         []string      // default "serve"
	DaemonEnv          []string      // KEY=value
	DaemonReadyTimeout time.Duration // default DefaultReadyTimeout

	CPUs        int
	MemMiB      int
	Append      []string // kernel command line, added at the end
	QEMU        []string // QEMU arguments, added at the end; a second -machine adds to the first
	Accel       Accel
	BootTimeout time.Duration // from QEMU's start to the agent's greeting; default DefaultBootTimeout

	BuildDir string       // default: build/ in the module's root
	Console  io.Writer    // gets the serial console as it comes; may be nil
	Progress func(string) // gets one line at a time; may be nil

	// For Run only.
	Script    string        // see Command.Script
	Stdout    io.Writer     // gets the script's stdout and stderr as they come; may be nil
	Timeout   time.Duration // for boot and script together, not for building the image; default DefaultRunTimeout
	DaemonLog io.Writer     // gets the daemon's log when the script has failed; may be nil
	Verbose   bool          // the daemon's log also when it has not
}

// File is a file or a directory tree to be brought into the guest.
type File struct {
	Host  string      // path on the host; a symbolic link is followed
	Guest string      // absolute path in the guest; default: /opt/uverbsd-guest/ and Host's last element
	Perm  fs.FileMode // permission bits of a single file; 0: as on the host
}

// ParseFile reads HOST or HOST:GUEST.
func ParseFile(s string) (File, error) {
	host, to, _ := strings.Cut(s, ":")
	f := File{Host: host, Guest: to}
	if f.Host == "" {
		return File{}, fmt.Errorf("file %q: want HOSTPATH or HOSTPATH:GUESTPATH", s)
	}
	return f, f.check()
}

func (f *File) check() error {
	if f.Guest == "" {
		f.Guest = path.Join(payload.Dir, filepath.Base(f.Host))
	}
	if !path.IsAbs(f.Guest) || path.Clean(f.Guest) == "/" {
		return fmt.Errorf("file %s: its place in the guest, %q, is not an absolute path of a file", f.Host, f.Guest)
	}
	return nil
}

// fill checks the configuration and replaces zero fields by their defaults. It may be called again.
func (c *Config) fill() error {
	if c.Release != Bookworm && c.Release != Trixie {
		return fmt.Errorf("no guest of Debian release %q: use bookworm or trixie", c.Release)
	}
	if c.CPUs < 0 || c.MemMiB < 0 {
		return fmt.Errorf("a guest cannot have %d CPUs and %d MiB", c.CPUs, c.MemMiB)
	}
	c.Accel = cmp.Or(c.Accel, Accel(os.Getenv(AccelEnv)))
	if c.Accel != AccelAuto && c.Accel != AccelKVM && c.Accel != AccelTCG {
		return fmt.Errorf("no accelerator %q: use kvm or tcg", c.Accel)
	}
	c.CPUs = cmp.Or(c.CPUs, DefaultCPUs)
	c.MemMiB = cmp.Or(c.MemMiB, DefaultMemMiB)
	c.BootTimeout = cmp.Or(c.BootTimeout, DefaultBootTimeout)
	c.Timeout = cmp.Or(c.Timeout, DefaultRunTimeout)
	c.DaemonReadyTimeout = cmp.Or(c.DaemonReadyTimeout, DefaultReadyTimeout)
	if c.DaemonArgs == nil {
		c.DaemonArgs = []string{"serve"}
	}
	if c.BuildDir == "" {
		root, err := moduleRoot()
		if err != nil {
			return err
		}
		c.BuildDir = filepath.Join(root, "build")
	}
	if c.DaemonBinary == "" {
		c.DaemonBinary = filepath.Join(c.BuildDir, "uverbsd")
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	if c.Daemon {
		if _, err := os.Stat(c.DaemonBinary); err != nil {
			return fmt.Errorf("the daemon for the guest: %w: build it first", err)
		}
	}
	files := slices.Clone(c.Files)
	for i := range files {
		if err := files[i].check(); err != nil {
			return err
		}
		if _, err := os.Stat(files[i].Host); err != nil {
			return fmt.Errorf("file for the guest: %w", err)
		}
	}
	c.Files = files
	return nil
}

// payload are all files to be brought into the guest.
func (c *Config) payload() []File {
	if !c.Daemon {
		return c.Files
	}
	return append(slices.Clone(c.Files), File{Host: c.DaemonBinary, Guest: payload.DaemonPath, Perm: 0o755})
}

// moduleRoot is the folder of the go.mod at or above the working directory.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the source tree: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", errors.New("find the source tree: no go.mod here or above: run this inside the uverbsd tree")
		}
		dir = up
	}
}
