package dispatch

import (
	"errors"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// NoFD is the async_fd of a client that could not be given one: not a
// descriptor (above any fs.nr_open), not -1 (libibverbs would then ask for one
// by ioctl and fail), not its command fd (it would close that twice).
const NoFD = 1 << 30

// getContext makes the ucontext and gives the client its event descriptor.
func getContext(c *call) error {
	var in abi.GetContext
	if err := c.request(bytesOf(&in)); err != nil {
		return err
	}
	f := c.f
	if f.dev.removed.Load() {
		return errRemoved
	}
	f.mu.Lock()
	if f.opening || f.ctx.Load() != nil {
		f.mu.Unlock()
		return errBusyContext
	}
	f.opening = true
	f.mu.Unlock()

	u := &ucontext{uid: f.uid, async: newEventFile(f, asyncEvents)}
	opened := func() {
		f.mu.Lock()
		f.opening = false
		f.mu.Unlock()
	}
	undo := func() {
		_ = u.hca.Close()
		u.maps.close(false)
		opened()
	}
	var err error
	if u.hca, err = f.dev.cfg.HCA.AllocUContext(u); err != nil {
		opened()
		return err
	}
	if u.maps, err = newMapping(f, c.r); err != nil {
		undo()
		return err
	}
	// The swap is the last step: it cannot be taken back.
	commit := func(fd int, write writer, swap func() error) error {
		out := abi.GetContextResp{AsyncFD: uint32(fd), NumCompVectors: uint32(f.dev.cfg.HCA.Attr().CompVectors)}
		if err := c.respondWith(write, bytesOf(&out)); err != nil {
			return err
		}
		if err := swap(); err != nil {
			return err
		}
		f.ctx.Store(u)
		opened()
		return nil
	}
	err = f.dev.install(c, u.async, func(s Standing) error {
		return commit(s.FD(), s.Write, func() error {
			if u.maps == nil {
				return nil
			}
			return u.maps.swap(s)
		})
	}, undo)
	if err == nil {
		return nil
	}
	// The client cannot be seized (traced, seccomp): it works without asynchronous
	// events rather than not at all.
	f.dev.cfg.Log.Warn("client gets no event descriptor: its async events are lost",
		zap.Int("pid", f.proc.PID()), zap.String("program", f.proc.Name()), zap.Error(err))
	u.maps.close(false)
	u.maps = nil
	if err = commit(NoFD, c.write, func() error { return nil }); err != nil {
		undo()
	}
	return err
}

// createCompChannel gives the client a completion channel's descriptor. A
// client that cannot be seized gets EPERM: a channel that never speaks would
// hang it.
func createCompChannel(c *call) error {
	var in abi.CreateCompChannel
	if err := c.request(bytesOf(&in)); err != nil {
		return err
	}
	if _, err := c.context(); err != nil {
		return err
	}
	f := c.f
	ev := newEventFile(f, compEvents)
	if err := ev.charge(); err != nil {
		return err
	}
	err := f.dev.install(c, ev, func(s Standing) error {
		out := abi.CreateCompChannelResp{FD: uint32(s.FD())}
		if err := c.respondWith(s.Write, bytesOf(&out)); err != nil {
			return err
		}
		f.addChannel(int32(s.FD()), ev)
		return nil
	}, ev.uncharge)
	if err == nil {
		return nil
	}
	ev.uncharge()
	f.dev.cfg.Log.Warn("client gets no completion channel",
		zap.Int("pid", f.proc.PID()), zap.String("program", f.proc.Name()), zap.Error(err))
	return errors.Join(unix.EPERM, err)
}

func queryDevice(c *call, _ *abi.QueryDevice, out *abi.QueryDeviceResp) error {
	copyDevice(out, c.f.dev.cfg.HCA.Attr())
	return nil
}

// copyDevice is copy_query_dev_fields.
func copyDevice(out *abi.QueryDeviceResp, a *hca.DeviceAttr) {
	*out = abi.QueryDeviceResp{
		FWVer: a.FWVer, NodeGUID: a.NodeGUID, SysImageGUID: a.SysImageGUID,
		MaxMRSize: a.MaxMRSize, PageSizeCap: a.PageSizeCap,
		VendorID: a.VendorID, VendorPartID: a.VendorPartID, HWVer: a.HWVer,
		MaxQP: a.MaxQP, MaxQPWR: a.MaxQPWR, DeviceCapFlags: uint32(a.CapFlags),
		MaxSGE: a.MaxSGE, MaxSGERD: a.MaxSGERD, MaxCQ: a.MaxCQ, MaxCQE: a.MaxCQE,
		MaxMR: a.MaxMR, MaxPD: a.MaxPD, MaxQPRdAtom: a.MaxQPRdAtom, MaxEERdAtom: a.MaxEERdAtom,
		MaxResRdAtom: a.MaxResRdAtom, MaxQPInitRdAtom: a.MaxQPInitRd, MaxEEInitRdAtom: a.MaxEEInitRd,
		AtomicCap: a.AtomicCap, MaxEE: a.MaxEE, MaxRDD: a.MaxRDD, MaxMW: a.MaxMW,
		MaxRawIPv6QP: a.MaxRawIPv6QP, MaxRawEthyQP: a.MaxRawEthyQP,
		MaxMcastGrp: a.MaxMcastGrp, MaxMcastQPAttach: a.MaxMcastQP, MaxTotalMcastQPAttach: a.MaxTotMcastQP,
		MaxAH: a.MaxAH, MaxFMR: a.MaxFMR, MaxMapPerFMR: a.MaxMapPerFMR,
		MaxSRQ: a.MaxSRQ, MaxSRQWR: a.MaxSRQWR, MaxSRQSGE: a.MaxSRQSGE,
		MaxPKeys: a.MaxPKeys, LocalCAAckDelay: a.LocalCAAckDel, PhysPortCnt: a.PhysPortCnt,
	}
}

// exQueryDevice adds what the engine has of the later members: moderation and
// on-demand paging.
func exQueryDevice(c *call, in *abi.ExQueryDevice, out *abi.ExQueryDeviceResp) error {
	if in.CompMask != 0 || in.Reserved != 0 {
		return unix.EINVAL
	}
	a := c.f.dev.cfg.HCA.Attr()
	copyDevice(&out.Base, a)
	out.ResponseLength = c.responseLength(sizeOf[abi.ExQueryDeviceResp]())
	out.DeviceCapFlagsEx = a.CapFlags
	out.ODP = abi.ODPCaps{GeneralCaps: uint64(a.ODP.General), RC: uint32(a.ODP.RC), UC: uint32(a.ODP.UC), UD: uint32(a.ODP.UD)}
	out.XRCODPCaps = uint32(a.ODP.XRC)
	out.CQModeration = abi.CQModerationCaps{MaxCount: a.MaxCQCount, MaxPeriod: a.MaxCQPeriod}
	return nil
}

func queryPort(c *call, in *abi.QueryPort, out *abi.QueryPortResp) error {
	p, err := c.f.dev.cfg.HCA.Port(in.PortNum)
	if err != nil {
		return err
	}
	// copy_port_attr_to_resp (uverbs_std_types_device.c)
	*out = abi.QueryPortResp{
		PortCapFlags: p.PortCapFlags, MaxMsgSz: p.MaxMsgSize, BadPKeyCntr: p.BadPKeyCntr,
		QKeyViolCntr: p.QKeyViolCntr, GIDTblLen: p.GIDTableLen, PKeyTblLen: p.PKeyTableLen,
		LID: p.LID, SMLID: p.SMLID, State: p.State, MaxMTU: p.MaxMTU, ActiveMTU: p.ActiveMTU,
		LMC: p.LMC, MaxVLNum: p.MaxVLNum, SMSL: p.SMSL, SubnetTimeout: p.SubnetTimeout,
		InitTypeReply: p.InitTypeReply, ActiveWidth: p.ActiveWidth, ActiveSpeed: p.ActiveSpeed,
		PhysState: p.PhysState, LinkLayer: uint8(p.LinkLayer),
	}
	return nil
}

func allocPD(c *call, _ *abi.AllocPD, out *abi.AllocPDResp) error {
	u, err := c.context()
	if err != nil {
		return err
	}
	o, err := c.begin(kindPD, 0)
	if err != nil {
		return err
	}
	pd, err := u.hca.AllocPD()
	if err != nil {
		return err
	}
	o.Value = &pdObject{hca: pd}
	out.PDHandle = o.ID()
	return nil
}

func ahAttr(a *abi.AHAttr) hca.AHAttr {
	return hca.AHAttr{
		DLID: a.DLID, SL: a.SL, SrcPathBits: a.SrcPathBits, StaticRate: a.StaticRate,
		IsGlobal: a.IsGlobal != 0, Port: a.PortNum,
		DGID: a.GRH.DGID, FlowLabel: a.GRH.FlowLabel, SGIDIndex: a.GRH.SGIDIndex,
		HopLimit: a.GRH.HopLimit, TrafficClass: a.GRH.TrafficClass,
	}
}

func createAH(c *call, in *abi.CreateAH, out *abi.CreateAHResp) error {
	if in.Attr.PortNum == 0 || in.Attr.PortNum > c.f.dev.cfg.HCA.Attr().PhysPortCnt {
		return unix.EINVAL // rdma_is_port_valid
	}
	u, err := c.context()
	if err != nil {
		return err
	}
	pd, err := c.pd(in.PDHandle)
	if err != nil {
		return err
	}
	o, err := c.begin(kindAH, 0)
	if err != nil {
		return err
	}
	ah, err := pd.CreateAH(ahAttr(&in.Attr))
	if err != nil {
		return err
	}
	obj := &ahObject{hca: ah}
	if u.maps != nil {
		if obj.num, err = u.maps.queues.AddAH(ah); err != nil {
			_ = ah.Close()
			return err
		}
		obj.queues = u.maps.queues
		if b := obj.queues.AHAnswer(obj.num); c.udoutLen >= len(b) { // rxe_create_ah: else it is an old library
			c.udout = b
		}
	}
	obj.parents = c.need()
	o.Value = obj
	out.AHHandle = o.ID()
	return nil
}
