package cuse

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// worker is one thread that reads and handles requests.
type worker struct {
	buf    []byte
	sleep  *sleeper      // reads into buf
	seq    atomic.Uint64 // odd while a handler runs
	turns  chan struct{} // capacity 1: made active while idle
	streak int           // reads in a row that found a request at once

	// Guarded by Session.mu.
	active bool   // reads; only changed by others while idle or in a handler
	seen   uint64 // the monitor's last look at seq
	after  []func()
}

// room beyond MaxWrite in a read buffer: the longest headers
// (fs/fuse/dev.c, fuse_dev_do_read).
const headRoom = 4096

// spawnLocked starts a worker that reads.
func (s *Session) spawnLocked() {
	w := s.spare
	if w == nil {
		w = &worker{
			buf:   make([]byte, max(s.cfg.MaxWrite+headRoom, abi.FuseMinReadBuffer)),
			turns: make(chan struct{}, 1),
		}
		w.sleep = s.ch.newSleeper(w.buf)
	}
	s.spare = nil
	s.total++
	s.outsideLocked(1)
	s.activateLocked(w)
	go s.work(w)
}

func (s *Session) activateLocked(w *worker) {
	w.active, w.seen, w.streak = true, 0, 0
	s.active = append(s.active, w)
	s.nactive.Store(int32(len(s.active)))
}

func (s *Session) deactivateLocked(w *worker) {
	for i, a := range s.active {
		if a == w {
			last := len(s.active) - 1
			s.active[i] = s.active[last]
			s.active[last] = nil
			s.active = s.active[:last]
		}
	}
	w.active = false
	s.nactive.Store(int32(len(s.active)))
}

// detachLocked takes the reading from a worker that is in a handler.
func (s *Session) detachLocked(w *worker) {
	if !w.active {
		return
	}
	s.deactivateLocked(w)
	if len(s.active) == 0 {
		s.promoteLocked()
	}
}

// promoteLocked makes one more worker read. With all of them stuck none is left;
// then the first that gets free reads.
func (s *Session) promoteLocked() {
	if s.closing.Load() {
		return
	}
	if n := len(s.idle); n > 0 {
		w := s.idle[n-1]
		s.idle = s.idle[:n-1]
		s.activateLocked(w)
		w.turns <- struct{}{}
	} else if s.total < s.cfg.Readers {
		s.spawnLocked()
	}
}

// grow adds a reader to a backlog.
func (s *Session) grow() {
	s.mu.Lock()
	if len(s.active) < s.maxActive {
		s.promoteLocked()
	}
	s.mu.Unlock()
}

// enterLocked: w runs a handler from here, leaveLocked: to here.
func (s *Session) enterLocked(w *worker, st *request) {
	if st != nil {
		st.w = w
	}
	s.inside++
	w.seq.Add(1)
	s.outsideLocked(-1)
}

// outsideLocked counts a worker out of, or into, those not in a handler.
func (s *Session) outsideLocked(n int) {
	if s.outside += n; s.closing.Load() && s.outside == 0 {
		s.signalLocked(&s.quiet)
	}
}

func (s *Session) leaveLocked(w *worker) {
	w.seq.Add(1)
	s.inside--
	s.outsideLocked(1)
	if s.closing.Load() && s.inside == 0 {
		s.signalLocked(&s.drained)
	}
}

// work is a worker's life.
func (s *Session) work(w *worker) {
	reading, tookReady := true, false
	for !s.closing.Load() {
		// Parked requests that may run now take turns with new ones.
		if s.nready.Load() > 0 && (!reading || !tookReady) {
			if st := s.takeReady(w); st != nil {
				tookReady = true
				reading = s.run(w, st, st.msg)
				continue
			}
		}
		tookReady = false
		if !reading {
			var stay bool
			if reading, stay = s.rest(w); !stay {
				break
			}
			continue
		}
		n := 0
		if n, reading = s.next(w); n > 0 {
			reading = s.message(w, w.buf[:n])
		}
	}
	s.mu.Lock()
	if w.active {
		s.deactivateLocked(w)
	}
	s.total--
	s.spare = w
	s.outsideLocked(-1)
	s.mu.Unlock()
}

// rest is what a worker does that does not read: it reads after all if nobody
// does, waits to be called, or ends.
func (s *Session) rest(w *worker) (reading, stay bool) {
	s.mu.Lock()
	switch {
	case s.closing.Load():
		s.mu.Unlock()
		return false, false
	case len(s.active) == 0:
		s.activateLocked(w)
		s.mu.Unlock()
		return true, true
	case s.ready.n > 0:
		s.mu.Unlock()
		return false, true
	case len(s.idle) >= idleMax:
		s.mu.Unlock()
		return false, false
	}
	s.idle = append(s.idle, w)
	s.mu.Unlock()
	select {
	case <-w.turns:
		return true, true
	case <-s.stop:
		return false, false
	}
}

// takeReady takes a parked request whose turn has come. What was answered for a
// killed client meanwhile ends here: its file may have had its Release.
func (s *Session) takeReady(w *worker) *request {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing.Load() {
		return nil
	}
	st := s.ready.pop()
	for st != nil && !st.head.open() {
		s.finishLocked(st) // may make others ready
		st = s.ready.pop()
	}
	s.nready.Store(int32(s.ready.n))
	if st != nil {
		s.enterLocked(w, st)
	}
	return st
}

// next reads one message into w.buf. It returns 0 when there is something else
// to do, and false when w no longer is a reader.
func (s *Session) next(w *worker) (int, bool) {
	var start time.Time // of looking for a request in vain
	var spinning, sleeping bool
	for {
		var n int
		var errno unix.Errno
		if sleeping {
			n, errno = w.sleep.read()
		} else {
			n, errno = s.ch.read(w.buf)
		}
		switch errno {
		case 0:
			switch {
			case spinning:
				s.spin.caught(time.Since(start))
			case !start.IsZero():
				s.spin.slept(time.Since(start))
			default:
				if w.streak++; w.streak >= backlogReads {
					w.streak = 0
					s.grow()
				}
			}
			return n, true
		case unix.EINTR, unix.ENOENT: // ENOENT: the request was given up meanwhile
			continue
		case unix.EAGAIN:
		default:
			s.fail(errno)
			<-s.stop
			return 0, true
		}
		w.streak = 0
		if s.closing.Load() || s.nready.Load() > 0 {
			return 0, true
		}
		if s.nactive.Load() > 1 && s.retire(w) {
			return 0, false
		}
		// The only reader, from here.
		switch {
		case start.IsZero():
			start = time.Now()
			spinning = s.spin.budget > 0
		case spinning:
			if time.Since(start) > s.spin.budget {
				spinning = false
				s.spin.missed()
			}
		}
		sleeping = !spinning
	}
}

// retire ends a reader's reading if there is another.
func (s *Session) retire(w *worker) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.active) < 2 {
		return false
	}
	s.deactivateLocked(w)
	return true
}

// run has the handler of an entered request run, then what it left for After,
// and says whether w still is a reader.
func (s *Session) run(w *worker, st *request, msg []byte) bool {
	s.serve(st, msg)
	s.mu.Lock()
	for i := 0; i < len(w.after); i++ {
		f := w.after[i]
		w.after[i] = nil
		s.mu.Unlock()
		s.callback(f)
		s.mu.Lock()
	}
	w.after = w.after[:0]
	s.finishLocked(st)
	s.leaveLocked(w)
	reading := w.active
	s.mu.Unlock()
	return reading
}

// maxReaders at once in a backlog: more than processors only get in each
// other's way.
func maxReaders(bound int) int { return min(runtime.GOMAXPROCS(0), bound) }
