package soft

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
)

// errGone is a copy through a region that was closed meanwhile.
var errGone = errors.New("memory region is closed")

// space is one client address space, shared by the regions in it. It makes
// atomics atomic among each other.
type space struct {
	refs int // regions; guarded by mrTable.mu

	// mu guards busy. Leaf.
	mu      sync.Mutex
	busy    bool // an atomic is under way, possibly stuck in the memory
	waiters waitList
}

func newSpace() *space {
	s := &space{}
	s.waiters.ready = func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return !s.busy
	}
	return s
}

// lockOrPark takes the right to do an atomic, or parks q until it is free.
func (s *space) lockOrPark(q *QP) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy {
		s.waiters.add(q)
		return false
	}
	s.busy = true
	return true
}

func (s *space) unlock() {
	s.mu.Lock()
	s.busy = false
	q := s.waiters.pop()
	s.mu.Unlock()
	if q != nil {
		q.wake()
	}
}

// MR is a memory region. Its fields do not change.
type MR struct {
	dev    *Device
	pd     *PD
	mem    hca.Memory
	space  *space
	key    uint32 // lkey and rkey: index<<8 | generation
	start  uint64
	length uint64
	iova   uint64
	access hca.Access

	users atomic.Int32 // copies under way
	dead  atomic.Bool
}

var _ hca.MR = (*MR)(nil)

// RegMR: EINVAL for a range that wraps, for one over MaxMRSize, and for remote
// write or atomic access without local write (ib_check_mr_access); EOPNOTSUPP
// for access flags that the engine cannot give; ENOMEM when MaxMR exist.
func (p *PD) RegMR(in hca.MRInit) (hca.MR, error) {
	d := p.ctx.dev
	switch {
	case in.Mem == nil:
		return nil, fmt.Errorf("reg mr: no memory: %w", einval)
	case in.Length != 0 && (in.Start+in.Length-1 < in.Start || in.IOVA+in.Length-1 < in.IOVA):
		return nil, fmt.Errorf("reg mr: range wraps: %w", einval)
	case in.Length > d.attr.MaxMRSize:
		return nil, fmt.Errorf("reg mr: %d bytes: %w", in.Length, einval)
	case in.Access&hca.AccessNeedsLocal != 0 && in.Access&hca.AccessLocalWrite == 0:
		return nil, fmt.Errorf("reg mr: access %#x without local write: %w", in.Access, einval)
	case in.Access&^(hca.AccessSupported|hca.AccessHugetlb|hca.AccessOptionalRange) != 0:
		return nil, fmt.Errorf("reg mr: access %#x: %w", in.Access, eopnotsupp)
	}
	m := &MR{dev: d, pd: p, mem: in.Mem, start: in.Start, length: in.Length, iova: in.IOVA, access: in.Access}
	if err := d.mrs.insert(m); err != nil {
		return nil, fmt.Errorf("reg mr: %w", err)
	}
	return m, nil
}

// LKey is the local key.
func (m *MR) LKey() uint32 { return m.key }

// RKey is the remote key; the same number.
func (m *MR) RKey() uint32 { return m.key }

// Close invalidates the key and waits, within stuckWait, for running copies. No
// copy starts after it. A stuck one ends without effect on the daemon.
func (m *MR) Close() error {
	if m.dead.Swap(true) {
		return nil
	}
	m.dev.mrs.remove(m)
	waitUntil(func() bool { return m.users.Load() == 0 })
	return nil
}

// enter counts a copy in; false once the region is closed. Close sets dead
// before it looks at users, enter the other way round: one sees the other.
func (m *MR) enter() bool {
	m.users.Add(1)
	if m.dead.Load() {
		m.users.Add(-1)
		return false
	}
	return true
}

func (m *MR) read(p []byte, addr uint64) error {
	if !m.enter() {
		return errGone
	}
	err := m.mem.ReadAt(p, addr)
	m.users.Add(-1)
	return err
}

func (m *MR) write(p []byte, addr uint64) error {
	if !m.enter() {
		return errGone
	}
	err := m.mem.WriteAt(p, addr)
	m.users.Add(-1)
	return err
}

// at is the client's address of n bytes at iova address addr, if they lie in
// the region. Written so that nothing wraps: both differences are bounded first.
func (m *MR) at(addr uint64, n uint64) (uint64, bool) {
	off := addr - m.iova
	if addr < m.iova || off > m.length || n > m.length-off {
		return 0, false
	}
	return m.start + off, true
}

const (
	mrChunkBits = 12
	mrChunk     = 1 << mrChunkBits
	mrIndexMax  = 1<<24 - 1 // what is left of a key beside the generation
)

// mrTable finds regions by key without a lock: a table of tables of pointers,
// the lower ones made on demand and never freed.
type mrTable struct {
	chunks [(mrIndexMax + 1) / mrChunk]atomic.Pointer[[mrChunk]atomic.Pointer[MR]]

	// mu guards the rest. Leaf.
	mu     sync.Mutex
	max    uint32
	n      uint32
	next   uint32         // lowest index never used; 0 is not used, so that key 0 is invalid
	free   []uint32       // keys given back, oldest first
	spaces map[any]*space // by hca.Memory
}

func (t *mrTable) init(limit uint32) {
	t.max, t.next = min(limit, mrIndexMax), 1
	t.spaces = make(map[any]*space)
}

func (t *mrTable) insert(m *MR) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n >= t.max {
		return fmt.Errorf("%d exist already: %w", t.max, enomem)
	}
	// An index that was never used comes first: the longer a key rests, the
	// fewer stale uses of it find a new region.
	switch {
	case t.next <= t.max:
		m.key = t.next << 8
		t.next++
	default:
		old := t.free[0]
		t.free = t.free[1:]
		m.key = old&^0xff | (old+1)&0xff
	}
	t.n++
	i := m.key >> 8
	c := &t.chunks[i>>mrChunkBits]
	if c.Load() == nil {
		c.Store(new([mrChunk]atomic.Pointer[MR]))
	}
	m.space = t.spaceLocked(m.mem)
	c.Load()[i%mrChunk].Store(m)
	return nil
}

func (t *mrTable) spaceLocked(mem hca.Memory) *space {
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

func (t *mrTable) remove(m *MR) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := m.key >> 8
	t.chunks[i>>mrChunkBits].Load()[i%mrChunk].Store(nil)
	t.free = append(t.free, m.key)
	t.n--
	if m.space.refs--; m.space.refs == 0 && reflect.TypeOf(m.mem).Comparable() {
		delete(t.spaces, m.mem)
	}
}

// lookup finds the region of a key; nil if there is none.
func (t *mrTable) lookup(key uint32) *MR {
	i := key >> 8
	c := t.chunks[i>>mrChunkBits].Load()
	if c == nil {
		return nil
	}
	m := c[i%mrChunk].Load()
	if m == nil || m.key != key {
		return nil
	}
	return m
}
