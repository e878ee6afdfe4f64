package soft_test

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/roce/rocetest"
	"github.com/uverbsd/uverbsd/hca/soft"
)

// wired is two devices on fabrics of their own, with a network between them.
func wired(t testing.TB, cfg rocetest.Config) (hcatest.Pair, [2]*rocetest.Link) {
	if cfg.MTU == 0 {
		cfg.MTU = 4096
	}
	a, b := rocetest.NewPair(cfg)
	return hcatest.Pair{A: wiredDevice(t, a, 1), B: wiredDevice(t, b, 2)}, [2]*rocetest.Link{a, b}
}

func wiredDevice(t testing.TB, l *rocetest.Link, id byte) *soft.Device {
	d, err := soft.New(loop.New(hca.LinkEthernet), soft.Config{GUID: hca.GUID{0, 2, 0xc9, 3, 7: id}, NodeDesc: "test", Mapped: true, Link: l})
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

// TestWire is the suite between two hosts.
func TestWire(t *testing.T) {
	hcatest.RunWire(t, func(t testing.TB) hcatest.Pair {
		p, _ := wired(t, rocetest.Config{})
		return p
	})
}

// TestWireLoses is the suite's data path over a network that loses, duplicates,
// reorders, corrupts and marks packets.
func TestWireLoses(t *testing.T) {
	for seed := range uint64(2) {
		hcatest.RunLossy(t, func(t testing.TB) hcatest.Pair {
			p, _ := wired(t, rocetest.Config{Seed: seed, Faults: rocetest.Faults{Loss: 0.02, Duplicate: 0.02, Reorder: 0.02, Corrupt: 0.02, Mark: 0.1}})
			return p
		})
	}
}
