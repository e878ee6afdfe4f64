package vfio

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// Everything is given back, in reverse, whatever happened.
func TestOpenAndClose(t *testing.T) {
	r := newRig(t)
	d := r.device("00:03.0")
	if d.Name() != pci0 || d.Vectors() != 3 {
		t.Errorf("name %s, %d vectors", d.Name(), d.Vectors())
	}
	if c := r.k.command(); c&commandMemory == 0 || c&commandMaster != 0 {
		t.Errorf("command %#x: memory is to be on, bus mastering off", c)
	}
	if err := d.BusMaster(true); err != nil || r.k.command()&commandMaster == 0 {
		t.Errorf("command %#x, %v", r.k.command(), err)
	}
	if _, err := d.Map(0); err != nil {
		t.Error(err)
	}
	if _, err := d.Alloc(1); err != nil {
		t.Error(err)
	}
	if _, err := d.Interrupts(1); err != nil {
		t.Error(err)
	}
	r.k.log = nil
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	want := []string{"pread", "pwrite", "SET_IRQS 2", "close eventfd", "SET_IRQS 4", "unmap", "UNMAP_DMA", "unmap",
		"close " + pci0, "UNSET_CONTAINER", "close /dev/vfio/7", "close /dev/vfio/vfio"}
	if !slices.Equal(r.k.log, want) {
		t.Errorf("close did %q, want %q", r.k.log, want)
	}
	if r.k.command()&commandMaster != 0 {
		t.Error("bus mastering is still on")
	}
	if err := d.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestGroupIsShared(t *testing.T) {
	r := newRig(t)
	a, b, c := r.device(pci0), r.device(pci1), r.device(pci2)
	if a.group != b.group || a.group == c.group {
		t.Error("groups are not shared as sysfs says")
	}
	if _, err := r.open(pci0); !errors.Is(err, unix.EBUSY) {
		t.Errorf("second open: %v", err)
	}
	x, err := a.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	y, err := b.Alloc(4096)
	if err != nil || x.IOVA == y.IOVA {
		t.Errorf("both at %#x, %v", x.IOVA, err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if len(r.k.mappings) != 1 || slices.Contains(r.k.log, "UNSET_CONTAINER") {
		t.Error("the first close took what is the second's")
	}
	if z, err := b.Alloc(4096); err != nil || z.IOVA != x.IOVA {
		t.Errorf("address %#x is not given out again: %#x, %v", x.IOVA, z.IOVA, err)
	}
	r.device(pci0)
}

func TestOpenErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		pci  string
		set  func(*rig)
		want string
		is   error
	}{
		{name: "no address", pci: "eth0", want: "say it as lspci -D does"},
		{name: "no device", pci: "0000:00:09.0", want: "no such PCI device", is: unix.ENODEV},
		{name: "kernel's driver", set: func(r *rig) { r.function(pci0, "7", "virtio-pci") }, want: "bound to virtio-pci, not to vfio-pci: run: uverbsd bind " + pci0, is: unix.EBUSY},
		{name: "no driver", set: func(r *rig) { r.function(pci0, "7", "") }, want: "run: uverbsd bind " + pci0},
		{name: "no IOMMU", set: func(r *rig) { r.function(pci0, "", "vfio-pci") }, want: "boot with intel_iommu=on"},
		{name: "noiommu", set: func(r *rig) {
			if err := os.WriteFile(filepath.Join(r.root, "sys/kernel/iommu_groups/7/name"), []byte("vfio-noiommu\n"), 0o644); err != nil {
				r.t.Fatal(err)
			}
		}, want: "without an IOMMU (noiommu)", is: unix.EPERM},
		{name: "no VFIO", set: func(r *rig) { r.k.fail["open /dev/vfio/vfio"] = unix.ENOENT }, want: "no /dev/vfio/vfio: run modprobe vfio-pci", is: unix.ENOENT},
		{name: "not root", set: func(r *rig) { r.k.fail["open /dev/vfio/vfio"] = unix.EACCES }, want: "run this as root"},
		{name: "VFIO fails", set: func(r *rig) { r.k.fail["open /dev/vfio/vfio"] = unix.EMFILE }, want: "open /dev/vfio/vfio", is: unix.EMFILE},
		{name: "API", set: func(r *rig) { r.k.api = 1 }, want: "API version 1, not 0"},
		{name: "API fails", set: func(r *rig) { r.k.fail["GET_API_VERSION"] = unix.ENOTTY }, is: unix.ENOTTY},
		{name: "no type 1", set: func(r *rig) { r.k.extension = 0 }, want: "modprobe vfio_iommu_type1"},
		{name: "no group", set: func(r *rig) { r.k.fail["open /dev/vfio/7"] = unix.ENOENT }, want: "no /dev/vfio/7"},
		{name: "group taken", set: func(r *rig) { r.k.fail["open /dev/vfio/7"] = unix.EBUSY }, want: "another process has group 7", is: unix.EBUSY},
		{name: "group forbidden", set: func(r *rig) { r.k.fail["open /dev/vfio/7"] = unix.EPERM }, want: "give it the node"},
		{name: "group fails", set: func(r *rig) { r.k.fail["open /dev/vfio/7"] = unix.EMFILE }, is: unix.EMFILE},
		{name: "no status", set: func(r *rig) { r.k.fail["GET_STATUS"] = unix.EFAULT }, want: "state of group 7"},
		{name: "not viable", set: func(r *rig) { r.k.viable = false; r.function(pci1, "7", "e1000e") }, want: "group 7 is not viable: the host uses " + pci1 + " (e1000e)", is: unix.EPERM},
		{name: "not viable any more", set: func(r *rig) { r.k.fail["SET_CONTAINER"] = unix.EPERM }, want: "not viable: the host uses a device in it"},
		{name: "no container", set: func(r *rig) { r.k.fail["SET_CONTAINER"] = unix.EINVAL }, want: "put group 7 into a container"},
		{name: "no remapping", set: func(r *rig) { r.k.fail["SET_IOMMU"] = unix.EPERM }, want: "allow_unsafe_interrupts"},
		{name: "no set IOMMU", set: func(r *rig) { r.k.fail["SET_IOMMU"] = unix.ENODEV }, want: "set the IOMMU of group 7"},
		{name: "no IOMMU info", set: func(r *rig) { r.k.fail["IOMMU_GET_INFO"] = unix.EINVAL }, want: "ask for the IOMMU"},
		{name: "not in group", set: func(r *rig) { r.k.fail["GET_DEVICE_FD"] = unix.ENODEV }, want: "group 7 has it not"},
		{name: "no device fd", set: func(r *rig) { r.k.fail["GET_DEVICE_FD"] = unix.EIO }, want: "take it out of group 7"},
		{name: "no device info", set: func(r *rig) { r.k.fail["DEVICE_GET_INFO"] = unix.EINVAL }, want: "ask what it is"},
		{name: "no PCI", set: func(r *rig) { r.k.info.Flags = 0 }, want: "no PCI device"},
		{name: "few regions", set: func(r *rig) { r.k.info.NumRegions = 7 }, want: "7 regions"},
		{name: "no region info", set: func(r *rig) { r.k.fail["GET_REGION_INFO"] = unix.EINVAL }, want: "configuration space"},
		{name: "no irq info", set: func(r *rig) { r.k.fail["GET_IRQ_INFO"] = unix.EINVAL }, want: "MSI-X interrupts"},
		{name: "no config", set: func(r *rig) { r.k.fail["pread"] = unix.EFAULT }, is: unix.EFAULT},
		{name: "no eventfd", set: func(r *rig) { r.k.fail["eventfd"] = unix.EMFILE }, is: unix.EMFILE},
		{name: "no request irq", set: func(r *rig) { r.k.fail["SET_IRQS 4"] = unix.EINVAL }, want: "request interrupt"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			if c.set != nil {
				c.set(r)
			}
			pci := c.pci
			if pci == "" {
				pci = pci0
			}
			d, err := r.open(pci)
			if err == nil {
				_ = d.Close()
				t.Fatal("opened")
			}
			if s := err.Error(); !strings.Contains(s, c.want) || strings.Contains(s, "\n") {
				t.Errorf("error %q, want %q in one line", s, c.want)
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("error %v is not %v", err, c.is)
			}
		})
	}
}

// Close goes on after a step that fails, and says so.
func TestCloseFails(t *testing.T) {
	for _, c := range []struct {
		call string
		err  error
		want string
	}{
		{"pwrite", unix.EFAULT, "switch bus mastering off"},
		{"SET_IRQS 2", unix.EINVAL, "switch interrupts off"},
		{"UNSET_CONTAINER", unix.EBUSY, "close the group"},
		{"close " + pci0, unix.EIO, "close the device"},
		{"pread", unix.ENODEV, ""}, // gone: nothing to complain of
		{"SET_IRQS 2", unix.ENODEV, ""},
	} {
		r := newRig(t)
		d := r.device(pci0)
		if _, err := d.Interrupts(2); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Alloc(4096); err != nil {
			t.Fatal(err)
		}
		r.k.fail[c.call] = c.err
		err := d.Close()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.call, err, c.want)
		}
		if len(r.k.fds) != 0 || len(r.groups) != 0 {
			t.Errorf("%s: left open: %v", c.call, r.k.fds)
		}
		clear(r.k.triggers) // the device's close does it
	}
}

// A mapping that stays keeps its memory and its address from everybody else.
func TestUnmapFails(t *testing.T) {
	r := newRig(t)
	a, b := r.device(pci0), r.device(pci1)
	m, err := a.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	r.k.fail["UNMAP_DMA"] = unix.EINVAL
	if err := a.Close(); err == nil || !strings.Contains(err.Error(), "unmap DMA") {
		t.Errorf("error %v", err)
	}
	delete(r.k.fail, "UNMAP_DMA")
	if len(r.k.memory) != 1 {
		t.Error("memory was freed under the device")
	}
	if n, err := b.Alloc(4096); err != nil || n.IOVA == m.IOVA {
		t.Errorf("got %#x again, %v", n.IOVA, err)
	}
	if err := r.k.unmap(m.Mem); err != nil {
		t.Error(err)
	}
	delete(r.k.mappings, m.IOVA)
}

// The error paths of Open in this process, where there is no such device.
func TestOpenHere(t *testing.T) {
	if _, err := Open("ffff:ff:1f.7"); !errors.Is(err, unix.ENODEV) {
		t.Errorf("error %v", err)
	}
	var k linux
	if _, err := k.open("/dev/vfio/none"); err == nil {
		t.Error("opened")
	}
	if _, err := k.ioctl(-1, abi.VfioDeviceGetInfo, make([]byte, 32)); err != unix.EBADF {
		t.Error(err)
	}
	if _, err := k.call(-1, abi.VfioDeviceReset, 0); err != unix.EBADF {
		t.Error(err)
	}
	if _, err := k.pread(-1, make([]byte, 1), 0); err != unix.EBADF {
		t.Error(err)
	}
	if _, err := k.pwrite(-1, make([]byte, 1), 0); err != unix.EBADF {
		t.Error(err)
	}
	if _, err := k.memlock(); err != nil {
		t.Error(err)
	}
}
