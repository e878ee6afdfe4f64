package ether

import (
	"encoding/binary"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
)

const (
	ethHeader = 14 // IEEE 802.3 §3.1: two addresses and a type
	vlanTag   = 4  // IEEE 802.1Q §9.4: TPID and TCI

	typeIPv4 = 0x0800
	typeARP  = 0x0806
	typeVLAN = 0x8100
	typeIPv6 = 0x86dd

	ipv4Header = 20
	ipv6Header = 40
	udpHeader  = 8
	protoUDP   = 17

	// rocePort is RoCE v2's UDP port (IBTA 1.4 §A17.3.1).
	rocePort = 4791
)

// kind is what a received frame is.
type kind uint8

const (
	kindRoCE      kind = iota // a RoCE packet to one of our addresses or groups
	kindStack                 // something that netstack may want
	kindShort                 // ends within its Ethernet header
	kindVLAN                  // in another VLAN
	kindHost                  // to another station
	kindType                  // neither ARP nor IP
	kindMalformed             // an IP header that says what is not so
	kindNotOurs               // a RoCE packet to an address or group that is not ours
	kinds
)

// kindNames are the counters' names; kindRoCE and kindStack have ones with bytes.
var kindNames = [kinds]string{
	kindShort:     "rx_short",
	kindVLAN:      "rx_other_vlan",
	kindHost:      "rx_other_host",
	kindType:      "rx_other_type",
	kindMalformed: "rx_malformed",
	kindNotOurs:   "rx_other_group",
}

// view is what frames are judged by. It is immutable and replaced as a whole.
type view struct {
	mac    nic.MAC
	vlan   uint16
	accept map[hca.GID]struct{} // our addresses and groups
}

// classify says what a frame is, where its network header begins, and of a RoCE
// packet where it ends: Ethernet pads short frames.
func (v *view) classify(f []byte) (k kind, l3, end int) {
	if len(f) < ethHeader {
		return kindShort, 0, 0
	}
	group := f[0]&1 != 0
	if !group && nic.MAC(f[:6]) != v.mac {
		return kindHost, 0, 0
	}
	typ, l3 := binary.BigEndian.Uint16(f[12:]), ethHeader
	vid := uint16(0)
	if typ == typeVLAN {
		if len(f) < ethHeader+vlanTag {
			return kindShort, 0, 0
		}
		// A tag with VID 0 gives a priority only (IEEE 802.1Q §6.9).
		vid = binary.BigEndian.Uint16(f[14:]) & 0xfff
		typ, l3 = binary.BigEndian.Uint16(f[16:]), ethHeader+vlanTag
	}
	if vid != v.vlan {
		return kindVLAN, 0, 0
	}
	ip := f[l3:]
	var (
		dst hca.GID
		udp []byte
	)
	switch typ {
	case typeIPv4:
		if len(ip) < ipv4Header || ip[0]>>4 != 4 {
			return kindMalformed, 0, 0
		}
		hlen, total := int(ip[0]&15)*4, int(binary.BigEndian.Uint16(ip[2:]))
		if hlen < ipv4Header || total < hlen || total > len(ip) {
			return kindMalformed, 0, 0
		}
		// More to come, or not the first: DF is the only flag that stays.
		if ip[9] != protoUDP || binary.BigEndian.Uint16(ip[6:])&^0x4000 != 0 {
			return kindStack, l3, len(f)
		}
		ip = ip[:total]
		udp, dst = ip[hlen:], hca.IPv4GID([4]byte(ip[16:20]))
		if len(udp) >= udpHeader && binary.BigEndian.Uint16(udp[2:]) == rocePort && sum(ip[:hlen]) != 0xffff {
			return kindMalformed, 0, 0
		}
	case typeIPv6:
		if len(ip) < ipv6Header || ip[0]>>4 != 6 {
			return kindMalformed, 0, 0
		}
		total := ipv6Header + int(binary.BigEndian.Uint16(ip[4:]))
		if total > len(ip) {
			return kindMalformed, 0, 0
		}
		// With an extension header it is a fragment, or none of RoCE's.
		if ip[6] != protoUDP {
			return kindStack, l3, len(f)
		}
		ip = ip[:total]
		udp, dst = ip[ipv6Header:], hca.GID(ip[24:40])
	case typeARP:
		return kindStack, l3, len(f)
	default:
		return kindType, 0, 0
	}
	if len(udp) < udpHeader {
		return kindMalformed, 0, 0
	}
	if binary.BigEndian.Uint16(udp[2:]) != rocePort {
		return kindStack, l3, len(f)
	}
	// What came to a group's MAC must be to a group: else one frame would reach
	// every port that owns up to the address (RFC 1122 §3.3.6).
	if _, ours := v.accept[dst]; !ours || group != dst.IsMulticast() {
		return kindNotOurs, 0, 0
	}
	return kindRoCE, l3, l3 + len(ip)
}

// sum is the Internet checksum's sum (RFC 1071) of an IPv4 header; 0xffff if the
// checksum in it is right.
func sum(h []byte) uint32 {
	var s uint32
	for i := 0; i+1 < len(h); i += 2 {
		s += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	s = s>>16 + s&0xffff
	return s>>16 + s&0xffff
}
