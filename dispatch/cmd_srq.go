package dispatch

import (
	"sync"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
	"golang.org/x/sys/unix"
)

type srqObject struct {
	parents
	hca    hca.SRQ
	typ    hca.SRQType
	user   uint64
	async  *eventFile
	events eventSource
	maxSGE uint32
	mapped mapped

	resizing sync.Mutex // guards the idr.Object's Cost after the create; outermost
}

// SRQEvent queues an asynchronous event (ib_uverbs_srq_event_handler).
func (o *srqObject) SRQEvent(ev hca.EventType) { o.async.push(o.user, uint32(ev), &o.events) }

func (o *srqObject) close() error {
	if err := o.hca.Close(); err != nil {
		return err
	}
	o.mapped.close()
	o.async.purge(&o.events)
	return nil
}

func createSRQ(c *call, in *abi.CreateSRQ, out *abi.CreateSRQResp) error {
	return c.makeSRQ(&abi.CreateXSRQ{UserHandle: in.UserHandle, PDHandle: in.PDHandle, MaxWR: in.MaxWR, MaxSGE: in.MaxSGE, SRQLimit: in.SRQLimit}, out)
}

func createXSRQ(c *call, in *abi.CreateXSRQ, out *abi.CreateSRQResp) error { return c.makeSRQ(in, out) }

// makeSRQ is __uverbs_create_xsrq.
func (c *call) makeSRQ(in *abi.CreateXSRQ, out *abi.CreateSRQResp) error {
	u, err := c.context()
	if err != nil {
		return err
	}
	srq := &srqObject{typ: hca.SRQType(in.SRQType), user: in.UserHandle, async: u.async, maxSGE: in.MaxSGE}
	init := hca.SRQInit{MaxWR: in.MaxWR, MaxSGE: in.MaxSGE, Limit: in.SRQLimit, Handler: srq}
	switch srq.typ {
	case hca.SRQBasic:
	case hca.SRQXRC:
		if !c.f.dev.cfg.HCA.Ops().Has(hca.OpXRC) {
			return unix.EOPNOTSUPP // as drivers do that have SRQs only
		}
		xo, err := c.useXRCD(in.XRCDHandle)
		if err != nil {
			return err
		}
		co, err := c.use(kindCQ, in.CQHandle)
		if err != nil {
			return err
		}
		init.XRCD, init.CQ = xo.Value.(*xrcdObject).domain.hca, co.Value.(*cqObject).hca
	default:
		return unix.EOPNOTSUPP // tag matching, and what the kernel leaves to drivers to refuse
	}
	pd, err := c.pd(in.PDHandle)
	if err != nil {
		return err
	}
	if a := c.f.dev.cfg.HCA.Attr(); in.MaxWR > a.MaxSRQWR || in.MaxSGE > a.MaxSRQSGE {
		return unix.EINVAL // before it could be ENOMEM of our own bounds
	}
	if err := c.f.depth(in.MaxWR); err != nil {
		return err
	}
	queues, err := u.queues(c.f)
	if err != nil {
		return err
	}
	if queues != nil {
		if in.MaxWR == 0 || in.MaxSGE == 0 {
			return unix.EINVAL
		}
		if init.RQ, err = queues.NewRecvQueue(in.MaxWR, in.MaxSGE); err != nil {
			return err
		}
		srq.mapped = u.mapped(init.RQ)
	}
	o, err := c.begin(kindSRQ, srqBytes(in.MaxWR, in.MaxSGE))
	if err == nil {
		srq.hca, err = pd.CreateSRQ(init)
	}
	if err != nil {
		srq.mapped.close()
		return err
	}
	srq.parents = c.need()
	o.Value = srq
	if queues != nil {
		if err := c.answer(queues.SRQAnswer(init.RQ, srq.hca.Num())); err != nil {
			return err
		}
	}
	got := srq.hca.Attr()
	*out = abi.CreateSRQResp{SRQHandle: o.ID(), MaxWR: got.MaxWR, MaxSGE: got.MaxSGE, SRQN: srq.hca.Num()}
	return nil
}

// srqBytes is what an SRQ's queue costs; see qpBytes.
func srqBytes(wrs, sges uint32) uint64 {
	return uint64(min(wrs, 1<<16)) * (rqeBytes + uint64(min(sges, 1<<16))*sgeBytes)
}

func modifySRQ(c *call, in *abi.ModifySRQ) error {
	o, err := c.use(kindSRQ, in.SRQHandle)
	if err != nil {
		return err
	}
	srq, mask := o.Value.(*srqObject), hca.SRQAttrMask(in.AttrMask)
	if mask&hca.SRQMaxWR == 0 {
		err = srq.hca.Modify(hca.SRQAttr{Limit: in.SRQLimit}, mask, nil)
	} else {
		err = c.resizeSRQ(o, srq, in, mask)
	}
	if err != nil {
		return err
	}
	c.after = srq.hca
	return nil
}

// resizeSRQ is MODIFY_SRQ with another depth, which costs what it costs.
func (c *call) resizeSRQ(o *idr.Object, srq *srqObject, in *abi.ModifySRQ, mask hca.SRQAttrMask) error {
	if in.MaxWR > c.f.dev.cfg.HCA.Attr().MaxSRQWR {
		return unix.EINVAL
	}
	if err := c.f.depth(in.MaxWR); err != nil {
		return err
	}
	srq.resizing.Lock()
	defer srq.resizing.Unlock()
	var next mapped
	var rq hca.RecvQueue
	if srq.mapped.list != nil {
		var err error
		if rq, err = c.remapSRQ(srq.mapped.m, in.MaxWR, srq.maxSGE); err != nil {
			return err
		}
		next = mapped{srq.mapped.m, []hca.Mapped{rq}}
	}
	cost := objectBytes + srqBytes(in.MaxWR, srq.maxSGE)
	err := c.f.recharge(o, cost, func() error {
		return srq.hca.Modify(hca.SRQAttr{MaxWR: in.MaxWR, Limit: in.SRQLimit}, mask, rq)
	})
	if err != nil {
		next.close()
		return err
	}
	srq.mapped, next = next, srq.mapped
	next.close()
	return nil
}

// remapSRQ makes a queue of another size and tells the client of it, where its
// library says (rxe_srq_from_attr with struct rxe_modify_srq_cmd, which is the
// address alone). EINVAL without that, EFAULT.
func (c *call) remapSRQ(m *mapping, wrs, sges uint32) (hca.RecvQueue, error) {
	var addr uint64
	if copy(bytesOf(&addr), c.udin) < 8 || wrs == 0 {
		return nil, unix.EINVAL
	}
	rq, err := m.queues.NewRecvQueue(wrs, sges)
	if err != nil {
		return nil, err
	}
	if err := c.write(m.queues.SRQResizeAnswer(rq), addr); err != nil {
		rq.Close()
		return nil, err
	}
	return rq, nil
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
	return c.f.destroyHandle(kindSRQ, in.QPHandle, func(o *idr.Object) error {
		srq := o.Value.(*srqObject)
		if err := c.f.destroy(o); err != nil {
			return err
		}
		out.EventsReported = srq.events.count()
		return nil
	})
}
