package sysfs

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// device is one registered device as the tree sees it, from first sight to last.
type device struct {
	tree  *Tree
	entry *hca.Entry
	gen   uint64    // sets its inode numbers apart from those of an earlier device of that name
	born  time.Time // mtime of its directories: its identity to libibverbs, never changes

	// mu is held shared while a method of the device runs, and exclusively to
	// set gone; so whoever has set gone knows that no method runs any more.
	mu   sync.RWMutex
	gone bool
}

// sync brings devs in line with the registry and returns the devices in order
// of index. It waits for the methods of devices that have gone.
func (t *Tree) sync() []*device {
	t.mu.Lock()
	list := t.reg.List()
	devs := make([]*device, 0, len(list))
	for _, e := range list {
		d := t.devs[e]
		if d == nil {
			t.lastGen++
			d = &device{tree: t, entry: e, gen: t.lastGen, born: time.Now()}
			t.devs[e] = d
		}
		devs = append(devs, d)
	}
	var gone []*device
	for e, d := range t.devs {
		if !slices.Contains(list, e) {
			delete(t.devs, e)
			gone = append(gone, d)
		}
	}
	t.mu.Unlock()
	for _, d := range gone {
		d.mu.Lock()
		d.gone = true
		d.mu.Unlock()
	}
	return devs
}

// use runs f, which may call the device's methods; ENODEV, as the kernel's
// sysfs has it, once the device has left the registry.
func (d *device) use(f func(hca.Device) (string, error)) (string, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.gone || !slices.Contains(d.tree.reg.List(), d.entry) {
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
