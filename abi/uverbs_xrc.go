package abi

import "unsafe"

// ReregMR is struct ib_uverbs_rereg_mr.
type ReregMR struct {
	Response    uint64
	MRHandle    uint32
	Flags       uint32 // enum ib_mr_rereg_flags
	Start       uint64
	Length      uint64
	HCAVA       uint64
	PDHandle    uint32
	AccessFlags uint32
}

// ReregMRResp is struct ib_uverbs_rereg_mr_resp.
type ReregMRResp struct {
	LKey uint32
	RKey uint32
}

// AllocMW is struct ib_uverbs_alloc_mw.
type AllocMW struct {
	Response uint64
	PDHandle uint32
	MWType   uint8 // enum ib_mw_type
	Reserved [3]uint8
}

// AllocMWResp is struct ib_uverbs_alloc_mw_resp.
type AllocMWResp struct {
	MWHandle uint32
	RKey     uint32
}

// OpenXRCD is struct ib_uverbs_open_xrcd.
type OpenXRCD struct {
	Response uint64
	FD       uint32 // 0xffffffff: a domain of the file's own
	OFlags   uint32 // O_CREAT and O_EXCL count
}

// OpenXRCDResp is struct ib_uverbs_open_xrcd_resp.
type OpenXRCDResp struct{ XRCDHandle uint32 }

// CreateXSRQ is struct ib_uverbs_create_xsrq.
type CreateXSRQ struct {
	Response   uint64
	UserHandle uint64
	SRQType    uint32 // enum ib_srq_type: 0 basic, 1 XRC, 2 TM
	PDHandle   uint32
	MaxWR      uint32
	MaxSGE     uint32
	SRQLimit   uint32
	MaxNumTags uint32
	XRCDHandle uint32
	CQHandle   uint32
}

// OpenQP is struct ib_uverbs_open_qp.
type OpenQP struct {
	Response   uint64
	UserHandle uint64
	PDHandle   uint32 // the XRCD's handle
	QPN        uint32
	QPType     uint8
	Reserved   [7]uint8
}

var (
	_ [48]byte = [unsafe.Sizeof(ReregMR{})]byte{}
	_ [16]byte = [unsafe.Sizeof(AllocMW{})]byte{}
	_ [16]byte = [unsafe.Sizeof(OpenXRCD{})]byte{}
	_ [48]byte = [unsafe.Sizeof(CreateXSRQ{})]byte{}
	_ [32]byte = [unsafe.Sizeof(OpenQP{})]byte{}
)
