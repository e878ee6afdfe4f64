package hca

// Provider says which rdma-core provider library a device presents itself to,
// and what that library finds in sysfs and in driver_data.
type Provider interface {
	// Name is the library's own name for its devices, and the default ibdev
	// name's stem: "qib", "rxe".
	Name() string
	// ABIVersion is class/infiniband_verbs/uverbsN/abi_version.
	ABIVersion() int
	// PCI identifies the device to libibverbs' match tables (device/modalias).
	PCI() PCIID
	// HCAType is class/infiniband/DEV/hca_type, as the kernel driver wrote it.
	HCAType() string
	// MapsQueues is true when the library mmaps its queues: such a device needs
	// the client's command fd replaced (cuse/ctxfs).
	MapsQueues() bool
}

// PCIID is what device/{vendor,device,subsystem_*,revision,class} say.
type PCIID struct {
	Vendor, Device, SubVendor, SubDevice uint16
	Class                                uint32 // 24 bits
	Revision                             uint8
}
