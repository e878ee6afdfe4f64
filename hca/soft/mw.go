package soft

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
)

// MW is a memory window, see hca.MW. A binding has an epoch: what a request finds
// in open is good for that epoch, and each access enters and leaves it, as it
// does the region's. The end of a binding advances the epoch, so that no access
// enters any more, and waits for those inside.
type MW struct {
	dev *Device
	pd  *PD
	typ hca.MWType

	epoch atomic.Uint64   // written under mu
	users [2]atomic.Int32 // accesses under way, by the lowest bit of their epoch

	// mu guards the rest. Outside windowList.mu only.
	mu     sync.Mutex
	closed bool
	key    uint32
	mr     *MR // what it is bound to, which counts it in; nil: nothing
	qp     *QP // type 2: who has bound it, whose list it is in
	addr   uint64
	length uint64
	access hca.Access

	prev, next *MW // in QP.windows, under its mu
}

var _ hca.MW = (*MW)(nil)

// AllocMW: EINVAL for a type that does not exist, ENOMEM when MaxMW exist.
func (p *PD) AllocMW(typ hca.MWType) (hca.MW, error) {
	d := p.ctx.dev
	if typ != hca.MWType1 && typ != hca.MWType2 {
		return nil, fmt.Errorf("alloc mw: type %d: %w", typ, einval)
	}
	if err := take(&d.nMW, d.attr.MaxMW, "alloc mw"); err != nil {
		return nil, err
	}
	w := &MW{dev: d, pd: p, typ: typ}
	if err := d.mrs.insertWindow(w); err != nil {
		d.nMW.Add(-1)
		return nil, fmt.Errorf("alloc mw: %w", err)
	}
	return w, nil
}

// RKey is the window's key now.
func (w *MW) RKey() uint32 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.key
}

// Close unbinds the window, gives its key back and waits, within stuckWait, for
// running accesses. None starts after it.
func (w *MW) Close() error {
	w.mu.Lock()
	again := w.closed
	if !again {
		w.closed = true
		w.endLocked()
		w.dev.mrs.removeWindow(w.key)
	}
	w.mu.Unlock()
	waitUntil(func() bool { return w.users[0].Load() == 0 && w.users[1].Load() == 0 })
	if !again {
		w.dev.nMW.Add(-1)
	}
	return nil
}

// enter counts an access in; false once the binding has ended. endLocked writes
// epoch before quiesce looks at users, enter the other way round: one sees the
// other.
func (w *MW) enter(epoch uint64) bool {
	w.users[epoch&1].Add(1)
	if w.epoch.Load() != epoch {
		w.leave(epoch)
		return false
	}
	return true
}

func (w *MW) leave(epoch uint64) { w.users[epoch&1].Add(-1) }

// endLocked ends the binding, if there is one. The caller waits for its accesses
// (quiesce) when it has let go of mu.
func (w *MW) endLocked() (epoch uint64) {
	epoch = w.epoch.Load()
	if w.mr == nil {
		return epoch
	}
	if w.qp != nil {
		w.qp.windows.remove(w)
		w.qp = nil
	}
	w.mr.bound.Add(-1) // its Close waits for what still runs
	w.mr = nil
	w.epoch.Store(epoch + 1)
	return epoch
}

// quiesce waits, within stuckWait, for the accesses of an epoch that is over. A
// later epoch with the same lowest bit can only make it wait longer.
func (w *MW) quiesce(epoch uint64) {
	waitUntil(func() bool { return w.users[epoch&1].Load() == 0 })
}

// open is a piece of n bytes at addr for a request that p received; false if the
// key does not allow it now (rxe_lookup_mw). Unlike rxe it keeps the request
// within the window, not only within the region.
func (w *MW) open(pd *PD, p *QP, key uint32, addr, n uint64, need hca.Access) (seg, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.allowsLocked(pd, p, key, need) {
		return seg{}, false
	}
	off := addr
	if w.access&hca.AccessZeroBased == 0 {
		if addr < w.addr {
			return seg{}, false
		}
		off -= w.addr
	}
	if off > w.length || n > w.length-off {
		return seg{}, false
	}
	at, ok := w.mr.at(w.addr+off, n)
	return seg{mr: w.mr, addr: at, n: n, mw: w, epoch: w.epoch.Load()}, ok
}

func (w *MW) allows(pd *PD, p *QP, key uint32, need hca.Access) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.allowsLocked(pd, p, key, need)
}

func (w *MW) allowsLocked(pd *PD, p *QP, key uint32, need hca.Access) bool {
	return w.mr != nil && w.key == key && w.pd == pd && (w.typ != hca.MWType2 || w.qp == p) && w.access&need == need
}

// bindableLocked: may q bind w so (rxe_check_bind_mw, with the PDs of all three as IBTA
// 1.4 C10-72 wants them)? m is nil with a length of 0.
func (w *MW) bindableLocked(q *QP, b *hca.Bind, m *MR) bool {
	switch {
	case w.closed, w.key != b.MW, w.pd != q.pd, b.Access&^hca.AccessWindow != 0:
		return false
	case w.typ == hca.MWType1 && b.Access&hca.AccessZeroBased != 0: // o10-36.2.2
		return false
	case w.typ == hca.MWType2 && (w.mr != nil || m == nil): // o10-37.2.30, o10-37.2.40
		return false
	case m == nil:
		return true
	case m.pd != q.pd, m.access&hca.AccessMWBind == 0: // C10-73
		return false
	case b.Access&hca.AccessNeedsLocal != 0 && m.access&hca.AccessLocalWrite == 0: // C10-74
		return false
	}
	_, ok := m.at(b.Addr, b.Length) // C10-75
	return ok
}

// bind executes a bind request of q; false if it is refused, and nothing has
// changed. For both types the new key is the window's with the low byte that the
// request has: whose choice that is, the provider's (type 1) or the client's (type
// 2), the kernel's rxe_do_bind_mw does not see either.
func (q *QP) bind(b *hca.Bind) bool {
	w := q.dev.mrs.window(b.MW)
	if w == nil {
		return false
	}
	var m *MR
	if b.Length != 0 {
		if m = q.dev.mrs.lookup(b.MR); m == nil {
			return false
		}
	}
	w.mu.Lock()
	old, ok := w.bindLocked(q, b, m)
	over := w.epoch.Load() != old
	w.mu.Unlock()
	if over {
		w.quiesce(old)
	}
	return ok
}

// bindLocked is bind with what it is about. old is the epoch that was.
func (w *MW) bindLocked(q *QP, b *hca.Bind, m *MR) (old uint64, ok bool) {
	old = w.epoch.Load()
	if !w.bindableLocked(q, b, m) {
		return old, false
	}
	if w.typ == hca.MWType2 && !q.windows.add(w) {
		return old, false
	}
	if m != nil && !m.hold() {
		if w.typ == hca.MWType2 {
			q.windows.remove(w)
		}
		return old, false
	}
	w.endLocked()
	w.key = w.key&^0xff | b.RKey&0xff
	w.mr, w.addr, w.length, w.access = m, b.Addr, b.Length, b.Access
	if w.typ == hca.MWType2 {
		w.qp = q
	}
	return old, true
}

// invalidate ends the binding of a window of type 2 that q has bound, by key;
// false if there is none. A region that its owner registered cannot be
// invalidated (rxe_invalidate_mr), nor a window of type 1 (o10-37.2.26).
func (q *QP) invalidate(key uint32) bool {
	w := q.dev.mrs.window(key)
	if w == nil {
		return false
	}
	w.mu.Lock()
	if w.mr == nil || w.key != key || w.qp != q {
		w.mu.Unlock()
		return false
	}
	epoch := w.endLocked()
	w.mu.Unlock()
	w.quiesce(epoch)
	return true
}

// isLocal: requests that go nowhere.
func isLocal(op hca.SendOpcode) bool { return op == hca.OpBindMW || op == hca.OpLocalInv }

// local executes such a request.
func (x *exec) local() (verdict, hca.WCStatus) {
	q := x.q
	x.length = 0
	if x.op == hca.OpLocalInv {
		if !q.invalidate(x.imm) {
			return finished, hca.WCLocQPOpErr
		}
		return finished, hca.WCSuccess
	}
	if b := x.bind(); !q.bind(&b) {
		return finished, hca.WCMWBindErr
	}
	return finished, hca.WCSuccess
}

// windowList is the windows of type 2 that a QP has bound.
type windowList struct {
	// mu guards the rest, and the links of the members. Leaf.
	mu     sync.Mutex
	head   *MW
	closed bool
}

// add takes w in; false once the QP is closed.
func (l *windowList) add(w *MW) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	w.prev, w.next = nil, l.head
	if l.head != nil {
		l.head.prev = w
	}
	l.head = w
	return true
}

func (l *windowList) remove(w *MW) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.prev == nil {
		l.head = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	}
	w.prev, w.next = nil, nil
}

// close frees q's windows and waits, within one stuckWait for all, for the
// accesses through them. It takes no more.
func (l *windowList) close(q *QP) {
	type over struct {
		w     *MW
		epoch uint64
	}
	var ended []over
	for {
		l.mu.Lock()
		l.closed = true
		w := l.head
		l.mu.Unlock()
		if w == nil {
			break
		}
		w.mu.Lock()
		if w.qp == q { // else somebody else has ended it meanwhile
			ended = append(ended, over{w, w.endLocked()})
		}
		w.mu.Unlock()
	}
	waitUntil(func() bool {
		for len(ended) > 0 {
			o := ended[len(ended)-1]
			if o.w.users[o.epoch&1].Load() != 0 {
				return false
			}
			ended = ended[:len(ended)-1]
		}
		return true
	})
}
