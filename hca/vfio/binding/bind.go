package binding

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// classEthernet is the class code 0x0200xx of an Ethernet controller (PCI Code and ID
// Assignment 1.11, base class 02h, sub-class 00h), without its programming interface.
const classEthernet = 0x0200

// maxUppers bounds how many interfaces on top of each other are looked at.
const maxUppers = 256

// none is what is written to driver_override to have none.
const none = "\n"

// Result is what a change has done.
type Result struct {
	Address string
	// From and To are the drivers before and after, "" for none.
	From, To string
	// Foreign are the devices that keep the group from being used: see Tree.Foreign.
	Foreign []string
}

// Bind gives a function to vfio-pci. It is refused with ErrBusy, unless force is set,
// while the host sends through it: its interface, or one on top of that, is up and has
// addresses, or is the way of a default route. If a step fails, those before it are
// undone. A function that vfio-pci has already is left so.
func (t *Tree) Bind(addr string, force bool) (Result, error) {
	r := Result{Address: addr}
	if !t.Exists(addr) {
		return r, fmt.Errorf("bind %s: there is no such PCI device: see lspci -D", addr)
	}
	class, err := t.class(addr)
	if err != nil {
		return r, fmt.Errorf("bind %s: %w", addr, err)
	}
	if class>>8 != classEthernet {
		return r, fmt.Errorf("bind %s: class is 0x%06x: only Ethernet controllers, 0x0200xx, are bound", addr, class)
	}
	switch g := t.Group(addr); {
	case g.NoIOMMU:
		return r, fmt.Errorf("bind %s: group %s is without an IOMMU: switch vfio's enable_unsafe_noiommu_mode off and boot with intel_iommu=on", addr, g.Number)
	case g.Number == "":
		return r, fmt.Errorf("bind %s: no IOMMU: enable VT-d or AMD-Vi in the firmware, and on Intel boot with intel_iommu=on", addr)
	}
	r.From = t.Driver(addr)
	if r.From == VFIODriver {
		r.To, r.Foreign = VFIODriver, t.Foreign(addr)
		return r, nil
	}
	if !force {
		if err := t.idle(addr); err != nil {
			return r, fmt.Errorf("bind %s: %w", addr, err)
		}
	}
	if err := t.loaded(VFIODriver); err != nil {
		return r, fmt.Errorf("bind %s: %w", addr, err)
	}
	if err := t.move(addr, r.From, VFIODriver+"\n"); err != nil {
		err = fmt.Errorf("bind %s: %w", addr, err)
		if e := t.back(addr, r.From); e != nil {
			err = fmt.Errorf("%w; and it has not gone back to driver %s: %w", err, r.From, e)
		}
		return r, err
	}
	r.To, r.Foreign = VFIODriver, t.Foreign(addr)
	return r, nil
}

// Unbind gives a function that vfio-pci has back to the kernel's own driver. While a
// process holds it, that is refused with ErrBusy; with force the kernel asks that
// process for it, and Unbind waits for as long as that takes.
func (t *Tree) Unbind(addr string, force bool) (Result, error) {
	r := Result{Address: addr, From: t.Driver(addr)}
	if !t.Exists(addr) {
		return r, fmt.Errorf("unbind %s: there is no such PCI device: see lspci -D", addr)
	}
	if r.From != VFIODriver && (r.From != "" || t.override(addr) != VFIODriver) {
		have := "no driver"
		if r.From != "" {
			have = "driver " + r.From
		}
		return r, fmt.Errorf("unbind %s: it has %s, not %s: nothing is to be done", addr, have, VFIODriver)
	}
	if users := t.holders(t.Group(addr).Number); len(users) > 0 && !force {
		return r, fmt.Errorf("unbind %s: %w: %s has its group open: remove the device there, or say --force to have the kernel ask for it and wait",
			addr, ErrBusy, strings.Join(users, ", "))
	}
	if err := t.back(addr, ""); err != nil {
		return r, fmt.Errorf("unbind %s: %w", addr, err)
	}
	r.To = t.Driver(addr)
	return r, nil
}

// move takes the function from a driver and has the bus look for another, under a new
// override; after it, the function is with vfio-pci, or there is an error.
func (t *Tree) move(addr, from, override string) error {
	if err := t.put(t.device(addr, "driver_override"), override); err != nil {
		return err
	}
	if from != "" {
		if err := t.put(t.path("sys/bus/pci/drivers", from, "unbind"), addr); err != nil {
			return err
		}
	}
	err := t.put(t.path("sys/bus/pci/drivers_probe"), addr)
	if d := t.Driver(addr); d != VFIODriver {
		return also(fmt.Errorf("driver is %q after the probe, not %s: see dmesg", d, VFIODriver), err)
	}
	return nil
}

// back undoes move; want is the driver that has to be there after it, "" for any but
// vfio-pci.
func (t *Tree) back(addr, want string) error {
	if err := t.put(t.device(addr, "driver_override"), none); err != nil {
		return err
	}
	if t.Driver(addr) == VFIODriver {
		if err := t.put(t.path("sys/bus/pci/drivers", VFIODriver, "unbind"), addr); err != nil {
			return err
		}
	}
	if want != "" && t.Driver(addr) == want {
		return nil
	}
	err := t.put(t.path("sys/bus/pci/drivers_probe"), addr)
	switch d := t.Driver(addr); {
	case d == VFIODriver:
		return fmt.Errorf("%s has taken it again: is it told to, by the modules' option ids= or new_id", VFIODriver)
	case want != "" && d != want:
		return also(fmt.Errorf("driver is %q after the probe: see dmesg", d), err)
	case d == "" && err != nil:
		return err
	}
	return nil
}

// idle says ErrBusy if the host uses the function.
func (t *Tree) idle(addr string) error {
	routes := t.defaultRoutes()
	for _, dev := range t.netdevs(addr) {
		for _, d := range t.stack(dev) {
			on := d
			if d != dev {
				on = d + " on " + dev
			}
			if slices.Contains(routes, d) {
				return fmt.Errorf("%w: the default route goes through %s: --force cuts it", ErrBusy, on)
			}
			up, addrs, err := t.Net.Addresses(d)
			if err != nil {
				return fmt.Errorf("ask for addresses of %s: %w", d, err)
			}
			if up && len(addrs) > 0 {
				l := make([]string, len(addrs))
				for i, a := range addrs {
					l[i] = a.String()
				}
				return fmt.Errorf("%w: interface %s is up and has %s: take it down (ip link set %s down), or say --force",
					ErrBusy, on, strings.Join(l, ", "), d)
			}
		}
	}
	return nil
}

// netdevs are the network interfaces of a function. They may be below a device that the
// function's driver has made, as virtio's are.
func (t *Tree) netdevs(addr string) (l []string) {
	own, err := filepath.EvalSymlinks(t.device(addr))
	if err != nil {
		return nil
	}
	entries, _ := os.ReadDir(t.path("sys/class/net"))
	for _, e := range entries {
		dev, err := filepath.EvalSymlinks(t.path("sys/class/net", e.Name(), "device"))
		if err == nil && (dev == own || strings.HasPrefix(dev, own+"/")) {
			l = append(l, e.Name())
		}
	}
	return l
}

// stack is an interface with all that are on top of it: bridges, bonds, VLANs.
func (t *Tree) stack(netdev string) []string {
	l := []string{netdev}
	for i := 0; i < len(l) && len(l) < maxUppers; i++ {
		entries, _ := os.ReadDir(t.path("sys/class/net", l[i]))
		for _, e := range entries {
			if d, ok := strings.CutPrefix(e.Name(), "upper_"); ok && !slices.Contains(l, d) {
				l = append(l, d)
			}
		}
	}
	return l
}

// rejectRoute is RTF_REJECT of linux/route.h: such a route leads nowhere.
const rejectRoute = 0x0200

// defaultRoutes are the interfaces of default routes (net/ipv4/fib_trie.c
// fib_route_seq_show, net/ipv6/route.c rt6_info_route).
func (t *Tree) defaultRoutes() (l []string) {
	add := func(netdev, flags string) {
		if f, err := strconv.ParseUint(flags, 16, 64); err == nil && f&rejectRoute == 0 && !slices.Contains(l, netdev) {
			l = append(l, netdev)
		}
	}
	const zeros4, zeros6 = "00000000", "00000000000000000000000000000000"
	v4, _ := os.ReadFile(t.path("proc/net/route"))
	for line := range strings.Lines(string(v4)) {
		if f := strings.Fields(line); len(f) >= 8 && f[1] == zeros4 && f[7] == zeros4 {
			add(f[0], f[3])
		}
	}
	v6, _ := os.ReadFile(t.path("proc/net/ipv6_route"))
	for line := range strings.Lines(string(v6)) {
		if f := strings.Fields(line); len(f) >= 10 && f[0] == zeros6 && f[1] == "00" {
			add(f[9], f[8])
		}
	}
	return l
}

// holders are the processes that have a group open, as "process 12 (uverbsd)".
func (t *Tree) holders(group string) (l []string) {
	if group == "" {
		return nil
	}
	links, _ := filepath.Glob(t.path("proc/[0-9]*/fd/*"))
	for _, link := range links {
		to, err := os.Readlink(link)
		if err != nil || to != "/dev/vfio/"+group {
			continue
		}
		dir := filepath.Dir(filepath.Dir(link))
		comm, _ := os.ReadFile(filepath.Join(dir, "comm"))
		s := fmt.Sprintf("process %s (%s)", filepath.Base(dir), strings.TrimSpace(string(comm)))
		if !slices.Contains(l, s) {
			l = append(l, s)
		}
	}
	return l
}

func (t *Tree) class(addr string) (uint64, error) {
	b, err := os.ReadFile(t.device(addr, "class"))
	if err != nil {
		return 0, fmt.Errorf("read its class: %w", err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 0, 32)
	if err != nil {
		return 0, fmt.Errorf("read its class: %w", err)
	}
	return n, nil
}

func (t *Tree) override(addr string) string {
	b, _ := os.ReadFile(t.device(addr, "driver_override"))
	return strings.TrimSpace(string(b))
}

// loaded makes sure that a PCI driver is there.
func (t *Tree) loaded(driver string) error {
	there := func() bool {
		_, err := os.Stat(t.path("sys/bus/pci/drivers", driver))
		return err == nil
	}
	if there() {
		return nil
	}
	if t.Load != nil {
		if err := t.Load(driver); err != nil {
			return fmt.Errorf("load %s: %w", driver, err)
		}
	}
	if !there() {
		return fmt.Errorf("driver %s is not loaded: run modprobe %s", driver, driver)
	}
	return nil
}

// put writes to a file of sysfs, which must be there.
func (t *Tree) put(path, data string) error {
	if t.write != nil {
		return t.write(path, data)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(data)
	return also(err, f.Close())
}

// also is two errors on one line; either may be nil.
func also(a, b error) error {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return fmt.Errorf("%w; %w", a, b)
}
