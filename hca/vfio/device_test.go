package vfio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca/nic"
)

func TestConfig(t *testing.T) {
	r := newRig(t)
	d := r.device(pci0)
	p := make([]byte, 7)
	if err := d.ReadConfig(0, p); err != nil || !bytes.Equal(p, r.k.config[:7]) {
		t.Errorf("read %x, %v", p, err)
	}
	if err := d.WriteConfig(0x80, []byte{1, 2, 3}); err != nil || !bytes.Equal(r.k.config[0x80:0x84], []byte{1, 2, 3, 0}) {
		t.Errorf("wrote %x, %v", r.k.config[0x80:0x84], err)
	}
	for _, c := range []struct {
		off int64
		n   int
	}{{-1, 1}, {256, 1}, {250, 7}, {1 << 62, 4}, {0, 257}} {
		if err := d.ReadConfig(c.off, make([]byte, c.n)); !errors.Is(err, unix.EINVAL) {
			t.Errorf("read %d at %d: %v", c.n, c.off, err)
		}
		if err := d.WriteConfig(c.off, make([]byte, c.n)); !errors.Is(err, unix.EINVAL) {
			t.Errorf("write %d at %d: %v", c.n, c.off, err)
		}
	}
	if err := d.ReadConfig(256, nil); err != nil {
		t.Error(err)
	}
}

// A function that is gone reads as all ones, says ErrGone ever after, and Removed.
func TestGone(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(*rig, *Device) error
	}{
		{"ENODEV", func(r *rig, d *Device) error {
			r.k.fail["pread"] = unix.ENODEV
			return d.ReadConfig(0x10, make([]byte, 4))
		}},
		{"EIO", func(r *rig, d *Device) error {
			r.k.fail["pwrite"] = unix.EIO
			return d.WriteConfig(0x10, make([]byte, 4))
		}},
		{"empty slot", func(r *rig, d *Device) error {
			r.k.config[0], r.k.config[1] = 0xff, 0xff
			return d.ReadConfig(0, make([]byte, 4))
		}},
		{"empty command", func(r *rig, d *Device) error {
			r.k.config[4], r.k.config[5] = 0xff, 0xff
			return d.BusMaster(true)
		}},
		{"reset", func(r *rig, d *Device) error { r.k.fail["RESET"] = unix.ENODEV; return d.Reset() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			d := r.device(pci0)
			if err := c.do(r, d); !errors.Is(err, nic.ErrGone) {
				t.Errorf("error %v", err)
			}
			<-d.Removed()
			p := make([]byte, 4)
			if err := d.ReadConfig(8, p); !errors.Is(err, nic.ErrGone) || !bytes.Equal(p, []byte{255, 255, 255, 255}) {
				t.Errorf("read %x, %v", p, err)
			}
			for i, err := range usesOf(d) {
				if !errors.Is(err, nic.ErrGone) {
					t.Errorf("use %d: %v", i, err)
				}
			}
			if err := d.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
			for i, err := range usesOf(d) {
				if !errors.Is(err, nic.ErrClosed) {
					t.Errorf("use %d after close: %v", i, err)
				}
			}
		})
	}
}

// usesOf tries everything.
func usesOf(d *Device) []error {
	_, m := d.Map(0)
	_, a := d.Alloc(1)
	_, i := d.Interrupts(1)
	return []error{d.ReadConfig(0, nil), d.WriteConfig(0, nil), d.BusMaster(true), m, a, i, d.UnmaskINTx(), d.Reset()}
}

func TestAlloc(t *testing.T) {
	r := newRig(t)
	d := r.device(pci0)
	for _, size := range []int{1, 4096, 4097, hugePage, hugePage + 1} {
		m, err := d.Alloc(size)
		if err != nil {
			t.Fatal(err)
		}
		align := uint64(4096)
		if size >= hugePage {
			align = hugePage
		}
		if len(m.Mem) < size || len(m.Mem)%4096 != 0 || m.IOVA%align != 0 || addressOf(m.Mem)%align != 0 || m.IOVA < minIOVA {
			t.Errorf("%d bytes: %d at %#x, memory at %#x", size, len(m.Mem), m.IOVA, addressOf(m.Mem))
		}
		if bytes.ContainsFunc(m.Mem[:size], func(r rune) bool { return r != 0 }) {
			t.Error("not zeroed")
		}
		m.Mem[len(m.Mem)-1] = 1
	}
	for _, size := range []int{0, -1, maxAlloc + 1} {
		if _, err := d.Alloc(size); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

func TestAllocFails(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*fakeKernel)
		want string
		is   error
	}{
		{"limit", func(k *fakeKernel) { k.fail["MAP_DMA"] = unix.ENOMEM; k.limit = 64 << 10 }, "pin 8 KiB: RLIMIT_MEMLOCK is 64 KiB in all", unix.ENOMEM},
		{"no memory", func(k *fakeKernel) { k.fail["MAP_DMA"] = unix.ENOMEM }, "pin it", unix.ENOMEM},
		{"no entry", func(k *fakeKernel) { k.fail["MAP_DMA"] = unix.ENOSPC }, "allocate 5000 bytes", unix.ENOSPC},
		{"no mapping", func(k *fakeKernel) { k.fail["mapMemory"] = unix.ENOMEM }, "allocate 5000 bytes", unix.ENOMEM},
	} {
		r := newRig(t)
		d := r.device(pci0)
		c.set(r.k)
		free := fmt.Sprint(d.group.space.free)
		if _, err := d.Alloc(5000); !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v", c.name, err)
		}
		if now := fmt.Sprint(d.group.space.free); now != free || len(r.k.memory) > 0 {
			t.Errorf("%s: free %s, before %s; memory %v", c.name, now, free, r.k.memory)
		}
	}
	r := newRig(t)
	r.k.ranges = []abi.VfioIovaRange{{Start: 0x100000, End: 0x101fff}}
	d := r.device(pci0)
	if _, err := d.Alloc(0x2001); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("error %v", err)
	}
	if m, err := d.Alloc(0x2000); err != nil || m.IOVA != 0x100000 {
		t.Errorf("at %#x, %v", m.IOVA, err)
	}
}

func TestReset(t *testing.T) {
	r := newRig(t)
	d := r.device(pci0)
	if err := d.Reset(); err != nil {
		t.Error(err)
	}
	r.k.fail["RESET"] = unix.EINVAL
	if err := d.Reset(); !errors.Is(err, unix.EINVAL) {
		t.Error(err)
	}
	synctest.Test(t, func(t *testing.T) { // its pauses take no time
		r.k.fail["RESET"] = unix.EAGAIN
		if err := d.Reset(); !errors.Is(err, unix.EAGAIN) {
			t.Error(err)
		}
	})
	r.k.info.Flags = abi.VfioDeviceFlagsPCI
	if err := r.device(pci1).Reset(); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Error(err)
	}
}

func TestInterrupts(t *testing.T) {
	const intx, msi, msix = abi.VfioPCIIntxIrqIndex, abi.VfioPCIMsiIrqIndex, abi.VfioPCIMsixIrqIndex
	for _, c := range []struct {
		name    string
		counts  [3]uint32
		set     func(*fakeKernel)
		n       int
		vectors int
		want    int // index, -1: an error
		is      error
	}{
		{name: "MSI-X", counts: [3]uint32{1, 1, 3}, n: 3, vectors: 3, want: msix},
		{name: "MSI-X for one", counts: [3]uint32{1, 1, 3}, n: 1, vectors: 3, want: msix},
		{name: "MSI", counts: [3]uint32{1, 4, 0}, n: 2, vectors: 4, want: msi},
		{name: "INTx", counts: [3]uint32{1, 0, 0}, n: 1, vectors: 1, want: intx},
		{name: "MSI has more", counts: [3]uint32{1, 8, 2}, n: 5, vectors: 8, want: msi},
		{name: "none", n: 1, want: -1, is: unix.EINVAL},
		{name: "too many", counts: [3]uint32{1, 1, 3}, n: 4, vectors: 3, want: -1, is: unix.EINVAL},
		{name: "zero", counts: [3]uint32{1, 1, 3}, n: 0, vectors: 3, want: -1, is: unix.EINVAL},
		{name: "no eventfd", counts: [3]uint32{1, 1, 3}, set: func(k *fakeKernel) { k.fail["eventfd"] = unix.EMFILE; k.failAt["eventfd"] = 1 }, n: 2, vectors: 3, want: -1, is: unix.EMFILE},
		{name: "MSI-X fails", counts: [3]uint32{1, 1, 3}, set: func(k *fakeKernel) { k.fail["SET_IRQS 2"] = unix.EINVAL }, n: 1, vectors: 3, want: msi},
		{name: "only INTx", counts: [3]uint32{1, 1, 3}, set: func(k *fakeKernel) {
			k.fail["SET_IRQS 2"], k.fail["SET_IRQS 1"] = unix.EINVAL, unix.EINVAL
		}, n: 1, vectors: 3, want: intx},
		{name: "nothing", counts: [3]uint32{1, 1, 3}, set: func(k *fakeKernel) {
			k.fail["SET_IRQS 0"], k.fail["SET_IRQS 2"], k.fail["SET_IRQS 1"] = unix.EBUSY, unix.EINVAL, unix.EINVAL
		}, n: 1, vectors: 3, want: -1, is: unix.EBUSY},
		{name: "few left", counts: [3]uint32{1, 1, 3}, set: func(k *fakeKernel) { k.granted[msix] = 2 }, n: 3, vectors: 3, want: -1, is: unix.ENOSPC},
		{name: "hostile count", counts: [3]uint32{0, 0, 1 << 31}, n: 1, vectors: maxVectors, want: msix},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			for i, n := range c.counts {
				r.k.irqs[i].Count = n
			}
			r.k.config[5] |= commandNoINTx >> 8
			d := r.device(pci0)
			if c.set != nil {
				c.set(r.k)
			}
			if d.Vectors() != c.vectors {
				t.Errorf("%d vectors", d.Vectors())
			}
			fds, err := d.Interrupts(c.n)
			if c.want < 0 {
				if !errors.Is(err, c.is) || strings.Contains(err.Error(), "\n") || len(fds) > 0 {
					t.Errorf("error %v, descriptors %v", err, fds)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := r.k.triggers[uint32(c.want)]; fmt.Sprint(got) != fmt.Sprint(fds) || len(fds) != c.n {
				t.Errorf("kernel has %v, got %v", got, fds)
			}
			var b [8]byte
			if _, err := unix.Read(fds[0], b[:]); err != unix.EAGAIN {
				t.Errorf("not non-blocking: %v", err)
			}
			if _, err := d.Interrupts(1); !errors.Is(err, unix.EBUSY) {
				t.Errorf("twice: %v", err)
			}
			if err := d.UnmaskINTx(); err != nil {
				t.Error(err)
			}
			want := 0
			if c.want == intx {
				want = 1
				if r.k.command()&commandNoINTx != 0 {
					t.Error("INTx is disabled")
				}
				r.k.fail["SET_IRQS 0"] = unix.EINVAL
				if err := d.UnmaskINTx(); !errors.Is(err, unix.EINVAL) {
					t.Error(err)
				}
				delete(r.k.fail, "SET_IRQS 0")
			}
			if r.k.unmasked != want {
				t.Errorf("unmasked %d times", r.k.unmasked)
			}
		})
	}
}

func TestRequest(t *testing.T) {
	r := newRig(t)
	d := r.device(pci0)
	select {
	case <-d.Removed():
		t.Fatal("removed from the start")
	default:
	}
	fd := r.k.triggers[abi.VfioPCIReqIrqIndex][0]
	if _, err := unix.Write(fd, binary.NativeEndian.AppendUint64(nil, 1)); err != nil {
		t.Fatal(err)
	}
	<-d.Removed()
	if err := d.ReadConfig(0, make([]byte, 2)); err != nil {
		t.Errorf("asked for is not gone: %v", err)
	}
}

func TestNoRequest(t *testing.T) {
	for _, set := range []func(*fakeKernel){
		func(k *fakeKernel) { k.info.NumIrqs = 4 },
		func(k *fakeKernel) { k.irqs[abi.VfioPCIReqIrqIndex].Count = 0 },
	} {
		r := newRig(t)
		set(r.k)
		if d := r.device(pci0); d.request != nil {
			t.Error("a request interrupt")
		}
	}
}

// All at once, for the race detector.
func TestConcurrent(t *testing.T) {
	r := newRig(t)
	r.k.irqs[1].Count, r.k.irqs[2].Count = 0, 0
	a, b := r.device(pci0), r.device(pci1)
	if _, err := a.Interrupts(1); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, d := range []*Device{a, b} {
		for _, f := range []func(){
			func() { _ = d.ReadConfig(0, make([]byte, 4)) }, func() { _ = d.BusMaster(true) },
			func() { _, _ = d.Alloc(4096) }, func() { _, _ = d.Map(0) }, func() { _ = d.UnmaskINTx() },
			func() { _ = d.Reset() }, func() { _ = d.Close() },
		} {
			wg.Go(func() {
				for range 20 {
					f()
				}
			})
		}
	}
	wg.Wait()
}

func TestUnmaskAllocatesNothing(t *testing.T) {
	d := &Device{k: quiet{}, kind: &irqKind{index: abi.VfioPCIIntxIrqIndex}, unmask: intxUnmask()}
	if n := testing.AllocsPerRun(100, func() { _ = d.UnmaskINTx() }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// quiet answers every ioctl.
type quiet struct{ linux }

func (quiet) ioctl(int, uint, []byte) (int, error) { return 0, nil }
