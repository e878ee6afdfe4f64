// Package pin is the pinned_vm / RLIMIT_MEMLOCK accountant: what ib_umem_get
// (drivers/infiniband/core/umem.c) does with mm->pinned_vm.
//
// Who may call it: dispatch, from any goroutine.
//
// Nothing is really pinned: the payload moves through the client's address
// space at the time of the transfer. The accounting is kept all the same, since
// programs and their limits must behave as they will on hardware.
//
// Lock order: Accountant.mu is a leaf; Owner's methods are called outside it.
package pin

import (
	"fmt"
	"math"
	"sync"

	"golang.org/x/sys/unix"
)

// PageSize is the unit of accounting. The kernel counts PAGE_SIZE pages.
const PageSize = 4096

// Owner is the process that registers memory.
type Owner interface {
	// PID identifies it.
	PID() int
	// MemlockLimit is its RLIMIT_MEMLOCK at the time of the call, in bytes;
	// MaxUint64 is no limit.
	MemlockLimit() (uint64, error)
	// CanLockAny is CAP_IPC_LOCK.
	CanLockAny() bool
}

// Accountant keeps the totals by process. The zero value is ready.
type Accountant struct {
	// mu guards pages. Leaf.
	mu    sync.Mutex
	pages map[int]uint64 // by pid
}

// Charge is what one registration costs; give it back with Release.
type Charge struct {
	a     *Accountant
	pid   int
	pages uint64
}

// Pages is how many pages [start, start+length) touches. EINVAL if the range
// wraps, as ib_umem_get answers.
func Pages(start, length uint64) (uint64, error) {
	end := start + length
	if end < start || end > math.MaxUint64-(PageSize-1) {
		return 0, fmt.Errorf("range %#x+%#x wraps: %w", start, length, unix.EINVAL)
	}
	return (end+PageSize-1)/PageSize - start/PageSize, nil
}

// Charge adds every page that the range spans to o's account, each time again.
// ENOMEM over RLIMIT_MEMLOCK without CAP_IPC_LOCK; then nothing has changed.
func (a *Accountant) Charge(o Owner, start, length uint64) (Charge, error) {
	n, err := Pages(start, length)
	if err != nil {
		return Charge{}, err
	}
	limit := uint64(math.MaxUint64)
	if !o.CanLockAny() {
		bytes, err := o.MemlockLimit()
		if err != nil {
			return Charge{}, fmt.Errorf("memlock limit of pid %d: %w", o.PID(), err)
		}
		limit = bytes / PageSize
	}
	pid := o.PID()
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.pages[pid]
	if total := now + n; total < now || total > limit {
		return Charge{}, fmt.Errorf("pin %d pages for pid %d: %d pinned, limit %d (raise ulimit -l): %w", n, pid, now, limit, unix.ENOMEM)
	}
	if a.pages == nil {
		a.pages = make(map[int]uint64)
	}
	a.pages[pid] = now + n
	return Charge{a: a, pid: pid, pages: n}, nil
}

// Bytes is what the charge counts for.
func (c Charge) Bytes() uint64 { return c.pages * PageSize }

// Release gives the charge back; the second time it does nothing.
func (c *Charge) Release() {
	if c.a == nil {
		return
	}
	a := c.a
	c.a = nil
	a.mu.Lock()
	defer a.mu.Unlock()
	left := a.pages[c.pid] - c.pages
	if left == 0 {
		delete(a.pages, c.pid)
		return
	}
	a.pages[c.pid] = left
}

// Pinned is the bytes charged to pid.
func (a *Accountant) Pinned(pid int) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pages[pid] * PageSize
}
