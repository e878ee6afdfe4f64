package rxetest

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// Arena is an hca.Arena of memory that is mapped twice.
type Arena struct {
	// mu guards the rest.
	mu   sync.Mutex
	next uint64
	all  map[uint64]*area
}

type area struct{ daemon, client []byte }

var _ hca.Arena = (*Arena)(nil)

const page = 4096

// Alloc gives the daemon's mapping.
func (a *Arena) Alloc(n int) ([]byte, uint64, error) {
	n = (n + page - 1) &^ (page - 1)
	fd, err := unix.MemfdCreate("rxetest", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, 0, fmt.Errorf("memfd_create: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		return nil, 0, fmt.Errorf("ftruncate: %w", err)
	}
	var m area
	for _, p := range []*[]byte{&m.daemon, &m.client} {
		if *p, err = unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			m.unmap()
			return nil, 0, fmt.Errorf("mmap: %w", err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.all == nil {
		a.all = make(map[uint64]*area)
	}
	off := a.next
	a.next += uint64(n)
	a.all[off] = &m
	return m.daemon, off, nil
}

func (m *area) unmap() {
	for _, p := range [][]byte{m.daemon, m.client} {
		if p != nil {
			_ = unix.Munmap(p)
		}
	}
}

// Free unmaps both sides. A client's own mapping would live on; here nobody uses it
// any more.
func (a *Arena) Free(off uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m := a.all[off]
	if m == nil {
		panic(fmt.Sprintf("free of %#x", off))
	}
	m.unmap()
	delete(a.all, off)
}

// Client is the client's mapping of a queue.
func (a *Arena) Client(i hca.MapInfo) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.all[i.Offset].client[:i.Size]
}

// Left is how many allocations there are.
func (a *Arena) Left() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.all)
}

// Each calls f on each allocation as another process may have mapped it.
func (a *Arena) Each(f func(mem []byte)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, m := range a.all {
		f(m.client)
	}
}
