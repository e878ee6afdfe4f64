//go:build linux && !amd64

package caller

import "golang.org/x/sys/unix"

const remoteSupported = false

type registers struct{}

func (r *registers) load(int) error                                     { return ErrUnsupported }
func (r *registers) store(int) error                                    { return ErrUnsupported }
func (r *registers) atWriteExit(func(b []byte, addr uint64) error) bool { return false }
func (r *registers) result() int64                                      { return 0 }
func (r *registers) fd() int                                            { return -1 }
func (r *registers) stack() uint64                                      { return 0 }
func (r registers) call(uintptr, *[6]uintptr) registers                 { return r }
func (r *registers) fail(unix.Errno)                                    {}
