package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/provider/qib"
)

func TestLoadConfig(t *testing.T) {
	for _, c := range []struct{ name, text, fails string }{
		{"empty", "", ""},
		{"all", "socket = \"/run/s\"\ncontrol_socket = \"/run/c\"\n[log]\nformat = \"json\"\nlevel = \"debug\"\n[[device]]\nname = \"qib7\"\nguid = \"0011:7500:0000:00ff\"\nmode = 0o660\n", ""},
		{"unknown key", "sokket = 1\n", "sokket"},
		{"unknown key in a device", "[[device]]\nnmae = \"x\"\n", "nmae"},
		{"InfiniBand", "[[device]]\nlink = \"infiniband\"\n", ""},
		{"Ethernet", "[[device]]\nlink = \"ethernet\"\n", ""},
		{"Ethernet with an address", "[[device]]\nlink = \"ethernet\"\naddress = \"10.1.2.3\"\n", ""},
		{"no such link", "[[device]]\nlink = \"Ethernet\"\n", "link \"Ethernet\": say infiniband, ethernet, udp or vfio"},
		{"link of no name", "[[device]]\nlink = 2\n", "link"},
		{"address of InfiniBand", "[[device]]\nname = \"qib0\"\naddress = \"10.1.2.3\"\n", "only a port with link = \"ethernet\" has one"},
		{"rxe", "[[device]]\nprovider = \"rxe\"\naddress = \"10.1.2.3\"\n", ""},
		{"rxe on InfiniBand", "[[device]]\nprovider = \"rxe\"\nlink = \"infiniband\"\n", "provider rxe has ethernet only"},
		{"rxe of another name", "[[device]]\nprovider = \"rxe\"\nname = \"qib0\"\n", "choose another name for provider rxe"},
		{"qib of rxe's name", "[[device]]\nprovider = \"qib\"\nname = \"rxe0\"\n", "choose another name for provider qib"},
		{"no such provider", "[[device]]\nprovider = \"mlx5\"\n", "say auto, rxe or qib"},
		{"bad guid", "[[device]]\nguid = \"11:22\"\n", "guid"},
		{"not TOML", "= =", "configuration"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "c.toml")
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := loadConfig(path)
			if c.fails != "" {
				if err == nil || !strings.Contains(err.Error(), c.fails) || strings.Contains(err.Error(), "\n") {
					t.Fatalf("error %v, want one line with %q", err, c.fails)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if len(got.Device) != 1 || got.Device[0].Mode == 0 || got.Device[0].GUID == "" {
				t.Fatalf("%+v", got)
			}
			if _, err := newLogger(got.Log); err != nil {
				t.Fatal(err)
			}
		})
	}
	if _, err := loadConfig("/nonexistent"); err == nil {
		t.Fatal("a missing file passes")
	}
}

func TestGUID(t *testing.T) {
	g, err := parseGUID(defaultGUID)
	if err != nil || g.String() != defaultGUID {
		t.Fatalf("%v, %v", g, err)
	}
	for _, s := range []string{"", "1:2:3:4", "0011:7500:0000", "0011:7500:0000:0001x", "zzzz:0000:0000:0000"} {
		if _, err := parseGUID(s); err == nil {
			t.Errorf("%q passes", s)
		}
	}
}

func TestLinkOf(t *testing.T) {
	for _, c := range []struct {
		name string
		in   deviceConfig
		link hca.LinkLayer // 0: refused
		addr [4]byte
	}{
		{"none", deviceConfig{GUID: defaultGUID}, hca.LinkInfiniBand, [4]byte{}},
		{"InfiniBand", deviceConfig{Link: "infiniband", GUID: defaultGUID}, hca.LinkInfiniBand, [4]byte{}},
		{"the first GUID", deviceConfig{Link: "ethernet", GUID: numberedGUID(1)}, hca.LinkEthernet, [4]byte{169, 254, 1, 1}},
		{"the last GUID", deviceConfig{Link: "ethernet", GUID: numberedGUID(0xffff)}, hca.LinkEthernet, [4]byte{169, 254, 2, 255}},
		{"GUID 0", deviceConfig{Link: "ethernet", GUID: numberedGUID(0)}, hca.LinkEthernet, [4]byte{169, 254, 1, 0}},
		{"the last address", deviceConfig{Link: "ethernet", GUID: numberedGUID(254*256 - 1)}, hca.LinkEthernet, [4]byte{169, 254, 254, 255}},
		{"address", deviceConfig{Link: "ethernet", Address: "192.168.7.9"}, hca.LinkEthernet, [4]byte{192, 168, 7, 9}},
		{"no link", deviceConfig{Link: "roce"}, 0, [4]byte{}},
		{"IPv6", deviceConfig{Link: "ethernet", Address: "fd00::1"}, 0, [4]byte{}},
		{"mapped", deviceConfig{Link: "ethernet", Address: "::ffff:10.0.0.1"}, 0, [4]byte{}},
		{"prefix", deviceConfig{Link: "ethernet", Address: "10.0.0.1/8"}, 0, [4]byte{}},
		{"no host", deviceConfig{Link: "ethernet", Address: "0.0.0.0"}, 0, [4]byte{}},
		{"loopback", deviceConfig{Link: "ethernet", Address: "127.0.0.1"}, 0, [4]byte{}},
		{"group", deviceConfig{Link: "ethernet", Address: "224.0.0.1"}, 0, [4]byte{}},
		{"broadcast", deviceConfig{Link: "ethernet", Address: "255.255.255.255"}, 0, [4]byte{}},
		{"address of InfiniBand", deviceConfig{Address: "10.0.0.1"}, 0, [4]byte{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			link, addr, err := linkOf(&c.in, qib.Provider{})
			if (err != nil) != (c.link == 0) || err == nil && (link != c.link || addr != c.addr) {
				t.Errorf("%v %v, %v", link, addr, err)
			}
		})
	}
}

func TestContextsWithin(t *testing.T) {
	for limit, want := range map[uint64]int{1024: 256, 1 << 15: 9557, 1 << 63: 348160, 0: 1} {
		if n := contextsWithin(limit); n != want {
			t.Errorf("limit %d: %d contexts, want %d", limit, n, want)
		}
	}
}

func TestLimits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	for text, ok := range map[string]bool{
		"[limits.user]\npd = 2\nqueue_bytes = 4096\n[limits.context]\nqueue_depth = 64\n": true,
		"[limits.user]\npds = 2\n":                   false,
		"[limits.context]\nqp = -1\n":                false,
		"[limits.context]\npinned_bytes = \"1 G\"\n": false,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := loadConfig(path)
		if (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
		if ok && (c.Limits.User.PDs != 2 || c.Limits.User.CQs != dispatch.DefaultLimits().User.CQs || c.Limits.Context.QueueDepth != 64) {
			t.Errorf("%q: %+v", text, c.Limits)
		}
	}
}
