package dispatch

import (
	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
)

type srqObject struct {
	parents
	hca    hca.SRQ
	user   uint64
	async  *eventFile
	events eventSource
}

// SRQEvent queues an asynchronous event (ib_uverbs_srq_event_handler).
func (o *srqObject) SRQEvent(ev hca.EventType) { o.async.push(o.user, uint32(ev), &o.events) }

func (o *srqObject) close() error {
	if err := o.hca.Close(); err != nil {
		return err
	}
	o.async.purge(&o.events)
	return nil
}

func createSRQ(c *call, in *abi.CreateSRQ, out *abi.CreateSRQResp) error {
	u, err := c.context()
	if err != nil {
		return err
	}
	pdo, pd, err := c.pd(in.PDHandle)
	if err != nil {
		return err
	}
	o, err := c.begin(kindSRQ, srqBytes(in))
	if err != nil {
		return err
	}
	srq := &srqObject{user: in.UserHandle, async: u.async}
	srq.hca, err = pd.CreateSRQ(hca.SRQInit{MaxWR: in.MaxWR, MaxSGE: in.MaxSGE, Limit: in.SRQLimit, Handler: srq})
	if err != nil {
		return err
	}
	srq.parents = need(pdo)
	o.Value = srq
	got := srq.hca.Attr()
	*out = abi.CreateSRQResp{SRQHandle: o.ID(), MaxWR: got.MaxWR, MaxSGE: got.MaxSGE}
	return nil
}

// srqBytes is what an SRQ's queue costs; see qpBytes.
func srqBytes(in *abi.CreateSRQ) uint64 {
	return uint64(min(in.MaxWR, 1<<16)) * (rqeBytes + uint64(min(in.MaxSGE, 1<<16))*sgeBytes)
}

func modifySRQ(c *call, in *abi.ModifySRQ) error {
	o, err := c.use(kindSRQ, in.SRQHandle)
	if err != nil {
		return err
	}
	srq := o.Value.(*srqObject).hca
	if err := srq.Modify(hca.SRQAttr{MaxWR: in.MaxWR, Limit: in.SRQLimit}, hca.SRQAttrMask(in.AttrMask)); err != nil {
		return err
	}
	c.after = srq
	return nil
}

func querySRQ(c *call, in *abi.QuerySRQ, out *abi.QuerySRQResp) error {
	o, err := c.use(kindSRQ, in.SRQHandle)
	if err != nil {
		return err
	}
	a := o.Value.(*srqObject).hca.Attr()
	*out = abi.QuerySRQResp{MaxWR: a.MaxWR, MaxSGE: a.MaxSGE, SRQLimit: a.Limit}
	return nil
}

func destroySRQ(c *call, in *abi.DestroyQP, out *abi.EventsResp) error {
	return c.f.objects.Destroy(kindSRQ, in.QPHandle, func(o *idr.Object) error {
		srq := o.Value.(*srqObject)
		if err := c.f.destroy(o); err != nil {
			return err
		}
		out.EventsReported = srq.events.count()
		return nil
	})
}
