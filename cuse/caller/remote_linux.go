package caller

import (
	"errors"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Remote is a seized thread: it waits inside its write() for our answer, with a trap pending that will stop it on the
// way out. Every Remote must be ended by Run or Cancel.
//
// The order is forced by the kernel: a thread that waits for a FUSE answer cannot stop, so it is seized and interrupted
// first, then answered, then it stops. (The interrupt also makes the kernel send FUSE_INTERRUPT for the request, which
// must be ignored, not answered with EINTR.)
type Remote struct {
	tid  int
	t    *tracer
	used atomic.Bool
}

// Seize attaches to thread tid, which must be inside a write() to us. On error nothing has been done to the thread, and
// the request is to be answered as usual. ErrTraced, ErrSeccomp, ErrUnsupported; EPERM without CAP_SYS_PTRACE or when a
// security module forbids it; ESRCH when the thread is gone; ErrExpired when the kernel keeps us waiting (another thread
// of the client is in exec).
//
// A filter is refused before seizing, because the system calls that we inject are filtered too and could kill the client.
func Seize(tid int) (*Remote, error) {
	if !remoteSupported {
		return nil, opError("seize thread", tid, ErrUnsupported)
	}
	if tid <= 0 {
		return nil, opError("seize thread", tid, unix.ESRCH)
	}
	st, err := readStatus(tid)
	switch {
	case err != nil:
	case st.tracerPid != 0:
		err = tracedError(st.tracerPid)
	case st.seccomp != 0:
		err = ErrSeccomp
	}
	if err != nil {
		return nil, opError("seize thread", tid, err)
	}

	return newTracer(tid).start()
}

// start attaches.
func (t *tracer) start() (*Remote, error) {
	var err error
	go t.main()
	bound := time.NewTimer(seizeTimeout)
	defer bound.Stop()
	select {
	case err = <-t.seized:
	case <-bound.C:
		close(t.cancelled)
		err = ErrExpired
	}
	if errors.Is(err, unix.EPERM) {
		// Someone may have attached since we looked.
		if st, e := readStatus(t.tid); e == nil && st.tracerPid != 0 {
			err = tracedError(st.tracerPid)
		}
	}
	if err != nil {
		return nil, opError("seize thread", t.tid, err)
	}
	return &Remote{tid: t.tid, t: t}, nil
}

// Cancel lets the thread go; it does nothing after Run.
func (r *Remote) Cancel() {
	if r.used.CompareAndSwap(false, true) {
		close(r.t.cancelled)
		<-r.t.ended
	}
}

// Run calls reply, which completes the client's write(), exactly once whatever happens; waits for the thread to stop on
// its way out of it; calls fn; puts registers and signal mask back; and lets the thread go, on every path, also when reply or
// fn panics. It returns fn's error, or why fn was not called (ErrNotInWrite, ErrWriteFailed, ErrExpired, ESRCH when the
// client died), or why the thread could not be put back (ESRCH: it died).
//
// The thread stands still while fn runs, so fn must be brief: after stoppedLimit it is let go, its write fails with EIO, and
// fn's further calls fail with ErrExpired; so it is if one of fn's calls does not return. No signal handler of the client runs meanwhile; signals stay pending. The client's other threads run.
func (r *Remote) Run(reply func(), fn func(s *Stopped) error) error {
	if !r.used.CompareAndSwap(false, true) {
		reply()
		return opError("run on thread", r.tid, ErrFinished)
	}
	replied := false
	defer func() {
		if !replied {
			close(r.t.cancelled)
			<-r.t.ended
		}
	}()
	reply()
	replied = true
	close(r.t.replied)
	if err := <-r.t.stopped; err != nil {
		return opError("run on thread", r.tid, err)
	}
	return r.run(fn)
}

func (r *Remote) run(fn func(s *Stopped) error) (err error) {
	defer func() {
		close(r.t.finish)
		<-r.t.ended
		if err == nil && r.t.endErr != nil {
			err = opError("let go of thread", r.tid, r.t.endErr)
		}
	}()
	return fn(&Stopped{t: r.t})
}
