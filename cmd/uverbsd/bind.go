package main

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"

	"github.com/spf13/cobra"

	"github.com/uverbsd/uverbsd/hca/vfio/binding"
)

const bindHelp = `Take an Ethernet controller from the kernel's driver and give it to vfio-pci, so that
uverbsd can drive it. PCI is its address as lspci -D prints it, 0000:00:03.0; the domain
may be left out.

The host loses the network interface. So this is refused, unless --force is given, while
the interface, or a bridge, bond or VLAN on top of it, is up and has addresses, or has
the default route. What was done is undone if a later step fails. The choice does not
outlive a reboot: run the command before uverbsd is started, as by ExecStartPre=.

The machine needs an IOMMU that is on (VT-d: boot with intel_iommu=on), and all
other devices of the controller's IOMMU group must be without a kernel driver, or be
bound too; those that are not are named.`

const unbindHelp = `Take an Ethernet controller from vfio-pci and have the kernel look for its own driver
again. PCI is its address as lspci -D prints it; the domain may be left out.

This is refused while a process, as uverbsd, has the controller's IOMMU group open. With
--force the kernel asks that process to give it back, and the command waits until it has;
it cannot be interrupted then.`

func bindCmd() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "bind PCI",
		Short: "give an Ethernet controller to vfio-pci, for uverbsd to drive",
		Long:  bindHelp,
		Example: `  uverbsd bind 0000:00:03.0
  uverbsd bind 00:03.0 --force`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return rebind(cmd, args[0], hostTree().Bind, force)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "also if the host uses its interface")
	return cmd
}

func unbindCmd() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:     "unbind PCI",
		Short:   "give an Ethernet controller back to the kernel's driver",
		Long:    unbindHelp,
		Example: `  uverbsd unbind 0000:00:03.0`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return rebind(cmd, args[0], hostTree().Unbind, force)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "also if a process has it: ask for it, and wait")
	return cmd
}

// rebind changes the driver and prints what has become of it.
func rebind(cmd *cobra.Command, pci string, change func(string, bool) (binding.Result, error), force bool) error {
	addr, err := binding.ParseAddress(pci)
	if err != nil {
		return err
	}
	r, err := change(addr, force)
	if err != nil {
		return err
	}
	name := func(driver string) string {
		if driver == "" {
			return "no driver"
		}
		return driver
	}
	if r.From == r.To {
		fmt.Fprintf(cmd.OutOrStdout(), "%s has %s already\n", r.Address, name(r.To))
	} else {
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %s -> %s\n", r.Address, name(r.From), name(r.To))
	}
	if len(r.Foreign) > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "uverbsd: %s cannot be used yet: the host uses others of its IOMMU group: %s\n", r.Address, strings.Join(r.Foreign, ", "))
	}
	return nil
}

func hostTree() *binding.Tree { return &binding.Tree{Net: interfaces{}, Load: loadModule} }

// loadModule loads a kernel module by the host's own program.
func loadModule(module string) error {
	out, err := exec.Command("modprobe", module).CombinedOutput()
	if err != nil {
		return fmt.Errorf("modprobe %s: %w: %s", module, err, strings.Join(strings.Fields(string(out)), " "))
	}
	return nil
}

// interfaces are the host's, as a binding.Network.
type interfaces struct{}

func (interfaces) Addresses(netdev string) (bool, []netip.Prefix, error) {
	i, err := net.InterfaceByName(netdev)
	if err != nil {
		return false, nil, err
	}
	addrs, err := i.Addrs()
	if err != nil {
		return false, nil, err
	}
	var l []netip.Prefix
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			l = append(l, p)
		}
	}
	return i.Flags&net.FlagUp != 0, l, nil
}
