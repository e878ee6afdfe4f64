package dispatch_test

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// faulty is a device that counts what lives on it and can refuse to make the
// next object.
type faulty struct {
	hca.Device
	mu   sync.Mutex
	live map[string]int
	fail int // how many creates from now one is refused; 0: none
	// await stands in for every CQ's Await, if it is set.
	await func(hca.Waiter) bool
	last  hca.Notifier // of the newest context
}

func newFaulty(d hca.Device) *faulty { return &faulty{Device: d, live: map[string]int{}} }

// made counts a new object, or says that it is refused.
func (d *faulty) made(kind string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail > 0 {
		if d.fail--; d.fail == 0 {
			return unix.ENOSPC // no other layer says this
		}
	}
	d.live[kind]++
	return nil
}

func (d *faulty) gone(kind string, err error) error {
	if err == nil {
		d.mu.Lock()
		d.live[kind]--
		d.mu.Unlock()
	}
	return err
}

func (d *faulty) failIn(n int) {
	d.mu.Lock()
	d.fail = n
	d.mu.Unlock()
}

// count is how many objects live.
func (d *faulty) count() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := map[string]int{}
	for k, n := range d.live {
		if n != 0 {
			m[k] = n
		}
	}
	return m
}

// make runs create unless it is refused.
func makeObject[T any](d *faulty, kind string, create func() (T, error)) (T, error) {
	var none T
	if err := d.made(kind); err != nil {
		return none, err
	}
	o, err := create()
	if err != nil {
		_ = d.gone(kind, nil)
	}
	return o, err
}

type (
	faultyContext struct {
		hca.UContext
		d *faulty
	}
	faultyPD struct {
		hca.PD
		d *faulty
	}
	faultyMR struct {
		hca.MR
		d *faulty
	}
	faultyMW struct {
		hca.MW
		d *faulty
	}
	faultyAH struct {
		hca.AH
		d *faulty
	}
	faultyCQ struct {
		hca.CQ
		d *faulty
	}
	faultyQP struct {
		hca.QP
		d *faulty
	}
	faultySRQ struct {
		hca.SRQ
		d *faulty
	}
	faultyXRCD struct {
		hca.XRCD
		d *faulty
	}
)

func (d *faulty) AllocUContext(n hca.Notifier) (hca.UContext, error) {
	d.mu.Lock()
	d.last = n
	d.mu.Unlock()
	return makeObject(d, "context", func() (hca.UContext, error) {
		u, err := d.Device.AllocUContext(n)
		return &faultyContext{u, d}, err
	})
}

func (d *faulty) AllocXRCD() (hca.XRCD, error) {
	return makeObject(d, "xrcd", func() (hca.XRCD, error) {
		x, err := d.Device.AllocXRCD()
		return &faultyXRCD{x, d}, err
	})
}

func (o *faultyContext) Close() error { return o.d.gone("context", o.UContext.Close()) }
func (o *faultyPD) Close() error      { return o.d.gone("pd", o.PD.Close()) }
func (o *faultyMR) Close() error      { return o.d.gone("mr", o.MR.Close()) }
func (o *faultyMW) Close() error      { return o.d.gone("mw", o.MW.Close()) }
func (o *faultyAH) Close() error      { return o.d.gone("ah", o.AH.Close()) }
func (o *faultyCQ) Close() error      { return o.d.gone("cq", o.CQ.Close()) }
func (o *faultyQP) Close() error      { return o.d.gone("qp", o.QP.Close()) }
func (o *faultySRQ) Close() error     { return o.d.gone("srq", o.SRQ.Close()) }
func (o *faultyXRCD) Close() error    { return o.d.gone("xrcd", o.XRCD.Close()) }

func (o *faultyCQ) Await(w hca.Waiter) bool {
	if f := o.d.await; f != nil {
		return f(w)
	}
	return o.CQ.Await(w)
}

func (o *faultyContext) AllocPD() (hca.PD, error) {
	return makeObject(o.d, "pd", func() (hca.PD, error) {
		p, err := o.UContext.AllocPD()
		return &faultyPD{p, o.d}, err
	})
}

func (o *faultyContext) CreateCQ(in hca.CQInit) (hca.CQ, error) {
	return makeObject(o.d, "cq", func() (hca.CQ, error) {
		q, err := o.UContext.CreateCQ(in)
		return &faultyCQ{q, o.d}, err
	})
}

func (o *faultyPD) RegMR(in hca.MRInit) (hca.MR, error) {
	return makeObject(o.d, "mr", func() (hca.MR, error) {
		m, err := o.PD.RegMR(in)
		return &faultyMR{m, o.d}, err
	})
}

func (o *faultyMR) Rereg(in hca.MRRereg) (hca.MR, error) {
	if err := o.d.made("mr"); err != nil {
		return nil, err
	}
	if in.PD != nil {
		in.PD = in.PD.(*faultyPD).PD
	}
	m, err := o.MR.Rereg(in)
	_ = o.d.gone("mr", nil) // the old one, or the new one that is not
	return &faultyMR{m, o.d}, err
}

func (o *faultyPD) AllocMW(t hca.MWType) (hca.MW, error) {
	return makeObject(o.d, "mw", func() (hca.MW, error) {
		m, err := o.PD.AllocMW(t)
		return &faultyMW{m, o.d}, err
	})
}

func (o *faultyPD) CreateAH(a hca.AHAttr) (hca.AH, error) {
	return makeObject(o.d, "ah", func() (hca.AH, error) {
		h, err := o.PD.CreateAH(a)
		return &faultyAH{h, o.d}, err
	})
}

func (o *faultyPD) CreateQP(in hca.QPInit) (hca.QP, error) {
	return makeObject(o.d, "qp", func() (hca.QP, error) {
		in.SendCQ = in.SendCQ.(*faultyCQ).CQ
		if in.RecvCQ != nil {
			in.RecvCQ = in.RecvCQ.(*faultyCQ).CQ
		}
		if in.SRQ != nil {
			in.SRQ = in.SRQ.(*faultySRQ).SRQ
		}
		q, err := o.PD.CreateQP(in)
		return &faultyQP{q, o.d}, err
	})
}

func (o *faultyXRCD) CreateQP(in hca.QPInit) (hca.QP, error) {
	return makeObject(o.d, "qp", func() (hca.QP, error) {
		q, err := o.XRCD.CreateQP(in)
		return &faultyQP{q, o.d}, err
	})
}

func (o *faultyPD) CreateSRQ(in hca.SRQInit) (hca.SRQ, error) {
	return makeObject(o.d, "srq", func() (hca.SRQ, error) {
		if in.XRCD != nil {
			in.XRCD, in.CQ = in.XRCD.(*faultyXRCD).XRCD, in.CQ.(*faultyCQ).CQ
		}
		q, err := o.PD.CreateSRQ(in)
		return &faultySRQ{q, o.d}, err
	})
}

// PostSend hands the engine its own address handles.
func (o *faultyQP) PostSend(wrs []hca.SendWR) (int, error) {
	for i := range wrs {
		if ah, ok := wrs[i].AH.(*faultyAH); ok {
			wrs[i].AH = ah.AH
		}
	}
	return o.QP.PostSend(wrs)
}
