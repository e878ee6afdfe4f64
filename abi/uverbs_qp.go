package abi

import "unsafe"

// GlobalRoute is struct ib_uverbs_global_route.
type GlobalRoute struct {
	DGID         [16]byte
	FlowLabel    uint32
	SGIDIndex    uint8
	HopLimit     uint8
	TrafficClass uint8
	Reserved     uint8
}

// AHAttr is struct ib_uverbs_ah_attr.
type AHAttr struct {
	GRH         GlobalRoute
	DLID        uint16
	SL          uint8
	SrcPathBits uint8
	StaticRate  uint8
	IsGlobal    uint8
	PortNum     uint8
	Reserved    uint8
}

// CreateAH is struct ib_uverbs_create_ah.
type CreateAH struct {
	Response   uint64
	UserHandle uint64
	PDHandle   uint32
	Reserved   uint32
	Attr       AHAttr
}

// CreateAHResp is struct ib_uverbs_create_ah_resp.
type CreateAHResp struct{ AHHandle uint32 }

// CreateQP is struct ib_uverbs_create_qp.
type CreateQP struct {
	Response      uint64
	UserHandle    uint64
	PDHandle      uint32
	SendCQHandle  uint32
	RecvCQHandle  uint32
	SRQHandle     uint32
	MaxSendWR     uint32
	MaxRecvWR     uint32
	MaxSendSGE    uint32
	MaxRecvSGE    uint32
	MaxInlineData uint32
	SQSigAll      uint8
	QPType        uint8
	IsSRQ         uint8
	Reserved      uint8
}

// CreateQPResp is struct ib_uverbs_create_qp_resp.
type CreateQPResp struct {
	QPHandle      uint32
	QPN           uint32
	MaxSendWR     uint32
	MaxRecvWR     uint32
	MaxSendSGE    uint32
	MaxRecvSGE    uint32
	MaxInlineData uint32
	Reserved      uint32
}

// QPDest is struct ib_uverbs_qp_dest.
type QPDest struct {
	DGID         [16]byte
	FlowLabel    uint32
	DLID         uint16
	Reserved     uint16
	SGIDIndex    uint8
	HopLimit     uint8
	TrafficClass uint8
	SL           uint8
	SrcPathBits  uint8
	StaticRate   uint8
	IsGlobal     uint8
	PortNum      uint8
}

// QueryQP is struct ib_uverbs_query_qp.
type QueryQP struct {
	Response uint64
	QPHandle uint32
	AttrMask uint32
}

// QueryQPResp is struct ib_uverbs_query_qp_resp.
type QueryQPResp struct {
	Dest            QPDest
	AltDest         QPDest
	MaxSendWR       uint32
	MaxRecvWR       uint32
	MaxSendSGE      uint32
	MaxRecvSGE      uint32
	MaxInlineData   uint32
	QKey            uint32
	RQPSN           uint32
	SQPSN           uint32
	DestQPNum       uint32
	QPAccessFlags   uint32
	PKeyIndex       uint16
	AltPKeyIndex    uint16
	QPState         uint8
	CurQPState      uint8
	PathMTU         uint8
	PathMigState    uint8
	SQDraining      uint8
	MaxRdAtomic     uint8
	MaxDestRdAtomic uint8
	MinRNRTimer     uint8
	PortNum         uint8
	Timeout         uint8
	RetryCnt        uint8
	RNRRetry        uint8
	AltPortNum      uint8
	AltTimeout      uint8
	SQSigAll        uint8
	Reserved        [5]uint8
}

// ModifyQP is struct ib_uverbs_modify_qp.
type ModifyQP struct {
	Dest             QPDest
	AltDest          QPDest
	QPHandle         uint32
	AttrMask         uint32
	QKey             uint32
	RQPSN            uint32
	SQPSN            uint32
	DestQPNum        uint32
	QPAccessFlags    uint32
	PKeyIndex        uint16
	AltPKeyIndex     uint16
	QPState          uint8
	CurQPState       uint8
	PathMTU          uint8
	PathMigState     uint8
	EnSQDAsyncNotify uint8
	MaxRdAtomic      uint8
	MaxDestRdAtomic  uint8
	MinRNRTimer      uint8
	PortNum          uint8
	Timeout          uint8
	RetryCnt         uint8
	RNRRetry         uint8
	AltPortNum       uint8
	AltTimeout       uint8
	Reserved         [2]uint8
}

// DestroyQP is struct ib_uverbs_destroy_qp; destroy_srq has the same layout.
type DestroyQP struct {
	Response uint64
	QPHandle uint32
	Reserved uint32
}

// EventsResp is struct ib_uverbs_destroy_qp_resp and ib_uverbs_destroy_srq_resp.
type EventsResp struct{ EventsReported uint32 }

// SGE is struct ib_uverbs_sge.
type SGE struct {
	Addr   uint64
	Length uint32
	LKey   uint32
}

// SendWR is struct ib_uverbs_send_wr. The union at byte 24 is given as its
// longest member, atomic; rdma keeps its rkey at byte 32 (CompareAdd's low
// half), ud its three words at bytes 24, 28 and 32.
type SendWR struct {
	WRID       uint64
	NumSGE     uint32
	Opcode     uint32
	SendFlags  uint32
	Imm        uint32
	RemoteAddr uint64
	CompareAdd uint64
	Swap       uint64
	RKey       uint32
	Reserved   uint32
}

// PostSend is struct ib_uverbs_post_send without its array; post_recv and
// post_srq_recv have the same layout.
type PostSend struct {
	Response uint64
	QPHandle uint32
	WRCount  uint32
	SGECount uint32
	WQESize  uint32
}

// PostResp is struct ib_uverbs_post_{send,recv,srq_recv}_resp.
type PostResp struct{ BadWR uint32 }

// RecvWR is struct ib_uverbs_recv_wr.
type RecvWR struct {
	WRID     uint64
	NumSGE   uint32
	Reserved uint32
}

// Mcast is struct ib_uverbs_attach_mcast and ib_uverbs_detach_mcast.
type Mcast struct {
	GID      [16]byte
	QPHandle uint32
	MLID     uint16
	Reserved uint16
}

// CreateSRQ is struct ib_uverbs_create_srq.
type CreateSRQ struct {
	Response   uint64
	UserHandle uint64
	PDHandle   uint32
	MaxWR      uint32
	MaxSGE     uint32
	SRQLimit   uint32
}

// CreateSRQResp is struct ib_uverbs_create_srq_resp.
type CreateSRQResp struct {
	SRQHandle uint32
	MaxWR     uint32
	MaxSGE    uint32
	SRQN      uint32
}

// ModifySRQ is struct ib_uverbs_modify_srq.
type ModifySRQ struct {
	SRQHandle uint32
	AttrMask  uint32
	MaxWR     uint32
	SRQLimit  uint32
}

// QuerySRQ is struct ib_uverbs_query_srq.
type QuerySRQ struct {
	Response  uint64
	SRQHandle uint32
	Reserved  uint32
}

// QuerySRQResp is struct ib_uverbs_query_srq_resp.
type QuerySRQResp struct {
	MaxWR    uint32
	MaxSGE   uint32
	SRQLimit uint32
	Reserved uint32
}

var (
	_ [32]byte  = [unsafe.Sizeof(AHAttr{})]byte{}
	_ [56]byte  = [unsafe.Sizeof(CreateAH{})]byte{}
	_ [56]byte  = [unsafe.Sizeof(CreateQP{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(CreateQPResp{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(QPDest{})]byte{}
	_ [128]byte = [unsafe.Sizeof(QueryQPResp{})]byte{}
	_ [112]byte = [unsafe.Sizeof(ModifyQP{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(DestroyQP{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(SGE{})]byte{}
	_ [56]byte  = [unsafe.Sizeof(SendWR{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(PostSend{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(RecvWR{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(Mcast{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(CreateSRQ{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(CreateSRQResp{})]byte{}
)
