package ctxfs_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse/ctxfs"
)

const page = 4096

// blocks is the memory that a file takes.
func blocks(t testing.TB, fd int) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func size(t testing.TB, fd int) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Size
}

func TestArenaAlloc(t *testing.T) {
	a := arena(t)
	for _, n := range []int{0, -1, -1 << 62} {
		if _, _, err := a.Alloc(n); !errors.Is(err, unix.EINVAL) {
			t.Errorf("Alloc(%d): %v", n, err)
		}
	}
	for _, n := range []int{ctxfs.ArenaMax + 1, 1<<63 - 1} {
		if _, _, err := a.Alloc(n); !errors.Is(err, unix.ENOMEM) {
			t.Errorf("Alloc(%d): %v", n, err)
		}
	}
	if size(t, a.FD()) != 0 {
		t.Errorf("an empty arena has %d bytes", size(t, a.FD()))
	}
	mem, off, err := a.Alloc(1)
	if err != nil || len(mem) != page || cap(mem) != page || off != 0 {
		t.Fatal(len(mem), off, err)
	}
	if size(t, a.FD()) != page || blocks(t, a.FD()) != page {
		t.Errorf("%d bytes, %d allocated", size(t, a.FD()), blocks(t, a.FD()))
	}
	// Allocated memory is there before it is touched.
	if _, _, err := a.Alloc(10 * page); err != nil || blocks(t, a.FD()) != 11*page {
		t.Errorf("%d allocated, %v", blocks(t, a.FD()), err)
	}
	copy(mem, "old")
	a.Free(off)
	a.Free(off)
	a.Free(12345)
	if blocks(t, a.FD()) != 10*page {
		t.Errorf("%d allocated after Free", blocks(t, a.FD()))
	}
	// A client writes where nothing is allocated; the next to get it sees zeros.
	if _, err := unix.Pwrite(a.FD(), []byte("hostile"), 0); err != nil {
		t.Fatal(err)
	}
	mem, off, err = a.Alloc(page)
	if err != nil || off != 0 || !bytes.Equal(mem, make([]byte, page)) {
		t.Errorf("reused: %q at %d, %v", mem[:8], off, err)
	}
}

// Nobody can make the daemon's mapping end early.
func TestArenaSeals(t *testing.T) {
	a := arena(t)
	if _, _, err := a.Alloc(4 * page); err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(a.FD(), 0); err != unix.EPERM {
		t.Errorf("shrink: %v", err)
	}
	if _, err := unix.FcntlInt(uintptr(a.FD()), unix.F_ADD_SEALS, unix.F_SEAL_GROW); err != unix.EPERM {
		t.Errorf("seal: %v", err)
	}
}

func TestArenaBound(t *testing.T) {
	charged := 0
	a, err := ctxfs.NewArena(func(n int) error { charged += n; return nil })
	if err != nil {
		t.Fatal(err)
	}
	var offs []uint64
	got := 0
	for {
		_, off, err := a.Alloc(16 << 20)
		if err != nil {
			if !errors.Is(err, unix.ENOMEM) {
				t.Error(err)
			}
			break
		}
		offs = append(offs, off)
		got += 16 << 20
		if charged != got || int(size(t, a.FD())) != got {
			t.Fatalf("%d bytes in use, %d charged, file has %d", got, charged, size(t, a.FD()))
		}
		a.Free(off) // not to hold so much memory in a test
		if _, again, err := a.Alloc(page); err != nil || again != off {
			t.Fatalf("reuse: %d instead of %d, %v", again, off, err)
		}
		if _, _, err := a.Alloc(16<<20 - page); err != nil {
			t.Fatal(err)
		}
		a.Free(off + page)
		_, _, _ = a.Alloc(16<<20 - page)
		if err := unix.Fallocate(a.FD(), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), 16<<20); err != nil {
			t.Fatal(err)
		}
	}
	if got < ctxfs.ArenaMax*3/4 || got > ctxfs.ArenaMax {
		t.Errorf("%d bytes fit", got)
	}
	a.Close()
	a.Close()
	if charged != 0 {
		t.Errorf("%d bytes charged after Close", charged)
	}
	if _, _, err := a.Alloc(1); !errors.Is(err, unix.EIO) {
		t.Errorf("Alloc after Close: %v", err)
	}
	a.Free(0)
}

func TestArenaCharge(t *testing.T) {
	left := 8 * page
	a, err := ctxfs.NewArena(func(n int) error {
		if n > left {
			return fmt.Errorf("over the user's bound: %w", unix.ENOMEM)
		}
		left -= n
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	_, off, err := a.Alloc(6 * page)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := a.Alloc(3 * page); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("over the bound: %v", err)
	}
	if _, _, err := a.Alloc(2 * page); err != nil {
		t.Errorf("within the bound: %v", err)
	}
	a.Free(off)
	if _, _, err := a.Alloc(6 * page); err != nil {
		t.Errorf("reuse: %v", err)
	}
	a.Close()
	if left != 8*page {
		t.Errorf("%d bytes left after Close", left)
	}
}

// Random allocations never overlap, never straddle, and are zeroed.
func TestArenaRandom(t *testing.T) {
	a := arena(t)
	rng := rand.New(rand.NewPCG(1, 2))
	type block struct {
		mem  []byte
		tag  byte
		size int
	}
	live := map[uint64]block{}
	var offs []uint64
	for i := range 3000 {
		if len(offs) > 0 && (rng.IntN(2) == 0 || len(offs) > 200) {
			k := rng.IntN(len(offs))
			off := offs[k]
			b := live[off]
			for _, at := range []int{0, len(b.mem) / 2, len(b.mem) - 1} {
				if b.mem[at] != b.tag {
					t.Fatalf("block at %d was written by another", off)
				}
			}
			a.Free(off)
			delete(live, off)
			offs[k] = offs[len(offs)-1]
			offs = offs[:len(offs)-1]
			continue
		}
		n := 1 + rng.IntN(12*page)
		if rng.IntN(50) == 0 {
			n = rng.IntN(1 << 20)
		}
		mem, off, err := a.Alloc(n + 1)
		if err != nil {
			t.Fatal(err)
		}
		for at := range mem {
			if mem[at] != 0 {
				t.Fatalf("byte %d of a block at %d is not 0", at, off)
			}
		}
		tag := byte(1 + i%255)
		for at := range mem {
			mem[at] = tag
		}
		var there [1]byte
		if _, err := unix.Pread(a.FD(), there[:], int64(off)+int64(len(mem))-1); err != nil || there[0] != tag {
			t.Fatalf("the file has %d at the end of a block at %d, %v", there[0], off, err)
		}
		live[off] = block{mem, tag, len(mem)}
		offs = append(offs, off)
	}
	used := int64(0)
	for _, b := range live {
		used += int64(b.size)
	}
	if got := blocks(t, a.FD()); got != used {
		t.Errorf("%d bytes allocated for %d in use", got, used)
	}
	for _, off := range offs {
		a.Free(off)
	}
	// All merged again: what fitted in a chunk fits in it now.
	if _, off, err := a.Alloc(256 << 10); err != nil || off != 0 {
		t.Errorf("a whole chunk: at %d, %v", off, err)
	}
}

// A mapping keeps nothing alive once its context has ended: clients could take
// memory without bound, one context after the other.
func TestArenaEmpty(t *testing.T) {
	a := arena(t)
	a.Empty() // of nothing
	mem, _, err := a.Alloc(64 * page)
	if err != nil {
		t.Fatal(err)
	}
	client, err := unix.Mmap(a.FD(), 0, 64*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(client) }()
	fd, err := unix.Dup(a.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	mem[0], mem[len(mem)-1] = 1, 1
	a.Empty()
	a.Close()
	a.Empty()
	if blocks(t, fd) != 0 {
		t.Errorf("%d bytes allocated", blocks(t, fd))
	}
	if client[0] != 0 || client[len(client)-1] != 0 {
		t.Error("what was there is there still")
	}
	client[0] = 1 // no SIGBUS
}

func TestArenaConcurrent(t *testing.T) {
	a := arena(t)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 200 {
				mem, off, err := a.Alloc(1 + (i*7919)%(5*page))
				if err != nil {
					t.Error(err)
					return
				}
				mem[0], mem[len(mem)-1] = byte(g), byte(g)
				if mem[0] != byte(g) || mem[len(mem)-1] != byte(g) {
					t.Error("shared with another")
				}
				a.Free(off)
			}
		}()
	}
	wg.Wait()
}

// 100 contexts of 30 queues take a handful of mappings each.
func TestArenaMappings(t *testing.T) {
	count := func() int {
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), "memfd:uverbsd-queues")
	}
	before := count()
	const contexts = 100
	for range contexts {
		a := arena(t)
		for q := range 30 {
			if _, _, err := a.Alloc([]int{4, 8, 20}[q%3] << 10); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := count() - before; n > contexts*4 {
		t.Errorf("%d mappings for %d contexts", n, contexts)
	}
}

func BenchmarkArena(b *testing.B) {
	a := arena(b)
	for b.Loop() {
		_, off, err := a.Alloc(20 << 10)
		if err != nil {
			b.Fatal(err)
		}
		a.Free(off)
	}
}
