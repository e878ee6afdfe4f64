package vfio

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca/vfio/binding"
)

// Open takes the PCI function at an address like 0000:00:03.0 or 00:03.0. Its memory
// space is on after it, bus mastering is off and no interrupt is on. The errors
// say what is to be done: there is no such device, it is not bound to vfio-pci, there is
// no IOMMU, its group is not viable (which others are in it), VFIO is not loaded, or
// somebody has it.
func Open(pci string) (*Device, error) { return machine.open(pci) }

func (h *host) open(pci string) (*Device, error) {
	addr, err := binding.ParseAddress(pci)
	if err != nil {
		return nil, err
	}
	d := &Device{name: addr, removed: make(chan struct{}), unmask: intxUnmask()}
	if err := h.openDevice(d); err != nil {
		return nil, fmt.Errorf("vfio %s: open: %w", addr, err)
	}
	return d, nil
}

// bound says why a function cannot be opened, from what sysfs knows, and its group.
func (h *host) bound(addr string) (group string, err error) {
	if !h.tree.Exists(addr) {
		return "", fmt.Errorf("there is no such PCI device: see lspci -D: %w", unix.ENODEV)
	}
	g := h.tree.Group(addr)
	if g.NoIOMMU {
		return "", fmt.Errorf("its group is without an IOMMU (noiommu), so that its DMA would reach all memory; that is refused: "+
			"boot with intel_iommu=on, and without vfio's enable_unsafe_noiommu_mode: %w", unix.EPERM)
	}
	if g.Number == "" {
		return "", fmt.Errorf("the machine has no IOMMU, or it is off: enable VT-d or AMD-Vi in the firmware, and boot with intel_iommu=on on Intel: %w", unix.ENODEV)
	}
	if driver := h.tree.Driver(addr); driver != binding.VFIODriver {
		if driver == "" {
			driver = "no driver"
		}
		return "", fmt.Errorf("it is bound to %s, not to %s: run: uverbsd bind %s: %w", driver, binding.VFIODriver, addr, unix.EBUSY)
	}
	return g.Number, nil
}

func (h *host) openDevice(d *Device) (err error) {
	number, err := h.bound(d.name)
	if err != nil {
		return err
	}
	if d.group, err = h.join(number, d.name); err != nil {
		return err
	}
	d.k = h.k
	defer func() {
		if err != nil {
			_ = d.group.leave(d.name)
		}
	}()
	if d.fd, err = h.k.ioctl(d.group.fd, abi.VfioGroupGetDeviceFD, append([]byte(d.name), 0)); err != nil {
		if errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("group %s has it not, or not yet: %w", number, err)
		}
		return fmt.Errorf("take it out of group %s: %w", number, err)
	}
	defer func() {
		if err != nil {
			_ = h.k.close(d.fd)
		}
	}()
	info := abi.VfioDeviceInfo{Argsz: uint32(len(bytesOf(new(abi.VfioDeviceInfo))))}
	if _, err := h.k.ioctl(d.fd, abi.VfioDeviceGetInfo, bytesOf(&info)); err != nil {
		return fmt.Errorf("ask what it is: %w", err)
	}
	if info.Flags&abi.VfioDeviceFlagsPCI == 0 || info.NumRegions <= abi.VfioPCIConfigRegionIndex {
		return fmt.Errorf("VFIO says it is no PCI device (flags %#x, %d regions): %w", info.Flags, info.NumRegions, unix.ENODEV)
	}
	d.canReset = info.Flags&abi.VfioDeviceFlagsReset != 0
	if d.config, err = regionInfo(h.k, d.fd, abi.VfioPCIConfigRegionIndex); err != nil {
		return fmt.Errorf("ask for its configuration space: %w", err)
	}
	if d.kinds, err = irqKinds(h.k, d.fd, info.NumIrqs); err != nil {
		return err
	}
	// The kernel's reset at open can leave memory off, and with it accesses are faults.
	if err := d.command(commandMemory, commandMaster); err != nil {
		return err
	}
	return d.watch(info.NumIrqs)
}
