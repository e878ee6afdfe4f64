package binding

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const nicAddr = "0000:00:03.0"

// fake is a sysfs in a folder: files, and a kernel that acts on what is written.
type fake struct {
	*Tree
	t    testing.TB
	root string
	// native is the driver that would take the function without an override.
	native string
	// refuse makes a write to a file whose path ends so fail, once it is the nth such.
	refuse   string
	refuseAt int
	// noProbe has vfio-pci not take the function.
	noProbe bool
	// sticky has vfio-pci take it without an override too.
	sticky bool
	log    []string
	addrs  map[string][]string // of interfaces
	up     map[string]bool
}

func newFake(t testing.TB) *fake {
	f := &fake{t: t, root: t.TempDir(), native: "virtio-pci", addrs: map[string][]string{}, up: map[string]bool{}}
	f.Tree = &Tree{Root: f.root, Net: f, write: f.store}
	f.function(nicAddr, "0x020000", "7", "virtio-pci")
	f.dir("sys/bus/pci/drivers/vfio-pci")
	f.dir("proc/net")
	return f
}

func (f *fake) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *fake) dir(name string) { f.must(os.MkdirAll(filepath.Join(f.root, name), 0o755)) }

func (f *fake) file(name, data string) {
	f.dir(filepath.Dir(name))
	f.must(os.WriteFile(filepath.Join(f.root, name), []byte(data), 0o644))
}

// link makes name lead to another place in the tree.
func (f *fake) link(name, to string) {
	f.dir(filepath.Dir(name))
	_ = os.Remove(filepath.Join(f.root, name))
	f.must(os.Symlink(filepath.Join(f.root, to), filepath.Join(f.root, name)))
}

// function adds a PCI function.
func (f *fake) function(addr, class, group, driver string) {
	own := "sys/devices/pci0000:00/" + addr
	f.dir(own)
	f.link("sys/bus/pci/devices/"+addr, own)
	f.file(own+"/class", class+"\n")
	f.file(own+"/driver_override", "(null)\n")
	if group != "" {
		f.dir("sys/kernel/iommu_groups/" + group)
		f.link(own+"/iommu_group", "sys/kernel/iommu_groups/"+group)
		f.link("sys/kernel/iommu_groups/"+group+"/devices/"+addr, own)
	}
	if driver != "" {
		f.dir("sys/bus/pci/drivers/" + driver)
		f.link(own+"/driver", "sys/bus/pci/drivers/"+driver)
	}
}

// netdev adds an interface below the function, as virtio's are.
func (f *fake) netdev(name string, uppers ...string) {
	own := "sys/devices/pci0000:00/" + nicAddr + "/virtio0/net/" + name
	f.dir(own)
	f.link("sys/class/net/"+name, own)
	f.link(own+"/device", "sys/devices/pci0000:00/"+nicAddr+"/virtio0")
	for _, u := range uppers {
		f.dir("sys/devices/virtual/net/" + u)
		f.link("sys/class/net/"+u, "sys/devices/virtual/net/"+u)
		f.link(own+"/upper_"+u, "sys/devices/virtual/net/"+u)
	}
}

func (f *fake) Addresses(netdev string) (bool, []netip.Prefix, error) {
	var l []netip.Prefix
	for _, a := range f.addrs[netdev] {
		if a == "broken" {
			return false, nil, unix.ENODEV
		}
		l = append(l, netip.MustParsePrefix(a))
	}
	return f.up[netdev], l, nil
}

// store does what the kernel does on a write.
func (f *fake) store(path, data string) error {
	name, _ := strings.CutPrefix(path, f.root+"/")
	f.log = append(f.log, fmt.Sprintf("%s=%s", filepath.Base(name), strings.TrimSpace(data)))
	if f.refuse != "" && strings.HasSuffix(name, f.refuse) {
		if f.refuseAt--; f.refuseAt < 0 {
			return unix.EIO
		}
	}
	driver := f.device(nicAddr, "driver")
	switch {
	case strings.HasSuffix(name, "driver_override"):
		return os.WriteFile(path, []byte(data), 0o644)
	case strings.HasSuffix(name, "/unbind"):
		if f.Driver(data) != filepath.Base(filepath.Dir(name)) {
			return unix.ENODEV
		}
		return os.Remove(driver)
	case strings.HasSuffix(name, "drivers_probe"):
		if f.Driver(data) != "" {
			return nil
		}
		to := f.override(data)
		if to == "" || to == "(null)" {
			to = f.native
		}
		if f.sticky {
			to = VFIODriver
		}
		if to == "" || to == VFIODriver && f.noProbe {
			return unix.EINVAL
		}
		return os.Symlink(filepath.Join(f.root, "sys/bus/pci/drivers", to), driver)
	}
	return unix.ENOENT
}

func TestParseAddress(t *testing.T) {
	for in, want := range map[string]string{
		"0000:00:03.0": nicAddr, "00:03.0": nicAddr, "0001:AF:1F.7": "0001:af:1f.7", "10000:e1:00.0": "10000:e1:00.0",
		"": "", "3.0": "", "00:03": "", "00:03.8": "", "00:23.0": "", "../../etc": "", "0000:00:03.0\n": "", "eth0": "",
	} {
		got, err := ParseAddress(in)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
}

func TestBind(t *testing.T) {
	for _, c := range []struct {
		name  string
		set   func(*fake)
		force bool
		want  string // of the error, "" for none
		busy  bool
		after string // driver
		log   []string
	}{
		{name: "plain", after: VFIODriver, log: []string{"driver_override=vfio-pci", "unbind=" + nicAddr, "drivers_probe=" + nicAddr}},
		{name: "no driver before", set: func(f *fake) { f.must(os.Remove(f.device(nicAddr, "driver"))) }, after: VFIODriver,
			log: []string{"driver_override=vfio-pci", "drivers_probe=" + nicAddr}},
		{name: "already", set: func(f *fake) { f.link("sys/devices/pci0000:00/"+nicAddr+"/driver", "sys/bus/pci/drivers/vfio-pci") }, after: VFIODriver},
		{name: "down with addresses", set: func(f *fake) { f.netdev("ens3"); f.addrs["ens3"] = []string{"10.0.2.15/24"} }, after: VFIODriver},
		{name: "up without addresses", set: func(f *fake) { f.netdev("ens3"); f.up["ens3"] = true }, after: VFIODriver},
		{name: "another's addresses", set: func(f *fake) {
			f.dir("sys/devices/virtual/net/lo")
			f.link("sys/class/net/lo", "sys/devices/virtual/net/lo")
			f.up["lo"], f.addrs["lo"] = true, []string{"127.0.0.1/8"}
		}, after: VFIODriver},
		{name: "in use", set: func(f *fake) {
			f.netdev("ens3")
			f.up["ens3"], f.addrs["ens3"] = true, []string{"10.0.2.15/24", "fe80::1/64"}
		}, want: "interface ens3 is up and has 10.0.2.15/24, fe80::1/64", busy: true, after: "virtio-pci"},
		{name: "in use, forced", force: true, set: func(f *fake) {
			f.netdev("ens3")
			f.up["ens3"], f.addrs["ens3"] = true, []string{"10.0.2.15/24"}
		}, after: VFIODriver},
		{name: "bridge in use", set: func(f *fake) {
			f.netdev("ens3", "br0")
			f.up["br0"], f.addrs["br0"] = true, []string{"10.0.2.15/24"}
		}, want: "br0 on ens3", busy: true, after: "virtio-pci"},
		{name: "default route", set: func(f *fake) {
			f.netdev("ens3")
			f.file("proc/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"+
				"ens3\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\nens3\t00000000\t0202000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
		}, want: "default route goes through ens3", busy: true, after: "virtio-pci"},
		{name: "default route of IPv6", set: func(f *fake) {
			f.netdev("ens3")
			z := strings.Repeat("0", 32)
			f.file("proc/net/ipv6_route", z+" 00 "+z+" 00 fe800000000000000000000000000002 00000400 00000001 00000000 00000003     ens3\n")
		}, want: "default route goes through ens3", busy: true, after: "virtio-pci"},
		{name: "unreachable default", set: func(f *fake) {
			f.netdev("ens3")
			z := strings.Repeat("0", 32)
			f.file("proc/net/ipv6_route", z+" 00 "+z+" 00 "+z+" ffffffff 00000001 00000000 00200200     ens3\n")
		}, after: VFIODriver},
		{name: "addresses cannot be asked for", set: func(f *fake) { f.netdev("ens3"); f.addrs["ens3"] = []string{"broken"} },
			want: "ask for addresses of ens3", after: "virtio-pci"},
		{name: "no NIC", set: func(f *fake) { f.function(nicAddr, "0x010802", "7", "virtio-pci") }, want: "class is 0x010802", after: "virtio-pci"},
		{name: "wireless", set: func(f *fake) { f.function(nicAddr, "0x028000", "7", "virtio-pci") }, want: "class is 0x028000", after: "virtio-pci"},
		{name: "no class", set: func(f *fake) { f.file("sys/devices/pci0000:00/"+nicAddr+"/class", "?") }, want: "read its class", after: "virtio-pci"},
		{name: "no IOMMU", set: func(f *fake) { f.must(os.Remove(f.device(nicAddr, "iommu_group"))) }, want: "intel_iommu=on", after: "virtio-pci"},
		{name: "noiommu", set: func(f *fake) { f.file("sys/kernel/iommu_groups/7/name", "vfio-noiommu\n") }, want: "without an IOMMU", after: "virtio-pci"},
		{name: "module loaded", set: func(f *fake) {
			f.must(os.Remove(f.path("sys/bus/pci/drivers/vfio-pci")))
			f.Load = func(m string) error { f.dir("sys/bus/pci/drivers/" + m); return nil }
		}, after: VFIODriver},
		{name: "module not there", set: func(f *fake) { f.must(os.Remove(f.path("sys/bus/pci/drivers/vfio-pci"))) },
			want: "run modprobe vfio-pci", after: "virtio-pci"},
		{name: "module fails", set: func(f *fake) {
			f.must(os.Remove(f.path("sys/bus/pci/drivers/vfio-pci")))
			f.Load = func(string) error { return unix.ENOEXEC }
		}, want: "load vfio-pci", after: "virtio-pci"},
		{name: "vfio-pci refuses", set: func(f *fake) { f.noProbe = true }, want: "not vfio-pci", after: "virtio-pci",
			log: []string{"driver_override=vfio-pci", "unbind=" + nicAddr, "drivers_probe=" + nicAddr, "driver_override=", "drivers_probe=" + nicAddr}},
		{name: "no override", set: func(f *fake) { f.refuse = "driver_override" }, want: "it has not gone back", after: "virtio-pci"},
		{name: "no unbind", set: func(f *fake) { f.refuse = "unbind" }, want: "input/output error", after: "virtio-pci",
			log: []string{"driver_override=vfio-pci", "unbind=" + nicAddr, "driver_override="}},
		{name: "no probe", set: func(f *fake) { f.refuse = "drivers_probe" }, want: "it has not gone back to driver virtio-pci", after: ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t)
			if c.set != nil {
				c.set(f)
			}
			r, err := f.Bind(nicAddr, c.force)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %v", err)
			}
			if errors.Is(err, ErrBusy) != c.busy {
				t.Errorf("busy is wrong: %v", err)
			}
			if d := f.Driver(nicAddr); d != c.after {
				t.Errorf("driver %q, want %q", d, c.after)
			}
			if err == nil && r.To != VFIODriver {
				t.Errorf("result %+v", r)
			}
			if c.log != nil && !slices.Equal(f.log, c.log) {
				t.Errorf("wrote %q, want %q", f.log, c.log)
			}
		})
	}
}

func TestUnbind(t *testing.T) {
	holder := func(f *fake) {
		f.file("proc/12/comm", "uverbsd\n")
		f.dir("proc/12/fd")
		f.must(os.Symlink("/dev/vfio/7", filepath.Join(f.root, "proc/12/fd/5")))
		f.must(os.Symlink("/dev/vfio/8", filepath.Join(f.root, "proc/12/fd/6")))
	}
	for _, c := range []struct {
		name  string
		set   func(*fake)
		force bool
		want  string
		busy  bool
		after string
	}{
		{name: "plain", after: "virtio-pci"},
		{name: "no native driver", set: func(f *fake) { f.native = "" }, want: "invalid argument", after: ""},
		{name: "held", set: holder, want: "process 12 (uverbsd) has its group open", busy: true, after: VFIODriver},
		{name: "held, forced", set: holder, force: true, after: "virtio-pci"},
		{name: "taken again", set: func(f *fake) { f.sticky = true }, want: "has taken it again", after: VFIODriver},
		{name: "no override", set: func(f *fake) { f.refuse = "driver_override" }, want: "input/output error", after: VFIODriver},
		{name: "no unbind", set: func(f *fake) { f.refuse = "unbind" }, want: "input/output error", after: VFIODriver},
		{name: "override alone", set: func(f *fake) { f.must(os.Remove(f.device(nicAddr, "driver"))) }, after: "virtio-pci"},
		{name: "another driver's", set: func(f *fake) { f.function(nicAddr, "0x020000", "7", "e1000e") }, want: "it has driver e1000e", after: "e1000e"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t)
			if _, err := f.Bind(nicAddr, false); err != nil {
				t.Fatal(err)
			}
			if c.set != nil {
				c.set(f)
			}
			r, err := f.Unbind(nicAddr, c.force)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if errors.Is(err, ErrBusy) != c.busy {
				t.Errorf("busy is wrong: %v", err)
			}
			if d := f.Driver(nicAddr); d != c.after || err == nil && r.To != c.after {
				t.Errorf("driver %q, want %q; %+v", d, c.after, r)
			}
		})
	}
}

func TestNoSuchDevice(t *testing.T) {
	f := newFake(t)
	for _, change := range []func(string, bool) (Result, error){f.Bind, f.Unbind} {
		if _, err := change("0000:00:04.0", true); err == nil || !strings.Contains(err.Error(), "no such PCI device") {
			t.Errorf("error %v", err)
		}
	}
	if len(f.log) != 0 {
		t.Errorf("wrote %q", f.log)
	}
}

func TestForeign(t *testing.T) {
	f := newFake(t)
	f.function("0000:00:1f.0", "0x060100", "7", "")
	f.function("0000:00:1f.2", "0x010601", "7", "ahci")
	f.function("0000:00:1c.0", "0x060400", "7", "pcieport")
	f.function("0000:00:1d.0", "0x010601", "8", "ahci")
	r, err := f.Bind(nicAddr, false)
	if err != nil || !slices.Equal(r.Foreign, []string{"0000:00:1f.2 (ahci)"}) {
		t.Errorf("got %+v, %v", r, err)
	}
}

// The real write: it makes no file that is not there.
func TestPut(t *testing.T) {
	f := newFake(t)
	f.write = nil
	f.file("x", "")
	if err := f.put(f.path("x"), "abc"); err != nil {
		t.Error(err)
	}
	if b, _ := os.ReadFile(f.path("x")); string(b) != "abc" {
		t.Errorf("wrote %q", b)
	}
	if err := f.put(f.path("y"), "abc"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}
