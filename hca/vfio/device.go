package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// Configuration space (PCI 3.0 §6.2.2).
const (
	commandOffset = 4
	commandMemory = 1 << 1  // Memory Space
	commandMaster = 1 << 2  // Bus Master
	commandNoINTx = 1 << 10 // Interrupt Disable
)

// Device is a PCI function in this process's hands. Use Open. All methods may be called
// from any goroutine at once, Close last.
type Device struct {
	name     string
	k        kernel
	group    *group
	fd       int
	config   region
	canReset bool
	kinds    []irqKind
	unmask   []byte // the argument that unmasks INTx; constant

	gone        atomic.Bool // the hardware does not answer any more
	removed     chan struct{}
	removedOnce sync.Once

	request *os.File      // the request interrupt's eventfd; nil: the kernel has none
	watched chan struct{} // closed when nobody reads request any more

	// mu guards what is below. Calls that only use the device hold it for reading, so
	// that its descriptor stays.
	mu     sync.RWMutex
	closed bool
	bars   []*bar
	dmas   []nic.DMA
	irqs   []int    // eventfds
	kind   *irqKind // nil: Interrupts has not been called
}

var _ nic.Function = (*Device)(nil)

// Name is the address, as 0000:00:03.0.
func (d *Device) Name() string { return d.name }

// Removed is closed when somebody wants the function back, and when it does not answer
// any more.
func (d *Device) Removed() <-chan struct{} { return d.removed }

func (d *Device) markRemoved() { d.removedOnce.Do(func() { close(d.removed) }) }

func (d *Device) markGone() {
	d.gone.Store(true)
	d.markRemoved()
}

// usable says why nothing can be done; under mu.
func (d *Device) usable() error {
	switch {
	case d.closed:
		return nic.ErrClosed
	case d.gone.Load():
		return nic.ErrGone
	}
	return nil
}

// failed is the error of a call; ENODEV is what the kernel says of a function that is
// no more.
func (d *Device) failed(what string, err error) error {
	if errors.Is(err, unix.ENODEV) {
		d.markGone()
		err = fmt.Errorf("%w: %w", nic.ErrGone, err)
	}
	return fmt.Errorf("vfio %s: %s: %w", d.name, what, err)
}

// ReadConfig reads configuration space; off+len(p) is at most its size, 256 or 4096
// bytes, or EINVAL. What it cannot read of a function that is gone is all ones.
func (d *Device) ReadConfig(off int64, p []byte) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.access("read", off, p, d.k.pread)
}

// WriteConfig writes configuration space, within the bounds of ReadConfig. The kernel
// lets only those bits through that are the driver's.
func (d *Device) WriteConfig(off int64, p []byte) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.access("write", off, p, d.k.pwrite)
}

// access moves bytes of configuration space; under mu.
func (d *Device) access(what string, off int64, p []byte, move func(int, []byte, int64) (int, error)) error {
	done := 0
	err := d.usable()
	if err == nil && (off < 0 || off > d.config.size || int64(len(p)) > d.config.size-off) {
		return fmt.Errorf("vfio %s: %s %d bytes at %#x of its configuration space, which has %#x: %w", d.name, what, len(p), off, d.config.size, unix.EINVAL)
	}
	for err == nil && done < len(p) {
		var n int
		n, err = move(d.fd, p[done:], d.config.offset+off+int64(done))
		switch {
		case errors.Is(err, unix.EIO): // it cannot be woken up (vfio_pci_rw)
			err = fmt.Errorf("%w: %w", unix.ENODEV, err)
		case err == nil && n <= 0:
			err = unix.ENODEV
		case err == nil:
			done += min(n, len(p)-done)
		}
	}
	// No vendor has the number that an empty slot reads as (PCI 3.0 §6.1).
	if err == nil && what == "read" && off == 0 && len(p) >= 2 && p[0]&p[1] == 0xff {
		err = unix.ENODEV
	}
	if err == nil {
		return nil
	}
	if what == "read" {
		for i := range p {
			p[i] = 0xff
		}
	}
	return d.failed(what+" configuration space", err)
}

// command sets and clears bits of the command register; under mu, or before anybody
// else has the device.
func (d *Device) command(set, clear uint16) error {
	var b [2]byte
	if err := d.access("read", commandOffset, b[:], d.k.pread); err != nil {
		return err
	}
	old := binary.LittleEndian.Uint16(b[:])
	if old == 0xffff { // it has reserved bits, which are 0
		return d.failed("read its command register", unix.ENODEV)
	}
	binary.LittleEndian.PutUint16(b[:], old&^clear|set)
	return d.access("write", commandOffset, b[:], d.k.pwrite)
}

// quiesce ends the function's DMA. It tries that also with one that counts as gone, since
// a fault may have had another cause; one that really is does no DMA.
func (d *Device) quiesce() error {
	var b [2]byte
	at := d.config.offset + commandOffset
	_, err := d.k.pread(d.fd, b[:], at)
	if command := binary.LittleEndian.Uint16(b[:]); err == nil && command != 0xffff {
		binary.LittleEndian.PutUint16(b[:], command&^commandMaster)
		_, err = d.k.pwrite(d.fd, b[:], at)
	}
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EIO) {
		return nil
	}
	return err
}

// BusMaster switches the function's DMA, and with it interrupts that are messages.
func (d *Device) BusMaster(on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if on {
		return d.command(commandMaster|commandMemory, 0)
	}
	return d.command(0, commandMaster)
}

// Alloc is zeroed memory, pinned, at an I/O address: at least size bytes (1 to 2^30),
// in whole pages of the IOMMU. ENOMEM names the limit of locked memory that is in the
// way.
func (d *Device) Alloc(size int) (nic.DMA, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m, err := d.alloc(size)
	if err != nil {
		return nic.DMA{}, d.failed(fmt.Sprintf("allocate %d bytes for DMA", size), err)
	}
	d.dmas = append(d.dmas, m)
	return m, nil
}

func (d *Device) alloc(size int) (m nic.DMA, err error) {
	if err := d.usable(); err != nil {
		return m, err
	}
	if size <= 0 || size > maxAlloc {
		return m, fmt.Errorf("say 1 to %d: %w", maxAlloc, unix.EINVAL)
	}
	page := d.group.page
	n := (uint64(size) + page - 1) &^ (page - 1)
	align := page
	if n >= hugePage {
		align = max(page, hugePage)
	}
	if m.IOVA, err = d.group.allocate(n, align); err != nil {
		return m, err
	}
	defer func() {
		if err != nil {
			d.group.release(m.IOVA, n)
		}
	}()
	if m.Mem, err = d.k.mapMemory(int(n)); err != nil {
		return m, err
	}
	arg := abi.VfioIommuType1DmaMap{Flags: abi.VfioDmaMapFlagRead | abi.VfioDmaMapFlagWrite, Vaddr: addressOf(m.Mem), Iova: m.IOVA, Size: n}
	arg.Argsz = uint32(len(bytesOf(&arg)))
	if _, err := d.k.ioctl(d.group.container, abi.VfioIommuMapDma, bytesOf(&arg)); err != nil {
		return m, both(d.pinning(err, n), d.k.unmap(m.Mem))
	}
	return m, nil
}

// pinning explains why memory cannot be mapped.
func (d *Device) pinning(err error, n uint64) error {
	if !errors.Is(err, unix.ENOMEM) {
		return err
	}
	limit, e := d.k.memlock()
	if e != nil || limit == unix.RLIM_INFINITY {
		return fmt.Errorf("pin it: %w", err)
	}
	return fmt.Errorf("pin %d KiB: RLIMIT_MEMLOCK is %d KiB in all: raise it (LimitMEMLOCK= of the unit, or ulimit -l), or give CAP_IPC_LOCK: %w",
		n>>10, limit>>10, err)
}

// free is alloc's reverse. What the kernel does not unmap is kept as it is, memory and
// address, until the container goes.
func (d *Device) free(m nic.DMA) error {
	n := uint64(len(m.Mem))
	arg := abi.VfioIommuType1DmaUnmap{Iova: m.IOVA, Size: n}
	arg.Argsz = uint32(len(bytesOf(&arg)))
	if _, err := d.k.ioctl(d.group.container, abi.VfioIommuUnmapDma, bytesOf(&arg)); err != nil {
		return fmt.Errorf("unmap DMA at %#x: %w", m.IOVA, err)
	}
	d.group.release(m.IOVA, n)
	return d.k.unmap(m.Mem)
}

// Reset resets the function; its configuration is restored by the kernel. EOPNOTSUPP if
// it cannot be reset alone, EAGAIN if somebody else keeps it locked.
func (d *Device) Reset() error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	err := d.usable()
	if err == nil && !d.canReset {
		err = fmt.Errorf("neither it nor its slot can be reset alone: %w", unix.EOPNOTSUPP)
	}
	for i := 0; err == nil; i++ {
		_, err = d.k.call(d.fd, abi.VfioDeviceReset, 0)
		if err == nil {
			return nil
		}
		if errors.Is(err, unix.EAGAIN) && i < resetTries {
			err = nil
			time.Sleep(resetPause)
		}
	}
	return d.failed("reset", err)
}

// Close stops the function's DMA and gives everything back, also if a step fails; the
// error is of the steps that did. A second Close does nothing.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	var failed error
	step := func(what string, err error) {
		if err != nil {
			failed = both(failed, fmt.Errorf("%s: %w", what, err))
		}
	}
	step("switch bus mastering off", d.quiesce())
	d.closed = true
	step("switch interrupts off", d.irqsOff())
	d.unwatch()
	for _, b := range slices.Backward(d.bars) {
		step(fmt.Sprintf("unmap BAR %d", b.index), b.unmap())
	}
	for _, m := range slices.Backward(d.dmas) {
		step("free DMA memory", d.free(m))
	}
	step("close the device", d.k.close(d.fd))
	step("close the group", d.group.leave(d.name))
	if failed != nil {
		return fmt.Errorf("vfio %s: close: %w", d.name, failed)
	}
	return nil
}
