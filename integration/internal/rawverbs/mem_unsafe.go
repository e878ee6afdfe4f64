package rawverbs

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Page is the page size of every machine that this runs on.
const Page = 4096

// The pages of a Mem. A hole follows the writable ones, so that a pointer can
// straddle its edge.
const (
	memRW    = 16 // responses
	memHole  = memRW
	memNone  = memRW + 1
	memRO    = memRW + 2
	memData  = memRW + 3 // what regions are registered over
	memPages = memData + 16
)

// Mem is memory outside of Go's heap for responses, with pages beside it that
// no response can be written to.
type Mem struct{ all []byte }

// NewMem maps one.
func NewMem() (*Mem, error) {
	b, err := unix.Mmap(-1, 0, memPages*Page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map the response memory: %w", err)
	}
	m := &Mem{b}
	if err := unix.Mprotect(m.page(memNone), unix.PROT_NONE); err != nil {
		return nil, fmt.Errorf("take a page's permissions: %w", err)
	}
	if err := unix.Mprotect(m.page(memRO), unix.PROT_READ); err != nil {
		return nil, fmt.Errorf("make a page read-only: %w", err)
	}
	// Not unix.Munmap, which only takes whole mappings of its own.
	if _, _, e := unix.Syscall(unix.SYS_MUNMAP, uintptr(m.addr(memHole*Page)), Page, 0); e != 0 {
		return nil, fmt.Errorf("make a hole: %w", e)
	}
	return m, nil
}

// Free unmaps all of it.
func (m *Mem) Free() {
	_, _, _ = unix.Syscall(unix.SYS_MUNMAP, uintptr(m.addr(0)), memPages*Page, 0)
	m.all = nil
}

func (m *Mem) page(n int) []byte { return m.all[n*Page : (n+1)*Page] }

func (m *Mem) addr(off int) uint64 { return uint64(uintptr(unsafe.Pointer(&m.all[off]))) }

// Out is the response area, and its address.
func (m *Mem) Out() ([]byte, uint64) { return m.all[:memRW*Page], m.addr(0) }

// Hole is the address of a hole after writable memory.
func (m *Mem) Hole() uint64 { return uint64(uintptr(unsafe.Pointer(&m.all[0]))) + memHole*Page }

// None and RO are addresses of a page without permissions and of a read-only one.
func (m *Mem) None() uint64 { return m.addr(memNone * Page) }

// RO is the address of a page that can only be read.
func (m *Mem) RO() uint64 { return m.addr(memRO * Page) }

// Data is writable memory for regions, and its address.
func (m *Mem) Data() ([]byte, uint64) { return m.all[memData*Page:], m.addr(memData * Page) }

// AddrOf is the address of b's first byte. b must not move: use it for mapped
// memory, not for what the garbage collector owns.
func AddrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// write is write(2). Quick: without telling the Go scheduler, for measuring.
func write(fd int, b []byte, quick bool) (int, unix.Errno) {
	p := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	if quick {
		n, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), p, uintptr(len(b)))
		return int(n), e
	}
	n, _, e := unix.Syscall(unix.SYS_WRITE, uintptr(fd), p, uintptr(len(b)))
	return int(n), e
}

// NumFDs is how many descriptors this process has.
func NumFDs() (int, error) {
	d, err := os.ReadDir("/proc/self/fd")
	return len(d), err
}
