// Package idr holds the handle tables of open files: the numbers that a client
// sees in place of its objects (the kernel's drivers/infiniband/core/rdma_core.c).
//
// Who may call it: dispatch, from any goroutine.
//
// One Table belongs to one open file; two files share nothing, so no lock here
// is ever waited for by another client. Valid sequences for an object:
//
//	Begin → Commit            it exists; anyone may Use it
//	Begin → Abort             it never existed
//	Use → Object.Done         shared lock; Destroy answers EBUSY meanwhile
//	UseAlone → DoneAlone      exclusive lock: Use and Destroy answer EBUSY
//	Destroy(fn)               exclusive lock; fn fails: it exists as before
//	Ref / Unref               another object depends on it: Destroy is EBUSY
//	Retire                    the handles stay, for Destroy alone
//
// Lock order: Table.mu is a leaf; no callback runs under it.
package idr

import (
	"container/heap"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Kind is the type of an object; handles are checked against it. The kinds
// are the caller's.
type Kind uint8

// MaxObjects bounds one file's table, so that a client cannot grow the daemon
// without end. The kernel's bound is memory; this is far above what the device
// limits of hca/soft let one client create.
const MaxObjects = 1 << 20

// exclusive is the value of Object.lock while a Destroy runs.
const exclusive = -1

// Object is one entry of a table.
type Object struct {
	id    uint32
	kind  Kind
	live  bool         // guarded by Table.mu: committed
	lock  atomic.Int32 // users, or exclusive (uverbs_try_lock_object)
	deps  atomic.Int32 // objects that need this one (ib_pd.usecnt and kin)
	prev  *Object      // guarded by Table.mu: older neighbour in the list
	next  *Object      // guarded by Table.mu: newer neighbour
	Value any          // the caller's; set between Begin and Commit
	Cost  uint64       // the caller's
	// Dead is the caller's: what is behind the handle has gone. It is looked at
	// and set in the functions that Destroy, Retire and Teardown call, that is
	// under the exclusive lock.
	Dead bool
}

// ID is the handle that the client sees.
func (o *Object) ID() uint32 { return o.id }

// Kind is the object's type.
func (o *Object) Kind() Kind { return o.kind }

// Ref notes that another object depends on o; call it while o is in Use.
func (o *Object) Ref() { o.deps.Add(1) }

// Unref takes a Ref back.
func (o *Object) Unref() {
	if o.deps.Add(-1) < 0 {
		panic("idr: Unref without Ref")
	}
}

// Done ends a Use.
func (o *Object) Done() {
	if o.lock.Add(-1) < 0 {
		panic("idr: Done without Use")
	}
}

func (o *Object) tryUse() bool {
	for {
		n := o.lock.Load()
		if n == exclusive {
			return false
		}
		if o.lock.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Table is one file's handles. The zero value is ready.
type Table struct {
	// mu guards the members below. Leaf.
	mu     sync.RWMutex
	slots  []*Object // by handle
	free   idHeap    // holes in slots, lowest first
	newest *Object
	count  int
	closed bool
}

// Begin reserves the lowest free handle, as the kernel's xa_alloc does, for an
// object nobody can see yet. ENOMEM at MaxObjects, EIO after Teardown began.
func (t *Table) Begin(kind Kind) (*Object, error) {
	o := &Object{kind: kind}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return nil, fmt.Errorf("new handle: file is closing: %w", unix.EIO)
	case t.count >= MaxObjects:
		return nil, fmt.Errorf("new handle: %d objects already: %w", t.count, unix.ENOMEM)
	}
	if len(t.free) > 0 {
		o.id = heap.Pop(&t.free).(uint32)
		t.slots[o.id] = o
	} else {
		o.id = uint32(len(t.slots))
		t.slots = append(t.slots, o)
	}
	t.count++
	return o, nil
}

// Commit makes o visible, as the newest object. EIO (and o is as before) when
// Teardown has begun: the caller undoes what it made and calls Abort.
func (t *Table) Commit(o *Object) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return fmt.Errorf("commit handle %d: file is closing: %w", o.id, unix.EIO)
	}
	o.live = true
	o.prev = t.newest
	if t.newest != nil {
		t.newest.next = o
	}
	t.newest = o
	return nil
}

// Abort gives a handle back that was begun and not committed.
func (t *Table) Abort(o *Object) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dropLocked(o)
}

func (t *Table) dropLocked(o *Object) {
	if o.live {
		if o.next != nil {
			o.next.prev = o.prev
		} else {
			t.newest = o.prev
		}
		if o.prev != nil {
			o.prev.next = o.next
		}
		o.live, o.prev, o.next = false, nil, nil
	}
	t.slots[o.id] = nil
	t.count--
	heap.Push(&t.free, o.id)
}

func (t *Table) lookup(kind Kind, id uint32) (*Object, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if uint64(id) >= uint64(len(t.slots)) {
		return nil, unix.ENOENT
	}
	o := t.slots[id]
	if o == nil || !o.live {
		return nil, unix.ENOENT
	}
	if o.kind != kind {
		return nil, unix.EINVAL // uobj_get_type mismatch: rdma_lookup_get_uobject
	}
	return o, nil
}

// Check is the error that Use would give for a handle that nobody uses.
func (t *Table) Check(kind Kind, id uint32) error {
	_, err := t.lookup(kind, id)
	return err
}

// Use finds a handle and locks its object against destruction until Done.
// ENOENT: unknown. EINVAL: of another kind. EBUSY: being destroyed.
func (t *Table) Use(kind Kind, id uint32) (*Object, error) {
	o, err := t.lookup(kind, id)
	if err != nil {
		return nil, err
	}
	// A destroyed object stays exclusive, so a lookup that raced with its
	// destruction ends here even if the handle already names another.
	if !o.tryUse() {
		return nil, unix.EBUSY
	}
	return o, nil
}

// UseAlone finds a handle and locks its object against all others until
// DoneAlone (UVERBS_LOOKUP_WRITE). ENOENT: unknown. EINVAL: of another kind.
// EBUSY: in use.
func (t *Table) UseAlone(kind Kind, id uint32) (*Object, error) {
	o, err := t.lookup(kind, id)
	if err != nil {
		return nil, err
	}
	if !o.lock.CompareAndSwap(0, exclusive) {
		return nil, unix.EBUSY
	}
	return o, nil
}

// DoneAlone ends a UseAlone.
func (o *Object) DoneAlone() {
	if !o.lock.CompareAndSwap(exclusive, 0) {
		panic("idr: DoneAlone without UseAlone")
	}
}

// Destroy locks the object alone, runs fn, and drops the handle if fn
// succeeds. ENOENT: unknown. EINVAL: of another kind. EBUSY: in use by a
// command or needed by another object.
func (t *Table) Destroy(kind Kind, id uint32, fn func(*Object) error) error {
	o, err := t.lookup(kind, id)
	if err != nil {
		return err
	}
	return t.destroy(o, fn)
}

func (t *Table) destroy(o *Object, fn func(*Object) error) error {
	if !o.lock.CompareAndSwap(0, exclusive) {
		return unix.EBUSY
	}
	if o.deps.Load() != 0 {
		o.lock.Store(0)
		return unix.EBUSY
	}
	if err := fn(o); err != nil {
		o.lock.Store(0)
		return err
	}
	t.mu.Lock()
	t.dropLocked(o)
	t.mu.Unlock()
	// Left exclusive: see Use.
	return nil
}

// Teardown refuses new objects and destroys the rest, newest first; passes
// repeat while one makes progress (__uverbs_cleanup_ufile). It returns what
// could not be destroyed. No command may be running on the file.
func (t *Table) Teardown(fn func(*Object) error) []*Object {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	for {
		progress := false
		var left []*Object
		list, _ := t.list()
		for _, o := range list {
			if t.destroy(o, fn) == nil {
				progress = true
			} else {
				left = append(left, o)
			}
		}
		if len(left) == 0 || !progress {
			return left
		}
	}
}

// Retire refuses new objects and runs fn on the others, newest first, in passes as
// Teardown, but leaves their handles (uverbs_destroy_ufile_hw when the driver
// goes): fn marks what it has ended as Dead, and Destroy, which drops the handle,
// calls its own fn on the dead as well. It may be called again; no Destroy may run
// meanwhile. It returns how many objects are not dead: in use by a command, needed
// by one that is, or begun and not committed.
func (t *Table) Retire(fn func(*Object) error) (left int) {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	for {
		progress := false
		left = 0
		list, begun := t.list()
		for _, o := range list {
			switch ended, dead := o.retire(fn); {
			case ended:
				progress = true
			case !dead:
				left++
			}
		}
		if left == 0 || !progress {
			return left + begun
		}
	}
}

// retire runs fn on o: ended if that did something, dead if there was nothing to
// do.
func (o *Object) retire(fn func(*Object) error) (ended, dead bool) {
	if !o.lock.CompareAndSwap(0, exclusive) {
		return false, false
	}
	defer o.lock.Store(0)
	if o.Dead {
		return false, true
	}
	if o.deps.Load() != 0 {
		return false, false
	}
	return fn(o) == nil, false
}

// list is the live objects, newest first, and how many are begun.
func (t *Table) list() (live []*Object, begun int) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	live = make([]*Object, 0, t.count)
	for o := t.newest; o != nil; o = o.prev {
		live = append(live, o)
	}
	return live, t.count - len(live)
}

// Counts is the number of live objects by kind, for status.
func (t *Table) Counts() map[Kind]int {
	m := make(map[Kind]int)
	t.mu.RLock()
	defer t.mu.RUnlock()
	for o := t.newest; o != nil; o = o.prev {
		m[o.kind]++
	}
	return m
}

// idHeap is a min-heap of free handles.
type idHeap []uint32

func (h idHeap) Len() int           { return len(h) }
func (h idHeap) Less(i, j int) bool { return h[i] < h[j] }
func (h idHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *idHeap) Push(x any)        { *h = append(*h, x.(uint32)) }
func (h *idHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}
