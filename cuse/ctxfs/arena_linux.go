package ctxfs

import (
	"fmt"
	"os"
	"sort"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// ArenaMax bounds the memory of one context: 256 MiB is 16 queues of 65,536
	// entries of 256 bytes, or thousands of usual ones.
	ArenaMax = 256 << 20

	// The daemon maps an arena in chunks that double, so that a context of ten
	// QPs takes a handful of the 65,530 mappings that a process may have
	// (vm.max_map_count): 1,000 such contexts have 30,000 queues.
	chunkMin = 256 << 10
	chunkMax = 32 << 20

	// fillStep is allocated at once: fallocate() gives up and undoes its work when
	// a signal comes (mm/shmem.c, shmem_fallocate), and the Go runtime sends some
	// to threads that run for long.
	fillStep = 1 << 20
)

// Arena is memory that one client's context and the daemon share: a memfd of which
// queues are cut. It implements hca.Arena. It must not be used after Close.
type Arena struct {
	fd     int
	page   int
	charge func(bytes int) error

	// mu guards what is below. It is held over system calls that allocate memory
	// of the arena: one context's queues are made one after the other.
	mu     sync.Mutex
	chunks []chunk
	size   int      // bytes mapped: where the next chunk starts
	top    int      // size of the file: never used beyond, never less again
	free   []extent // sorted, merged within a chunk
	used   map[uint64]extent
	closed bool
}

// chunk is one mapping of the file.
type chunk struct {
	start int
	mem   []byte
}

// extent is a range of the file, all in one chunk.
type extent struct {
	start, end int
	chunk      int
}

// NewArena makes an empty one. charge, unless nil, is asked before the file grows
// by so many bytes, and fails the Alloc if it fails; at Close it gets all of them
// back, as a negative number. Memory that Free takes back stays charged: the client
// can still touch it. charge is called under the arena's lock.
func NewArena(charge func(bytes int) error) (*Arena, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("uverbsd-queues", flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate("uverbsd-queues", flags)
	}
	if err != nil {
		return nil, fmt.Errorf("ctxfs: memfd_create: %w", err)
	}
	// A file that shrank would make the daemon's next touch a SIGBUS.
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("ctxfs: seal a memfd: %w", err)
	}
	if charge == nil {
		charge = func(int) error { return nil }
	}
	return &Arena{fd: fd, page: os.Getpagesize(), charge: charge, used: map[uint64]extent{}}, nil
}

// FD is the memfd, for FS.Add. It is the arena's.
func (a *Arena) FD() int { return a.fd }

// Alloc gives n bytes, rounded up to whole pages, all 0, and the offset at which
// the client maps them. ENOMEM over ArenaMax or when the host has no more: it is
// found out here, not when the page is touched. EINVAL for less than one byte.
func (a *Arena) Alloc(n int) (mem []byte, offset uint64, err error) {
	if n <= 0 {
		return nil, 0, fmt.Errorf("ctxfs: %d bytes of arena: %w", n, unix.EINVAL)
	}
	if n > ArenaMax {
		return nil, 0, fmt.Errorf("ctxfs: %d bytes of arena: %w", n, unix.ENOMEM)
	}
	n = (n + a.page - 1) &^ (a.page - 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, 0, fmt.Errorf("ctxfs: arena closed: %w", unix.EIO)
	}
	i := a.fitLocked(n)
	if i < 0 {
		if err := a.growLocked(n); err != nil {
			return nil, 0, err
		}
		i = a.fitLocked(n)
	}
	e := a.free[i]
	e.end = e.start + n
	if err := a.fillLocked(e); err != nil {
		return nil, 0, err
	}
	if a.free[i].start = e.end; a.free[i].start == a.free[i].end {
		a.free = append(a.free[:i], a.free[i+1:]...)
	}
	a.used[uint64(e.start)] = e
	c := a.chunks[e.chunk]
	at := e.start - c.start
	return c.mem[at : at+n : at+n], uint64(e.start), nil
}

// Free takes back what Alloc gave: the memory goes to the host at once, the
// offsets to the next Alloc. The caller does not touch it any more.
func (a *Arena) Free(offset uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e, ok := a.used[offset]
	if !ok {
		return
	}
	delete(a.used, offset)
	_ = a.punch(e.start, e.end) // else it is kept, and punched when used again
	i := sort.Search(len(a.free), func(i int) bool { return a.free[i].start > e.start })
	if i < len(a.free) && a.free[i].chunk == e.chunk && a.free[i].start == e.end {
		a.free[i].start = e.start
	} else {
		a.free = append(a.free, extent{})
		copy(a.free[i+1:], a.free[i:])
		a.free[i] = e
	}
	if i > 0 && a.free[i-1].chunk == e.chunk && a.free[i-1].end == a.free[i].start {
		a.free[i-1].end = a.free[i].end
		a.free = append(a.free[:i], a.free[i+1:]...)
	}
}

// Empty gives the memory of all that there is to the host, also of what the client
// keeps mapped, which reads as zeros then: a mapping outlives its file, and no bound
// would know of what it holds. What the client touches later is its own, like any
// memory that a program shares with itself. Close follows.
func (a *Arena) Empty() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed && a.top > 0 {
		_ = a.punch(0, a.top)
	}
}

// Close unmaps and closes all: nobody uses a queue any more. What the client has
// mapped stays until it unmaps it.
func (a *Arena) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	a.closed = true
	for _, c := range a.chunks {
		_ = unix.Munmap(c.mem)
	}
	_ = unix.Close(a.fd)
	_ = a.charge(-a.top)
	a.chunks, a.free, a.used = nil, nil, nil
}

// fitLocked finds the first free extent with room for n bytes, or -1.
func (a *Arena) fitLocked(n int) int {
	for i, e := range a.free {
		if e.end-e.start >= n {
			return i
		}
	}
	return -1
}

// growLocked maps one more chunk, in which n bytes fit. It takes no memory: the
// file grows with what is allocated.
func (a *Arena) growLocked(n int) error {
	size := min(max(a.size, chunkMin), chunkMax)
	size = max(min(size, ArenaMax-a.size), n)
	if size > ArenaMax-a.size {
		return fmt.Errorf("ctxfs: %d more bytes of arena: %w", n, unix.ENOMEM)
	}
	mem, err := unix.Mmap(a.fd, int64(a.size), size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("ctxfs: map %d bytes of arena: %w", size, err)
	}
	a.free = append(a.free, extent{a.size, a.size + size, len(a.chunks)})
	a.chunks = append(a.chunks, chunk{a.size, mem})
	a.size += size
	return nil
}

// fillLocked has the host give zeroed pages for e.
func (a *Arena) fillLocked(e extent) error {
	if e.start < a.top { // the client may have written there since
		if err := a.punch(e.start, min(e.end, a.top)); err != nil {
			return fmt.Errorf("ctxfs: arena: %w", err)
		}
	}
	if more := e.end - a.top; more > 0 {
		if err := a.charge(more); err != nil {
			return err
		}
		if err := retry(func() error { return unix.Ftruncate(a.fd, int64(e.end)) }); err != nil {
			_ = a.charge(-more)
			return fmt.Errorf("ctxfs: grow arena: %w", err)
		}
		a.top = e.end
	}
	for at := e.start; at < e.end; at += fillStep {
		n := min(fillStep, e.end-at)
		if err := retry(func() error { return unix.Fallocate(a.fd, 0, int64(at), int64(n)) }); err != nil {
			_ = a.punch(e.start, e.end)
			return fmt.Errorf("ctxfs: %d bytes of arena: %v: %w", e.end-e.start, err, unix.ENOMEM)
		}
	}
	return nil
}

func (a *Arena) punch(start, end int) error {
	return retry(func() error {
		return unix.Fallocate(a.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(start), int64(end-start))
	})
}

// retry repeats what a signal ended.
func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}
