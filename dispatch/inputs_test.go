package dispatch_test

import (
	"math/rand"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

// Small inputs from public reports that are answered by commands.

// srq makes a shared receive queue.
func (c *client) srq(pd, wr, sge uint32) abi.CreateSRQResp {
	c.g.t.Helper()
	c.cmd(0, abi.CmdCreateSRQ, 16, raw(abi.CreateSRQ{Response: resp, UserHandle: 0x59, PDHandle: pd, MaxWR: wr, MaxSGE: sge}))
	return out[abi.CreateSRQResp](c)
}

// completions takes n completions of a CQ.
func (c *client) completions(cq uint32, n int) (all []abi.WC) {
	c.g.t.Helper()
	for len(all) < n {
		c.cmd(0, abi.CmdPollCQ, 8+48, raw(abi.PollCQ{Response: resp, CQHandle: cq, NE: 1}))
		w := out[struct {
			Head abi.PollCQResp
			WC   abi.WC
		}](c)
		if w.Head.Count == 1 {
			all = append(all, w.WC)
		}
	}
	return all
}

// posted posts, and returns the errno and bad_wr.
func (c *client) posted(b []byte) (unix.Errno, uint32) {
	c.g.t.Helper()
	if err := c.p.WriteAt([]byte{0xa5, 0xa5, 0xa5, 0xa5}, resp); err != nil {
		c.g.t.Fatal(err)
	}
	a := c.write(b)
	return a.errno, out[abi.PostResp](c).BadWR
}

func recvWRs(n int, sges uint32) (w [][]byte) {
	for i := range n {
		w = append(w, raw(abi.RecvWR{WRID: uint64(i), NumSGE: sges}))
	}
	return w
}

// An SRQ with a QP on it cannot be destroyed; both still work, and the QP's size
// of its own receive queue was ignored, however huge.
func TestSmallInputDestroyBusySRQ(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd, cq := c.pd(), c.cq(-1)
	srq := c.srq(pd, 8, 1).SRQHandle
	create := abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, SRQHandle: srq, IsSRQ: 1,
		MaxSendWR: 8, MaxRecvWR: ^uint32(0), MaxSendSGE: 1, MaxRecvSGE: ^uint32(0), QPType: uint8(hca.QPTypeRC), SQSigAll: 1}
	c.cmd(0, abi.CmdCreateQP, 32, raw(create))
	qp := out[abi.CreateQPResp](c)
	destroy := func(want unix.Errno) {
		t.Helper()
		c.cmd(want, abi.CmdDestroySRQ, 4, raw(abi.DestroyQP{Response: resp, QPHandle: srq}))
	}
	destroy(unix.EBUSY)
	port, _ := g.engine.Port(1)
	c.connect(qp.QPHandle, qp.QPN, port.LID)
	mr := c.mr(pd, 0x10000+4*page, page, hca.AccessLocalWrite)
	sge := abi.SGE{Addr: 0x10000 + 4*page, Length: 8, LKey: mr.LKey}
	if e, _ := c.posted(post(abi.CmdPostSRQRecv, srq, 16, recvWRs(1, 1), []abi.SGE{sge})); e != 0 {
		t.Fatal(e)
	}
	if e, _ := c.posted(post(abi.CmdPostSend, qp.QPHandle, 56, [][]byte{raw(abi.SendWR{WRID: 9, NumSGE: 1, Opcode: uint32(hca.OpSend)})}, []abi.SGE{sge})); e != 0 {
		t.Fatal(e)
	}
	for _, w := range c.completions(cq, 2) {
		if w.Status != 0 {
			t.Errorf("%+v", w)
		}
	}
	destroy(unix.EBUSY)
	c.cmd(0, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: qp.QPHandle}))
	destroy(0)
	c.h.Release()
	g.empty()
}

// A receive in RESET, more SGEs than were asked for, a full queue: the errno, and
// bad_wr counts from 1. Those before it are taken.
func TestSmallInputBadWR(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd, cq := c.pd(), c.cq(-1)
	check := func(what string, b []byte, want unix.Errno, bad uint32) {
		t.Helper()
		if e, n := c.posted(b); e != want || n != bad {
			t.Errorf("%s: %v with bad_wr %d, want %v with %d", what, e, n, want, bad)
		}
	}
	reset := c.qp(pd, cq, hca.QPTypeRC).QPHandle
	check("receive in RESET", post(abi.CmdPostRecv, reset, 16, recvWRs(3, 0), nil), unix.EINVAL, 1)
	check("send in RESET", post(abi.CmdPostSend, reset, 56, [][]byte{raw(abi.SendWR{Opcode: 2})}, nil), unix.EINVAL, 1)
	qp := c.qp(pd, cq, hca.QPTypeRC)
	port, _ := g.engine.Port(1)
	c.connect(qp.QPHandle, qp.QPN, port.LID)
	long := append(recvWRs(1, 1), recvWRs(1, 3)...)
	check("a list longer than max_sge", post(abi.CmdPostRecv, qp.QPHandle, 16, long, make([]abi.SGE, 4)), unix.EINVAL, 2)
	check("more receives than there is room for", post(abi.CmdPostRecv, qp.QPHandle, 16, recvWRs(9, 0), nil), unix.ENOMEM, 8)
	srq := c.srq(pd, 4, 1)
	room := srq.MaxWR
	check("an SRQ's list longer than max_sge", post(abi.CmdPostSRQRecv, srq.SRQHandle, 16, recvWRs(1, srq.MaxSGE+1), make([]abi.SGE, srq.MaxSGE+1)), unix.EINVAL, 1)
	check("more receives than an SRQ has room for", post(abi.CmdPostSRQRecv, srq.SRQHandle, 16, recvWRs(int(room)+1, 0), nil), unix.ENOMEM, room+1)
}

// More sends than the queue has room for: ENOMEM, and those before it run.
func TestSmallInputSQDepth(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd, cq := c.pd(), c.cq(-1)
	qp := c.qp(pd, cq, hca.QPTypeRC) // of 8
	port, _ := g.engine.Port(1)
	c.connect(qp.QPHandle, qp.QPN, port.LID)
	var wrs [][]byte
	for i := range 10 {
		// rdma keeps its rkey where atomic has compare_add; no bytes need none.
		wrs = append(wrs, raw(abi.SendWR{WRID: uint64(i), Opcode: uint32(hca.OpRDMAWrite), SendFlags: uint32(hca.SendSignaled)}))
	}
	if e, bad := c.posted(post(abi.CmdPostSend, qp.QPHandle, 56, wrs, nil)); e != unix.ENOMEM || bad != 9 {
		t.Fatalf("%v with bad_wr %d", e, bad)
	}
	for i, w := range c.completions(cq, 8) {
		if w.WRID != uint64(i) || w.Status != 0 {
			t.Errorf("completion %d: %+v", i, w)
		}
	}
}

// A resized SRQ has at least as many as were asked for.
func TestSmallInputResizeSRQ(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd := c.pd()
	srq := c.srq(pd, 3, 2)
	if srq.MaxWR < 3 || srq.MaxSGE < 2 {
		t.Errorf("created with %+v", srq)
	}
	for _, n := range []uint32{1, 7, 1000, 5} {
		c.cmd(0, abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: srq.SRQHandle, AttrMask: uint32(hca.SRQMaxWR), MaxWR: n}))
		c.cmd(0, abi.CmdQuerySRQ, 16, raw(abi.QuerySRQ{Response: resp, SRQHandle: srq.SRQHandle}))
		if r := out[abi.QuerySRQResp](c); r.MaxWR < n || r.MaxSGE < 2 {
			t.Errorf("asked for %d: %+v", n, r)
		}
		if e, _ := c.posted(post(abi.CmdPostSRQRecv, srq.SRQHandle, 16, recvWRs(0, 0), nil)); e != 0 {
			t.Error(e)
		}
	}
}

// 100 KiB under a limit of 64 KiB: ENOMEM, until the limit is raised or something
// is deregistered.
func TestSmallInputMemlock(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd := c.pd()
	const at, size = 0x10000 + 4*page, 100 << 10
	reg := func(want unix.Errno, n uint64) uint32 {
		t.Helper()
		c.cmd(want, abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: at, HCAVA: at, Length: n, PDHandle: pd, AccessFlags: 1}))
		return out[abi.RegMRResp](c).MRHandle
	}
	c.p.limit = 64 << 10
	reg(unix.ENOMEM, size)
	small := reg(0, 64<<10)
	c.p.limit = 128 << 10
	reg(unix.ENOMEM, size)
	c.destroyed(0, "mr", small)
	big := reg(0, size)
	c.destroyed(0, "mr", big)
	c.p.limit = 64 << 10
	reg(unix.ENOMEM, size)
	c.p.limit = 104 << 10
	reg(0, size)
	c.h.Release()
	g.empty()
}

// A read-only mapping can be registered to be read, not to be written.
func TestSmallInputReadOnlyMapping(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd := c.pd()
	for _, tc := range []struct {
		access hca.Access
		want   unix.Errno
	}{
		{0, 0}, {hca.AccessRemoteRead, 0}, {hca.AccessLocalWrite, unix.EFAULT},
		{hca.AccessLocalWrite | hca.AccessRemoteWrite, unix.EFAULT}, {hca.AccessMWBind, unix.EFAULT},
	} {
		const ro = 0x10000 // the first page
		b := pack(abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: ro, HCAVA: ro, Length: page, PDHandle: pd, AccessFlags: uint32(tc.access)}))
		if a := c.write(b); a.errno != tc.want {
			t.Errorf("access %#x: %v, want %v", tc.access, a.errno, tc.want)
		}
	}
}

// Regions of all sizes come and go: nothing stays pinned.
func TestSmallInputRegDereg(t *testing.T) {
	const rounds = 100000
	g := newRigWith(t, dispatch.Limits{})
	c := g.client(100)
	c.context()
	pd := c.pd()
	c.p.limit = 64 << 20
	r := rand.New(rand.NewSource(1))
	var live []uint32
	for range rounds {
		if len(live) > 50 || len(live) > 0 && r.Intn(2) == 0 {
			i := r.Intn(len(live))
			c.destroyed(0, "mr", live[i])
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
			continue
		}
		const from = 0x10000 + 4*page
		off, n := uint64(r.Intn(8*page)), uint64(1+r.Intn(clientMem/2))
		live = append(live, c.mr(pd, from+off, n, hca.AccessLocalWrite).MRHandle)
	}
	for _, h := range live {
		c.destroyed(0, "mr", h)
	}
	if n := g.pins.Pinned("100"); n != 0 {
		t.Errorf("%d bytes pinned", n)
	}
	c.h.Release()
	g.empty()
}

// What create_cq_ex may ask for and no driver here has is EOPNOTSUPP, exactly:
// programs look at the errno and fall back.
func TestSmallInputCreateCQEx(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	for _, flags := range []uint32{abi.CQFlagTimestampCompletion, 2, 1 << 31} {
		c.ex(unix.EOPNOTSUPP, abi.ExCmdCreateCQ, 16, raw(abi.ExCreateCQ{CQE: 4, CompChannel: -1, Flags: flags}))
	}
	c.ex(0, abi.ExCmdCreateCQ, 16, raw(abi.ExCreateCQ{CQE: 4, CompChannel: -1}))
}
