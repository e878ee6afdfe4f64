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

	// mu guards devs and lastGen.
	mu      sync.Mutex
	devs    map[*hca.Entry]*device
	lastGen uint64

	closeOnce sync.Once
	closeErr  error
}

// newTree makes the tree without mounting anything, and fills it.
func newTree(reg *hca.Registry, opt Options) *Tree {
	t := &Tree{opt: opt.withDefaults(), reg: reg, born: time.Now(), devs: make(map[*hca.Entry]*device)}
	_ = reg.AddConsumer(t) // fails only for one that is there
	return t
}

// leave takes the tree off the registry's list.
func (t *Tree) leave() { _ = t.reg.RemoveConsumer(t) }

// Mount serves the tree and lays it over opt.ClassDir. When it returns, clients
// find the devices there, those of the moment at any time: the tree is a consumer
// of reg. The caller has run Clean, and has made sure that the
// kernel's own stack is not loaded (udev/modprobe).
func Mount(reg *hca.Registry, opt Options) (*Tree, error) {
	t := newTree(reg, opt)
	if err := t.serve(); err != nil {
		t.leave()
		return nil, err
	}
	o, err := newOverlay(t.opt)
	if err != nil {
		t.leave()
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
	// Timeouts are zero: every look-up asks us, so that a device is
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

// Close takes the tree away: the overlay with what is mounted in it, then the
// file system. What clients still hold open goes stale; nothing stays mounted.
func (t *Tree) Close() error {
	t.closeOnce.Do(func() {
		t.leave()
		t.closeErr = errors.Join(t.overlay.close(), t.unserve())
	})
	return t.closeErr
}
