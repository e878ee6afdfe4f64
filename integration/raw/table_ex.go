package main

import (
	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

const exFlag = abi.CmdFlagExtended

// absentEx is an extended command of drivers that steer flows or have work queues.
func absentEx[T any](name string, num uint32, resp int) row {
	return row{
		name: name, num: exFlag | num, missing: true, resp: resp,
		good: func(*walk) []byte { return make([]byte, (rawverbs.SizeOf[T]()+7)/8*8) },
	}
}

var exRows = []row{
	{
		name: "EX_QUERY_DEVICE", num: exFlag | abi.ExCmdQueryDevice, min: 8, resp: 184, full: rawverbs.SizeOf[abi.ExQueryDeviceResp](),
		good: one(func(*walk) abi.ExQueryDevice { return abi.ExQueryDevice{} }),
		fields: []field{
			{"comp-mask", put32(0, 1), unix.EINVAL}, {"reserved", put32(4, 1), unix.EINVAL},
		},
	},
	{
		name: "EX_CREATE_CQ", num: exFlag | abi.ExCmdCreateCQ, min: 32, resp: 16, udata: true, makes: rawverbs.CQ,
		good: one(func(*walk) abi.ExCreateCQ { return abi.ExCreateCQ{CQE: 16, CompChannel: rawverbs.NoChannel} }),
		fields: []field{
			{"comp-mask", put32(20, 1), unix.EINVAL}, {"reserved", put32(28, 1), unix.EINVAL},
			{"flags-timestamp", put32(24, abi.CQFlagTimestampCompletion), unix.EOPNOTSUPP},
			{"flags-bit31", put32(24, 1<<31), unix.EOPNOTSUPP},
			{"cqe-0", put32(8, 0), unix.EINVAL}, {"cqe-max", put32(8, ^uint32(0)), unix.EINVAL},
			{"vector-high", put32(12, 1<<16), unix.EINVAL}, {"channel-stdin", put32(16, 0), unix.EBADF},
		},
	},
	{
		name: "EX_CREATE_QP", num: exFlag | abi.ExCmdCreateQP, min: 52, resp: 40, udata: true, makes: rawverbs.QP,
		good: one(func(w *walk) abi.ExCreateQP {
			return abi.ExCreateQP{
				PDHandle: w.own[rawverbs.PD], SendCQHandle: w.own[rawverbs.CQ], RecvCQHandle: w.own[rawverbs.CQ],
				MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: rawverbs.QPTypeRC,
			}
		}),
		handles: qpHandles(-8),
		fields: append(qpFields(-8), []field{
			{"reserved", put8(47, 1), unix.EINVAL},
			{"comp-mask-bit1", put32(48, 1<<1), unix.EINVAL}, {"comp-mask-bit31", put32(48, 1<<31), unix.EINVAL},
			{"ind-table", put32(48, abi.CreateQPMaskIndTable), unix.EINVAL},
			{"flags-bit0", put32(52, 1<<0), unix.EINVAL}, {"flags-bit31", put32(52, 1<<31), unix.EINVAL},
			{"flags-scatter-fcs", put32(52, abi.QPCreateScatterFCS), unix.EOPNOTSUPP},
			{"flags-block-loopback", put32(52, abi.QPCreateBlockMcastLoopback), unix.EOPNOTSUPP},
			{"flags-source-qpn" + needsNetRaw, put32(52, abi.QPCreateSourceQPN), unix.EOPNOTSUPP},
			{"source-qpn-unused", put32(60, 1), 0},
		}...),
	},
	{
		name: "EX_MODIFY_QP", num: exFlag | abi.ExCmdModifyQP, min: 112, resp: 8, udata: true,
		good:    one(func(w *walk) abi.ExModifyQP { return abi.ExModifyQP{Base: toSameState(w)} }),
		handles: []handleField{{"qp", 64, rawverbs.QP, 0}},
		fields: append(append([]field(nil), modifyFields...), []field{
			{"rate-limit", put32(68, rawverbs.MaskState|rawverbs.MaskAccess|rawverbs.MaskRateLimit), unix.EOPNOTSUPP},
			{"reserved-end", put32(116, 1), 0},
		}...),
	},
	absentEx[abi.CreateFlow]("EX_CREATE_FLOW", abi.ExCmdCreateFlow, 8),
	absentEx[abi.MaskedHandle]("EX_DESTROY_FLOW", abi.ExCmdDestroyFlow, 0),
	absentEx[abi.ExCreateWQ]("EX_CREATE_WQ", abi.ExCmdCreateWQ, 24),
	absentEx[abi.ExModifyWQ]("EX_MODIFY_WQ", abi.ExCmdModifyWQ, 0),
	absentEx[abi.MaskedHandle]("EX_DESTROY_WQ", abi.ExCmdDestroyWQ, 16),
	absentEx[abi.ExCreateRWQIndTbl]("EX_CREATE_RWQ_IND_TBL", abi.ExCmdCreateRWQIndTbl, 16),
	absentEx[abi.MaskedHandle]("EX_DESTROY_RWQ_IND_TBL", abi.ExCmdDestroyRWQIndTbl, 0),
	{
		name: "EX_MODIFY_CQ", num: exFlag | abi.ExCmdModifyCQ, min: 16,
		good: one(func(w *walk) abi.ExModifyCQ {
			return abi.ExModifyCQ{CQHandle: w.own[rawverbs.CQ], AttrMask: abi.CQModerate, CQCount: 1, CQPeriod: 1}
		}),
		handles: []handleField{{"cq", 0, rawverbs.CQ, 0}},
		fields: []field{
			{"mask-0", put32(4, 0), unix.EINVAL}, {"mask-2", put32(4, 2), unix.EOPNOTSUPP}, {"mask-3", put32(4, 3), unix.EOPNOTSUPP},
			{"reserved", put32(12, 1), unix.EINVAL},
		},
	},
}
