// Package nic is the seam between an Ethernet port that the daemon drives itself
// and what stands on either side of it: a Port is what a NIC driver (virtionet,
// e1000e) gives to the RoCE link above (roce/ether), a Function is the PCI function
// in user hands (vfio) that a driver stands on.
//
// Who may call it: drivers implement Port and use Function; vfio implements
// Function; roce/ether and tests use Port. It holds no lock and no state.
package nic

import "errors"

var (
	// ErrClosed is what a Port says once it is closed.
	ErrClosed = errors.New("NIC is closed")
	// ErrGone is what a Port or a Function says once the hardware is gone: it was
	// unplugged, or does not answer any more.
	ErrGone = errors.New("NIC is gone")
	// ErrFull is what Send says when the transmit ring takes no more just now.
	ErrFull = errors.New("NIC's transmit ring is full")
)

// Headroom is the bytes that whoever makes a packet leaves free in front of the IP
// header: an Ethernet header with a VLAN tag is 18 (IEEE 802.3 §3, 802.1Q §9), made
// up so that the IP header is aligned to 8 bytes.
const Headroom = 24

// MAC is an Ethernet address in wire order.
type MAC [6]byte

// State is what a driver knows of its link.
type State struct {
	Up bool
	// Mbps is the speed in 10^6 bits a second; 0 if the hardware does not tell.
	Mbps int
}

// Frame is a received Ethernet frame, without FCS. Its bytes are the driver's:
// they stay until Release, and may be changed. A zero Frame is none.
type Frame struct {
	Data []byte
	// Buf and Token are the driver's: the buffer behind Data, and which one it is.
	Buf   Releaser
	Token int
}

// Release gives the frame's buffer back to the driver; Data is not to be used any
// more. Each frame is released once; it may be done on any goroutine and
// after the port is closed.
func (f *Frame) Release() {
	if f.Buf != nil {
		f.Buf.ReleaseFrame(f.Token)
	}
	*f = Frame{}
}

// Releaser takes back the buffers of frames.
type Releaser interface{ ReleaseFrame(token int) }

// Port is an Ethernet port with its driver. All methods may be called from any
// goroutine at once.
type Port interface {
	// MAC is the port's own address.
	MAC() MAC
	// MaxFrame is the largest frame in bytes, header and VLAN tag included, FCS not,
	// that the port sends and receives.
	MaxFrame() int
	// State is the link as it is now.
	State() State
	// Watch has f called after every change of the state, one call at a time, from
	// a goroutine of the driver's; f may not block. Once, before the first Recv.
	Watch(f func(State))
	// Multicast has the port receive these groups' frames (or more; what it cannot
	// filter it receives all of), in place of those given before.
	Multicast(groups []MAC) error
	// Send puts frames on the wire, in order, and returns how many it took: their
	// bytes are copied, or sent, by then. Fewer than given comes with ErrFull,
	// ErrGone, ErrClosed, or why a frame is none. It never waits for the link; while
	// that is down frames are dropped, as by a cable.
	Send(frames [][]byte) (int, error)
	// Recv waits for frames and fills some of fs, at least one, or says ErrClosed or
	// ErrGone. Several goroutines may wait at once. Frames that find no buffer are
	// dropped by the hardware. No buffer is allocated per frame.
	Recv(fs []Frame) (int, error)
	// Counters are the driver's and the hardware's, by snake_case name.
	Counters() map[string]uint64
	// Close stops the hardware, ends every Recv with ErrClosed, and releases the
	// Function. Frames that are out stay readable until they are released.
	Close() error
}

// Function is a PCI function that this process drives. Its methods say ErrGone
// (wrapped) once the function was taken away; a read then gives all ones.
type Function interface {
	// Name is its address, as 0000:00:02.0.
	Name() string
	// ReadConfig and WriteConfig reach configuration space.
	ReadConfig(off int64, p []byte) error
	WriteConfig(off int64, p []byte) error
	// BusMaster allows the function to do DMA and to interrupt, or forbids it.
	BusMaster(on bool) error
	// Map maps a base address register's memory, 0 to 5.
	Map(bar int) (BAR, error)
	// Alloc is zeroed memory for the function to reach, at least size bytes, page
	// aligned, until Close. It is shared with the hardware: see DMA.
	Alloc(size int) (DMA, error)
	// Vectors is how many interrupts the function can raise apart from each other.
	Vectors() int
	// Interrupts turns on n vectors (1 to Vectors) and gives an eventfd for each,
	// in the order of the vectors; they are non-blocking and closed by Close. Once.
	Interrupts(n int) ([]int, error)
	// UnmaskINTx lets a level-triggered interrupt come again, after the driver has
	// taken its cause away. Nothing is done where vectors are messages.
	UnmaskINTx() error
	// Reset resets the function, EOPNOTSUPP if the platform cannot.
	Reset() error
	// Removed is closed when somebody wants the function back (VFIO's request
	// interrupt): the driver's owner closes everything soon.
	Removed() <-chan struct{}
	// Close stops DMA and gives everything back in reverse. Not while anybody uses
	// a BAR or a DMA of it.
	Close() error
}

// DMA is memory that a function reaches at IOVA. The driver orders its accesses
// by the atomic loads and stores of sync/atomic on its words.
type DMA struct {
	Mem  []byte
	IOVA uint64
}

// BAR is mapped device memory. Every access is one load or store of that width,
// little endian, in program order with the others (amd64: uncached, strongly
// ordered; elsewhere the implementation fences); off is a multiple of the width
// and within Len, or it panics. A store to a BAR comes after all earlier stores to
// DMA memory, and a load from it before all later loads of DMA memory.
type BAR interface {
	Len() int
	Load8(off int) uint8
	Load16(off int) uint16
	Load32(off int) uint32
	Load64(off int) uint64
	Store8(off int, v uint8)
	Store16(off int, v uint16)
	Store32(off int, v uint32)
	Store64(off int, v uint64)
}
