package roce

import (
	"errors"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// Headroom is the bytes that every packet leaves free in front of its IP header,
// for the link to put its own header there.
const Headroom = nic.Headroom

var (
	// ErrClosed is what a Link says once it is closed.
	ErrClosed = errors.New("link is closed")
	// ErrGone is what a Link says once what it stands on is gone for good.
	ErrGone = errors.New("link is gone")
)

// LinkState is what a link tells of itself. It is a value: nobody changes one.
type LinkState struct {
	Up bool
	// MTU is the largest payload of a packet in bytes: 256, 512, 1024, 2048 or 4096,
	// the largest that fits the Ethernet MTU with all headers.
	MTU int
	// GIDs are the link's addresses; index 0 is the link-local one if there is any.
	// They are addresses that packets may be sent from.
	GIDs []hca.GID
	// NetDev is the name of the network interface behind it, "" if the kernel has
	// none.
	NetDev string
	// Mbps is the speed in 10^6 bits a second, 0 if unknown.
	Mbps int
}

// Buffer is a packet to be sent: Headroom bytes, then an IP packet to its end.
type Buffer []byte

// Received is a packet that came in. IP is from the IP header to the end of the
// ICRC; it is the link's until Release.
type Received struct {
	IP []byte
	// Buf and Token are the link's: what IP lies in.
	Buf   nic.Releaser
	Token int
}

// Release gives the packet's buffer back: once, on any goroutine, also after the
// link is closed.
func (r *Received) Release() {
	if r.Buf != nil {
		r.Buf.ReleaseFrame(r.Token)
	}
	*r = Received{}
}

// Link carries RoCE v2 packets between this port and others: over the host's own
// stack (hca/udp), or a NIC in user hands (hca/roce/ether). It checks nothing above
// UDP's port: what comes in may be any bytes. All methods may be called from
// any goroutine at once.
type Link interface {
	// State is the link as it is now.
	State() LinkState
	// Watch has f called after every change of the state, one call at a time; f may
	// not block. Once, before the first Recv.
	Watch(f func(LinkState))
	// Send sends packets to dst, the GID of one port or of a group, in order. It
	// returns once the bytes may be used again, and says nothing of whether they
	// arrive: a packet that cannot be sent is lost, as on a wire. It may
	// write to the headroom. It does not wait for a peer: what needs an address that
	// is not known yet is held back or lost. An error is ErrClosed or ErrGone.
	Send(dst hca.GID, packets []Buffer) error
	// Reachable says whether Send has a way to dst: an address on the link, or
	// through a gateway.
	Reachable(dst hca.GID) bool
	// Recv waits for packets and fills some of rs, at least one, or says ErrClosed
	// or ErrGone. Several goroutines may wait at once; what one takes is in order.
	// No buffer is allocated per packet. Packets that find none are lost.
	Recv(rs []Received) (int, error)
	// Join and Leave have the link receive a multicast group's packets; they count.
	Join(group hca.GID) error
	Leave(group hca.GID) error
	// Counters are the link's own, by snake_case name.
	Counters() map[string]uint64
	// Close ends every Recv with ErrClosed.
	Close() error
}
