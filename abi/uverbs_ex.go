package abi

import "unsafe"

// Extended commands, enum ib_uverbs_write_cmds' IB_USER_VERBS_EX_CMD_*. The
// first four are numbered as their legacy forms.
const (
	ExCmdQueryDevice = CmdQueryDevice
	ExCmdCreateCQ    = CmdCreateCQ
	ExCmdCreateQP    = CmdCreateQP
	ExCmdModifyQP    = CmdModifyQP
)

// Extended commands without a legacy form.
const (
	ExCmdCreateFlow = CmdThreshold + iota
	ExCmdDestroyFlow
	ExCmdCreateWQ
	ExCmdModifyWQ
	ExCmdDestroyWQ
	ExCmdCreateRWQIndTbl
	ExCmdDestroyRWQIndTbl
	ExCmdModifyCQ
)

// ExQueryDevice is struct ib_uverbs_ex_query_device.
type ExQueryDevice struct {
	CompMask uint32
	Reserved uint32
}

// ODPCaps is struct ib_uverbs_odp_caps.
type ODPCaps struct {
	GeneralCaps uint64
	RC, UC, UD  uint32
	Reserved    uint32
}

// RSSCaps is struct ib_uverbs_rss_caps.
type RSSCaps struct {
	SupportedQPTs     uint32
	MaxRWQIndTables   uint32
	MaxRWQIndTblSize  uint32
	ReservedAlignment uint32
}

// TMCaps is struct ib_uverbs_tm_caps.
type TMCaps struct {
	MaxRndvHdrSize uint32
	MaxNumTags     uint32
	Flags          uint32
	MaxOps         uint32
	MaxSGE         uint32
	Reserved       uint32
}

// CQModerationCaps is struct ib_uverbs_cq_moderation_caps.
type CQModerationCaps struct {
	MaxCount  uint16 // completions
	MaxPeriod uint16 // microseconds
	Reserved  uint32
}

// ExQueryDeviceResp is struct ib_uverbs_ex_query_device_resp.
type ExQueryDeviceResp struct {
	Base             QueryDeviceResp
	CompMask         uint32
	ResponseLength   uint32
	ODP              ODPCaps
	TimestampMask    uint64
	HCACoreClock     uint64 // kHz
	DeviceCapFlagsEx uint64
	RSS              RSSCaps
	MaxWQTypeRQ      uint32
	RawPacketCaps    uint32
	TM               TMCaps
	CQModeration     CQModerationCaps
	MaxDMSize        uint64
	XRCODPCaps       uint32
	Reserved         uint32
}

// ExCreateCQ is struct ib_uverbs_ex_create_cq.
type ExCreateCQ struct {
	UserHandle  uint64
	CQE         uint32
	CompVector  uint32
	CompChannel int32
	CompMask    uint32
	Flags       uint32 // enum ib_uverbs_ex_create_cq_flags
	Reserved    uint32
}

// Bits of ExCreateCQ.Flags.
const (
	CQFlagTimestampCompletion = 1 << 0
	CQFlagIgnoreOverrun       = 1 << 1
)

// ExCreateCQResp is struct ib_uverbs_ex_create_cq_resp.
type ExCreateCQResp struct {
	Base           CreateCQResp
	CompMask       uint32
	ResponseLength uint32
}

// ExCreateQP is struct ib_uverbs_ex_create_qp.
type ExCreateQP struct {
	UserHandle      uint64
	PDHandle        uint32 // the XRCD's handle if QPType is XRC_TGT
	SendCQHandle    uint32
	RecvCQHandle    uint32
	SRQHandle       uint32
	MaxSendWR       uint32
	MaxRecvWR       uint32
	MaxSendSGE      uint32
	MaxRecvSGE      uint32
	MaxInlineData   uint32
	SQSigAll        uint8
	QPType          uint8
	IsSRQ           uint8
	Reserved        uint8
	CompMask        uint32
	CreateFlags     uint32
	RWQIndTblHandle uint32
	SourceQPN       uint32
}

// CreateQPMaskIndTable is IB_UVERBS_CREATE_QP_MASK_IND_TABLE, the one bit of
// ExCreateQP.CompMask.
const CreateQPMaskIndTable = 1 << 0

// Bits of ExCreateQP.CreateFlags that a client may set (create_qp in
// uverbs_cmd.c; enum ib_qp_create_flags).
const (
	QPCreateBlockMcastLoopback = 1 << 1
	QPCreateCrossChannel       = 1 << 2
	QPCreateManagedSend        = 1 << 3
	QPCreateManagedRecv        = 1 << 4
	QPCreateScatterFCS         = 1 << 8
	QPCreateCVLANStripping     = 1 << 9
	QPCreateSourceQPN          = 1 << 10
	QPCreatePCIWriteEndPadding = 1 << 11
	QPCreateUserFlags          = QPCreateBlockMcastLoopback | QPCreateCrossChannel | QPCreateManagedSend |
		QPCreateManagedRecv | QPCreateScatterFCS | QPCreateCVLANStripping | QPCreateSourceQPN | QPCreatePCIWriteEndPadding
)

// ExCreateQPResp is struct ib_uverbs_ex_create_qp_resp.
type ExCreateQPResp struct {
	Base           CreateQPResp
	CompMask       uint32
	ResponseLength uint32
}

// ExModifyQP is struct ib_uverbs_ex_modify_qp.
type ExModifyQP struct {
	Base      ModifyQP
	RateLimit uint32 // kbit/s
	Reserved  uint32
}

// LengthResp is struct ib_uverbs_ex_modify_qp_resp.
type LengthResp struct {
	CompMask       uint32
	ResponseLength uint32
}

// ExModifyCQ is struct ib_uverbs_ex_modify_cq with its ib_uverbs_cq_moderation.
type ExModifyCQ struct {
	CQHandle uint32
	AttrMask uint32
	CQCount  uint16 // completions
	CQPeriod uint16 // microseconds
	Reserved uint32
}

// CQModerate is IB_CQ_MODERATE, the one bit of ExModifyCQ.AttrMask.
const CQModerate = 1 << 0

// FlowAttr is struct ib_uverbs_flow_attr without its specs.
type FlowAttr struct {
	Type       uint32
	Size       uint16
	Priority   uint16
	NumOfSpecs uint8
	Reserved   [2]uint8
	Port       uint8
	Flags      uint32
}

// CreateFlow is struct ib_uverbs_create_flow.
type CreateFlow struct {
	CompMask uint32
	QPHandle uint32
	Attr     FlowAttr
}

// CreateFlowResp is struct ib_uverbs_create_flow_resp.
type CreateFlowResp struct {
	CompMask   uint32
	FlowHandle uint32
}

// MaskedHandle is struct ib_uverbs_destroy_flow, ib_uverbs_ex_destroy_wq and
// ib_uverbs_ex_destroy_rwq_ind_table.
type MaskedHandle struct {
	CompMask uint32
	Handle   uint32
}

// ExCreateWQ is struct ib_uverbs_ex_create_wq.
type ExCreateWQ struct {
	CompMask    uint32
	WQType      uint32
	UserHandle  uint64
	PDHandle    uint32
	CQHandle    uint32
	MaxWR       uint32
	MaxSGE      uint32
	CreateFlags uint32
	Reserved    uint32
}

// ExCreateWQResp is struct ib_uverbs_ex_create_wq_resp.
type ExCreateWQResp struct {
	CompMask       uint32
	ResponseLength uint32
	WQHandle       uint32
	MaxWR          uint32
	MaxSGE         uint32
	WQN            uint32
}

// ExDestroyWQResp is struct ib_uverbs_ex_destroy_wq_resp.
type ExDestroyWQResp struct {
	CompMask       uint32
	ResponseLength uint32
	EventsReported uint32
	Reserved       uint32
}

// ExModifyWQ is struct ib_uverbs_ex_modify_wq.
type ExModifyWQ struct {
	AttrMask    uint32
	WQHandle    uint32
	WQState     uint32
	CurrWQState uint32
	Flags       uint32
	FlagsMask   uint32
}

// ExCreateRWQIndTbl is struct ib_uverbs_ex_create_rwq_ind_table without its
// handles.
type ExCreateRWQIndTbl struct {
	CompMask      uint32
	LogIndTblSize uint32
}

// ExCreateRWQIndTblResp is struct ib_uverbs_ex_create_rwq_ind_table_resp.
type ExCreateRWQIndTblResp struct {
	CompMask       uint32
	ResponseLength uint32
	IndTblHandle   uint32
	IndTblNum      uint32
}

var (
	_ [304]byte = [unsafe.Sizeof(ExQueryDeviceResp{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(ExCreateCQ{})]byte{}
	_ [64]byte  = [unsafe.Sizeof(ExCreateQP{})]byte{}
	_ [40]byte  = [unsafe.Sizeof(ExCreateQPResp{})]byte{}
	_ [120]byte = [unsafe.Sizeof(ExModifyQP{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(ExModifyCQ{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(CreateFlow{})]byte{}
)
