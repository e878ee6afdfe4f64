package rxe_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/provider/rxe/rxetest"
	"github.com/uverbsd/uverbsd/hca/soft"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func device(t testing.TB, f *loop.Fabric, id byte) hca.Device {
	d, err := soft.New(f, soft.Config{GUID: hca.GUID{0, 2, 0xc9, 3, 7: id}, NodeDesc: "test", Mapped: true})
	check(t, err)
	t.Cleanup(func() { check(t, d.Close()) })
	return rxetest.New(d)
}

func TestDevice(t *testing.T) {
	hcatest.Run(t, func(t testing.TB) hcatest.Pair {
		f := loop.New(hca.LinkInfiniBand)
		return hcatest.Pair{A: device(t, f, 1), B: device(t, f, 2), Mapped: true}
	})
}

func TestBubbleDevice(t *testing.T) {
	hcatest.RunInBubble(t, func(t testing.TB) hcatest.Pair {
		f := loop.New(hca.LinkInfiniBand)
		return hcatest.Pair{A: device(t, f, 1), B: device(t, f, 2), Mapped: true}
	})
}
