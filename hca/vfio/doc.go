// Package vfio is a PCI function in the hands of this process: nic.Function on Linux
// VFIO (Documentation/driver-api/vfio.rst). A function's IOMMU group is put into a
// container with a type 1 IOMMU, version 2; the function reaches what Alloc has mapped
// there and nothing else. Groups without an IOMMU (noiommu) are refused: their DMA could
// reach all of the host's memory.
//
// Who may call it: cmd opens functions and gives them to NIC drivers (virtionet,
// e1000e), which use them through nic.Function. The function must be bound to vfio-pci
// (package binding does that).
//
// Functions of one group share its container: DMA memory of the one is within the
// other's reach, as the hardware may not be able to keep them apart.
//
// Close gives back in reverse: bus mastering off, interrupts, the request interrupt,
// BARs, DMA mappings and memory, the device, and with the last device of a group the
// container. The kernel resets the device once it is closed.
//
// Lock order, outermost first:
//
//	Device.mu (what a device holds; read-locked by calls that only use it)
//	host.mu   (the table of open groups, and who uses them)
//	group.mu  (a container's free I/O addresses), a leaf
//
// BAR accesses take no lock. Device.mu is held across system calls on that device,
// host.mu while a group or a device is opened or closed.
package vfio

import (
	"fmt"
	"time"
)

const (
	// maxAlloc bounds one piece of DMA memory; the rings and buffers of a NIC are some
	// MiB.
	maxAlloc = 1 << 30
	// hugePage is the processor's and the IOMMU's second page size: memory from this
	// size on is aligned to it, so that one entry of the IOMMU's cache serves much of it.
	hugePage = 2 << 20
	// maxInfo bounds what the kernel may ask for one info struct with its capabilities;
	// they are some hundred bytes.
	maxInfo = 64 << 10
	// maxCaps bounds the capabilities of one info struct, so that a chain that runs in a
	// ring ends.
	maxCaps = 64
	// maxVectors is the most that MSI-X has (PCI 3.0 §6.8.2.3).
	maxVectors = 2048
	// resetTries and resetPause are for a reset that finds the device locked by
	// somebody else for a moment (EAGAIN of pci_try_reset_function).
	resetTries = 20
	resetPause = 10 * time.Millisecond
)

// both is two errors on one line; either may be nil.
func both(a, b error) error {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return fmt.Errorf("%w; %w", a, b)
}
