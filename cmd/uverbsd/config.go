package main

import (
	"fmt"
	"os"

	"github.com/BurntSushi/toml"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

// config is the file that --config names. A daemon without one runs on
// defaultConfig.
type config struct {
	Log    logConfig      `toml:"log"`
	Device []deviceConfig `toml:"device"`
	// Limits bound users and contexts, over all devices; 0 is no bound.
	Limits dispatch.Limits `toml:"limits"`
	// Scheduling is how the host's processors are shared with the clients.
	Scheduling schedulingConfig `toml:"scheduling"`
	// Socket is where `uverbsd status` asks; mode 0666, it only tells.
	Socket string `toml:"socket"`
	// ControlSocket is where `uverbsd device` commands; mode 0600.
	ControlSocket string `toml:"control_socket"`
}

type logConfig struct {
	Format string `toml:"format"` // console or json
	Level  string `toml:"level"`  // debug, info, warn, error
}

// deviceConfig is one HCA.
type deviceConfig struct {
	Name string `toml:"name" json:"name"` // ibdev name; the provider's and a number if there is none
	// Provider is "rxe", whose queues clients map, "qib", which does all by write(),
	// or "auto": what the name says, or rxe where the kernel allows it.
	Provider string `toml:"provider" json:"provider"`
	GUID     string `toml:"guid" json:"guid"` // node GUID, xxxx:xxxx:xxxx:xxxx
	Mode     uint32 `toml:"mode" json:"mode"` // of the node; 0666 as the kernel's, 0660 for a closed site
	// Link is "infiniband" or "ethernet" (RoCE v2), on a fabric inside the daemon:
	// devices of one link layer reach each other. What the provider is known for if it
	// is not given. Or "udp" or "vfio", RoCE v2 to other hosts.
	Link string `toml:"link" json:"link"`
	// Address is the IPv4 address of an Ethernet port; one that hangs on the GUID if
	// there is none.
	Address string `toml:"address" json:"address"`

	// NetDev is the network interface of link "udp".
	NetDev string `toml:"netdev" json:"netdev,omitempty"`
	// PCI is the address of the NIC of link "vfio", which is bound to vfio-pci.
	PCI string `toml:"pci" json:"pci,omitempty"`
	// Addresses are those of link "vfio" with their prefixes' lengths; of link "udp"
	// those of the interface's that are used, all if there are none.
	Addresses []string `toml:"addresses" json:"addresses,omitempty"`
	// Gateways are those of link "vfio", at most one of each family.
	Gateways []string `toml:"gateways" json:"gateways,omitempty"`
	// MTU is the Ethernet MTU of link "vfio", bytes; 0 is 1500.
	MTU int `toml:"mtu" json:"mtu,omitempty"`
	// VLAN is the VLAN of link "vfio"; 0 is none.
	VLAN int `toml:"vlan" json:"vlan,omitempty"`
}

const (
	defaultSocket        = "/run/uverbsd/status.sock"
	defaultControlSocket = "/run/uverbsd/control.sock"
	// defaultMode is what ib_uverbs gives its nodes (uverbs_devnode): verbs are
	// made to be safe for unprivileged use.
	defaultMode = 0o666
)

// defaultGUID is PathScale's OUI and a number of ours, as qib's cards had.
var defaultGUID = numberedGUID(1)

// numberedGUID is the GUID of the nth device that is given none.
func numberedGUID(n int) string { return fmt.Sprintf("0011:7500:0000:%04x", n) }

func defaultConfig() config {
	return config{
		Log:           logConfig{Format: "console", Level: "info"},
		Socket:        defaultSocket,
		ControlSocket: defaultControlSocket,
		Limits:        dispatch.DefaultLimits(),
		Scheduling:    schedulingConfig{Nice: defaultNice},
		Device:        []deviceConfig{{GUID: defaultGUID, Mode: defaultMode}},
	}
}

// loadConfig reads path over the defaults; "" is the defaults alone. Unknown
// keys are errors: a typing mistake must not pass for a setting.
func loadConfig(path string) (config, error) {
	c := defaultConfig()
	if path == "" {
		return c, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	devices := c.Device
	c.Device = nil
	meta, err := toml.Decode(string(text), &c)
	if err != nil {
		return c, fmt.Errorf("configuration %s: %w", path, err)
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		return c, fmt.Errorf("configuration %s: unknown key %q", path, unknown[0])
	}
	if err := c.Scheduling.check(); err != nil {
		return c, fmt.Errorf("configuration %s: %w", path, err)
	}
	if len(c.Device) == 0 {
		c.Device = devices
	}
	for i := range c.Device {
		d := &c.Device[i]
		if d.GUID == "" && !d.wired() {
			d.GUID = numberedGUID(i + 1)
		}
		if d.Mode == 0 {
			d.Mode = defaultMode
		}
		if _, err := parseGUID(d.GUID); err != nil && d.GUID != "" {
			return c, fmt.Errorf("configuration %s: device %d %q: %w", path, i, d.Name, err)
		}
		// What this host can do is seen when the device is made.
		p, err := providerOf(d, func() error { return nil })
		if err == nil {
			_, _, err = linkOf(d, p)
		}
		if err != nil {
			return c, fmt.Errorf("configuration %s: device %d %q: %w", path, i, d.Name, err)
		}
	}
	return c, nil
}

// parseGUID reads the sysfs form of a GUID.
func parseGUID(s string) (hca.GUID, error) {
	var w [4]uint16
	var g hca.GUID
	if n, err := fmt.Sscanf(s, "%4x:%4x:%4x:%4x", &w[0], &w[1], &w[2], &w[3]); err != nil || n != 4 {
		return g, fmt.Errorf("guid %q is not of the form 0011:7500:0000:0001", s)
	}
	for i, x := range w {
		g[2*i], g[2*i+1] = byte(x>>8), byte(x)
	}
	if g.String() != s {
		return g, fmt.Errorf("guid %q is not of the form 0011:7500:0000:0001", s)
	}
	return g, nil
}

func newLogger(c logConfig) (*zap.Logger, error) {
	level, err := zapcore.ParseLevel(c.Level)
	if err != nil {
		return nil, fmt.Errorf("log level: %w", err)
	}
	var z zap.Config
	switch c.Format {
	case "json":
		z = zap.NewProductionConfig()
	case "console":
		z = zap.NewDevelopmentConfig()
		z.Development = false
		z.DisableCaller = true
		z.DisableStacktrace = true
		z.EncoderConfig.EncodeTime = zapcore.ISO8601TimeEncoder
	default:
		return nil, fmt.Errorf("log format %q: say console or json", c.Format)
	}
	z.Level = zap.NewAtomicLevelAt(level)
	z.OutputPaths, z.ErrorOutputPaths = []string{"stderr"}, []string{"stderr"}
	return z.Build()
}
