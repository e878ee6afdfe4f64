package e1000e

import (
	"encoding/binary"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// event is an eventfd of our own.
type event struct{ fd int }

func newEvent() (event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return event{-1}, fmt.Errorf("make an eventfd: %w", err)
	}
	return event{fd}, nil
}

// set makes it readable; it cannot fail but for a counter that is full, and so readable.
func (e event) set() {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], 1)
	_, _ = unix.Write(e.fd, b[:])
}

func (e event) close() {
	if e.fd >= 0 {
		_ = unix.Close(e.fd)
	}
}

// poller waits for up to three eventfds. One goroutine at a time uses it.
type poller struct {
	fds [3]unix.PollFd
	n   int
	buf [8]byte
}

func newPoller(fds ...int) *poller {
	p := &poller{n: len(fds)}
	for i, fd := range fds {
		p.fds[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	}
	return p
}

// wait returns once one of them is readable or the time is over, or for no reason.
func (p *poller) wait(d time.Duration) {
	for i := range p.n {
		p.fds[i].Revents = 0
	}
	if _, err := unix.Poll(p.fds[:p.n], int(d.Milliseconds())); err != nil {
		for i := range p.n {
			p.fds[i].Revents = 0
		}
	}
}

// broken says whether one of them is no eventfd any more: waiting would not wait.
func (p *poller) broken() bool {
	for i := range p.n {
		if p.fds[i].Revents&(unix.POLLNVAL|unix.POLLERR) != 0 {
			return true
		}
	}
	return false
}

// take reads the i-th if it was readable: how often it was signalled.
func (p *poller) take(i int) uint64 {
	if p.fds[i].Revents == 0 {
		return 0
	}
	n, err := unix.Read(int(p.fds[i].Fd), p.buf[:])
	if n != len(p.buf) || err != nil {
		return 0
	}
	return binary.NativeEndian.Uint64(p.buf[:])
}
