package caller

import (
	"errors"
	"fmt"
)

// Errors of the remote system calls. The client is unharmed whenever one of them is returned.
var (
	// ErrUnsupported: this architecture has no remote system calls.
	ErrUnsupported = errors.New("remote system calls are not supported on this architecture")
	// ErrTraced: another tracer (strace, gdb) has the thread; there can be only one.
	ErrTraced = errors.New("thread is already traced")
	// ErrSeccomp: the thread has a seccomp filter, which could kill it for a system call that it did not make itself.
	ErrSeccomp = errors.New("thread has a seccomp filter")
	// ErrNotInWrite: the thread did not stop at the exit of a write-like system call of the native ABI.
	ErrNotInWrite = errors.New("thread is not at the exit of a write system call")
	// ErrWriteFailed: the write returned an error, so the client will not look at what we would prepare for it.
	ErrWriteFailed = errors.New("the write of the thread failed")
	// ErrExpired: a bound ran out and the thread was let go.
	ErrExpired = errors.New("the thread was let go because a time limit ran out")
	// ErrFinished: a Stopped or Remote was used after its Run.
	ErrFinished = errors.New("the remote session is over")
)

// opError names the operation and keeps the errno reachable for errors.Is.
func opError(op string, id int, err error) error {
	return fmt.Errorf("caller: %s %d: %w", op, id, err)
}

// tracedError is ErrTraced with the tracer's pid.
func tracedError(tracer int) error { return fmt.Errorf("%w by process %d", ErrTraced, tracer) }
