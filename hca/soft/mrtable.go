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
	mrIndexMax  = 1<<24 - 1 // what is left of a key beside its low byte
	// mrRest is how many keys are given back before the place of one is used
	// again, with another low byte: a stale key finds a new region after 2·65536
	// registrations at the earliest, and then once in 255 times; a table of few
	// regions stays within half a megabyte.
	mrRest = 1 << 16
)

// places are a table of tables of pointers, the lower ones made on demand and
// never freed; read without a lock.
type places[T any] [(mrIndexMax + 1) / mrChunk]atomic.Pointer[[mrChunk]atomic.Pointer[T]]

// at is what is in place i, nil if there is nothing.
func (p *places[T]) at(i uint32) *T {
	c := p[i>>mrChunkBits].Load()
	if c == nil {
		return nil
	}
	return c[i%mrChunk].Load()
}

// put fills place i. One caller at a time.
func (p *places[T]) put(i uint32, v *T) {
	c := &p[i>>mrChunkBits]
	if c.Load() == nil {
		c.Store(new([mrChunk]atomic.Pointer[T]))
	}
	c.Load()[i%mrChunk].Store(v)
}

// mrTable finds regions and windows by key without a lock. Both have keys of one
// kind, so that no key is a region's and a window's at once: in a place of one
// table the other has nothing.
type mrTable struct {
	perm    keyPerm // constant
	regions places[MR]
	windows places[MW]

	// mu guards the rest. Leaf.
	mu     sync.Mutex
	max    uint32
	n      uint32         // regions
	ids    numbers        // index<<8 | last low byte; index 0 is not used
	random randomBytes    // for low bytes
	spaces map[any]*space // by hca.Memory, or by hca.SharedPiece.Key
}

func (t *mrTable) init(maxMR, maxMW uint32) {
	t.perm.init()
	t.max = min(maxMR, mrIndexMax)
	t.ids = numbers{next: 1, last: min(maxMR+maxMW, mrIndexMax), rest: mrRest}
	t.spaces = make(map[any]*space)
}

// index is the place of a key.
func (t *mrTable) index(key uint32) uint32 { return t.perm.index(key >> 8) }

// newKeyLocked is a key that nothing has, and its place.
func (t *mrTable) newKeyLocked() (key, place uint32, err error) {
	n, used, ok := t.ids.get()
	if !ok {
		return 0, 0, fmt.Errorf("no key left: %w", enomem)
	}
	if used {
		return t.perm.scramble(n>>8)<<8 | uint32(t.random.after(byte(n))), n >> 8, nil
	}
	return t.perm.scramble(n)<<8 | uint32(t.random.next()), n, nil
}

func (t *mrTable) freeKeyLocked(key uint32) { t.ids.put(t.index(key)<<8 | key&0xff) }

func (t *mrTable) insert(m *MR) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n >= t.max {
		return fmt.Errorf("%d exist already: %w", t.max, enomem)
	}
	key, place, err := t.newKeyLocked()
	if err != nil {
		return err
	}
	t.n++
	m.key = key
	t.joinLocked(m)
	t.regions.put(place, m)
	return nil
}

// replace puts n, which has m's key, into m's place, and makes m dead. EINVAL if m is closed or has windows.
func (t *mrTable) replace(m, n *MR) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m.dead.Load() {
		return fmt.Errorf("key %#x is closed: %w", m.key, einval)
	}
	if err := m.seal(); err != nil {
		return err
	}
	t.joinLocked(n)
	t.leaveLocked(m)
	t.regions.put(t.index(m.key), n)
	m.dead.Store(true)
	return nil
}

// remove takes m out and makes it dead, if it is not so already. EINVAL if it has
// windows.
func (t *mrTable) remove(m *MR) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m.dead.Load() {
		return nil // or a Rereg was faster: the place is another region's
	}
	if err := m.seal(); err != nil {
		return err
	}
	t.regions.put(t.index(m.key), nil)
	m.dead.Store(true)
	t.freeKeyLocked(m.key)
	t.n--
	t.leaveLocked(m)
	return nil
}

// insertWindow makes w found by a new key.
func (t *mrTable) insertWindow(w *MW) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	key, place, err := t.newKeyLocked()
	if err != nil {
		return err
	}
	w.key = key
	t.windows.put(place, w)
	return nil
}

func (t *mrTable) removeWindow(key uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.windows.put(t.index(key), nil)
	t.freeKeyLocked(key)
}

// joinLocked finds m's spaces, with one more reference each.
func (t *mrTable) joinLocked(m *MR) {
	key := m.named
	if key == nil && reflect.TypeOf(m.mem).Comparable() {
		key = m.mem
	}
	m.space = t.spaceLocked(key)
	for i := range m.shared {
		m.shared[i].space = t.spaceLocked(m.shared[i].Key)
	}
}

func (t *mrTable) spaceLocked(key any) *space {
	s := t.spaces[key]
	if s == nil || key == nil {
		s = newSpace(key)
		if key != nil {
			t.spaces[key] = s
		}
	}
	s.refs++
	return s
}

// join is a space by its key, for one atomic; leave gives it back.
func (t *mrTable) join(key any) *space {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.spaceLocked(key)
}

func (t *mrTable) leave(s *space) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.putSpaceLocked(s)
}

// leaveLocked gives back what joinLocked took.
func (t *mrTable) leaveLocked(m *MR) {
	t.putSpaceLocked(m.space)
	for _, p := range m.shared {
		t.putSpaceLocked(p.space)
	}
}

func (t *mrTable) putSpaceLocked(s *space) {
	if s.refs--; s.refs == 0 && s.key != nil {
		delete(t.spaces, s.key)
	}
}

// lookup finds the region of a key; nil if there is none.
func (t *mrTable) lookup(key uint32) *MR {
	m := t.regions.at(t.index(key))
	if m == nil || m.key != key {
		return nil
	}
	return m
}

// window finds the window that a key may be of; nil if there is none. The window
// compares the key, whose low byte changes.
func (t *mrTable) window(key uint32) *MW { return t.windows.at(t.index(key)) }

// allows says whether rkey is of a region or window that a request which p received
// may do need with, wherever in it.
func (t *mrTable) allows(pd *PD, p *QP, rkey uint32, need hca.Access) bool {
	place := t.index(rkey)
	if m := t.regions.at(place); m != nil {
		return m.key == rkey && m.pd == pd && m.access&need == need
	}
	w := t.windows.at(place)
	return w != nil && w.allows(pd, p, rkey, need)
}

// remote is a piece of n bytes at addr of what rkey is of, region or window, for
// a request that p received; false if the key does not allow it.
func (t *mrTable) remote(pd *PD, p *QP, rkey uint32, addr, n uint64, need hca.Access) (seg, bool) {
	place := t.index(rkey)
	if m := t.regions.at(place); m != nil {
		if m.key != rkey || m.pd != pd || m.access&need != need {
			return seg{}, false
		}
		at, ok := m.at(addr, n)
		return seg{mr: m, addr: at, n: n}, ok
	}
	if w := t.windows.at(place); w != nil {
		return w.open(pd, p, rkey, addr, n, need)
	}
	return seg{}, false
}
