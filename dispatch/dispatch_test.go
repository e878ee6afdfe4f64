package dispatch_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

func TestRow3LegacyHeader(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	good := pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: resp}))
	mut := func(f func(b []byte) []byte) []byte { return f(append([]byte(nil), good...)) }
	for _, tc := range []struct {
		name string
		b    []byte
		want unix.Errno
	}{
		{"good", good, 0},
		{"empty", nil, unix.EINVAL},
		{"7 bytes", good[:7], unix.EINVAL},
		{"stray command bit", mut(func(b []byte) []byte { b[1] = 1; return b }), unix.EINVAL},
		{"number out of range", mut(func(b []byte) []byte { b[0] = 255; return b }), unix.EOPNOTSUPP},
		{"number left empty", mut(func(b []byte) []byte { b[0] = abi.CmdPeekCQ; return b }), unix.EOPNOTSUPP},
		{"extended number out of range", mut(func(b []byte) []byte { b[0], b[3] = 58, 0x80; return b }), unix.EOPNOTSUPP},
		{"in_words too large", mut(func(b []byte) []byte { b[4]++; return b }), unix.EINVAL},
		{"one byte more", mut(func(b []byte) []byte { return append(b, 0) }), unix.EINVAL},
		{"request too short", pack(abi.CmdQueryDevice, 176, make([]byte, 4)), unix.ENOSPC},
		{"response too short", pack(abi.CmdQueryDevice, 172, raw(abi.QueryDevice{Response: resp})), unix.ENOSPC},
		{"surplus of zeros", pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: resp}), make([]byte, 8)), 0},
		{"surplus not zero", pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: resp}), []byte{0, 0, 0, 1}), unix.EOPNOTSUPP},
		{"bad pointer", pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: 8})), unix.EFAULT},
		{"read-only pointer", pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: 0x10000})), unix.EFAULT},
		{"straddling pointer", pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: 0x10000 + clientMem - 8})), unix.EFAULT},
	} {
		if a := c.write(tc.b); a.errno != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, a.errno, tc.want)
		}
	}
}

// rdma-core 18 and 19 write 16 bytes of a DESTROY_CQ, and have 24.
func TestOldDestroyCQ(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	whole := pack(abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: c.cq(-1)}))
	short := append([]byte(nil), whole[:16]...)
	binary.LittleEndian.PutUint16(short[4:], 4)
	if a := c.write(short); a.errno != unix.EFAULT {
		t.Errorf("nothing behind: %v", a.errno)
	}
	g.behind = whole[16:]
	if a := c.write(short); a.errno != 0 || a.n != 16 {
		t.Errorf("%+v", a)
	}
	if a := c.write(short); a.errno != unix.ENOENT {
		t.Errorf("again: %v", a.errno)
	}
}

func TestContext(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.cmd(unix.EINVAL, abi.CmdAllocPD, 4, raw(abi.AllocPD{Response: resp}))
	r := c.context()
	if r.NumCompVectors == 0 || g.opened[int(r.AsyncFD)] == nil {
		t.Fatalf("%+v", r)
	}
	c.cmd(unix.EINVAL, abi.CmdGetContext, 8, raw(abi.GetContext{Response: resp}))
	if a := c.writeFrom(299, pack(abi.CmdAllocPD, 4, raw(abi.AllocPD{Response: resp}))); a.errno != unix.EACCES {
		t.Fatalf("another process: %v", a.errno)
	}
	c.h.Release()
	if n := g.procs[100].refs.Load(); n != 0 {
		t.Fatalf("%d references to the process left", n)
	}
	if len(g.dev.Files()) != 0 {
		t.Fatal("file still listed")
	}
}

// Failure class 23: after exec, commands of the new image are refused though its
// credentials are the same; what the data path does with old objects it may.
func TestRow23Exec(t *testing.T) {
	g := newRig(t)
	c, s := g.stocked(100)
	g.procs[100].execed.Store(true)
	for name, b := range everyCommand(s) {
		want := unix.EACCES
		switch name {
		case "POLL_CQ", "REQ_NOTIFY_CQ", "POST_SEND", "POST_RECV", "POST_SRQ_RECV":
			continue
		case "ex CREATE_FLOW", "ex CREATE_WQ", "ex CREATE_IND", "ex DESTROY_WQ":
			want = unix.EOPNOTSUPP
		}
		if a := c.write(b); a.errno != want {
			t.Errorf("%s: %v, want %v", name, a.errno, want)
		}
	}
	c.h.Release()
	g.empty()
}

// Failure class 25: a client that cannot be seized opens without events.
func TestRow25ContextWithoutEvents(t *testing.T) {
	g := newRig(t)
	g.seized = errors.New("traced by pid 1")
	c := g.client(100)
	defer c.h.Release()
	if r := c.context(); r.AsyncFD != dispatch.NoFD {
		t.Fatalf("async_fd %d", r.AsyncFD)
	}
	c.pd()
	c.cmd(unix.EPERM, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
}

// A GET_CONTEXT or CREATE_COMP_CHANNEL that failed with the client standing is
// undone before the client goes on: it may try again at once, and be at its
// bound with what failed.
func TestInstallUndoneBeforeTheClientGoesOn(t *testing.T) {
	limits := dispatch.DefaultLimits()
	limits.Context.CompChannels = 1
	g := newRigWith(t, limits)
	c := g.client(100)
	g.letGo = func() { c.context() }
	c.write(pack(abi.CmdGetContext, 8, raw(abi.GetContext{Response: 8})))
	g.letGo = func() { c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp})) }
	c.write(pack(abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: 8})))
	if n := g.undone.Load(); n != 2 {
		t.Errorf("%d installs undone", n)
	}
	if f := g.dev.Files()[0]; f.Objects["context"] != 1 || f.Objects["comp_channel"] != 1 {
		t.Errorf("%+v", f)
	}
	c.h.Release()
	g.empty()
}

// A GET_CONTEXT whose open never came (the client has closed its descriptor
// meanwhile, or has none free) waits for it no longer once the client goes on: the
// next open of that thread is a command file, not the event file.
func TestOpenAfterAFailedInstallIsItsOwn(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	g.noOpen = unix.ENOENT
	var next dispatch.Handle
	g.letGo = func() {
		var err error
		if next, err = g.dev.Open(newRequest(100)); err != nil {
			t.Fatal(err)
		}
	}
	c.write(pack(abi.CmdGetContext, 8, raw(abi.GetContext{Response: resp})))
	if g.undone.Load() != 1 || next == nil {
		t.Fatal("nothing failed")
	}
	if _, ok := next.(*dispatch.File); !ok {
		t.Errorf("the next open is a %T", next)
	}
	next.Release()
}

// A client goes on as soon as it is let go, which is before the handler of its
// GET_CONTEXT has returned: its next command must not lose its descriptor.
func TestNextInstallOverlapsTheLast(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	inner := make(chan struct{})
	g.letGo = func() {
		// The client's next command has announced its open, and the last one's
		// handler ends only then.
		g.letGo = nil
		g.beforeOpen = func() { close(inner); <-g.outer }
		g.outer = make(chan struct{})
		go func() {
			c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
			close(g.finished)
		}()
		<-inner
	}
	g.finished = make(chan struct{})
	c.context()
	close(g.outer)
	<-g.finished
	if n := g.undone.Load(); n != 0 {
		t.Fatalf("%d descriptors could not be installed", n)
	}
}

func TestRow5BadResponseLeavesNothing(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd := c.pd()
	cq := c.cq(-1)
	for _, tc := range []struct {
		name string
		num  uint32
		out  int
		body []byte
	}{
		{"pd", abi.CmdAllocPD, 4, raw(abi.AllocPD{})},
		{"cq", abi.CmdCreateCQ, 8, raw(abi.CreateCQ{CQE: 4, CompChannel: -1})},
		{"mr", abi.CmdRegMR, 12, raw(abi.RegMR{Start: resp, HCAVA: resp, Length: page, PDHandle: pd})},
		{"qp", abi.CmdCreateQP, 32, raw(abi.CreateQP{PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: uint8(hca.QPTypeRC)})},
		{"srq", abi.CmdCreateSRQ, 16, raw(abi.CreateSRQ{PDHandle: pd, MaxWR: 1, MaxSGE: 1})},
	} {
		before := g.dev.Files()[0]
		c.cmd(unix.EFAULT, tc.num, tc.out, tc.body)
		after := g.dev.Files()[0]
		if before.Pinned != after.Pinned || len(before.Objects) != len(after.Objects) {
			t.Errorf("%s: %+v, then %+v", tc.name, before, after)
		}
	}
}

func TestBusyAndTeardown(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd, cq := c.pd(), c.cq(-1)
	qp := c.qp(pd, cq, hca.QPTypeRC)
	mr := c.mr(pd, 0x10000+4*page, 3*page, hca.AccessLocalWrite)
	c.cmd(unix.EBUSY, abi.CmdDeallocPD, 0, raw(abi.Handle{Handle: pd}))
	c.cmd(unix.EBUSY, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: cq}))
	c.cmd(unix.EINVAL, abi.CmdDeallocPD, 0, raw(abi.Handle{Handle: cq}))
	c.cmd(unix.ENOENT, abi.CmdDeallocPD, 0, raw(abi.Handle{Handle: 99}))
	if got := g.pins.Pinned("100"); got != 3*page {
		t.Fatalf("%d bytes pinned", got)
	}
	c.cmd(0, abi.CmdDeregMR, 0, raw(abi.Handle{Handle: mr.MRHandle}))
	if got := g.pins.Pinned("100"); got != 0 {
		t.Fatalf("%d bytes pinned after deregistration", got)
	}
	c.mr(pd, 0x10000, page, 0)
	info := g.dev.Files()[0]
	if info.Objects["qp"] != 1 || info.Objects["mr"] != 1 || info.Pinned != page {
		t.Fatalf("%+v", info)
	}
	_ = qp
	c.h.Release()
	if got := g.pins.Pinned("100"); got != 0 {
		t.Fatalf("%d bytes pinned after close", got)
	}
	if n := g.procs[100].refs.Load(); n != 0 {
		t.Fatalf("%d references to the process left", n)
	}
}

func TestRegMRChecks(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd := c.pd()
	const rw = 0x10000 + 4*page
	top := ^uint64(0)
	for _, tc := range []struct {
		name string
		in   abi.RegMR
		want unix.Errno
	}{
		{"page offsets differ", abi.RegMR{Start: rw, HCAVA: rw + 1, Length: 1, PDHandle: pd}, unix.EINVAL},
		{"other page, same offset", abi.RegMR{Start: rw, HCAVA: 0, Length: 1, PDHandle: pd}, 0},
		{"empty", abi.RegMR{Start: rw, HCAVA: rw, PDHandle: pd}, unix.EINVAL},
		{"wraps", abi.RegMR{Start: top, HCAVA: top, Length: 2, PDHandle: pd}, unix.EINVAL},
		{"unknown access", abi.RegMR{Start: rw, HCAVA: rw, Length: 1, PDHandle: pd, AccessFlags: 1 << 19}, unix.EINVAL},
		{"optional access", abi.RegMR{Start: rw, HCAVA: rw, Length: 1, PDHandle: pd, AccessFlags: 1 << 20}, 0},
		{"remote without local write", abi.RegMR{Start: rw, HCAVA: rw, Length: 1, PDHandle: pd, AccessFlags: uint32(hca.AccessRemoteWrite)}, unix.EINVAL},
		{"hole", abi.RegMR{Start: 0x1000, HCAVA: 0x1000, Length: 1, PDHandle: pd}, unix.EFAULT},
		{"read-only", abi.RegMR{Start: 0x10000, HCAVA: 0x10000, Length: 1, PDHandle: pd}, 0},
		{"read-only, local write", abi.RegMR{Start: 0x10000, HCAVA: 0x10000, Length: 1, PDHandle: pd, AccessFlags: 1}, unix.EFAULT},
		{"over the limit", abi.RegMR{Start: rw, HCAVA: rw, Length: 9 << 20, PDHandle: pd}, unix.ENOMEM},
		{"no such pd", abi.RegMR{Start: rw, HCAVA: rw, Length: 1, PDHandle: 77}, unix.ENOENT},
	} {
		before := g.pins.Pinned("100")
		tc.in.Response = resp
		t.Run(tc.name, func(*testing.T) { c.cmd(tc.want, abi.CmdRegMR, 12, raw(tc.in)) })
		if tc.want != 0 && g.pins.Pinned("100") != before {
			t.Errorf("%s: charge stayed", tc.name)
		}
	}
}

// post builds a POST_SEND or POST_RECV with 56- or 16-byte WRs.
func post(num uint32, qp uint32, wqeSize uint32, wrs [][]byte, sges []abi.SGE) []byte {
	body := [][]byte{raw(abi.PostSend{Response: resp, QPHandle: qp, WRCount: uint32(len(wrs)), SGECount: uint32(len(sges)), WQESize: wqeSize})}
	body = append(body, wrs...)
	for _, s := range sges {
		body = append(body, raw(s))
	}
	return pack(num, 4, body...)
}

func TestMessage(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd, cq := c.pd(), c.cq(-1)
	a, b := c.qp(pd, cq, hca.QPTypeRC), c.qp(pd, cq, hca.QPTypeRC)
	port, _ := g.engine.Port(1)
	c.connect(a.QPHandle, b.QPN, port.LID)
	c.connect(b.QPHandle, a.QPN, port.LID)
	const src, dst = 0x10000 + 8*page, 0x10000 + 16*page
	mr := c.mr(pd, 0x10000+8*page, 16*page, hca.AccessLocalWrite)
	msg := bytes.Repeat([]byte("uverbsd "), 100)
	_ = c.p.WriteAt(msg, src)
	if r := c.write(post(abi.CmdPostRecv, b.QPHandle, 16, [][]byte{raw(abi.RecvWR{WRID: 7, NumSGE: 1})}, []abi.SGE{{Addr: dst, Length: 4096, LKey: mr.LKey}})); r.errno != 0 {
		t.Fatal(r.errno)
	}
	send := func(flags uint32, n uint32) answer {
		return c.write(post(abi.CmdPostSend, a.QPHandle, 56, [][]byte{raw(abi.SendWR{WRID: 9, NumSGE: 1, Opcode: uint32(hca.OpSend), SendFlags: flags})}, []abi.SGE{{Addr: src, Length: n, LKey: mr.LKey}}))
	}
	if r := send(uint32(hca.SendSignaled), uint32(len(msg))); r.errno != 0 {
		t.Fatal(r.errno)
	}
	seen := map[uint64]abi.WC{}
	for len(seen) < 2 {
		c.cmd(0, abi.CmdPollCQ, 8+4*48, raw(abi.PollCQ{Response: resp, CQHandle: cq, NE: 4}))
		n := out[abi.PollCQResp](c).Count
		for i := range n {
			w := out[struct {
				Head abi.PollCQResp
				WC   [4]abi.WC
			}](c).WC[i]
			seen[w.WRID] = w
		}
	}
	if w := seen[7]; w.Status != 0 || w.Opcode != uint32(hca.WCRecv) || w.ByteLen != uint32(len(msg)) || w.QPNum != b.QPN {
		t.Fatalf("receive: %+v", w)
	}
	if w := seen[9]; w.Status != 0 || w.QPNum != a.QPN {
		t.Fatalf("send: %+v", w)
	}
	got := make([]byte, len(msg))
	_ = c.p.ReadAt(got, dst)
	if !bytes.Equal(got, msg) {
		t.Fatal("payload differs")
	}
	// Inline: the key is not looked at, the bytes are taken at post time.
	c.write(post(abi.CmdPostRecv, b.QPHandle, 16, [][]byte{raw(abi.RecvWR{WRID: 8, NumSGE: 1})}, []abi.SGE{{Addr: dst, Length: 4096, LKey: mr.LKey}}))
	r := c.write(post(abi.CmdPostSend, a.QPHandle, 56, [][]byte{raw(abi.SendWR{NumSGE: 1, Opcode: uint32(hca.OpSend), SendFlags: uint32(hca.SendInline)})}, []abi.SGE{{Addr: src + 1, Length: 7, LKey: 0xbad}}))
	if r.errno != 0 {
		t.Fatal(r.errno)
	}
	_ = c.p.ReadAt(got[:7], dst)
	if string(got[:7]) != "verbsd " {
		t.Fatalf("inline payload %q", got[:7])
	}
	if r := send(uint32(hca.SendInline), 4096); r.errno != unix.EINVAL {
		t.Fatalf("inline over the limit: %v", r.errno)
	}
}

// Failure class 2: wqe_size*wr_count and sge_count*16 must not wrap.
func TestRow2PostArithmetic(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd, cq := c.pd(), c.cq(-1)
	qp := c.qp(pd, cq, hca.QPTypeRC)
	c.cmd(0, abi.CmdCreateSRQ, 16, raw(abi.CreateSRQ{Response: resp, PDHandle: pd, MaxWR: 4, MaxSGE: 1}))
	srq := out[abi.CreateSRQResp](c).SRQHandle
	for _, cmd := range []struct {
		num, handle uint32
		size        uint32
		none        unix.Errno // an empty list still meets a QP in RESET
	}{{abi.CmdPostSend, qp.QPHandle, 56, unix.EINVAL}, {abi.CmdPostRecv, qp.QPHandle, 16, unix.EINVAL}, {abi.CmdPostSRQRecv, srq, 16, 0}} {
		for _, tc := range []struct {
			name string
			head abi.PostSend
			tail []byte
			want unix.Errno
		}{
			{"wraps", abi.PostSend{WRCount: 0x10000, WQESize: 0x10001}, nil, unix.ENOSPC},
			{"sges wrap", abi.PostSend{WRCount: 0, WQESize: cmd.size, SGECount: 0x10000001}, make([]byte, 16), unix.ENOSPC},
			{"all ones", abi.PostSend{WRCount: ^uint32(0), WQESize: ^uint32(0), SGECount: ^uint32(0)}, make([]byte, 64), unix.ENOSPC},
			{"wqe too small", abi.PostSend{WRCount: 1, WQESize: cmd.size - 4}, make([]byte, cmd.size-4), unix.EINVAL},
			{"trailing", abi.PostSend{WRCount: 0, WQESize: cmd.size}, []byte{0, 0, 0, 1}, unix.EOPNOTSUPP},
			{"more sges than said", abi.PostSend{WRCount: 1, WQESize: cmd.size}, append([]byte{0, 0, 0, 0, 0, 0, 0, 0, 1}, make([]byte, cmd.size-9)...), unix.EINVAL},
			{"none", abi.PostSend{WRCount: 0, WQESize: cmd.size}, nil, cmd.none},
		} {
			tc.head.Response, tc.head.QPHandle = resp, cmd.handle
			if a := c.write(pack(cmd.num, 4, raw(tc.head), tc.tail)); a.errno != tc.want {
				t.Errorf("command %d, %s: %v, want %v", cmd.num, tc.name, a.errno, tc.want)
			}
		}
	}
}

func TestRow14CompletionChannel(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
	fd := int32(out[abi.CreateCompChannelResp](c).FD)
	ch := g.opened[int(fd)]
	c.cmd(unix.EBADF, abi.CmdCreateCQ, 8, raw(abi.CreateCQ{Response: resp, CQE: 4, CompChannel: fd + 1}))
	g.dups = map[int32]int32{fd + 2: fd}
	pd, cq := c.pd(), c.cq(fd+2) // a duplicate is as good
	qp := c.qp(pd, cq, hca.QPTypeRC)
	port, _ := g.engine.Port(1)
	c.connect(qp.QPHandle, qp.QPN, port.LID)

	read := newRequest(100)
	read.flags = unix.O_NONBLOCK
	ch.Read(read, 8)
	if a := <-read.ch; a.errno != unix.EAGAIN {
		t.Fatalf("empty, nonblocking: %+v", a)
	}
	blocked := newRequest(100)
	ch.Read(blocked, 8)
	blocked.interrupt()
	if a := <-blocked.ch; a.errno != unix.EINTR {
		t.Fatalf("interrupted: %+v", a)
	}
	blocked = newRequest(100)
	ch.Read(blocked, 8)

	// Flushing a posted receive completes it: one event, after arming.
	flush := func() {
		c.write(post(abi.CmdPostRecv, qp.QPHandle, 16, [][]byte{raw(abi.RecvWR{})}, nil))
	}
	c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp.QPHandle, QPState: uint8(hca.QPErr), AttrMask: uint32(hca.QPMaskState)}))
	c.cmd(0, abi.CmdReqNotifyCQ, 0, raw(abi.ReqNotifyCQ{CQHandle: cq}))
	flush()
	a := <-blocked.ch
	if len(a.data) != 8 || binary.LittleEndian.Uint64(a.data) != 0xc0ffee {
		t.Fatalf("event: %+v", a)
	}
	flush() // not armed: no event
	pollReq := newRequest(100)
	ch.Poll(pollReq, 77, true)
	if a := <-pollReq.ch; a.revents != 0 {
		t.Fatalf("revents %#x", a.revents)
	}
	c.cmd(0, abi.CmdReqNotifyCQ, 0, raw(abi.ReqNotifyCQ{CQHandle: cq}))
	flush()
	for {
		g.mu.Lock()
		n := g.woken[77]
		g.mu.Unlock()
		if n > 0 {
			break
		}
		p := newRequest(100)
		ch.Poll(p, 77, false)
		if a := <-p.ch; a.revents&unix.POLLIN != 0 {
			break
		}
	}
	short := newRequest(100)
	ch.Read(short, 7)
	if a := <-short.ch; a.errno != unix.EINVAL {
		t.Fatalf("short buffer: %+v", a)
	}
	// Failure class 14: one event was read, one is unread and goes.
	c.cmd(0, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: qp.QPHandle}))
	c.cmd(0, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: cq}))
	if r := out[abi.DestroyCQResp](c); r.CompEventsReported != 1 {
		t.Fatalf("reported %d, read 1", r.CompEventsReported)
	}
	gone := newRequest(100)
	gone.flags = unix.O_NONBLOCK
	ch.Read(gone, 8)
	if a := <-gone.ch; a.errno != unix.EAGAIN {
		t.Fatalf("stale event: %+v", a)
	}
	waiting := newRequest(100)
	ch.Read(waiting, 8)
	c.h.Release()
	if a := <-waiting.ch; a.errno != unix.EIO {
		t.Fatalf("reader of a dead context: %+v", a)
	}
	ch.Release()
}

// An empty POLL_CQ is answered with none after a bounded moment, or at once
// when its thread gets a signal.
func TestRow35EmptyPollEnds(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	cq := c.cq(-1)
	cmd := pack(abi.CmdPollCQ, 8+48, raw(abi.PollCQ{Response: resp, CQHandle: cq, NE: 1}))
	if a := c.write(cmd); a.errno != 0 || a.n != len(cmd) {
		t.Fatalf("%+v", a)
	}
	if n := out[abi.PollCQResp](c).Count; n != 0 {
		t.Fatalf("count %d", n)
	}
	// Failure class 35: whoever ends a wait does not touch the client's memory,
	// which could hold up the waits of all others.
	before := g.writes.Load()
	r := newRequest(100)
	c.h.Write(r, cmd)
	if n := g.writes.Load() - before; n != 1 {
		t.Errorf("%d writes before the wait", n)
	}
	r.mu.Lock()
	f := r.interrupt
	r.mu.Unlock()
	if f != nil {
		f()
	}
	if a := <-r.ch; a.errno != 0 {
		t.Fatalf("interrupted: %+v", a)
	}
	if n := g.writes.Load() - before; n != 1 {
		t.Errorf("%d writes in all", n)
	}
}

// Any bytes give an errno; objects that appear are gone after close.
func TestRandomBytes(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	rng := rand.New(rand.NewSource(1))
	for range 20000 {
		b := make([]byte, rng.Intn(200)&^3)
		rng.Read(b)
		if len(b) >= 8 {
			binary.LittleEndian.PutUint32(b, uint32(rng.Intn(64)))
			binary.LittleEndian.PutUint16(b[4:], uint16(len(b)/4))
			if len(b) >= 16 && rng.Intn(2) == 0 {
				binary.LittleEndian.PutUint64(b[8:], resp)
			}
			for i := 16; i+4 <= len(b) && rng.Intn(3) > 0; i += 4 {
				binary.LittleEndian.PutUint32(b[i:], uint32(rng.Intn(5)))
			}
		}
		c.write(b)
	}
	c.h.Release()
	if got := g.pins.Pinned("100"); got != 0 {
		t.Fatalf("%d bytes pinned", got)
	}
}

// Failure class 8: one user at its bounds, another goes on; nothing stays charged.
func TestRow8UserBudget(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd := c.pd()
	for _, body := range []abi.CreateQP{
		{MaxSendWR: ^uint32(0), MaxSendSGE: ^uint32(0), MaxInlineData: ^uint32(0), MaxRecvWR: ^uint32(0), MaxRecvSGE: ^uint32(0)},
		{MaxSendWR: 1 << 16, MaxSendSGE: 1 << 16},
	} {
		cq := c.cq(-1)
		body.Response, body.PDHandle, body.SendCQHandle, body.RecvCQHandle, body.QPType = resp, pd, cq, cq, uint8(hca.QPTypeRC)
		if a := c.write(pack(abi.CmdCreateQP, 32, raw(body))); a.errno == 0 {
			t.Errorf("%+v was made", body)
		}
	}
	big := abi.CreateCQ{Response: resp, CQE: 1 << 20, CompChannel: -1}
	n := 0
	for ; n < 100; n++ {
		if a := c.write(pack(abi.CmdCreateCQ, 8, raw(big))); a.errno != 0 {
			if a.errno != unix.ENOMEM {
				t.Fatal(a.errno)
			}
			break
		}
	}
	if n == 0 || n == 100 {
		t.Fatalf("%d large CQs", n)
	}
	c.h.Release()
	again := g.client(100)
	again.context()
	again.cmd(0, abi.CmdCreateCQ, 8, raw(big))
	again.h.Release()
}

// A handler can outlive its file: its client was killed while it was held up in
// the client's memory. The file ends with it, nothing is left, and the memory is
// not reached for again.
func TestKilledClientsHandlerOutlivesItsFile(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd := c.pd()
	c.cq(-1)
	inRange, goOn := make(chan struct{}), make(chan struct{})
	g.procs[100].checking = func() { close(inRange); <-goOn }
	r := newRequest(100)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.h.Write(r, pack(abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: resp, HCAVA: resp, Length: page, PDHandle: pd})))
	}()
	<-inRange
	before := out[[16]byte](c)
	r.killed.Store(true)
	c.h.Release()
	close(goOn)
	<-done
	if got := out[[16]byte](c); got != before {
		t.Error("the response was written after the kill")
	}
	if n := len(g.dev.Files()); n != 0 {
		t.Errorf("%d files left", n)
	}
	if n := g.procs[100].refs.Load(); n != 0 {
		t.Errorf("%d references to the process left", n)
	}
	if n := g.pins.Pinned("100"); n != 0 {
		t.Errorf("%d bytes pinned", n)
	}
}
