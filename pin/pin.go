// Package pin is the pinned_vm / RLIMIT_MEMLOCK accountant: what ib_umem_get
// (drivers/infiniband/core/umem.c) does with mm->pinned_vm.
//
// Who may call it: dispatch, from any goroutine.
//
// Nothing is really pinned: the payload moves through the client's address
// space at the time of the transfer. The accounting is kept all the same, since
// programs and their limits must behave as they will on hardware.
//
// Lock order: Accountant.mu is a leaf and is taken when an account is opened and
// closed, not for a charge; Owner's methods are called outside it.
package pin

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// PageSize is the unit of accounting. The kernel counts PAGE_SIZE pages.
const PageSize = 4096

// Owner is the process that registers memory.
type Owner interface {
	// Key names it, and no other process, also none that gets its pid later. The
	// kernel's account hangs at the mm_struct; the difference is an exec, of which
	// a client could make use to get a second one.
	Key() string
	// PID is for messages.
	PID() int
	// MemlockLimit is its RLIMIT_MEMLOCK at the time of the call, in bytes;
	// MaxUint64 is no limit.
	MemlockLimit() (uint64, error)
	// CanLockAny is CAP_IPC_LOCK.
	CanLockAny() bool
}

// Accountant keeps the accounts by process. The zero value is ready.
type Accountant struct {
	// mu guards accounts and their refs. Leaf.
	mu       sync.Mutex
	accounts map[string]*Account
}

// Account is one process's; its files share it.
type Account struct {
	a     *Accountant
	key   string
	refs  int          // guarded by Accountant.mu
	pages atomic.Int64 // mm->pinned_vm
}

// Open is o's account; Close it once no charge of the opener's is left.
func (a *Accountant) Open(o Owner) *Account {
	key := o.Key()
	a.mu.Lock()
	defer a.mu.Unlock()
	acct := a.accounts[key]
	if acct == nil {
		acct = &Account{a: a, key: key}
		if a.accounts == nil {
			a.accounts = make(map[string]*Account)
		}
		a.accounts[key] = acct
	}
	acct.refs++
	return acct
}

// Close drops the opener's reference.
func (c *Account) Close() {
	c.a.mu.Lock()
	defer c.a.mu.Unlock()
	if c.refs--; c.refs == 0 {
		delete(c.a.accounts, c.key)
	}
}

// Pinned is the bytes charged.
func (c *Account) Pinned() uint64 { return uint64(c.pages.Load()) * PageSize }

// Charge is what one registration costs; give it back with Release.
type Charge struct {
	acct  *Account
	pages int64
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

// Charge adds every page that the range spans, each time again. ENOMEM over o's
// RLIMIT_MEMLOCK without CAP_IPC_LOCK; then nothing has changed.
func (c *Account) Charge(o Owner, start, length uint64) (Charge, error) {
	pages, err := Pages(start, length)
	if err != nil {
		return Charge{}, err
	}
	n, limit := int64(pages), int64(math.MaxInt64) // at most 2^52 pages
	if !o.CanLockAny() {
		bytes, err := o.MemlockLimit()
		if err != nil {
			return Charge{}, fmt.Errorf("memlock limit of pid %d: %w", o.PID(), err)
		}
		limit = int64(bytes / PageSize)
	}
	// As ib_umem_get: add, look, take back.
	if total := c.pages.Add(n); total > limit {
		c.pages.Add(-n)
		return Charge{}, fmt.Errorf("pin %d pages for pid %d: %d pinned, limit %d (raise ulimit -l): %w", n, o.PID(), total-n, limit, unix.ENOMEM)
	}
	return Charge{acct: c, pages: n}, nil
}

// Bytes is what the charge counts for.
func (c Charge) Bytes() uint64 { return uint64(c.pages) * PageSize }

// Release gives the charge back; the second time it does nothing.
func (c *Charge) Release() {
	if c.acct == nil {
		return
	}
	c.acct.pages.Add(-c.pages)
	c.acct = nil
}

// Pinned is the bytes charged to the process of that key.
func (a *Accountant) Pinned(key string) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if acct := a.accounts[key]; acct != nil {
		return acct.Pinned()
	}
	return 0
}
