package ring

import (
	"encoding/binary"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Event is an eventfd that one goroutine at a time sleeps on, in the runtime's own
// poller: a thread asleep in poll(2) would keep a processor of the runtime until its
// watchdog takes it away.
type Event struct {
	file  *os.File
	conn  syscall.RawConn
	in    [8]byte
	out   [8]byte
	errno error
	read  func(fd uintptr) bool // made once, so that a sleep allocates nothing
	write func(fd uintptr) bool
}

// NewEvent makes one of its own, for Signal.
func NewEvent() (*Event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("make eventfd: %w", err)
	}
	return newEvent(fd)
}

// OpenEvent makes one of a non-blocking eventfd, which stays the caller's.
func OpenEvent(fd int) (*Event, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate eventfd %d: %w", fd, err)
	}
	return newEvent(dup)
}

func newEvent(fd int) (*Event, error) {
	e := &Event{file: os.NewFile(uintptr(fd), "eventfd")}
	err := e.file.SetReadDeadline(time.Time{}) // fails if the poller did not take it
	if err == nil {
		e.conn, err = e.file.SyscallConn()
	}
	if err != nil {
		_ = e.file.Close()
		return nil, fmt.Errorf("wait for eventfd %d, which must be non-blocking: %w", fd, err)
	}
	binary.NativeEndian.PutUint64(e.out[:], 1)
	e.read = func(fd uintptr) bool {
		_, e.errno = unix.Read(int(fd), e.in[:])
		return e.errno != unix.EAGAIN && e.errno != unix.EINTR
	}
	e.write = func(fd uintptr) bool {
		_, _ = unix.Write(int(fd), e.out[:]) // EAGAIN: it is signalled as it is
		return true
	}
	return e, nil
}

// Wait sleeps until the event is signalled, and returns how often it was since the
// last time. 0: it was woken, closed, or the time is over.
func (e *Event) Wait() uint64 {
	if e.conn.Read(e.read) != nil || e.errno != nil {
		return 0
	}
	return binary.NativeEndian.Uint64(e.in[:])
}

// Within bounds the waits that follow to d from now. Where Wake can come at the
// same time, look for its reason after Within.
func (e *Event) Within(d time.Duration) { _ = e.file.SetReadDeadline(time.Now().Add(d)) }

// Wake ends the wait under way, and those that follow, but for Within.
func (e *Event) Wake() { _ = e.file.SetReadDeadline(time.Unix(1, 0)) }

// Signal signals it.
func (e *Event) Signal() { _ = e.conn.Write(e.write) }

// Close ends the wait under way and gives the descriptor back.
func (e *Event) Close() { _ = e.file.Close() }
