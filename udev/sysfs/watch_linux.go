package sysfs

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// settle is how long the watcher waits after an event for those that follow it:
// a module brings tens.
const settle = 50 * time.Millisecond

// watcher calls back when the kernel has sent uevents. Modules announce
// themselves after their init has run (since Linux 5.12), so classes that
// they made are there by then.
type watcher struct {
	f    *os.File
	done chan struct{}
}

func newWatcher(changed func()) (*watcher, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("open a uevent socket (does the unit allow AF_NETLINK?): %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("listen for uevents: %w", err)
	}
	w := &watcher{f: os.NewFile(uintptr(fd), "uevents"), done: make(chan struct{})}
	go w.run(changed)
	return w, nil
}

func (w *watcher) run(changed func()) {
	defer close(w.done)
	buf := make([]byte, 8192)
	for {
		// What the messages say does not matter, nor whether some were lost
		// (ENOBUFS): the callback looks for itself.
		_ = w.f.SetReadDeadline(time.Time{})
		if !w.read(buf) {
			return
		}
		_ = w.f.SetReadDeadline(time.Now().Add(settle))
		for w.read(buf) {
		}
		changed()
	}
}

// read takes one message; false at the deadline or when the socket is closed.
func (w *watcher) read(buf []byte) bool {
	_, err := w.f.Read(buf)
	return err == nil || errors.Is(err, unix.ENOBUFS) || errors.Is(err, io.EOF)
}

// close returns when the callback is not running and will not run again.
func (w *watcher) close() {
	_ = w.f.Close()
	<-w.done
}
