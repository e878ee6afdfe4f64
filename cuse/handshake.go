package cuse

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// Handshake answers the kernel's first message. When it returns nil the device
// exists, or the file system can be used, and clients may open it; they wait for
// Serve.
func (s *Session) Handshake() error {
	if s.bad != nil {
		return s.bad
	}
	if s.tree != nil {
		return s.initMount()
	}
	return s.initDevice()
}

// first reads the kernel's first message, op, and its arguments into in.
func (s *Session) first(op uint32, name string, in []byte) (h abi.FuseInHeader, err error) {
	buf := make([]byte, s.cfg.MaxWrite+headRoom)
	deadline := time.Now().Add(handshakeTimeout)
	n := 0
	for {
		var errno unix.Errno
		n, errno = s.ch.read(buf)
		if errno == 0 {
			break
		}
		left := time.Until(deadline)
		if errno != unix.EAGAIN && errno != unix.EINTR {
			return h, fmt.Errorf("cuse: %s: %w", name, errno)
		}
		if left <= 0 || s.closing.Load() {
			return h, fmt.Errorf("cuse: no %s from the kernel: %w", name, unix.ETIMEDOUT)
		}
		s.ch.wait(left)
	}
	if !load(&h, buf[:n]) || h.Opcode != op || int(h.Len) != n || copy(in, buf[headerLen:n]) < len(in) {
		return h, fmt.Errorf("cuse: the kernel's first message (%d bytes) is not %s: %w", n, name, unix.EPROTO)
	}
	return h, nil
}

// initDevice answers CUSE_INIT.
func (s *Session) initDevice() error {
	var in abi.CuseInitIn
	h, err := s.first(abi.CuseInit, "CUSE_INIT", bytesOf(&in))
	if err != nil {
		return err
	}
	if in.Major != abi.FuseKernelVersion || in.Minor < minMinor {
		s.sendError(h.Unique, unix.EPROTO)
		return fmt.Errorf("cuse: this kernel speaks FUSE %d.%d; %d.%d (Linux 5.4) or a newer %d.x is needed: %w",
			in.Major, in.Minor, abi.FuseKernelVersion, minMinor, abi.FuseKernelVersion, unix.EPROTONOSUPPORT)
	}

	var m struct {
		h abi.FuseOutHeader
		b abi.CuseInitOut
	}
	m.b.Major = abi.FuseKernelVersion
	m.b.Minor = min(in.Minor, abi.FuseKernelMinorVersion)
	m.b.Flags = in.Flags & abi.CuseUnrestrictedIoctl
	m.b.MaxRead = uint32(s.cfg.MaxWrite)
	m.b.MaxWrite = uint32(s.cfg.MaxWrite)
	msg := append(bytesOf(&m), "DEVNAME="+s.cfg.Name+"\x00"...)
	putHeader(msg, h.Unique, 0)
	if errno := s.ch.write(msg); errno != 0 {
		return fmt.Errorf("cuse: CUSE_INIT reply: %w", errno)
	}
	// The kernel makes the device inside that write, and can only refuse by
	// ending the session (cuse_process_init_reply).
	if s.ch.wait(0)&(unix.POLLERR|unix.POLLHUP) != 0 {
		return fmt.Errorf("cuse: the kernel did not create /dev/%s; is it there already? (see dmesg): %w", s.cfg.Name, unix.EEXIST)
	}
	return nil
}
