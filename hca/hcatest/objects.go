package hcatest

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var objectCases = []testCase{
	{"Attributes", testAttributes},
	{"CQLimits", testCQLimits},
	{"QPLimits", testQPLimits},
	{"QPTypes", testQPTypes},
	{"SRQLimits", testSRQLimits},
	{"MRChecks", testMRChecks},
	{"MRKeys", testMRKeys},
	{"MRBounds", testMRBounds},
	{"MROnDemand", testMROnDemand},
	{"AHChecks", testAHChecks},
	{"QPNumbers", testQPNumbers},
	{"McastChecks", testMcastChecks},
}

func testAttributes(t *testing.T, p Pair) {
	a := p.A.Attr()
	if a.CompVectors < 1 || a.MaxSGE < 2 || a.PhysPortCnt < 1 || a.MaxQP == 0 || a.MaxCQE == 0 ||
		a.GIDTableLen < 1 || a.PKeyTableLen < 1 || a.MaxMRSize == 0 || a.PageSizeCap&4096 == 0 || len(a.NodeDesc) > 63 {
		t.Fatalf("attributes %+v", a)
	}
	port, err := p.A.Port(1)
	must(t, err)
	if port.State != 4 || port.LinkLayer == hca.LinkInfiniBand && port.LID == 0 || port.MaxMsgSize == 0 || int(port.GIDTableLen) != a.GIDTableLen {
		t.Fatalf("port %+v", port)
	}
	_, err = p.A.Port(0)
	wantErrno(t, err, unix.EINVAL)
	_, err = p.A.Port(a.PhysPortCnt + 1)
	wantErrno(t, err, unix.EINVAL)
	g, err := p.A.GID(1, 0)
	must(t, err)
	if g == (hca.GID{}) {
		t.Fatal("GID 0 is empty")
	}
	_, err = p.A.GID(1, a.GIDTableLen)
	wantErrno(t, err, unix.EINVAL)
	_, err = p.A.GID(1, -1)
	wantErrno(t, err, unix.EINVAL)
	k, err := p.A.PKey(1, 0)
	must(t, err)
	if k != 0xffff {
		t.Fatalf("pkey %#x", k)
	}
	_, err = p.A.PKey(1, a.PKeyTableLen)
	wantErrno(t, err, unix.EINVAL)
	c, err := p.A.Counters(1)
	must(t, err)
	for _, n := range []string{"port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets"} {
		if _, ok := c[n]; !ok {
			t.Errorf("no counter %s", n)
		}
	}
}

func testCQLimits(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	limit := int(p.A.Attr().MaxCQE)
	for _, n := range []int{0, -1, limit + 1, 1<<31 - 1} {
		_, err := e.ctx.CreateCQ(hca.CQInit{Entries: n})
		wantErrno(t, err, unix.EINVAL)
	}
	_, err := e.ctx.CreateCQ(hca.CQInit{Entries: 1, Vector: p.A.Attr().CompVectors})
	wantErrno(t, err, unix.EINVAL)
	cq, err := e.ctx.CreateCQ(hca.CQInit{Entries: limit})
	must(t, err)
	if cq.Entries() < limit {
		t.Errorf("%d entries, want %d", cq.Entries(), limit)
	}
	must(t, cq.Close())
}

func testQPLimits(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	a := p.A.Attr()
	try := func(c hca.QPCap, typ hca.QPType, srq hca.SRQ) error {
		q, err := e.pd.CreateQP(hca.QPInit{Type: typ, SendCQ: e.scq, RecvCQ: e.rcq, SRQ: srq, Cap: c})
		if err == nil {
			got := q.Cap()
			if got.MaxSendWR < c.MaxSendWR || got.MaxInline < c.MaxInline || srq == nil && got.MaxRecvWR < c.MaxRecvWR {
				t.Errorf("asked for %+v, got %+v", c, got)
			}
			must(t, q.Close())
		}
		return err
	}
	ok := hca.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1}
	for _, f := range []func(*hca.QPCap){
		func(c *hca.QPCap) { c.MaxSendWR = a.MaxQPWR + 1 },
		func(c *hca.QPCap) { c.MaxRecvWR = ^uint32(0) },
		func(c *hca.QPCap) { c.MaxSendSGE = a.MaxSGE + 1 },
		func(c *hca.QPCap) { c.MaxRecvSGE = ^uint32(0) },
		func(c *hca.QPCap) { c.MaxInline = a.MaxInline + 1 },
		func(c *hca.QPCap) { *c = hca.QPCap{} },
	} {
		c := ok
		f(&c)
		wantErrno(t, try(c, hca.QPTypeRC, nil), unix.EINVAL)
	}
	must(t, try(hca.QPCap{MaxSendWR: a.MaxQPWR, MaxRecvWR: a.MaxQPWR, MaxSendSGE: a.MaxSGE, MaxRecvSGE: a.MaxSGE, MaxInline: a.MaxInline}, hca.QPTypeRC, nil))
	if p.A.Ops().Has(hca.OpSRQ) {
		srq, err := e.pd.CreateSRQ(hca.SRQInit{MaxWR: 4, MaxSGE: 1})
		must(t, err)
		huge := ok
		huge.MaxRecvWR = ^uint32(0)
		must(t, try(huge, hca.QPTypeRC, srq)) // the field is ignored
		must(t, srq.Close())
	}
}

// testQPTypes: types that exist and are not there are not supported, what is no
// type, or not a client's, is invalid.
func testQPTypes(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	for typ, errno := range map[hca.QPType]unix.Errno{
		0: unix.EINVAL, 1: unix.EINVAL, 7: unix.EINVAL, 11: unix.EINVAL, 254: unix.EINVAL,
		hca.QPTypeRawPacket: unix.EOPNOTSUPP, 255: unix.EOPNOTSUPP,
	} {
		_, err := e.pd.CreateQP(hca.QPInit{Type: typ, SendCQ: e.scq, RecvCQ: e.rcq, Cap: e.o.cap})
		wantErrno(t, err, errno)
	}
}

func testSRQLimits(t *testing.T, p Pair) {
	if !p.A.Ops().Has(hca.OpSRQ | hca.OpModifySRQ) {
		t.Skip("no SRQ")
	}
	e := newEnd(t, p.A, defaults())
	a := p.A.Attr()
	for _, in := range []hca.SRQInit{{MaxWR: 0, MaxSGE: 1}, {MaxWR: 1}, {MaxWR: a.MaxSRQWR + 1, MaxSGE: 1}, {MaxWR: 1, MaxSGE: a.MaxSRQSGE + 1}, {MaxWR: ^uint32(0), MaxSGE: ^uint32(0)}} {
		_, err := e.pd.CreateSRQ(in)
		wantErrno(t, err, unix.EINVAL)
	}
	s, err := e.pd.CreateSRQ(hca.SRQInit{MaxWR: 4, MaxSGE: 2})
	must(t, err)
	defer s.Close()
	if s.Num() != 0 {
		t.Errorf("number %#x of a plain SRQ", s.Num())
	}
	n, err := s.PostRecv([]hca.RecvWR{{ID: 1}, {ID: 2, SGE: make([]hca.SGE, 3)}})
	wantErrno(t, err, unix.EINVAL)
	if n != 1 {
		t.Fatalf("%d posted", n)
	}
	depth := s.Attr().MaxWR
	n, err = s.PostRecv(make([]hca.RecvWR, depth+1))
	wantErrno(t, err, unix.ENOMEM)
	if depth < 4 || n != int(depth)-1 {
		t.Fatalf("%d posted, depth %d", n, depth)
	}
	wantErrno(t, s.Modify(hca.SRQAttr{MaxWR: depth - 1}, hca.SRQMaxWR, nil), unix.EINVAL) // depth are queued
	wantErrno(t, s.Modify(hca.SRQAttr{Limit: depth + 1}, hca.SRQLimit, nil), unix.EINVAL)
	wantErrno(t, s.Modify(hca.SRQAttr{MaxWR: a.MaxSRQWR + 1}, hca.SRQMaxWR, nil), unix.EINVAL)
	must(t, s.Modify(hca.SRQAttr{MaxWR: depth + 5}, hca.SRQMaxWR, nil))
	if at := s.Attr(); at.MaxWR < depth+5 || at.MaxSGE < 2 {
		t.Fatalf("attributes %+v", at)
	}
	if n, err = s.PostRecv(make([]hca.RecvWR, 5)); err != nil || n != 5 {
		t.Fatalf("%d posted after the resize: %v", n, err)
	}
}

func testMRChecks(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	reg := func(start, length, iova uint64, acc hca.Access) error {
		mr, err := e.pd.RegMR(hca.MRInit{Mem: e.mem, Start: start, Length: length, IOVA: iova, Access: acc})
		if err == nil {
			must(t, mr.Close())
		}
		return err
	}
	const top = ^uint64(0)
	wantErrno(t, reg(top, 2, 0, 0), unix.EINVAL)
	wantErrno(t, reg(0, 2, top, 0), unix.EINVAL)
	wantErrno(t, reg(4096, top, 0, 0), unix.EINVAL)
	must(t, reg(memBase, 0, memBase, 0))
	must(t, reg(top-4095, 4096, top-4095, 0)) // ends at the top without wrapping
	wantErrno(t, reg(memBase, 8, memBase, hca.AccessRemoteWrite), unix.EINVAL)
	wantErrno(t, reg(memBase, 8, memBase, hca.AccessRemoteAtomic), unix.EINVAL)
	must(t, reg(memBase, 8, memBase, hca.AccessRemoteRead))
	must(t, reg(memBase, 8, memBase, hca.AccessRelaxedOrder))
}

func testMRKeys(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	seen := make(map[uint32]bool)
	for range 300 {
		mr, err := a.pd.RegMR(hca.MRInit{Mem: a.mem, Start: memBase, Length: 64, IOVA: memBase})
		must(t, err)
		if mr.LKey() == 0 || seen[mr.LKey()] {
			t.Fatalf("lkey %#x again", mr.LKey())
		}
		seen[mr.LKey()] = true
		must(t, mr.Close())
	}
	// A region of another PD, and a key that is gone.
	other := newEnd(t, p.A, defaults())
	b.postRecv(1, b.sge(0, 64))
	w := a.send(2, 0, 64)
	w.SGE[0].LKey = other.mr.LKey()
	a.postSend(w)
	one(t, a.scq, 2, hca.WCLocProtErr)
	if a.state() != hca.QPErr {
		t.Fatalf("state %d after a protection error", a.state())
	}
	for _, key := range []uint32{0, ^uint32(0), a.mr.LKey() ^ 1} {
		a, b := pair(t, p, defaults())
		b.postRecv(1, b.sge(0, 64))
		w := a.send(2, 0, 64)
		w.SGE[0].LKey = key
		a.postSend(w, a.send(3, 0, 64))
		one(t, a.scq, 2, hca.WCLocProtErr)
		one(t, a.scq, 3, hca.WCWRFlushErr)
		none(t, b.rcq)
	}
}

func testMRBounds(t *testing.T, p Pair) {
	for _, c := range []struct {
		addr uint64
		n    uint32
		ok   bool
	}{
		{memBase, memSize, true},
		{memBase + memSize - 1, 1, true},
		{memBase + memSize, 1, false},
		{memBase + memSize - 1, 2, false},
		{memBase - 1, 1, false},
		{memBase - 1, 2, false},
		{memBase, memSize + 1, false},
		{^uint64(0), 1, false},
		{^uint64(0), 0x7fffffff, false},
		{memBase + memSize, 0, true}, // no bytes: not looked at
	} {
		a, b := pair(t, p, defaults())
		b.postRecv(1, b.sge(0, memSize))
		a.postSend(hca.SendWR{ID: 2, Opcode: hca.OpSend, Flags: hca.SendSignaled,
			SGE: []hca.SGE{{Addr: c.addr, Length: c.n, LKey: a.mr.LKey()}}})
		want := hca.WCSuccess
		if !c.ok {
			want = hca.WCLocProtErr
		}
		one(t, a.scq, 2, want)

		a, b = pair(t, p, defaults())
		w := a.rdma(hca.OpRDMAWrite, 3, 0, b, 0, 0)
		w.RemoteAddr = c.addr
		w.SGE[0].Length = min(c.n, memSize)
		if c.n > memSize { // as many bytes with more SGEs
			w.SGE = []hca.SGE{a.sge(0, memSize), a.sge(0, 1)}
		}
		a.postSend(w)
		if want = hca.WCSuccess; !c.ok {
			want = hca.WCRemAccessErr
		}
		one(t, a.scq, 3, want)
	}
}

// testMROnDemand: a region on demand works as any other, and can be all of the
// address space; where there is nothing, requests fail when they come to it.
func testMROnDemand(t *testing.T, p Pair) {
	if p.A.Attr().ODP.General&hca.ODPImplicit == 0 || p.B.Attr().ODP.General&hca.ODPImplicit == 0 {
		t.Skip("no on-demand paging")
	}
	all := hca.MRInit{Length: hca.ImplicitLength, Access: allAcc | hca.AccessOnDemand}
	for name, change := range map[string]func(*hca.MRInit){
		"not on demand":   func(in *hca.MRInit) { in.Access = allAcc },
		"another start":   func(in *hca.MRInit) { in.Start = 1 },
		"another address": func(in *hca.MRInit) { in.IOVA = 1 },
		"another length":  func(in *hca.MRInit) { in.Length-- },
	} {
		e := newEnd(t, p.A, defaults())
		in := all
		in.Mem = e.mem
		change(&in)
		if _, err := e.pd.RegMR(in); err == nil {
			t.Fatalf("%s: no error", name)
		} else {
			wantErrno(t, err, unix.EINVAL)
		}
	}
	// Programs pass a region's flags on to the QP.
	q := newEnd(t, p.A, defaults()).qp
	must(t, q.Modify(&hca.QPAttr{State: hca.QPInitState, Port: 1, Access: allAcc | hca.AccessOnDemand | hca.AccessHugetlb},
		hca.QPMaskState|hca.QPMaskPKeyIndex|hca.QPMaskPort|hca.QPMaskAccess))
	for _, op := range []hca.SendOpcode{hca.OpSend, hca.OpRDMAWrite, hca.OpRDMARead} {
		for _, there := range []bool{true, false} {
			a, b := pair(t, p, defaults())
			all.Mem = b.mem
			mr, err := b.pd.RegMR(all)
			must(t, err)
			t.Cleanup(func() { must(t, mr.Close()) })
			at, want := uint64(memBase+64), hca.WCSuccess
			if !there {
				at, want = memBase+memSize+1<<20, hca.WCRemOpErr
			}
			from, fromAt, to, toAt := a.mem, 0, b.mem, 64
			w := withKey(a.rdma(op, 1, 0, b, 0, 8), at, mr)
			switch op {
			case hca.OpSend:
				w = hca.SendWR{ID: 1, Opcode: op, Flags: hca.SendSignaled, SGE: []hca.SGE{a.sge(0, 8)}}
				b.postRecv(2, hca.SGE{Addr: at, Length: 8, LKey: mr.LKey()})
			case hca.OpRDMARead:
				from, fromAt, to, toAt = b.mem, 64, a.mem, 0
			}
			from.Set(fromAt, Pattern(int(op)+1, 8))
			a.postSend(w)
			one(t, a.scq, 1, want)
			if there {
				equal(t, to.Get(toAt, 8), Pattern(int(op)+1, 8))
			}
		}
	}
}

func testAHChecks(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	good := e.attrTo(e)
	ah, err := e.pd.CreateAH(good)
	must(t, err)
	if ah.Attr() != good {
		t.Errorf("attributes %+v, want %+v", ah.Attr(), good)
	}
	must(t, ah.Close())
	refused := []func(*hca.AHAttr){
		func(a *hca.AHAttr) { a.Port = 0 },
		func(a *hca.AHAttr) { a.Port = 2 },
		func(a *hca.AHAttr) { a.IsGlobal, a.SGIDIndex = true, uint8(p.A.Attr().GIDTableLen) },
	}
	if !e.eth {
		refused = append(refused,
			func(a *hca.AHAttr) { a.SL = 16 },
			func(a *hca.AHAttr) { a.DLID = 0 },
			func(a *hca.AHAttr) { a.DLID = 0xc000 }, // a group needs its GID
		)
	}
	for _, f := range refused {
		bad := good
		f(&bad)
		_, err := e.pd.CreateAH(bad)
		wantErrno(t, err, unix.EINVAL)
	}
	empty := good
	empty.IsGlobal, empty.SGIDIndex = true, uint8(p.A.Attr().GIDTableLen-1)
	_, err = e.pd.CreateAH(empty)
	wantErrno(t, err, unix.ENODATA)
}

func testQPNumbers(t *testing.T, p Pair) {
	e := newEnd(t, p.A, defaults())
	seen := map[uint32]bool{e.qp.Num(): true}
	for range 2000 {
		q, err := e.pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: e.scq, RecvCQ: e.rcq, Cap: hca.QPCap{MaxSendWR: 1}})
		must(t, err)
		n := q.Num()
		if n < 2 || n >= 0xffffff || seen[n] {
			t.Fatalf("QP number %#x", n)
		}
		seen[n] = true
		must(t, q.Close())
	}
}

func testMcastChecks(t *testing.T, p Pair) {
	if !p.A.Ops().Has(hca.OpMcast) {
		t.Skip("no multicast")
	}
	mgid := hca.GID{0xff, 0x12, 15: 1}
	rc := newEnd(t, p.A, defaults())
	rc.toInit()
	wantErrno(t, rc.qp.AttachMcast(mgid, 0xc001), unix.EINVAL)
	u := newEnd(t, p.A, udOpts())
	wantErrno(t, u.qp.AttachMcast(mgid, 0xc001), unix.EINVAL) // RESET
	u.toInit()
	wantErrno(t, u.qp.AttachMcast(hca.GID{0xfe}, 0xc001), unix.EINVAL)
	if !u.eth {
		wantErrno(t, u.qp.AttachMcast(mgid, 0x1), unix.EINVAL)
	}
	wantErrno(t, u.qp.DetachMcast(mgid, 0xc001), unix.EINVAL)
	must(t, u.qp.AttachMcast(mgid, 0xc001))
	must(t, u.qp.AttachMcast(mgid, 0xc001)) // again: nothing
	must(t, u.qp.DetachMcast(mgid, 0xc001))
	wantErrno(t, u.qp.DetachMcast(mgid, 0xc001), unix.EINVAL)
}
