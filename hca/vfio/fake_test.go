package vfio

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca/vfio/binding"
)

func TestMain(m *testing.M) {
	if r, w, err := os.Pipe(); err == nil { // so that the runtime has its poller, with an eventfd
		r.Close()
		w.Close()
	}
	before := fds()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		if after := fds(); after > before {
			fmt.Fprintf(os.Stderr, "fds: %d before, %d after\n", before, after)
			code = 1
		}
	}
	os.Exit(code)
}

// fds counts open descriptors but for the runtime's own poller.
func fds() int {
	list, _ := os.ReadDir("/proc/self/fd")
	n := 0
	for _, e := range list {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && to != "anon_inode:[eventpoll]" {
			n++
		}
	}
	return n
}

const (
	pci0 = "0000:00:03.0"
	pci1 = "0000:00:03.1" // of the same group
	pci2 = "0000:00:04.0" // of another
)

// fakeBAR is a BAR of the fake device.
type fakeBAR struct {
	flags  uint32
	size   int
	sparse []abi.VfioRegionSparseMmapArea
	// msix has the kernel say that the table can be mapped too.
	msix bool
	file int // memfd, 0: none
}

// fakeKernel plays VFIO. Its descriptors start at fakeFD; eventfds and memory are real.
type fakeKernel struct {
	mu   sync.Mutex
	next int
	fds  map[int]string // what an open descriptor is
	// fail makes a call fail: "open /dev/vfio/7", an ioctl's number, "pread", ...
	fail   map[string]error
	failAt map[string]int // only from the nth such call on
	log    []string

	api, extension int
	viable         bool
	ranges         []abi.VfioIovaRange // nil: no capability
	pgsizes        uint64
	info           abi.VfioDeviceInfo
	bars           [6]fakeBAR
	config         [256]byte
	irqs           [5]abi.VfioIrqInfo
	granted        map[uint32]int // vectors left, of that index
	triggers       map[uint32][]int
	unmasked       int
	limit          uint64
	mappings       map[uint64]uint64 // IOVA to size
	memory         map[uint64]int    // address to size
}

const fakeFD = 1 << 20

func newKernel() *fakeKernel {
	k := &fakeKernel{
		next: fakeFD, fds: map[int]string{}, fail: map[string]error{}, failAt: map[string]int{}, extension: 1, viable: true, pgsizes: 1<<12 | 1<<21 | 1<<30,
		ranges:  []abi.VfioIovaRange{{Start: 0, End: msiStart - 1}, {Start: msiEnd, End: narrowIOMMU - 1}},
		info:    abi.VfioDeviceInfo{Flags: abi.VfioDeviceFlagsPCI | abi.VfioDeviceFlagsReset, NumRegions: 9, NumIrqs: 5},
		granted: map[uint32]int{}, triggers: map[uint32][]int{}, limit: unix.RLIM_INFINITY, mappings: map[uint64]uint64{}, memory: map[uint64]int{},
	}
	for i, n := range []uint32{1, 1, 3, 1, 1} {
		k.irqs[i] = abi.VfioIrqInfo{Flags: abi.VfioIrqInfoEventfd, Count: n}
	}
	copy(k.config[:], []byte{0xf4, 0x1a, 0x41, 0x10, 0x00, 0x04, 0x10, 0x00})
	k.config[capsOffset] = 0x40
	copy(k.config[0x40:], []byte{0x09, 0x50, 0x10, 0x01})
	copy(k.config[0x50:], []byte{capMSIX, 0, 2, 0, 1, 0x10, 0, 0, 1, 0x20, 0, 0}) // 3 vectors at 0x1000 of BAR 1
	const rwm = abi.VfioRegionInfoFlagMmap | abi.VfioRegionInfoFlagRead | abi.VfioRegionInfoFlagWrite
	k.bars[0] = fakeBAR{flags: rwm, size: 8192}
	k.bars[1] = fakeBAR{flags: rwm, size: 0x4000}
	k.bars[2] = fakeBAR{flags: abi.VfioRegionInfoFlagRead | abi.VfioRegionInfoFlagWrite, size: 32}
	return k
}

// trip says whether a call has to fail.
func (k *fakeKernel) trip(what string) error {
	k.log = append(k.log, what)
	if k.failAt[what] > 0 {
		k.failAt[what]--
		return nil
	}
	return k.fail[what]
}

func (k *fakeKernel) add(what string) int {
	k.next++
	k.fds[k.next] = what
	return k.next
}

func (k *fakeKernel) open(path string) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.trip("open " + path); err != nil {
		return 0, err
	}
	return k.add(path), nil
}

func (k *fakeKernel) close(fd int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if fd < fakeFD {
		k.log = append(k.log, "close eventfd")
		return unix.Close(fd)
	}
	what, ok := k.fds[fd]
	if !ok {
		return unix.EBADF
	}
	delete(k.fds, fd)
	return k.trip("close " + what)
}

var requests = map[uint]string{
	abi.VfioGetAPIVersion: "GET_API_VERSION", abi.VfioCheckExtension: "CHECK_EXTENSION", abi.VfioSetIommu: "SET_IOMMU",
	abi.VfioGroupGetStatus: "GET_STATUS", abi.VfioGroupSetContainer: "SET_CONTAINER", abi.VfioGroupUnsetContainer: "UNSET_CONTAINER",
	abi.VfioGroupGetDeviceFD: "GET_DEVICE_FD", abi.VfioDeviceGetInfo: "DEVICE_GET_INFO", abi.VfioDeviceGetRegionInfo: "GET_REGION_INFO",
	abi.VfioDeviceGetIrqInfo: "GET_IRQ_INFO", abi.VfioDeviceSetIrqs: "SET_IRQS", abi.VfioDeviceReset: "RESET",
	abi.VfioIommuGetInfo: "IOMMU_GET_INFO", abi.VfioIommuMapDma: "MAP_DMA", abi.VfioIommuUnmapDma: "UNMAP_DMA",
}

func (k *fakeKernel) call(fd int, req uint, arg int) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.trip(requests[req]); err != nil {
		return 0, err
	}
	switch req {
	case abi.VfioGetAPIVersion:
		return k.api, nil
	case abi.VfioCheckExtension:
		return k.extension, nil
	}
	return 0, nil
}

// answer writes a struct and what follows it into arg, as far as that goes; argsz says
// how much it would be.
func answer[T any](arg []byte, p *T, more []byte) {
	all := append(append([]byte(nil), bytesOf(p)...), more...)
	binary.NativeEndian.PutUint32(all, uint32(len(all)))
	if len(arg) < len(all) {
		all = append(all[:0:0], all[:len(bytesOf(p))]...)
	}
	copy(arg, all)
}

// chain is one capability, with another that nobody asks for before it.
func chain(base int, id uint16, body []byte) []byte {
	first := abi.VfioInfoCapHeader{ID: 99, Version: 1, Next: uint32(base + 8)}
	second := abi.VfioInfoCapHeader{ID: id, Version: 1}
	return append(append(append([]byte(nil), bytesOf(&first)...), bytesOf(&second)...), body...)
}

func (k *fakeKernel) ioctl(fd int, req uint, arg []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	what := requests[req]
	if req == abi.VfioDeviceSetIrqs {
		var h abi.VfioIrqSet
		load(&h, arg)
		what = fmt.Sprintf("SET_IRQS %d", h.Index)
	}
	if err := k.trip(what); err != nil {
		return 0, err
	}
	if _, ok := k.fds[fd]; !ok {
		return 0, unix.EBADF
	}
	switch req {
	case abi.VfioGroupGetStatus:
		q := abi.VfioGroupStatus{}
		if k.viable {
			q.Flags = abi.VfioGroupFlagsViable
		}
		answer(arg, &q, nil)
	case abi.VfioGroupSetContainer:
		if k.fds[int(int32(binary.NativeEndian.Uint32(arg)))] != "/dev/vfio/vfio" {
			return 0, unix.EINVAL
		}
	case abi.VfioGroupGetDeviceFD:
		return k.add(strings.TrimRight(string(arg), "\x00")), nil
	case abi.VfioDeviceGetInfo:
		answer(arg, &k.info, nil)
	case abi.VfioDeviceGetRegionInfo:
		k.region(arg)
	case abi.VfioDeviceGetIrqInfo:
		var q abi.VfioIrqInfo
		load(&q, arg)
		r := k.irqs[q.Index]
		r.Index = q.Index
		answer(arg, &r, nil)
	case abi.VfioDeviceSetIrqs:
		return k.setIRQs(arg)
	case abi.VfioIommuGetInfo:
		q := abi.VfioIommuType1Info{Flags: abi.VfioIommuInfoPgsizes, IovaPgsizes: k.pgsizes}
		var more []byte
		if k.ranges != nil {
			q.Flags |= abi.VfioIommuInfoCaps
			q.CapOffset = uint32(len(bytesOf(&q)))
			body := binary.NativeEndian.AppendUint32(nil, uint32(len(k.ranges)))
			body = binary.NativeEndian.AppendUint32(body, 0)
			for _, r := range k.ranges {
				body = append(body, bytesOf(&r)...)
			}
			more = chain(int(q.CapOffset), abi.VfioIommuType1InfoCapIovaRange, body)
		}
		answer(arg, &q, more)
	case abi.VfioIommuMapDma:
		var q abi.VfioIommuType1DmaMap
		load(&q, arg)
		if k.memory[q.Vaddr] != int(q.Size) || q.Flags != 3 || q.Iova%4096 != 0 {
			return 0, unix.EINVAL
		}
		for iova, size := range k.mappings {
			if q.Iova < iova+size && iova < q.Iova+q.Size {
				return 0, unix.EEXIST
			}
		}
		k.mappings[q.Iova] = q.Size
	case abi.VfioIommuUnmapDma:
		var q abi.VfioIommuType1DmaUnmap
		load(&q, arg)
		if k.mappings[q.Iova] != q.Size {
			return 0, unix.ENOENT
		}
		delete(k.mappings, q.Iova)
	}
	return 0, nil
}

func (k *fakeKernel) region(arg []byte) {
	var q abi.VfioRegionInfo
	load(&q, arg)
	q.Offset = uint64(q.Index) << 40
	if q.Index == abi.VfioPCIConfigRegionIndex {
		q.Flags, q.Size = 3, uint64(len(k.config))
		answer(arg, &q, nil)
		return
	}
	b := &k.bars[q.Index]
	q.Flags, q.Size = b.flags, uint64(b.size)
	var more []byte
	off := len(bytesOf(&q))
	switch {
	case b.sparse != nil:
		body := binary.NativeEndian.AppendUint32(nil, uint32(len(b.sparse)))
		body = binary.NativeEndian.AppendUint32(body, 0)
		for _, a := range b.sparse {
			body = append(body, bytesOf(&a)...)
		}
		more = chain(off, abi.VfioRegionInfoCapSparseMmap, body)
	case b.msix:
		more = chain(off, abi.VfioRegionInfoCapMsixMappable, nil)
	}
	if more != nil {
		q.Flags |= abi.VfioRegionInfoFlagCaps
		q.CapOffset = uint32(off)
	}
	answer(arg, &q, more)
}

func (k *fakeKernel) setIRQs(arg []byte) (int, error) {
	var h abi.VfioIrqSet
	load(&h, arg)
	body := arg[len(bytesOf(&h)):]
	const trigger, unmask = abi.VfioIrqSetActionTrigger, abi.VfioIrqSetActionUnmask
	switch {
	case int(h.Argsz) != len(arg):
		return 0, unix.EINVAL
	case h.Flags == abi.VfioIrqSetDataNone|unmask && h.Index == 0 && h.Count == 1:
		k.unmasked++
	case h.Flags == abi.VfioIrqSetDataNone|trigger && h.Count == 0:
		delete(k.triggers, h.Index)
	case h.Flags == abi.VfioIrqSetDataEventfd|trigger && len(body) == int(h.Count)*4 && h.Count <= k.irqs[h.Index].Count:
		if left := k.granted[h.Index]; left > 0 && left < int(h.Count) {
			return left, nil
		}
		var l []int
		for i := range int(h.Count) {
			l = append(l, int(binary.NativeEndian.Uint32(body[4*i:])))
		}
		k.triggers[h.Index] = l
	default:
		return 0, unix.EINVAL
	}
	return 0, nil
}

// at finds configuration space at an offset of the device's file.
func (k *fakeKernel) at(off int64) []byte { return k.config[off-abi.VfioPCIConfigRegionIndex<<40:] }

// pread gives two bytes at a time, as a kernel may.
func (k *fakeKernel) pread(fd int, p []byte, off int64) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.trip("pread"); err != nil {
		return 0, err
	}
	return copy(p[:min(len(p), 2)], k.at(off)), nil
}

func (k *fakeKernel) pwrite(fd int, p []byte, off int64) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.trip("pwrite"); err != nil {
		return 0, err
	}
	return copy(k.at(off), p[:min(len(p), 2)]), nil
}

func (k *fakeKernel) mapDevice(fd int, off int64, n int) ([]byte, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.trip(fmt.Sprintf("mmap %d+%#x:%#x", off>>40, off&(1<<40-1), n)); err != nil {
		return nil, err
	}
	if file := k.bars[off>>40].file; file != 0 {
		return linux{}.mapDevice(file, off&(1<<40-1), n)
	}
	return mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
}

func (k *fakeKernel) mapMemory(n int) ([]byte, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.trip("mapMemory"); err != nil {
		return nil, err
	}
	b, err := linux{}.mapMemory(n)
	if err == nil {
		k.memory[addressOf(b)] = n
	}
	return b, err
}

func (k *fakeKernel) unmap(b []byte) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.memory, addressOf(b))
	k.log = append(k.log, "unmap")
	return linux{}.unmap(b)
}

func (k *fakeKernel) eventfd() (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.trip("eventfd"); err != nil {
		return 0, err
	}
	return linux{}.eventfd()
}

func (k *fakeKernel) memlock() (uint64, error) { return k.limit, nil }

// command is the command register.
func (k *fakeKernel) command() uint16 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return binary.LittleEndian.Uint16(k.config[commandOffset:])
}

// rig is a host with three functions in two groups.
type rig struct {
	*host
	t    testing.TB
	k    *fakeKernel
	root string
}

func newRig(t testing.TB) *rig {
	k := newKernel()
	r := &rig{t: t, k: k, root: t.TempDir()}
	r.host = &host{k: k, tree: binding.Tree{Root: r.root}, dev: "/dev/vfio", groups: map[string]*group{}}
	r.function(pci0, "7", "vfio-pci")
	r.function(pci1, "7", "vfio-pci")
	r.function(pci2, "8", "vfio-pci")
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		if len(k.fds)+len(k.mappings)+len(k.memory)+len(k.triggers)+len(r.groups) > 0 {
			t.Errorf("left: descriptors %v, mappings %v, memory %v, triggers %v, groups %v", k.fds, k.mappings, k.memory, k.triggers, r.groups)
		}
	})
	return r
}

func (r *rig) link(name, to string) {
	r.t.Helper()
	path := filepath.Join(r.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		r.t.Fatal(err)
	}
	_ = os.Remove(path)
	if to == "" {
		return
	}
	if err := os.MkdirAll(filepath.Join(r.root, to), 0o755); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(r.root, to), path); err != nil {
		r.t.Fatal(err)
	}
}

// function makes a PCI function in sysfs; "" for no group, or no driver.
func (r *rig) function(addr, group, driver string) {
	own := "sys/devices/" + addr
	r.link("sys/bus/pci/devices/"+addr, own)
	to := ""
	if group != "" {
		to = "sys/kernel/iommu_groups/" + group
		r.link(to+"/devices/"+addr, own)
	}
	r.link(own+"/iommu_group", to)
	if to = ""; driver != "" {
		to = "sys/bus/pci/drivers/" + driver
	}
	r.link(own+"/driver", to)
}

// open opens a function that closes with the test.
func (r *rig) device(addr string) *Device {
	r.t.Helper()
	d, err := r.open(addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = d.Close() })
	return d
}
