package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/e1000e"
	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/ether"
	"github.com/uverbsd/uverbsd/hca/udp"
	"github.com/uverbsd/uverbsd/hca/vfio"
	"github.com/uverbsd/uverbsd/hca/virtionet"
)

// Values of deviceConfig.Link whose ports reach other hosts. Their link layer is
// Ethernet.
const (
	linkUDP  = "udp"  // over the host's own IP stack
	linkVFIO = "vfio" // a NIC that the daemon drives itself
)

// reviveTick is how often the daemon looks for a device whose NIC has gone.
const reviveTick = time.Second

// wired: does c's port reach other hosts?
func (c *deviceConfig) wired() bool { return c.Link == linkUDP || c.Link == linkVFIO }

// checkPort refuses keys that do not go together. The errors say what to write.
func (c *deviceConfig) checkPort() error {
	only := func(key, link string, set bool) error {
		if set && c.Link != link {
			return fmt.Errorf("%s: only a port with link = %q has it", key, link)
		}
		return nil
	}
	if err := errors.Join(
		only("pci", linkVFIO, c.PCI != ""), only("mtu", linkVFIO, c.MTU != 0), only("vlan", linkVFIO, c.VLAN != 0),
		only("gateways", linkVFIO, len(c.Gateways) > 0), only("netdev", linkUDP, c.NetDev != ""),
	); err != nil {
		return err
	}
	switch {
	case !c.wired() && len(c.Addresses) > 0:
		return fmt.Errorf("addresses: only a port with link = %q or %q has them", linkUDP, linkVFIO)
	case c.wired() && c.Address != "":
		return fmt.Errorf("address %q: a port with link = %q has a list, addresses = [\"10.0.0.1/24\"]", c.Address, c.Link)
	case c.Link == linkVFIO && c.PCI == "":
		return fmt.Errorf("link %q: say which NIC, as pci = \"0000:00:03.0\"", c.Link)
	case c.Link == linkVFIO && len(c.Addresses) == 0:
		return fmt.Errorf("link %q: give the port addresses, as addresses = [\"10.0.0.1/24\"]", c.Link)
	case c.Link == linkUDP && c.NetDev == "" && len(c.Addresses) == 0:
		return fmt.Errorf("link %q: say which interface, as netdev = \"eth1\"", c.Link)
	}
	_, err := c.etherConfig()
	return err
}

// etherConfig is what c says of its port's place in a network.
func (c *deviceConfig) etherConfig() (ether.Config, error) {
	e := ether.Config{MTU: c.MTU, VLAN: c.VLAN}
	for _, s := range c.Addresses {
		p, err := netip.ParsePrefix(s)
		if c.Link == linkUDP { // its prefix is the interface's
			var a netip.Addr
			if a, err = netip.ParseAddr(s); err == nil {
				p = netip.PrefixFrom(a, a.BitLen())
			}
		}
		if err != nil {
			want := "10.0.0.1/24"
			if c.Link == linkUDP {
				want = "10.0.0.1"
			}
			return e, fmt.Errorf("addresses: %q is not of the form %s", s, want)
		}
		e.Addresses = append(e.Addresses, p)
	}
	for _, s := range c.Gateways {
		a, err := netip.ParseAddr(s)
		switch {
		case err != nil:
			return e, fmt.Errorf("gateways: %q is no address", s)
		case a.Is4() && !e.Gateway4.IsValid():
			e.Gateway4 = a
		case a.Is6() && !e.Gateway6.IsValid():
			e.Gateway6 = a
		default:
			return e, fmt.Errorf("gateways: %q is the second of its family", s)
		}
	}
	return e, nil
}

// openLink makes the link of a wired port.
func (kernelHost) openLink(c *deviceConfig) (roce.Link, error) {
	e, err := c.etherConfig()
	if err != nil {
		return nil, err
	}
	if c.Link == linkUDP {
		cfg := udp.Config{NetDev: c.NetDev}
		for _, p := range e.Addresses {
			cfg.Addrs = append(cfg.Addrs, p.Addr())
		}
		return udp.New(cfg)
	}
	fn, err := vfio.Open(c.PCI)
	if err != nil {
		return nil, err
	}
	port, err := openPort(fn, c.MTU)
	if err != nil {
		return nil, fmt.Errorf("NIC %s: %w", fn.Name(), err)
	}
	l, err := ether.New(port, e)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("NIC %s: %w", fn.Name(), err), port.Close())
	}
	return l, nil
}

// nicDriver is a driver by what it drives. On an error fn is closed.
var nicDrivers = map[uint32]func(fn nic.Function, mtu int) (nic.Port, error){
	0x1af4<<16 | 0x1000: openVirtio, // transitional
	0x1af4<<16 | 0x1041: openVirtio,
	0x8086<<16 | 0x10d3: func(fn nic.Function, mtu int) (nic.Port, error) {
		p, err := e1000e.Open(fn, e1000e.Options{MTU: mtu})
		if err != nil {
			return nil, errors.Join(err, fn.Close())
		}
		return p, nil
	},
}

func openVirtio(fn nic.Function, mtu int) (nic.Port, error) {
	p, err := virtionet.Open(fn, virtionet.Options{MTU: mtu})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// openPort finds the driver for a function. On an error fn is closed.
func openPort(fn nic.Function, mtu int) (nic.Port, error) {
	var id [4]byte // PCI 3.0 §6.2.1: vendor, device
	if err := fn.ReadConfig(0, id[:]); err != nil {
		return nil, errors.Join(err, fn.Close())
	}
	vendor, device := binary.LittleEndian.Uint16(id[:]), binary.LittleEndian.Uint16(id[2:])
	open := nicDrivers[uint32(vendor)<<16|uint32(device)]
	if open == nil {
		return nil, errors.Join(fmt.Errorf("no driver for %04x:%04x: there are those for virtio-net and 82574L (e1000e)", vendor, device), fn.Close())
	}
	return open(fn, mtu)
}

// linkGUID is the GUID that goes with a link: its link-local address's interface
// identifier, as of rxe's devices (addrconf_addr_eui48); false if it has none.
func linkGUID(l roce.Link) (hca.GUID, bool) {
	for _, g := range l.State().GIDs {
		if g[0] == 0xfe && g[1] == 0x80 {
			return hca.GUID(g[8:]), true
		}
	}
	return hca.GUID{}, false
}

// linkAddresses are a link's, for people.
func linkAddresses(l roce.Link) string {
	var s []string
	for _, g := range l.State().GIDs {
		s = append(s, netip.AddrFrom16(g).Unmap().String())
	}
	return strings.Join(s, ", ")
}

// whenGone starts gone, unless the daemon is stopping.
func (d *devices) whenGone(s *servedDevice, c deviceConfig) {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-d.stopping:
	default:
		d.watchers.Go(func() { d.gone(s, c) })
	}
}

// gone takes a device away whose link says that what it stands on is gone, and
// brings it back when that is.
func (d *devices) gone(s *servedDevice, c deviceConfig) {
	d.log.Warn("the device's port is gone", zap.String("device", c.Name), zap.String("link", c.Link))
	d.change.Lock()
	if d.stopped || d.find(c.Name) != s {
		d.change.Unlock()
		return
	}
	if err := d.takeDown(s); err != nil {
		d.log.Warn("device of a port that is gone", zap.String("device", c.Name), zap.Error(err))
	}
	d.absent = append(d.absent, c.Name)
	d.change.Unlock()
	t := time.NewTicker(reviveTick)
	defer t.Stop()
	for {
		select {
		case <-d.stopping:
			return
		case <-t.C:
		}
		if !d.isAbsent(c.Name) { // removed, or added by hand
			return
		}
		again, err := d.add(c)
		if err == nil {
			d.log.Info("the device's port is back", zap.String("device", again.entry.Name))
			return
		}
		d.log.Debug("still gone", zap.Error(err))
	}
}

// isAbsent: does somebody wait for the device of that name?
func (d *devices) isAbsent(name string) bool {
	d.change.Lock()
	defer d.change.Unlock()
	return slices.Contains(d.absent, name)
}
