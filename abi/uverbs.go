package abi

import "unsafe"

// UverbsABIVersion is IB_USER_VERBS_ABI_VERSION.
const UverbsABIVersion = 6

// The header's command word (ib_user_verbs.h).
const (
	CmdMask         = 0xff       // IB_USER_VERBS_CMD_COMMAND_MASK
	CmdFlagExtended = 0x80000000 // IB_USER_VERBS_CMD_FLAG_EXTENDED
	CmdThreshold    = 50         // IB_USER_VERBS_CMD_THRESHOLD: first extended-only number
)

// Legacy commands, enum ib_uverbs_write_cmds.
const (
	CmdGetContext = iota
	CmdQueryDevice
	CmdQueryPort
	CmdAllocPD
	CmdDeallocPD
	CmdCreateAH
	CmdModifyAH
	CmdQueryAH
	CmdDestroyAH
	CmdRegMR
	CmdRegSMR
	CmdReregMR
	CmdQueryMR
	CmdDeregMR
	CmdAllocMW
	CmdBindMW
	CmdDeallocMW
	CmdCreateCompChannel
	CmdCreateCQ
	CmdResizeCQ
	CmdDestroyCQ
	CmdPollCQ
	CmdPeekCQ
	CmdReqNotifyCQ
	CmdCreateQP
	CmdQueryQP
	CmdModifyQP
	CmdDestroyQP
	CmdPostSend
	CmdPostRecv
	CmdAttachMcast
	CmdDetachMcast
	CmdCreateSRQ
	CmdModifySRQ
	CmdQuerySRQ
	CmdDestroySRQ
	CmdPostSRQRecv
	CmdOpenXRCD
	CmdCloseXRCD
	CmdCreateXSRQ
	CmdOpenQP
)

// CmdHdr is struct ib_uverbs_cmd_hdr. in_words and out_words count 4-byte words
// in a legacy command (header included in in_words), 8-byte words in an
// extended one (headers excluded).
type CmdHdr struct {
	Command  uint32
	InWords  uint16
	OutWords uint16
}

// ExCmdHdr is struct ib_uverbs_ex_cmd_hdr, after a CmdHdr.
type ExCmdHdr struct {
	Response         uint64
	ProviderInWords  uint16
	ProviderOutWords uint16
	Reserved         uint32
}

// Sizes of the headers in bytes.
const (
	CmdHdrSize   = 8
	ExCmdHdrSize = 16
)

// AsyncEvent is struct ib_uverbs_async_event_desc.
type AsyncEvent struct {
	Element   uint64
	EventType uint32
	Reserved  uint32
}

// CompEvent is struct ib_uverbs_comp_event_desc.
type CompEvent struct{ CQHandle uint64 }

// GetContext is struct ib_uverbs_get_context.
type GetContext struct{ Response uint64 }

// GetContextResp is struct ib_uverbs_get_context_resp.
type GetContextResp struct {
	AsyncFD        uint32
	NumCompVectors uint32
}

// QueryDevice is struct ib_uverbs_query_device.
type QueryDevice struct{ Response uint64 }

// QueryDeviceResp is struct ib_uverbs_query_device_resp.
type QueryDeviceResp struct {
	FWVer                 uint64
	NodeGUID              [8]byte // __be64
	SysImageGUID          [8]byte // __be64
	MaxMRSize             uint64
	PageSizeCap           uint64
	VendorID              uint32
	VendorPartID          uint32
	HWVer                 uint32
	MaxQP                 uint32
	MaxQPWR               uint32
	DeviceCapFlags        uint32
	MaxSGE                uint32
	MaxSGERD              uint32
	MaxCQ                 uint32
	MaxCQE                uint32
	MaxMR                 uint32
	MaxPD                 uint32
	MaxQPRdAtom           uint32
	MaxEERdAtom           uint32
	MaxResRdAtom          uint32
	MaxQPInitRdAtom       uint32
	MaxEEInitRdAtom       uint32
	AtomicCap             uint32
	MaxEE                 uint32
	MaxRDD                uint32
	MaxMW                 uint32
	MaxRawIPv6QP          uint32
	MaxRawEthyQP          uint32
	MaxMcastGrp           uint32
	MaxMcastQPAttach      uint32
	MaxTotalMcastQPAttach uint32
	MaxAH                 uint32
	MaxFMR                uint32
	MaxMapPerFMR          uint32
	MaxSRQ                uint32
	MaxSRQWR              uint32
	MaxSRQSGE             uint32
	MaxPKeys              uint16
	LocalCAAckDelay       uint8
	PhysPortCnt           uint8
	Reserved              [4]uint8
}

// QueryPort is struct ib_uverbs_query_port.
type QueryPort struct {
	Response uint64
	PortNum  uint8
	Reserved [7]uint8
}

// QueryPortResp is struct ib_uverbs_query_port_resp.
type QueryPortResp struct {
	PortCapFlags  uint32
	MaxMsgSz      uint32
	BadPKeyCntr   uint32
	QKeyViolCntr  uint32
	GIDTblLen     uint32
	PKeyTblLen    uint16
	LID           uint16
	SMLID         uint16
	State         uint8
	MaxMTU        uint8
	ActiveMTU     uint8
	LMC           uint8
	MaxVLNum      uint8
	SMSL          uint8
	SubnetTimeout uint8
	InitTypeReply uint8
	ActiveWidth   uint8
	ActiveSpeed   uint8
	PhysState     uint8
	LinkLayer     uint8
	Flags         uint8
	Reserved      uint8
}

// AllocPD is struct ib_uverbs_alloc_pd.
type AllocPD struct{ Response uint64 }

// AllocPDResp is struct ib_uverbs_alloc_pd_resp.
type AllocPDResp struct{ PDHandle uint32 }

// Handle is every request that is one handle: dealloc_pd, dereg_mr,
// destroy_ah, close_xrcd, dealloc_mw.
type Handle struct{ Handle uint32 }

// RegMR is struct ib_uverbs_reg_mr.
type RegMR struct {
	Response    uint64
	Start       uint64
	Length      uint64
	HCAVA       uint64
	PDHandle    uint32
	AccessFlags uint32
}

// RegMRResp is struct ib_uverbs_reg_mr_resp.
type RegMRResp struct {
	MRHandle uint32
	LKey     uint32
	RKey     uint32
}

// CreateCompChannel is struct ib_uverbs_create_comp_channel.
type CreateCompChannel struct{ Response uint64 }

// CreateCompChannelResp is struct ib_uverbs_create_comp_channel_resp.
type CreateCompChannelResp struct{ FD uint32 }

// CreateCQ is struct ib_uverbs_create_cq.
type CreateCQ struct {
	Response    uint64
	UserHandle  uint64
	CQE         uint32
	CompVector  uint32
	CompChannel int32
	Reserved    uint32
}

// CreateCQResp is struct ib_uverbs_create_cq_resp.
type CreateCQResp struct {
	CQHandle uint32
	CQE      uint32
}

// ResizeCQ is struct ib_uverbs_resize_cq.
type ResizeCQ struct {
	Response uint64
	CQHandle uint32
	CQE      uint32
}

// ResizeCQResp is struct ib_uverbs_resize_cq_resp.
type ResizeCQResp struct {
	CQE      uint32
	Reserved uint32
}

// PollCQ is struct ib_uverbs_poll_cq.
type PollCQ struct {
	Response uint64
	CQHandle uint32
	NE       uint32
}

// PollCQResp is struct ib_uverbs_poll_cq_resp without its array of WC.
type PollCQResp struct {
	Count    uint32
	Reserved uint32
}

// WC is struct ib_uverbs_wc.
type WC struct {
	WRID         uint64
	Status       uint32
	Opcode       uint32
	VendorErr    uint32
	ByteLen      uint32
	Imm          uint32 // __be32 imm_data, or invalidate_rkey
	QPNum        uint32
	SrcQP        uint32
	WCFlags      uint32
	PKeyIndex    uint16
	SLID         uint16
	SL           uint8
	DLIDPathBits uint8
	PortNum      uint8
	Reserved     uint8
}

// ReqNotifyCQ is struct ib_uverbs_req_notify_cq.
type ReqNotifyCQ struct {
	CQHandle      uint32
	SolicitedOnly uint32
}

// DestroyCQ is struct ib_uverbs_destroy_cq.
type DestroyCQ struct {
	Response uint64
	CQHandle uint32
	Reserved uint32
}

// DestroyCQResp is struct ib_uverbs_destroy_cq_resp.
type DestroyCQResp struct {
	CompEventsReported  uint32
	AsyncEventsReported uint32
}

var (
	_ [8]byte   = [unsafe.Sizeof(CmdHdr{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(ExCmdHdr{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(AsyncEvent{})]byte{}
	_ [176]byte = [unsafe.Sizeof(QueryDeviceResp{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(QueryPort{})]byte{}
	_ [40]byte  = [unsafe.Sizeof(QueryPortResp{})]byte{}
	_ [40]byte  = [unsafe.Sizeof(RegMR{})]byte{}
	_ [12]byte  = [unsafe.Sizeof(RegMRResp{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(CreateCQ{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(PollCQ{})]byte{}
	_ [48]byte  = [unsafe.Sizeof(WC{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(DestroyCQ{})]byte{}
)
