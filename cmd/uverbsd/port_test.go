package main

import (
	"strings"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/provider/qib"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/rocetest"
)

// TestPortKeys: which keys a port may have.
func TestPortKeys(t *testing.T) {
	ok := deviceConfig{Link: linkVFIO, PCI: "0000:00:03.0", Addresses: []string{"10.0.0.1/24", "fd00::1/64"}, Gateways: []string{"10.0.0.2", "fd00::2"}, MTU: 9000, VLAN: 7}
	with := func(f func(*deviceConfig)) deviceConfig { c := ok; f(&c); return c }
	for name, c := range map[string]struct {
		in   deviceConfig
		want string
	}{
		"vfio":             {ok, ""},
		"udp":              {deviceConfig{Link: linkUDP, NetDev: "eth1"}, ""},
		"udp by address":   {deviceConfig{Link: linkUDP, Addresses: []string{"10.0.0.1"}}, ""},
		"inside":           {deviceConfig{Link: "ethernet", Address: "10.0.0.1"}, ""},
		"no PCI":           {with(func(c *deviceConfig) { c.PCI = "" }), "say which NIC"},
		"no addresses":     {with(func(c *deviceConfig) { c.Addresses = nil }), "give the port addresses"},
		"no prefix":        {with(func(c *deviceConfig) { c.Addresses = []string{"10.0.0.1"} }), "10.0.0.1/24"},
		"two gateways":     {with(func(c *deviceConfig) { c.Gateways = []string{"10.0.0.2", "10.0.0.3"} }), "second of its family"},
		"no gateway":       {with(func(c *deviceConfig) { c.Gateways = []string{"router"} }), "is no address"},
		"interface":        {with(func(c *deviceConfig) { c.NetDev = "eth1" }), "netdev"},
		"one address":      {with(func(c *deviceConfig) { c.Address = "10.0.0.1" }), "has a list"},
		"udp, a prefix":    {deviceConfig{Link: linkUDP, Addresses: []string{"10.0.0.1/24"}}, "of the form 10.0.0.1"},
		"udp of nothing":   {deviceConfig{Link: linkUDP}, "say which interface"},
		"udp with an MTU":  {deviceConfig{Link: linkUDP, NetDev: "eth1", MTU: 9000}, "mtu"},
		"udp with a PCI":   {deviceConfig{Link: linkUDP, NetDev: "eth1", PCI: "0000:00:03.0"}, "pci"},
		"inside, PCI":      {deviceConfig{Link: "ethernet", PCI: "0000:00:03.0"}, "pci"},
		"inside, list":     {deviceConfig{Link: "ethernet", Addresses: []string{"10.0.0.1"}}, "addresses"},
		"inside, gateways": {deviceConfig{Gateways: []string{"10.0.0.1"}}, "gateways"},
	} {
		_, _, err := linkOf(&c.in, qib.Provider{})
		switch {
		case c.want == "" && err != nil, c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n")):
			t.Errorf("%s: %v, want one line with %q", name, err, c.want)
		}
	}
}

// TestWiredDevice adds a device whose port reaches others, takes its NIC away, and
// gives it back.
func TestWiredDevice(t *testing.T) {
	d, h := newTestDevices(t)
	links := make(chan *rocetest.Link, 1)
	h.link = func() (roce.Link, error) {
		select {
		case l := <-links:
			return l, nil
		default:
			return nil, errFake
		}
	}
	c := deviceConfig{Name: "qib0", Link: linkUDP, NetDev: "eth1"}
	if _, err := d.add(c); err == nil {
		t.Fatal("a device without its link")
	}
	l, other := rocetest.NewPair(rocetest.Config{GIDs: [][]hca.GID{{{0xfe, 0x80, 15: 9}, hca.IPv4GID([4]byte{10, 0, 0, 1})}, {{0xfe, 0x80, 15: 8}}}})
	t.Cleanup(func() { _ = other.Close() })
	links <- l
	s, err := d.add(c)
	if err != nil {
		t.Fatal(err)
	}
	if s.guid != "0000:0000:0000:0009" || s.address != "fe80::9, 10.0.0.1" {
		t.Errorf("guid %s, address %s", s.guid, s.address)
	}
	again, spare := rocetest.NewPair(rocetest.Config{})
	t.Cleanup(func() { _ = spare.Close() })
	links <- again
	l.Break()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if n := d.find("qib0"); n != nil && n != s {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the device did not come back")
		}
	}
	// One that is waited for can be removed.
	again.Break()
	for deadline := time.Now().Add(20 * time.Second); d.find("qib0") != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the device did not go")
		}
	}
	if _, err := d.remove("qib0"); err != nil {
		t.Error(err)
	}
	if d.isAbsent("qib0") {
		t.Error("it is still waited for")
	}
}
