package main

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse/caller"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

// system is cuse/caller as a dispatch.System.
type system struct{}

func (system) OpenProcess(tid int) (dispatch.Process, error) {
	p, err := caller.OpenProcess(tid)
	if err != nil {
		return nil, err
	}
	return process{p}, nil
}

func (system) Credentials(p dispatch.Process, tid int, uid, gid uint32) (dispatch.Credentials, error) {
	c, err := caller.ReadCreds(p.PID(), tid, uid, gid)
	if err != nil {
		return nil, err
	}
	return &creds{c, p.(process)}, nil
}

// creds knows beside the credentials which image the opener ran.
type creds struct {
	caller.Creds
	p process // held by the file
}

func (c *creds) CheckImage() error {
	if !c.p.Alive() {
		return fmt.Errorf("process %d runs another program than the opener: %w", c.p.PID(), unix.EACCES)
	}
	return nil
}

func (system) Read(tid int, b []byte, addr uint64) error  { return caller.Thread(tid).Read(b, addr) }
func (system) Write(tid int, b []byte, addr uint64) error { return caller.Thread(tid).Write(b, addr) }

func (system) OpenFile(tid int, fd int32) (dispatch.ClientFile, error) {
	f, err := caller.OpenFile(tid, fd)
	if err != nil {
		return nil, err
	}
	return clientFile{f}, nil
}

func (system) SameFile(tid int, a, b int32) bool { return caller.SameFile(tid, a, b) }

// clientFile gives caller.File the shape that dispatch asks for.
type clientFile struct{ *caller.File }

func (f clientFile) Key() dispatch.FileKey { return dispatch.FileKey{Dev: f.Dev, Ino: f.Ino} }

func (system) ReadBehind(tid, written int, b []byte) error {
	return caller.Thread(tid).ReadBehind(written, b)
}

func (system) Install(tid int, ways func(int) []string, opened func() bool, answer func(), done func(dispatch.Standing, error) unix.Errno) error {
	r, err := caller.Seize(tid)
	if err != nil {
		return err
	}
	called := false
	err = r.Run(answer, func(s *caller.Stopped) error {
		fd, err := openNode(s, ways(s.FD()), opened)
		called = true
		errno := done(standing{s, fd}, err)
		if errno == 0 {
			return nil
		}
		if e := s.Fail(errno); e != nil {
			return e
		}
		if err == nil {
			return s.Close(fd)
		}
		return nil
	})
	if !called {
		if err == nil {
			err = unix.EIO
		}
		done(standing{}, err)
	}
	return nil
}

// openNode tries all ways until one leads to our node. A descriptor that leads
// elsewhere is closed again.
func openNode(s *caller.Stopped, ways []string, opened func() bool) (fd int, err error) {
	for _, path := range ways {
		fd, err = s.Open(path, unix.O_RDWR)
		if err == nil && !opened() {
			_ = s.Close(fd)
			fd, err = -1, fmt.Errorf("%s of thread %d is not our node: %w", path, s.TID(), unix.EBADF)
		}
		if err == nil || errors.Is(err, caller.ErrExpired) || errors.Is(err, unix.ESRCH) {
			break
		}
	}
	return fd, err
}

type standing struct {
	s  *caller.Stopped
	fd int
}

func (s standing) FD() int                           { return s.fd }
func (s standing) Write(b []byte, addr uint64) error { return s.s.WriteMem(addr, b) }

// Replace keeps the close-on-exec flag; the status flags are those of the open.
func (s standing) Replace(path string, opened func() bool) error {
	command := uintptr(s.s.FD())
	fd, err := s.s.Open(path, unix.O_RDWR)
	if err != nil {
		return err
	}
	if !opened() {
		err = fmt.Errorf("%s is not our file: %w", path, unix.EBADF)
	}
	flags := int64(0)
	if err == nil {
		flags, err = s.s.Syscall(unix.SYS_FCNTL, command, unix.F_GETFD)
	}
	if err == nil {
		cloexec := uintptr(0)
		if flags&unix.FD_CLOEXEC != 0 {
			cloexec = unix.O_CLOEXEC
		}
		_, err = s.s.Syscall(unix.SYS_DUP3, uintptr(fd), command, cloexec)
	}
	if e := s.s.Close(fd); err == nil && errors.Is(e, unix.ESRCH) {
		err = e
	}
	return err
}

// process gives caller.Process the shape that dispatch asks for.
type process struct{ *caller.Process }

func (p process) Get() { p.Process.Get() }

// sharedKey tells files apart.
type sharedKey struct{ dev, ino uint64 }

func (p process) SharedPieces(addr, length uint64) ([]hca.SharedPiece, error) {
	ranges, err := p.SharedRanges(addr, length)
	if err != nil {
		return nil, err
	}
	var l []hca.SharedPiece
	for _, r := range ranges {
		l = append(l, hca.SharedPiece{Start: r.Start, End: r.End, Key: sharedKey{r.Dev, r.Ino}})
	}
	return l, nil
}
