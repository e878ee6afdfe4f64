// Package binding takes an Ethernet PCI function from its kernel driver and gives it to
// vfio-pci, and back, through sysfs (Documentation/ABI/testing/sysfs-bus-pci). It also
// answers what hca/vfio asks of sysfs: which driver and which IOMMU group a function
// has.
//
// Who may call it: cmd/uverbsd for its commands bind and unbind, hca/vfio for names.
// It holds no lock and no state but what is in sysfs; two changes of one function at
// once are the kernel's to order.
package binding

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// VFIODriver is the kernel driver that lends functions to processes.
const VFIODriver = "vfio-pci"

// noIOMMUGroup is what the kernel names a group that it made up where there is no
// IOMMU (drivers/vfio/group.c, vfio_noiommu_group_alloc).
const noIOMMUGroup = "vfio-noiommu"

// ErrBusy is wrapped by what Bind says where --force would help.
var ErrBusy = errors.New("the host uses it")

// Network tells which addresses a network interface has.
type Network interface {
	// Addresses says whether the interface is up, and what addresses it carries.
	Addresses(netdev string) (up bool, addrs []netip.Prefix, err error)
}

// Tree is a host's sysfs and procfs. The zero value with a Network is this host's.
type Tree struct {
	// Root is where /sys, /proc and /dev are; "" is /.
	Root string
	// Net is asked for addresses; only Bind needs it.
	Net Network
	// Load loads a kernel module; nil: what is not loaded is an error.
	Load func(module string) error

	// write writes to a file of sysfs; nil: the real one.
	write func(path, data string) error
}

// address matches a full PCI address: domain, bus, device, function.
var address = regexp.MustCompile(`^([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]$`)

// ParseAddress gives the full form, 0000:00:03.0, of a PCI address that may lack its
// domain and be in capitals.
func ParseAddress(s string) (string, error) {
	a := strings.ToLower(s)
	if !address.MatchString(a) {
		return "", fmt.Errorf("PCI address %q: say it as lspci -D does, like 0000:00:03.0 or 00:03.0", s)
	}
	if strings.Count(a, ":") == 1 {
		a = "0000:" + a
	}
	return a, nil
}

func (t *Tree) path(elem ...string) string {
	return filepath.Join(append([]string{"/", t.Root}, elem...)...)
}

func (t *Tree) device(addr string, elem ...string) string {
	return t.path(append([]string{"sys/bus/pci/devices", addr}, elem...)...)
}

// Exists says whether the host has that function.
func (t *Tree) Exists(addr string) bool {
	_, err := os.Stat(t.device(addr))
	return err == nil
}

// Driver is the kernel driver that a function is bound to, "" if none.
func (t *Tree) Driver(addr string) string { return t.link(t.device(addr, "driver")) }

// link is the last element of where a symbolic link leads, "" if it is none.
func (t *Tree) link(path string) string {
	to, err := os.Readlink(path)
	if err != nil {
		return ""
	}
	return filepath.Base(to)
}

// Group is a function's IOMMU group.
type Group struct {
	// Number is as in /sys/kernel/iommu_groups and /dev/vfio; "" if there is no IOMMU.
	Number string
	// NoIOMMU is set for a group that isolates nothing.
	NoIOMMU bool
}

// Group is the IOMMU group of a function.
func (t *Tree) Group(addr string) Group {
	g := Group{Number: t.link(t.device(addr, "iommu_group"))}
	name, _ := os.ReadFile(t.device(addr, "iommu_group/name"))
	g.NoIOMMU = strings.TrimSpace(string(name)) == noIOMMUGroup
	return g
}

// transparent are drivers that do no DMA of their own for the host, so that they may
// keep their place in a group that a process has (driver_managed_dma).
var transparent = []string{"", VFIODriver, "pci-stub", "pcieport"}

// Foreign lists the other devices in a function's group whose drivers keep the group
// from being lent out, as "0000:00:1f.2 (ahci)".
func (t *Tree) Foreign(addr string) []string {
	entries, _ := os.ReadDir(t.device(addr, "iommu_group/devices"))
	var l []string
	for _, e := range entries {
		d := t.link(t.device(addr, "iommu_group/devices", e.Name(), "driver"))
		if e.Name() != addr && !slices.Contains(transparent, d) {
			l = append(l, fmt.Sprintf("%s (%s)", e.Name(), d))
		}
	}
	return l
}
