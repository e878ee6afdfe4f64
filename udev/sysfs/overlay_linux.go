package sysfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// overlay is what lies over /sys/class: see the package comment.
type overlay struct {
	opt  Options
	base int // O_PATH of the real class directory, from before it was covered
	top  int // O_PATH of the overlay's root

	watch *watcher
	needs func(name string) bool // needsBind, but for tests

	// mu serialises refresh and guards the two below.
	mu    sync.Mutex
	seen  []string         // the real classes at the last refresh
	bound map[string]bound // classes bound over the overlay
}

// bound is one of the kernel's classes that is bound over the overlay.
type bound struct {
	ino uint64 // of the real one
	fd  int    // of the mount, as bind returns it
}

// newOverlay covers opt.ClassDir and binds our classes into it.
func newOverlay(opt Options) (*overlay, error) {
	o := &overlay{opt: opt, base: -1, top: -1, bound: make(map[string]bound)}
	o.needs = o.needsBind
	if err := o.open(); err != nil {
		return nil, errors.Join(err, o.close())
	}
	return o, nil
}

func (o *overlay) open() (err error) {
	layer := o.opt.layerDir()
	if err := makeLayer(layer); err != nil {
		return err
	}
	if o.base, err = openPath(o.opt.ClassDir); err != nil {
		return err
	}
	err = unix.Mount(fsName, o.opt.ClassDir, "overlay", overlayFlags, "lowerdir="+layer+":"+o.opt.ClassDir)
	if err != nil {
		return fmt.Errorf("mount an overlay on %s (is the overlay module there?): %w", o.opt.ClassDir, err)
	}
	if o.top, err = openPath(o.opt.ClassDir); err != nil {
		return err
	}
	for _, c := range classes {
		fd, err := bind(unix.AT_FDCWD, filepath.Join(o.opt.MountPoint, c), filepath.Join(o.opt.ClassDir, c))
		if err != nil {
			return err
		}
		_ = unix.Close(fd) // goes with the overlay
	}
	// Listen first, look second: no class can slip through between.
	if o.watch, err = newWatcher(o.refresh); err != nil {
		return err
	}
	o.refresh()
	return nil
}

const overlayFlags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// close undoes open, as far as it came.
func (o *overlay) close() error {
	if o.watch != nil {
		o.watch.close()
	}
	fds := []int{o.base, o.top}
	for _, b := range o.bound {
		fds = append(fds, b.fd)
	}
	for _, fd := range fds {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	o.base, o.top, o.bound = -1, -1, nil
	return errors.Join(removeOverlays(o.opt), removeLayer(o.opt.layerDir()))
}

// refresh makes up for what the overlay does to the kernel's classes. It runs
// at start and whenever the kernel has said that something came or went.
func (o *overlay) refresh() {
	o.mu.Lock()
	defer o.mu.Unlock()
	ents, err := readDirAt(o.base, ".")
	if err != nil {
		o.opt.Log.Warn("cannot list the kernel's classes; a class that came may stay unseen", zap.Error(err))
		return
	}
	now := make(map[string]uint64)
	var names []string // with the inode: a class that went and came is another
	for _, e := range ents {
		if !e.IsDir() || slices.Contains(classes[:], e.Name()) {
			continue
		}
		ino, err := inoAt(o.base, e.Name())
		if err != nil {
			continue // gone since
		}
		now[e.Name()] = ino
		names = append(names, e.Name()+" "+strconv.FormatUint(ino, 10))
	}
	slices.Sort(names)
	if slices.Equal(names, o.seen) {
		return
	}
	o.seen = names

	for name, b := range o.bound {
		if now[name] != b.ino {
			o.warn("unbind", name, unbind(b.fd))
			delete(o.bound, name)
		}
	}
	o.warn("refresh", o.opt.ClassDir, o.forget())
	for name, ino := range now {
		if _, ok := o.bound[name]; ok || !o.needs(name) {
			continue
		}
		fd, err := bind(o.base, name, filepath.Join(o.opt.ClassDir, name))
		if err != nil {
			o.warn("bind", name, err)
			continue
		}
		o.bound[name] = bound{ino, fd}
	}
}

func (o *overlay) warn(what, name string, err error) {
	if err != nil {
		o.opt.Log.Warn("class tree: cannot "+what+" the kernel's class; its own attributes may be stale or read-only until restart",
			zap.String("class", name), zap.Error(err))
	}
}

// needsBind says whether a class has attributes of its own, or may get some
// without a class coming or going: bonding_masters appears in net.
func (o *overlay) needsBind(name string) bool {
	if name == "net" {
		return true
	}
	ents, err := readDirAt(o.base, name)
	return err == nil && slices.ContainsFunc(ents, func(e os.DirEntry) bool { return e.Type().IsRegular() })
}

// forget makes the overlay drop the names that it remembers, absent ones and
// stale ones: a remount that changes nothing shrinks the dentry cache.
func (o *overlay) forget() error {
	if err := unix.Mount(fsName, fdPath(o.top), "overlay", unix.MS_REMOUNT|overlayFlags, ""); err != nil {
		return fmt.Errorf("remount the overlay on %s: %w", o.opt.ClassDir, err)
	}
	return nil
}
