package vfio

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// kernel are the system calls that this package makes; tests have another.
type kernel interface {
	// open opens a file of /dev/vfio to read and write.
	open(path string) (int, error)
	close(fd int) error
	// ioctl takes a struct, call a number. Both give what the kernel returned.
	ioctl(fd int, req uint, arg []byte) (int, error)
	call(fd int, req uint, arg int) (int, error)
	pread(fd int, p []byte, off int64) (int, error)
	pwrite(fd int, p []byte, off int64) (int, error)
	// mapDevice maps n bytes of a device's region, shared.
	mapDevice(fd int, off int64, n int) ([]byte, error)
	// mapMemory is n bytes of zeroed memory; from hugePage on it is aligned to that.
	mapMemory(n int) ([]byte, error)
	// unmap takes what the two above gave.
	unmap(b []byte) error
	eventfd() (int, error)
	// memlock is the soft RLIMIT_MEMLOCK in bytes, or unix.RLIM_INFINITY.
	memlock() (uint64, error)
}

// linux is the kernel itself.
type linux struct{}

func (linux) open(path string) (fd int, err error) {
	err = again(func() (e error) { fd, e = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0); return e })
	return fd, err
}

func (linux) close(fd int) error { return unix.Close(fd) }

func (linux) pread(fd int, p []byte, off int64) (n int, err error) {
	err = again(func() (e error) { n, e = unix.Pread(fd, p, off); return e })
	return n, err
}

func (linux) pwrite(fd int, p []byte, off int64) (n int, err error) {
	err = again(func() (e error) { n, e = unix.Pwrite(fd, p, off); return e })
	return n, err
}

func (linux) eventfd() (int, error) { return unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK) }

func (linux) memlock() (uint64, error) {
	var l unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l)
	return l.Cur, err
}

// again makes a call anew that a signal has interrupted.
func again(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

func (linux) mapDevice(fd int, off int64, n int) ([]byte, error) {
	return mmap(fd, off, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// mapMemory is private memory that no child gets: a fork would otherwise mark the pages
// copy-on-write under the hardware. It is advised before it is pinned, so that it can
// consist of huge pages.
func (linux) mapMemory(n int) ([]byte, error) {
	room := n
	if n >= hugePage {
		room += hugePage
	}
	all, err := mmap(-1, 0, room, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	b := all
	if n >= hugePage {
		skip := int(-addressOf(all) & (hugePage - 1))
		b = all[skip : skip+n : skip+n]
		for _, rest := range [][]byte{all[:skip], all[skip+n:]} {
			if len(rest) > 0 {
				_ = linux{}.unmap(rest)
			}
		}
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // a kernel without huge pages refuses
	}
	if err := unix.Madvise(b, unix.MADV_DONTFORK); err != nil {
		_ = linux{}.unmap(b)
		return nil, err
	}
	return b, nil
}

func (linux) unmap(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}
