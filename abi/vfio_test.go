package abi

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"unsafe"
)

func TestVfioLayout(t *testing.T) {
	compareLayouts(t, []string{"linux/vfio.h"}, []cStruct{
		{"vfio_info_cap_header", VfioInfoCapHeader{}, words("id version next")},
		{"vfio_group_status", VfioGroupStatus{}, words("argsz flags")},
		{"vfio_device_info", VfioDeviceInfo{}, words("argsz flags num_regions num_irqs cap_offset")},
		{"vfio_region_info", VfioRegionInfo{}, words("argsz flags index cap_offset size offset")},
		{"vfio_region_sparse_mmap_area", VfioRegionSparseMmapArea{}, words("offset size")},
		{"vfio_region_info_cap_sparse_mmap", VfioRegionInfoCapSparse{}, words("header nr_areas reserved")},
		{"vfio_irq_info", VfioIrqInfo{}, words("argsz flags index count")},
		{"vfio_irq_set", VfioIrqSet{}, words("argsz flags index start count")},
		{"vfio_iommu_type1_info_cap_iova_range", VfioIommuType1InfoCapIova{}, words("header nr_iovas reserved")},
		{"vfio_iova_range", VfioIovaRange{}, words("start end")},
		{"vfio_iommu_type1_dma_map", VfioIommuType1DmaMap{}, words("argsz flags vaddr iova size")},
		{"vfio_iommu_type1_dma_unmap", VfioIommuType1DmaUnmap{}, words("argsz flags iova size")},
	})
}

func TestVfioNumbers(t *testing.T) {
	var i VfioIommuType1Info
	rows := []struct {
		c    string
		want int
	}{
		{"sizeof(struct vfio_iommu_type1_info)", int(unsafe.Sizeof(i))},
		{"offsetof(struct vfio_iommu_type1_info, iova_pgsizes)", int(unsafe.Offsetof(i.IovaPgsizes))},
		{"offsetof(struct vfio_iommu_type1_info, cap_offset)", int(unsafe.Offsetof(i.CapOffset))},
		{"VFIO_GET_API_VERSION", VfioGetAPIVersion},
		{"VFIO_CHECK_EXTENSION", VfioCheckExtension},
		{"VFIO_SET_IOMMU", VfioSetIommu},
		{"VFIO_GROUP_GET_STATUS", VfioGroupGetStatus},
		{"VFIO_GROUP_SET_CONTAINER", VfioGroupSetContainer},
		{"VFIO_GROUP_UNSET_CONTAINER", VfioGroupUnsetContainer},
		{"VFIO_GROUP_GET_DEVICE_FD", VfioGroupGetDeviceFD},
		{"VFIO_DEVICE_GET_INFO", VfioDeviceGetInfo},
		{"VFIO_DEVICE_GET_REGION_INFO", VfioDeviceGetRegionInfo},
		{"VFIO_DEVICE_GET_IRQ_INFO", VfioDeviceGetIrqInfo},
		{"VFIO_DEVICE_SET_IRQS", VfioDeviceSetIrqs},
		{"VFIO_DEVICE_RESET", VfioDeviceReset},
		{"VFIO_IOMMU_GET_INFO", VfioIommuGetInfo},
		{"VFIO_IOMMU_MAP_DMA", VfioIommuMapDma},
		{"VFIO_IOMMU_UNMAP_DMA", VfioIommuUnmapDma},
		{"VFIO_API_VERSION", VfioAPIVersion},
		{"VFIO_TYPE1v2_IOMMU", VfioType1v2Iommu},
		{"VFIO_GROUP_FLAGS_VIABLE", VfioGroupFlagsViable},
		{"VFIO_DEVICE_FLAGS_RESET", VfioDeviceFlagsReset},
		{"VFIO_DEVICE_FLAGS_PCI", VfioDeviceFlagsPCI},
		{"VFIO_REGION_INFO_FLAG_READ", VfioRegionInfoFlagRead},
		{"VFIO_REGION_INFO_FLAG_WRITE", VfioRegionInfoFlagWrite},
		{"VFIO_REGION_INFO_FLAG_MMAP", VfioRegionInfoFlagMmap},
		{"VFIO_REGION_INFO_FLAG_CAPS", VfioRegionInfoFlagCaps},
		{"VFIO_REGION_INFO_CAP_SPARSE_MMAP", VfioRegionInfoCapSparseMmap},
		{"VFIO_REGION_INFO_CAP_MSIX_MAPPABLE", VfioRegionInfoCapMsixMappable},
		{"VFIO_PCI_BAR0_REGION_INDEX", VfioPCIBar0RegionIndex},
		{"VFIO_PCI_BAR5_REGION_INDEX", VfioPCIBar5RegionIndex},
		{"VFIO_PCI_CONFIG_REGION_INDEX", VfioPCIConfigRegionIndex},
		{"VFIO_IRQ_INFO_EVENTFD", VfioIrqInfoEventfd},
		{"VFIO_PCI_INTX_IRQ_INDEX", VfioPCIIntxIrqIndex},
		{"VFIO_PCI_MSI_IRQ_INDEX", VfioPCIMsiIrqIndex},
		{"VFIO_PCI_MSIX_IRQ_INDEX", VfioPCIMsixIrqIndex},
		{"VFIO_PCI_REQ_IRQ_INDEX", VfioPCIReqIrqIndex},
		{"VFIO_IRQ_SET_DATA_NONE", VfioIrqSetDataNone},
		{"VFIO_IRQ_SET_DATA_EVENTFD", VfioIrqSetDataEventfd},
		{"VFIO_IRQ_SET_ACTION_MASK", VfioIrqSetActionMask},
		{"VFIO_IRQ_SET_ACTION_UNMASK", VfioIrqSetActionUnmask},
		{"VFIO_IRQ_SET_ACTION_TRIGGER", VfioIrqSetActionTrigger},
		{"VFIO_IOMMU_INFO_PGSIZES", VfioIommuInfoPgsizes},
		{"VFIO_IOMMU_INFO_CAPS", VfioIommuInfoCaps},
		{"VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE", VfioIommuType1InfoCapIovaRange},
		{"VFIO_DMA_MAP_FLAG_READ", VfioDmaMapFlagRead},
		{"VFIO_DMA_MAP_FLAG_WRITE", VfioDmaMapFlagWrite},
	}
	src := "#include <stdio.h>\n#include <stddef.h>\n#include <linux/vfio.h>\nint main(void) {\n"
	var want strings.Builder
	for _, r := range rows {
		src += fmt.Sprintf("printf(\"%%s %%d\\n\", %q, (int)(%s));\n", r.c, r.c)
		fmt.Fprintf(&want, "%s %d\n", r.c, r.want)
	}
	got := runC(t, src+"return 0; }\n")
	for i, w := range bytes.Split([]byte(want.String()), []byte("\n")) {
		if g := bytes.Split(got, []byte("\n")); !bytes.Equal(g[i], w) {
			t.Errorf("here %q, in C %q", w, g[i])
		}
	}
}
