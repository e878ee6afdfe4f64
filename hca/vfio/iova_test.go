package vfio

import (
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

func TestIOVASpans(t *testing.T) {
	for _, c := range []struct {
		name  string
		valid []span
		want  []span
	}{
		{"default", defaultSpans, []span{{minIOVA, msiStart}, {msiEnd, narrowIOMMU}}},
		{"out of order", []span{{0x700000, 0x800000}, {0x200000, 0x300000}}, []span{{0x200000, 0x300000}, {0x700000, 0x800000}}},
		{"overlapping", []span{{0x200000, 0x400000}, {0x300000, 0x500000}, {0x500000, 0x600000}}, []span{{0x200000, 0x600000}}},
		{"in pieces", []span{{0x200001, 0x300fff}, {0x400001, 0x400fff}}, []span{{0x201000, 0x300000}}},
		{"backwards", []span{{0x300000, 0x200000}}, nil},
		{"all", []span{{0, 1<<64 - 1}}, []span{{minIOVA, maxIOVA}}},
		{"none", nil, nil},
	} {
		if got := newIOVASpace(c.valid, 4096).free; !slices.Equal(got, c.want) {
			t.Errorf("%s: %#x, want %#x", c.name, got, c.want)
		}
	}
}

// Whatever is taken is apart, aligned and valid; when all is back, all is free.
func TestIOVARandom(t *testing.T) {
	valid := []span{{minIOVA, 0x900000}, {0xa00000, 0x2000000}}
	s := newIOVASpace(valid, 4096)
	rnd := rand.New(rand.NewPCG(1, 2))
	var held []span
	for range 5000 {
		if len(held) > 0 && rnd.IntN(2) == 0 {
			i := rnd.IntN(len(held))
			s.put(held[i])
			held = slices.Delete(held, i, i+1)
			continue
		}
		size, align := uint64(1+rnd.IntN(64))<<12, uint64(4096)<<rnd.IntN(10)
		at, ok := s.take(size, align)
		if !ok {
			continue
		}
		n := span{at, at + size}
		if at%align != 0 || !slices.ContainsFunc(valid, func(v span) bool { return v.start <= n.start && n.end <= v.end }) {
			t.Fatalf("%#x for %#x aligned to %#x", n, size, align)
		}
		for _, h := range held {
			if n.start < h.end && h.start < n.end {
				t.Fatalf("%#x is held as %#x", n, h)
			}
		}
		held = append(held, n)
	}
	for _, h := range held {
		s.put(h)
	}
	if !slices.Equal(s.free, valid) {
		t.Errorf("free %#x, want %#x", s.free, valid)
	}
	if _, ok := s.take(1<<63, 4096); ok {
		t.Error("took more than there is")
	}
}

func TestIommuInfo(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*fakeKernel)
		page uint64
		want []span
	}{
		{"as told", func(*fakeKernel) {}, 4096, []span{{0, msiStart}, {msiEnd, narrowIOMMU}}},
		{"old kernel", func(k *fakeKernel) { k.ranges = nil }, 4096, defaultSpans},
		{"big pages", func(k *fakeKernel) { k.pgsizes = 1 << 16 }, 1 << 16, []span{{0, msiStart}, {msiEnd, narrowIOMMU}}},
		{"bytes", func(k *fakeKernel) { k.pgsizes = ^uint64(0) }, 4096, []span{{0, msiStart}, {msiEnd, narrowIOMMU}}},
		{"all", func(k *fakeKernel) { k.ranges = []abi.VfioIovaRange{{Start: 0, End: ^uint64(0)}} }, 4096, []span{{0, maxIOVA + 1}}},
		{"none", func(k *fakeKernel) { k.ranges = []abi.VfioIovaRange{} }, 4096, nil},
	} {
		k := newKernel()
		c.set(k)
		page, valid, err := iommuInfo(k, k.add("container"))
		if err != nil || page != c.page || !slices.Equal(valid, c.want) {
			t.Errorf("%s: page %d, %#x, %v", c.name, page, valid, err)
		}
	}
}

func TestCapability(t *testing.T) {
	h := func(id uint16, next uint32) []byte {
		c := abi.VfioInfoCapHeader{ID: id, Next: next}
		return bytesOf(&c)
	}
	ring := append(h(1, 8), h(2, 8)...)
	for _, c := range []struct {
		name  string
		info  []byte
		first uint32
		id    uint16
		found bool
	}{
		{"there", append(h(0, 0), h(3, 0)...), 8, 3, true},
		{"not there", append(h(0, 0), h(3, 0)...), 8, 4, false},
		{"ring", ring, 8, 9, false},
		{"behind the end", ring, 16, 1, false},
		{"far behind", ring, 1 << 31, 1, false},
		{"cut", ring[:12], 8, 2, false},
		{"none", ring, 0, 1, false},
	} {
		if got := capability(c.info, c.first, c.id) != nil; got != c.found {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	if l := list[abi.VfioIovaRange](make([]byte, 40), 1<<31); len(l) != 2 {
		t.Errorf("%d ranges of two", len(l))
	}
}

// greedy says that it needs more room than anybody has.
type greedy struct{ linux }

func (greedy) ioctl(_ int, _ uint, arg []byte) (int, error) {
	copy(arg, []byte{0xff, 0xff, 0xff, 0x7f})
	return 0, nil
}

func TestAskIsBounded(t *testing.T) {
	if _, _, err := iommuInfo(greedy{}, 0); err == nil {
		t.Error("asked for 2 GiB")
	}
	if _, err := regionInfo(greedy{}, 0, 0); err == nil {
		t.Error("asked for 2 GiB")
	}
}

// huge says that a region is larger than there are offsets.
type huge struct{ linux }

func (huge) ioctl(_ int, _ uint, arg []byte) (int, error) {
	var q abi.VfioRegionInfo
	load(&q, arg)
	q.Size, q.Offset = 1<<62, 1<<62
	copy(arg, bytesOf(&q))
	return 0, nil
}

func TestRegionOverflow(t *testing.T) {
	if _, err := regionInfo(huge{}, 0, 0); err == nil {
		t.Error("a region without an end")
	}
}

func TestMapMemory(t *testing.T) {
	for _, n := range []int{4096, hugePage, 3 * hugePage} {
		b, err := linux{}.mapMemory(n)
		if err != nil {
			t.Fatal(err)
		}
		if n >= hugePage && addressOf(b)%hugePage != 0 || len(b) != n {
			t.Errorf("%d bytes at %#x", len(b), addressOf(b))
		}
		b[0], b[n-1] = 1, 1
		if err := (linux{}).unmap(b); err != nil {
			t.Error(err)
		}
		if err := unix.Madvise(b, unix.MADV_NORMAL); err != unix.ENOMEM {
			t.Errorf("still there: %v", err)
		}
	}
}
