package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/uverbsd/uverbsd/hca/vfio/binding"
)

// The change itself is tested in hca/vfio/binding, on a sysfs that is none.
func TestRebind(t *testing.T) {
	failed := errors.New("bind: failed")
	for _, c := range []struct {
		name, pci   string
		r           binding.Result
		err         error
		out, stderr string
	}{
		{name: "moved", pci: "00:03.0", r: binding.Result{From: "virtio-pci", To: "vfio-pci"}, out: "0000:00:03.0: virtio-pci -> vfio-pci\n"},
		{name: "from none", pci: "00:03.0", r: binding.Result{To: "vfio-pci"}, out: "0000:00:03.0: no driver -> vfio-pci\n"},
		{name: "already", pci: "00:03.0", r: binding.Result{From: "vfio-pci", To: "vfio-pci"}, out: "0000:00:03.0 has vfio-pci already\n"},
		{name: "to none", pci: "00:03.0", r: binding.Result{From: "vfio-pci"}, out: "0000:00:03.0: vfio-pci -> no driver\n"},
		{name: "foreign", pci: "00:03.0", r: binding.Result{From: "e1000e", To: "vfio-pci", Foreign: []string{"0000:00:1f.2 (ahci)"}},
			out: "0000:00:03.0: e1000e -> vfio-pci\n", stderr: "uverbsd: 0000:00:03.0 cannot be used yet: the host uses others of its IOMMU group: 0000:00:1f.2 (ahci)\n"},
		{name: "fails", pci: "00:03.0", err: failed},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out, stderr bytes.Buffer
			cmd := &cobra.Command{}
			cmd.SetOut(&out)
			cmd.SetErr(&stderr)
			err := rebind(cmd, c.pci, func(addr string, force bool) (binding.Result, error) {
				c.r.Address = addr
				if !force {
					t.Error("force is lost")
				}
				return c.r, c.err
			}, true)
			if !errors.Is(err, c.err) || out.String() != c.out || stderr.String() != c.stderr {
				t.Errorf("%q, %q, %v", out.String(), stderr.String(), err)
			}
		})
	}
}

// Only what is refused before the host is looked at.
func TestBindCommands(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"bind", "eth0"}, "say it as lspci -D does"},
		{[]string{"unbind", "../.."}, "say it as lspci -D does"},
		{[]string{"bind"}, "accepts 1 arg"},
		{[]string{"unbind", "00:03.0", "00:04.0"}, "accepts 1 arg"},
	} {
		cmd := root()
		cmd.SetArgs(c.args)
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: error %v", c.args, err)
		}
	}
	for _, name := range []string{"bind", "unbind"} {
		var out bytes.Buffer
		cmd := root()
		cmd.SetOut(&out)
		cmd.SetArgs([]string{name, "--help"})
		if err := cmd.Execute(); err != nil || !strings.Contains(out.String(), "--force") || !strings.Contains(out.String(), "lspci -D") {
			t.Errorf("%s: %v\n%s", name, err, out.String())
		}
	}
}

func TestLoopbackAddresses(t *testing.T) {
	up, addrs, err := interfaces{}.Addresses("lo")
	if err != nil || up && len(addrs) == 0 {
		t.Errorf("up %v, %v, %v", up, addrs, err)
	}
	if _, _, err := (interfaces{}).Addresses("no-such-if"); err == nil {
		t.Error("addresses of none")
	}
}
