package hca

import (
	"fmt"
	"slices"
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

// Consumer is told of devices that come and go: the kernel's struct ib_client.
// It is a pointer, or another type that == can compare.
//
// Both methods may sleep, and may call the registry; for what they must not do,
// see Unregister and RemoveConsumer. For one device they never run at the same
// time, for two they may.
type Consumer interface {
	// Add announces a device that is ready in every way. It may be used until
	// Remove returns.
	Add(e *Entry)
	// Remove ends the use of a device: when it returns, nothing of the consumer's
	// is left on it. It follows each Add once.
	Remove(e *Entry)
}

// Registry holds the devices of this daemon and those who want to know of them
// (drivers/infiniband/core/device.c). Its zero value is ready. Entries are
// immutable once registered. No lock is held over a callback.
type Registry struct {
	// mu guards the members below and what is in them. Leaf.
	mu        sync.RWMutex
	devices   []*registration // in order of their coming, those that go included
	consumers []*membership   // in order of their coming, those that go included
}

// registration is a device from Register's begin to Unregister's end.
type registration struct {
	entry *Entry
	going bool // an Unregister has begun: nobody finds it or is told of it any more
	uses  map[*membership]*use
}

// membership is a consumer from AddConsumer's begin to RemoveConsumer's end.
type membership struct {
	consumer Consumer
	going    bool
}

// use is one consumer's use of one device, from the begin of Add to the end of
// Remove.
type use struct {
	removing bool          // Remove is due or runs
	added    chan struct{} // closed when Add has returned
	removed  chan struct{} // closed when Remove has returned
}

// Register announces a device that is ready in every way: its node exists and
// its methods may be called. It returns when every consumer has been told, the
// oldest first (ib_register_device). EEXIST for a name or index that is taken, as
// it is until Unregister has returned.
func (r *Registry) Register(e *Entry) error {
	r.mu.Lock()
	for _, o := range r.devices {
		if o.entry.Name == e.Name || o.entry.Index == e.Index {
			r.mu.Unlock()
			return fmt.Errorf("register %s (%s): %w", e.Name, e.UverbsName(), unix.EEXIST)
		}
	}
	reg := &registration{entry: e, uses: make(map[*membership]*use)}
	r.devices = append(r.devices, reg)
	consumers := slices.Clone(r.consumers)
	r.mu.Unlock()
	for _, m := range consumers {
		r.add(reg, m)
	}
	return nil
}

// Unregister takes a device out (ib_unregister_device): nobody finds it from now
// on; each consumer's Remove is called, the newest first. The device must remain
// usable until Unregister returns, which is when all have finished. ENODEV if it
// is not there or is being unregistered already.
//
// It waits for an Add or Remove of the device that runs: no consumer may call it
// for a device from within that device's callbacks, as in the kernel.
func (r *Registry) Unregister(name string) error {
	r.mu.Lock()
	i := slices.IndexFunc(r.devices, func(reg *registration) bool { return reg.entry.Name == name && !reg.going })
	if i < 0 {
		r.mu.Unlock()
		return fmt.Errorf("unregister %s: %w", name, unix.ENODEV)
	}
	reg := r.devices[i]
	reg.going = true
	consumers := slices.Clone(r.consumers)
	r.mu.Unlock()
	for _, m := range slices.Backward(consumers) {
		r.remove(reg, m)
	}
	r.mu.Lock()
	r.devices = slices.DeleteFunc(r.devices, func(o *registration) bool { return o == reg })
	r.mu.Unlock()
	return nil
}

// AddConsumer tells c of every device there is, the oldest first, and of each that
// comes (ib_register_client). EEXIST: it is there already.
func (r *Registry) AddConsumer(c Consumer) error {
	r.mu.Lock()
	if slices.ContainsFunc(r.consumers, func(m *membership) bool { return m.consumer == c }) {
		r.mu.Unlock()
		return fmt.Errorf("add consumer: %w", unix.EEXIST)
	}
	m := &membership{consumer: c}
	r.consumers = append(r.consumers, m)
	devices := slices.Clone(r.devices)
	r.mu.Unlock()
	for _, reg := range devices {
		r.add(reg, m)
	}
	return nil
}

// RemoveConsumer calls c's Remove for each device that it uses, the newest first,
// and returns when that is done (ib_unregister_client); c is told of nothing any
// more. ENOENT if it is not there or is being removed already. It must not be
// called from within c's own callbacks.
func (r *Registry) RemoveConsumer(c Consumer) error {
	r.mu.Lock()
	i := slices.IndexFunc(r.consumers, func(m *membership) bool { return m.consumer == c && !m.going })
	if i < 0 {
		r.mu.Unlock()
		return fmt.Errorf("remove consumer: %w", unix.ENOENT)
	}
	m := r.consumers[i]
	m.going = true
	devices := slices.Clone(r.devices)
	r.mu.Unlock()
	for _, reg := range slices.Backward(devices) {
		r.remove(reg, m)
	}
	r.mu.Lock()
	r.consumers = slices.DeleteFunc(r.consumers, func(o *membership) bool { return o == m })
	r.mu.Unlock()
	return nil
}

// add tells m of reg, unless one of them goes or somebody has: then it waits for
// him, so that who registers knows that all have been told.
func (r *Registry) add(reg *registration, m *membership) {
	r.mu.Lock()
	u, told := reg.uses[m]
	if !told {
		if reg.going || m.going {
			r.mu.Unlock()
			return
		}
		u = &use{added: make(chan struct{}), removed: make(chan struct{})}
		reg.uses[m] = u
	}
	r.mu.Unlock()
	if told {
		<-u.added
		return
	}
	defer close(u.added)
	m.consumer.Add(reg.entry)
}

// remove ends m's use of reg, or waits for who does. One of them goes: there
// will be no new use.
func (r *Registry) remove(reg *registration, m *membership) {
	r.mu.Lock()
	u := reg.uses[m]
	if u == nil {
		r.mu.Unlock()
		return
	}
	mine := !u.removing
	u.removing = true
	r.mu.Unlock()
	if !mine {
		<-u.removed
		return
	}
	<-u.added
	defer func() {
		r.mu.Lock()
		delete(reg.uses, m)
		r.mu.Unlock()
		close(u.removed)
	}()
	m.consumer.Remove(reg.entry)
}

// List is the devices in order of index, without those that are going.
func (r *Registry) List() []*Entry {
	r.mu.RLock()
	defer r.mu.RUnlock()
	l := make([]*Entry, 0, len(r.devices))
	for _, reg := range r.devices {
		if !reg.going {
			l = append(l, reg.entry)
		}
	}
	sort.Slice(l, func(i, j int) bool { return l[i].Index < l[j].Index })
	return l
}
