package ether

import (
	"fmt"
	"net/netip"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// Config is how a port is to be on its network.
type Config struct {
	// Addresses are the port's own, each with the length of its network's prefix.
	// Beside them there is always the IPv6 link-local one made of the MAC.
	Addresses []netip.Prefix
	// Gateway4 and Gateway6 are where packets go that are for no address on the
	// link; the zero Addr if there is none. Each is on one of the prefixes, or
	// link-local.
	Gateway4, Gateway6 netip.Addr
	// MTU is the Ethernet MTU in bytes, at least 1280; 0 is 1500, or what the port
	// takes if that is less.
	MTU int
	// VLAN is the VLAN's number, 1 to 4094, that all frames are tagged with; 0 if
	// they have no tag.
	VLAN int
}

// maxVLAN is the last number that a VLAN may have (IEEE 802.1Q §9.6).
const maxVLAN = 4094

// network is a Config that was checked, and the link-local address.
type network struct {
	addrs    []netip.Prefix // [0] is the link-local one
	gateway4 netip.Addr
	gateway6 netip.Addr
	mtu      int
	vlan     uint16
	head     int // bytes of Ethernet header in front of each packet
}

var linkLocal = netip.MustParsePrefix("fe80::/10")

// check makes a network of a Config.
func (c Config) check(port nic.Port) (*network, error) {
	mac := port.MAC()
	if mac == (nic.MAC{}) || mac[0]&1 != 0 {
		return nil, fmt.Errorf("port's MAC %s is no station's: give the NIC one of its own", macString(mac))
	}
	if c.VLAN < 0 || c.VLAN > maxVLAN {
		return nil, fmt.Errorf("VLAN %d does not exist: use 1 to %d, or 0 for none", c.VLAN, maxVLAN)
	}
	n := &network{vlan: uint16(c.VLAN), head: ethHeader, gateway4: c.Gateway4, gateway6: c.Gateway6}
	if c.VLAN != 0 {
		n.head += vlanTag
	}
	most := port.MaxFrame() - n.head
	switch n.mtu = c.MTU; {
	case n.mtu == 0:
		n.mtu = min(defaultMTU, most)
	case n.mtu > most:
		return nil, fmt.Errorf("MTU %d is more than the port's %d: use less", n.mtu, most)
	}
	if n.mtu < minMTU {
		return nil, fmt.Errorf("MTU %d is less than IPv6 needs: use at least %d, or a port that takes it", n.mtu, minMTU)
	}
	if len(c.Addresses) >= maxAddresses {
		return nil, fmt.Errorf("%d addresses are too many for one port: use less than %d", len(c.Addresses), maxAddresses)
	}
	n.addrs = append(n.addrs, netip.PrefixFrom(eui64(mac), 64))
	for _, p := range c.Addresses {
		a := p.Addr()
		switch {
		case !p.IsValid() || a.Is4In6() || a.Zone() != "" || !hostAddr(a):
			return nil, fmt.Errorf("%s is no address of a port: give a unicast address with its prefix's length", p)
		case n.own(a):
			return nil, fmt.Errorf("address %s is there twice: give it once", a)
		}
		n.addrs = append(n.addrs, p)
	}
	for _, g := range []struct {
		addr  netip.Addr
		v4    bool
		which string
	}{{c.Gateway4, true, "IPv4"}, {c.Gateway6, false, "IPv6"}} {
		if g.addr == (netip.Addr{}) {
			continue
		}
		if g.addr.Is4() != g.v4 || g.addr.Is4In6() || g.addr.Zone() != "" || !hostAddr(g.addr) {
			return nil, fmt.Errorf("%s is no %s gateway: give its address", g.addr, g.which)
		}
		if _, ok := n.onLink(g.addr); !ok || n.own(g.addr) {
			return nil, fmt.Errorf("%s gateway %s is on no prefix of the port: give one that is", g.which, g.addr)
		}
	}
	return n, nil
}

// own says whether the address is one of the port's.
func (n *network) own(a netip.Addr) bool {
	for _, p := range n.addrs {
		if p.Addr() == a {
			return true
		}
	}
	return false
}

// onLink says whether the address is a neighbour's, and which of ours to ask from.
func (n *network) onLink(a netip.Addr) (local netip.Addr, ok bool) {
	if linkLocal.Contains(a) {
		return n.addrs[0].Addr(), true
	}
	bits := -1
	for _, p := range n.addrs {
		if p.Contains(a) && p.Bits() > bits {
			local, bits = p.Addr(), p.Bits()
		}
	}
	return local, bits >= 0
}

// nextHop is the neighbour that packets to dst go to; ok is false if there is no way,
// or dst is ourselves.
func (n *network) nextHop(dst netip.Addr) (hop, local netip.Addr, ok bool) {
	if !hostAddr(dst) || n.own(dst) {
		return hop, local, false
	}
	if local, ok = n.onLink(dst); ok {
		return dst, local, !n.broadcast(dst)
	}
	hop = n.gateway6
	if dst.Is4() {
		hop = n.gateway4
	}
	if !hop.IsValid() {
		return hop, local, false
	}
	local, ok = n.onLink(hop)
	return hop, local, ok
}

// broadcast says whether the address is an IPv4 prefix's broadcast address, or names
// the network itself; /31 and /32 have neither (RFC 3021).
func (n *network) broadcast(a netip.Addr) bool {
	if !a.Is4() {
		return false
	}
	for _, p := range n.addrs {
		if p.Contains(a) && p.Bits() < 31 {
			b, mask := a.As4(), uint32(1)<<(32-p.Bits())-1
			host := (uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])) & mask
			if host == 0 || host == mask {
				return true
			}
		}
	}
	return false
}

// hostAddr says whether an address can be that of another host on a network.
func hostAddr(a netip.Addr) bool {
	if a.Is4() && (a.As4()[0] == 0 || a.As4()[0] >= 240) { // RFC 6890 §2.2.2
		return false
	}
	return a.IsValid() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast()
}

// eui64 is the link-local address made of a MAC (RFC 4291 §2.5.6 and appendix A).
func eui64(m nic.MAC) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]})
}

// gidOf is the GID of an address: IPv4 ones are mapped into IPv6.
func gidOf(a netip.Addr) hca.GID { return hca.GID(a.As16()) }

// addrOf is the address behind a GID.
func addrOf(g hca.GID) netip.Addr {
	if a, ok := g.IPv4(); ok {
		return netip.AddrFrom4(a)
	}
	return netip.AddrFrom16(g)
}

// groupMAC is the MAC of a multicast group (RFC 1112 §6.4, RFC 2464 §7).
func groupMAC(g hca.GID) nic.MAC {
	if a, ok := g.IPv4(); ok {
		return nic.MAC{0x01, 0x00, 0x5e, a[1] & 0x7f, a[2], a[3]}
	}
	return nic.MAC{0x33, 0x33, g[12], g[13], g[14], g[15]}
}

// solicited is the solicited-node group of an IPv6 address (RFC 4291 §2.7.1).
func solicited(a netip.Addr) hca.GID {
	b := a.As16()
	return hca.GID{0: 0xff, 1: 0x02, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]}
}

// roceMTU is the largest RoCE MTU in bytes that fits an Ethernet MTU, as the kernel
// counts it (eth_mtu_int_to_enum, drivers/infiniband/sw/rxe/rxe_param.h, and
// rxe_set_mtu, rxe.c, which never goes below 256).
func roceMTU(ethernet int) int {
	for m := 4096; m > 256; m /= 2 {
		if ethernet-maxHeaders >= m {
			return m
		}
	}
	return 256
}

func macString(m nic.MAC) string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}
