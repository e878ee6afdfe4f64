package cuse

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// split is a long command of which some pieces have come. The kernel sends a
// write() of more than max_write bytes or max_pages pages as several WRITEs, one
// after the other's reply, from the same thread (fs/fuse/file.c, fuse_direct_io).
// A piece can end anywhere: an unaligned buffer spans one page more.
//
// CUSE starts every write() at position 0 (cuse_write_iter), so a piece's offset
// is what the earlier ones had. A file of a mounted file system has a position,
// which the client can set to anything: there a piece is the next one if it goes
// on where the last one ended and is as long as a next one must be.
//
// The kernel reports an error in a later piece as a short write, since it
// returns what went before; nothing can be done about that here.
type split struct {
	buf   []byte // its capacity is the whole command, and charged to the user
	start uint64 // the offset of its first byte
	last  time.Time
}

// goesOn says whether n bytes at offset can be sp's next piece. A thread that got
// a short write() for a long one (its buffer ended in an unmapped page) writes its
// next command where the next piece would have been; all but the last are as long
// as least, and the last has just what is missing. A long command there can still
// be taken for a piece; the harm is that thread's own.
func (sp *split) goesOn(offset uint64, n, least int) bool {
	left := cap(sp.buf) - len(sp.buf)
	return offset == sp.start+uint64(len(sp.buf)) && (n == left || n < left && n >= least)
}

// join adds one piece. It returns the data to be handled, or false when the
// piece was kept or refused, and answered.
func (s *Session) join(r Request, framer Framer, in *abi.FuseWriteIn, data []byte) ([]byte, bool) {
	f := r.st.f
	s.mu.Lock()
	sp := f.splits[r.tid]
	next := in.Offset != 0
	if s.tree != nil {
		next = sp != nil && sp.goesOn(in.Offset, len(data), s.pieceMin())
	}
	if next {
		delete(f.splits, r.tid) // nobody else's while it is worked on
		s.mu.Unlock()
		return s.joinNext(r, sp, in.Offset, data)
	}
	s.dropSplitLocked(f, r.tid) // the thread gave up on an earlier command
	s.mu.Unlock()
	whole := 0
	if len(data) >= s.pieceMin() {
		whole = framer.WholeSize(data)
	}
	if whole <= len(data) {
		return data, true
	}
	s.mu.Lock()
	errno := unix.Errno(0)
	switch {
	case whole > maxWhole:
		errno = unix.EINVAL
	case f.user.bytes+whole > parkedBytesMax, !s.splitRoomLocked(f):
		errno = unix.ENOMEM
	default:
		f.user.bytes += whole // reserved before the copy, which is made unlocked
	}
	s.mu.Unlock()
	if errno != 0 {
		r.ReplyError(errno)
		return nil, false
	}
	sp = &split{buf: append(make([]byte, 0, whole), data...), start: in.Offset, last: time.Now()}
	s.keep(r, sp)
	r.ReplyWrite(len(data))
	return nil, false
}

// pieceMin is how long the first piece of a long write() is at least: a request
// takes s.pages pages and MaxWrite bytes, and its first page may have only one
// byte of it. What is shorter is a whole command, whatever its header says.
func (s *Session) pieceMin() int {
	return min(s.cfg.MaxWrite, (s.pages-1)*os.Getpagesize()+1)
}

func (s *Session) joinNext(r Request, sp *split, offset uint64, data []byte) ([]byte, bool) {
	f := r.st.f
	if sp == nil || offset != sp.start+uint64(len(sp.buf)) || len(data) == 0 || len(data) > cap(sp.buf)-len(sp.buf) {
		s.uncharge(f, sp)
		r.ReplyError(unix.EINVAL)
		return nil, false
	}
	base := len(sp.buf)
	sp.buf = append(sp.buf, data...)
	if len(sp.buf) == cap(sp.buf) {
		r.st.base = base
		s.uncharge(f, sp)
		return sp.buf, true
	}
	sp.last = time.Now()
	s.keep(r, sp)
	r.ReplyWrite(len(data))
	return nil, false
}

// keep stores what has come so far.
func (s *Session) keep(r Request, sp *split) {
	f := r.st.f
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.gone { // released while its thread was killed
		f.user.bytes -= cap(sp.buf)
		return
	}
	if f.splits == nil {
		f.splits = make(map[uint32]*split)
	}
	// Several threads can have one id: 0 is all of those outside our pid namespace.
	s.dropSplitLocked(f, r.tid)
	f.splits[r.tid] = sp
}

// uncharge gives back what a command cost. A complete one is not counted while
// its handler runs: those are bounded by number.
func (s *Session) uncharge(f *file, sp *split) {
	if sp == nil {
		return
	}
	s.mu.Lock()
	f.user.bytes -= cap(sp.buf)
	s.mu.Unlock()
}

func (s *Session) dropSplitLocked(f *file, tid uint32) {
	if sp := f.splits[tid]; sp != nil {
		f.user.bytes -= cap(sp.buf)
		delete(f.splits, tid)
	}
}

// splitRoomLocked makes room for one more thread if it can: a thread that died
// between two pieces leaves the first behind.
func (s *Session) splitRoomLocked(f *file) bool {
	if len(f.splits) < splitMax {
		return true
	}
	for tid, sp := range f.splits {
		if time.Since(sp.last) > splitStale {
			s.dropSplitLocked(f, tid)
			return true
		}
	}
	return false
}
