package rawverbs

import (
	"fmt"

	"github.com/uverbsd/uverbsd/abi"
)

// Numbers of ib_verbs.h that traffic needs.
const (
	OpRDMAWriteImm = 1
	OpSendImm      = 3
	OpCmpSwap      = 5
	OpFetchAdd     = 6

	WCSuccess   = 0
	WCFlushErr  = 5
	WCRecv      = 128
	WCRecvImm   = 129 // of an RDMA write with immediate data
	WCFlagGRH   = 1 << 0
	WCFlagImm   = 1 << 1
	UDHeader    = 40 // room in front of a datagram (IBTA 1.4 §11.4.1.2)
	PathMTU1024 = 3
	ackTimeout  = 14 // 4.096 µs * 2^14: 67 ms
	retries     = 7
	rnrTimer    = 12
	rdAtomic    = 4
)

// Share is c with response memory of its own, for one more goroutine on the same
// file. Its Mem is its own to free; the descriptors stay c's.
func (c *Client) Share() (*Client, error) {
	m, err := NewMem()
	if err != nil {
		return nil, err
	}
	return &Client{FD: c.FD, Async: -1, Vectors: c.Vectors, Mem: m, Room: c.Room, Via: c.Via}, nil
}

// Far is the other end of a queue pair: its number and, for UD, its key.
type Far struct {
	QPN  uint32
	QKey uint32
}

// ToRTS takes a QP of one of the three basic types through INIT and RTR to RTS.
// Unlike Connect it retries as an application would, and takes several reads and
// atomics at once. For UD only far's key is used, as the QP's own.
func (c *Client) ToRTS(typ uint8, qp uint32, far Far, to Path) error {
	init := abi.ModifyQP{QPHandle: qp, AttrMask: MaskState | MaskPKey | MaskPort, QPState: QPInit, PortNum: 1}
	rtr := abi.ModifyQP{QPHandle: qp, AttrMask: MaskState, QPState: QPRTR}
	rts := abi.ModifyQP{QPHandle: qp, AttrMask: MaskState | MaskSQPSN, QPState: QPRTS}
	switch typ {
	case QPTypeUD:
		init.AttrMask |= MaskQKey
		init.QKey = far.QKey
	case QPTypeUC, QPTypeRC:
		init.AttrMask |= MaskAccess
		init.QPAccessFlags = AccessLocalWrite | AccessRemoteWrite
		rtr.AttrMask |= MaskAV | MaskMTU | MaskDestQPN | MaskRQPSN
		rtr.PathMTU, rtr.DestQPNum, rtr.Dest = PathMTU1024, far.QPN, to.dest()
	}
	if typ == QPTypeRC {
		init.QPAccessFlags |= AccessRemoteRead | AccessRemoteAtom
		rtr.AttrMask |= MaskDestAtomic | MaskMinRNR
		rtr.MaxDestRdAtomic, rtr.MinRNRTimer = rdAtomic, rnrTimer
		rts.AttrMask |= MaskTimeout | MaskRetry | MaskRNRRetry | MaskRdAtomic
		rts.Timeout, rts.RetryCnt, rts.RNRRetry, rts.MaxRdAtomic = ackTimeout, retries, retries, rdAtomic
	}
	for _, s := range []struct {
		name string
		in   abi.ModifyQP
	}{{"INIT", init}, {"RTR", rtr}, {"RTS", rts}} {
		if err := c.ModifyQP(s.in); err != nil {
			return fmt.Errorf("to %s: %w", s.name, err)
		}
	}
	return nil
}

// SRQRecv posts one receive to a shared queue.
func (c *Client) SRQRecv(srq uint32, id uint64, sges ...abi.SGE) error {
	if _, e := c.Call(abi.CmdPostSRQRecv, RecvBody(srq, id, sges...), SizeOf[abi.PostResp](), false); e != 0 {
		return e
	}
	return nil
}

// Datagram is a send's address: ud of the work request's union (abi.SendWR).
func Datagram(wr abi.SendWR, ah, qpn, qkey uint32) abi.SendWR {
	wr.RemoteAddr, wr.CompareAdd = uint64(ah)|uint64(qpn)<<32, uint64(qkey)
	return wr
}

// Atomic is an atomic work request on the eight bytes at remote. A fetch and add
// has no swap.
func Atomic(opcode uint32, remote uint64, rkey uint32, compareAdd, swap uint64) abi.SendWR {
	return abi.SendWR{Opcode: opcode, SendFlags: SendSignaled, RemoteAddr: remote, CompareAdd: compareAdd, Swap: swap, RKey: rkey}
}

// DestroyCQ destroys a CQ and returns how many of its events the kernel's side
// says were read.
func (c *Client) DestroyCQ(h uint32) (events uint32, err error) {
	b, e := c.Call(abi.CmdDestroyCQ, Bytes(&abi.DestroyCQ{CQHandle: h}), SizeOf[abi.DestroyCQResp](), false)
	if e != 0 {
		return 0, fmt.Errorf("destroy CQ %d: %w", h, e)
	}
	return Decode[abi.DestroyCQResp](b).CompEventsReported, nil
}
