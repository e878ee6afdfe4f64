package sysfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"go.uber.org/zap"

	"github.com/uverbsd/uverbsd/hca"
)

// Options says where; the zero value is the product's.
type Options struct {
	MountPoint string // private place of the FUSE file system; /run/uverbsd/class
	ClassDir   string // what the overlay covers; /sys/class
	Log        *zap.Logger
}

func (o Options) withDefaults() Options {
	if o.MountPoint == "" {
		o.MountPoint = "/run/uverbsd/class"
	}
	if o.ClassDir == "" {
		o.ClassDir = "/sys/class"
	}
	o.MountPoint, o.ClassDir = filepath.Clean(o.MountPoint), filepath.Clean(o.ClassDir)
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	return o
}

// layerDir is the overlay's own layer. It must not be under MountPoint, which a
// dead daemon leaves unusable.
func (o Options) layerDir() string { return o.MountPoint + ".layer" }

// fsName is the source of our mounts in mountinfo; Clean knows them by it.
const fsName = "uverbsd"

// Tree is a mounted class tree.
type Tree struct {
	opt     Options
	reg     *hca.Registry
	born    time.Time // mtime of the class directories
	server  *fuse.Server
	overlay *overlay

	// mu guards devs and lastGen and serialises sync's look at the registry.
	mu      sync.Mutex
	devs    map[*hca.Entry]*device
	lastGen uint64

	closeOnce sync.Once
	closeErr  error
}

// newTree makes the tree without mounting anything.
func newTree(reg *hca.Registry, opt Options) *Tree {
	t := &Tree{opt: opt.withDefaults(), reg: reg, born: time.Now(), devs: make(map[*hca.Entry]*device)}
	t.sync()
	return t
}

// Mount serves the tree and lays it over opt.ClassDir. When it returns, clients
// find the devices there. The caller has run Clean, and has made sure that the
// kernel's own stack is not loaded (udev/modprobe).
func Mount(reg *hca.Registry, opt Options) (*Tree, error) {
	t := newTree(reg, opt)
	if err := t.serve(); err != nil {
		return nil, err
	}
	o, err := newOverlay(t.opt)
	if err != nil {
		return nil, errors.Join(err, t.unserve())
	}
	t.overlay = o
	return t, nil
}

// serve mounts the FUSE file system at its private place.
func (t *Tree) serve() error {
	mp := t.opt.MountPoint
	if err := os.MkdirAll(mp, 0o755); err != nil {
		return fmt.Errorf("make the class tree's mount point: %w", err)
	}
	fd, err := mountFUSE(mp)
	if err != nil {
		return err
	}
	// Timeouts are zero: every look-up asks the registry, so that a device is
	// seen, and missed, from the moment that it comes or goes.
	var zero time.Duration
	t.server, err = fs.Mount(fmt.Sprintf("/dev/fd/%d", fd), t.root(), &fs.Options{
		EntryTimeout: &zero, AttrTimeout: &zero, NegativeTimeout: &zero,
		MountOptions: fuse.MountOptions{
			Name: fsName, FsName: fsName, AllowOther: true,
			Logger: zap.NewStdLog(t.opt.Log.Named("go-fuse")),
			// Nothing here has them: spare a round trip on each access.
			DisableXAttrs: true,
			DisableSplice: true, // texts of a few bytes
		},
	})
	if err != nil {
		// After a failed handshake go-fuse may or may not have closed fd; without
		// its mount it is harmless.
		return errors.Join(fmt.Errorf("serve the class tree at %s: %w", mp, err), removeFUSE(t.opt))
	}
	settlePoll(filepath.Join(mp, verbsClass, "abi_version"))
	return nil
}

// endTime is how long go-fuse may take to see that its connection has ended.
const endTime = 5 * time.Second

// unserve ends the FUSE file system even if clients have files of it open:
// they get ENOTCONN.
func (t *Tree) unserve() error {
	mp := t.opt.MountPoint
	if err := removeFUSE(t.opt); err != nil {
		return err
	}
	done := make(chan struct{})
	go func() { t.server.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(endTime):
		return fmt.Errorf("unmount %s: a client still holds files of it; they end with this process", mp)
	}
	return removeDir(mp)
}

// Changed tells the tree that devices came or went. When it returns, no method
// of a device that is out of the registry is running or will be called: call
// it between Unregister and the device's end.
func (t *Tree) Changed() { t.sync() }

// Close takes the tree away: the overlay with what is mounted in it, then the
// file system. What clients still hold open goes stale; nothing stays mounted.
func (t *Tree) Close() error {
	t.closeOnce.Do(func() {
		t.closeErr = errors.Join(t.overlay.close(), t.unserve())
	})
	return t.closeErr
}
