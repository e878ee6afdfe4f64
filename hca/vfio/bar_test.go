package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca/nic"
)

func panics(f func()) (s string) {
	defer func() {
		if r := recover(); r != nil {
			s = fmt.Sprint(r)
		}
	}()
	f()
	return ""
}

func TestBARAccess(t *testing.T) {
	r := newRig(t)
	d := r.device(pci0)
	b, err := d.Map(0)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := d.Map(0); err != nil || again != b || b.Len() != 8192 {
		t.Errorf("second map: %v, length %d", err, b.Len())
	}
	mem := d.bars[0].areas[0].mem
	b.Store64(0, 0x8877665544332211)
	b.Store32(8, 0xccbbaa99)
	b.Store16(12, 0xeedd)
	b.Store8(14, 0xff)
	if got := mem[:16]; !slices.Equal(got, []byte{0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff, 0}) {
		t.Errorf("memory %x", got)
	}
	binary.LittleEndian.PutUint64(mem[8184:], 0x0102030405060708)
	if b.Load64(8184) != 0x0102030405060708 || b.Load32(8188) != 0x01020304 || b.Load16(8190) != 0x0102 || b.Load8(8191) != 1 {
		t.Error("loads differ")
	}
	for name, f := range map[string]func(){
		"behind": func() { b.Load32(8192) }, "across": func() { b.Load64(8188) }, "negative": func() { b.Store8(-1, 0) },
		"unaligned": func() { b.Load32(2) }, "unaligned 16": func() { b.Store16(1, 0) }, "far": func() { b.Load8(1<<62 + 1) },
		"lowest": func() { b.Load64(-1 << 63) },
	} {
		if s := panics(f); !strings.Contains(s, "BAR 0: access of") {
			t.Errorf("%s: %q", name, s)
		}
	}
	if d.gone.Load() {
		t.Error("a driver's mistake makes the device gone")
	}
	if n := testing.AllocsPerRun(100, func() { b.Store32(0, b.Load32(4)) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestBARParts(t *testing.T) {
	type area = abi.VfioRegionSparseMmapArea
	for _, c := range []struct {
		name  string
		bar   int
		set   func(*fakeKernel)
		calls []string // mmaps, "" for an error
		is    error
		good  []int
		bad   []int
	}{
		{name: "whole", bar: 0, calls: []string{"mmap 0+0x0:0x2000"}, good: []int{0, 8188}},
		{name: "MSI-X table cut out", bar: 1, calls: []string{"mmap 1+0x0:0x1000", "mmap 1+0x2000:0x2000"}, good: []int{0, 0xffc, 0x2000, 0x3ffc}, bad: []int{0x1000, 0x1ffc}},
		{name: "MSI-X table mappable", bar: 1, set: func(k *fakeKernel) { k.bars[1].msix = true }, calls: []string{"mmap 1+0x0:0x4000"}, good: []int{0x2000}},
		{name: "no capabilities", bar: 1, set: func(k *fakeKernel) { k.config[statusOffset] = 0 }, calls: []string{"mmap 1+0x0:0x4000"}},
		{name: "capabilities in a ring", bar: 1, set: func(k *fakeKernel) { k.config[0x50], k.config[0x51] = 5, 0x40 }, calls: []string{"mmap 1+0x0:0x4000"}},
		{name: "capability at the end", bar: 1, set: func(k *fakeKernel) { k.config[0x41], k.config[0xfc] = 0xfc, capMSIX }, calls: []string{"mmap 1+0x0:0x4000"}},
		{name: "table is all", bar: 1, set: func(k *fakeKernel) { k.bars[1].size = 4096; k.config[0x54], k.config[0x55] = 1, 0 }, is: unix.EOPNOTSUPP},
		{name: "table behind the end", bar: 1, set: func(k *fakeKernel) { k.config[0x56] = 0x70 }, calls: []string{"mmap 1+0x0:0x4000"}},
		{name: "sparse", bar: 1, set: func(k *fakeKernel) {
			k.bars[1].sparse = []area{{Offset: 0, Size: 0x1000}, {Offset: 0x3000, Size: 0x1000}}
		},
			calls: []string{"mmap 1+0x0:0x1000", "mmap 1+0x3000:0x1000"}, good: []int{0xffc, 0x3000, 0x3ffc}, bad: []int{0x1000, 0x2ffc}},
		{name: "hostile sparse", bar: 1, set: func(k *fakeKernel) {
			k.bars[1].sparse = []area{{Offset: 0, Size: 0x5000}, {Offset: ^uint64(0), Size: 2}, {Offset: 0x123, Size: 0x100}, {Offset: 0x1000, Size: 0}, {Offset: 0x2000, Size: 0x1000}}
		}, calls: []string{"mmap 1+0x2000:0x1000"}},
		{name: "nothing sparse", bar: 1, set: func(k *fakeKernel) { k.bars[1].sparse = []area{} }, is: unix.EOPNOTSUPP},
		{name: "less than a page", bar: 0, set: func(k *fakeKernel) { k.bars[0].size = 256 }, calls: []string{"mmap 0+0x0:0x1000"}, good: []int{252}, bad: []int{256}},
		{name: "I/O ports", bar: 2, is: unix.EOPNOTSUPP},
		{name: "none", bar: 3, is: unix.EINVAL},
		{name: "negative", bar: -1, is: unix.EINVAL},
		{name: "ROM", bar: 6, is: unix.EINVAL},
		{name: "refused", bar: 0, set: func(k *fakeKernel) { k.fail["mmap 0+0x0:0x2000"] = unix.EINVAL }, is: unix.EINVAL},
		{name: "second part refused", bar: 1, set: func(k *fakeKernel) { k.fail["mmap 1+0x2000:0x2000"] = unix.ENOMEM }, is: unix.ENOMEM},
		{name: "no info", bar: 0, set: func(k *fakeKernel) { k.fail["GET_REGION_INFO"] = unix.EINVAL }, is: unix.EINVAL},
		{name: "no config", bar: 1, set: func(k *fakeKernel) { k.fail["pread"] = unix.EFAULT; k.failAt["pread"] = 1 }, is: unix.EFAULT},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			d := r.device(pci0)
			if c.set != nil {
				c.set(r.k)
			}
			r.k.log = nil
			b, err := d.Map(c.bar)
			for _, f := range []string{"pread", "GET_REGION_INFO"} {
				delete(r.k.fail, f)
			}
			if c.is != nil {
				if !errors.Is(err, c.is) {
					t.Errorf("error %v, want %v", err, c.is)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var calls []string
			for _, l := range r.k.log {
				if strings.HasPrefix(l, "mmap") {
					calls = append(calls, l)
				}
			}
			if !slices.Equal(calls, c.calls) {
				t.Errorf("mapped %q, want %q", calls, c.calls)
			}
			for _, off := range c.good {
				b.Store32(off, 5)
				if b.Load32(off) != 5 {
					t.Errorf("nothing at %#x", off)
				}
			}
			for _, off := range c.bad {
				if panics(func() { b.Load32(off) }) == "" {
					t.Errorf("access at %#x", off)
				}
			}
		})
	}
}

// A bus error, here from behind the end of a file, makes the device gone.
func TestBusError(t *testing.T) {
	fd, err := unix.MemfdCreate("bar", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	for name, access := range map[string]func(*bar) bool{
		"load 8":   func(b *bar) bool { return b.Load8(4097) == 0xff },
		"load 16":  func(b *bar) bool { return b.Load16(4098) == 0xffff },
		"load 32":  func(b *bar) bool { return b.Load32(4100) == 0xffffffff },
		"load 64":  func(b *bar) bool { return b.Load64(4096) == 1<<64-1 },
		"store 8":  func(b *bar) bool { b.Store8(4097, 1); return true },
		"store 64": func(b *bar) bool { b.Store64(4096, 1); return true },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.k.bars[0].file = fd
			d := r.device(pci0)
			if _, err := d.Map(0); err != nil {
				t.Fatal(err)
			}
			if err := d.BusMaster(true); err != nil {
				t.Fatal(err)
			}
			b := d.bars[0]
			b.Store32(0, 7)
			if b.Load32(0) != 7 || d.gone.Load() {
				t.Fatal("gone before it is")
			}
			if !access(b) || !d.gone.Load() {
				t.Error("not all ones, or not gone")
			}
			<-d.Removed()
			if err := d.BusMaster(false); !errors.Is(err, nic.ErrGone) {
				t.Errorf("error %v", err)
			}
			if b.Load32(0) != 0xffffffff {
				t.Error("reads after it is gone")
			}
			b.Store32(0, 8)
			// A mistake is one still.
			if panics(func() { b.Load8(9000) }) == "" {
				t.Error("access behind the end")
			}
			// Its DMA is ended also though it counts as gone.
			if err := d.Close(); err != nil || r.k.command()&commandMaster != 0 {
				t.Errorf("command %#x, %v", r.k.command(), err)
			}
		})
	}
}

// Panics that are no fault of this access go on.
func TestOtherPanic(t *testing.T) {
	r := newRig(t)
	d := r.device(pci0)
	if _, err := d.Map(0); err != nil {
		t.Fatal(err)
	}
	if panics(func() { d.bars[0].fault("other", nil) }) != "other" || d.gone.Load() {
		t.Error("swallowed")
	}
}

func TestUseAfterClose(t *testing.T) {
	r := newRig(t)
	d := r.device(pci0)
	b, err := d.Map(0)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if panics(func() { b.Load8(0) }) == "" {
		t.Error("access to what is unmapped")
	}
}

func BenchmarkBARLoad32(b *testing.B) {
	d := newRig(b).device(pci0)
	m, err := d.Map(0)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		m.Load32(4)
	}
}

func BenchmarkBARStore32(b *testing.B) {
	d := newRig(b).device(pci0)
	m, err := d.Map(0)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		m.Store32(4, 1)
	}
}
