package udp

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

const (
	// receiveBuffer is what packets may take in the kernel until they are received: two
	// thousand of the largest, some milliseconds at 10 Gbit/s.
	receiveBuffer = 16 << 20
	// sendBuffer is what packets may take on their way through the interface's queue.
	sendBuffer = 4 << 20
	// sendWait is how long a Send waits for room in the interface's queue before packets
	// are lost: then the interface does not send at all, or a neighbour does not answer.
	sendWait = 10 * 1000 // microseconds
)

// source is an address that packets are sent from, with its sockets.
type source struct {
	gid   hca.GID
	guard int // a UDP socket that holds the port
	send  int // a raw socket that takes packets with their IP header
}

func (s *source) close() {
	unix.Close(s.guard)
	unix.Close(s.send)
}

// sources are the addresses of a link at one time.
type sources struct {
	list []*source
	gids []hca.GID

	// mu is held for reading while one is used, so that none is closed meanwhile.
	mu sync.RWMutex
	// retired: there are newer ones. Guarded by mu.
	retired bool
}

// find is the source of that GID.
func (s *sources) find(gid hca.GID) *source {
	for i := range s.gids {
		if s.gids[i] == gid {
			return s.list[i]
		}
	}
	return nil
}

// has says whether gid is one of them.
func (s *sources) has(gid hca.GID) bool { return s.find(gid) != nil }

// sockaddr is addr's, with port. The index counts for link-local ones.
func sockaddr(addr netip.Addr, port, index int) unix.Sockaddr {
	if addr.Unmap().Is4() {
		return &unix.SockaddrInet4{Port: port, Addr: addr.Unmap().As4()}
	}
	a := &unix.SockaddrInet6{Port: port, Addr: addr.As16()}
	if addr.IsLinkLocalUnicast() || addr.IsLinkLocalMulticast() {
		a.ZoneId = uint32(index)
	}
	return a
}

// family is the socket family of a GID.
func family(gid hca.GID) int {
	if _, v4 := gid.IPv4(); v4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// setup is a row of socket options, and what they are for.
type setup struct {
	level, option, value int
	what                 string
}

func apply(fd int, options ...setup) error {
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.option, o.value); err != nil {
			return fmt.Errorf("%s: %w", o.what, err)
		}
	}
	return nil
}

func attach(fd int, f []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
		return fmt.Errorf("attach socket filter of %d instructions: %w", len(f), err)
	}
	return nil
}

// openSource takes an address's port and opens the socket to send from it.
func openSource(addr netip.Addr, dev *netdev) (_ *source, err error) {
	s := &source{gid: gidOf(addr), guard: -1, send: -1}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	v6 := family(s.gid) == unix.AF_INET6
	if s.guard, err = unix.Socket(family(s.gid), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP); err != nil {
		return nil, fmt.Errorf("open UDP socket for %s: %w", addr, err)
	}
	if err := attach(s.guard, nothing()); err != nil {
		return nil, err
	}
	if v6 {
		// Without this the kernel would count every packet as one with a bad sum.
		if err := unix.SetsockoptInt(s.guard, unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_RX, 1); err != nil {
			return nil, fmt.Errorf("allow UDP without a sum for %s: %w", addr, err)
		}
	}
	switch err := unix.Bind(s.guard, sockaddr(addr, roce.Port, dev.index)); {
	case errors.Is(err, unix.EADDRINUSE):
		return nil, fmt.Errorf("bind UDP port %d of %s: %w: if rdma_rxe is loaded, \"rdma link delete\" its links and \"modprobe -r rdma_rxe\", or see \"ss -lup\"",
			roce.Port, addr, err)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return nil, fmt.Errorf("bind UDP port %d of %s: %w: it is not an address of this host", roce.Port, addr, err)
	case err != nil:
		return nil, fmt.Errorf("bind UDP port %d of %s: %w", roce.Port, addr, err)
	}
	if s.send, err = unix.Socket(family(s.gid), unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
		return nil, rawError(err)
	}
	level, include, what := unix.IPPROTO_IP, unix.IP_HDRINCL, "send packets with their IPv4 header"
	if v6 {
		level, include, what = unix.IPPROTO_IPV6, unix.IPV6_HDRINCL, "send packets with their IPv6 header (Linux 4.5 can)"
	}
	if err := apply(s.send, setup{level, include, 1, what}); err != nil {
		return nil, err
	}
	if err := attach(s.send, nothing()); err != nil {
		return nil, err
	}
	if err := unix.BindToDevice(s.send, dev.name); err != nil {
		return nil, fmt.Errorf("bind raw socket to interface %s: %w", dev.name, err)
	}
	if err := unix.Bind(s.send, sockaddr(addr, 0, dev.index)); err != nil {
		return nil, fmt.Errorf("bind raw socket to %s: %w", addr, err)
	}
	enlarge(s.send, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer)
	if err := unix.SetsockoptTimeval(s.send, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Usec: sendWait}); err != nil {
		return nil, fmt.Errorf("bound the time of a send: %w", err)
	}
	return s, nil
}

// rawError is of a raw socket that cannot be opened.
func rawError(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("open raw socket: %w: it needs CAP_NET_RAW", err)
	}
	return fmt.Errorf("open raw socket: %w", err)
}

// enlarge sets a socket's buffer, by force if the daemon may: else the host's limit
// (net.core.rmem_max, wmem_max) bounds it.
func enlarge(fd, force, option, size int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, size)
	}
}

// openReceiver opens the raw socket that a family's packets come by; -1 if the host
// does not have the family.
func openReceiver(fam int) (fd int, err error) {
	fd, err = unix.Socket(fam, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return -1, nil
	}
	if err != nil {
		return -1, rawError(err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := attach(fd, nothing()); err != nil { // until the addresses are known
		return -1, err
	}
	const what = "receive with the IP header's fields"
	options := []setup{{unix.IPPROTO_IP, unix.IP_MULTICAST_ALL, 0, "receive no groups but the link's"}}
	if fam == unix.AF_INET6 {
		options = []setup{
			{unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1, what},
			{unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1, what},
			{unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1, what},
			{unix.IPPROTO_IPV6, ipv6MulticastAll, 0, "receive no groups but the link's"},
		}
	}
	if err := apply(fd, options...); err != nil {
		return -1, err
	}
	enlarge(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receiveBuffer)
	return fd, nil
}

// ipv6MulticastAll is IPV6_MULTICAST_ALL (linux/in6.h), since Linux 4.20.
const ipv6MulticastAll = 29

// member has a socket join a group on an interface, or leave it.
func member(fd int, group hca.GID, index int, join bool) error {
	if a, v4 := group.IPv4(); v4 {
		option := unix.IP_DROP_MEMBERSHIP
		if join {
			option = unix.IP_ADD_MEMBERSHIP
		}
		return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, option, &unix.IPMreqn{Multiaddr: a, Ifindex: int32(index)})
	}
	option := unix.IPV6_LEAVE_GROUP
	if join {
		option = unix.IPV6_JOIN_GROUP
	}
	return unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, option, &unix.IPv6Mreq{Multiaddr: group, Interface: uint32(index)})
}
