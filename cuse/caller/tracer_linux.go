package caller

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// seizeTimeout bounds PTRACE_SEIZE, which takes the client's cred_guard_mutex: another thread of the client that is in
	// exec holds it until ours has died, which it does only once it is answered. A seize takes microseconds otherwise.
	seizeTimeout = time.Second
	// replyTimeout is how long a seized thread waits for Run before it is let go: the handler does its command in between.
	replyTimeout = 10 * time.Second
	// firstStopTimeout is how long an answered thread may take to its stop: microseconds on an idle machine, and the
	// answer's own way through the kernel. After that it is an answer that was not one: a scheduler in deep trouble must
	// not make it, for the thread would go on with a success that is none, and nobody is held up meanwhile.
	firstStopTimeout = 10 * time.Second
	// syscallTimeout bounds an injected call: an open of our own node takes milliseconds in an emulated guest.
	syscallTimeout = 2 * time.Second
	// interruptGrace is how long an injected call may take to return after it was interrupted.
	interruptGrace = time.Second
	// stoppedLimit bounds the time that a thread stands still because the daemon does not get on with it.
	stoppedLimit = 10 * time.Second
	// strandedPoll and strandedPolls bound the wait for a call that does not even return when interrupted (the OPEN of a
	// FUSE file that is not answered). Counted in polls, so that a suspended daemon does not lose its time while it sleeps.
	strandedPoll  = 100 * time.Millisecond
	strandedPolls = 600
	// maxScratch fits a path or an ioctl argument, and with the red zone stays within what even a goroutine's stack has
	// free below a system call (see Stopped.Open).
	maxScratch = 256
)

// tracer is the goroutine that owns a seized thread, and the OS thread that it is locked to: ptrace requests must come
// from the thread that attached. It is a goroutine of its own for two reasons. PTRACE_SEIZE can block (seizeTimeout).
// And a thread that is not stopped can be let go in one way only, by the death of its tracer thread (kernel/ptrace.c
// exit_ptrace); Go ends the OS thread of a goroutine that returns locked. So whatever goes wrong, returning is enough:
// the kernel detaches, resumes and, if the client died, hands its exit status to its real parent.
type tracer struct {
	tid int
	// Shorter in tests than the constants of the same names.
	replyTimeout, firstStopTimeout, stoppedLimit time.Duration

	seized    chan error    // one value: the result of the attach
	cancelled chan struct{} // closed by the user: let go instead of stopping
	replied   chan struct{} // closed by the user: the write is answered, wait for the stop
	stopped   chan error    // one value: the thread stands at the exit of its write, or why not
	ops       chan syscallOp
	finish    chan struct{} // closed by the user: put the thread back and let go

	over    chan struct{} // closed: no more ops, because of overErr
	overErr error
	ended   chan struct{} // closed: the thread is let go, or never will be by waiting longer; endErr
	endErr  error

	saved  registers // at the stop; read by the user between stopped and over
	dirty  bool      // the thread has other registers now
	mask   sigset    // the thread's own
	masked bool      // the thread has another mask now

	entered bool // the injected call has begun: the next system call stop is its exit
}

// syscallOp is one system call to inject.
type syscallOp struct {
	nr     uintptr
	args   [6]uintptr
	within time.Duration
	// scratch is put back by the tracer if the call does not end in time.
	scratch *scratch
	result  chan syscallResult
	// fail is not a call: it makes the write return this errno.
	fail unix.Errno
}

type syscallResult struct {
	val int64 // as the kernel returns it
	err error // it was not run, or not to its end
}

func newTracer(tid int) *tracer {
	return &tracer{
		tid: tid,

		replyTimeout:     replyTimeout,
		firstStopTimeout: firstStopTimeout,
		stoppedLimit:     stoppedLimit,

		seized:    make(chan error, 1),
		cancelled: make(chan struct{}),
		replied:   make(chan struct{}),
		stopped:   make(chan error, 1),
		ops:       make(chan syscallOp),
		finish:    make(chan struct{}),
		over:      make(chan struct{}),
		ended:     make(chan struct{}),
	}
}

// main runs the tracer and returns with its OS thread unlocked only if nothing is attached to it any more.
func (t *tracer) main() {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The runtime parks the process's first thread instead of ending it. While we hold it, another goroutine gets another.
		var wg sync.WaitGroup
		wg.Go(t.main)
		wg.Wait()
		runtime.UnlockOSThread()
		return
	}
	detached := t.trace()
	t.end(nil)
	if detached {
		runtime.UnlockOSThread()
	}
}

// refuse tells the user that no more ops are taken. It comes before the thread runs again, so that none can reach a thread
// that is not stopped. The first reason counts.
func (t *tracer) refuse(reason error) {
	select {
	case <-t.over:
	default:
		t.overErr = reason
		close(t.over)
	}
}

// end refuses ops and tells the user that it need not wait any longer. The first result counts.
func (t *tracer) end(err error) {
	if err == nil {
		t.refuse(ErrFinished)
	} else {
		t.refuse(err)
	}
	select {
	case <-t.ended:
	default:
		t.endErr = err
		close(t.ended)
	}
}

// trace does it all and reports whether the thread is detached; if not, the OS thread must die.
func (t *tracer) trace() (detached bool) {
	if err := ptraceSeize(t.tid); err != nil {
		t.seized <- err
		return true
	}
	if err := ptraceInterrupt(t.tid); err != nil {
		t.seized <- err
		return false
	}
	t.seized <- nil

	limit := time.NewTimer(t.replyTimeout)
	defer limit.Stop()
	select {
	case <-t.replied:
	case <-t.cancelled:
		return false
	case <-limit.C:
		t.stopped <- ErrExpired
		return false
	}

	sig, err := t.firstStop()
	if err != nil {
		detached = sig >= 0 && ptraceDetach(t.tid, sig) == nil
		t.stopped <- err
		return detached
	}
	t.stopped <- nil

	limit.Reset(t.stoppedLimit)
	for {
		select {
		case op := <-t.ops:
			if op.fail != 0 {
				t.saved.fail(op.fail)
				t.dirty = true
				op.result <- syscallResult{}
				continue
			}
			val, err := t.syscall(&op)
			switch err {
			case errLost:
				t.end(ErrExpired)
				op.result <- syscallResult{err: ErrExpired}
				return t.strand(&op)
			case nil, ErrExpired:
				op.result <- syscallResult{val, err}
			default:
				t.end(err)
				op.result <- syscallResult{err: err}
				return false
			}
		case <-t.finish:
			return t.done()
		case <-limit.C:
			select {
			case <-t.finish:
				return t.done()
			default:
			}
			t.refuse(ErrExpired)
			t.saved.fail(expiredErrno)
			t.dirty = true
			err := t.restore(0)
			t.end(ErrExpired)
			return err == nil
		}
	}
}

// done lets the thread go as its user left it.
func (t *tracer) done() (detached bool) {
	t.refuse(ErrFinished)
	err := t.restore(0)
	t.end(err)
	return err == nil
}

// expiredErrno is the result of a write whose thread was let go before its user was done with it: whatever was to be
// prepared for the client, it cannot count on it.
const expiredErrno = unix.EIO

// firstStop waits for the stop on the way out of the write, and verifies that it is one. The kernel takes the trap that
// PTRACE_INTERRUPT set before it takes any signal from the queue (kernel/signal.c get_signal), so this is an event stop, of
// a group stop perhaps, and signals are still pending. On error sig is what to detach with, or -1 if not stopped.
func (t *tracer) firstStop() (sig unix.Signal, err error) {
	ev, err := t.wait(time.Now().Add(t.firstStopTimeout))
	if err != nil {
		return -1, err
	}
	if ev.kind != eventStop {
		return ev.sig, ErrNotInWrite
	}
	if err := t.saved.load(t.tid); err != nil {
		return -1, err
	}
	if !t.saved.atWriteExit(Thread(t.tid).Read) {
		return 0, ErrNotInWrite
	}
	// This also leaves out every result that makes the kernel start the write again (ERESTARTSYS and its kin, which it acts
	// upon only after this stop): with registers untouched it still does.
	if t.saved.result() < 0 {
		return 0, ErrWriteFailed
	}
	return 0, nil
}

// hold keeps the client's signals pending. Otherwise the next resume would deliver one: its handler would run on the registers
// and the stack that we prepared for the injected call. Process-wide signals go to other threads that accept them, as with
// any mask. SIGKILL works as ever, and SIGSTOP stops the other threads now and this one when it is let go.
func (t *tracer) hold() (err error) {
	if t.masked {
		return nil
	}
	if t.mask, err = ptraceGetSigmask(t.tid); err != nil {
		return err
	}
	t.masked = true
	return ptraceSetSigmask(t.tid, ^sigset(0))
}

// errLost: the thread is not stopped and does not react.
const errLost = constError("not stopped")

type constError string

func (e constError) Error() string { return string(e) }

// The kernel's own results for "start again", include/linux/errno.h. A tracer sees them at the exit of a call.
const (
	eRESTARTSYS           = -512
	eRESTARTNOINTR        = -513
	eRESTARTNOHAND        = -514
	eRESTART_RESTARTBLOCK = -516
)

// syscall injects one call. Errors: ErrExpired (the thread is stopped again), errLost, or a failed ptrace request, which is
// ESRCH and means that the client is dead or dying.
func (t *tracer) syscall(op *syscallOp) (int64, error) {
	if err := t.hold(); err != nil {
		return 0, err
	}
	deadline := time.Now().Add(op.within)
	for {
		regs := t.saved.call(op.nr, &op.args)
		t.dirty = true
		if err := regs.store(t.tid); err != nil {
			return 0, err
		}
		interrupted, err := t.step(deadline)
		if err != nil {
			return 0, err
		}
		if err := regs.load(t.tid); err != nil {
			return 0, err
		}
		switch val := regs.result(); val {
		case eRESTARTSYS, eRESTARTNOINTR, eRESTARTNOHAND:
			// A SIGSTOP woke it; that is taken when it is resumed. Or we did.
			if interrupted {
				return 0, ErrExpired
			}
		case eRESTART_RESTARTBLOCK:
			if interrupted {
				return 0, ErrExpired
			}
			return -int64(unix.EINTR), nil
		default:
			return val, nil
		}
	}
}

// step takes the thread from its stop through the entry to the exit of one system call.
func (t *tracer) step(deadline time.Time) (interrupted bool, err error) {
	if err := ptraceSyscall(t.tid, 0); err != nil {
		return false, err
	}
	for t.entered = false; ; {
		ev, err := t.wait(deadline)
		switch {
		case err == ErrExpired && !interrupted:
			interrupted = true
			deadline = time.Now().Add(interruptGrace)
			if err := ptraceInterrupt(t.tid); err != nil {
				return true, err
			}
			continue
		case err == ErrExpired:
			return true, errLost
		case err != nil:
			return interrupted, err
		}
		switch ev.kind {
		case syscallStop:
			if t.entered {
				return interrupted, nil
			}
			t.entered = true
		case eventStop: // the client is being stopped or continued by a signal, or our interrupt
			if interrupted && !t.entered {
				return true, ErrExpired
			}
		}
		// A signal that cannot be held (SIGSTOP) goes on its way at once, so that a later SIGCONT finds it done.
		if err := ptraceSyscall(t.tid, ev.sig); err != nil {
			return interrupted, err
		}
	}
}

// restore puts the thread back as it was and lets it go. It is at the exit of an injected call or where firstStop left
// it; either way it has the kernel's check for signals before it, and that looks at the mask anew.
func (t *tracer) restore(sig unix.Signal) error {
	if t.dirty {
		if err := t.saved.store(t.tid); err != nil {
			return err
		}
	}
	if t.masked {
		if err := ptraceSetSigmask(t.tid, t.mask); err != nil {
			return err
		}
	}
	return ptraceDetach(t.tid, sig)
}

// strand waits for a thread that is stuck in op. It runs, in the kernel, so nobody is left stopped; but it must not come
// back to its program with our registers, nor with the success of a write whose user has given up. Nobody waits for this
// goroutine any more.
func (t *tracer) strand(op *syscallOp) (detached bool) {
	t.saved.fail(expiredErrno)
	for range strandedPolls {
		ev, err := t.wait(time.Now().Add(strandedPoll))
		if err == ErrExpired {
			continue
		}
		if err == nil && ev.kind == syscallStop && !t.entered {
			// At an entry our registers still decide what runs; the client's would make it write again.
			t.entered = true
			if err = ptraceSyscall(t.tid, 0); err == nil {
				continue
			}
		}
		if err != nil {
			return false
		}
		if ev.kind == syscallStop {
			t.closeStranded(op)
		}
		if op.scratch != nil {
			_ = Thread(t.tid).Write(op.scratch.old, op.scratch.addr) // below the red zone: good manners, not a duty
		}
		return t.restore(ev.sig) == nil
	}
	return false
}

// closeStranded closes the descriptor that an open made after all: its client does not know of it.
func (t *tracer) closeStranded(op *syscallOp) {
	var regs registers
	if op.nr != unix.SYS_OPENAT || regs.load(t.tid) != nil || regs.result() < 0 {
		return
	}
	shut := syscallOp{nr: unix.SYS_CLOSE, args: [6]uintptr{uintptr(regs.result())}, within: syscallTimeout}
	_, _ = t.syscall(&shut)
}
