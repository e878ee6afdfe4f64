package cuse

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Channel is the fd requests come from: /dev/cuse, the /dev/fuse of a mounted file
// system, or one end of a socket pair that keeps message boundaries. It is not
// blocking. A reader that has to sleep does so in the runtime's own poller
// (sleeper): one that slept in poll(2) kept a processor of the runtime, whose
// watchdog then woke every 20 µs to take it away, and gave it back through another
// thread; in an emulated guest the null command took half as long again.
type Channel struct {
	fd   int
	wake int // eventfd, readable once interrupted

	// sleepFile is a duplicate of fd that the runtime's poller knows.
	sleepFile *os.File
	sleepConn syscall.RawConn

	// refs counts the system calls under way, plus one until Close. The fds are
	// closed by whoever takes it to zero, so that no call hits a reused number.
	refs   atomic.Int64
	closed atomic.Bool
}

// Open opens /dev/cuse (or path).
func Open(path string) (*Channel, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return nil, fmt.Errorf("open %s: %w: the cuse module is not loaded; run: modprobe cuse", path, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return nil, fmt.Errorf("open %s: %w: run as root", path, err)
	case err != nil:
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return NewChannel(fd)
}

// NewChannel takes over fd, and closes it on error.
func NewChannel(fd int) (*Channel, error) {
	wake := -1
	err := unix.SetNonblock(fd, true)
	if err == nil {
		wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("cuse channel: %w", err)
	}
	c := &Channel{fd: fd, wake: wake}
	c.refs.Store(1)
	if err := c.openSleeper(); err != nil {
		c.Close()
		return nil, fmt.Errorf("cuse channel: %w", err)
	}
	return c, nil
}

func (c *Channel) openSleeper() error {
	dup, err := unix.FcntlInt(uintptr(c.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	c.sleepFile = os.NewFile(uintptr(dup), "cuse")
	if err := c.sleepFile.SetReadDeadline(time.Time{}); err != nil {
		return err // the runtime's poller did not take it
	}
	c.sleepConn, err = c.sleepFile.SyscallConn()
	return err
}

// sleeper reads for one worker and sleeps until there is something. It is made
// once per worker, so that a sleep allocates nothing.
type sleeper struct {
	c     *Channel
	p     []byte
	n     int
	errno unix.Errno
	try   func(fd uintptr) bool
}

func (c *Channel) newSleeper(p []byte) *sleeper {
	s := &sleeper{c: c, p: p}
	s.try = func(fd uintptr) bool {
		s.n, s.errno = readMessage(int(fd), s.p)
		return s.errno != unix.EAGAIN
	}
	return s
}

// read gets one message. EAGAIN: interrupt or Close was called.
func (s *sleeper) read() (int, unix.Errno) {
	if err := s.c.sleepConn.Read(s.try); err != nil {
		return 0, unix.EAGAIN
	}
	return s.n, s.errno
}

// readMessage is one read: ENODEV when the other end has gone.
func readMessage(fd int, p []byte) (int, unix.Errno) {
	n, errno := rawRead(fd, p)
	if errno == 0 && n == 0 {
		return 0, unix.ENODEV // a closed socket pair; a device never reads 0
	}
	return n, errno
}

// acquire keeps the fds open until release; false if they are closed.
func (c *Channel) acquire() bool {
	for {
		n := c.refs.Load()
		if n == 0 || c.closed.Load() {
			return false
		}
		if c.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (c *Channel) release() {
	if c.refs.Add(-1) == 0 {
		_ = unix.Close(c.fd)
		_ = unix.Close(c.wake)
	}
}

// Close closes the fd once no call uses it. It may be called again.
func (c *Channel) Close() {
	if c.closed.CompareAndSwap(false, true) {
		if c.sleepFile != nil {
			_ = c.sleepFile.Close()
		}
		c.release()
	}
}

// read gets one message: EAGAIN when there is none, ENODEV when the other end
// has gone.
func (c *Channel) read(p []byte) (int, unix.Errno) {
	if !c.acquire() {
		return 0, unix.ENODEV
	}
	n, errno := readMessage(c.fd, p)
	c.release()
	return n, errno
}

const (
	// writeWait bounds the wait for room in a socket pair whose other end does
	// not read. A write to /dev/cuse never says EAGAIN.
	writeWait  = 100 * time.Millisecond
	writeTries = 20
)

// write sends one message whole.
func (c *Channel) write(p []byte) unix.Errno {
	if !c.acquire() {
		return unix.ENODEV
	}
	defer c.release()
	for try := 0; ; try++ {
		_, errno := rawWrite(c.fd, p)
		switch {
		case errno == unix.EINTR:
		case errno == unix.EAGAIN && try < writeTries:
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLOUT}}, int(writeWait/time.Millisecond))
		default:
			return errno
		}
	}
}

// writeSleeping is write for a notification that may sleep in the kernel: the
// scheduler of the runtime is told.
func (c *Channel) writeSleeping(p []byte) error {
	if !c.acquire() {
		return unix.ENODEV
	}
	defer c.release()
	_, err := unix.Write(c.fd, p)
	return err
}

// wait sleeps until there is something to read, or interrupt was called, or the
// timeout (negative: none) is over. It may return early.
func (c *Channel) wait(timeout time.Duration) (revents int16) {
	if !c.acquire() {
		return unix.POLLNVAL
	}
	defer c.release()
	fds := [2]unix.PollFd{
		{Fd: int32(c.fd), Events: unix.POLLIN},
		{Fd: int32(c.wake), Events: unix.POLLIN},
	}
	ms := -1
	if timeout >= 0 {
		ms = int(timeout / time.Millisecond)
	}
	_, _ = unix.Poll(fds[:], ms)
	return fds[0].Revents
}

// interrupt ends every wait, now and later.
func (c *Channel) interrupt() {
	if !c.acquire() {
		return
	}
	defer c.release()
	_ = c.sleepFile.SetReadDeadline(time.Unix(1, 0)) // long over, for good
	one := [8]byte{1, 1, 1, 1, 1, 1, 1, 1}           // any number but 0, in either byte order
	_, _ = unix.Write(c.wake, one[:])
}
