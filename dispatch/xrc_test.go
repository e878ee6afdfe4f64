package dispatch_test

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

func (c *client) xrcd(want unix.Errno, fd, flags uint32) uint32 {
	c.g.t.Helper()
	c.cmd(want, abi.CmdOpenXRCD, 4, raw(abi.OpenXRCD{Response: resp, FD: fd, OFlags: flags}))
	return out[abi.OpenXRCDResp](c).XRCDHandle
}

func (c *client) openQP(want unix.Errno, xrcd, qpn uint32, typ hca.QPType) uint32 {
	c.g.t.Helper()
	c.cmd(want, abi.CmdOpenQP, 32, raw(abi.OpenQP{Response: resp, UserHandle: 0x0b, PDHandle: xrcd, QPN: qpn, QPType: uint8(typ)}))
	return out[abi.CreateQPResp](c).QPHandle
}

const noFD = ^uint32(0)

// A domain is the inode's: two processes that open one file share it.
func TestOpenXRCD(t *testing.T) {
	g := newRig(t)
	g.inodes = map[int32]uint64{3: 33, 4: 33, 5: 55}
	a, b := g.client(100), g.client(200)
	a.context()
	b.context()
	a.xrcd(unix.EBADF, 9, unix.O_CREAT)
	a.xrcd(unix.EAGAIN, 3, 0)
	first := a.xrcd(0, 3, unix.O_CREAT|unix.O_EXCL)
	a.xrcd(unix.EINVAL, 4, unix.O_CREAT|unix.O_EXCL)
	again := a.xrcd(0, 4, 0)
	b.xrcd(0, 3, unix.O_CREAT)
	b.xrcd(0, 5, unix.O_CREAT)
	own := a.xrcd(0, noFD, 0)
	if n := g.hca.count()["xrcd"]; n != 3 {
		t.Fatalf("%d domains", n)
	}
	if n := g.held.Load(); n != 2 {
		t.Fatalf("%d files held", n)
	}
	for _, h := range []uint32{first, again, own} {
		a.destroyed(0, "xrcd", h)
	}
	if n := g.hca.count()["xrcd"]; n != 2 { // b's
		t.Fatalf("%d domains", n)
	}
	a.xrcd(unix.EINVAL, 3, unix.O_CREAT|unix.O_EXCL) // b still has it
	b.h.Release()
	a.xrcd(0, 3, unix.O_CREAT|unix.O_EXCL)
	a.h.Release()
	g.empty()
}

// A target QP lives as long as anybody has a handle on it; all of them are told
// of its events; the domain's handle is busy meanwhile.
func TestXRCTarget(t *testing.T) {
	g := newRig(t)
	g.inodes = map[int32]uint64{3: 33}
	a, b := g.client(100), g.client(200)
	a.context()
	b.context()
	xa, xb := a.xrcd(0, 3, unix.O_CREAT), b.xrcd(0, 3, 0)
	a.cmd(0, abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, UserHandle: 0x0a, PDHandle: xa, QPType: uint8(hca.QPTypeXRCTgt)}))
	made := out[abi.CreateQPResp](a)
	b.openQP(unix.EINVAL, xb, made.QPN+1, hca.QPTypeXRCTgt)
	b.openQP(unix.EINVAL, xb, made.QPN, hca.QPTypeRC)
	opened := b.openQP(0, xb, made.QPN, hca.QPTypeXRCTgt)
	a.destroyed(unix.EBUSY, "xrcd", xa)
	b.destroyed(unix.EBUSY, "xrcd", xb)
	a.destroyed(0, "qp", made.QPHandle)
	a.destroyed(0, "xrcd", xa)
	if n := g.hca.count()["qp"]; n != 1 {
		t.Fatalf("%d QPs", n)
	}
	// The one who is left can still use it.
	b.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: opened, QPState: uint8(hca.QPInitState), PortNum: 1,
		AttrMask: uint32(hca.QPMaskState | hca.QPMaskPKeyIndex | hca.QPMaskPort | hca.QPMaskAccess)}))
	b.cmd(0, abi.CmdQueryQP, 128, raw(abi.QueryQP{Response: resp, QPHandle: opened}))
	if s := out[abi.QueryQPResp](b).QPState; s != uint8(hca.QPInitState) {
		t.Errorf("state %d", s)
	}
	b.cmd(unix.EINVAL, abi.CmdPostRecv, 4, raw(abi.PostSend{Response: resp, QPHandle: opened, WRCount: 1, WQESize: 16}), raw(abi.RecvWR{}))
	b.destroyed(0, "qp", opened)
	b.openQP(unix.EINVAL, xb, made.QPN, hca.QPTypeXRCTgt)
	a.h.Release()
	b.h.Release()
	g.empty()
}

// Both ends of an XRC connection, and an SRQ that is named by its number.
func TestXRCObjects(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd, cq, x := c.pd(), c.cq(-1), c.xrcd(0, noFD, 0)
	xsrq := abi.CreateXSRQ{Response: resp, SRQType: uint32(hca.SRQXRC), PDHandle: pd, XRCDHandle: x, CQHandle: cq, MaxWR: 4, MaxSGE: 1}
	c.cmd(0, abi.CmdCreateXSRQ, 16, raw(xsrq))
	srq := out[abi.CreateSRQResp](c)
	if srq.SRQN == 0 {
		t.Error("an XRC SRQ without a number")
	}
	for _, tc := range []struct {
		name string
		mut  func(*abi.CreateXSRQ)
		want unix.Errno
	}{
		{"plain", func(q *abi.CreateXSRQ) { q.SRQType = 0 }, 0},
		{"tag matching", func(q *abi.CreateXSRQ) { q.SRQType = 2 }, unix.EOPNOTSUPP},
		{"unknown type", func(q *abi.CreateXSRQ) { q.SRQType = 3 }, unix.EOPNOTSUPP},
		{"no pd", func(q *abi.CreateXSRQ) { q.PDHandle = 99 }, unix.ENOENT},
	} {
		in := xsrq
		tc.mut(&in)
		t.Run(tc.name, func(*testing.T) { c.cmd(tc.want, abi.CmdCreateXSRQ, 16, raw(in)) })
	}
	for _, kind := range []string{"xrcd", "cq", "pd"} {
		c.destroyed(unix.EBUSY, kind, map[string]uint32{"xrcd": x, "cq": cq, "pd": pd}[kind])
	}
	ini := abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: 77, MaxSendWR: 2, MaxSendSGE: 1, MaxRecvWR: 1 << 30, QPType: uint8(hca.QPTypeXRCIni)}
	c.cmd(0, abi.CmdCreateQP, 32, raw(ini)) // the receive side is ignored
	if q := out[abi.CreateQPResp](c); q.MaxRecvWR != 0 {
		t.Errorf("an initiator with receives: %+v", q)
	}
	// A plain QP does not receive from an XRC SRQ.
	c.cmd(unix.EINVAL, abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, SRQHandle: srq.SRQHandle, IsSRQ: 1, MaxSendWR: 1, MaxSendSGE: 1, QPType: 2}))
	c.cmd(0, abi.CmdPostSRQRecv, 4, raw(abi.PostSend{Response: resp, QPHandle: srq.SRQHandle, WRCount: 1, WQESize: 16}), raw(abi.RecvWR{}))
	// Attributes that the other end has are ignored, as rdma-core sets them.
	c.cmd(0, abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, PDHandle: x, QPType: uint8(hca.QPTypeXRCTgt)}))
	tgt := out[abi.CreateQPResp](c)
	c.connect(tgt.QPHandle, 1, 1)
	c.h.Release()
	g.empty()
}

func TestReregMR(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd, pd2 := c.pd(), c.pd()
	const rw = 0x10000 + 8*page
	mr := c.mr(pd, rw, page, 0)
	re := func(want unix.Errno, in abi.ReregMR) abi.ReregMRResp {
		t.Helper()
		in.Response, in.MRHandle = resp, mr.MRHandle
		before := g.state()
		c.cmd(want, abi.CmdReregMR, 8, raw(in))
		if want != 0 {
			if after := g.state(); after.Files[0].Pinned != before.Files[0].Pinned {
				t.Errorf("%+v: %d bytes pinned, then %d", in, before.Files[0].Pinned, after.Files[0].Pinned)
			}
		}
		return out[abi.ReregMRResp](c)
	}
	for _, tc := range []struct {
		name string
		in   abi.ReregMR
		want unix.Errno
	}{
		{"nothing", abi.ReregMR{}, unix.EINVAL},
		{"unknown flag", abi.ReregMR{Flags: 8}, unix.EOPNOTSUPP},
		{"page offsets differ", abi.ReregMR{Flags: 1, Start: rw, HCAVA: rw + 1, Length: 1}, unix.EINVAL},
		{"empty range", abi.ReregMR{Flags: 1, Start: rw, HCAVA: rw}, unix.EINVAL},
		{"hole", abi.ReregMR{Flags: 1, Start: 0x1000, HCAVA: 0x1000, Length: 1}, unix.EFAULT},
		{"over the limit", abi.ReregMR{Flags: 1, Start: rw, HCAVA: rw, Length: 9 << 20}, unix.ENOMEM},
		{"access without local write", abi.ReregMR{Flags: 4, AccessFlags: 2}, unix.EINVAL},
		{"unknown access", abi.ReregMR{Flags: 4, AccessFlags: 1 << 19}, unix.EINVAL},
		{"no such pd", abi.ReregMR{Flags: 2, PDHandle: 99}, unix.ENOENT},
		{"range and no such pd", abi.ReregMR{Flags: 3, PDHandle: 99, Start: rw, HCAVA: rw, Length: page}, unix.ENOENT},
		{"another pd, no such range", abi.ReregMR{Flags: 3, PDHandle: pd2, Start: 0x1000, HCAVA: 0x1000, Length: page}, unix.EFAULT},
		{"read-only memory", abi.ReregMR{Flags: 5, AccessFlags: 1, Start: 0x10000, HCAVA: 0x10000, Length: page}, unix.EFAULT},
	} {
		t.Run(tc.name, func(*testing.T) { re(tc.want, tc.in) })
	}
	c.destroyed(0, "pd", pd2) // no failure has left a use of it behind
	pd2 = c.pd()
	r := re(0, abi.ReregMR{Flags: 7, PDHandle: pd2, Start: rw, HCAVA: rw, Length: 3 * page, AccessFlags: 1})
	if r.LKey != mr.LKey || r.RKey != mr.RKey {
		t.Errorf("keys %+v, before %+v", r, mr)
	}
	if n := g.pins.Pinned("100"); n != 3*page {
		t.Errorf("%d bytes pinned", n)
	}
	c.destroyed(0, "pd", pd)
	c.destroyed(unix.EBUSY, "pd", pd2)
	// What was registered for reading cannot be made writable by its access alone.
	ro := c.mr(pd2, 0x10000, page, 0)
	c.cmd(unix.EFAULT, abi.CmdReregMR, 8, raw(abi.ReregMR{Response: resp, MRHandle: ro.MRHandle, Flags: 4, AccessFlags: 1}))
	// Done, but the client cannot be told: the change stays.
	c.cmd(unix.EFAULT, abi.CmdReregMR, 8, raw(abi.ReregMR{Response: 8, MRHandle: mr.MRHandle, Flags: 1, Start: rw, HCAVA: rw, Length: page}))
	if n := g.pins.Pinned("100"); n != 2*page {
		t.Errorf("%d bytes pinned", n)
	}
	c.destroyed(0, "mr", mr.MRHandle)
	c.h.Release()
	g.empty()
}

// A region on demand is charged nothing and its pages need not be there; what it
// is cannot be changed but with its range.
func TestRegMROnDemand(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd := c.pd()
	const (
		rw       = 0x10000 + 8*page
		hole     = 0x1000
		onDemand = uint32(hca.AccessOnDemand)
		all      = hca.ImplicitLength
	)
	for _, tc := range []struct {
		name string
		in   abi.RegMR
		want unix.Errno
	}{
		{"memory", abi.RegMR{Start: rw, HCAVA: rw, Length: page}, 0},
		{"hole", abi.RegMR{Start: hole, HCAVA: hole, Length: page}, 0},
		{"hole, local write", abi.RegMR{Start: hole, HCAVA: hole, Length: page, AccessFlags: 1}, 0},
		{"over the memlock limit", abi.RegMR{Start: rw, HCAVA: rw, Length: 9 << 20}, 0},
		{"huge pages", abi.RegMR{Start: rw, HCAVA: rw, Length: page, AccessFlags: uint32(hca.AccessHugetlb)}, 0},
		{"all", abi.RegMR{Length: all}, 0},
		{"all, elsewhere", abi.RegMR{Length: all, HCAVA: page}, unix.EINVAL},
		{"almost all", abi.RegMR{Length: all - 1}, unix.EINVAL},
		{"empty", abi.RegMR{Start: rw, HCAVA: rw}, unix.EINVAL},
		{"wraps", abi.RegMR{Start: ^uint64(0), HCAVA: ^uint64(0), Length: 2}, unix.EINVAL},
		{"remote without local write", abi.RegMR{Start: rw, HCAVA: rw, Length: 1, AccessFlags: 2}, unix.EINVAL},
		{"flush", abi.RegMR{Start: rw, HCAVA: rw, Length: 1, AccessFlags: 1 << 8}, unix.EOPNOTSUPP},
	} {
		tc.in.Response, tc.in.PDHandle = resp, pd
		tc.in.AccessFlags |= onDemand
		t.Run(tc.name, func(*testing.T) { c.cmd(tc.want, abi.CmdRegMR, 12, raw(tc.in)) })
	}
	c.cmd(unix.EINVAL, abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, PDHandle: pd, Length: all}))
	if n := g.state().Files[0].Pinned; n != 0 {
		t.Errorf("%d bytes pinned", n)
	}
	rereg := func(want unix.Errno, in abi.ReregMR) {
		in.Response = resp
		c.cmd(want, abi.CmdReregMR, 8, raw(in))
	}
	mr := c.mr(pd, rw, page, hca.AccessLocalWrite).MRHandle
	rereg(unix.EOPNOTSUPP, abi.ReregMR{MRHandle: mr, Flags: 4, AccessFlags: onDemand})
	rereg(0, abi.ReregMR{MRHandle: mr, Flags: 5, AccessFlags: onDemand | 1, Start: hole, HCAVA: hole, Length: page})
	if n := g.state().Files[0].Pinned; n != 0 {
		t.Errorf("%d bytes pinned after the region has become one on demand", n)
	}
	rereg(unix.EOPNOTSUPP, abi.ReregMR{MRHandle: mr, Flags: 4, AccessFlags: 1})
	rereg(unix.EFAULT, abi.ReregMR{MRHandle: mr, Flags: 5, AccessFlags: 1, Start: hole, HCAVA: hole, Length: page})
	rereg(0, abi.ReregMR{MRHandle: mr, Flags: 5, AccessFlags: 1, Start: rw, HCAVA: rw, Length: page})
	if n := g.state().Files[0].Pinned; n != page {
		t.Errorf("%d bytes pinned after the region is none on demand any more", n)
	}
	c.h.Release()
	g.empty()
}

func TestAllocMW(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd := c.pd()
	for typ, want := range map[uint8]unix.Errno{0: unix.EINVAL, 1: 0, 2: 0, 3: unix.EINVAL} {
		c.cmd(want, abi.CmdAllocMW, 8, raw(abi.AllocMW{Response: resp, PDHandle: pd, MWType: typ}))
	}
	mw := out[abi.AllocMWResp](c)
	if mw.RKey == 0 {
		t.Error("key 0")
	}
	c.destroyed(unix.EBUSY, "pd", pd)
	c.destroyed(unix.EINVAL, "mr", mw.MWHandle)
	c.h.Release()
	g.empty()
}

// A moderated CQ tells of its completions by the bunch.
func TestModeratedChannel(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
	fd := int32(out[abi.CreateCompChannelResp](c).FD)
	pd, cq := c.pd(), c.cq(fd)
	qp := c.qp(pd, cq, hca.QPTypeRC)
	c.connect(qp.QPHandle, qp.QPN, 1)
	c.ex(0, abi.ExCmdModifyCQ, 0, raw(abi.ExModifyCQ{CQHandle: cq, AttrMask: abi.CQModerate, CQCount: 3, CQPeriod: 65535}))
	c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp.QPHandle, QPState: uint8(hca.QPErr), AttrMask: uint32(hca.QPMaskState)}))
	c.cmd(0, abi.CmdReqNotifyCQ, 0, raw(abi.ReqNotifyCQ{CQHandle: cq}))
	for range 3 { // flushed at once
		c.write(post(abi.CmdPostRecv, qp.QPHandle, 16, [][]byte{raw(abi.RecvWR{})}, nil))
	}
	r := newRequest(100)
	g.opened[int(fd)].Read(r, 8)
	if a := <-r.ch; len(a.data) != 8 || binary.LittleEndian.Uint64(a.data) != 0xc0ffee {
		t.Fatalf("%+v", a)
	}
	c.h.Release()
	g.opened[int(fd)].Release()
	g.empty()
}
