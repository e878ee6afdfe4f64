package soft

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
)

// errGone is a copy through a region that was closed meanwhile.
var errGone = errors.New("memory region is closed")

// space is memory in which atomics are atomic among each other: one client's
// address space, or what several share.
type space struct {
	key  any // in mrTable.spaces; nil: is not there
	refs int // regions; guarded by mrTable.mu

	// mu guards busy. Leaf.
	mu      sync.Mutex
	busy    bool // an atomic is under way, possibly stuck in the memory
	waiters waitList
}

func newSpace(key any) *space {
	s := &space{key: key}
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

// tryLock takes the right to do an atomic, if it is free.
func (s *space) tryLock() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy {
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
	named  any      // MRInit.Space
	space  *space   // of mem
	shared []shared // pieces of the range that are in other spaces
	// sharedAt is MRInit.SharedAt.
	sharedAt func(addr uint64) any
	key      uint32 // lkey and rkey, see keys.go
	start    uint64
	length   uint64
	iova     uint64
	access   hca.Access

	users atomic.Int32 // copies under way
	dead  atomic.Bool  // set under mrTable.mu

	// bound counts the windows bound to it; -1: there will be none any more.
	bound atomic.Int32
}

// shared is a piece of a region that others may have too.
type shared struct {
	hca.SharedPiece
	space *space
}

// newShared are the pieces, still without their spaces.
func newShared(pieces []hca.SharedPiece) []shared {
	var l []shared
	for _, p := range pieces {
		l = append(l, shared{SharedPiece: p})
	}
	return l
}

// spaceAt is the space of the word at a client's address. done is called when it
// is not needed any more.
func (m *MR) spaceAt(addr uint64) (s *space, done func(*space)) {
	if m.sharedAt != nil {
		if key := m.sharedAt(addr); key != nil {
			return m.dev.mrs.join(key), m.dev.mrs.leave
		}
	}
	return m.fixedSpaceAt(addr), func(*space) {}
}

func (m *MR) fixedSpaceAt(addr uint64) *space {
	for i := range m.shared {
		if p := &m.shared[i]; p.Start <= addr && addr < p.End {
			return p.space
		}
	}
	return m.space
}

var _ hca.MR = (*MR)(nil)

// RegMR: EINVAL for a range that wraps, for one over MaxMRSize that is not all of
// the memory on demand, and for remote write or atomic access without local write
// (ib_check_mr_access); EOPNOTSUPP for access flags that the engine cannot give;
// ENOMEM when MaxMR exist.
func (p *PD) RegMR(in hca.MRInit) (hca.MR, error) {
	d := p.ctx.dev
	if err := d.checkRange(in.Mem, in.Start, in.Length, in.IOVA, in.Access); err != nil {
		return nil, fmt.Errorf("reg mr: %w", err)
	}
	if err := checkAccess(in.Access); err != nil {
		return nil, fmt.Errorf("reg mr: %w", err)
	}
	m := &MR{dev: d, pd: p, mem: in.Mem, start: in.Start, length: in.Length, iova: in.IOVA, access: in.Access, named: in.Space, shared: newShared(in.Shared), sharedAt: in.SharedAt}
	if err := d.mrs.insert(m); err != nil {
		return nil, fmt.Errorf("reg mr: %w", err)
	}
	return m, nil
}

func (d *Device) checkRange(mem hca.Memory, start, length, iova uint64, access hca.Access) error {
	switch {
	case mem == nil:
		return fmt.Errorf("no memory: %w", einval)
	case length != 0 && (start+length-1 < start || iova+length-1 < iova):
		return fmt.Errorf("range wraps: %w", einval)
	case access&hca.AccessOnDemand != 0 && start == 0 && iova == 0 && length == hca.ImplicitLength:
		return nil
	case length > d.attr.MaxMRSize:
		return fmt.Errorf("%d bytes: %w", length, einval)
	}
	return nil
}

func checkAccess(a hca.Access) error {
	switch {
	case a&hca.AccessNeedsLocal != 0 && a&hca.AccessLocalWrite == 0:
		return fmt.Errorf("access %#x without local write: %w", a, einval)
	case a&^(hca.AccessSupported|hca.AccessOnDemand|hca.AccessHugetlb|hca.AccessFlushGlobal|hca.AccessOptionalRange) != 0:
		return fmt.Errorf("access %#x: %w", a, eopnotsupp)
	}
	return nil
}

// LKey is the local key.
func (m *MR) LKey() uint32 { return m.key }

// RKey is the remote key; the same number.
func (m *MR) RKey() uint32 { return m.key }

// Close invalidates the key and waits, within stuckWait, for running copies. No
// copy starts after it. A stuck one ends without effect on the daemon. EINVAL
// while windows are bound to it.
func (m *MR) Close() error {
	if err := m.dev.mrs.remove(m); err != nil {
		return fmt.Errorf("dereg mr: %w", err)
	}
	m.quiesce()
	return nil
}

// seal lets no window be bound any more; EINVAL if one is.
func (m *MR) seal() error {
	if !m.bound.CompareAndSwap(0, -1) {
		return fmt.Errorf("windows are bound to key %#x: %w", m.key, einval)
	}
	return nil
}

// hold counts a window in; false once the region is sealed.
func (m *MR) hold() bool {
	for {
		n := m.bound.Load()
		if n < 0 {
			return false
		}
		if m.bound.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// quiesce waits, within stuckWait, for the copies through a dead region.
func (m *MR) quiesce() { waitUntil(func() bool { return m.users.Load() == 0 }) }

// Rereg puts a changed region into this one's place, under the same keys, and
// closes this one: a request that has found it already fails as after a Close.
// The errors are RegMR's; besides, EINVAL for no flags (ib_uverbs_rereg_mr), for
// a PD of another device and for a region that is closed or has windows,
// EOPNOTSUPP for unknown flags.
func (m *MR) Rereg(in hca.MRRereg) (hca.MR, error) {
	n, err := m.changed(&in)
	if err == nil {
		err = m.dev.mrs.replace(m, n)
	}
	if err != nil {
		return nil, fmt.Errorf("rereg mr: %w", err)
	}
	m.quiesce()
	return n, nil
}

// changed is the region that in makes of m; it is in no table yet.
func (m *MR) changed(in *hca.MRRereg) (*MR, error) {
	switch {
	case in.Flags == 0:
		return nil, fmt.Errorf("nothing to change: %w", einval)
	case in.Flags&^hca.ReregSupported != 0:
		return nil, fmt.Errorf("flags %#x: %w", in.Flags, eopnotsupp)
	}
	n := &MR{dev: m.dev, pd: m.pd, mem: m.mem, named: m.named, shared: slices.Clone(m.shared), sharedAt: m.sharedAt, key: m.key, start: m.start, length: m.length, iova: m.iova, access: m.access}
	if in.Flags&hca.ReregTrans != 0 {
		access := m.access
		if in.Flags&hca.ReregAccess != 0 {
			access = in.Access
		}
		if err := m.dev.checkRange(in.Mem, in.Start, in.Length, in.IOVA, access); err != nil {
			return nil, err
		}
		n.mem, n.start, n.length, n.iova = in.Mem, in.Start, in.Length, in.IOVA
	}
	if in.Flags&(hca.ReregTrans|hca.ReregAccess) != 0 {
		n.shared, n.sharedAt = newShared(in.Shared), in.SharedAt
	}
	if in.Flags&hca.ReregPD != 0 {
		pd, ok := in.PD.(*PD)
		if !ok || pd == nil || pd.ctx.dev != m.dev {
			return nil, fmt.Errorf("PD of another device: %w", einval)
		}
		n.pd = pd
	}
	if in.Flags&hca.ReregAccess != 0 {
		if err := checkAccess(in.Access); err != nil {
			return nil, err
		}
		n.access = in.Access
	}
	return n, nil
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
	m.pd.ctx.enter()
	err := m.mem.ReadAt(p, addr)
	m.pd.ctx.leave()
	m.users.Add(-1)
	return err
}

func (m *MR) write(p []byte, addr uint64) error {
	if !m.enter() {
		return errGone
	}
	m.pd.ctx.enter()
	err := m.mem.WriteAt(p, addr)
	m.pd.ctx.leave()
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
