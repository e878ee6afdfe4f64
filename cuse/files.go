package cuse

import (
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// file is one open file, or the OPENs of one user that have no file yet. All of
// it is guarded by Session.mu but impl and framer, which do not change.
type file struct {
	impl   File
	framer Framer // nil if impl is none
	user   *user

	pending int  // requests without a reply
	running int  // handlers that have not returned
	gone    bool // RELEASE has come

	parked  queue // requests over a bound
	waiting bool  // in user.waiting or Session.waiting

	splits map[uint32]*split // by thread
}

// user is what one uid holds.
type user struct {
	uid     uint32
	files   int     // and OPENs under way
	running int     // OPENs not counted
	bytes   int     // copies kept: parked requests, pieces of long commands
	waiting []*file // with parked requests that only this user's bound holds up
	opens   file
}

// queue is a FIFO of requests.
type queue struct {
	head, tail *request
	n          int
}

func (q *queue) push(st *request) {
	st.qnext = nil
	if q.tail == nil {
		q.head = st
	} else {
		q.tail.qnext = st
	}
	q.tail = st
	q.n++
}

func (q *queue) pop() *request {
	st := q.head
	if st == nil {
		return nil
	}
	q.head, st.qnext = st.qnext, nil
	if q.head == nil {
		q.tail = nil
	}
	q.n--
	return st
}

// slot is a place in the file table. fh is its index and, in the upper half, a
// count of its uses, so that a stale fh finds nothing.
type slot struct {
	f   *file
	use uint32
}

func (s *Session) addFileLocked(f *file) (fh uint64) {
	var i uint32
	if n := len(s.freeSlots); n > 0 {
		i = s.freeSlots[n-1]
		s.freeSlots = s.freeSlots[:n-1]
	} else {
		i = uint32(len(s.slots))
		s.slots = append(s.slots, slot{})
	}
	s.slots[i].use++
	s.slots[i].f = f
	return uint64(s.slots[i].use)<<32 | uint64(i)
}

func (s *Session) fileLocked(fh uint64) *file {
	i := uint32(fh)
	if uint64(i) >= uint64(len(s.slots)) || s.slots[i].use != uint32(fh>>32) {
		return nil
	}
	return s.slots[i].f
}

func (s *Session) removeFileLocked(fh uint64) {
	i := uint32(fh)
	s.slots[i].f = nil
	s.freeSlots = append(s.freeSlots, i)
}

// userLocked takes a hold of one user's account, for a file or an OPEN.
func (s *Session) userLocked(uid uint32) *user {
	u := s.users[uid]
	if u == nil {
		u = &user{uid: uid}
		u.opens.user = u
		s.users[uid] = u
	}
	u.files++
	return u
}

func (s *Session) putUserLocked(u *user) {
	if u.files--; u.files == 0 {
		delete(s.users, u.uid)
	}
}

// admit makes a request of a message, and either lets this worker run it, or
// parks it. A nil request was dealt with.
func (s *Session) admit(w *worker, h *abi.FuseInHeader, fh uint64, head Request, size int, msg []byte) *request {
	s.mu.Lock()
	var f *file
	errno := unix.Errno(0)
	switch {
	case s.closing.Load():
		errno = unix.EIO
	case h.Opcode == abi.FuseOpen:
		f = &s.userLocked(head.uid).opens
	default:
		if f = s.fileLocked(fh); f == nil {
			errno = unix.EBADF
		}
	}
	if errno != 0 {
		s.mu.Unlock()
		s.sendError(h.Unique, errno)
		return nil
	}
	s.nhandled++
	st := s.newRequestLocked(h.Unique, h.Opcode, f, head)
	st.size = size
	switch {
	case h.Opcode == abi.FuseRelease:
		// Not subject to the bounds: the exit of a client whose handlers are all
		// stuck must go through, for it is what frees them.
		s.removeFileLocked(fh)
		late := s.releaseLocked(f, st)
		s.startLocked(f)
		s.enterLocked(w, st)
		s.mu.Unlock()
		for _, r := range late {
			s.misuse("RELEASE overtook a request")
			s.abandon(r, unix.EIO)
		}
		return st
	case f.parked.n == 0 && s.mayRunLocked(f):
		s.startLocked(f)
		s.enterLocked(w, st)
		s.mu.Unlock()
		return st
	case f.user.bytes+len(msg) > parkedBytesMax:
		s.dropLocked(st)
		s.mu.Unlock()
		head = st.head
		if head.claim(wordAnswered) {
			s.unlink(st)
			s.sendError(st.unique, unix.ENOMEM)
			st.replied()
		}
		return nil
	}
	f.user.bytes += len(msg)
	s.mu.Unlock()

	// Copied with no lock held; nobody else knows of st's message yet.
	own := append(make([]byte, 0, len(msg)), msg...)

	s.mu.Lock()
	st.msg = own
	f.parked.push(st)
	s.pumpLocked(f)
	s.mu.Unlock()
	return nil
}

// mayRunLocked: OPENs are bounded by themselves. A WRITE that makes a descriptor
// waits for an OPEN of its own client, which must not wait for WRITEs to end.
func (s *Session) mayRunLocked(f *file) bool {
	return f.running < fileRunningMax && (f.opens() || f.user.running < s.cfg.userRunningMax()) && s.roomLocked(f)
}

// opens says whether f stands for its user's OPENs.
func (f *file) opens() bool { return f == &f.user.opens }

// roomLocked: one worker always reads, since it is by an INTERRUPT that we hear
// of a client's end, and by that that its stuck handlers come back; some are for
// users of whom none runs, and some for OPENs only.
func (s *Session) roomLocked(f *file) bool {
	free := s.cfg.Readers - 1 - s.running
	if !f.opens() {
		free -= max(1, s.cfg.Readers/openShare)
		if f.user.running > 0 {
			free -= s.cfg.Readers / newcomerShare
		}
	}
	// With few workers this is too much of a good thing: one may always run.
	return free > 0 || s.running == 0
}

func (s *Session) startLocked(f *file) {
	f.running++
	if !f.opens() {
		f.user.running++
	}
	s.running++
}

// dropLocked gives up the handler's hold of a request that will not run.
func (s *Session) dropLocked(st *request) {
	u := st.f.user
	u.bytes -= len(st.msg)
	if st.op == abi.FuseOpen || st.op == abi.FuseRelease {
		s.putUserLocked(u)
	}
	s.unrefLocked(st)
}

// pumpLocked moves parked requests that may run to the ready queue, their place
// reserved. Whoever calls it looks at that queue next.
func (s *Session) pumpLocked(f *file) {
	if s.closing.Load() {
		return
	}
	for f.parked.n > 0 {
		if !f.parked.head.head.open() { // answered while it waited
			s.dropLocked(f.parked.pop())
			continue
		}
		if !s.mayRunLocked(f) {
			break
		}
		s.startLocked(f)
		s.ready.push(f.parked.pop())
	}
	s.nready.Store(int32(s.ready.n))
	if f.parked.n > 0 && f.running < fileRunningMax && !f.waiting {
		f.waiting = true
		if f.opens() || f.user.running < s.cfg.userRunningMax() {
			s.waiting = append(s.waiting, f)
		} else {
			f.user.waiting = append(f.user.waiting, f)
		}
	}
}

// finishLocked: the handler of st has returned.
func (s *Session) finishLocked(st *request) {
	f := st.f
	u := f.user
	f.running--
	if !f.opens() {
		u.running--
	}
	s.running--
	st.w = nil
	s.dropLocked(st)
	s.pumpLocked(f)
	for n := len(u.waiting); n > 0 && u.running < s.cfg.userRunningMax(); n-- {
		s.resumeLocked(&u.waiting)
	}
	for n := len(s.waiting); n > 0 && s.running < s.cfg.Readers-1; n-- {
		s.resumeLocked(&s.waiting)
	}
}

// resumeLocked lets the file that has waited longest in list try again.
func (s *Session) resumeLocked(list *[]*file) {
	f := (*list)[0]
	*list = (*list)[1:]
	f.waiting = false
	s.pumpLocked(f)
}

// releaseLocked ends a file: what is half received goes. by is the RELEASE, which
// the kernel sends when all else on the file is answered; what nevertheless is
// not, is returned.
func (s *Session) releaseLocked(f *file, by *request) (late []Request) {
	f.gone = true
	for _, sp := range f.splits {
		f.user.bytes -= cap(sp.buf)
	}
	f.splits = nil
	for st := f.parked.pop(); st != nil; st = f.parked.pop() {
		s.dropLocked(st)
	}
	if f.pending > 1 {
		late = s.outstandingLocked(func(st *request) bool { return st.f == f && st != by })
	}
	return late
}
