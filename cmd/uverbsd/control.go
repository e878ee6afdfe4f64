package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

const (
	// controlTimeout bounds the waiting for an order to be sent, and for one of the
	// daemon's to be read.
	controlTimeout = 5 * time.Second
	// orderTimeout bounds the waiting for an order to be carried out: a removal
	// waits for commands (dispatch, 1 s) and for others' orders.
	orderTimeout = 60 * time.Second
	// maxOrder is the longest order, bytes.
	maxOrder = 4096
)

// order is what `uverbsd device` and `uverbsd capture` send to the daemon, one to a
// connection.
type order struct {
	Do      string       `json:"do"` // add, remove or capture
	Device  deviceConfig `json:"device"`
	Capture captureOrder `json:"capture,omitzero"`
}

// outcome is the answer: what was done, or why it was not.
type outcome struct {
	Done  string `json:"done,omitempty"`
	Error string `json:"error,omitempty"`
}

// listen makes a socket at path that only who may write to a file of that mode can
// connect to. It changes the process's umask for a moment: only at start.
func listen(path string, mode os.FileMode) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	old := unix.Umask(0o777) // nobody but root, until it has its mode
	l, err := net.Listen("unix", path)
	unix.Umask(old)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, mode); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// serveControl takes orders. It has a socket of its own, and who may give orders
// is said by that file's mode, root alone, as with any other file: whom the
// administrator lets in by chown or chmod is in, where credentials of the peer
// would leave him no choice. Status stays for everybody.
func (d *daemon) serveControl(path string) error {
	l, err := listen(path, 0o600)
	if err != nil {
		return fmt.Errorf("control socket %s: %w", path, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // out of descriptors, say: it passes
				time.Sleep(acceptPause)
				continue
			}
			wg.Go(func() { d.takeOrder(ctx, c) }) // one that says nothing holds up nobody
		}
	})
	d.onStop(func() error {
		err := l.Close()
		stop()
		wg.Wait()
		return err
	})
	return nil
}

// takeOrder serves one connection. At the end of ctx it waits for no order, but
// for one that is being carried out; a capture ends.
func (d *devices) takeOrder(ctx context.Context, c net.Conn) {
	defer c.Close()
	_ = c.SetReadDeadline(time.Now().Add(controlTimeout))
	defer context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })() // long over
	var o order
	buf := make([]byte, maxOrder)
	n, err := c.Read(buf) // one write of the client's
	if err == nil {
		err = json.Unmarshal(buf[:n], &o)
	}
	var out outcome
	if err == nil && o.Do == "capture" {
		d.capture(ctx, c, o)
		return
	}
	if err != nil {
		out.Error = fmt.Sprintf("order not understood: %v", err)
	} else {
		out = d.carryOut(o)
	}
	_ = c.SetWriteDeadline(time.Now().Add(controlTimeout))
	_ = json.NewEncoder(c).Encode(out)
}

func (d *devices) carryOut(o order) (out outcome) {
	switch o.Do {
	case "add":
		s, err := d.add(o.Device)
		if err != nil {
			return outcome{Error: err.Error()}
		}
		done := fmt.Sprintf("%s is %s, guid %s", s.entry.Name, s.path(), s.guid)
		if s.address != "" {
			done += ", address " + s.address
		}
		return outcome{Done: done}
	case "remove":
		n, err := d.remove(o.Device.Name)
		switch {
		case err != nil:
			return outcome{Error: err.Error()}
		case n > 0:
			return outcome{Done: fmt.Sprintf("%s is removed; still open: %d contexts", o.Device.Name, n)}
		}
		return outcome{Done: o.Device.Name + " is removed"}
	}
	return outcome{Error: fmt.Sprintf("unknown order %q: are daemon and command of one version?", o.Do)}
}

// dial connects to the daemon.
func dial(socket string) (net.Conn, error) {
	c, err := net.DialTimeout("unix", socket, controlTimeout)
	switch {
	case errors.Is(err, unix.EACCES):
		return nil, fmt.Errorf("no access to %s: run as root: %w", socket, err)
	case err != nil:
		return nil, fmt.Errorf("no daemon answers at %s (is `uverbsd serve` running?): %w", socket, err)
	}
	return c, nil
}

// give sends an order to the daemon and returns what it did.
func give(socket string, o order) (string, error) {
	c, err := dial(socket)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(orderTimeout))
	text, err := json.Marshal(o)
	if err != nil {
		return "", err
	}
	var out outcome
	if _, err = c.Write(text); err == nil {
		err = json.NewDecoder(c).Decode(&out)
	}
	switch {
	case err != nil:
		return "", fmt.Errorf("the daemon at %s did not say what became of it (see its log and `uverbsd status`): %w", socket, err)
	case out.Error != "":
		return "", errors.New(out.Error)
	}
	return out.Done, nil
}

// deviceCmd is what changes a running daemon's devices.
func deviceCmd() *cobra.Command {
	var socket, mode string
	var device deviceConfig
	run := func(cmd *cobra.Command, o order) error {
		done, err := give(socket, o)
		if err == nil {
			fmt.Fprintln(cmd.OutOrStdout(), done)
		}
		return err
	}
	add := &cobra.Command{
		Use:   "add NAME",
		Short: "bring up one more device",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := strconv.ParseUint(mode, 8, 32)
			if err != nil {
				return fmt.Errorf("add device %s: mode %q is not octal, as 0660", args[0], mode)
			}
			device.Name, device.Mode = args[0], uint32(m)
			return run(cmd, order{Do: "add", Device: device})
		},
	}
	add.Flags().StringVar(&device.GUID, "guid", "", "node GUID, as 0011:7500:0000:0001 (default: one that is free)")
	add.Flags().StringVar(&device.Link, "link", "", "infiniband or ethernet, inside the daemon, or to other hosts udp or vfio (default: ethernet for provider rxe, else infiniband)")
	add.Flags().StringVar(&device.Provider, "provider", autoProvider, "what clients' library takes it for: rxe, qib, or auto, by the name")
	add.Flags().StringVar(&device.Address, "address", "", "IPv4 address of an Ethernet port (default: one that hangs on the GUID)")
	add.Flags().StringVar(&device.NetDev, "netdev", "", "link udp: network interface, as eth1")
	add.Flags().StringVar(&device.PCI, "pci", "", "link vfio: NIC that is bound to vfio-pci, as 0000:00:03.0")
	add.Flags().StringSliceVar(&device.Addresses, "addresses", nil, "link vfio: addresses, as 10.0.0.1/24,fd00::1/64; link udp: those of the interface's that are used, as 10.0.0.1 (default: all)")
	add.Flags().StringSliceVar(&device.Gateways, "gateways", nil, "link vfio: at most one of each family")
	add.Flags().IntVar(&device.MTU, "mtu", 0, "link vfio: Ethernet MTU, bytes (default 1500)")
	add.Flags().IntVar(&device.VLAN, "vlan", 0, "link vfio: VLAN (default: none)")
	add.Flags().StringVar(&mode, "mode", "0666", "of the node")
	remove := &cobra.Command{
		Use:   "remove NAME",
		Short: "take a device away, also from clients that have it open",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return run(cmd, order{Do: "remove", Device: deviceConfig{Name: args[0]}})
		},
	}
	cmd := &cobra.Command{Use: "device", Short: "add and remove devices while the daemon runs"}
	cmd.PersistentFlags().StringVar(&socket, "socket", defaultControlSocket, "the daemon's control socket")
	cmd.AddCommand(add, remove)
	return cmd
}
