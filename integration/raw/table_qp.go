package main

import (
	"encoding/binary"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// qpFields are the changes to CREATE_QP that its extended form shares; at is
// what the extended one's fields are off by.
func qpFields(at int) []field {
	return []field{
		{"type-0", put8(at+53, 0), unix.EINVAL},
		{"type-1", put8(at+53, 1), unix.EINVAL},
		{"type-5", put8(at+53, 5), unix.EINVAL},
		{"type-254", put8(at+53, 254), unix.EINVAL},
		{"type-driver", put8(at+53, rawverbs.QPTypeDriver), unix.EOPNOTSUPP},
		{"type-raw" + needsNetRaw, put8(at+53, rawverbs.QPTypeRaw), unix.EOPNOTSUPP},
		{"send-wr-max", put32(at+32, ^uint32(0)), unix.EINVAL},
		{"recv-wr-max", put32(at+36, ^uint32(0)), unix.EINVAL},
		{"send-sge-max", put32(at+40, ^uint32(0)), unix.EINVAL},
		{"recv-sge-max", put32(at+44, ^uint32(0)), unix.EINVAL},
		{"inline-max", put32(at+48, ^uint32(0)), unix.EINVAL},
		{"all-max", all(put32(at+32, ^uint32(0)), put32(at+36, ^uint32(0)), put32(at+40, ^uint32(0)), put32(at+44, ^uint32(0))), unix.EINVAL},
		{"srq-bad", all(put8(at+54, 1), put32(at+28, 0xffff)), unix.ENOENT},
		{"srq-unused", put32(at+28, 0xffff), 0},
	}
}

func qpHandles(at int) []handleField {
	return []handleField{
		{"pd", at + 16, rawverbs.PD, 0}, {"send-cq", at + 20, rawverbs.CQ, 0}, {"recv-cq", at + 24, rawverbs.CQ, 0},
	}
}

func recv(k rawverbs.Kind) func(*walk) []byte {
	return func(w *walk) []byte { return rawverbs.RecvBody(w.own[k], 7) }
}

// drain empties a QP's receive queue by taking it through RESET.
func drain(w *walk) {
	qp := w.own[rawverbs.QP]
	_ = w.a.ModifyQP(abi.ModifyQP{QPHandle: qp, AttrMask: rawverbs.MaskState, QPState: rawverbs.QPReset})
	_ = w.initQP(qp)
}

// toSameState is a MODIFY_QP that succeeds any number of times.
func toSameState(w *walk) abi.ModifyQP {
	return abi.ModifyQP{QPHandle: w.own[rawverbs.QP], AttrMask: rawverbs.MaskState | rawverbs.MaskAccess, QPState: rawverbs.QPInit, QPAccessFlags: 1}
}

var modifyFields = []field{
	{"mask-bit2", put32(68, 1<<2|rawverbs.MaskState), unix.EINVAL},
	{"mask-bit21", put32(68, 1<<21|rawverbs.MaskState), unix.EOPNOTSUPP},
	{"mask-bit31", put32(68, 1<<31|rawverbs.MaskState), unix.EOPNOTSUPP},
	{"mask-0", put32(68, 0), 0},
	{"state-7", put8(96, 7), unix.EINVAL},
	{"state-255", put8(96, 255), unix.EINVAL},
	{"cur-state-7", all(put32(68, rawverbs.MaskState|rawverbs.MaskCurState|rawverbs.MaskAccess), put8(97, 7)), unix.EINVAL},
	{"to-rts", put8(96, rawverbs.QPRTS), unix.EINVAL},
	{"port-0", all(put32(68, initMask), put8(104, 0)), unix.EINVAL},
	{"port-2", all(put32(68, initMask), put8(104, 2)), unix.EINVAL},
	{"pkey-index-high", all(put32(68, initMask), put8(104, 1), put8(92, 0xff), put8(93, 0xff)), unix.EINVAL},
	{"rtr-without-mask", put8(96, rawverbs.QPRTR), unix.EINVAL},
	{"av-port-0", all(put32(68, rawverbs.MaskState|rawverbs.MaskAV), put8(96, rawverbs.QPRTR), put8(31, 0)), unix.EINVAL},
	{"alt-path", all(put32(68, rawverbs.MaskState|rawverbs.MaskAltPath), put8(63, 2), put8(108, 2)), unix.EINVAL},
	{"reserved", put8(110, 1), 0},
}

// postFields are about the arrays of a post request: wr_count, sge_count and
// wqe_size at 12, 16 and 20.
func postFields(wqe int) []field {
	f := []field{
		{"wr-count-more", put32(12, 2), unix.ENOSPC},
		{"sge-count-more", put32(16, 1), unix.ENOSPC},
		{"wqe-size-more", put32(20, uint32(wqe+16)), unix.ENOSPC},
		{"wr-count-less", put32(12, 0), unix.EOPNOTSUPP}, // the rest must be zero, and its opcode is not
		{"wrap-32", all(put32(12, 0x10001), put32(20, 0x10000)), unix.ENOSPC},
		{"wrap-sge", put32(16, 0x10000001), unix.ENOSPC},
		{"num-sge-more", put32(24+8, 1), unix.EINVAL},
		{"num-sge-max", put32(24+8, ^uint32(0)), unix.EINVAL},
	}
	return f
}

// emptyWrite is an RDMA write of no bytes: it needs neither memory nor a receive.
func emptyWrite(qp uint32) []byte {
	return rawverbs.SendBody(qp, abi.SendWR{WRID: 1, Opcode: rawverbs.OpRDMAWrite})
}

var qpRows = []row{
	{
		name: "CREATE_QP", num: abi.CmdCreateQP, resp: qpResp, udata: true, makes: rawverbs.QP,
		good: one(func(w *walk) abi.CreateQP {
			return rawverbs.SmallQP(rawverbs.QPTypeRC, w.own[rawverbs.PD], w.own[rawverbs.CQ])
		}),
		handles: qpHandles(0),
		fields:  append(qpFields(0), field{"reserved", put8(55, 1), 0}),
	},
	{
		name: "CREATE_QP_UD", num: abi.CmdCreateQP, resp: qpResp, udata: true, makes: rawverbs.QP,
		good: one(func(w *walk) abi.CreateQP {
			return rawverbs.SmallQP(rawverbs.QPTypeUD, w.own[rawverbs.PD], w.own[rawverbs.CQ])
		}),
	},
	{
		name: "CREATE_QP_XRC_TGT", num: abi.CmdCreateQP, resp: qpResp, udata: true, makes: rawverbs.QP,
		good: one(func(w *walk) abi.CreateQP {
			return abi.CreateQP{QPType: rawverbs.QPTypeXRCTgt, PDHandle: w.own[rawverbs.XRCD]}
		}),
		handles: []handleField{{"xrcd", 16, rawverbs.XRCD, unix.EINVAL}},
	},
	{
		name: "CREATE_QP_XRC_INI", num: abi.CmdCreateQP, resp: qpResp, udata: true, makes: rawverbs.QP,
		good: one(func(w *walk) abi.CreateQP {
			in := rawverbs.SmallQP(rawverbs.QPTypeXRCIni, w.own[rawverbs.PD], w.own[rawverbs.CQ])
			in.RecvCQHandle = 0xffff // not looked at
			return in
		}),
	},
	{
		name: "QUERY_QP", num: abi.CmdQueryQP, resp: rawverbs.SizeOf[abi.QueryQPResp](),
		good:    one(func(w *walk) abi.QueryQP { return abi.QueryQP{QPHandle: w.own[rawverbs.QP], AttrMask: 1} }),
		handles: []handleField{{"qp", 8, rawverbs.QP, 0}},
		fields:  []field{{"mask-0", put32(12, 0), 0}, {"mask-all", put32(12, ^uint32(0)), 0}},
	},
	{
		name: "MODIFY_QP", num: abi.CmdModifyQP,
		good:    one(toSameState),
		handles: []handleField{{"qp", 64, rawverbs.QP, 0}},
		fields:  modifyFields,
	},
	withEvents("DESTROY_QP", abi.CmdDestroyQP, rawverbs.QP, 4),
	{
		name: "POST_SEND", num: abi.CmdPostSend, resp: postResp,
		good:    func(w *walk) []byte { return emptyWrite(w.rtsQP) },
		handles: []handleField{{"qp", 8, rawverbs.QP, 0}},
		fields: append(postFields(rawverbs.SizeOf[abi.SendWR]()), []field{
			{"opcode-7", put32(24+12, 7), unix.EINVAL}, // LOCAL_INV
			{"opcode-8", put32(24+12, 8), unix.EINVAL}, // BIND_MW
			{"opcode-max", put32(24+12, ^uint32(0)), unix.EINVAL},
			{"wqe-size-0", put32(20, 0), unix.EOPNOTSUPP}, // no array, and the rest is not zero
		}...),
	},
	{
		name: "POST_SEND_INIT", num: abi.CmdPostSend, refused: unix.EINVAL, resp: postResp,
		good: func(w *walk) []byte { return emptyWrite(w.own[rawverbs.QP]) },
	},
	{
		name: "POST_SEND_UD", num: abi.CmdPostSend, resp: postResp,
		good: func(w *walk) []byte {
			// wr.ud: ah, remote_qpn, remote_qkey where the others have an address.
			return rawverbs.SendBody(w.udQP, abi.SendWR{Opcode: rawverbs.OpSend, RemoteAddr: uint64(w.own[rawverbs.AH]) | 0xffff<<32})
		},
		handles: []handleField{{"ah", 24 + 24, rawverbs.AH, 0}},
		fields: []field{
			{"opcode-write", put32(24+12, rawverbs.OpRDMAWrite), unix.EINVAL},
			{"opcode-read", put32(24+12, rawverbs.OpRDMARead), unix.EINVAL},
		},
	},
	{
		name: "POST_RECV", num: abi.CmdPostRecv, resp: postResp, after: drain,
		good:    recv(rawverbs.QP),
		handles: []handleField{{"qp", 8, rawverbs.QP, 0}},
		fields: append(postFields(16), []field{
			{"wqe-size-0", put32(20, 0), unix.EINVAL}, {"wqe-size-15", put32(20, 15), unix.EINVAL},
		}...),
	},
	{
		name: "ATTACH_MCAST", num: abi.CmdAttachMcast, after: func(w *walk) { w.mcast(abi.CmdDetachMcast) },
		good:    one(mcast),
		handles: []handleField{{"qp", 16, rawverbs.QP, 0}},
		fields: []field{
			{"rc-qp", func(b []byte) { copy(b[16:], rcHandle[:]) }, unix.EINVAL},
			{"not-multicast", put8(0, 0xfe), unix.EINVAL},
			{"reserved", put8(22, 1), 0},
		},
	},
	{
		name: "DETACH_MCAST", num: abi.CmdDetachMcast, always: func(w *walk) { w.mcast(abi.CmdDetachMcast) },
		good: func(w *walk) []byte {
			w.mcast(abi.CmdAttachMcast)
			return one(mcast)(w)
		},
		handles: []handleField{{"qp", 16, rawverbs.QP, 0}},
		fields: []field{
			{"other-gid", put8(15, 0x77), unix.EINVAL}, {"other-lid", put8(20, 0x77), unix.EINVAL},
		},
	},
}

// rcHandle is the handle of the walk's RC QP, for a table that is built before it.
var rcHandle [4]byte

func mcast(w *walk) abi.Mcast {
	binary.LittleEndian.PutUint32(rcHandle[:], w.own[rawverbs.QP])
	return abi.Mcast{GID: [16]byte{0xff, 0x0e, 15: 0x42}, QPHandle: w.udQP, MLID: 0xc000}
}

func (w *walk) mcast(num uint32) {
	in := mcast(w)
	_, _ = w.a.Call(num, rawverbs.Bytes(&in), 0, false)
}
