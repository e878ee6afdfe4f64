package soft

import (
	"math"
	"sync"

	"github.com/uverbsd/uverbsd/hca"
)

// seg is a checked piece of a region: the client's address and a length.
type seg struct {
	mr   *MR
	addr uint64
	n    uint64

	mw    *MW    // reached through it; else nil
	epoch uint64 // of the window's binding
}

// read fills p from an offset; errGone once region or window are closed.
func (s *seg) read(p []byte, off uint64) error {
	if s.mw == nil {
		return s.mr.read(p, s.addr+off)
	}
	if !s.mw.enter(s.epoch) {
		return errGone
	}
	err := s.mr.read(p, s.addr+off)
	s.mw.leave(s.epoch)
	return err
}

// write stores p at an offset; errGone as of read.
func (s *seg) write(p []byte, off uint64) error {
	if s.mw == nil {
		return s.mr.write(p, s.addr+off)
	}
	if !s.mw.enter(s.epoch) {
		return errGone
	}
	err := s.mr.write(p, s.addr+off)
	s.mw.leave(s.epoch)
	return err
}

// vec is a scatter/gather list, checked, with a cursor.
type vec struct {
	sges []hca.SGE // as posted
	segs []seg     // empty pieces left out
	n    uint64    // bytes in segs
	i    int       // cursor: segs[i] at off
	off  uint64
}

func (v *vec) clear() {
	clear(v.segs[:cap(v.segs)])
	v.sges, v.segs, v.n, v.i, v.off = v.sges[:0], v.segs[:0], 0, 0, 0
}

// everything is a limit for resolve that no list reaches.
const everything = math.MaxUint64

// resolve checks the first limit bytes of the SGEs against the regions of a PD;
// false if some of them are bad. Only what is moved is looked at, as in rxe
// (copy_data): the rest of a receive that is longer than its message, or of the
// list for an atomic's answer, may name anything. So may an SGE of length 0.
func (v *vec) resolve(pd *PD, need hca.Access, limit uint64) bool {
	v.segs, v.n, v.i, v.off = v.segs[:0], 0, 0, 0
	for i := range v.sges {
		g := &v.sges[i]
		n := min(uint64(g.Length), limit-v.n)
		if n == 0 {
			continue
		}
		m := pd.ctx.dev.mrs.lookup(g.LKey)
		if m == nil || m.pd != pd || m.access&need != need {
			return false
		}
		addr, ok := m.at(g.Addr, n)
		if !ok {
			return false
		}
		v.segs = append(v.segs, seg{mr: m, addr: addr, n: n})
		v.n += n
	}
	return true
}

// one makes a list of a single range that a request names at p; false if the key
// does not allow it.
func (v *vec) one(pd *PD, p *QP, rkey uint32, addr, n uint64, need hca.Access) bool {
	v.segs, v.n, v.i, v.off = v.segs[:0], n, 0, 0
	s, ok := pd.ctx.dev.mrs.remote(pd, p, rkey, addr, n, need)
	if ok {
		v.segs = append(v.segs, s)
	}
	return ok
}

// skip moves the cursor n bytes on.
func (v *vec) skip(n uint64) {
	for n > 0 && v.i < len(v.segs) {
		k := min(n, v.segs[v.i].n-v.off)
		v.off += k
		n -= k
		if v.off == v.segs[v.i].n {
			v.i, v.off = v.i+1, 0
		}
	}
}

// read fills p from the cursor on; there are at least len(p) bytes left.
func (v *vec) read(p []byte) error {
	for len(p) > 0 {
		s := &v.segs[v.i]
		k := min(uint64(len(p)), s.n-v.off)
		if err := s.read(p[:k], v.off); err != nil {
			return err
		}
		p = p[k:]
		v.skip(k)
	}
	return nil
}

// write stores p from the cursor on; there is room for it.
func (v *vec) write(p []byte) error {
	for len(p) > 0 {
		s := &v.segs[v.i]
		k := min(uint64(len(p)), s.n-v.off)
		if err := s.write(p[:k], v.off); err != nil {
			return err
		}
		p = p[k:]
		v.skip(k)
	}
	return nil
}

// chunks are the buffers that large messages go through.
var chunks = sync.Pool{New: func() any { return new([chunkSize]byte) }}

// moved is how a copy ended.
type moved uint8

const (
	movedAll moved = iota
	badSrc         // the source could not be read
	badDst         // the destination could not be written
	stopped        // one of the QPs went to RESET or ERR, or was closed
)

// copy moves n bytes from one list's cursor to the other's, a chunk at a time,
// and looks between chunks whether it should stop. No lock is held.
func (x *exec) copy(dst, src *vec, n uint64) moved {
	buf := x.small[:]
	if n > smallSize {
		c := chunks.Get().(*[chunkSize]byte)
		defer chunks.Put(c)
		buf = c[:]
	}
	for n > 0 {
		if x.stale() {
			return stopped
		}
		k := min(n, uint64(len(buf)))
		if src.read(buf[:k]) != nil {
			return badSrc
		}
		if x.stale() {
			return stopped
		}
		x.hear(buf[:k])
		if dst.write(buf[:k]) != nil {
			return badDst
		}
		n -= k
		x.moved += k
		x.hold.beat()
		if x.moved >= turnBytes && n > 0 && x.worker && x.hold.lane == &x.q.dev.pool.bulk && x.hold != &x.own {
			x.moved = 0
			x.q.dev.pool.bulk.pause(x.hold, x.q.party())
		}
	}
	return movedAll
}

// stale: has the requester or the responder left the era in which x began, or was
// the XRC SRQ closed?
func (x *exec) stale() bool {
	return x.q.era.Load() != x.era || x.peer != nil && x.peer.era.Load() != x.pera ||
		x.srq != nil && x.srq.closed.Load()
}
