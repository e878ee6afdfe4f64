package dispatch

import (
	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/pin"
	"golang.org/x/sys/unix"
)

const pageMask = pin.PageSize - 1

// checkAccess is ib_check_mr_access, with what the optional bits ask for left
// out, as it may be. EOPNOTSUPP: what the kernel knows and its software drivers
// do not do.
func (c *call) checkAccess(flags uint32) (hca.Access, error) {
	access := hca.Access(flags) &^ hca.AccessOptionalRange
	if access&^hca.AccessKnown != 0 {
		return 0, unix.EINVAL
	}
	if access&hca.AccessNeedsLocal != 0 && access&hca.AccessLocalWrite == 0 {
		return 0, unix.EINVAL
	}
	able := hca.AccessSupported
	if c.f.dev.cfg.HCA.Attr().ODP.General&hca.ODPSupport != 0 {
		able |= hca.AccessOnDemand
		if access&hca.AccessOnDemand != 0 {
			// How large its pages are is the region's owner's to know.
			able |= hca.AccessHugetlb
		}
	}
	if c.f.dev.cfg.HCA.Attr().CapFlags&hca.CapFlushGlobal != 0 {
		able |= hca.AccessFlushGlobal
	}
	if access&^able != 0 {
		return 0, unix.EOPNOTSUPP
	}
	return access, nil
}

// isImplicit says whether a region on demand is all of the address space.
func (c *call) isImplicit(start, length, iova uint64) bool {
	return start == 0 && iova == 0 && length == hca.ImplicitLength && c.f.dev.cfg.HCA.Attr().ODP.General&hca.ODPImplicit != 0
}

// pinRange charges a range and checks that the client itself may reach all of
// it, as ib_umem_get does. A region on demand is neither charged nor need its
// pages be there (ib_umem_odp_get).
func (c *call) pinRange(start, length, iova uint64, access hca.Access) (pin.Charge, error) {
	onDemand := access&hca.AccessOnDemand != 0
	if onDemand && c.isImplicit(start, length, iova) {
		return pin.Charge{}, nil
	}
	if length == 0 || iova+length < iova || length > c.f.dev.cfg.HCA.Attr().MaxMRSize {
		return pin.Charge{}, unix.EINVAL
	}
	if onDemand {
		_, err := pin.Pages(start, length)
		return pin.Charge{}, err
	}
	charge, err := c.f.pin(start, length)
	if err != nil {
		c.f.dev.logPin(c.f, err)
		return charge, err
	}
	if err := c.checkRange(start, length, access); err != nil {
		c.f.unpin(&charge)
		return charge, err
	}
	return charge, nil
}

// checkRange is EFAULT unless the client may do itself what access lets others
// do.
func (c *call) checkRange(start, length uint64, access hca.Access) error {
	c.f.user.checking.Lock()
	defer c.f.user.checking.Unlock()
	return c.f.proc.CheckRange(start, length, access&hca.AccessNeedsWritable != 0)
}

// shared says what a region for atomics shares with others: the pieces of its
// range, or, of one on demand, a way to find out when it is time.
func (c *call) shared(start, length uint64, access hca.Access) (pieces []hca.SharedPiece, at func(uint64) any, err error) {
	switch {
	case access&hca.AccessRemoteAtomic == 0:
		return nil, nil, nil
	case access&hca.AccessOnDemand != 0:
		return nil, sharedAt(c.f.proc), nil
	}
	c.f.user.checking.Lock()
	defer c.f.user.checking.Unlock()
	pieces, err = c.f.proc.SharedPieces(start, length)
	return pieces, nil, err
}

func sharedAt(p Process) func(uint64) any {
	return func(addr uint64) any {
		const word = 8 // bytes of an atomic, which are in one page
		pieces, err := p.SharedPieces(addr, word)
		if err != nil || len(pieces) == 0 {
			return nil
		}
		return pieces[0].Key
	}
}

// regMR follows ib_uverbs_reg_mr and ib_umem_get: arguments, charge, pages.
func regMR(c *call, in *abi.RegMR, out *abi.RegMRResp) error {
	if in.Start&pageMask != in.HCAVA&pageMask {
		return unix.EINVAL
	}
	access, err := c.checkAccess(in.AccessFlags)
	if err != nil {
		return err
	}
	pd, err := c.pd(in.PDHandle)
	if err != nil {
		return err
	}
	o, err := c.begin(kindMR, 0)
	if err != nil {
		return err
	}
	charge, err := c.pinRange(in.Start, in.Length, in.HCAVA, access)
	if err != nil {
		return err
	}
	init := hca.MRInit{Mem: c.f.proc, Start: in.Start, Length: in.Length, IOVA: in.HCAVA, Access: access, Space: c.f.proc.Key()}
	var mr hca.MR
	if init.Shared, init.SharedAt, err = c.shared(in.Start, in.Length, access); err == nil {
		mr, err = pd.RegMR(init)
	}
	if err != nil {
		c.f.unpin(&charge)
		return err
	}
	c.f.proc.Get()
	o.Value = &mrObject{parents: c.need(), f: c.f, hca: mr, charge: charge, access: access, start: in.Start, length: in.Length}
	*out = abi.RegMRResp{MRHandle: o.ID(), LKey: mr.LKey(), RKey: mr.RKey()}
	return nil
}

// reregMR follows ib_uverbs_rereg_mr. The handle survives, whatever happens. A
// response that cannot be written is EFAULT, and the change stays.
func reregMR(c *call, in *abi.ReregMR, out *abi.ReregMRResp) error {
	flags := hca.ReregFlags(in.Flags)
	switch {
	case flags == 0:
		return unix.EINVAL
	case flags&^hca.ReregSupported != 0:
		return unix.EOPNOTSUPP
	case flags&hca.ReregTrans != 0 && in.Start&pageMask != in.HCAVA&pageMask:
		return unix.EINVAL
	}
	if err := c.usable(kindMR, in.MRHandle); err != nil {
		return err
	}
	o, err := c.f.objects.UseAlone(kindMR, in.MRHandle)
	if err != nil {
		return err
	}
	defer o.DoneAlone()
	if c.f.dev.removed.Load() { // once more: now it can be dead
		return errRemoved
	}
	mr := o.Value.(*mrObject)
	how := hca.MRRereg{Flags: flags, Access: mr.access}
	if flags&hca.ReregAccess != 0 {
		if how.Access, err = c.checkAccess(in.AccessFlags); err != nil {
			return err
		}
	}
	if flags&hca.ReregPD != 0 {
		if how.PD, err = c.pd(in.PDHandle); err != nil {
			return err
		}
	}
	charge := mr.charge
	switch {
	case flags&hca.ReregTrans == 0 && (how.Access^mr.access)&hca.AccessOnDemand != 0:
		// Its pages are charged and checked, or are not, with the range.
		return unix.EOPNOTSUPP
	case flags&hca.ReregTrans != 0:
		// Both ranges are charged for a moment, as in the drivers that pin the
		// new one first.
		if charge, err = c.pinRange(in.Start, in.Length, in.HCAVA, how.Access); err != nil {
			return err
		}
		how.Mem, how.Start, how.Length, how.IOVA = c.f.proc, in.Start, in.Length, in.HCAVA
		how.Shared, how.SharedAt, err = c.shared(in.Start, in.Length, how.Access)
	case how.Access&hca.AccessOnDemand == 0 && how.Access&hca.AccessNeedsWritable != 0 && mr.access&hca.AccessNeedsWritable == 0:
		// A region that was only read is to be written: may its owner?
		if err := c.checkRange(mr.start, mr.length, how.Access); err != nil {
			return err
		}
	}
	if flags&(hca.ReregTrans|hca.ReregAccess) == hca.ReregAccess {
		how.Shared, how.SharedAt, err = c.shared(mr.start, mr.length, how.Access)
	}
	var made hca.MR
	if err == nil {
		made, err = mr.hca.Rereg(how)
	}
	if err != nil {
		if flags&hca.ReregTrans != 0 {
			c.f.unpin(&charge)
		}
		return err
	}
	mr.hca, mr.access = made, how.Access
	if flags&hca.ReregPD != 0 {
		old := mr.parents
		mr.parents = c.need() // the new PD, which the command keeps from going
		old.release()
	}
	if flags&hca.ReregTrans != 0 {
		c.f.unpin(&mr.charge)
		mr.charge, mr.start, mr.length = charge, in.Start, in.Length
	}
	*out = abi.ReregMRResp{LKey: made.LKey(), RKey: made.RKey()}
	return nil
}

func allocMW(c *call, in *abi.AllocMW, out *abi.AllocMWResp) error {
	pd, err := c.pd(in.PDHandle)
	if err != nil {
		return err
	}
	typ := hca.MWType(in.MWType)
	if typ != hca.MWType1 && typ != hca.MWType2 {
		return unix.EINVAL
	}
	o, err := c.begin(kindMW, 0)
	if err != nil {
		return err
	}
	mw, err := pd.AllocMW(typ)
	if err != nil {
		return err
	}
	o.Value = &mwObject{parents: c.need(), hca: mw}
	*out = abi.AllocMWResp{MWHandle: o.ID(), RKey: mw.RKey()}
	return nil
}
