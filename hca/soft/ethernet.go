package soft

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// What a device with an Ethernet port does its own way: RoCE v2 (IBTA annex A17),
// as the kernel's ib_core and rxe have it.

const (
	// rxePortCapFlags is IB_PORT_CM_SUP (RXE_PORT_PORT_CAP_FLAGS, rxe_param.h).
	rxePortCapFlags = 1 << 16
	// routeHopLimit is the hop limit of every unicast path, whatever its client
	// asked for: ib_core takes the route's (ib_resolve_unicast_gid_dmac, verbs.c),
	// and a route that says nothing has IPDEFTTL.
	routeHopLimit = 64

	ipv4HeaderSize = 20
	udpHeaderSize  = 8
	protoUDP       = 17
	dontFragment   = 0x4000
)

func (d *Device) ethernet() bool { return d.fabric.Link() == hca.LinkEthernet }

// initGIDs fills the GID table in the order of roce_gid_mgmt.c: the default GID,
// which is made of the MAC as the node GUID is, then one for each address.
func (d *Device) initGIDs(cfg *Config) []hca.GID {
	gids := []hca.GID{gidOf(cfg.GUID)}
	switch {
	case cfg.Link != nil:
		gids = cfg.Link.State().GIDs
	case cfg.Address != ([4]byte{}):
		gids = append(gids, hca.IPv4GID(cfg.Address))
	}
	return d.setGIDs(gids)
}

// setGIDs puts gids in the table, as far as there is room, and returns those.
func (d *Device) setGIDs(gids []hca.GID) []hca.GID {
	var t [gidTableLen]hca.GID
	n := copy(t[:], gids)
	d.gids.Store(&t)
	return t[:n]
}

// gid is one of the port's, zero if it has none there.
func (d *Device) gid(i int) hca.GID { return d.gids.Load()[i] }

// hasGID: is it one of the port's?
func (d *Device) hasGID(g hca.GID) bool { return slices.Contains(d.gids.Load()[:], g) }

// linkChanged is the link's callback: the port goes up or down, and its GIDs follow the
// link's addresses (roce_gid_mgmt.c).
func (d *Device) linkChanged(s roce.LinkState) {
	if gids := s.GIDs; !slices.Equal(gids[:min(len(gids), gidTableLen)], d.port.GIDs()) {
		d.port.SetGIDs(d.setGIDs(gids))
		d.tellPort(hca.EventGIDChange)
	}
	d.SetPort(s.Up)
}

// checkRoute is what ib_core asks of a path over Ethernet beyond its GID index
// (rdma_check_ah_attr, verbs.c; rdma_resolve_ip, addr.c): a GRH, and both ends in
// one family. That nobody has the address is no error, for he may still come. What
// Ethernet has not, LID, SL and rate, nobody looks at, as in rxe.
func (d *Device) checkRoute(a *hca.AHAttr) error {
	if !a.IsGlobal {
		return fmt.Errorf("no GRH, on Ethernet: %w", einval)
	}
	from := d.gid(int(a.SGIDIndex))
	_, from4 := from.IPv4()
	if _, to4 := a.DGID.IPv4(); from4 != to4 && !a.DGID.IsMulticast() {
		return fmt.Errorf("from GID %s to %s, which is of the other family: %w", from, a.DGID, einval)
	}
	return nil
}

// path is a checked address as the device keeps and reports it. On Ethernet that
// is the GRH alone (rxe_av_to_attr, rxe_av.c).
func (d *Device) path(a hca.AHAttr) hca.AHAttr {
	if !d.ethernet() {
		return a
	}
	a.DLID, a.SL, a.SrcPathBits, a.StaticRate = 0, 0, 0, 0
	if !a.DGID.IsMulticast() {
		a.HopLimit = routeHopLimit
	}
	return a
}

// leadsBackLocked: is the path of p, whose r.mu is held, one to x's sender? On
// Ethernet both ends must have named each other's very GIDs (check_addr,
// rxe_recv.c).
func (x *exec) leadsBackLocked(p *QP) bool {
	d, av := x.q.dev, &p.r.av
	if d.ethernet() {
		return av.DGID == d.gid(int(x.dest.SGIDIndex)) && x.dest.DGID == p.dev.gid(int(av.SGIDIndex))
	}
	return av.DLID == d.port.LID() || av.IsGlobal && av.DGID == d.gid(0)
}

// putRoCE writes the network header of a RoCE v2 datagram whose UDP payload is n
// bytes into the room of a GRH. The family is the source GID's; an IPv4 header
// fills the last 20 bytes, after zeros (union rdma_network_hdr, ib_verbs.h;
// build_rdma_network_hdr, rxe_resp.c). An IPv6 header has no flow label
// (prepare_ipv6_hdr, rxe_net.c).
func putRoCE(g *[grhSize]byte, from hca.GID, to *hca.AHAttr, n int) {
	clear(g[:])
	src, v4 := from.IPv4()
	if !v4 {
		binary.BigEndian.PutUint32(g[:], 6<<28|uint32(to.TrafficClass)<<20)
		binary.BigEndian.PutUint16(g[4:], uint16(udpHeaderSize+n))
		g[6], g[7] = protoUDP, to.HopLimit
		copy(g[8:], from[:])
		copy(g[24:], to.DGID[:])
		return
	}
	h := g[grhSize-ipv4HeaderSize:]
	h[0], h[1] = 4<<4|ipv4HeaderSize/4, to.TrafficClass
	binary.BigEndian.PutUint16(h[2:], uint16(ipv4HeaderSize+udpHeaderSize+n))
	binary.BigEndian.PutUint16(h[6:], dontFragment)
	h[8], h[9] = to.HopLimit, protoUDP
	copy(h[12:], src[:])
	copy(h[16:], to.DGID[12:])
	// Readers tell an IPv4 header by its sum (get_grh_header_version, libibverbs).
	var sum uint32
	for i := 0; i < ipv4HeaderSize; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum))
}

// ethernetPort is what sets an Ethernet port's attributes apart (rxe_init_port_param).
// NetDev stays empty: the fabric is inside the daemon, no interface of the host has
// these addresses or carries these bytes, and readers of a name that is there all the
// same ("lo") would take its MTU, state and routes for the port's. Without one
// libibverbs reports interface 0.
func ethernetPort(a *hca.PortAttr) {
	a.LinkLayer = hca.LinkEthernet
	a.PortCapFlags, a.SMLID, a.SubnetTimeout = rxePortCapFlags, 0, 0
}
