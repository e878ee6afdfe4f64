package sysfs

import (
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// fakeDevice is a device with one port.
type fakeDevice struct {
	attr  hca.DeviceAttr
	port  hca.PortAttr
	gids  []hca.GID
	pkeys []uint16

	count   atomic.Uint64 // port_xmit_data; each Counters call adds step
	calls   atomic.Int64  // methods running
	dead    atomic.Bool   // set when no method may run any more
	late    atomic.Int64  // methods that ran although dead
	step    atomic.Uint64
	slow    atomic.Bool // Port says so on entered and waits for leave
	entered chan struct{}
	leave   chan struct{}
}

func (f *fakeDevice) enter() func() {
	f.calls.Add(1)
	if f.dead.Load() {
		f.late.Add(1)
	}
	return func() { f.calls.Add(-1) }
}

func (f *fakeDevice) Ops() hca.OpSet { return 0 }

func (f *fakeDevice) Attr() *hca.DeviceAttr { defer f.enter()(); return &f.attr }

func (f *fakeDevice) Port(p uint8) (hca.PortAttr, error) {
	defer f.enter()()
	if f.slow.Load() {
		f.entered <- struct{}{}
		<-f.leave
	}
	if p != 1 {
		return hca.PortAttr{}, fmt.Errorf("port %d: %w", p, unix.EINVAL)
	}
	return f.port, nil
}

func (f *fakeDevice) GID(p uint8, i int) (hca.GID, error) {
	defer f.enter()()
	if i >= f.attr.GIDTableLen {
		return hca.GID{}, fmt.Errorf("gid %d: %w", i, unix.EINVAL)
	}
	if i >= len(f.gids) {
		return hca.GID{}, nil
	}
	return f.gids[i], nil
}

func (f *fakeDevice) PKey(p uint8, i int) (uint16, error) {
	defer f.enter()()
	if i >= len(f.pkeys) {
		return 0, fmt.Errorf("pkey %d: %w", i, unix.EINVAL)
	}
	return f.pkeys[i], nil
}

func (f *fakeDevice) Counters(uint8) (map[string]uint64, error) {
	defer f.enter()()
	return map[string]uint64{"port_xmit_data": 100 + f.count.Add(f.step.Load()), "port_rcv_data": 1<<64 - 1, "symbol_error": 0}, nil
}

func (f *fakeDevice) AllocUContext(hca.Notifier) (hca.UContext, error) { return nil, unix.EOPNOTSUPP }
func (f *fakeDevice) AllocXRCD() (hca.XRCD, error)                     { return nil, unix.EOPNOTSUPP }

type fakeProvider struct {
	name, hcaType string
	abi           int
	pci           hca.PCIID
}

func (p fakeProvider) Name() string     { return p.name }
func (p fakeProvider) ABIVersion() int  { return p.abi }
func (p fakeProvider) PCI() hca.PCIID   { return p.pci }
func (p fakeProvider) HCAType() string  { return p.hcaType }
func (p fakeProvider) MapsQueues() bool { return p.abi == 2 }

func qibDevice() *fakeDevice {
	return &fakeDevice{
		entered: make(chan struct{}), leave: make(chan struct{}),
		attr: hca.DeviceAttr{
			FWVer: 1<<32 | 22<<16 | 333, NodeGUID: hca.GUID{0, 0x11, 0x75, 0, 0, 0, 0, 1},
			SysImageGUID: hca.GUID{0, 0x11, 0x75, 0, 0, 0, 0, 2}, NodeDesc: "host qib0", BoardID: "InfiniPath_QLE7342",
			HWVer: 0x2a, PhysPortCnt: 1, GIDTableLen: 3, PKeyTableLen: 2,
		},
		port: hca.PortAttr{
			PortCapFlags: 0x2010868, GIDTableLen: 3, PKeyTableLen: 2, LID: 0x1b, SMLID: 1, State: 4, LMC: 2, SMSL: 3,
			ActiveWidth: 2, ActiveSpeed: 32, PhysState: 5, LinkLayer: hca.LinkInfiniBand,
		},
		gids:  []hca.GID{{0xfe, 0x80, 7: 0, 8: 0, 9: 0x11, 10: 0x75, 15: 1}},
		pkeys: []uint16{0xffff, 0},
	}
}

func qibEntry() *hca.Entry {
	return &hca.Entry{Name: "qib0", Index: 0, Device: qibDevice(), Node: unix.Mkdev(231, 192), Provider: fakeProvider{
		name: "qib", hcaType: "InfiniPath_QLE7342\n", abi: 1,
		pci: hca.PCIID{Vendor: 0x1077, Device: 0x7322, SubVendor: 0x1077, SubDevice: 0x7322, Class: 0x0c0600, Revision: 2},
	}}
}

func rxeEntry() *hca.Entry {
	d := qibDevice()
	d.attr.BoardID = ""
	d.port.LinkLayer, d.port.NetDev = hca.LinkEthernet, "lo"
	d.port.ActiveWidth, d.port.ActiveSpeed = 1, 1
	d.gids = append(d.gids, hca.GID{10: 0xff, 11: 0xff, 12: 127, 15: 1})
	return &hca.Entry{Name: "rxe0", Index: 7, Device: d, Node: unix.Mkdev(240, 7), Provider: fakeProvider{name: "rxe", abi: 2}}
}

// ethernetEntry is a qib whose port is Ethernet, with no interface of the host behind it.
func ethernetEntry() *hca.Entry {
	e := qibEntry()
	d := e.Device.(*fakeDevice)
	d.port.LinkLayer, d.port.LID, d.port.SMLID, d.port.PortCapFlags = hca.LinkEthernet, 0, 0, 1<<16
	d.gids = append(d.gids, hca.IPv4GID([4]byte{169, 254, 1, 1}))
	return e
}
