package soft

import (
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
)

const (
	mrChunkBits = 12
	mrChunk     = 1 << mrChunkBits
	mrIndexMax  = 1<<24 - 1 // what is left of a key beside the generation
	// mrRest is how many keys are given back before one comes again: a stale
	// key finds a new region after 65536·256 registrations at the earliest,
	// and a table of few regions stays within half a megabyte.
	mrRest = 1 << 16
)

// mrTable finds regions by key without a lock: a table of tables of pointers,
// the lower ones made on demand and never freed. Windows have keys of the same
// kind, so that no key is a region's and a window's at once; as long as windows
// are bound to nothing their places are empty.
type mrTable struct {
	chunks [(mrIndexMax + 1) / mrChunk]atomic.Pointer[[mrChunk]atomic.Pointer[MR]]

	// mu guards the rest. Leaf.
	mu     sync.Mutex
	max    uint32
	n      uint32         // regions
	ids    numbers        // of keys; index 0 is not used, so that key 0 is invalid
	spaces map[any]*space // by hca.Memory
}

func (t *mrTable) init(maxMR, maxMW uint32) {
	t.max = min(maxMR, mrIndexMax)
	t.ids = numbers{next: 1, last: min(maxMR+maxMW, mrIndexMax), rest: mrRest}
	t.spaces = make(map[any]*space)
}

// keyLocked is a key that nothing has.
func (t *mrTable) keyLocked() (uint32, error) {
	n, used, ok := t.ids.get()
	switch {
	case !ok:
		return 0, fmt.Errorf("no key left: %w", enomem)
	case used:
		return n&^0xff | (n+1)&0xff, nil
	}
	return n << 8, nil
}

// windowKey is a key by which no region is found.
func (t *mrTable) windowKey() (uint32, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.keyLocked()
}

func (t *mrTable) putWindowKey(key uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ids.put(key)
}

// slot is a key's place; nil if nothing ever was near it.
func (t *mrTable) slot(key uint32) *atomic.Pointer[MR] {
	i := key >> 8
	c := t.chunks[i>>mrChunkBits].Load()
	if c == nil {
		return nil
	}
	return &c[i%mrChunk]
}

func (t *mrTable) insert(m *MR) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n >= t.max {
		return fmt.Errorf("%d exist already: %w", t.max, enomem)
	}
	key, err := t.keyLocked()
	if err != nil {
		return err
	}
	t.n++
	m.key = key
	c := &t.chunks[key>>8>>mrChunkBits]
	if c.Load() == nil {
		c.Store(new([mrChunk]atomic.Pointer[MR]))
	}
	m.space = t.joinLocked(m.mem)
	t.slot(key).Store(m)
	return nil
}

// replace puts n, which has m's key, into m's place, and makes m dead. n.space is
// m's, or nil for it to be found. EINVAL if m is closed.
func (t *mrTable) replace(m, n *MR) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.slot(m.key)
	if s.Load() != m || m.dead.Load() {
		return fmt.Errorf("key %#x is closed: %w", m.key, einval)
	}
	if n.space == nil { // else m's reference passes to n
		n.space = t.joinLocked(n.mem)
		t.leaveLocked(m)
	}
	s.Store(n)
	m.dead.Store(true)
	return nil
}

func (t *mrTable) remove(m *MR) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.slot(m.key)
	if s.Load() != m {
		return // a Rereg was faster: the place is another region's
	}
	s.Store(nil)
	t.ids.put(m.key)
	t.n--
	t.leaveLocked(m)
}

// joinLocked is the space of a memory, with one more reference.
func (t *mrTable) joinLocked(mem hca.Memory) *space {
	if !reflect.TypeOf(mem).Comparable() {
		s := newSpace()
		s.refs = 1
		return s
	}
	s := t.spaces[mem]
	if s == nil {
		s = newSpace()
		t.spaces[mem] = s
	}
	s.refs++
	return s
}

func (t *mrTable) leaveLocked(m *MR) {
	if m.space.refs--; m.space.refs == 0 && reflect.TypeOf(m.mem).Comparable() {
		delete(t.spaces, m.mem)
	}
}

// lookup finds the region of a key; nil if there is none.
func (t *mrTable) lookup(key uint32) *MR {
	s := t.slot(key)
	if s == nil {
		return nil
	}
	m := s.Load()
	if m == nil || m.key != key {
		return nil
	}
	return m
}
