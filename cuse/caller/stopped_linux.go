package caller

import (
	"time"

	"golang.org/x/sys/unix"
)

// Stopped is a thread at the exit of its write(), given to the function that Remote.Run calls. It is not for concurrent use and
// is dead after that function has returned (ErrFinished) or overrun its time (ErrExpired).
type Stopped struct {
	t       *tracer
	scratch *scratch // in use
}

// scratch is what lay where Scratch put something else.
type scratch struct {
	addr uint64
	old  []byte
}

// FD returns the first argument of the write: the client's command fd.
func (s *Stopped) FD() int { return s.t.saved.fd() }

// TID is the thread.
func (s *Stopped) TID() int { return s.t.tid }

// Syscall runs one system call on the thread, of at most six arguments, and returns its result or its errno. All
// signals but SIGKILL and SIGSTOP are held back meanwhile, so EINTR comes only from those two (a call that they
// interrupt is started again when the kernel would). ErrExpired when it takes more than syscallTimeout; ESRCH when the
// client died, also if the call itself would return that.
func (s *Stopped) Syscall(nr uintptr, args ...uintptr) (int64, error) {
	return s.SyscallWithin(syscallTimeout, nr, args...)
}

// SyscallWithin is Syscall for a call that may take long, within stoppedLimit.
func (s *Stopped) SyscallWithin(within time.Duration, nr uintptr, args ...uintptr) (int64, error) {
	op := syscallOp{nr: nr, within: within, scratch: s.scratch}
	if copy(op.args[:], args) < len(args) {
		return 0, s.error("system call", unix.EINVAL)
	}
	val, err := s.do("system call", op)
	if err != nil {
		return 0, err
	}
	if val < 0 && val >= -maxErrno {
		return 0, s.error("system call", unix.Errno(-val))
	}
	return val, nil
}

// do has the tracer carry out an op.
func (s *Stopped) do(what string, op syscallOp) (int64, error) {
	op.result = make(chan syscallResult, 1)
	select {
	case s.t.ops <- op:
	case <-s.t.over:
		return 0, s.error(what, s.t.overErr)
	}
	res := <-op.result
	if res.err != nil {
		return 0, s.error(what, res.err)
	}
	return res.val, nil
}

// maxErrno is MAX_ERRNO, include/linux/err.h.
const maxErrno = 4095

// Open runs openat(AT_FDCWD, path, flags|O_CLOEXEC) on the thread. The path is put below the red zone of its stack for
// the time of the call. That memory is nobody's: a signal frame may overwrite it at any time. Go puts its frames on another
// stack, but makes system calls near the start of the 800 bytes that its functions without a stack check may use.
func (s *Stopped) Open(path string, flags int) (fd int, err error) {
	err = s.Scratch(append([]byte(path), 0), func(addr uint64) error {
		at := unix.AT_FDCWD
		n, err := s.Syscall(unix.SYS_OPENAT, uintptr(at), uintptr(addr), uintptr(flags|unix.O_CLOEXEC), 0)
		fd = int(n)
		return err
	})
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// Close closes an fd of the client.
func (s *Stopped) Close(fd int) error {
	_, err := s.Syscall(unix.SYS_CLOSE, uintptr(fd))
	return err
}

// Scratch puts b into memory of the thread that nobody uses, at most maxScratch bytes aligned to 16, calls fn with its
// address, reads what the system calls made of it back into b, and puts the old bytes back. There is one such place, so
// it does not nest (EBUSY), and Open needs it.
func (s *Stopped) Scratch(b []byte, fn func(addr uint64) error) (err error) {
	if len(b) > maxScratch {
		return s.error("scratch memory", unix.E2BIG)
	}
	if s.scratch != nil {
		return s.error("scratch memory", unix.EBUSY)
	}
	addr := (s.t.saved.stack() - uint64(len(b))) &^ 15
	old := make([]byte, len(b))
	if err := s.ReadMem(addr, old); err != nil {
		return err
	}
	s.scratch = &scratch{addr, old}
	defer func() {
		s.scratch = nil
		if e := s.WriteMem(addr, old); e != nil && err == nil {
			err = e
		}
	}()
	if err := s.WriteMem(addr, b); err != nil {
		return err
	}
	if err := fn(addr); err != nil {
		return err
	}
	return s.ReadMem(addr, b)
}

// ReadMem and WriteMem reach the thread's memory as Thread.Read and Thread.Write do. They run on the caller's own OS
// thread, so that a page which the client keeps from us for ever (userfaultfd) does not hold the tracer: it lets the
// thread go in time.
func (s *Stopped) ReadMem(addr uint64, b []byte) error {
	if err := s.usable(); err != nil {
		return err
	}
	return Thread(s.t.tid).Read(b, addr)
}

// WriteMem: see ReadMem.
func (s *Stopped) WriteMem(addr uint64, b []byte) error {
	if err := s.usable(); err != nil {
		return err
	}
	return Thread(s.t.tid).Write(b, addr)
}

func (s *Stopped) usable() error {
	select {
	case <-s.t.over:
		return s.error("memory", s.t.overErr)
	default:
		return nil
	}
}

func (s *Stopped) error(op string, err error) error {
	return opError(op+" on stopped thread", s.t.tid, err)
}
