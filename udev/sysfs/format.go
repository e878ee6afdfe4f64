package sysfs

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// The texts are those of the kernel's drivers/infiniband/core/sysfs.c (Linux
// 6.1 and 6.12 print alike).

func fwVer(v uint64) string { return fmt.Sprintf("%d.%d.%d\n", v>>32, v>>16&0xffff, v&0xffff) }

// state is state_show.
func state(s uint8) string {
	names := [...]string{"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"}
	name := "UNKNOWN"
	if int(s) < len(names) {
		name = names[s]
	}
	return fmt.Sprintf("%d: %s\n", s, name)
}

// physState is phys_state_show.
func physState(s uint8) string {
	names := [...]string{"<unknown>", "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp", "LinkErrorRecovery", "Phy Test"}
	name := names[0]
	if int(s) < len(names) {
		name = names[s]
	}
	return fmt.Sprintf("%d: %s\n", s, name)
}

// lanes is ib_width_enum_to_int.
func lanes(width uint8) int {
	switch width {
	case 1:
		return 1
	case 2:
		return 4
	case 4:
		return 8
	case 8:
		return 12
	case 16:
		return 2
	}
	return -1
}

// rate is rate_show; EINVAL for a width outside the enum.
func rate(speed, width uint8) (string, error) {
	name, deci := " SDR", 25 // tenths of Gb/s a lane; also for an invalid speed
	switch speed {
	case 2:
		name, deci = " DDR", 50
	case 4:
		name, deci = " QDR", 100
	case 8:
		name, deci = " FDR10", 100
	case 16:
		name, deci = " FDR", 140
	case 32:
		name, deci = " EDR", 250
	case 64:
		name, deci = " HDR", 500
	case 128:
		name, deci = " NDR", 1000
	}
	n := lanes(width)
	if n < 0 {
		return "", unix.EINVAL
	}
	half := ""
	if deci*n%10 != 0 {
		half = ".5"
	}
	return fmt.Sprintf("%d%s Gb/sec (%dX%s)\n", deci*n/10, half, n, name), nil
}

func linkLayer(l hca.LinkLayer) string {
	switch l {
	case hca.LinkInfiniBand:
		return "InfiniBand\n"
	case hca.LinkEthernet:
		return "Ethernet\n"
	}
	return "Unknown\n"
}

// gid is show_port_gid: an entry that is not there reads as zeros.
func gid(d hca.Device, port uint8, i int) (string, error) {
	g, err := d.GID(port, i)
	if err != nil {
		g = hca.GID{}
	}
	return g.String() + "\n", nil
}

// usedGID is what _show_port_gid_attr asks first: EINVAL for an unused entry,
// which libibverbs takes for "IB/RoCE v1" (types) and for no interface (ndevs).
func usedGID(d hca.Device, port uint8, i int) (hca.PortAttr, error) {
	if g, err := d.GID(port, i); err != nil || g == (hca.GID{}) {
		return hca.PortAttr{}, unix.EINVAL
	}
	return d.Port(port)
}

// gidType is print_gid_type. The contract has no type per GID: all that an
// Ethernet port has is RoCE v2.
func gidType(d hca.Device, port uint8, i int) (string, error) {
	p, err := usedGID(d, port, i)
	switch {
	case err != nil:
		return "", err
	case p.LinkLayer == hca.LinkEthernet:
		return "RoCE v2\n", nil
	}
	return "IB/RoCE v1\n", nil
}

// gidNdev is print_ndev. A name that is no interface any more would make
// libibverbs fail the whole query: that is no name.
func gidNdev(d hca.Device, port uint8, i int) (string, error) {
	p, err := usedGID(d, port, i)
	if err != nil {
		return "", err
	}
	if !haveNetDev(p.NetDev) {
		return "", unix.EINVAL
	}
	return p.NetDev + "\n", nil
}

func haveNetDev(name string) bool {
	if name == "" {
		return false
	}
	_, err := net.InterfaceByName(name)
	return err == nil
}

func pkey(d hca.Device, port uint8, i int) (string, error) {
	k, err := d.PKey(port, i)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("0x%04x\n", k), nil
}

// modalias is pci-sysfs.c's modalias_show; libibverbs' match tables are
// patterns for it.
func modalias(p hca.PCIID) string {
	return fmt.Sprintf("pci:v%08Xd%08Xsv%08Xsd%08Xbc%02Xsc%02Xi%02X\n",
		p.Vendor, p.Device, p.SubVendor, p.SubDevice, p.Class>>16&0xff, p.Class>>8&0xff, p.Class&0xff)
}

// cpuList is device/local_cpulist: our devices are as near to one CPU as to the next.
func cpuList() (string, error) {
	b, err := os.ReadFile("/sys/devices/system/cpu/online")
	return string(b), err
}

// cpuMask is device/local_cpus, "%*pb": groups of 32 bits, as wide as the
// possible CPUs.
func cpuMask() (string, error) {
	online, err := cpuList()
	if err != nil {
		return "", err
	}
	possible, err := os.ReadFile("/sys/devices/system/cpu/possible")
	if err != nil {
		return "", err
	}
	return formatMask(online, string(possible))
}

func formatMask(online, possible string) (string, error) {
	var mask []uint32
	width := 0
	for i, list := range []string{possible, online} {
		for _, r := range strings.Split(strings.TrimSpace(list), ",") {
			lo, hi, ok := strings.Cut(r, "-")
			if !ok {
				hi = lo
			}
			a, err1 := strconv.ParseUint(lo, 10, 16)
			b, err2 := strconv.ParseUint(hi, 10, 16)
			if err1 != nil || err2 != nil {
				return "", fmt.Errorf("CPU list %q: %w", list, unix.EINVAL)
			}
			width = max(width, int(b)+1)
			for len(mask)*32 < width {
				mask = append(mask, 0)
			}
			for ; i == 1 && a <= b; a++ {
				mask[a/32] |= 1 << (a % 32)
			}
		}
	}
	var sb strings.Builder
	for g := len(mask) - 1; g >= 0; g-- {
		digits := 8
		if g == len(mask)-1 {
			digits = (width - g*32 + 3) / 4
		} else {
			sb.WriteByte(',')
		}
		fmt.Fprintf(&sb, "%0*x", digits, mask[g])
	}
	return sb.String() + "\n", nil
}
