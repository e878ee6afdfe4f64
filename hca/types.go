package hca

import "fmt"

// GID is a 128-bit global identifier, in wire order.
type GID [16]byte

// String is the sysfs form: eight groups of four hex digits.
func (g GID) String() string {
	return fmt.Sprintf("%x:%x:%x:%x:%x:%x:%x:%x", g[0:2], g[2:4], g[4:6], g[6:8], g[8:10], g[10:12], g[12:14], g[14:16])
}

// IPv4GID is the GID of a RoCE port with that IPv4 address: mapped into IPv6,
// ::ffff:a.b.c.d (rdma_ip2gid, include/rdma/ib_addr.h).
func IPv4GID(a [4]byte) GID { return GID{10: 0xff, 11: 0xff, 12: a[0], 13: a[1], 14: a[2], 15: a[3]} }

// IPv4 is the address that a GID was made of by IPv4GID; false of any other GID.
func (g GID) IPv4() ([4]byte, bool) {
	a := [4]byte(g[12:])
	return a, g == IPv4GID(a)
}

// IsMulticast reports whether the GID names a group: an IPv6 multicast address, or
// a mapped IPv4 one (rdma_is_multicast_addr, include/rdma/ib_addr.h).
func (g GID) IsMulticast() bool {
	a, v4 := g.IPv4()
	return g[0] == 0xff || v4 && a[0]>>4 == 0xe
}

// GUID is an EUI-64, in wire order.
type GUID [8]byte

// String is the sysfs form: four groups of four hex digits.
func (g GUID) String() string { return fmt.Sprintf("%x:%x:%x:%x", g[0:2], g[2:4], g[4:6], g[6:8]) }

// OpSet is a set of optional driver methods.
type OpSet uint64

// Optional driver methods, after the members of struct ib_device_ops.
const (
	OpReqNotify OpSet = 1 << iota
	OpResizeCQ
	OpSRQ
	OpModifySRQ
	OpMcast
	OpAH
	OpMW
	OpXRC
	OpReregMR
	OpModifyCQ
	OpFlow
	OpWQ
)

var opNames = []string{
	"req_notify_cq", "resize_cq", "create_srq", "modify_srq", "attach_mcast", "create_ah",
	"alloc_mw", "alloc_xrcd", "rereg_user_mr", "modify_cq", "create_flow", "create_wq",
}

// Names are the methods of s as struct ib_device_ops calls them, one for each
// that brings its kin along.
func (s OpSet) Names() []string {
	var names []string
	for i, n := range opNames {
		if s.Has(1 << i) {
			names = append(names, n)
		}
	}
	return names
}

// Has reports whether all of want is there.
func (s OpSet) Has(want OpSet) bool { return s&want == want }

// DeviceAttr is struct ib_device_attr (ib_verbs.h) with what sysfs shows.
type DeviceAttr struct {
	FWVer         uint64 // as query_device: major<<32 | minor<<16 | sub
	NodeGUID      GUID
	SysImageGUID  GUID
	NodeDesc      string // at most 63 bytes
	BoardID       string
	MaxMRSize     uint64 // bytes
	PageSizeCap   uint64
	VendorID      uint32
	VendorPartID  uint32
	HWVer         uint32
	MaxQP         uint32
	MaxQPWR       uint32
	CapFlags      uint64 // IB_DEVICE_*; the first QUERY_DEVICE gives the lower half
	MaxSGE        uint32
	MaxSGERD      uint32
	MaxCQ         uint32
	MaxCQE        uint32
	MaxMR         uint32
	MaxPD         uint32
	MaxQPRdAtom   uint32
	MaxEERdAtom   uint32
	MaxResRdAtom  uint32
	MaxQPInitRd   uint32
	MaxEEInitRd   uint32
	AtomicCap     uint32 // enum ib_atomic_cap: 0 none, 1 HCA, 2 global
	MaskedAtomCap uint32 // the same of the masked atomics; no command reports it
	MaxEE, MaxRDD uint32
	MaxMW         uint32
	MaxRawIPv6QP  uint32
	MaxRawEthyQP  uint32
	MaxMcastGrp   uint32
	MaxMcastQP    uint32 // attach
	MaxTotMcastQP uint32 // attach
	MaxAH         uint32
	MaxFMR        uint32
	MaxMapPerFMR  uint32
	MaxSRQ        uint32
	MaxSRQWR      uint32
	MaxSRQSGE     uint32
	MaxPKeys      uint16
	LocalCAAckDel uint8
	PhysPortCnt   uint8
	CompVectors   int // num_comp_vectors, at least 1
	MaxInline     uint32
	// Bounds of CQ.Modify; 0 where OpModifyCQ is not there.
	MaxCQCount, MaxCQPeriod uint16
	ODP                     ODPCaps
	GIDTableLen             int
	PKeyTableLen            int
}

// Bits of DeviceAttr.CapFlags (enum ib_device_cap_flags in ib_user_verbs.h) that a
// caller looks at.
const (
	CapFlushGlobal uint64 = 1 << 38
	CapAtomicWrite uint64 = 1 << 40
)

// ODPCaps is struct ib_odp_caps: what works in a region that was registered with
// AccessOnDemand, whose pages need not be there before they are touched. All 0:
// there are no such regions.
type ODPCaps struct {
	General         ODPGeneral
	RC, UC, UD, XRC ODPTransport
}

// ODPGeneral is enum ib_odp_general_cap_bits.
type ODPGeneral uint64

// Bits of ODPGeneral.
const (
	ODPSupport ODPGeneral = 1 << iota
	// ODPImplicit: a region may be the whole address space, start 0 and length
	// ImplicitLength.
	ODPImplicit
)

// ImplicitLength is the length, in bytes, that stands for the whole address
// space (ib_umem_odp_alloc_implicit's callers: U64_MAX).
const ImplicitLength = 1<<64 - 1

// ODPTransport is enum ib_odp_transport_cap_bits.
type ODPTransport uint32

// Bits of ODPTransport.
const (
	ODPSend ODPTransport = 1 << iota
	ODPRecv
	ODPWrite
	ODPRead
	ODPAtomic
	ODPSRQRecv
)

// LinkLayer is IB_LINK_LAYER_*.
type LinkLayer uint8

// Link layers (enum rdma_link_layer as the ABI carries it).
const (
	LinkUnspecified LinkLayer = iota
	LinkInfiniBand
	LinkEthernet
)

// String is the name in a configuration: "infiniband", "ethernet".
func (l LinkLayer) String() string {
	switch l {
	case LinkInfiniBand:
		return "infiniband"
	case LinkEthernet:
		return "ethernet"
	}
	return fmt.Sprintf("link layer %d", uint8(l))
}

// PortAttr is struct ib_port_attr.
type PortAttr struct {
	PortCapFlags  uint32
	MaxMsgSize    uint32
	BadPKeyCntr   uint32
	QKeyViolCntr  uint32
	GIDTableLen   uint32
	PKeyTableLen  uint16
	LID           uint16
	SMLID         uint16
	State         uint8 // enum ib_port_state; 4 ACTIVE
	MaxMTU        uint8 // enum ib_mtu; 5 = 4096
	ActiveMTU     uint8
	LMC           uint8
	MaxVLNum      uint8
	SMSL          uint8
	SubnetTimeout uint8
	InitTypeReply uint8
	ActiveWidth   uint8 // enum ib_port_width; 2 = 4x
	ActiveSpeed   uint8 // enum ib_port_speed; 32 = EDR
	PhysState     uint8 // 5 LinkUp
	LinkLayer     LinkLayer
	NetDev        string // RoCE: interface name behind GID 0, else ""
}

// Access is IB_ACCESS_*.
type Access uint32

// Access bits (enum ib_access_flags, ib_user_ioctl_verbs.h).
const (
	AccessLocalWrite    Access = 1 << 0
	AccessRemoteWrite   Access = 1 << 1
	AccessRemoteRead    Access = 1 << 2
	AccessRemoteAtomic  Access = 1 << 3
	AccessMWBind        Access = 1 << 4
	AccessZeroBased     Access = 1 << 5
	AccessOnDemand      Access = 1 << 6
	AccessHugetlb       Access = 1 << 7
	AccessFlushGlobal   Access = 1 << 8     // may be flushed to where all see it (CapFlushGlobal)
	AccessFlushPersist  Access = 1 << 9     // may be flushed to persistent memory; no device here has any
	AccessKnown         Access = 1<<10 - 1  // IB_ACCESS_SUPPORTED: and the two flush bits
	AccessOptionalRange Access = 0x3ff00000 // IB_ACCESS_OPTIONAL: may be ignored
	AccessRelaxedOrder  Access = 1 << 20
	AccessSupported            = AccessLocalWrite | AccessRemoteWrite | AccessRemoteRead | AccessRemoteAtomic | AccessMWBind
	AccessNeedsWritable        = AccessLocalWrite | AccessRemoteWrite | AccessRemoteAtomic | AccessMWBind
	AccessNeedsLocal           = AccessRemoteWrite | AccessRemoteAtomic // demand LOCAL_WRITE too (ib_check_mr_access)
	// AccessWindow is what a memory window may be bound with (RXE_ACCESS_SUPPORTED_MW):
	// also what says nothing of a window.
	AccessWindow = AccessSupported | AccessZeroBased | AccessOnDemand | AccessFlushGlobal | AccessFlushPersist | AccessOptionalRange
)

// ReregFlags is enum ib_mr_rereg_flags.
type ReregFlags uint32

// Bits of ReregFlags; ReregSupported is IB_MR_REREG_SUPPORTED.
const (
	ReregTrans ReregFlags = 1 << iota
	ReregPD
	ReregAccess
	ReregSupported = ReregTrans | ReregPD | ReregAccess
)

// MWType is enum ib_mw_type.
type MWType uint8

// Types of memory window.
const (
	MWType1 MWType = 1
	MWType2 MWType = 2
)

// SRQType is enum ib_srq_type.
type SRQType uint32

// Types of SRQ.
const (
	SRQBasic SRQType = iota
	SRQXRC
	SRQTM
)

// NotifyFlags is enum ib_cq_notify_flags.
type NotifyFlags uint32

// Bits of NotifyFlags.
const (
	NotifySolicited NotifyFlags = 1 << 0
	NotifyNextComp  NotifyFlags = 1 << 1
	ReportMissed    NotifyFlags = 1 << 2
)

// EventType is enum ib_event_type.
type EventType uint32

// Events.
const (
	EventCQErr EventType = iota
	EventQPFatal
	EventQPReqErr
	EventQPAccessErr
	EventCommEst
	EventSQDrained
	EventPathMig
	EventPathMigErr
	EventDeviceFatal
	EventPortActive
	EventPortErr
	EventLIDChange
	EventPKeyChange
	EventSMChange
	EventSRQErr
	EventSRQLimitReached
	EventQPLastWQEReached
	EventClientReregister
	EventGIDChange
)

// QPType is enum ib_uverbs_qp_type.
type QPType uint8

// QP types.
const (
	QPTypeRC        QPType = 2
	QPTypeUC        QPType = 3
	QPTypeUD        QPType = 4
	QPTypeRawPacket QPType = 8
	QPTypeXRCIni    QPType = 9
	QPTypeXRCTgt    QPType = 10
	QPTypeDriver    QPType = 0xff
)

// QPState is enum ib_qp_state.
type QPState uint8

// QP states.
const (
	QPReset QPState = iota
	QPInitState
	QPRTR
	QPRTS
	QPSQD
	QPSQE
	QPErr
)

// MTU is enum ib_mtu.
type MTU uint8

// Bytes is the MTU in bytes (256 … 4096), 0 for a value outside the enum.
func (m MTU) Bytes() int {
	if m < 1 || m > 5 {
		return 0
	}
	return 128 << m
}

// QPAttr is struct ib_qp_attr; QPAttrMask says which members count.
type QPAttr struct {
	State            QPState
	CurState         QPState
	PathMTU          MTU
	PathMigState     uint8
	QKey             uint32
	RQPSN            uint32
	SQPSN            uint32
	DestQPN          uint32
	Access           Access
	Cap              QPCap
	AH               AHAttr
	AltAH            AHAttr
	PKeyIndex        uint16
	AltPKeyIndex     uint16
	EnSQDAsyncNotify bool
	SQDraining       bool
	MaxRdAtomic      uint8
	MaxDestRdAtomic  uint8
	MinRNRTimer      uint8
	Port             uint8
	Timeout          uint8
	RetryCnt         uint8
	RNRRetry         uint8
	AltPort          uint8
	AltTimeout       uint8
	RateLimit        uint32
}

// QPAttrMask is enum ib_qp_attr_mask.
type QPAttrMask uint32

// Bits of QPAttrMask.
const (
	QPMaskState QPAttrMask = 1 << iota
	QPMaskCurState
	QPMaskEnSQDAsyncNotify
	QPMaskAccess
	QPMaskPKeyIndex
	QPMaskPort
	QPMaskQKey
	QPMaskAV
	QPMaskPathMTU
	QPMaskTimeout
	QPMaskRetryCnt
	QPMaskRNRRetry
	QPMaskRQPSN
	QPMaskMaxRdAtomic
	QPMaskAltPath
	QPMaskMinRNRTimer
	QPMaskSQPSN
	QPMaskMaxDestRdAtomic
	QPMaskPathMigState
	QPMaskCap
	QPMaskDestQPN
	qpMaskReserved1
	qpMaskReserved2
	qpMaskReserved3
	qpMaskReserved4
	QPMaskRateLimit
	// QPMaskStandard is IB_QP_ATTR_STANDARD_BITS.
	QPMaskStandard = QPMaskDestQPN<<1 - 1
)

// SendOpcode is enum ib_uverbs_wr_opcode.
type SendOpcode uint32

// Send opcodes.
const (
	OpRDMAWrite SendOpcode = iota
	OpRDMAWriteImm
	OpSend
	OpSendImm
	OpRDMARead
	OpAtomicCmpSwap
	OpAtomicFetchAdd
	OpLocalInv
	OpBindMW
	OpSendInv
	OpMaskedAtomicCmpSwap  SendOpcode = 12
	OpMaskedAtomicFetchAdd SendOpcode = 13
	OpFlush                SendOpcode = 14
	OpAtomicWrite          SendOpcode = 15
	// OpInvalid is no opcode: what a mapped send queue makes of what is no request.
	// It fails in its turn.
	OpInvalid SendOpcode = 1<<32 - 1
)

// SendFlags is enum ib_send_flags.
type SendFlags uint32

// Bits of SendFlags.
const (
	SendFence SendFlags = 1 << iota
	SendSignaled
	SendSolicited
	SendInline
	SendIPCsum
)

// SGE is one scatter/gather element.
type SGE struct {
	Addr   uint64
	Length uint32 // bytes; 0 means 0 (as in the kernel's software drivers)
	LKey   uint32
}

// SendWR is struct ib_send_wr and its rdma, atomic and ud forms.
type SendWR struct {
	ID     uint64
	Opcode SendOpcode
	Flags  SendFlags
	Imm    uint32 // imm_data as the client stored it (big endian bytes), or the rkey to invalidate (OpSendInv, OpLocalInv)
	SGE    []SGE
	Inline []byte // with SendInline: the payload, already copied; SGE is then nil

	RemoteAddr  uint64 // RDMA and atomic
	RKey        uint32
	CompareAdd  uint64
	Swap        uint64 // OpAtomicWrite: the value, in the host's order
	AH          AH     // UD
	RemoteQPN   uint32
	RemoteQKey  uint32
	RemotePKIdx uint16
	RemoteSRQN  uint32 // XRC

	// Masks of the masked atomics (struct ib_atomic_wr). Compare and swap: the
	// bits to compare, and those to swap. Fetch and add: CompareAddMask has the
	// highest bit of each field that is added by itself; SwapMask is not used.
	CompareAddMask uint64
	SwapMask       uint64

	Bind  Bind  // OpBindMW
	Flush Flush // OpFlush
}

// Flush is what OpFlush asks of the bytes at RemoteAddr (IBTA 1.5 annex A19). All that
// was written there before it is where Type says by the time it completes.
type Flush struct {
	Length uint32 // bytes; with FlushMR neither it nor the address counts
	Type   uint8  // FlushGlobal and FlushPersistent, whose access rights region and QP must have
	Level  uint8  // FlushRange or FlushMR
}

// Bits of Flush.Type, and Flush.Level (enum ib_flush_type, ib_flush_level).
const (
	FlushGlobal     uint8 = 1 << 0
	FlushPersistent uint8 = 1 << 1

	FlushRange uint8 = 0
	FlushMR    uint8 = 1
)

// Access is the rights that a flush needs.
func (f *Flush) Access() Access {
	var a Access
	if f.Type&FlushGlobal != 0 {
		a |= AccessFlushGlobal
	}
	if f.Type&FlushPersistent != 0 {
		a |= AccessFlushPersist
	}
	return a
}

// Bind is what OpBindMW does to a memory window. Window and region are named by
// key, as in the queues that providers map: which keys are good is seen when the
// request's turn comes, since an earlier one in the queue may change them.
type Bind struct {
	MW     uint32 // the window's rkey
	MR     uint32 // the region's lkey; not looked at with a Length of 0
	RKey   uint32 // the new rkey: only its low 8 bits count, the rest is the window's
	Access Access // AccessWindow
	Addr   uint64 // first byte, by the region's own addresses, also of a zero based window
	Length uint64 // bytes; 0 unbinds a window of type 1
}

// RecvWR is struct ib_recv_wr.
type RecvWR struct {
	ID  uint64
	SGE []SGE
}

// WCStatus is enum ib_wc_status.
type WCStatus uint32

// Completion statuses.
const (
	WCSuccess WCStatus = iota
	WCLocLenErr
	WCLocQPOpErr
	WCLocEECOpErr
	WCLocProtErr
	WCWRFlushErr
	WCMWBindErr
	WCBadRespErr
	WCLocAccessErr
	WCRemInvReqErr
	WCRemAccessErr
	WCRemOpErr
	WCRetryExcErr
	WCRNRRetryExcErr
	WCLocRDDViolErr
	WCRemInvRDReqErr
	WCRemAbortErr
	WCInvEECNErr
	WCInvEECStateErr
	WCFatalErr
	WCRespTimeoutErr
	WCGeneralErr
)

// WCOpcode is enum ib_uverbs_wc_opcode.
type WCOpcode uint32

// Completion opcodes.
const (
	WCSend      WCOpcode = 0
	WCRDMAWrite WCOpcode = 1
	WCRDMARead  WCOpcode = 2
	WCCompSwap  WCOpcode = 3
	WCFetchAdd  WCOpcode = 4
	WCBindMW    WCOpcode = 5
	WCLocalInv  WCOpcode = 6
	WCFlush     WCOpcode = 8
	// WCAtomicWrite is IB_WC_ATOMIC_WRITE.
	WCAtomicWrite WCOpcode = 9
	// The kernel's own numbers (enum ib_wc_opcode since Linux 6.2); the ABI names
	// none for them.
	WCMaskedCompSwap WCOpcode = 11
	WCMaskedFetchAdd WCOpcode = 12

	WCRecv    WCOpcode = 128
	WCRecvImm WCOpcode = 129 // IB_WC_RECV_RDMA_WITH_IMM: an RDMA write with immediate
)

// WCFlags is enum ib_wc_flags.
type WCFlags uint32

// Bits of WCFlags.
const (
	WCGRH     WCFlags = 1 << 0
	WCWithImm WCFlags = 1 << 1
	WCWithInv WCFlags = 1 << 2
)

// WC is a work completion, member for member struct ib_uverbs_wc.
type WC struct {
	ID          uint64
	Status      WCStatus
	Opcode      WCOpcode
	VendorErr   uint32
	ByteLen     uint32
	Imm         uint32 // as stored by the sender; with WCWithInv the rkey that was invalidated
	QPN         uint32
	SrcQP       uint32
	Flags       WCFlags
	PKeyIndex   uint16
	SLID        uint16
	SL          uint8
	DLIDPathBit uint8
	Port        uint8
}
