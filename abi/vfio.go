package abi

// VFIO's structs and numbers, from include/uapi/linux/vfio.h: containers and groups
// with a type 1 IOMMU, and PCI devices. Structs that end in an array are without it.

// The ioctls: _IO(VFIO_TYPE, VFIO_BASE + n).
const (
	vfioIoctl = ';'<<8 | 100

	VfioGetAPIVersion       = vfioIoctl + 0  // VFIO_GET_API_VERSION
	VfioCheckExtension      = vfioIoctl + 1  // VFIO_CHECK_EXTENSION
	VfioSetIommu            = vfioIoctl + 2  // VFIO_SET_IOMMU
	VfioGroupGetStatus      = vfioIoctl + 3  // VFIO_GROUP_GET_STATUS
	VfioGroupSetContainer   = vfioIoctl + 4  // VFIO_GROUP_SET_CONTAINER
	VfioGroupUnsetContainer = vfioIoctl + 5  // VFIO_GROUP_UNSET_CONTAINER
	VfioGroupGetDeviceFD    = vfioIoctl + 6  // VFIO_GROUP_GET_DEVICE_FD
	VfioDeviceGetInfo       = vfioIoctl + 7  // VFIO_DEVICE_GET_INFO
	VfioDeviceGetRegionInfo = vfioIoctl + 8  // VFIO_DEVICE_GET_REGION_INFO
	VfioDeviceGetIrqInfo    = vfioIoctl + 9  // VFIO_DEVICE_GET_IRQ_INFO
	VfioDeviceSetIrqs       = vfioIoctl + 10 // VFIO_DEVICE_SET_IRQS
	VfioDeviceReset         = vfioIoctl + 11 // VFIO_DEVICE_RESET
	VfioIommuGetInfo        = vfioIoctl + 12 // VFIO_IOMMU_GET_INFO
	VfioIommuMapDma         = vfioIoctl + 13 // VFIO_IOMMU_MAP_DMA
	VfioIommuUnmapDma       = vfioIoctl + 14 // VFIO_IOMMU_UNMAP_DMA
)

// Versions, extensions, flags and indices.
const (
	VfioAPIVersion   = 0 // VFIO_API_VERSION
	VfioType1v2Iommu = 3 // VFIO_TYPE1v2_IOMMU

	VfioGroupFlagsViable = 1 << 0 // VFIO_GROUP_FLAGS_VIABLE

	VfioDeviceFlagsReset = 1 << 0 // VFIO_DEVICE_FLAGS_RESET
	VfioDeviceFlagsPCI   = 1 << 1 // VFIO_DEVICE_FLAGS_PCI

	VfioRegionInfoFlagRead  = 1 << 0 // VFIO_REGION_INFO_FLAG_READ
	VfioRegionInfoFlagWrite = 1 << 1 // VFIO_REGION_INFO_FLAG_WRITE
	VfioRegionInfoFlagMmap  = 1 << 2 // VFIO_REGION_INFO_FLAG_MMAP
	VfioRegionInfoFlagCaps  = 1 << 3 // VFIO_REGION_INFO_FLAG_CAPS

	VfioRegionInfoCapSparseMmap   = 1 // VFIO_REGION_INFO_CAP_SPARSE_MMAP
	VfioRegionInfoCapMsixMappable = 3 // VFIO_REGION_INFO_CAP_MSIX_MAPPABLE

	VfioPCIBar0RegionIndex   = 0 // VFIO_PCI_BAR0_REGION_INDEX
	VfioPCIBar5RegionIndex   = 5 // VFIO_PCI_BAR5_REGION_INDEX
	VfioPCIConfigRegionIndex = 7 // VFIO_PCI_CONFIG_REGION_INDEX

	VfioIrqInfoEventfd = 1 << 0 // VFIO_IRQ_INFO_EVENTFD

	VfioPCIIntxIrqIndex = 0 // VFIO_PCI_INTX_IRQ_INDEX
	VfioPCIMsiIrqIndex  = 1 // VFIO_PCI_MSI_IRQ_INDEX
	VfioPCIMsixIrqIndex = 2 // VFIO_PCI_MSIX_IRQ_INDEX
	VfioPCIReqIrqIndex  = 4 // VFIO_PCI_REQ_IRQ_INDEX

	VfioIrqSetDataNone      = 1 << 0 // VFIO_IRQ_SET_DATA_NONE
	VfioIrqSetDataEventfd   = 1 << 2 // VFIO_IRQ_SET_DATA_EVENTFD
	VfioIrqSetActionMask    = 1 << 3 // VFIO_IRQ_SET_ACTION_MASK
	VfioIrqSetActionUnmask  = 1 << 4 // VFIO_IRQ_SET_ACTION_UNMASK
	VfioIrqSetActionTrigger = 1 << 5 // VFIO_IRQ_SET_ACTION_TRIGGER

	VfioIommuInfoPgsizes           = 1 << 0 // VFIO_IOMMU_INFO_PGSIZES
	VfioIommuInfoCaps              = 1 << 1 // VFIO_IOMMU_INFO_CAPS
	VfioIommuType1InfoCapIovaRange = 1      // VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE
	VfioDmaMapFlagRead             = 1 << 0 // VFIO_DMA_MAP_FLAG_READ
	VfioDmaMapFlagWrite            = 1 << 1 // VFIO_DMA_MAP_FLAG_WRITE
)

// VfioInfoCapHeader is struct vfio_info_cap_header. Next is from the start of the
// info struct, 0 in the last.
type VfioInfoCapHeader struct {
	ID      uint16
	Version uint16
	Next    uint32
}

// VfioGroupStatus is struct vfio_group_status.
type VfioGroupStatus struct {
	Argsz uint32
	Flags uint32
}

// VfioDeviceInfo is struct vfio_device_info.
type VfioDeviceInfo struct {
	Argsz      uint32
	Flags      uint32
	NumRegions uint32
	NumIrqs    uint32
	CapOffset  uint32
}

// VfioRegionInfo is struct vfio_region_info.
type VfioRegionInfo struct {
	Argsz     uint32
	Flags     uint32
	Index     uint32
	CapOffset uint32
	Size      uint64
	Offset    uint64
}

// VfioRegionSparseMmapArea is struct vfio_region_sparse_mmap_area.
type VfioRegionSparseMmapArea struct {
	Offset uint64
	Size   uint64
}

// VfioRegionInfoCapSparse is struct vfio_region_info_cap_sparse_mmap, before areas.
type VfioRegionInfoCapSparse struct {
	Header   VfioInfoCapHeader
	NrAreas  uint32
	Reserved uint32
}

// VfioIrqInfo is struct vfio_irq_info.
type VfioIrqInfo struct {
	Argsz uint32
	Flags uint32
	Index uint32
	Count uint32
}

// VfioIrqSet is struct vfio_irq_set, before data.
type VfioIrqSet struct {
	Argsz uint32
	Flags uint32
	Index uint32
	Start uint32
	Count uint32
}

// VfioIommuType1Info is struct vfio_iommu_type1_info. Pad has that name in later
// headers only.
type VfioIommuType1Info struct {
	Argsz       uint32
	Flags       uint32
	IovaPgsizes uint64
	CapOffset   uint32
	Pad         uint32
}

// VfioIommuType1InfoCapIova is struct vfio_iommu_type1_info_cap_iova_range, before
// iova_ranges.
type VfioIommuType1InfoCapIova struct {
	Header   VfioInfoCapHeader
	NrIovas  uint32
	Reserved uint32
}

// VfioIovaRange is struct vfio_iova_range; End is the last address in it.
type VfioIovaRange struct {
	Start uint64
	End   uint64
}

// VfioIommuType1DmaMap is struct vfio_iommu_type1_dma_map.
type VfioIommuType1DmaMap struct {
	Argsz uint32
	Flags uint32
	Vaddr uint64
	Iova  uint64
	Size  uint64
}

// VfioIommuType1DmaUnmap is struct vfio_iommu_type1_dma_unmap, before data. Size
// comes back as what was unmapped.
type VfioIommuType1DmaUnmap struct {
	Argsz uint32
	Flags uint32
	Iova  uint64
	Size  uint64
}
