package main

import (
	"fmt"
	"net/netip"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
)

// linkOf is the link layer and, on Ethernet, the IPv4 address that c asks for: rxe
// is Ethernet and nothing else, and qib's cards have InfiniBand. The errors say what
// to write.
func linkOf(c *deviceConfig, p hca.Provider) (hca.LinkLayer, [4]byte, error) {
	none := [4]byte{}
	link := c.Link
	if err := c.checkPort(); err != nil {
		return 0, none, err
	}
	if c.wired() {
		return hca.LinkEthernet, none, nil
	}
	if _, ok := p.(rxe.Provider); ok {
		switch link {
		case "":
			link = hca.LinkEthernet.String()
		case hca.LinkInfiniBand.String():
			return 0, none, fmt.Errorf("link %q: provider rxe has ethernet only", c.Link)
		}
	}
	switch link {
	case "", hca.LinkInfiniBand.String():
		if c.Address != "" {
			return 0, none, fmt.Errorf("address %q: only a port with link = \"ethernet\" has one", c.Address)
		}
		return hca.LinkInfiniBand, none, nil
	case hca.LinkEthernet.String():
	default:
		return 0, none, fmt.Errorf("link %q: say infiniband, ethernet, udp or vfio", c.Link)
	}
	if c.Address == "" {
		guid, err := parseGUID(c.GUID)
		return hca.LinkEthernet, defaultAddress(guid), err
	}
	a, err := netip.ParseAddr(c.Address)
	if err != nil || !a.Is4() || !usable(a) {
		return 0, none, fmt.Errorf("address %q: give one host's IPv4 address, as 169.254.1.1", c.Address)
	}
	return hca.LinkEthernet, a.As4(), nil
}

// usable: may a host have it? Not 0/8, 127/8, a group or what is reserved.
func usable(a netip.Addr) bool {
	b := a.As4()
	return b[0] != 0 && b[0] != 127 && b[0] < 224
}

// defaultAddress is the address of a device that is given none. It hangs on the GUID
// alone, so that it outlives the daemon and does not depend on who came first; link
// local (RFC 3927, without its reserved first and last 256), because the fabric is one
// segment that no route leads into or out of. Two GUIDs that give the same one cannot be
// up at once: one then needs an address of its own (devices.check).
func defaultAddress(g hca.GUID) [4]byte {
	const hosts = 254 * 256
	n := 256 + (int(g[6])<<8|int(g[7]))%hosts
	return [4]byte{169, 254, byte(n >> 8), byte(n)}
}
