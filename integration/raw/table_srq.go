package main

import (
	"encoding/binary"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// srqUdata is rxe's rxe_modify_srq_cmd: where to write the new queue's place.
func srqUdata(w *walk) []byte {
	_, addr := w.a.Mem.Out()
	return binary.LittleEndian.AppendUint64(nil, addr+rawverbs.Page)
}

var srqRows = []row{
	{
		name: "CREATE_SRQ", num: abi.CmdCreateSRQ, resp: 16, udata: true, makes: rawverbs.SRQ,
		good:    one(func(w *walk) abi.CreateSRQ { return abi.CreateSRQ{PDHandle: w.own[rawverbs.PD], MaxWR: 4, MaxSGE: 1} }),
		handles: []handleField{{"pd", 16, rawverbs.PD, 0}},
		fields: []field{
			{"wr-0", put32(20, 0), unix.EINVAL}, {"wr-max", put32(20, ^uint32(0)), unix.EINVAL},
			{"sge-max", put32(24, ^uint32(0)), unix.EINVAL}, {"limit-max", put32(28, ^uint32(0)), 0},
		},
	},
	{
		name: "MODIFY_SRQ", num: abi.CmdModifySRQ, udata: true, uin: srqUdata,
		good: one(func(w *walk) abi.ModifySRQ {
			return abi.ModifySRQ{SRQHandle: w.own[rawverbs.SRQ], AttrMask: srqLimit, SRQLimit: 0}
		}),
		handles: []handleField{{"srq", 0, rawverbs.SRQ, 0}},
		fields: []field{
			{"mask-0", put32(4, 0), 0},
			{"mask-bit2", put32(4, 1<<2), 0},
			{"limit-max", put32(12, ^uint32(0)), unix.EINVAL},
			{"wr", all(put32(4, srqMaxWR), put32(8, 8)), 0},
			{"wr-0", all(put32(4, srqMaxWR), put32(8, 0)), unix.EINVAL},
			{"wr-max", all(put32(4, srqMaxWR), put32(8, ^uint32(0))), unix.EINVAL},
		},
	},
	{
		name: "QUERY_SRQ", num: abi.CmdQuerySRQ, resp: 16,
		good:    one(func(w *walk) abi.QuerySRQ { return abi.QuerySRQ{SRQHandle: w.own[rawverbs.SRQ]} }),
		handles: []handleField{{"srq", 8, rawverbs.SRQ, 0}},
		fields:  []field{{"reserved", put32(12, 1), 0}},
	},
	withEvents("DESTROY_SRQ", abi.CmdDestroySRQ, rawverbs.SRQ, 4),
	{
		name: "POST_SRQ_RECV", num: abi.CmdPostSRQRecv, resp: postResp, after: freshSRQ,
		good:    recv(rawverbs.SRQ),
		handles: []handleField{{"srq", 8, rawverbs.SRQ, 0}},
		fields: append(postFields(16), []field{
			{"wqe-size-0", put32(20, 0), unix.EINVAL}, {"wqe-size-15", put32(20, 15), unix.EINVAL},
		}...),
	},
	{
		name: "OPEN_XRCD", num: abi.CmdOpenXRCD, resp: 4, udata: true, makes: rawverbs.XRCD,
		good: one(func(*walk) abi.OpenXRCD { return abi.OpenXRCD{FD: ^uint32(0), OFlags: unix.O_CREAT} }),
		fields: []field{
			{"fd-bad", put32(8, 1000), unix.EBADF},
			{"no-flags", put32(12, 0), 0}, // a private domain needs none
			{"file-without-create", all(put32(8, 0), put32(12, 0)), unix.EAGAIN},
			{"file-create", all(put32(8, 0), put32(12, unix.O_CREAT)), 0},
			{"flags-other", put32(12, unix.O_CREAT|unix.O_APPEND), 0}, // not looked at
		},
	},
	handleOnly("CLOSE_XRCD", abi.CmdCloseXRCD, rawverbs.XRCD),
	{
		name: "CREATE_XSRQ", num: abi.CmdCreateXSRQ, resp: 16, udata: true, makes: rawverbs.SRQ,
		good: one(func(w *walk) abi.CreateXSRQ {
			return abi.CreateXSRQ{
				SRQType: 1, PDHandle: w.own[rawverbs.PD], MaxWR: 4, MaxSGE: 1,
				XRCDHandle: w.own[rawverbs.XRCD], CQHandle: w.own[rawverbs.CQ],
			}
		}),
		handles: []handleField{
			{"pd", 20, rawverbs.PD, 0}, {"xrcd", 40, rawverbs.XRCD, unix.EINVAL}, {"cq", 44, rawverbs.CQ, 0},
		},
		fields: []field{
			{"basic", put32(16, 0), 0},
			{"tm", put32(16, 2), unix.EOPNOTSUPP},
			{"type-3", put32(16, 3), unix.EOPNOTSUPP},
			{"wr-max", put32(24, ^uint32(0)), unix.EINVAL},
		},
	},
	{
		name: "OPEN_QP", num: abi.CmdOpenQP, resp: qpResp, udata: true, makes: rawverbs.QP,
		before: func(w *walk) { w.xrcTarget() },
		good: one(func(w *walk) abi.OpenQP {
			return abi.OpenQP{PDHandle: w.own[rawverbs.XRCD], QPN: w.xrcTarget(), QPType: rawverbs.QPTypeXRCTgt}
		}),
		handles: []handleField{{"xrcd", 16, rawverbs.XRCD, unix.EINVAL}},
		fields: []field{
			{"qpn-unknown", put32(20, 0xabcdef), unix.EINVAL},
			{"type-rc", put8(24, rawverbs.QPTypeRC), unix.EINVAL},
			{"reserved", put8(25, 1), 0},
		},
	},
}

// Bits of enum ib_srq_attr_mask.
const (
	srqMaxWR = 1
	srqLimit = 2
)

// freshSRQ replaces the SRQ by an empty one with the same handle.
func freshSRQ(w *walk) {
	if w.a.Destroy(rawverbs.SRQ, w.own[rawverbs.SRQ]) == nil {
		if h, err := w.make(w.a, rawverbs.SRQ, w.own); err == nil {
			w.own[rawverbs.SRQ] = h
		}
	}
}

// xrcTarget is the number of a target QP that another file could open; the
// first call makes it.
func (w *walk) xrcTarget() uint32 {
	if w.target == 0 {
		r, err := w.a.CreateQP(abi.CreateQP{QPType: rawverbs.QPTypeXRCTgt, PDHandle: w.own[rawverbs.XRCD]})
		if err == nil {
			w.target, w.targetQP = r.QPN, r.QPHandle
		}
	}
	return w.target
}
