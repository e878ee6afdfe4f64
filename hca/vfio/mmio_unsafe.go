package vfio

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"unsafe"
)

// word is what one access of device memory moves.
type word interface {
	uint8 | uint16 | uint32 | uint64
}

// area is a mapped part of a BAR.
type area struct {
	start, end int // offsets in the BAR
	base       unsafe.Pointer
	mem        []byte // what was mapped: whole pages
}

func newArea(start, end int, mem []byte) area {
	return area{start, end, unsafe.Pointer(unsafe.SliceData(mem)), mem}
}

// bar is a BAR: one or more mapped areas, constant until the device is closed.
//
// Each access is one plain load or store of its width by the processor, not an atomic
// one: those are read-modify-write cycles on amd64, which devices do not expect. Devices
// are little endian, and so is every architecture this is built for. fence gives the
// order that nic.BAR states.
type bar struct {
	dev   *Device
	index int
	size  int
	areas []area
}

// at is where off is mapped.
func (b *bar) at(off, width int) unsafe.Pointer {
	for i := range b.areas {
		if a := &b.areas[i]; off >= a.start && off <= a.end-width && off&(width-1) == 0 {
			return unsafe.Add(a.base, off-a.start)
		}
	}
	panic(fmt.Sprintf("vfio %s: BAR %d: access of %d bytes at %#x of %#x: not aligned, or not mapped", b.dev.name, b.index, width, off, b.size))
}

//go:noinline
func loadWord[T word](p unsafe.Pointer) T { return *(*T)(p) }

//go:noinline
func storeWord[T word](p unsafe.Pointer, v T) { *(*T)(p) = v }

// read is a load. A bus error, which is what the kernel gives for memory that the
// device does not have any more, reads as all ones, as from an empty slot.
func read[T word](b *bar, off int) (v T) {
	p := b.at(off, int(unsafe.Sizeof(v)))
	if b.dev.gone.Load() {
		return ^T(0)
	}
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		if r := recover(); r != nil {
			b.fault(r, p)
			v = ^T(0)
		}
	}()
	v = loadWord[T](p)
	fence()
	return v
}

// write is a store; after a bus error it is lost.
func write[T word](b *bar, off int, v T) {
	p := b.at(off, int(unsafe.Sizeof(v)))
	if b.dev.gone.Load() {
		return
	}
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		if r := recover(); r != nil {
			b.fault(r, p)
		}
	}()
	fence()
	storeWord(p, v)
}

// fault takes the panic of an access at p: the device is gone. Any other goes on.
func (b *bar) fault(r any, p unsafe.Pointer) {
	e, ok := r.(interface {
		runtime.Error
		Addr() uintptr
	})
	if !ok || e.Addr()&^7 != uintptr(p)&^7 {
		panic(r)
	}
	b.dev.markGone()
}

func (b *bar) Len() int                  { return b.size }
func (b *bar) Load8(off int) uint8       { return read[uint8](b, off) }
func (b *bar) Load16(off int) uint16     { return read[uint16](b, off) }
func (b *bar) Load32(off int) uint32     { return read[uint32](b, off) }
func (b *bar) Load64(off int) uint64     { return read[uint64](b, off) }
func (b *bar) Store8(off int, v uint8)   { write(b, off, v) }
func (b *bar) Store16(off int, v uint16) { write(b, off, v) }
func (b *bar) Store32(off int, v uint32) { write(b, off, v) }
func (b *bar) Store64(off int, v uint64) { write(b, off, v) }
