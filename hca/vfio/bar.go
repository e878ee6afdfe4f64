package vfio

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// MSI-X in configuration space (PCI 3.0 §6.7, §6.8.2).
const (
	statusOffset    = 6
	statusCaps      = 1 << 4 // Capabilities List
	capsOffset      = 0x34
	capMSIX         = 0x11
	msixEntry       = 16 // bytes of a vector in the table
	standardConfig  = 256
	maxStandardCaps = 48 // so many fit in what is not the header
)

// Map maps base address register bar, 0 to 5, once: a second call gives the same. What
// of it cannot be mapped (the page of the MSI-X table, on kernels before 4.16) is left
// out, and an access there panics. EINVAL if there is no such BAR, EOPNOTSUPP
// if it is of I/O ports, or shares its page with others.
func (d *Device) Map(bar int) (nic.BAR, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range d.bars {
		if b.index == bar && d.usable() == nil {
			return b, nil
		}
	}
	b, err := d.mapBAR(bar)
	if err != nil {
		return nil, d.failed(fmt.Sprintf("map BAR %d", bar), err)
	}
	d.bars = append(d.bars, b)
	return b, nil
}

func (d *Device) mapBAR(index int) (_ *bar, err error) {
	if err := d.usable(); err != nil {
		return nil, err
	}
	if index < abi.VfioPCIBar0RegionIndex || index > abi.VfioPCIBar5RegionIndex {
		return nil, fmt.Errorf("there are 0 to 5: %w", unix.EINVAL)
	}
	r, err := regionInfo(d.k, d.fd, uint32(index))
	if err != nil {
		return nil, err
	}
	if r.size == 0 {
		return nil, fmt.Errorf("the device has none: %w", unix.EINVAL)
	}
	const need = abi.VfioRegionInfoFlagMmap | abi.VfioRegionInfoFlagRead | abi.VfioRegionInfoFlagWrite
	if r.flags&need != need {
		return nil, fmt.Errorf("it is of I/O ports, or shares its page (flags %#x, %d bytes): %w", r.flags, r.size, unix.EOPNOTSUPP)
	}
	parts, err := d.mappable(index, r)
	if err != nil {
		return nil, err
	}
	b := &bar{dev: d, index: index, size: int(r.size)}
	defer func() {
		if err != nil {
			_ = b.unmap()
		}
	}()
	page := uint64(unix.Getpagesize())
	for _, p := range parts {
		mem, err := d.k.mapDevice(d.fd, r.offset+int64(p.start), int((p.end-p.start+page-1)&^(page-1)))
		if err != nil {
			return nil, err
		}
		b.areas = append(b.areas, newArea(int(p.start), int(p.end), mem))
	}
	return b, nil
}

// mappable are the parts of a BAR that can be mapped; each starts with a page.
func (d *Device) mappable(index int, r region) ([]span, error) {
	page := uint64(unix.Getpagesize())
	parts := []span{{0, uint64(r.size)}}
	if r.isSparse {
		parts = r.sparse
	} else if !r.msixMappable {
		table, err := d.msixTable(index)
		if err != nil {
			return nil, err
		}
		if table.start < table.end {
			from, to := table.start&^(page-1), (table.end+page-1)&^(page-1)
			parts = []span{{0, min(from, uint64(r.size))}, {to, uint64(r.size)}}
		}
	}
	var l []span
	for _, p := range parts {
		if p.start < p.end && p.start&(page-1) == 0 {
			l = append(l, p)
		}
	}
	if len(l) == 0 {
		return nil, fmt.Errorf("no page of it can be mapped: %w", unix.EOPNOTSUPP)
	}
	return l, nil
}

// msixTable is where in a BAR the MSI-X table lies; empty: not in this one.
func (d *Device) msixTable(index int) (span, error) {
	var c [standardConfig]byte
	if err := d.access("read", 0, c[:], d.k.pread); err != nil {
		return span{}, err
	}
	if binary.LittleEndian.Uint16(c[statusOffset:])&statusCaps == 0 {
		return span{}, nil
	}
	at := c[capsOffset] &^ 3
	for range maxStandardCaps {
		if at < 0x40 || int(at)+12 > len(c) {
			break
		}
		if c[at] == capMSIX {
			vectors := uint64(binary.LittleEndian.Uint16(c[at+2:])&0x7ff) + 1
			table := binary.LittleEndian.Uint32(c[at+4:])
			if int(table&7) != index {
				break
			}
			start := uint64(table &^ 7)
			return span{start, start + vectors*msixEntry}, nil
		}
		at = c[at+1] &^ 3
	}
	return span{}, nil
}

// unmap is mapBAR's reverse. An access after it panics.
func (b *bar) unmap() (err error) {
	for _, a := range b.areas {
		err = both(err, b.dev.k.unmap(a.mem))
	}
	b.areas = nil
	return err
}
