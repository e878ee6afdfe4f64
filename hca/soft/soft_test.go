package soft_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func device(t testing.TB, f *loop.Fabric, id byte) *soft.Device {
	d, err := soft.New(f, soft.Config{GUID: hca.GUID{0, 2, 0xc9, 3, 7: id}, NodeDesc: "test"})
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
		d := device(t, loop.New(), 1)
		return hcatest.Pair{A: d, B: d}
	})
}

func TestTwoDevices(t *testing.T) {
	hcatest.Run(t, func(t testing.TB) hcatest.Pair {
		f := loop.New()
		return hcatest.Pair{A: device(t, f, 1), B: device(t, f, 2)}
	})
}
