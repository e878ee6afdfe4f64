package cuse

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// outBuckets of the table of outstanding requests; a power of two. Even 2,000
	// waiting threads make chains of 8.
	outBuckets = 256

	// freeMax recycled requests are kept.
	freeMax = 1024
)

// bucket: ordinary uniques are even and count up by two.
func (s *Session) bucket(unique uint64) **request {
	return &s.out[(unique>>1)%outBuckets]
}

// newRequestLocked makes a request outstanding.
func (s *Session) newRequestLocked(unique uint64, op uint32, f *file, head Request) *request {
	st := s.free
	if st != nil {
		s.free, st.qnext = st.qnext, nil
		s.nfree--
	} else {
		st = &request{s: s}
	}
	gen := st.word.Load()>>2 + 1
	st.word.Store(gen<<2 | wordOpen)
	st.refs.Store(2)
	st.unique, st.op, st.f = unique, op, f
	head.st, head.gen = st, gen
	st.head = head

	b := s.bucket(unique)
	st.next = *b
	if st.next != nil {
		st.next.prev = st
	}
	*b = st
	f.pending++
	s.owed.Add(1)
	return st
}

func (s *Session) findLocked(unique uint64) *request {
	for st := *s.bucket(unique); st != nil; st = st.next {
		if st.unique == unique {
			return st
		}
	}
	return nil
}

// unlink takes a claimed request off the table. This comes before the reply is
// written: after that the kernel may send RELEASE, which must find nothing
// outstanding, or anything else.
func (s *Session) unlink(st *request) {
	s.mu.Lock()
	s.unlinkLocked(st)
	s.mu.Unlock()
}

func (s *Session) unlinkLocked(st *request) {
	if st.next != nil {
		st.next.prev = st.prev
	}
	if st.prev != nil {
		st.prev.next = st.next
	} else {
		*s.bucket(st.unique) = st.next
	}
	st.next, st.prev = nil, nil
	st.f.pending--
	st.onInterrupt = nil
	if !st.interrupted.IsZero() {
		s.ninterrupted--
	}
}

// replied is called when st's reply was written, and drops its hold.
func (st *request) replied() {
	s := st.s
	if s.owed.Add(-1) == 0 && s.closing.Load() {
		s.mu.Lock()
		s.signalLocked(&s.answered)
		s.mu.Unlock()
	}
	st.unref()
}

// unref drops the reply's or the handler's hold.
func (st *request) unref() {
	if st.refs.Add(-1) == 0 {
		st.s.mu.Lock()
		st.s.recycleLocked(st)
		st.s.mu.Unlock()
	}
}

func (s *Session) unrefLocked(st *request) {
	if st.refs.Add(-1) == 0 {
		s.recycleLocked(st)
	}
}

// recycleLocked keeps st for the next request. An abandoned one is left to the
// garbage collector, so that a late reply is still known for what it is.
func (s *Session) recycleLocked(st *request) {
	if st.word.Load()&wordAbandoned == wordAbandoned || s.nfree >= freeMax {
		return
	}
	st.f, st.w, st.msg = nil, nil, nil
	st.base, st.size = 0, 0
	st.interrupted = time.Time{}
	st.qnext = s.free
	s.free = st
	s.nfree++
}

// abandon answers for a handler that does not.
func (s *Session) abandon(r Request, errno unix.Errno) bool {
	if !r.claim(wordAbandoned) {
		return false
	}
	s.unlink(r.st)
	s.sendError(r.st.unique, errno)
	r.st.replied()
	return true
}

// outstandingLocked lists requests without a reply.
func (s *Session) outstandingLocked(want func(*request) bool) []Request {
	var rs []Request
	for _, st := range s.out {
		for ; st != nil; st = st.next {
			if want(st) {
				rs = append(rs, st.head)
			}
		}
	}
	return rs
}
