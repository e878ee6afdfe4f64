// Package modprobe keeps the kernel's RDMA core out while the daemon runs.
//
// libibverbs first asks netlink for devices, and opening that socket loads
// ib_core by its alias; any answer, even "no devices", ends its search. So
// ib_core must neither be there nor come.
//
// Who may call it: cmd/uverbsd, at start (Loaded, then Install) and stop
// (Remove); "uverbsd clean" calls Remove. It has no locks and no state.
package modprobe

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// ErrLoaded is wrapped by Check's answer.
var ErrLoaded = errors.New("ib_core is loaded; uverbsd cannot serve while the kernel's RDMA stack is there: " +
	"unload it with `rdma link delete LINK; modprobe -r ib_uverbs ib_core`, or reboot")

// Guard says where; the zero value is the product's.
type Guard struct {
	Dir string // /run/modprobe.d: gone by itself at the next boot
	Sys string // /sys
}

// fileName is our file in Dir.
const fileName = "uverbsd.conf"

// text blocks more than its own name: modprobe runs the install commands of the
// modules that a module depends on before it loads that one, and /bin/false
// fails them, so "modprobe ib_uverbs", mlx5_ib, rdma_rxe and the kernel's own
// requests (request_module calls modprobe with an alias) all fail: tried with
// kmod 30 and modules made for it. insmod of a file, and
// modprobe --ignore-install, still get through: Loaded is for those.
const text = "# Written by uverbsd, which removes it when it stops. It serves RDMA devices\n" +
	"# itself, and programs do not find them once the kernel's RDMA core is loaded.\n" +
	"install ib_core /bin/false\n"

func (g Guard) dir() string {
	if g.Dir == "" {
		return "/run/modprobe.d"
	}
	return g.Dir
}

func (g Guard) sys() string {
	if g.Sys == "" {
		return "/sys"
	}
	return g.Sys
}

// Path is the file that Install writes.
func (g Guard) Path() string { return filepath.Join(g.dir(), fileName) }

// Loaded reports whether the kernel's RDMA core is there. It is asked of
// /sys/module, which no overlay of ours covers; ib_core has parameters, so it
// is there also when it is built in. Then of /sys/class/infiniband, if that is
// the kernel's: an overlay that a killed daemon left is not on sysfs.
func (g Guard) Loaded() (bool, error) {
	_, err := os.Stat(filepath.Join(g.sys(), "module", "ib_core"))
	switch {
	case err == nil:
		return true, nil
	case !errors.Is(err, os.ErrNotExist):
		return false, fmt.Errorf("look for ib_core: %w", err)
	}
	return onSysfs(filepath.Join(g.sys(), "class", "infiniband"))
}

// Check is Loaded as an error that says what to do.
func (g Guard) Check() error {
	loaded, err := g.Loaded()
	if err != nil {
		return err
	}
	if loaded {
		return ErrLoaded
	}
	return nil
}

// Install puts the guard in place, over a left-over one. Ask Loaded once more
// afterwards: until then the module could have come.
func (g Guard) Install() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("keep ib_core from loading: write %s: %w", g.Path(), err)
		}
	}()
	if err := os.MkdirAll(g.dir(), 0o755); err != nil {
		return err
	}
	// modprobe reads *.conf only, so never the temporary.
	f, err := os.CreateTemp(g.dir(), fileName+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, werr := f.WriteString(text)
	if err := errors.Join(werr, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), g.Path())
}

// Remove takes the guard away, and temporaries of a daemon that was killed
// while it wrote. Nothing there is no error.
func (g Guard) Remove() error {
	left, _ := filepath.Glob(filepath.Join(g.dir(), fileName+".*.tmp")) // only a bad pattern fails
	var errs []error
	for _, f := range append(left, g.Path()) {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("let ib_core load again: %w", err))
		}
	}
	return errors.Join(errs...)
}
