package vfio

// fence orders an access of device memory with those of DMA memory: stores to BARs
// come after it, loads from them before it. arm64 keeps only accesses of one device in
// order, so that a full barrier of the outer shareable domain is needed; Linux has
// a weaker one for each direction (dma_wmb, dma_rmb). Compiled, never run yet. Missing
// there besides: atomic loads and stores of DMA memory order within the inner domain
// only, which is enough for hardware that snoops, and no other is known to.
//
//go:noescape
func fence()
