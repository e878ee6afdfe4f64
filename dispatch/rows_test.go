package dispatch_test

import (
	"fmt"
	"maps"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

// stock is one object of each kind, by the name of its kind.
type stock map[string]uint32

// stocked is a client with a context and one object of each kind.
func (g *rig) stocked(pid int) (*client, stock) {
	g.t.Helper()
	c := g.client(pid)
	c.context()
	s := stock{}
	s["pd"] = c.pd()
	s["cq"] = c.cq(-1)
	s["qp"] = c.qp(s["pd"], s["cq"], hca.QPTypeRC).QPHandle
	s["ud qp"] = c.qp(s["pd"], s["cq"], hca.QPTypeUD).QPHandle
	s["mr"] = c.mr(s["pd"], 0x10000+4*page, page, hca.AccessLocalWrite).MRHandle
	for _, cr := range creates(s) {
		if _, ok := s[cr.kind]; !ok {
			c.write(cr.command)
			s[cr.kind] = c.newHandle(cr)
		}
	}
	return c, s
}

// create is a good command that makes one object.
type create struct {
	kind    string
	name    string
	command []byte
	at      int // where in the response the handle is
}

func (c *client) newHandle(cr create) uint32 {
	b := out[[64]byte](c)
	return uint32(b[cr.at]) | uint32(b[cr.at+1])<<8 | uint32(b[cr.at+2])<<16
}

// creates are good commands for every kind that has a handle.
func creates(s stock) []create {
	qp := abi.CreateQP{Response: resp, PDHandle: s["pd"], SendCQHandle: s["cq"], RecvCQHandle: s["cq"], MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: uint8(hca.QPTypeRC)}
	onSRQ := qp
	onSRQ.IsSRQ, onSRQ.SRQHandle = 1, s["srq"]
	ini, tgt := qp, qp
	ini.QPType = uint8(hca.QPTypeXRCIni)
	tgt.QPType, tgt.PDHandle = uint8(hca.QPTypeXRCTgt), s["xrcd"]
	exQP := abi.ExCreateQP{PDHandle: s["pd"], SendCQHandle: s["cq"], RecvCQHandle: s["cq"], MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: uint8(hca.QPTypeUC)}
	return []create{
		{"pd", "ALLOC_PD", pack(abi.CmdAllocPD, 4, raw(abi.AllocPD{Response: resp})), 0},
		{"cq", "CREATE_CQ", pack(abi.CmdCreateCQ, 8, raw(abi.CreateCQ{Response: resp, CQE: 4, CompChannel: -1})), 0},
		{"cq", "ex CREATE_CQ", packEx(abi.ExCmdCreateCQ, resp, 16, raw(abi.ExCreateCQ{CQE: 4, CompChannel: -1})), 0},
		{"mr", "REG_MR", pack(abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: 0x10000 + 8*page, HCAVA: 0x10000 + 8*page, Length: page, PDHandle: s["pd"], AccessFlags: 1})), 0},
		{"mw", "ALLOC_MW", pack(abi.CmdAllocMW, 8, raw(abi.AllocMW{Response: resp, PDHandle: s["pd"], MWType: 1})), 0},
		{"ah", "CREATE_AH", pack(abi.CmdCreateAH, 4, raw(abi.CreateAH{Response: resp, PDHandle: s["pd"], Attr: abi.AHAttr{DLID: 1, PortNum: 1}})), 0},
		{"xrcd", "OPEN_XRCD", pack(abi.CmdOpenXRCD, 4, raw(abi.OpenXRCD{Response: resp, FD: ^uint32(0)})), 0},
		{"srq", "CREATE_SRQ", pack(abi.CmdCreateSRQ, 16, raw(abi.CreateSRQ{Response: resp, PDHandle: s["pd"], MaxWR: 2, MaxSGE: 1})), 0},
		{"srq", "CREATE_XSRQ", pack(abi.CmdCreateXSRQ, 16, raw(abi.CreateXSRQ{Response: resp, SRQType: uint32(hca.SRQXRC), PDHandle: s["pd"], XRCDHandle: s["xrcd"], CQHandle: s["cq"], MaxWR: 2, MaxSGE: 1})), 0},
		{"qp", "CREATE_QP", pack(abi.CmdCreateQP, 32, raw(qp)), 0},
		{"qp", "CREATE_QP with SRQ", pack(abi.CmdCreateQP, 32, raw(onSRQ)), 0},
		{"qp", "CREATE_QP XRC initiator", pack(abi.CmdCreateQP, 32, raw(ini)), 0},
		{"qp", "CREATE_QP XRC target", pack(abi.CmdCreateQP, 32, raw(tgt)), 0},
		{"qp", "ex CREATE_QP", packEx(abi.ExCmdCreateQP, resp, 40, raw(exQP)), 0},
	}
}

// state is what must be the same after a command that failed.
func (g *rig) state() (s struct {
	Device map[string]int
	Files  []dispatch.FileInfo
	Held   int32
}) {
	s.Device, s.Files, s.Held = g.hca.count(), g.dev.Files(), g.held.Load()
	slices.SortFunc(s.Files, func(a, b dispatch.FileInfo) int { return a.PID - b.PID })
	return s
}

// empty checks that nothing is left of any client.
func (g *rig) empty() {
	g.t.Helper()
	if s := g.state(); len(s.Device) != 0 || len(s.Files) != 0 || s.Held != 0 {
		g.t.Errorf("left: %+v", s)
	}
	for pid, p := range g.procs {
		if n := p.refs.Load(); n != 0 {
			g.t.Errorf("%d references to process %d", n, pid)
		}
		if n := g.pins.Pinned(p.Key()); n != 0 {
			g.t.Errorf("%d bytes pinned for process %d", n, pid)
		}
	}
}

// Failure class 4: another file's handle, a wrong type, a dead one, all ones.
func TestRow4Handles(t *testing.T) {
	g := newRig(t)
	c, s := g.stocked(100)
	foreign := g.client(200)
	foreign.context()
	for range 20 {
		foreign.pd()
	}
	far := uint32(15) // foreign's, and no handle of c's
	c.cmd(0, abi.CmdAllocPD, 4, raw(abi.AllocPD{Response: resp}))
	dead := out[abi.AllocPDResp](c).PDHandle
	c.cmd(0, abi.CmdDeallocPD, 0, raw(abi.Handle{Handle: dead}))
	// One good command for each row that names a handle, as a function of it.
	type with func(h uint32) []byte
	legacy := func(num uint32, outBytes int, body func(h uint32) []byte) with {
		return func(h uint32) []byte { return pack(num, outBytes, body(h)) }
	}
	destroy := func(num uint32) with {
		return legacy(num, 0, func(h uint32) []byte { return raw(abi.Handle{Handle: h}) })
	}
	post := func(num uint32) with {
		return legacy(num, 4, func(h uint32) []byte {
			return raw(abi.PostSend{Response: resp, QPHandle: h, WQESize: 56})
		})
	}
	for _, tc := range []struct {
		name    string
		kind    string
		destroy bool
		cmd     with
	}{
		{"DEALLOC_PD", "pd", true, destroy(abi.CmdDeallocPD)},
		{"DEREG_MR", "mr", true, destroy(abi.CmdDeregMR)},
		{"DEALLOC_MW", "mw", true, destroy(abi.CmdDeallocMW)},
		{"DESTROY_AH", "ah", true, destroy(abi.CmdDestroyAH)},
		{"CLOSE_XRCD", "xrcd", true, destroy(abi.CmdCloseXRCD)},
		{"DESTROY_CQ", "cq", true, legacy(abi.CmdDestroyCQ, 8, func(h uint32) []byte { return raw(abi.DestroyCQ{Response: resp, CQHandle: h}) })},
		{"DESTROY_QP", "qp", true, legacy(abi.CmdDestroyQP, 4, func(h uint32) []byte { return raw(abi.DestroyQP{Response: resp, QPHandle: h}) })},
		{"DESTROY_SRQ", "srq", true, legacy(abi.CmdDestroySRQ, 4, func(h uint32) []byte { return raw(abi.DestroyQP{Response: resp, QPHandle: h}) })},
		{"REREG_MR", "mr", false, legacy(abi.CmdReregMR, 8, func(h uint32) []byte { return raw(abi.ReregMR{Response: resp, MRHandle: h, Flags: 4, AccessFlags: 1}) })},
		{"REG_MR", "pd", false, legacy(abi.CmdRegMR, 12, func(h uint32) []byte {
			return raw(abi.RegMR{Response: resp, Start: 0x10000, HCAVA: 0x10000, Length: 1, PDHandle: h})
		})},
		{"ALLOC_MW", "pd", false, legacy(abi.CmdAllocMW, 8, func(h uint32) []byte { return raw(abi.AllocMW{Response: resp, PDHandle: h, MWType: 2}) })},
		{"CREATE_AH", "pd", false, legacy(abi.CmdCreateAH, 4, func(h uint32) []byte {
			return raw(abi.CreateAH{Response: resp, PDHandle: h, Attr: abi.AHAttr{DLID: 1, PortNum: 1}})
		})},
		{"CREATE_SRQ", "pd", false, legacy(abi.CmdCreateSRQ, 16, func(h uint32) []byte { return raw(abi.CreateSRQ{Response: resp, PDHandle: h, MaxWR: 1, MaxSGE: 1}) })},
		{"CREATE_QP's PD", "pd", false, legacy(abi.CmdCreateQP, 32, func(h uint32) []byte {
			return raw(abi.CreateQP{Response: resp, PDHandle: h, SendCQHandle: s["cq"], RecvCQHandle: s["cq"], MaxSendWR: 1, MaxSendSGE: 1, QPType: 2})
		})},
		{"CREATE_QP's send CQ", "cq", false, legacy(abi.CmdCreateQP, 32, func(h uint32) []byte {
			return raw(abi.CreateQP{Response: resp, PDHandle: s["pd"], SendCQHandle: h, RecvCQHandle: s["cq"], MaxSendWR: 1, MaxSendSGE: 1, QPType: 2})
		})},
		{"CREATE_QP's receive CQ", "cq", false, legacy(abi.CmdCreateQP, 32, func(h uint32) []byte {
			return raw(abi.CreateQP{Response: resp, PDHandle: s["pd"], SendCQHandle: s["cq"], RecvCQHandle: h, MaxSendWR: 1, MaxSendSGE: 1, QPType: 2})
		})},
		{"CREATE_QP's SRQ", "srq", false, legacy(abi.CmdCreateQP, 32, func(h uint32) []byte {
			return raw(abi.CreateQP{Response: resp, PDHandle: s["pd"], SendCQHandle: s["cq"], RecvCQHandle: s["cq"], SRQHandle: h, IsSRQ: 1, MaxSendWR: 1, MaxSendSGE: 1, QPType: 2})
		})},
		{"CREATE_QP's XRCD", "xrcd", false, legacy(abi.CmdCreateQP, 32, func(h uint32) []byte { return raw(abi.CreateQP{Response: resp, PDHandle: h, QPType: 10}) })},
		{"CREATE_XSRQ's XRCD", "xrcd", false, legacy(abi.CmdCreateXSRQ, 16, func(h uint32) []byte {
			return raw(abi.CreateXSRQ{Response: resp, SRQType: 1, PDHandle: s["pd"], CQHandle: s["cq"], XRCDHandle: h, MaxWR: 1, MaxSGE: 1})
		})},
		{"CREATE_XSRQ's CQ", "cq", false, legacy(abi.CmdCreateXSRQ, 16, func(h uint32) []byte {
			return raw(abi.CreateXSRQ{Response: resp, SRQType: 1, PDHandle: s["pd"], CQHandle: h, XRCDHandle: s["xrcd"], MaxWR: 1, MaxSGE: 1})
		})},
		{"RESIZE_CQ", "cq", false, legacy(abi.CmdResizeCQ, 8, func(h uint32) []byte { return raw(abi.ResizeCQ{Response: resp, CQHandle: h, CQE: 32}) })},
		{"POLL_CQ", "cq", false, legacy(abi.CmdPollCQ, 8, func(h uint32) []byte { return raw(abi.PollCQ{Response: resp, CQHandle: h}) })},
		{"REQ_NOTIFY_CQ", "cq", false, legacy(abi.CmdReqNotifyCQ, 0, func(h uint32) []byte { return raw(abi.ReqNotifyCQ{CQHandle: h}) })},
		{"QUERY_QP", "qp", false, legacy(abi.CmdQueryQP, 128, func(h uint32) []byte { return raw(abi.QueryQP{Response: resp, QPHandle: h}) })},
		{"MODIFY_QP", "qp", false, legacy(abi.CmdModifyQP, 0, func(h uint32) []byte { return raw(abi.ModifyQP{QPHandle: h, AttrMask: 1}) })},
		{"ATTACH_MCAST", "qp", false, legacy(abi.CmdAttachMcast, 0, func(h uint32) []byte { return raw(abi.Mcast{QPHandle: h}) })},
		{"DETACH_MCAST", "qp", false, legacy(abi.CmdDetachMcast, 0, func(h uint32) []byte { return raw(abi.Mcast{QPHandle: h}) })},
		{"POST_SEND", "qp", false, post(abi.CmdPostSend)},
		{"POST_RECV", "qp", false, post(abi.CmdPostRecv)},
		{"POST_SRQ_RECV", "srq", false, post(abi.CmdPostSRQRecv)},
		{"MODIFY_SRQ", "srq", false, legacy(abi.CmdModifySRQ, 0, func(h uint32) []byte { return raw(abi.ModifySRQ{SRQHandle: h}) })},
		{"QUERY_SRQ", "srq", false, legacy(abi.CmdQuerySRQ, 16, func(h uint32) []byte { return raw(abi.QuerySRQ{Response: resp, SRQHandle: h}) })},
		{"OPEN_QP", "xrcd", false, legacy(abi.CmdOpenQP, 32, func(h uint32) []byte { return raw(abi.OpenQP{Response: resp, PDHandle: h, QPType: 10}) })},
		{"ex MODIFY_CQ", "cq", false, func(h uint32) []byte {
			return packEx(abi.ExCmdModifyCQ, 0, 0, raw(abi.ExModifyCQ{CQHandle: h, AttrMask: 1}))
		}},
		{"ex MODIFY_QP", "qp", false, func(h uint32) []byte {
			return packEx(abi.ExCmdModifyQP, resp, 8, raw(abi.ExModifyQP{Base: abi.ModifyQP{QPHandle: h, AttrMask: 1}}))
		}},
	} {
		unknown := unix.ENOENT
		if tc.kind == "xrcd" && !tc.destroy {
			unknown = unix.EINVAL
		}
		wrong := s["pd"]
		if tc.kind == "pd" {
			wrong = s["cq"]
		}
		for _, h := range []struct {
			name string
			id   uint32
			want unix.Errno
		}{{"foreign", far, unknown}, {"dead", dead, unknown}, {"all ones", ^uint32(0), unknown}, {"wrong type", wrong, unix.EINVAL}} {
			before := g.state()
			if a := c.write(tc.cmd(h.id)); a.errno != h.want {
				t.Errorf("%s, %s: %v, want %v", tc.name, h.name, a.errno, h.want)
			}
			if after := g.state(); !reflect.DeepEqual(before, after) {
				t.Errorf("%s, %s: %+v, then %+v", tc.name, h.name, before, after)
			}
		}
	}
	c.h.Release()
	foreign.h.Release()
	g.empty()
}

// Failure classes 5 and 12: each step of each create fails once, and nothing is
// left of it, nor is anything undone twice; the command then works, and gets the
// handle that it would have had.
func TestRow12PartialCreates(t *testing.T) {
	g := newRig(t)
	c, s := g.stocked(100)
	bad := func(b []byte) []byte {
		b = append([]byte(nil), b...)
		for i := range 8 {
			b[8+i] = 0 // the response pointer, in either form of command
		}
		b[8] = 8
		return b
	}
	for _, cr := range creates(s) {
		t.Run(cr.name, func(t *testing.T) {
			before := g.state()
			same := func(step string) {
				if after := g.state(); !reflect.DeepEqual(before, after) {
					t.Errorf("%s: %+v, then %+v", step, before, after)
				}
			}
			for n := 1; ; n++ {
				g.hca.failIn(n)
				a := c.write(cr.command)
				g.hca.failIn(0)
				if a.errno == 0 {
					break
				}
				if a.errno != unix.ENOSPC {
					t.Fatalf("object %d refused: %v", n, a.errno)
				}
				same(fmt.Sprintf("object %d refused", n))
			}
			first := c.newHandle(cr)
			c.destroyed(0, cr.kind, first)
			same("made and destroyed")
			if a := c.write(bad(cr.command)); a.errno != unix.EFAULT {
				t.Errorf("bad response: %v", a.errno)
			}
			same("bad response")
			if cr.kind == "mr" {
				limit := c.p.limit
				c.p.limit = page
				if a := c.write(cr.command); a.errno != unix.ENOMEM {
					t.Errorf("over the limit: %v", a.errno)
				}
				c.p.limit = limit
				same("over the limit")
			}
			if a := c.write(cr.command); a.errno != 0 {
				t.Fatalf("in the end: %v", a.errno)
			}
			if again := c.newHandle(cr); again != first {
				t.Errorf("handle %d, then %d", first, again)
			}
			c.destroyed(0, cr.kind, first)
		})
	}
	c.h.Release()
	g.empty()
}

// destroyed destroys an object by its kind.
func (c *client) destroyed(want unix.Errno, kind string, h uint32) {
	c.g.t.Helper()
	switch kind {
	case "cq":
		c.cmd(want, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: h}))
	case "qp":
		c.cmd(want, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: h}))
	case "srq":
		c.cmd(want, abi.CmdDestroySRQ, 4, raw(abi.DestroyQP{Response: resp, QPHandle: h}))
	default:
		num := map[string]uint32{"pd": abi.CmdDeallocPD, "mr": abi.CmdDeregMR, "mw": abi.CmdDeallocMW, "ah": abi.CmdDestroyAH, "xrcd": abi.CmdCloseXRCD}[kind]
		c.cmd(want, num, 0, raw(abi.Handle{Handle: h}))
	}
}

// Failure class 6: what the daemon handled before, for anybody, is in no reply.
// The scratch memory of calls is reused; a reply's reserved bytes and what
// follows a short struct must be zero all the same.
func TestRow6ResponsesLeakNothing(t *testing.T) {
	g := newRig(t)
	c, s := g.stocked(100)
	defer c.h.Release()
	dirty := func() {
		// Requests and responses full of ones go through the same scratch memory.
		ones := make([]byte, 112)
		for i := range ones {
			ones[i] = 0xff
		}
		for range 8 {
			c.write(pack(abi.CmdModifyQP, 0, ones))
			c.write(pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: resp})))
		}
	}
	for _, tc := range []struct {
		name string
		cmd  []byte
		zero []int // bytes that must be 0: [from, to) pairs
	}{
		{"QUERY_DEVICE", pack(abi.CmdQueryDevice, 192, raw(abi.QueryDevice{Response: resp})), []int{172, 192}},
		{"QUERY_PORT", pack(abi.CmdQueryPort, 48, raw(abi.QueryPort{Response: resp, PortNum: 1})), []int{39, 48}},
		{"QUERY_QP", pack(abi.CmdQueryQP, 136, raw(abi.QueryQP{Response: resp, QPHandle: s["qp"]})), []int{0, 56, 123, 136}},
		{"QUERY_SRQ", pack(abi.CmdQuerySRQ, 24, raw(abi.QuerySRQ{Response: resp, SRQHandle: s["srq"]})), []int{12, 24}},
		{"POLL_CQ", pack(abi.CmdPollCQ, 8, raw(abi.PollCQ{Response: resp, CQHandle: s["cq"]})), []int{0, 8}},
		{"POST_SRQ_RECV", pack(abi.CmdPostSRQRecv, 12, raw(abi.PostSend{Response: resp, QPHandle: s["srq"], WQESize: 16})), []int{0, 12}},
		{"RESIZE_CQ", pack(abi.CmdResizeCQ, 8, raw(abi.ResizeCQ{Response: resp, CQHandle: s["cq"], CQE: 16})), []int{4, 8}},
		{"CREATE_SRQ", pack(abi.CmdCreateSRQ, 16, raw(abi.CreateSRQ{Response: resp, PDHandle: s["pd"], MaxWR: 1, MaxSGE: 1})), []int{12, 16}},
		{"CREATE_QP", pack(abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, PDHandle: s["pd"], SendCQHandle: s["cq"], RecvCQHandle: s["cq"], MaxSendWR: 1, MaxSendSGE: 1, QPType: 2})), []int{28, 32}},
		{"ex QUERY_DEVICE", packEx(abi.ExCmdQueryDevice, resp, 320, raw(abi.ExQueryDevice{})), []int{172, 180, 204, 224, 232, 280, 284, 296, 300, 320}},
		{"ex CREATE_CQ", packEx(abi.ExCmdCreateCQ, resp, 24, raw(abi.ExCreateCQ{CQE: 1, CompChannel: -1})), []int{8, 12, 16, 24}},
	} {
		dirty()
		poison(c)
		if a := c.write(tc.cmd); a.errno != 0 {
			t.Errorf("%s: %v", tc.name, a.errno)
			continue
		}
		got := out[[512]byte](c)
		for i := 0; i < len(tc.zero); i += 2 {
			for at := tc.zero[i]; at < tc.zero[i+1]; at++ {
				if got[at] != 0 {
					t.Errorf("%s: byte %d is %#x", tc.name, at, got[at])
				}
			}
		}
		if got[400] != poisonByte {
			t.Errorf("%s: wrote beyond its response", tc.name)
		}
	}
}

// Failure classes 7 and 8: every 4 bytes of every request as 0 and as all ones.
// Whatever is answered, nothing leaks and the file goes on.
func TestRow7ExtremeFields(t *testing.T) {
	g := newRig(t)
	c, s := g.stocked(100)
	for num, b := range everyCommand(s) {
		for at := 8; at+4 <= len(b); at += 4 {
			for _, v := range []byte{0, 0xff} {
				m := append([]byte(nil), b...)
				for i := range 4 {
					m[at+i] = v
				}
				r := newRequest(100)
				c.h.Write(r, m)
				r.mu.Lock()
				if r.interrupt != nil {
					r.interrupt() // an empty poll
				}
				r.mu.Unlock()
				if a := <-r.ch; a.errno == unix.EIO {
					t.Errorf("%s, bytes %d of %d all %#x: EIO", num, at, len(b), v)
				}
			}
		}
	}
	c.pd()
	c.h.Release()
	g.empty()
}

// everyCommand is one good command of each kind, or nearly.
func everyCommand(s stock) map[string][]byte {
	m := map[string][]byte{
		"QUERY_DEVICE":     pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: resp})),
		"QUERY_PORT":       pack(abi.CmdQueryPort, 40, raw(abi.QueryPort{Response: resp, PortNum: 1})),
		"REREG_MR":         pack(abi.CmdReregMR, 8, raw(abi.ReregMR{Response: resp, MRHandle: s["mr"], Flags: 7, Start: 0x20000, HCAVA: 0x20000, Length: page, PDHandle: s["pd"], AccessFlags: 1})),
		"RESIZE_CQ":        pack(abi.CmdResizeCQ, 8, raw(abi.ResizeCQ{Response: resp, CQHandle: s["cq"], CQE: 16})),
		"POLL_CQ":          pack(abi.CmdPollCQ, 8, raw(abi.PollCQ{Response: resp, CQHandle: s["cq"], NE: 1})),
		"REQ_NOTIFY_CQ":    pack(abi.CmdReqNotifyCQ, 0, raw(abi.ReqNotifyCQ{CQHandle: s["cq"]})),
		"QUERY_QP":         pack(abi.CmdQueryQP, 128, raw(abi.QueryQP{Response: resp, QPHandle: s["qp"]})),
		"MODIFY_QP":        pack(abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: s["qp"], QPState: 1, PortNum: 1, AttrMask: uint32(hca.QPMaskState | hca.QPMaskPKeyIndex | hca.QPMaskPort | hca.QPMaskAccess)})),
		"POST_SEND":        post(abi.CmdPostSend, s["qp"], 56, [][]byte{raw(abi.SendWR{NumSGE: 1, Opcode: 2})}, []abi.SGE{{Addr: 0x20000, Length: 8}}),
		"POST_RECV":        post(abi.CmdPostRecv, s["qp"], 16, [][]byte{raw(abi.RecvWR{NumSGE: 1})}, []abi.SGE{{Addr: 0x20000, Length: 8}}),
		"POST_SRQ_RECV":    post(abi.CmdPostSRQRecv, s["srq"], 16, [][]byte{raw(abi.RecvWR{NumSGE: 1})}, []abi.SGE{{Addr: 0x20000, Length: 8}}),
		"ATTACH_MCAST":     pack(abi.CmdAttachMcast, 0, raw(abi.Mcast{GID: [16]byte{0xff}, QPHandle: s["ud qp"], MLID: 0xc000})),
		"DETACH_MCAST":     pack(abi.CmdDetachMcast, 0, raw(abi.Mcast{GID: [16]byte{0xff}, QPHandle: s["ud qp"], MLID: 0xc000})),
		"MODIFY_SRQ":       pack(abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: s["srq"], AttrMask: 1, MaxWR: 8})),
		"QUERY_SRQ":        pack(abi.CmdQuerySRQ, 16, raw(abi.QuerySRQ{Response: resp, SRQHandle: s["srq"]})),
		"OPEN_QP":          pack(abi.CmdOpenQP, 32, raw(abi.OpenQP{Response: resp, PDHandle: s["xrcd"], QPN: 1, QPType: 10})),
		"ex QUERY_DEVICE":  packEx(abi.ExCmdQueryDevice, resp, 304, raw(abi.ExQueryDevice{})),
		"ex MODIFY_CQ":     packEx(abi.ExCmdModifyCQ, 0, 0, raw(abi.ExModifyCQ{CQHandle: s["cq"], AttrMask: 1, CQCount: 2, CQPeriod: 1})),
		"ex MODIFY_QP":     packEx(abi.ExCmdModifyQP, resp, 8, raw(abi.ExModifyQP{Base: abi.ModifyQP{QPHandle: s["qp"], AttrMask: 1}})),
		"ex CREATE_FLOW":   packEx(abi.ExCmdCreateFlow, resp, 8, raw(abi.CreateFlow{})),
		"ex CREATE_WQ":     packEx(abi.ExCmdCreateWQ, resp, 24, raw(abi.ExCreateWQ{})),
		"ex CREATE_IND":    packEx(abi.ExCmdCreateRWQIndTbl, resp, 16, raw(abi.ExCreateRWQIndTbl{})),
		"ex DESTROY_WQ":    packEx(abi.ExCmdDestroyWQ, resp, 16, raw(abi.MaskedHandle{})),
		"second GET_CTX":   pack(abi.CmdGetContext, 8, raw(abi.GetContext{Response: resp})),
		"CREATE_COMP_CHNL": pack(abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp})),
	}
	for _, cr := range creates(s) {
		m[cr.name] = cr.command
	}
	return m
}

// Failure class 9: the range of a region, to the byte, and sums that wrap.
func TestRow9Ranges(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd := c.pd()
	const first, end = 0x10000 + page, 0x10000 + clientMem // what may be written
	top := ^uint64(0)
	for _, tc := range []struct {
		name          string
		start, length uint64
		want          unix.Errno
	}{
		{"all of it", first, end - first, 0},
		{"the last byte", end - 1, 1, 0},
		{"a byte before", first - 1, 2, unix.EFAULT},
		{"a byte beyond", end - 1, 2, unix.EFAULT},
		{"just beyond", end, 1, unix.EFAULT},
		{"the last address, two bytes", top, 2, unix.EINVAL},
		{"the last page, to the end", top - 4095, 4096, unix.EINVAL},
		{"wraps to the start", first, top - first + 2, unix.EINVAL},
		{"as long as can be", first, top - first, unix.EINVAL},
		{"nothing", first, 0, unix.EINVAL},
	} {
		t.Run(tc.name, func(*testing.T) {
			c.p.limit = top
			c.cmd(tc.want, abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: tc.start, HCAVA: tc.start, Length: tc.length, PDHandle: pd, AccessFlags: 1}))
		})
	}
	// The address that work requests use wraps on its own.
	c.cmd(unix.EINVAL, abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: first, HCAVA: top - 4095, Length: 2 * page, PDHandle: pd, AccessFlags: 1}))
}

// Failure class 13: a handle is destroyed while others use it. The destroy is
// refused while one is at it; a use finds it or finds nothing.
func TestRow13DestroyRacesUse(t *testing.T) {
	g := newRig(t)
	c, s := g.stocked(100)
	create := pack(abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, PDHandle: s["pd"], SendCQHandle: s["cq"], RecvCQHandle: s["cq"], MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: 2}))
	for range 200 {
		c.write(create)
		h := out[abi.CreateQPResp](c).QPHandle
		const scratch = resp + 2*page // not where CREATE_QP answers
		uses := [][]byte{
			pack(abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: h, QPState: 1, PortNum: 1, AttrMask: uint32(hca.QPMaskState | hca.QPMaskPKeyIndex | hca.QPMaskPort | hca.QPMaskAccess)})),
			pack(abi.CmdQueryQP, 128, raw(abi.QueryQP{Response: scratch, QPHandle: h})),
			pack(abi.CmdPostRecv, 4, raw(abi.PostSend{Response: scratch, QPHandle: h, WRCount: 1, WQESize: 16}), raw(abi.RecvWR{})),
			pack(abi.CmdPostSend, 4, raw(abi.PostSend{Response: scratch, QPHandle: h, WRCount: 1, WQESize: 56}), raw(abi.SendWR{Opcode: 2})),
		}
		destroy := pack(abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: scratch, QPHandle: h}))
		var wg sync.WaitGroup
		for i, b := range uses {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for range 5 {
					if a := c.writeFrom(101+i, b); a.errno != 0 && a.errno != unix.EINVAL && a.errno != unix.ENOENT && a.errno != unix.EBUSY && a.errno != unix.ENOMEM {
						t.Errorf("use: %v", a.errno)
					}
				}
			}()
		}
		gone := false
		for !gone {
			switch a := c.write(destroy); a.errno {
			case 0:
				gone = true
			case unix.EBUSY:
			default:
				t.Fatalf("destroy: %v", a.errno)
			}
		}
		wg.Wait()
	}
	c.h.Release()
	g.empty()
}

// Two destroys of one handle: one of them does it, the other is told that there
// is none, or that it is busy.
func TestRow13DestroyRacesDestroy(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	for range 300 {
		b := pack(abi.CmdDeallocPD, 0, raw(abi.Handle{Handle: c.pd()}))
		answers := make(chan unix.Errno, 2)
		for i := range 2 {
			go func() { answers <- c.writeFrom(100+i, b).errno }()
		}
		got := map[unix.Errno]int{<-answers: 1}
		got[<-answers]++
		if !maps.Equal(got, map[unix.Errno]int{0: 1, unix.ENOENT: 1}) && !maps.Equal(got, map[unix.Errno]int{0: 1, unix.EBUSY: 1}) {
			t.Fatalf("%v", got)
		}
	}
	c.h.Release()
	g.empty()
}

// Failure class 14: a destroy tells how many of the object's events were read,
// for libibverbs waits until it has acknowledged as many; unread ones go with it.
func TestRow14EventCounts(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	async := g.opened[int(c.context().AsyncFD)]
	pd, cq := c.pd(), c.cq(-1)
	waits := func() bool {
		r := newRequest(100)
		async.Poll(r, 1, false)
		return (<-r.ch).revents&unix.POLLIN != 0
	}
	for _, tc := range []struct {
		name string
		read bool
		want uint32
	}{{"read", true, 1}, {"unread", false, 0}} {
		qp := c.qp(pd, cq, hca.QPTypeRC)
		c.connect(qp.QPHandle, qp.QPN, 1)
		// An idle send queue is drained at once, and says so.
		c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp.QPHandle, QPState: uint8(hca.QPSQD), EnSQDAsyncNotify: 1,
			AttrMask: uint32(hca.QPMaskState | hca.QPMaskEnSQDAsyncNotify)}))
		if tc.read {
			r := newRequest(100)
			async.Read(r, 16)
			if a := <-r.ch; len(a.data) != 16 || decode[abi.AsyncEvent](a.data) != (abi.AsyncEvent{Element: 0x9b, EventType: uint32(hca.EventSQDrained)}) {
				t.Fatalf("%s: %+v", tc.name, a)
			}
		} else {
			for !waits() {
				runtime.Gosched()
			}
		}
		c.cmd(0, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: qp.QPHandle}))
		if n := out[abi.EventsResp](c).EventsReported; n != tc.want {
			t.Errorf("%s: %d events reported", tc.name, n)
		}
		if waits() {
			t.Errorf("%s: an event of a dead QP", tc.name)
		}
	}
	c.h.Release()
	async.Release()
	g.empty()
}
