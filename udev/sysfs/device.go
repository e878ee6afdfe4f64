package sysfs

import (
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// device is one registered device as the tree sees it, from first sight to last.
type device struct {
	entry *hca.Entry
	gen   uint64    // sets its inode numbers apart from those of an earlier device of that name
	born  time.Time // mtime of its directories: its identity to libibverbs, never changes

	// mu is held shared while a method of the device runs, and exclusively to
	// set gone; so whoever has set gone knows that no method runs any more.
	mu   sync.RWMutex
	gone bool
}

// Add implements hca.Consumer: from now on clients find the device.
func (t *Tree) Add(e *hca.Entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lastGen++
	t.devs[e] = &device{entry: e, gen: t.lastGen, born: time.Now()}
}

// Remove implements hca.Consumer: from now on nobody finds the device. It waits for
// the device's methods that run; none will be called any more.
func (t *Tree) Remove(e *hca.Entry) {
	t.mu.Lock()
	d := t.devs[e]
	delete(t.devs, e)
	t.mu.Unlock()
	d.mu.Lock()
	d.gone = true
	d.mu.Unlock()
}

// devices is what there is now, in order of index.
func (t *Tree) devices() []*device {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.SortedFunc(maps.Values(t.devs), func(a, b *device) int { return a.entry.Index - b.entry.Index })
}

// use runs f, which may call the device's methods; ENODEV, as the kernel's
// sysfs has it, once the device has left the tree.
func (d *device) use(f func(hca.Device) (string, error)) (string, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.gone {
		return "", unix.ENODEV
	}
	return f(d.entry.Device)
}

// attr, port and counters are the device's answers for directory listings;
// a device that has gone, or fails, lists as empty.
func (d *device) attr() hca.DeviceAttr {
	var a hca.DeviceAttr
	_, _ = d.use(func(dev hca.Device) (string, error) { a = *dev.Attr(); return "", nil })
	return a
}

func (d *device) port(n uint8) hca.PortAttr {
	var a hca.PortAttr
	_, _ = d.use(func(dev hca.Device) (s string, err error) { a, err = dev.Port(n); return "", err })
	return a
}

func (d *device) counters(n uint8) map[string]uint64 {
	var c map[string]uint64
	_, _ = d.use(func(dev hca.Device) (s string, err error) { c, err = dev.Counters(n); return "", err })
	return c
}
