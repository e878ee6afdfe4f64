package soft_test

import (
	"errors"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func device(t testing.TB, f *loop.Fabric, id byte) *soft.Device {
	cfg := soft.Config{GUID: hca.GUID{0, 2, 0xc9, 3, 7: id}, NodeDesc: "test", Mapped: true}
	if f.Link() == hca.LinkEthernet {
		cfg.Address = [4]byte{192, 0, 2, id}
	}
	d, err := soft.New(f, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func TestOneDevice(t *testing.T) {
	hcatest.Run(t, func(t testing.TB) hcatest.Pair {
		d := device(t, loop.New(hca.LinkInfiniBand), 1)
		return hcatest.Pair{A: d, B: d}
	})
}

func TestTwoDevices(t *testing.T) {
	hcatest.Run(t, func(t testing.TB) hcatest.Pair {
		f := loop.New(hca.LinkInfiniBand)
		return hcatest.Pair{A: device(t, f, 1), B: device(t, f, 2)}
	})
}

func TestEthernetDevice(t *testing.T) {
	hcatest.RunEthernet(t, func(t testing.TB) hcatest.Pair {
		f := loop.New(hca.LinkEthernet)
		return hcatest.Pair{A: device(t, f, 1), B: device(t, f, 2)}
	})
}

// What New refuses, and what it makes of an Ethernet port without an address.
func TestNew(t *testing.T) {
	ib, eth := loop.New(hca.LinkInfiniBand), loop.New(hca.LinkEthernet)
	guid := func(n byte) hca.GUID { return hca.GUID{7: n} }
	bare, err := soft.New(eth, soft.Config{GUID: guid(1)})
	if err != nil {
		t.Fatal(err)
	}
	defer bare.Close()
	if g, err := bare.GID(1, 1); err != nil || g != (hca.GID{}) {
		t.Errorf("GID 1 without an address: %v, %v", g, err)
	}
	full, err := soft.New(eth, soft.Config{GUID: guid(2), Address: [4]byte{10, 0, 0, 2}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		fabric *loop.Fabric
		cfg    soft.Config
		want   error
	}{
		{"same GUID", eth, soft.Config{GUID: guid(1)}, unix.EEXIST},
		{"same address", eth, soft.Config{GUID: guid(3), Address: [4]byte{10, 0, 0, 2}}, unix.EEXIST},
		{"address on InfiniBand", ib, soft.Config{GUID: guid(4), Address: [4]byte{10, 0, 0, 4}}, unix.EINVAL},
		{"over a limit", ib, soft.Config{GUID: guid(5), MaxQP: 1 << 30}, unix.EINVAL},
	} {
		if d, err := soft.New(c.fabric, c.cfg); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v", c.name, d, err)
		}
	}
	// What a device had is free once it has gone.
	if err := full.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := soft.New(eth, soft.Config{GUID: guid(3), Address: [4]byte{10, 0, 0, 2}})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
}
