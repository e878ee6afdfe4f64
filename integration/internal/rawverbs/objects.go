package rawverbs

import (
	"github.com/uverbsd/uverbsd/abi"
	"golang.org/x/sys/unix"
)

// Numbers of ib_verbs.h.
const (
	AccessLocalWrite  = 1 << 0
	AccessRemoteWrite = 1 << 1
	AccessRemoteRead  = 1 << 2
	AccessRemoteAtom  = 1 << 3

	QPTypeRC     = 2
	QPTypeUC     = 3
	QPTypeUD     = 4
	QPTypeRaw    = 8
	QPTypeXRCIni = 9
	QPTypeXRCTgt = 10
	QPTypeDriver = 0xff

	QPReset = 0
	QPInit  = 1
	QPRTR   = 2
	QPRTS   = 3
	QPErr   = 6

	MaskState      = 1 << 0
	MaskCurState   = 1 << 1
	MaskAccess     = 1 << 3
	MaskPKey       = 1 << 4
	MaskPort       = 1 << 5
	MaskQKey       = 1 << 6
	MaskAV         = 1 << 7
	MaskMTU        = 1 << 8
	MaskTimeout    = 1 << 9
	MaskRetry      = 1 << 10
	MaskRNRRetry   = 1 << 11
	MaskRQPSN      = 1 << 12
	MaskRdAtomic   = 1 << 13
	MaskAltPath    = 1 << 14
	MaskMinRNR     = 1 << 15
	MaskSQPSN      = 1 << 16
	MaskDestAtomic = 1 << 17
	MaskDestQPN    = 1 << 20
	MaskRateLimit  = 1 << 25

	OpRDMAWrite = 0
	OpSend      = 2
	OpRDMARead  = 4

	SendSignaled = 1 << 1

	NoChannel = -1
)

// GetContext makes the file's context.
func (c *Client) GetContext() error {
	r, err := call[abi.GetContextResp](c, abi.CmdGetContext, "get a context", abi.GetContext{}, true)
	if err == nil {
		c.Async, c.Vectors = int(r.AsyncFD), r.NumCompVectors
	}
	return err
}

// QueryDevice is the legacy one.
func (c *Client) QueryDevice() (abi.QueryDeviceResp, error) {
	return call[abi.QueryDeviceResp](c, abi.CmdQueryDevice, "query the device", abi.QueryDevice{}, false)
}

// QueryPort asks for a port.
func (c *Client) QueryPort(port uint8) (abi.QueryPortResp, error) {
	return call[abi.QueryPortResp](c, abi.CmdQueryPort, "query the port", abi.QueryPort{PortNum: port}, false)
}

// AllocPD returns a handle.
func (c *Client) AllocPD() (uint32, error) {
	r, err := call[abi.AllocPDResp](c, abi.CmdAllocPD, "allocate a PD", abi.AllocPD{}, true)
	return r.PDHandle, err
}

// RegMR registers memory.
func (c *Client) RegMR(pd uint32, addr, length uint64, access uint32) (abi.RegMRResp, error) {
	return call[abi.RegMRResp](c, abi.CmdRegMR, "register memory",
		abi.RegMR{Start: addr, Length: length, HCAVA: addr, PDHandle: pd, AccessFlags: access}, true)
}

// AllocMW returns a handle.
func (c *Client) AllocMW(pd uint32) (uint32, error) {
	r, err := call[abi.AllocMWResp](c, abi.CmdAllocMW, "allocate a window", abi.AllocMW{PDHandle: pd, MWType: 1}, true)
	return r.MWHandle, err
}

// CreateChannel returns a completion channel's descriptor.
func (c *Client) CreateChannel() (int, error) {
	r, err := call[abi.CreateCompChannelResp](c, abi.CmdCreateCompChannel, "create a channel", abi.CreateCompChannel{}, false)
	return int(r.FD), err
}

// CreateCQ returns a handle. channel may be NoChannel.
func (c *Client) CreateCQ(cqe uint32, channel int) (uint32, error) {
	r, err := call[abi.CreateCQResp](c, abi.CmdCreateCQ, "create a CQ",
		abi.CreateCQ{CQE: cqe, CompChannel: int32(channel), UserHandle: 0xc9}, true)
	return r.CQHandle, err
}

// SmallQP is a QP request with one element everywhere.
func SmallQP(typ uint8, pd, cq uint32) abi.CreateQP {
	return abi.CreateQP{
		UserHandle: 0x99, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq,
		MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: typ,
	}
}

// CreateQP makes one.
func (c *Client) CreateQP(in abi.CreateQP) (abi.CreateQPResp, error) {
	return call[abi.CreateQPResp](c, abi.CmdCreateQP, "create a QP", in, true)
}

// CreateSRQ returns a handle.
func (c *Client) CreateSRQ(pd, wr, sge uint32) (uint32, error) {
	r, err := call[abi.CreateSRQResp](c, abi.CmdCreateSRQ, "create an SRQ",
		abi.CreateSRQ{PDHandle: pd, MaxWR: wr, MaxSGE: sge, UserHandle: 0x59}, true)
	return r.SRQHandle, err
}

// CreateAH returns a handle.
func (c *Client) CreateAH(pd uint32, attr abi.AHAttr) (uint32, error) {
	r, err := call[abi.CreateAHResp](c, abi.CmdCreateAH, "create an AH", abi.CreateAH{PDHandle: pd, Attr: attr}, true)
	return r.AHHandle, err
}

// OpenXRCD opens a domain of the file's own.
func (c *Client) OpenXRCD() (uint32, error) {
	r, err := call[abi.OpenXRCDResp](c, abi.CmdOpenXRCD, "open an XRC domain", abi.OpenXRCD{FD: ^uint32(0), OFlags: unix.O_CREAT}, true)
	return r.XRCDHandle, err
}

// CreateXSRQ makes a shared receive queue of an XRC domain.
func (c *Client) CreateXSRQ(in abi.CreateXSRQ) (abi.CreateSRQResp, error) {
	return call[abi.CreateSRQResp](c, abi.CmdCreateXSRQ, "create an XRC SRQ", in, true)
}

// QueryQP asks for everything.
func (c *Client) QueryQP(qp uint32) (abi.QueryQPResp, error) {
	return call[abi.QueryQPResp](c, abi.CmdQueryQP, "query a QP", abi.QueryQP{QPHandle: qp, AttrMask: 1<<21 - 1}, false)
}

// ModifyQP is the legacy one.
func (c *Client) ModifyQP(in abi.ModifyQP) error {
	return tell(c, abi.CmdModifyQP, "modify a QP", in)
}

// ReqNotify arms a CQ.
func (c *Client) ReqNotify(cq uint32) error {
	return tell(c, abi.CmdReqNotifyCQ, "arm a CQ", abi.ReqNotifyCQ{CQHandle: cq})
}

// Poll takes one completion; false if there is none.
func (c *Client) Poll(cq uint32) (abi.WC, bool, error) {
	b, e := c.Call(abi.CmdPollCQ, Bytes(&abi.PollCQ{CQHandle: cq, NE: 1}), SizeOf[abi.PollCQResp]()+SizeOf[abi.WC](), false)
	if e != 0 {
		return abi.WC{}, false, e
	}
	n := Decode[abi.PollCQResp](b).Count
	return Decode[abi.WC](b[SizeOf[abi.PollCQResp]():]), n > 0, nil
}

// SendBody is a POST_SEND request of one work request.
func SendBody(qp uint32, wr abi.SendWR, sges ...abi.SGE) []byte {
	wr.NumSGE = uint32(len(sges))
	b := Join(Bytes(&abi.PostSend{QPHandle: qp, WRCount: 1, SGECount: uint32(len(sges)), WQESize: uint32(SizeOf[abi.SendWR]())}), Bytes(&wr))
	for i := range sges {
		b = append(b, Bytes(&sges[i])...)
	}
	return b
}

// RecvBody is a POST_RECV or POST_SRQ_RECV request of one work request.
func RecvBody(qp uint32, id uint64, sges ...abi.SGE) []byte {
	wr := abi.RecvWR{WRID: id, NumSGE: uint32(len(sges))}
	b := Join(Bytes(&abi.PostSend{QPHandle: qp, WRCount: 1, SGECount: uint32(len(sges)), WQESize: uint32(SizeOf[abi.RecvWR]())}), Bytes(&wr))
	for i := range sges {
		b = append(b, Bytes(&sges[i])...)
	}
	return b
}

// Send posts one work request.
func (c *Client) Send(qp uint32, wr abi.SendWR, sges ...abi.SGE) error {
	if _, e := c.Call(abi.CmdPostSend, SendBody(qp, wr, sges...), SizeOf[abi.PostResp](), false); e != 0 {
		return e
	}
	return nil
}

// Recv posts one receive.
func (c *Client) Recv(qp uint32, id uint64, sges ...abi.SGE) error {
	if _, e := c.Call(abi.CmdPostRecv, RecvBody(qp, id, sges...), SizeOf[abi.PostResp](), false); e != 0 {
		return e
	}
	return nil
}

// RDMA is a signalled RDMA work request.
func RDMA(opcode uint32, remote uint64, rkey uint32) abi.SendWR {
	// rdma keeps its rkey where atomic has compare_add (abi.SendWR).
	return abi.SendWR{WRID: 1, Opcode: opcode, SendFlags: SendSignaled, RemoteAddr: remote, CompareAdd: uint64(rkey)}
}
