package cuse

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// Session is one /dev/cuse session, or that of one mounted file system.
type Session struct {
	cfg   Config
	bad   error  // of cfg
	what  string // is served: for messages
	ch    *Channel
	h     Handler // nil if tree is not
	tree  Tree    // nil for a device
	pages int     // at most in one WRITE
	limit limiter
	spin  spinner // of the only active worker

	maxActive int
	kick      chan struct{} // wakes the monitor
	awake     atomic.Bool   // the monitor is
	stop      chan struct{} // closed when workers and monitor are to end
	failed    chan error    // capacity 1: the channel's end
	end       sync.Once
	done      chan struct{} // closed when shut down

	// Mirrors of what mu guards, for a look without it.
	closing atomic.Bool
	nready  atomic.Int32
	nactive atomic.Int32
	owed    atomic.Int64 // requests whose reply is not written; raised with mu held

	// mu guards what is below, and the parts of request, file, user and worker
	// that say so. It serialises bookkeeping only.
	mu           sync.Mutex
	serving      bool
	err          error // why the session ended
	slots        []slot
	freeSlots    []uint32
	users        map[uint32]*user
	out          [outBuckets]*request
	free         *request
	nfree        int
	ready        queue  // parked requests that may run
	nhandled     uint64 // requests and interrupts, ever
	ninterrupted int    // outstanding requests that were interrupted
	killCheck    time.Time

	active  []*worker // read
	idle    []*worker // wait
	spare   *worker   // ended, its buffer is kept
	running int       // handlers that have not returned, those with a reserved place included
	waiting []*file   // with parked requests that only the bound on all holds up
	total   int       // workers
	inside  int       // workers in a handler
	outside int       // workers not in one

	// Closed for shutdown, which makes them, at no worker outside a handler, none
	// inside, no reply owed.
	quiet, drained, answered chan struct{}
}

// New makes a session of a channel, which it closes at the end.
func New(ch *Channel, h Handler, cfg Config) *Session {
	s := newSession(ch, cfg)
	s.h = h
	s.what = "/dev/" + cfg.Name
	s.pages = piecePages
	return s
}

func newSession(ch *Channel, cfg Config) *Session {
	s := &Session{
		ch:     ch,
		kick:   make(chan struct{}, 1),
		stop:   make(chan struct{}),
		failed: make(chan error, 1),
		done:   make(chan struct{}),
		users:  make(map[uint32]*user),
	}
	s.bad = cfg.normal()
	s.cfg = cfg
	s.maxActive = maxReaders(cfg.Readers)
	s.spin.off = runtime.NumCPU() < 2
	return s
}

// Serve runs the session until Close, and then returns nil, or until the kernel
// ends it. Either way all is shut down when it returns, but for handlers that
// are stuck.
func (s *Session) Serve() error {
	if s.bad != nil {
		return s.bad
	}
	most := spinMax()
	s.mu.Lock()
	if s.serving {
		s.mu.Unlock()
		return errors.New("cuse: already served")
	}
	s.serving = true
	s.spin.max = most
	if !s.closing.Load() {
		go s.monitor()
		s.spawnLocked()
	}
	s.mu.Unlock()
	select {
	case err := <-s.failed:
		s.shutdown(err)
	case <-s.done:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// fail ends the session because the channel did.
func (s *Session) fail(errno unix.Errno) {
	if s.closing.Load() {
		return
	}
	select {
	case s.failed <- fmt.Errorf("cuse: %s: the kernel ended the session: %w", s.what, errno):
	default:
	}
}

// Close ends the session: no more requests are read; handlers get a moment to
// end; every request still outstanding is answered EIO; the channel is closed,
// whereupon clients see the device gone; files that are left get their Release.
// A handler may be stuck for longer than that: its later reply is dropped.
func (s *Session) Close() error {
	s.shutdown(nil)
	<-s.done
	return nil
}

func (s *Session) shutdown(err error) {
	s.end.Do(func() {
		defer close(s.done)
		s.mu.Lock()
		s.err = err
		s.closing.Store(true)
		quiet, drained, answered := make(chan struct{}), make(chan struct{}), make(chan struct{})
		s.quiet, s.drained, s.answered = quiet, drained, answered // signalLocked takes them away
		if s.outside == 0 {
			s.signalLocked(&s.quiet)
		}
		if s.inside == 0 {
			s.signalLocked(&s.drained)
		}
		if s.owed.Load() == 0 {
			s.signalLocked(&s.answered)
		}
		s.mu.Unlock()

		close(s.stop)
		s.ch.interrupt()
		grace := time.NewTimer(closeGrace)
		defer grace.Stop()
		select {
		case <-drained:
		case <-grace.C:
		}
		<-quiet // readers hold nothing and need no one: this is soon

		s.mu.Lock()
		left := s.outstandingLocked(func(*request) bool { return true })
		s.mu.Unlock()
		for _, r := range left {
			s.abandon(r, unix.EIO)
		}
		// A late reply that was quicker than that may not be written yet.
		grace.Reset(closeGrace)
		select {
		case <-answered:
		case <-grace.C:
		}
		s.ch.Close()

		s.mu.Lock()
		slots := s.slots
		s.slots, s.freeSlots = nil, nil
		s.mu.Unlock()
		for _, sl := range slots {
			if sl.f != nil {
				s.releaseFile(sl.f, 0)
			}
		}
	})
}

// signalLocked closes one of shutdown's channels once.
func (s *Session) signalLocked(ch *chan struct{}) {
	if *ch != nil {
		close(*ch)
		*ch = nil
	}
}

// Notify tells the kernel that a file polled with kh is ready, as often as
// wanted. It does not sleep.
func (s *Session) Notify(kh uint64) error {
	var m struct {
		h abi.FuseOutHeader
		b abi.FuseNotifyPollWakeupOut
	}
	m.b.Kh = kh
	m.h.Len = uint32(len(bytesOf(&m)))
	m.h.Error = abi.FuseNotifyPoll
	if errno := s.ch.write(bytesOf(&m)); errno != 0 {
		return fmt.Errorf("cuse: poll notify: %w", errno)
	}
	return nil
}
