package soft_test

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
)

// few is a device of three objects of each kind, with a PD and a CQ.
func few(t *testing.T) (*soft.Device, *soft.UContext, hca.PD, hca.CQ) {
	d, err := soft.New(loop.New(hca.LinkInfiniBand), soft.Config{GUID: hca.GUID{7: 1}, MaxQP: 3, MaxMR: 3, MaxMW: 3})
	check(t, err)
	t.Cleanup(func() { check(t, d.Close()) })
	c, err := d.AllocUContext(nil)
	check(t, err)
	pd, err := c.AllocPD()
	check(t, err)
	cq, err := c.CreateCQ(hca.CQInit{Entries: 16})
	check(t, err)
	t.Cleanup(func() { check(t, cq.Close()); check(t, pd.Close()); check(t, c.Close()) })
	return d, c.(*soft.UContext), pd, cq
}

type closer interface{ Close() error }

// fill makes three objects; the fourth does not exist until one is closed.
func fill(t *testing.T, what string, mk func() (closer, error)) {
	t.Helper()
	var all []closer
	for range 3 {
		o, err := mk()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		all = append(all, o)
	}
	for range 2 {
		if _, err := mk(); !errors.Is(err, unix.ENOMEM) {
			t.Fatalf("%s over the limit: %v", what, err)
		}
		check(t, all[0].Close())
		o, err := mk()
		if err != nil {
			t.Fatalf("%s after a close: %v", what, err)
		}
		all = append(all[1:], o)
	}
	for _, o := range all {
		check(t, o.Close())
	}
}

func TestLimits(t *testing.T) {
	d, _, pd, cq := few(t)
	x, err := d.AllocXRCD()
	check(t, err)
	m := make(flat, 64)
	var mrs []hca.MR
	for name, mk := range map[string]func() (closer, error){
		"MR":     func() (closer, error) { return pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: 64}) },
		"MW":     func() (closer, error) { return pd.AllocMW(hca.MWType1) },
		"target": func() (closer, error) { return x.CreateQP(hca.QPInit{Type: hca.QPTypeXRCTgt}) },
		"QP": func() (closer, error) {
			return pd.CreateQP(hca.QPInit{Type: hca.QPTypeXRCIni, SendCQ: cq, Cap: hca.QPCap{MaxSendWR: 1}})
		},
	} {
		fill(t, name, mk)
	}
	// Rereg takes no place and gives none back, with windows in all of theirs.
	for range 3 {
		mr, err := pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: 64})
		check(t, err)
		mrs = append(mrs, mr)
		mw, err := pd.AllocMW(hca.MWType2)
		check(t, err)
		t.Cleanup(func() { check(t, mw.Close()) })
	}
	for range 10 {
		for i, mr := range mrs {
			o := make(flat, 64)
			mrs[i], err = mr.Rereg(hca.MRRereg{Flags: hca.ReregTrans, Mem: &o, Start: flatBase, Length: 32})
			check(t, err)
			check(t, mr.Close())
		}
		if _, err := pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: 64}); !errors.Is(err, unix.ENOMEM) {
			t.Fatalf("region over the limit: %v", err)
		}
	}
	for _, mr := range mrs {
		check(t, mr.Close())
	}
	fill(t, "MR", func() (closer, error) { return pd.RegMR(hca.MRInit{Mem: &m, Start: flatBase, Length: 64}) })
	check(t, x.Close())
}

// TestInFlight: a message that is stuck in a context's memory is counted until it
// comes back, though all that it went through is closed.
func TestInFlight(t *testing.T) {
	d := device(t, loop.New(hca.LinkInfiniBand), 1)
	c, err := d.AllocUContext(nil)
	check(t, err)
	u := c.(*soft.UContext)
	pd, err := c.AllocPD()
	check(t, err)
	cq, err := c.CreateCQ(hca.CQInit{Entries: 16})
	check(t, err)
	mem := hcatest.NewMem(flatBase, 4096)
	mr, err := pd.RegMR(hca.MRInit{Mem: mem, Start: flatBase, Length: 4096, IOVA: flatBase, Access: 15})
	check(t, err)
	b := &client{cq: cq, mr: mr, pd: pd, way: selfPath(t, d)}
	b.qp, err = pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: cq, RecvCQ: cq, Cap: hca.QPCap{MaxSendWR: 1, MaxRecvWR: 1}})
	check(t, err)
	a := newClient(t, d, hca.QPTypeRC, 4096)
	connect(t, a, b, hca.QPTypeRC)
	if n := u.InFlight(); n != 0 {
		t.Fatalf("%d in flight", n)
	}
	g := mem.Block()
	_, err = a.qp.PostSend([]hca.SendWR{{Opcode: hca.OpRDMAWrite, RemoteAddr: flatBase, RKey: mr.RKey(),
		SGE: []hca.SGE{{Addr: flatBase, Length: 8, LKey: a.mr.LKey()}}}})
	check(t, err)
	done := make(chan struct{})
	go func() { defer close(done); a.qp.Run() }()
	<-g.In
	for _, o := range []closer{b.qp, mr, cq, pd, c} {
		if n := u.InFlight(); n != 1 {
			t.Fatalf("%d in flight", n)
		}
		check(t, o.Close())
	}
	if n := u.InFlight(); n != 1 {
		t.Fatalf("%d in flight after the close", n)
	}
	mem.Unblock()
	<-done
	if n := u.InFlight(); n != 0 {
		t.Fatalf("%d in flight at the end", n)
	}
}

// A device without optional methods does not say that it has what they are for.
func TestWithout(t *testing.T) {
	d, err := soft.New(loop.New(hca.LinkInfiniBand), soft.Config{GUID: hca.GUID{7: 1}, MaxSRQSGE: 27, Without: hca.OpXRC | hca.OpModifyCQ})
	check(t, err)
	defer func() { check(t, d.Close()) }()
	a := d.Attr()
	if d.Ops() != soft.Ops&^(hca.OpXRC|hca.OpModifyCQ) || a.CapFlags&(1<<20) != 0 || a.MaxCQCount|a.MaxCQPeriod != 0 || a.MaxSRQSGE != 27 {
		t.Errorf("methods %v, attributes %+v", d.Ops().Names(), a)
	}
}
