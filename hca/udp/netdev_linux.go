package udp

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// netdev is a network interface as the kernel tells of it.
type netdev struct {
	index int
	name  string
	flags uint32
	mtu   int
	addrs []netip.Addr // usable ones, in the kernel's order
	// temporary are those of addrs that the kernel replaces after a while (RFC 8981).
	temporary []netip.Addr
}

// scan reads all interfaces with their addresses.
func scan() ([]*netdev, error) {
	var devs []*netdev
	err := dump(unix.RTM_GETLINK, unix.RTM_NEWLINK, unix.SizeofIfInfomsg, func(head []byte, attrs []syscall.NetlinkRouteAttr) {
		d := &netdev{index: int(binary.NativeEndian.Uint32(head[4:])), flags: binary.NativeEndian.Uint32(head[8:])}
		for _, a := range attrs {
			switch {
			case a.Attr.Type == unix.IFLA_IFNAME:
				d.name = unix.ByteSliceToString(a.Value)
			case a.Attr.Type == unix.IFLA_MTU && len(a.Value) >= 4:
				d.mtu = int(binary.NativeEndian.Uint32(a.Value))
			}
		}
		devs = append(devs, d)
	})
	if err != nil {
		return nil, fmt.Errorf("list network interfaces: %w", err)
	}
	err = dump(unix.RTM_GETADDR, unix.RTM_NEWADDR, unix.SizeofIfAddrmsg, func(head []byte, attrs []syscall.NetlinkRouteAttr) {
		family, flags, index := head[0], head[2], int(binary.NativeEndian.Uint32(head[4:]))
		i := slices.IndexFunc(devs, func(d *netdev) bool { return d.index == index })
		if i < 0 || family == unix.AF_INET6 && flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 {
			return
		}
		var addr netip.Addr
		for _, a := range attrs {
			// Of a point-to-point link IFA_ADDRESS is the peer's (linux/if_addr.h).
			if a.Attr.Type == unix.IFA_LOCAL || a.Attr.Type == unix.IFA_ADDRESS && !addr.IsValid() {
				addr, _ = netip.AddrFromSlice(a.Value)
			}
		}
		if !addr.IsValid() {
			return
		}
		devs[i].addrs = append(devs[i].addrs, addr)
		if family == unix.AF_INET6 && flags&unix.IFA_F_TEMPORARY != 0 {
			devs[i].temporary = append(devs[i].temporary, addr)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list network addresses: %w", err)
	}
	return devs, nil
}

// dump asks rtnetlink for a table and has f see each entry that answers, whose
// header is at least size bytes.
func dump(request, answer, size int, f func(head []byte, attrs []syscall.NetlinkRouteAttr)) error {
	rib, err := syscall.NetlinkRIB(request, unix.AF_UNSPEC)
	if err != nil {
		return err
	}
	msgs, err := syscall.ParseNetlinkMessage(rib)
	if err != nil {
		return err
	}
	for i := range msgs {
		if int(msgs[i].Header.Type) != answer || len(msgs[i].Data) < size {
			continue
		}
		attrs, err := syscall.ParseNetlinkRouteAttr(&msgs[i])
		if err != nil {
			return err
		}
		f(msgs[i].Data, attrs)
	}
	return nil
}

// subscribe opens a socket that tells of changes of interfaces and addresses.
func subscribe() (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, fmt.Errorf("open rtnetlink: %w", err)
	}
	const groups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1)
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("subscribe to rtnetlink: %w", err)
	}
	return fd, nil
}

// concerns says whether some message of b, what an rtnetlink socket gave, is about
// the interface. What it cannot read may be.
func concerns(b []byte, index int) bool {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(binary.NativeEndian.Uint32(b))
		// struct ifinfomsg and struct ifaddrmsg have the index at the same place.
		if n < unix.SizeofNlMsghdr+8 || n > len(b) {
			return true
		}
		if int(binary.NativeEndian.Uint32(b[unix.SizeofNlMsghdr+4:])) == index {
			return true
		}
		b = b[min((n+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):]
	}
	return len(b) != 0
}

// routed asks rtnetlink whether a routing table has a way to dst by the interface. (A
// socket that is bound to an interface would have the kernel take any IPv4 address for
// one on the link.)
func routed(dst hca.GID, index int) bool {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	addr := dst[:]
	if a, v4 := dst.IPv4(); v4 {
		addr = a[:]
	}
	msg := make([]byte, unix.SizeofNlMsghdr+unix.SizeofRtMsg)
	rt := msg[unix.SizeofNlMsghdr:]
	rt[0], rt[1] = byte(family(dst)), byte(8*len(addr)) // rtm_family, rtm_dst_len
	binary.NativeEndian.PutUint32(rt[8:], unix.RTM_F_FIB_MATCH)
	attr := func(kind uint16, value []byte) {
		msg = binary.NativeEndian.AppendUint16(msg, uint16(unix.SizeofRtAttr+len(value)))
		msg = append(binary.NativeEndian.AppendUint16(msg, kind), value...)
	}
	attr(unix.RTA_DST, addr)
	attr(unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(index)))
	binary.NativeEndian.PutUint32(msg, uint32(len(msg)))
	binary.NativeEndian.PutUint16(msg[4:], unix.RTM_GETROUTE)
	binary.NativeEndian.PutUint16(msg[6:], unix.NLM_F_REQUEST)
	if unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) != nil {
		return false
	}
	// The kernel has answered by now.
	buf := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
	if err != nil || n < unix.SizeofNlMsghdr+unix.SizeofRtMsg || binary.NativeEndian.Uint16(buf[4:]) != unix.RTM_NEWROUTE {
		return false
	}
	kind := buf[unix.SizeofNlMsghdr+7] // rtm_type
	return kind == unix.RTN_UNICAST || kind == unix.RTN_LOCAL
}

// up says whether the interface carries packets, as rxe's port would be active.
func (d *netdev) up() bool { return d.flags&unix.IFF_UP != 0 && d.flags&unix.IFF_RUNNING != 0 }

// payloadMTU is the RoCE MTU for an Ethernet MTU: the largest that fits with all
// headers, 256 if none does (rxe.h eth_mtu_int_to_enum). rxe leaves 80 bytes for headers
// (rxe_hdr.h RXE_MAX_HDR_LENGTH); the longest packet has 88, in IPv6 with XRCETH, RETH
// and ImmDt.
func payloadMTU(ethernet int) int {
	const longestHeaders = 88
	mtu := roce.MaxPayload
	for mtu > 256 && mtu+longestHeaders > ethernet {
		mtu /= 2
	}
	return mtu
}

// speed is the interface's in 10^6 bits a second, 0 if it has none or is unknown.
func (d *netdev) speed() int {
	const unknown = 0xffffffff
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	// struct ethtool_cmd (linux/ethtool.h): 44 bytes, the speed in two halves.
	cmd := [44]byte{}
	binary.NativeEndian.PutUint32(cmd[:], unix.ETHTOOL_GSET)
	var req struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	copy(req.name[:unix.IFNAMSIZ-1], d.name)
	req.data = unsafe.Pointer(&cmd)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return 0
	}
	mbps := uint32(binary.NativeEndian.Uint16(cmd[12:])) | uint32(binary.NativeEndian.Uint16(cmd[28:]))<<16
	if mbps == unknown || mbps == 0xffff {
		return 0
	}
	return int(mbps)
}

// gidOf is an address's GID.
func gidOf(a netip.Addr) hca.GID {
	if a.Unmap().Is4() {
		return hca.IPv4GID(a.Unmap().As4())
	}
	return hca.GID(a.As16())
}
