package dispatch

import (
	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
	"golang.org/x/sys/unix"
)

type qpObject struct {
	parents
	hca    hca.QP
	typ    hca.QPType
	user   uint64
	async  *eventFile
	events eventSource
	mcasts mcastList
	mapped mapped
	target *targetQP // of an XRC target: what its handles share
	place  int       // in target.opens; guarded by xrcDomain.mu
}

// QPEvent queues an asynchronous event (ib_uverbs_qp_event_handler).
func (o *qpObject) QPEvent(ev hca.EventType) { o.async.push(o.user, uint32(ev), &o.events) }

func (o *qpObject) close() error {
	if o.target != nil {
		if err := o.target.leave(o); err != nil {
			return err
		}
	} else {
		o.mcasts.detachAll(o.hca)
		if o.mapped.ending() {
			// Flushed, for a client that polls in memory.
			_ = o.hca.Modify(&hca.QPAttr{State: hca.QPErr}, hca.QPMaskState)
		}
		if err := o.hca.Close(); err != nil {
			return err
		}
		o.mapped.close()
	}
	o.async.purge(&o.events)
	return nil
}

func createQP(c *call, in *abi.CreateQP, out *abi.CreateQPResp) error {
	return c.makeQP(&abi.ExCreateQP{
		UserHandle: in.UserHandle, PDHandle: in.PDHandle, SendCQHandle: in.SendCQHandle, RecvCQHandle: in.RecvCQHandle,
		SRQHandle: in.SRQHandle, MaxSendWR: in.MaxSendWR, MaxRecvWR: in.MaxRecvWR, MaxSendSGE: in.MaxSendSGE,
		MaxRecvSGE: in.MaxRecvSGE, MaxInlineData: in.MaxInlineData, SQSigAll: in.SQSigAll, QPType: in.QPType, IsSRQ: in.IsSRQ,
	}, out)
}

func exCreateQP(c *call, in *abi.ExCreateQP, out *abi.ExCreateQPResp) error {
	if in.CompMask&^abi.CreateQPMaskIndTable != 0 || in.Reserved != 0 {
		return unix.EINVAL
	}
	out.ResponseLength = c.responseLength(sizeOf[abi.ExCreateQPResp]())
	return c.makeQP(in, &out.Base)
}

// makeQP follows create_qp (uverbs_cmd.c).
func (c *call) makeQP(in *abi.ExCreateQP, out *abi.CreateQPResp) error {
	u, err := c.context()
	if err != nil {
		return err
	}
	typ := hca.QPType(in.QPType)
	switch typ {
	case hca.QPTypeRawPacket:
		if !c.f.proc.CanNetRaw() {
			return unix.EPERM
		}
	case hca.QPTypeRC, hca.QPTypeUC, hca.QPTypeUD, hca.QPTypeXRCIni, hca.QPTypeXRCTgt, hca.QPTypeDriver:
	default:
		return unix.EINVAL
	}
	if in.CompMask != 0 {
		return unix.EINVAL // there is no indirection table that its handle could name
	}
	qp := &qpObject{typ: typ, user: in.UserHandle, async: u.async}
	init := hca.QPInit{
		Type:   typ,
		SigAll: in.SQSigAll != 0,
		Cap: hca.QPCap{
			MaxSendWR: in.MaxSendWR, MaxRecvWR: in.MaxRecvWR,
			MaxSendSGE: in.MaxSendSGE, MaxRecvSGE: in.MaxRecvSGE, MaxInline: in.MaxInlineData,
		},
		Handler: qp,
	}
	if typ == hca.QPTypeXRCIni || typ == hca.QPTypeXRCTgt {
		if !c.f.dev.cfg.HCA.Ops().Has(hca.OpXRC) {
			return unix.EOPNOTSUPP
		}
		init.Cap.MaxRecvWR, init.Cap.MaxRecvSGE = 0, 0
	}
	var pd hca.PD
	var domain *xrcDomain // instead of a PD, for an XRC target
	if typ == hca.QPTypeXRCTgt {
		init.Cap = hca.QPCap{}
		xo, err := c.useXRCD(in.PDHandle)
		if err != nil {
			return err
		}
		domain = xo.Value.(*xrcdObject).domain
	} else if pd, err = c.queuesOf(in, &init); err != nil {
		return err
	}
	if in.CreateFlags&^abi.QPCreateUserFlags != 0 {
		return unix.EINVAL
	}
	if in.CreateFlags&abi.QPCreateSourceQPN != 0 && !c.f.proc.CanNetRaw() {
		return unix.EPERM
	}
	if in.CreateFlags != 0 {
		return unix.EOPNOTSUPP // as the kernel's software drivers
	}
	if a := c.f.dev.cfg.HCA.Attr(); init.Cap.MaxSendWR > a.MaxQPWR || init.Cap.MaxRecvWR > a.MaxQPWR ||
		init.Cap.MaxSendSGE > a.MaxSGE || init.Cap.MaxRecvSGE > a.MaxSGE || init.Cap.MaxInline > a.MaxInline {
		return unix.EINVAL // before it could be ENOMEM of our own bounds
	}
	if err := c.f.depth(init.Cap.MaxSendWR, init.Cap.MaxRecvWR); err != nil {
		return err
	}
	if err := c.mapQP(u, &init, qp); err != nil {
		return err
	}
	o, err := c.begin(kindQP, qpBytes(&init.Cap))
	switch {
	case err != nil:
	case domain != nil:
		qp.target, err = domain.createQP(qp)
		if err == nil {
			qp.hca = qp.target.hca
		}
	default:
		qp.hca, err = pd.CreateQP(init)
	}
	if err != nil {
		qp.mapped.close()
		return err
	}
	qp.parents = c.need()
	o.Value = qp
	got := qp.hca.Cap()
	*out = abi.CreateQPResp{
		QPHandle: o.ID(), QPN: qp.hca.Num(),
		MaxSendWR: got.MaxSendWR, MaxRecvWR: got.MaxRecvWR,
		MaxSendSGE: got.MaxSendSGE, MaxRecvSGE: got.MaxRecvSGE, MaxInlineData: got.MaxInline,
	}
	return nil
}

// mapQP gives the queues memory that the client maps, if it does.
func (c *call) mapQP(u *ucontext, init *hca.QPInit, qp *qpObject) error {
	queues, err := u.queues(c.f)
	if queues == nil || err != nil || init.Type == hca.QPTypeXRCTgt {
		return err
	}
	if init.SQ, err = queues.NewSendQueue(init.Cap); err != nil {
		return err
	}
	qp.mapped = u.mapped(init.SQ)
	if init.SRQ == nil && init.RecvCQ != nil {
		if init.RQ, err = queues.NewRecvQueue(init.Cap.MaxRecvWR, init.Cap.MaxRecvSGE); err != nil {
			qp.mapped.close()
			return err
		}
		qp.mapped = u.mapped(init.SQ, init.RQ)
	}
	if err := c.answer(queues.QPAnswer(init.RQ, init.SQ)); err != nil {
		qp.mapped.close()
		return err
	}
	return nil
}

// queuesOf looks up what any QP but an XRC target is made from: its queues, which
// it notes in init, and the PD.
func (c *call) queuesOf(in *abi.ExCreateQP, init *hca.QPInit) (hca.PD, error) {
	receives := init.Type != hca.QPTypeXRCIni
	if receives && in.IsSRQ != 0 {
		o, err := c.use(kindSRQ, in.SRQHandle)
		if err != nil {
			return nil, err
		}
		srq := o.Value.(*srqObject)
		if srq.typ == hca.SRQXRC {
			return nil, unix.EINVAL
		}
		init.SRQ = srq.hca
		init.Cap.MaxRecvWR, init.Cap.MaxRecvSGE = 0, 0 // ignored with an SRQ
	}
	send, err := c.use(kindCQ, in.SendCQHandle)
	if err != nil {
		return nil, err
	}
	init.SendCQ = send.Value.(*cqObject).hca
	if receives {
		recv := send
		if in.RecvCQHandle != in.SendCQHandle {
			if recv, err = c.use(kindCQ, in.RecvCQHandle); err != nil {
				return nil, err
			}
		}
		init.RecvCQ = recv.Value.(*cqObject).hca
	}
	return c.pd(in.PDHandle)
}

// qpBytes is what a QP's queues cost.
func qpBytes(c *hca.QPCap) uint64 {
	// Each factor is cut to 16 bits, above every device's limits, so that the
	// client's 32-bit numbers cannot wrap the product; the device refuses them.
	cut := func(n uint32) uint64 { return uint64(min(n, 1<<16)) }
	return cut(c.MaxSendWR)*(sqeBytes+cut(c.MaxSendSGE)*sgeBytes+cut(c.MaxInline)) +
		cut(c.MaxRecvWR)*(rqeBytes+cut(c.MaxRecvSGE)*sgeBytes)
}

func destroyQP(c *call, in *abi.DestroyQP, out *abi.EventsResp) error {
	return c.f.destroyHandle(kindQP, in.QPHandle, func(o *idr.Object) error {
		qp := o.Value.(*qpObject)
		if qp.mcasts.attached() {
			return unix.EBUSY // uverbs_free_qp
		}
		if err := c.f.destroy(o); err != nil {
			return err
		}
		out.EventsReported = qp.events.count()
		return nil
	})
}

func toDest(a *hca.AHAttr) abi.QPDest {
	d := abi.QPDest{
		DGID: a.DGID, FlowLabel: a.FlowLabel, DLID: a.DLID, SGIDIndex: a.SGIDIndex,
		HopLimit: a.HopLimit, TrafficClass: a.TrafficClass, SL: a.SL,
		SrcPathBits: a.SrcPathBits, StaticRate: a.StaticRate, PortNum: a.Port,
	}
	if a.IsGlobal {
		d.IsGlobal = 1
	}
	return d
}

func fromDest(d *abi.QPDest) hca.AHAttr {
	return hca.AHAttr{
		DGID: d.DGID, FlowLabel: d.FlowLabel, DLID: d.DLID, SGIDIndex: d.SGIDIndex,
		HopLimit: d.HopLimit, TrafficClass: d.TrafficClass, SL: d.SL,
		SrcPathBits: d.SrcPathBits, StaticRate: d.StaticRate, Port: d.PortNum, IsGlobal: d.IsGlobal != 0,
	}
}

func bit(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

func queryQP(c *call, in *abi.QueryQP, out *abi.QueryQPResp) error {
	o, err := c.use(kindQP, in.QPHandle)
	if err != nil {
		return err
	}
	a, init := o.Value.(*qpObject).hca.Query()
	*out = abi.QueryQPResp{
		Dest: toDest(&a.AH), AltDest: toDest(&a.AltAH),
		MaxSendWR: init.Cap.MaxSendWR, MaxRecvWR: init.Cap.MaxRecvWR,
		MaxSendSGE: init.Cap.MaxSendSGE, MaxRecvSGE: init.Cap.MaxRecvSGE, MaxInlineData: init.Cap.MaxInline,
		QKey: a.QKey, RQPSN: a.RQPSN, SQPSN: a.SQPSN, DestQPNum: a.DestQPN, QPAccessFlags: uint32(a.Access),
		PKeyIndex: a.PKeyIndex, AltPKeyIndex: a.AltPKeyIndex,
		QPState: uint8(a.State), CurQPState: uint8(a.CurState), PathMTU: uint8(a.PathMTU), PathMigState: a.PathMigState,
		SQDraining: bit(a.SQDraining), MaxRdAtomic: a.MaxRdAtomic, MaxDestRdAtomic: a.MaxDestRdAtomic,
		MinRNRTimer: a.MinRNRTimer, PortNum: a.Port, Timeout: a.Timeout, RetryCnt: a.RetryCnt, RNRRetry: a.RNRRetry,
		AltPortNum: a.AltPort, AltTimeout: a.AltTimeout, SQSigAll: bit(init.SigAll),
	}
	return nil
}

func modifyQP(c *call, in *abi.ModifyQP) error {
	if hca.QPAttrMask(in.AttrMask)&^hca.QPMaskStandard != 0 {
		return unix.EOPNOTSUPP
	}
	return c.changeQP(in)
}

func exModifyQP(c *call, in *abi.ExModifyQP, out *abi.LengthResp) error {
	if hca.QPAttrMask(in.Base.AttrMask)&^(hca.QPMaskStandard|hca.QPMaskRateLimit) != 0 {
		return unix.EOPNOTSUPP
	}
	out.ResponseLength = c.responseLength(sizeOf[abi.LengthResp]())
	return c.changeQP(&in.Base)
}

// ignoredAttrs are attributes that rdma-core sets for XRC QPs too, and which one
// end does not have (modify_qp_mask).
func ignoredAttrs(typ hca.QPType) hca.QPAttrMask {
	switch typ {
	case hca.QPTypeXRCIni:
		return hca.QPMaskMaxDestRdAtomic | hca.QPMaskMinRNRTimer
	case hca.QPTypeXRCTgt:
		return hca.QPMaskMaxRdAtomic | hca.QPMaskRetryCnt | hca.QPMaskRNRRetry
	}
	return 0
}

// changeQP follows modify_qp (uverbs_cmd.c), check for check.
func (c *call) changeQP(in *abi.ModifyQP) error {
	mask := hca.QPAttrMask(in.AttrMask)
	o, err := c.use(kindQP, in.QPHandle)
	if err != nil {
		return err
	}
	qp := o.Value.(*qpObject).hca
	ports := c.f.dev.cfg.HCA.Attr().PhysPortCnt
	valid := func(p uint8) bool { return p >= 1 && p <= ports }
	if mask&hca.QPMaskPort != 0 && !valid(in.PortNum) {
		return unix.EINVAL
	}
	if mask&hca.QPMaskAV != 0 {
		if !valid(in.Dest.PortNum) {
			return unix.EINVAL
		}
		if mask&hca.QPMaskState != 0 && hca.QPState(in.QPState) == hca.QPRTR {
			if now, _ := qp.Query(); in.Dest.PortNum != now.Port {
				return unix.EINVAL
			}
		} else if mask&hca.QPMaskPort == 0 {
			// SQD to SQD: the primary port follows the path.
			mask |= hca.QPMaskPort
			in.PortNum = in.Dest.PortNum
		} else if in.PortNum != in.Dest.PortNum {
			return unix.EINVAL
		}
	}
	if mask&hca.QPMaskAltPath != 0 && (!valid(in.AltPortNum) || !valid(in.AltDest.PortNum) || in.AltPortNum != in.AltDest.PortNum) {
		return unix.EINVAL
	}
	if mask&hca.QPMaskCurState != 0 && hca.QPState(in.CurQPState) > hca.QPErr ||
		mask&hca.QPMaskState != 0 && hca.QPState(in.QPState) > hca.QPErr {
		return unix.EINVAL
	}
	if mask&^hca.QPMaskStandard != 0 {
		return unix.EOPNOTSUPP // a rate limit; as the kernel's software drivers
	}
	attr := hca.QPAttr{
		State: hca.QPState(in.QPState), CurState: hca.QPState(in.CurQPState),
		PathMTU: hca.MTU(in.PathMTU), PathMigState: in.PathMigState, QKey: in.QKey,
		RQPSN: in.RQPSN, SQPSN: in.SQPSN, DestQPN: in.DestQPNum, Access: hca.Access(in.QPAccessFlags),
		AH: fromDest(&in.Dest), AltAH: fromDest(&in.AltDest),
		PKeyIndex: in.PKeyIndex, AltPKeyIndex: in.AltPKeyIndex, EnSQDAsyncNotify: in.EnSQDAsyncNotify != 0,
		MaxRdAtomic: in.MaxRdAtomic, MaxDestRdAtomic: in.MaxDestRdAtomic, MinRNRTimer: in.MinRNRTimer,
		Port: in.PortNum, Timeout: in.Timeout, RetryCnt: in.RetryCnt, RNRRetry: in.RNRRetry,
		AltPort: in.AltPortNum, AltTimeout: in.AltTimeout,
	}
	if err := qp.Modify(&attr, mask&^ignoredAttrs(o.Value.(*qpObject).typ)); err != nil {
		return err
	}
	c.after = qp // flushes, and peers that waited for this state
	return nil
}
