package soft_test

import (
	"fmt"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
)

// churn is how one kind of object is made.
var churn = []struct {
	name  string
	limit func(*hca.DeviceAttr) uint32
	mk    func(pd hca.PD, c hca.UContext, cq hca.CQ, m hca.Memory) (closer, error)
}{
	{"MR", func(a *hca.DeviceAttr) uint32 { return a.MaxMR }, func(pd hca.PD, _ hca.UContext, _ hca.CQ, m hca.Memory) (closer, error) {
		return pd.RegMR(hca.MRInit{Mem: m, Start: flatBase, Length: 64, IOVA: flatBase})
	}},
	{"MW", func(a *hca.DeviceAttr) uint32 { return a.MaxMW }, func(pd hca.PD, _ hca.UContext, _ hca.CQ, _ hca.Memory) (closer, error) {
		return pd.AllocMW(hca.MWType1)
	}},
	{"CQ", func(a *hca.DeviceAttr) uint32 { return a.MaxCQ }, func(_ hca.PD, c hca.UContext, _ hca.CQ, _ hca.Memory) (closer, error) {
		return c.CreateCQ(hca.CQInit{Entries: 4})
	}},
	{"QP", func(a *hca.DeviceAttr) uint32 { return a.MaxQP }, func(pd hca.PD, _ hca.UContext, cq hca.CQ, _ hca.Memory) (closer, error) {
		return pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: cq, RecvCQ: cq,
			Cap: hca.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1}})
	}},
	{"PD", func(a *hca.DeviceAttr) uint32 { return a.MaxPD }, func(_ hca.PD, c hca.UContext, _ hca.CQ, _ hca.Memory) (closer, error) {
		return c.AllocPD()
	}},
}

// BenchmarkObjectChurn makes and closes an object while others live: the cost
// must not depend on how many.
func BenchmarkObjectChurn(b *testing.B) {
	for _, c := range churn {
		for _, want := range []int{10, 10000, 100000} {
			b.Run(fmt.Sprintf("%s/live=%d", c.name, want), func(b *testing.B) {
				d := device(b, loop.New(hca.LinkInfiniBand), 1)
				ctx, err := d.AllocUContext(nil)
				check(b, err)
				pd, err := ctx.AllocPD()
				check(b, err)
				cq, err := ctx.CreateCQ(hca.CQInit{Entries: 4})
				check(b, err)
				m := make(flat, 64)
				live := make([]closer, min(want, int(c.limit(d.Attr()))-64))
				for i := range live {
					live[i], err = c.mk(pd, ctx, cq, &m)
					check(b, err)
				}
				b.ReportMetric(float64(len(live)), "live")
				b.ReportAllocs()
				for b.Loop() {
					o, err := c.mk(pd, ctx, cq, &m)
					check(b, err)
					check(b, o.Close())
				}
				for _, o := range live {
					check(b, o.Close())
				}
				check(b, cq.Close())
				check(b, pd.Close())
			})
		}
	}
}

// TestChurnIsFlat: once the numbers come round, what is made and closed leaves
// nothing behind.
func TestChurnIsFlat(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	d, err := soft.New(loop.New(hca.LinkInfiniBand), soft.Config{GUID: hca.GUID{7: 1}})
	check(t, err)
	t.Cleanup(func() { check(t, d.Close()) })
	ctx, err := d.AllocUContext(nil)
	check(t, err)
	pd, err := ctx.AllocPD()
	check(t, err)
	m := make(flat, 64)
	churn := func() {
		mr, err := pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: 64, IOVA: flatBase})
		check(t, err)
		check(t, mr.Close())
	}
	keep, err := pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: 64}) // and its space
	check(t, err)
	for range 1 << 18 {
		churn()
	}
	// A region is one object; the free list must add none, ever.
	if n := testing.AllocsPerRun(1<<18, churn); n > 1 {
		t.Errorf("%v allocations per region", n)
	}
	check(t, keep.Close())
}
