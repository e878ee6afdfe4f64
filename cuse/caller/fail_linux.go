package caller

import "golang.org/x/sys/unix"

// Fail makes the client's write return errno instead of success, once it is let go: for a command that was answered so
// that its thread could be stopped, and then could not be done (the client is at its fd limit, its response pointer is
// bad). errno is 1 to 511 (EINVAL): above that are the kernel's own codes for "start again".
func (s *Stopped) Fail(errno unix.Errno) error {
	if errno == 0 || errno >= -eRESTARTSYS {
		return s.error("fail the write", unix.EINVAL)
	}
	_, err := s.do("fail the write", syscallOp{fail: errno})
	return err
}
