package main

import (
	"encoding/binary"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// Sizes of responses, in bytes.
var (
	cqResp   = rawverbs.SizeOf[abi.CreateCQResp]()
	qpResp   = rawverbs.SizeOf[abi.CreateQPResp]()
	postResp = rawverbs.SizeOf[abi.PostResp]()
	pollResp = rawverbs.SizeOf[abi.PollCQResp]()
)

func put32(off int, v uint32) func([]byte) {
	return func(b []byte) { binary.LittleEndian.PutUint32(b[off:], v) }
}

func put8(off int, v byte) func([]byte) { return func(b []byte) { b[off] = v } }

func put64(off int, v uint64) func([]byte) {
	return func(b []byte) { binary.LittleEndian.PutUint64(b[off:], v) }
}

// all does several changes.
func all(fs ...func([]byte)) func([]byte) {
	return func(b []byte) {
		for _, f := range fs {
			f(b)
		}
	}
}

// one is a good request of one struct.
func one[T any](f func(w *walk) T) func(*walk) []byte {
	return func(w *walk) []byte {
		v := f(w)
		return rawverbs.Bytes(&v)
	}
}

// handleOnly is the request of the commands that take nothing but a handle.
func handleOnly(name string, num uint32, k rawverbs.Kind) row {
	return row{
		name: name, num: num, destroys: k,
		good:    one(func(*walk) abi.Handle { return abi.Handle{} }),
		handles: []handleField{{"handle", 0, k, 0}},
	}
}

// withEvents is that of those that answer with counts of events.
func withEvents(name string, num uint32, k rawverbs.Kind, resp int) row {
	return row{
		name: name, num: num, destroys: k, resp: resp,
		good:    one(func(*walk) abi.DestroyQP { return abi.DestroyQP{} }),
		handles: []handleField{{"handle", 8, k, 0}},
		fields:  []field{{"reserved", put32(12, 1), 0}}, // nobody looks
	}
}

// absent is a number of the kernel's enum without a command behind it.
func absent(name string, num uint32, size int) row {
	return row{name: name, num: num, missing: true, good: func(*walk) []byte { return make([]byte, size) }}
}

// rows is the legacy table, then the extended one, by number.
var rows = append([]row{
	{
		name: "GET_CONTEXT", num: abi.CmdGetContext, resp: 8, udata: true, fresh: true,
		good: one(func(*walk) abi.GetContext { return abi.GetContext{} }),
	},
	{
		name: "QUERY_DEVICE", num: abi.CmdQueryDevice, resp: rawverbs.SizeOf[abi.QueryDeviceResp](),
		good: one(func(*walk) abi.QueryDevice { return abi.QueryDevice{} }),
	},
	{
		name: "QUERY_PORT", num: abi.CmdQueryPort, resp: rawverbs.SizeOf[abi.QueryPortResp](),
		good: one(func(*walk) abi.QueryPort { return abi.QueryPort{PortNum: 1} }),
		fields: []field{
			{"port-0", put8(8, 0), unix.EINVAL}, {"port-2", put8(8, 2), unix.EINVAL}, {"port-255", put8(8, 255), unix.EINVAL},
			{"reserved", put8(9, 1), 0},
		},
	},
	{
		name: "ALLOC_PD", num: abi.CmdAllocPD, resp: 4, udata: true, makes: rawverbs.PD,
		good: one(func(*walk) abi.AllocPD { return abi.AllocPD{} }),
	},
	handleOnly("DEALLOC_PD", abi.CmdDeallocPD, rawverbs.PD),
	{
		name: "CREATE_AH", num: abi.CmdCreateAH, resp: 4, udata: true, makes: rawverbs.AH,
		good: one(func(w *walk) abi.CreateAH {
			return abi.CreateAH{PDHandle: w.own[rawverbs.PD], Attr: w.path.AH()}
		}),
		handles: []handleField{{"pd", 16, rawverbs.PD, 0}},
		fields: []field{
			{"port-0", put8(54, 0), unix.EINVAL}, {"port-2", put8(54, 2), unix.EINVAL},
			{"reserved", put32(20, 1), 0}, {"attr-reserved", put8(55, 1), 0},
			{"no-way", all(put8(53, 0), put8(48, 0)), unix.EINVAL}, // no GRH and LID 0
			{"sgid-empty", all(put8(53, 1), put8(44, 7)), unix.ENODATA},
		},
	},
	absent("MODIFY_AH", abi.CmdModifyAH, 16),
	absent("QUERY_AH", abi.CmdQueryAH, 16),
	handleOnly("DESTROY_AH", abi.CmdDestroyAH, rawverbs.AH),
	{
		name: "REG_MR", num: abi.CmdRegMR, resp: 12, udata: true, makes: rawverbs.MR,
		good: one(func(w *walk) abi.RegMR {
			_, addr := w.a.Mem.Data()
			return abi.RegMR{
				Start: addr, Length: rawverbs.Page, HCAVA: addr, PDHandle: w.own[rawverbs.PD],
				AccessFlags: rawverbs.AccessLocalWrite | rawverbs.AccessRemoteWrite,
			}
		}),
		handles: []handleField{{"pd", 32, rawverbs.PD, 0}},
		fields: []field{
			{"hca-va-offset", func(b []byte) { b[24]++ }, unix.EINVAL},
			{"length-0", put64(16, 0), unix.EINVAL},
			{"length-wraps", put64(16, ^uint64(0)), unix.EINVAL},
			{"start-max-2", all(put64(8, ^uint64(0)), put64(24, ^uint64(0)), put64(16, 2)), unix.EINVAL},
			{"unmapped", all(put64(8, 0x10000), put64(24, 0x10000)), unix.EFAULT},
			{"kernel-address", all(put64(8, 0xffff_8880_0000_0000), put64(24, 0xffff_8880_0000_0000)), unix.EFAULT},
			{"access-hugetlb", put32(36, 1<<7|1), unix.EOPNOTSUPP},
			{"access-on-demand", put32(36, 1<<6|1), 0},
			{"unmapped-on-demand", all(put64(8, 0x10000), put64(24, 0x10000), put32(36, 1<<6|1)), 0},
			{"access-bit12", put32(36, 1<<12|1), unix.EINVAL},
			{"access-bit31", put32(36, 1<<31|1), unix.EINVAL},
			{"access-relaxed", put32(36, 1<<20|1), 0},
			{"access-optional", put32(36, 1<<29|1), 0},
			{"remote-write-only", put32(36, rawverbs.AccessRemoteWrite), unix.EINVAL},
			{"remote-atomic-only", put32(36, rawverbs.AccessRemoteAtom), unix.EINVAL},
			{"remote-read-only", put32(36, rawverbs.AccessRemoteRead), 0},
			{"access-0", put32(36, 0), 0},
		},
	},
	absent("REG_SMR", abi.CmdRegSMR, 40),
	{
		name: "REREG_MR", num: abi.CmdReregMR, resp: 8, udata: true,
		good: one(func(w *walk) abi.ReregMR {
			return abi.ReregMR{MRHandle: w.own[rawverbs.MR], Flags: reregAccess, PDHandle: w.own[rawverbs.PD], AccessFlags: rawverbs.AccessLocalWrite}
		}),
		handles: []handleField{{"mr", 8, rawverbs.MR, 0}},
		fields: []field{
			{"flags-0", put32(12, 0), unix.EINVAL},
			{"flags-bit3", put32(12, 1<<3), unix.EOPNOTSUPP},
			{"flags-bit31", put32(12, 1<<31|reregAccess), unix.EOPNOTSUPP},
			{"pd", put32(12, reregPD), 0},
			{"pd-bad", all(put32(12, reregPD), put32(40, 0xffff)), unix.ENOENT},
			{"pd-bad-unused", put32(40, 0xffff), 0},
			{"trans-offset", all(put32(12, reregTrans), put64(16, 0x1001), put64(24, 1), put64(32, 0x1002)), unix.EINVAL},
			{"trans-unmapped", all(put32(12, reregTrans), put64(16, 0x10000), put64(24, 1), put64(32, 0x10000)), unix.EFAULT},
			{"trans-length-0", all(put32(12, reregTrans), put64(16, 0x10000), put64(24, 0), put64(32, 0x10000)), unix.EINVAL},
			{"access-bit31", put32(44, 1<<31|1), unix.EINVAL},
			{"remote-write-only", put32(44, rawverbs.AccessRemoteWrite), unix.EINVAL},
		},
	},
	absent("QUERY_MR", abi.CmdQueryMR, 16),
	handleOnly("DEREG_MR", abi.CmdDeregMR, rawverbs.MR),
	{
		name: "ALLOC_MW", num: abi.CmdAllocMW, resp: 8, udata: true, makes: rawverbs.MW,
		good:    one(func(w *walk) abi.AllocMW { return abi.AllocMW{PDHandle: w.own[rawverbs.PD], MWType: 1} }),
		handles: []handleField{{"pd", 8, rawverbs.PD, 0}},
		fields: []field{
			{"type-0", put8(12, 0), unix.EINVAL}, {"type-2", put8(12, 2), 0}, {"type-3", put8(12, 3), unix.EINVAL},
			{"reserved", put8(13, 1), 0},
		},
	},
	absent("BIND_MW", abi.CmdBindMW, 48),
	handleOnly("DEALLOC_MW", abi.CmdDeallocMW, rawverbs.MW),
	{
		name: "CREATE_COMP_CHANNEL", num: abi.CmdCreateCompChannel, resp: 4, makesFD: true,
		good: one(func(*walk) abi.CreateCompChannel { return abi.CreateCompChannel{} }),
	},
	{
		name: "CREATE_CQ", num: abi.CmdCreateCQ, resp: cqResp, udata: true, makes: rawverbs.CQ,
		good: one(func(*walk) abi.CreateCQ { return abi.CreateCQ{CQE: 16, CompChannel: rawverbs.NoChannel} }),
		fields: []field{
			{"cqe-0", put32(16, 0), unix.EINVAL},
			{"cqe-max", put32(16, ^uint32(0)), unix.EINVAL},
			{"cqe-min-int", put32(16, 1<<31), unix.EINVAL},
			{"vector-high", put32(20, 1<<16), unix.EINVAL},
			{"vector-max", put32(20, ^uint32(0)), unix.EINVAL},
			{"channel-stdin", put32(24, 0), unix.EBADF},
			{"channel-closed", put32(24, 1000), unix.EBADF},
			{"channel-min-int", put32(24, 1<<31), 0},
			{"reserved", put32(28, 1), 0},
		},
	},
	{
		name: "CREATE_CQ_ON_CHANNEL", num: abi.CmdCreateCQ, resp: cqResp, udata: true, makes: rawverbs.CQ,
		good: one(func(w *walk) abi.CreateCQ { return abi.CreateCQ{CQE: 16, CompChannel: int32(w.channel)} }),
	},
	{
		name: "RESIZE_CQ", num: abi.CmdResizeCQ, resp: 8, udata: true,
		good:    one(func(w *walk) abi.ResizeCQ { return abi.ResizeCQ{CQHandle: w.own[rawverbs.CQ], CQE: 32} }),
		handles: []handleField{{"cq", 8, rawverbs.CQ, 0}},
		fields: []field{
			{"cqe-0", put32(12, 0), unix.EINVAL}, {"cqe-max", put32(12, ^uint32(0)), unix.EINVAL}, {"cqe-smaller", put32(12, 8), 0},
		},
	},
	withEvents("DESTROY_CQ", abi.CmdDestroyCQ, rawverbs.CQ, 8),
	{
		name: "POLL_CQ", num: abi.CmdPollCQ, resp: pollResp,
		good:    one(func(w *walk) abi.PollCQ { return abi.PollCQ{CQHandle: w.own[rawverbs.CQ], NE: 1} }),
		handles: []handleField{{"cq", 8, rawverbs.CQ, 0}},
		fields:  []field{{"ne-0", put32(12, 0), 0}, {"ne-max", put32(12, ^uint32(0)), 0}},
	},
	absent("PEEK_CQ", abi.CmdPeekCQ, 16),
	{
		name: "REQ_NOTIFY_CQ", num: abi.CmdReqNotifyCQ,
		good:    one(func(w *walk) abi.ReqNotifyCQ { return abi.ReqNotifyCQ{CQHandle: w.own[rawverbs.CQ]} }),
		handles: []handleField{{"cq", 0, rawverbs.CQ, 0}},
		fields:  []field{{"solicited", put32(4, 1), 0}, {"solicited-max", put32(4, ^uint32(0)), 0}},
	},
}, append(append(qpRows, srqRows...), exRows...)...)

// Bits of enum ib_mr_rereg_flags.
const (
	reregTrans  = 1
	reregPD     = 2
	reregAccess = 4
)

// beyond are numbers that name no command.
var beyond = []uint32{
	41, 49, 50, 55, 100, 255,
	abi.CmdFlagExtended | abi.CmdGetContext, abi.CmdFlagExtended | abi.CmdAllocPD, abi.CmdFlagExtended | abi.CmdRegMR,
	abi.CmdFlagExtended | abi.CmdPollCQ, abi.CmdFlagExtended | 49, abi.CmdFlagExtended | 58, abi.CmdFlagExtended | 255,
}

// missingWants is the errno of a case of a command that the device lacks. The
// command word is looked at first, then the number; a number with a hole behind
// it still has its length checked.
func (r *row) missingWants(name string, want unix.Errno) unix.Errno {
	switch name {
	case "short-header", "command-bit8", "command-bit24", "command-bit30":
		return want
	case "short-byte", "lie-small", "lie-big", "lie-zero":
		if !r.ex() {
			return want
		}
	}
	return unix.EOPNOTSUPP
}
