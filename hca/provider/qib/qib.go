// Package qib presents a device to rdma-core's libipathverbs with
// abi_version 1: the library then maps no queues and sends every post and poll
// through write() (rdma-core providers/ipathverbs). cmd hands a Provider to
// the registry; nobody else needs it.
package qib

import "github.com/uverbsd/uverbsd/hca"

// Provider is hca.Provider for libipathverbs. The zero value is ready.
type Provider struct{}

var _ hca.Provider = Provider{}

// Name is the stem of the kernel driver's device names.
func (Provider) Name() string { return "qib" }

// ABIVersion 1 makes the library use its functions without mmap
// (ipathverbs.c: abi_version == 1).
func (Provider) ABIVersion() int { return 1 }

// PCI is the QLogic QLE7340, in libipathverbs' match table:
// pci:v00001077d00007322. The class is "serial bus, InfiniBand".
func (Provider) PCI() hca.PCIID {
	return hca.PCIID{
		Vendor: 0x1077, Device: 0x7322,
		SubVendor: 0x1077, SubDevice: 0x7322,
		Class:    0x0c0600,
		Revision: 2,
	}
}

// HCAType is what the kernel's qib wrote for this board.
func (Provider) HCAType() string { return "InfiniPath_QLE7340" }

// MapsQueues is false with abi_version 1.
func (Provider) MapsQueues() bool { return false }
