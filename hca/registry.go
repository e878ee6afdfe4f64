package hca

import (
	"fmt"
	"sort"
	"sync"

	"golang.org/x/sys/unix"
)

// Entry is a registered device with the names that clients know it by.
type Entry struct {
	Name     string // ibdev name, e.g. "qib0"
	Index    int    // N of uverbsN
	Device   Device
	Provider Provider
	// Node is the device number of /dev/infiniband/uverbsN, from unix.Mkdev;
	// 0 until the node exists.
	Node uint64
}

// UverbsName is the node's name under /dev/infiniband and in
// class/infiniband_verbs.
func (e *Entry) UverbsName() string { return fmt.Sprintf("uverbs%d", e.Index) }

// Registry holds the devices of this daemon. Its zero value is ready. Entries
// are immutable once registered.
type Registry struct {
	// mu guards entries. Nothing is called under it.
	mu      sync.RWMutex
	entries map[string]*Entry
}

// Register announces a device that is ready in every way: its node exists and
// its methods may be called. EEXIST for a name or index that is taken.
func (r *Registry) Register(e *Entry) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.entries {
		if o.Name == e.Name || o.Index == e.Index {
			return fmt.Errorf("register %s (%s): %w", e.Name, e.UverbsName(), unix.EEXIST)
		}
	}
	if r.entries == nil {
		r.entries = make(map[string]*Entry)
	}
	r.entries[e.Name] = e
	return nil
}

// Unregister takes a device out; ENODEV if it is not there.
func (r *Registry) Unregister(name string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.entries[name]; !ok {
		return fmt.Errorf("unregister %s: %w", name, unix.ENODEV)
	}
	delete(r.entries, name)
	return nil
}

// List is the devices in order of index.
func (r *Registry) List() []*Entry {
	r.mu.RLock()
	defer r.mu.RUnlock()
	l := make([]*Entry, 0, len(r.entries))
	for _, e := range r.entries {
		l = append(l, e)
	}
	sort.Slice(l, func(i, j int) bool { return l[i].Index < l[j].Index })
	return l
}
