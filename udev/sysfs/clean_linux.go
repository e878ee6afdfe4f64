package sysfs

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Clean removes what a killed daemon left: our overlays on opt.ClassDir with all
// that is mounted in them, our dead file system at opt.MountPoint, and the two
// directories. It may be called at any time and any number of times. It leaves
// alone what is not ours, and refuses while a live daemon serves the tree.
func Clean(opt Options) error {
	opt = opt.withDefaults()
	if err := refuseLive(opt.MountPoint); err != nil {
		return err
	}
	return errors.Join(
		removeOverlays(opt),
		removeFUSE(opt),
		removeLayer(opt.layerDir()),
		removeDir(opt.MountPoint))
}

func removeDir(dir string) error {
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// removeOverlays takes our overlays off opt.ClassDir, however many lie there.
// One is ours by its source and its first layer.
func removeOverlays(opt Options) error {
	return removeMounts(opt.ClassDir, false, func(m mountEntry) bool {
		return m.fsType == "overlay" && m.source == fsName &&
			strings.Contains(","+m.options, ",lowerdir="+opt.layerDir()+":")
	})
}

// removeFUSE takes our file systems off opt.MountPoint, dead or alive. It ends
// their connections first, so that nobody waits on them any more.
func removeFUSE(opt Options) error {
	return removeMounts(opt.MountPoint, true, func(m mountEntry) bool {
		return m.fsType == "fuse."+fsName && m.source == fsName
	})
}

// maxStacked bounds the mounts that we take off one place: a loop that does
// not end is worse than a left-over.
const maxStacked = 64

// removeMounts takes mounts off dir from the top while they are ours.
func removeMounts(dir string, force bool, ours func(mountEntry) bool) error {
	for range maxStacked {
		stack, err := mountsAt(dir)
		if err != nil {
			return err
		}
		if len(stack) == 0 {
			return nil
		}
		if !ours(stack[len(stack)-1]) {
			for _, m := range stack {
				if ours(m) {
					return fmt.Errorf("clean %s: a foreign mount (%s, source %s) lies over uverbsd's; unmount it first",
						dir, stack[len(stack)-1].fsType, stack[len(stack)-1].source)
				}
			}
			return nil
		}
		// EINVAL: somebody else (the keeper, ExecStopPost) was quicker; look again.
		if err := detach(dir, stack[len(stack)-1].id, force); err != nil && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	return fmt.Errorf("clean %s: more than %d mounts there; look at /proc/self/mountinfo", dir, maxStacked)
}

// answerTime is how long a live daemon may take to answer one stat.
const answerTime = 3 * time.Second

// refuseLive fails if somebody answers behind our file system at dir.
func refuseLive(dir string) error {
	stack, err := mountsAt(dir)
	if err != nil {
		return err
	}
	if len(stack) == 0 || stack[len(stack)-1].fsType != "fuse."+fsName {
		return nil
	}
	res := make(chan error, 1)
	live := false
	go func() {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		live = st.Type == unix.FUSE_SUPER_MAGIC // else it has been unmounted meanwhile
		res <- err
	}()
	select {
	case err = <-res:
	case <-time.After(answerTime):
		return fmt.Errorf("clean %s: a uverbsd holds it but does not answer; kill that process first", dir)
	}
	switch {
	case err == nil && !live, errors.Is(err, unix.ENOENT):
		return nil
	case err == nil:
		return fmt.Errorf("clean %s: a running uverbsd serves it; stop that one first", dir)
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED):
		return nil // its daemon is dead
	}
	return fmt.Errorf("clean %s: stat: %w", dir, err)
}

// mountEntry is a line of mountinfo.
type mountEntry struct {
	id, parent string
	dir        string
	fsType     string
	source     string
	options    string // of the superblock
}

// mountsAt is the stack of mounts at dir, lowest first.
func mountsAt(dir string) ([]mountEntry, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	return stackAt(string(b), dir), nil
}

// stackAt orders the mounts at dir by who is mounted on whom: mountinfo lists
// them in no promised order.
func stackAt(mountinfo, dir string) []mountEntry {
	var at []mountEntry
	for line := range strings.Lines(mountinfo) {
		if m, ok := parseMount(line); ok && m.dir == dir {
			at = append(at, m)
		}
	}
	var stack []mountEntry
	for len(stack) < len(at) {
		n := len(stack)
		for _, m := range at {
			// The lowest hangs on a mount elsewhere, each other one on the last.
			isNext := n > 0 && m.parent == stack[n-1].id
			if n == 0 {
				isNext = true
				for _, o := range at {
					isNext = isNext && o.id != m.parent
				}
			}
			if isNext {
				stack = append(stack, m)
				break
			}
		}
		if len(stack) == n {
			break // not a stack: hidden by a mount further up
		}
	}
	return stack
}

// parseMount reads "id parent maj:min root dir opts … - type source sbopts".
func parseMount(line string) (mountEntry, bool) {
	left, right, ok := strings.Cut(strings.TrimSpace(line), " - ")
	l, r := strings.Fields(left), strings.Fields(right)
	if !ok || len(l) < 6 || len(r) < 3 {
		return mountEntry{}, false
	}
	return mountEntry{id: l[0], parent: l[1], dir: unescape(l[4]),
		fsType: r[0], source: unescape(r[1]), options: unescape(r[2])}, true
}

var octals = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func unescape(s string) string { return octals.Replace(s) }
