package pin

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

type owner struct {
	pid   int
	limit uint64
	any   bool
}

func (o owner) Key() string                   { return fmt.Sprint("mm of ", o.pid) }
func (o owner) PID() int                      { return o.pid }
func (o owner) MemlockLimit() (uint64, error) { return o.limit, nil }
func (o owner) CanLockAny() bool              { return o.any }

func TestPages(t *testing.T) {
	for _, c := range []struct {
		start, length, want uint64
		err                 error
	}{
		{0, 0, 0, nil},
		{0x1000, 1, 1, nil},
		{0x1fff, 1, 1, nil},
		{0x1fff, 2, 2, nil},
		{0x1001, 4096, 2, nil},
		{0x1000, 1 << 30, 1 << 18, nil},
		{math.MaxUint64, 2, 0, unix.EINVAL},
		{math.MaxUint64, 0, 0, unix.EINVAL},
		{0xfffffffffffff000, 0xfff, 0, unix.EINVAL},
	} {
		n, err := Pages(c.start, c.length)
		if n != c.want || !errors.Is(err, c.err) {
			t.Errorf("Pages(%#x, %#x) = %d, %v; want %d, %v", c.start, c.length, n, err, c.want, c.err)
		}
	}
}

// The small input "reg_mr of 100 KiB under a 64 KiB memlock limit".
func TestLimit(t *testing.T) {
	var a Accountant
	o := owner{pid: 1, limit: 64 << 10}
	one, other := a.Open(o), a.Open(owner{pid: 2})
	if _, err := one.Charge(o, 0, 100<<10); !errors.Is(err, unix.ENOMEM) {
		t.Fatalf("over the limit: %v", err)
	}
	if one.Pinned() != 0 {
		t.Fatal("a refused charge stayed")
	}
	c, err := one.Charge(o, 0, 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	second := a.Open(o) // another file of the same process
	if _, err := second.Charge(o, 0, 1); !errors.Is(err, unix.ENOMEM) {
		t.Fatalf("one page more: %v", err)
	}
	foreign, err := other.Charge(owner{pid: 2, limit: 4096}, 0, 1)
	if err != nil {
		t.Fatalf("another process: %v", err)
	}
	raised, err := second.Charge(owner{pid: 1, limit: 128 << 10}, 0, 4096)
	if err != nil {
		t.Fatalf("raised limit: %v", err)
	}
	root, err := one.Charge(owner{pid: 1, any: true}, 0, 1<<40)
	if err != nil {
		t.Fatalf("CAP_IPC_LOCK: %v", err)
	}
	root.Release()
	root.Release()
	c.Release()
	if got := a.Pinned(o.Key()); got != 4096 {
		t.Fatalf("%d bytes left, want 4096", got)
	}
	raised.Release()
	foreign.Release()
	for _, acct := range []*Account{one, second, other} {
		acct.Close()
	}
	if len(a.accounts) != 0 {
		t.Fatalf("left: %v", a.accounts)
	}
}

func TestSamePagesCountTwice(t *testing.T) {
	var a Accountant
	o := owner{pid: 7, limit: math.MaxUint64}
	var wg sync.WaitGroup
	for i := 0; i < 8; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			acct := a.Open(o)
			defer acct.Close()
			for j := 0; j < 1000; j++ {
				c, err := acct.Charge(o, 0x1800, 0x1000)
				if err != nil {
					t.Error(err)
					return
				}
				if c.Bytes() != 8192 {
					t.Errorf("%d bytes", c.Bytes())
				}
				c.Release()
			}
		}()
	}
	wg.Wait()
	if len(a.accounts) != 0 || a.Pinned(o.Key()) != 0 {
		t.Fatalf("left: %v", a.accounts)
	}
}
