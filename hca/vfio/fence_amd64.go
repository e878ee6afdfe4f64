package vfio

// fence orders an access of device memory with those of DMA memory. On amd64 there is
// nothing to do: VFIO maps BARs uncached (vfio_pci_core_mmap, pgprot_noncached), and the
// processor moves no load or store across an uncached one, nor a store before an
// earlier one (Intel SDM 3A §9.2.2, AMD APM 2 §7.4.2). The compiler moves none across
// the calls of load and store functions, which are not inlined.
func fence() {}
