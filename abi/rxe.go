package abi

import "unsafe"

// What librxe shares with its kernel driver (rdma/rdma_user_rxe.h): rings of
// entries in mapped memory, in the host's byte order.

// RXEQueueBuf is struct rxe_queue_buf, in front of the entries. Who writes entries
// owns the producer's index, who takes them the consumer's; both are between 0 and
// the mask, and a queue where they are equal is empty.
type RXEQueueBuf struct {
	Log2ElemSize  uint32 // of an entry, in bytes
	IndexMask     uint32 // places less one; a power of two of them
	Pad1          [30]uint32
	ProducerIndex uint32
	Pad2          [31]uint32
	ConsumerIndex uint32
	Pad3          [31]uint32
}

// RXEMMInfo is struct mminfo: what to pass to mmap().
type RXEMMInfo struct {
	Offset uint64
	Size   uint32
	Pad    uint32
}

// RXECreateQPResp is struct rxe_create_qp_resp.
type RXECreateQPResp struct {
	RQ RXEMMInfo
	SQ RXEMMInfo
}

// RXECreateSRQResp is struct rxe_create_srq_resp.
type RXECreateSRQResp struct {
	MI       RXEMMInfo
	SRQNum   uint32
	Reserved uint32
}

// RXECreateAHResp is struct rxe_create_ah_resp.
type RXECreateAHResp struct {
	AHNum    uint32
	Reserved uint32
}

// RXEModifySRQ is struct rxe_modify_srq_cmd: where modify_srq writes an RXEMMInfo.
type RXEModifySRQ struct {
	MMInfoAddr uint64
}

// RXESGE is struct rxe_sge.
type RXESGE struct {
	Addr   uint64
	Length uint32
	LKey   uint32
}

// RXEDMAInfo is struct rxe_dma_info: a payload, whose pieces or inline bytes
// follow.
type RXEDMAInfo struct {
	Length    uint32
	Resid     uint32 // this one and the next, SGEOffset and Reserved: the driver's
	CurSGE    uint32
	NumSGE    uint32
	SGEOffset uint32
	Reserved  uint32
}

// RXESendWR is struct rxe_send_wr. WR is a union of the four structs below.
type RXESendWR struct {
	WRID      uint64
	Reserved  uint32
	Opcode    uint32
	SendFlags uint32
	Ex        uint32 // __be32 imm_data, or invalidate_rkey
	WR        [120]uint8
}

// RXERDMAWR is struct rxe_send_wr's wr.rdma.
type RXERDMAWR struct {
	RemoteAddr uint64
	RKey       uint32
	Reserved   uint32
}

// RXEAtomicWR is struct rxe_send_wr's wr.atomic.
type RXEAtomicWR struct {
	RemoteAddr uint64
	CompareAdd uint64
	Swap       uint64
	RKey       uint32
	Reserved   uint32
}

// RXEUDWR is struct rxe_send_wr's wr.ud; AV is struct rxe_av, which counts where
// AHNum is 0.
type RXEUDWR struct {
	RemoteQPN  uint32
	RemoteQKey uint32
	PKeyIndex  uint16
	Reserved   uint16
	AHNum      uint32
	Pad        [4]uint32
	AV         [88]uint8
}

// RXEFlushWR is struct rxe_send_wr's wr.flush.
type RXEFlushWR struct {
	RemoteAddr uint64
	Length     uint32
	RKey       uint32
	Type       uint8
	Level      uint8
	Pad        [6]uint8
}

// RXEMWWR is struct rxe_send_wr's wr.mw.
type RXEMWWR struct {
	Addr   uint64
	Length uint64
	MRLKey uint32
	MWRKey uint32
	RKey   uint32
	Access uint32
}

// RXESendWQE is struct rxe_send_wqe. All between WR and DMA is the driver's.
type RXESendWQE struct {
	WR          RXESendWR
	Status      uint32
	State       uint32
	IOVA        uint64
	Mask        uint32
	FirstPSN    uint32
	LastPSN     uint32
	AckLength   uint32
	SSN         uint32
	HasRdAtomic uint32
	DMA         RXEDMAInfo
}

// RXERecvWQE is struct rxe_recv_wqe.
type RXERecvWQE struct {
	WRID     uint64
	Reserved uint32
	Padding  uint32
	DMA      RXEDMAInfo
}

var (
	_ [384]byte = [unsafe.Sizeof(RXEQueueBuf{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(RXEMMInfo{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(RXECreateQPResp{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(RXECreateSRQResp{})]byte{}
	_ [8]byte   = [unsafe.Sizeof(RXECreateAHResp{})]byte{}
	_ [8]byte   = [unsafe.Sizeof(RXEModifySRQ{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(RXESGE{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(RXEDMAInfo{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(RXEFlushWR{})]byte{}
	_ [144]byte = [unsafe.Sizeof(RXESendWR{})]byte{}
	_ [120]byte = [unsafe.Sizeof(RXEUDWR{})]byte{}
	_ [208]byte = [unsafe.Sizeof(RXESendWQE{})]byte{}
	_ [40]byte  = [unsafe.Sizeof(RXERecvWQE{})]byte{}
)
