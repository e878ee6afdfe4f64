package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// irqKind is a way that a function can interrupt.
type irqKind struct {
	name  string
	index uint32
	count int // vectors, at least 1
}

// irqKinds are the ways a function has, best first: messages need no unmasking,
// and MSI-X has an address for each vector.
func irqKinds(k kernel, fd int, indices uint32) (l []irqKind, err error) {
	for _, kind := range []irqKind{{name: "MSI-X", index: abi.VfioPCIMsixIrqIndex}, {name: "MSI", index: abi.VfioPCIMsiIrqIndex}, {name: "INTx", index: abi.VfioPCIIntxIrqIndex}} {
		if kind.index >= indices {
			continue
		}
		q, err := irqInfo(k, fd, kind.index)
		if err != nil {
			return nil, fmt.Errorf("ask for its %s interrupts: %w", kind.name, err)
		}
		if q.Flags&abi.VfioIrqInfoEventfd != 0 && q.Count > 0 {
			kind.count = int(min(q.Count, maxVectors))
			l = append(l, kind)
		}
	}
	return l, nil
}

// setIRQs is VFIO_DEVICE_SET_IRQS. A count above 0 that comes back is of the vectors
// that there could have been.
func (d *Device) setIRQs(index, flags, start uint32, fds []int) (int, error) {
	arg := irqSet(index, flags, start, uint32(len(fds)))
	for _, fd := range fds {
		arg = binary.NativeEndian.AppendUint32(arg, uint32(fd))
	}
	binary.NativeEndian.PutUint32(arg, uint32(len(arg)))
	return d.k.ioctl(d.fd, abi.VfioDeviceSetIrqs, arg)
}

func irqSet(index, flags, start, count uint32) []byte {
	h := abi.VfioIrqSet{Flags: flags, Index: index, Start: start, Count: count}
	h.Argsz = uint32(len(bytesOf(&h)))
	return bytesOf(&h)
}

// intxUnmask is the argument of UnmaskINTx, which is called once for each interrupt.
func intxUnmask() []byte {
	return irqSet(abi.VfioPCIIntxIrqIndex, abi.VfioIrqSetDataNone|abi.VfioIrqSetActionUnmask, 0, 1)
}

// Vectors is how many interrupts the function has apart from each other; 0 if it has
// none at all.
func (d *Device) Vectors() int {
	n := 0
	for _, k := range d.kinds {
		n = max(n, k.count)
	}
	return n
}

// Interrupts turns on n vectors, by MSI-X, else MSI, else INTx, whatever works first.
// If none does, nothing is on, and it may be called again with another n.
func (d *Device) Interrupts(n int) ([]int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fds, err := d.interrupts(n)
	if err != nil {
		return nil, d.failed(fmt.Sprintf("turn on %d interrupts", n), err)
	}
	return append([]int(nil), fds...), nil
}

func (d *Device) interrupts(n int) (fds []int, err error) {
	if err := d.usable(); err != nil {
		return nil, err
	}
	if d.kind != nil {
		return nil, fmt.Errorf("they are on: %w", unix.EBUSY)
	}
	if n < 1 || n > d.Vectors() {
		return nil, fmt.Errorf("it has %d: %w", d.Vectors(), unix.EINVAL)
	}
	defer func() {
		if err != nil {
			for _, fd := range fds {
				_ = d.k.close(fd)
			}
			fds = nil
		}
	}()
	for range n {
		fd, err := d.k.eventfd()
		if err != nil {
			return fds, fmt.Errorf("make an eventfd: %w", err)
		}
		fds = append(fds, fd)
	}
	for i := range d.kinds {
		kind := &d.kinds[i]
		if kind.count < n {
			continue
		}
		e := d.turnOn(kind, fds)
		if e == nil {
			d.kind, d.irqs = kind, fds
			return fds, nil
		}
		err = both(err, fmt.Errorf("%s: %w", kind.name, e))
	}
	return fds, err
}

func (d *Device) turnOn(kind *irqKind, fds []int) error {
	if kind.index == abi.VfioPCIIntxIrqIndex {
		if err := d.command(0, commandNoINTx); err != nil {
			return err
		}
	}
	got, err := d.setIRQs(kind.index, abi.VfioIrqSetDataEventfd|abi.VfioIrqSetActionTrigger, 0, fds)
	if err == nil && got > 0 {
		err = fmt.Errorf("the host has only %d vectors left for it: %w", got, unix.ENOSPC)
	}
	return err
}

// irqsOff is Interrupts' reverse; under mu.
func (d *Device) irqsOff() error {
	if d.kind == nil {
		return nil
	}
	_, err := d.setIRQs(d.kind.index, abi.VfioIrqSetDataNone|abi.VfioIrqSetActionTrigger, 0, nil)
	if errors.Is(err, unix.ENODEV) {
		err = nil // it is gone, and raises none
	}
	for _, fd := range d.irqs {
		err = both(err, d.k.close(fd))
	}
	d.irqs = nil
	return err
}

// UnmaskINTx lets INTx come again: the kernel masks it as it comes. With MSI and MSI-X,
// or no interrupts, it does nothing.
func (d *Device) UnmaskINTx() error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if err := d.usable(); err != nil {
		return d.failed("unmask INTx", err)
	}
	if d.kind == nil || d.kind.index != abi.VfioPCIIntxIrqIndex {
		return nil
	}
	if _, err := d.k.ioctl(d.fd, abi.VfioDeviceSetIrqs, d.unmask); err != nil {
		return d.failed("unmask INTx", err)
	}
	return nil
}

// watch has the request interrupt close Removed. A kernel without it is left without.
func (d *Device) watch(indices uint32) error {
	if indices <= abi.VfioPCIReqIrqIndex {
		return nil
	}
	q, err := irqInfo(d.k, d.fd, abi.VfioPCIReqIrqIndex)
	if err != nil || q.Count == 0 || q.Flags&abi.VfioIrqInfoEventfd == 0 {
		return nil
	}
	fd, err := d.k.eventfd()
	if err != nil {
		return fmt.Errorf("make an eventfd: %w", err)
	}
	if _, err := d.setIRQs(abi.VfioPCIReqIrqIndex, abi.VfioIrqSetDataEventfd|abi.VfioIrqSetActionTrigger, 0, []int{fd}); err != nil {
		_ = d.k.close(fd)
		return fmt.Errorf("turn on the request interrupt: %w", err)
	}
	d.request, d.watched = os.NewFile(uintptr(fd), "vfio request"), make(chan struct{})
	go func() {
		defer close(d.watched)
		var b [8]byte
		if _, err := d.request.Read(b[:]); err == nil {
			d.markRemoved()
		}
	}()
	return nil
}

// unwatch is watch's reverse. It takes no error from the kernel seriously: the device's
// close does the same.
func (d *Device) unwatch() {
	if d.request == nil {
		return
	}
	_, _ = d.setIRQs(abi.VfioPCIReqIrqIndex, abi.VfioIrqSetDataNone|abi.VfioIrqSetActionTrigger, 0, nil)
	_ = d.request.Close()
	<-d.watched
}
