package vfio

import (
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// ask fills an info struct, with the capabilities behind it where the kernel has some:
// it says in argsz how much room they take. p starts with argsz and flags.
func ask(k kernel, fd int, req uint, p []byte) ([]byte, error) {
	buf := slices.Clone(p)
	binary.NativeEndian.PutUint32(buf, uint32(len(buf)))
	if _, err := k.ioctl(fd, req, buf); err != nil {
		return nil, err
	}
	n := binary.NativeEndian.Uint32(buf)
	if n <= uint32(len(p)) {
		return buf, nil
	}
	if n > maxInfo {
		return nil, fmt.Errorf("kernel's answer is of %d bytes: %w", n, unix.E2BIG)
	}
	buf = append(slices.Clone(p), make([]byte, int(n)-len(p))...)
	binary.NativeEndian.PutUint32(buf, n)
	_, err := k.ioctl(fd, req, buf)
	return buf, err
}

// capability finds a capability in an info struct; first is where the chain starts, 0:
// nowhere. The result starts with the capability's header.
func capability(info []byte, first uint32, id uint16) []byte {
	off := first
	for range maxCaps {
		var h abi.VfioInfoCapHeader
		if off == 0 || uint64(off) > uint64(len(info)) || !load(&h, info[off:]) {
			return nil
		}
		if h.ID == id {
			return info[off:]
		}
		off = h.Next
	}
	return nil
}

// list are n elements that follow a capability's fixed part; what is not there is left
// out.
func list[T any](b []byte, n uint32) (l []T) {
	for range n {
		var v T
		if !load(&v, b) {
			break
		}
		l = append(l, v)
		b = b[len(bytesOf(&v)):]
	}
	return l
}

// region is a part of the device's file.
type region struct {
	flags        uint32
	size, offset int64
	// sparse are the parts that can be mapped, if the kernel tells; isSparse: it does.
	sparse   []span
	isSparse bool
	// msixMappable says that the MSI-X table can be mapped with the rest.
	msixMappable bool
}

func regionInfo(k kernel, fd int, index uint32) (region, error) {
	q := abi.VfioRegionInfo{Index: index}
	b, err := ask(k, fd, abi.VfioDeviceGetRegionInfo, bytesOf(&q))
	if err != nil {
		return region{}, err
	}
	load(&q, b)
	r := region{flags: q.Flags, size: int64(q.Size), offset: int64(q.Offset)}
	if r.size < 0 || r.offset < 0 || r.offset+r.size < 0 {
		return region{}, fmt.Errorf("kernel says size %#x, offset %#x: %w", q.Size, q.Offset, unix.EOVERFLOW)
	}
	if q.Flags&abi.VfioRegionInfoFlagCaps == 0 {
		return r, nil
	}
	r.msixMappable = capability(b, q.CapOffset, abi.VfioRegionInfoCapMsixMappable) != nil
	var h abi.VfioRegionInfoCapSparse
	if c := capability(b, q.CapOffset, abi.VfioRegionInfoCapSparseMmap); load(&h, c) {
		r.isSparse = true
		for _, a := range list[abi.VfioRegionSparseMmapArea](c[len(bytesOf(&h)):], h.NrAreas) {
			if end := a.Offset + a.Size; a.Offset < end && end <= q.Size {
				r.sparse = append(r.sparse, span{a.Offset, end})
			}
		}
	}
	return r, nil
}

// iommuInfo is the page size and the valid addresses of a container's IOMMU.
func iommuInfo(k kernel, fd int) (page uint64, valid []span, err error) {
	page = uint64(unix.Getpagesize())
	var q abi.VfioIommuType1Info
	b, err := ask(k, fd, abi.VfioIommuGetInfo, bytesOf(&q))
	if err != nil {
		return 0, nil, err
	}
	load(&q, b)
	if q.Flags&abi.VfioIommuInfoPgsizes != 0 {
		page = max(page, q.IovaPgsizes&-q.IovaPgsizes)
	}
	var h abi.VfioIommuType1InfoCapIova
	if q.Flags&abi.VfioIommuInfoCaps != 0 {
		if c := capability(b, q.CapOffset, abi.VfioIommuType1InfoCapIovaRange); load(&h, c) {
			for _, r := range list[abi.VfioIovaRange](c[len(bytesOf(&h)):], h.NrIovas) {
				valid = append(valid, span{r.Start, min(r.End, maxIOVA) + 1})
			}
			return page, valid, nil
		}
	}
	return page, defaultSpans, nil
}

func irqInfo(k kernel, fd int, index uint32) (abi.VfioIrqInfo, error) {
	q := abi.VfioIrqInfo{Argsz: uint32(len(bytesOf(new(abi.VfioIrqInfo)))), Index: index}
	_, err := k.ioctl(fd, abi.VfioDeviceGetIrqInfo, bytesOf(&q))
	return q, err
}
