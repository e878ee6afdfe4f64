package sysfs

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

const (
	ibClass    = "infiniband"
	verbsClass = "infiniband_verbs"
)

// classes are the names that we add to /sys/class. Left out on purpose:
//
//   - infiniband_mad: there is no umad device. Without the class libibumad says
//     "is ib_umad module loaded?"; ibstat and ibv_* do not need it.
//   - class/misc/rdma_cm: there is no rdma_cm device either.
//   - uevent, subsystem, power in our directories: with a uevent file udev would
//     take them for kernel devices, and NCCL asks device/subsystem whether it is
//     a PCI device (it is not: NCCL then attaches it to the first CPU).
//   - hw_counters: the kernel has them only for drivers that name some, and
//     hca.Device names none.
var classes = [...]string{ibClass, verbsClass}

// item is a name in a directory: a file (show), a directory (dir) or a link.
type item struct {
	name string
	show func() (string, error)
	dir  dir
	link string
}

// dir is a directory's content, asked anew at each look-up.
type dir interface {
	list() []item
	find(name string) (item, bool)
}

// items is a directory of a few names.
type items func() []item

func (f items) list() []item { return f() }

func (f items) find(name string) (item, bool) {
	for _, it := range f() {
		if it.name == name {
			return it, true
		}
	}
	return item{}, false
}

// table is a directory of files 0 … len-1.
type table struct {
	len  func() int
	show func(i int) (string, error)
}

func (t table) list() []item {
	l := make([]item, t.len())
	for i := range l {
		l[i] = t.item(i)
	}
	return l
}

func (t table) find(name string) (item, bool) {
	i, err := strconv.Atoi(name)
	if err != nil || i < 0 || i >= t.len() || strconv.Itoa(i) != name {
		return item{}, false
	}
	return t.item(i), true
}

func (t table) item(i int) item {
	return item{name: strconv.Itoa(i), show: func() (string, error) { return t.show(i) }}
}

func text(name, s string) item {
	return item{name: name, show: func() (string, error) { return s, nil }}
}

// ibDir is class/infiniband/DEV.
func (d *device) ibDir() []item {
	line := func(name string, f func(a *hca.DeviceAttr) string) item {
		return item{name: name, show: func() (string, error) {
			return d.use(func(dev hca.Device) (string, error) { return f(dev.Attr()), nil })
		}}
	}
	a := d.attr()
	l := []item{
		text("node_type", "1: CA\n"),
		line("node_guid", func(a *hca.DeviceAttr) string { return a.NodeGUID.String() + "\n" }),
		line("sys_image_guid", func(a *hca.DeviceAttr) string { return a.SysImageGUID.String() + "\n" }),
		line("node_desc", func(a *hca.DeviceAttr) string { return fmt.Sprintf("%.64s\n", a.NodeDesc) }),
		line("fw_ver", func(a *hca.DeviceAttr) string { return fwVer(a.FWVer) }),
		line("hw_rev", func(a *hca.DeviceAttr) string { return fmt.Sprintf("%x\n", a.HWVer) }),
		{name: "device", dir: items(d.deviceDir)},
		{name: "ports", dir: items(func() []item {
			var l []item
			for p := 1; p <= int(d.attr().PhysPortCnt); p++ {
				l = append(l, item{name: strconv.Itoa(p), dir: items(func() []item { return d.portDir(uint8(p)) })})
			}
			return l
		})},
	}
	// Not every driver has these; readers know how to do without.
	if s := strings.TrimRight(d.entry.Provider.HCAType(), "\n"); s != "" {
		l = append(l, text("hca_type", s+"\n"))
	}
	if a.BoardID != "" {
		l = append(l, line("board_id", func(a *hca.DeviceAttr) string { return a.BoardID + "\n" }))
	}
	return l
}

// verbsDir is class/infiniband_verbs/uverbsN.
func (d *device) verbsDir() []item {
	return []item{
		text("ibdev", d.entry.Name+"\n"),
		text("dev", fmt.Sprintf("%d:%d\n", unix.Major(d.entry.Node), unix.Minor(d.entry.Node))),
		text("abi_version", fmt.Sprintf("%d\n", d.entry.Provider.ABIVersion())),
		{name: "device", dir: items(d.deviceDir)},
	}
}

// deviceDir is what the kernel's "device" link leads to. It is a directory and
// no link: we cannot add to /sys/devices, and a link to a made-up PCI address
// would make readers of its last component (UCX, NCCL, hwloc) look that
// address up and find nothing, or another device. Without one they fall back
// to "no known place", which is true; libibverbs, perftest and UCX read the
// files in it, and those do not care. (NCCL overwrites the path's last
// character to merge the ports of one card; it finds no such thing, and goes on.)
func (d *device) deviceDir() []item {
	pci := d.entry.Provider.PCI()
	l := []item{
		text("numa_node", "-1\n"),
		{name: "local_cpus", show: cpuMask},
		{name: "local_cpulist", show: cpuList},
		{name: ibClass, dir: items(func() []item {
			return []item{{name: d.entry.Name, link: "../../../../" + ibClass + "/" + d.entry.Name}}
		})},
		{name: verbsClass, dir: items(func() []item {
			n := d.entry.UverbsName()
			return []item{{name: n, link: "../../../../" + verbsClass + "/" + n}}
		})},
	}
	if pci != (hca.PCIID{}) {
		l = append(l,
			text("vendor", fmt.Sprintf("0x%04x\n", pci.Vendor)),
			text("device", fmt.Sprintf("0x%04x\n", pci.Device)),
			text("subsystem_vendor", fmt.Sprintf("0x%04x\n", pci.SubVendor)),
			text("subsystem_device", fmt.Sprintf("0x%04x\n", pci.SubDevice)),
			text("class", fmt.Sprintf("0x%06x\n", pci.Class)),
			text("revision", fmt.Sprintf("0x%02x\n", pci.Revision)),
			text("modalias", modalias(pci)))
	}
	if devs := d.netDevs(); len(devs) > 0 {
		l = append(l, item{name: "net", dir: items(func() []item {
			var l []item
			for _, n := range d.netDevs() {
				l = append(l, item{name: n, link: "../../../../net/" + n})
			}
			return l
		})})
	}
	return l
}

// netDevs are the interfaces behind the device's ports.
func (d *device) netDevs() []string {
	var l []string
	for p := 1; p <= int(d.attr().PhysPortCnt); p++ {
		if n := d.port(uint8(p)).NetDev; haveNetDev(n) && !slices.Contains(l, n) {
			l = append(l, n)
		}
	}
	return l
}

// portDir is class/infiniband/DEV/ports/P.
func (d *device) portDir(p uint8) []item {
	line := func(name string, f func(a *hca.PortAttr) (string, error)) item {
		return item{name: name, show: func() (string, error) {
			return d.use(func(dev hca.Device) (string, error) {
				a, err := dev.Port(p)
				if err != nil {
					return "", err
				}
				return f(&a)
			})
		}}
	}
	plain := func(name, format string, f func(a *hca.PortAttr) any) item {
		return line(name, func(a *hca.PortAttr) (string, error) { return fmt.Sprintf(format, f(a)), nil })
	}
	entries := func(len func() int, f func(hca.Device, uint8, int) (string, error)) dir {
		return table{len, func(i int) (string, error) {
			return d.use(func(dev hca.Device) (string, error) { return f(dev, p, i) })
		}}
	}
	gids := func() int { return int(d.port(p).GIDTableLen) }
	pkeys := func() int { return int(d.port(p).PKeyTableLen) }
	return []item{
		plain("state", "%s", func(a *hca.PortAttr) any { return state(a.State) }),
		plain("phys_state", "%s", func(a *hca.PortAttr) any { return physState(a.PhysState) }),
		line("rate", func(a *hca.PortAttr) (string, error) { return rate(a.ActiveSpeed, a.ActiveWidth) }),
		plain("link_layer", "%s", func(a *hca.PortAttr) any { return linkLayer(a.LinkLayer) }),
		plain("lid", "0x%x\n", func(a *hca.PortAttr) any { return a.LID }),
		plain("lid_mask_count", "%d\n", func(a *hca.PortAttr) any { return a.LMC }),
		plain("sm_lid", "0x%x\n", func(a *hca.PortAttr) any { return a.SMLID }),
		plain("sm_sl", "%d\n", func(a *hca.PortAttr) any { return a.SMSL }),
		plain("cap_mask", "0x%08x\n", func(a *hca.PortAttr) any { return a.PortCapFlags }),
		{name: "gids", dir: entries(gids, gid)},
		{name: "gid_attrs", dir: items(func() []item {
			return []item{{name: "types", dir: entries(gids, gidType)}, {name: "ndevs", dir: entries(gids, gidNdev)}}
		})},
		{name: "pkeys", dir: entries(pkeys, pkey)},
		// Present even when empty: node_exporter fails as a whole without it.
		{name: "counters", dir: items(func() []item { return d.counterItems(p) })},
	}
}

func (d *device) counterItems(p uint8) []item {
	var l []item
	for name := range d.counters(p) {
		l = append(l, item{name: name, show: func() (string, error) {
			return d.use(func(dev hca.Device) (string, error) {
				c, err := dev.Counters(p)
				if err != nil {
					return "", err
				}
				v, ok := c[name]
				if !ok {
					return "", unix.ENODEV
				}
				return fmt.Sprintf("%d\n", v), nil
			})
		}})
	}
	slices.SortFunc(l, func(a, b item) int { return strings.Compare(a.name, b.name) })
	return l
}
