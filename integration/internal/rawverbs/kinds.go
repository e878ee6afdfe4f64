package rawverbs

import (
	"fmt"

	"github.com/uverbsd/uverbsd/abi"
	"golang.org/x/sys/unix"
)

// Kind is a type of object.
type Kind uint8

// The kinds that a handle can name.
const (
	NoKind Kind = iota
	PD
	MR
	MW
	AH
	CQ
	QP
	SRQ
	XRCD
	WQ
	RWQTbl
	Flow
)

// destroyers are the commands that end an object of each kind. Those with a
// response take the handle after its pointer, the others take only the handle.
var destroyers = map[Kind]struct {
	num  uint32
	resp int
}{
	PD: {abi.CmdDeallocPD, 0}, MR: {abi.CmdDeregMR, 0}, MW: {abi.CmdDeallocMW, 0},
	AH: {abi.CmdDestroyAH, 0}, XRCD: {abi.CmdCloseXRCD, 0},
	CQ: {abi.CmdDestroyCQ, SizeOf[abi.DestroyCQResp]()},
	QP: {abi.CmdDestroyQP, SizeOf[abi.EventsResp]()}, SRQ: {abi.CmdDestroySRQ, SizeOf[abi.EventsResp]()},
}

// Destroy destroys the object that h names.
func (c *Client) Destroy(k Kind, h uint32) error {
	if e := c.DestroyErrno(k, h); e != 0 {
		return fmt.Errorf("destroy object %d of kind %d: %w", h, k, e)
	}
	return nil
}

// DestroyErrno is Destroy for those that want the number.
func (c *Client) DestroyErrno(k Kind, h uint32) unix.Errno {
	d := destroyers[k]
	body := Bytes(&abi.Handle{Handle: h})
	if d.resp > 0 {
		body = Bytes(&abi.DestroyQP{QPHandle: h})
	}
	_, e := c.Call(d.num, body, d.resp, false)
	return e
}

// Path is how to reach a port of the same device.
type Path struct {
	GID  [16]byte
	SGID uint8 // index of GID in the port's table
	LID  uint16
	RoCE bool
}

// Connect takes an RC QP of c through INIT and RTR to RTS. psn 0, one retry.
func (c *Client) Connect(qp uint32, peer uint32, to Path) error {
	in := abi.ModifyQP{
		QPHandle: qp, AttrMask: MaskState | MaskPKey | MaskPort | MaskAccess, QPState: QPInit, PortNum: 1,
		QPAccessFlags: AccessLocalWrite | AccessRemoteWrite | AccessRemoteRead | AccessRemoteAtom,
	}
	if err := c.ModifyQP(in); err != nil {
		return fmt.Errorf("to INIT: %w", err)
	}
	in = abi.ModifyQP{
		QPHandle: qp, AttrMask: MaskState | MaskAV | MaskMTU | MaskDestQPN | MaskRQPSN | MaskDestAtomic | MaskMinRNR,
		QPState: QPRTR, PathMTU: 3, DestQPNum: peer, MaxDestRdAtomic: 1, MinRNRTimer: 12, Dest: to.dest(),
	}
	if err := c.ModifyQP(in); err != nil {
		return fmt.Errorf("to RTR: %w", err)
	}
	in = abi.ModifyQP{
		QPHandle: qp, AttrMask: MaskState | MaskTimeout | MaskRetry | MaskRNRRetry | MaskSQPSN | MaskRdAtomic,
		QPState: QPRTS, Timeout: 14, RetryCnt: 1, RNRRetry: 1, MaxRdAtomic: 1,
	}
	if err := c.ModifyQP(in); err != nil {
		return fmt.Errorf("to RTS: %w", err)
	}
	return nil
}

func (p Path) dest() abi.QPDest {
	d := abi.QPDest{DLID: p.LID, PortNum: 1}
	if p.RoCE {
		d.IsGlobal, d.DGID, d.SGIDIndex, d.HopLimit = 1, p.GID, p.SGID, 1
	}
	return d
}

// AH is the path as an address handle has it.
func (p Path) AH() abi.AHAttr {
	a := abi.AHAttr{DLID: p.LID, PortNum: 1}
	if p.RoCE {
		a.IsGlobal = 1
		a.GRH = abi.GlobalRoute{DGID: p.GID, SGIDIndex: p.SGID, HopLimit: 1}
	}
	return a
}
