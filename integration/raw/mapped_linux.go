package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// mappedPort is a client with two RC QPs that are connected to each other, all of
// whose queues it maps, as librxe does.
type mappedPort struct {
	c      *rawverbs.Client
	path   rawverbs.Path
	pd     uint32
	mr     abi.RegMRResp
	addr   uint64 // of the region
	cq     uint32
	cqRing ring
	qps    [2]mappedQP
	maps   [][]byte
	own    abi.RegMRResp // a region over one of its queues, of those that have it
}

type mappedQP struct {
	handle, num uint32
	sq, rq      ring
	sqInfo      abi.RXEMMInfo
}

const (
	mappedDepth = 16
	mappedSGE   = 4
	mrSize      = 4 * rawverbs.Page
)

func newMappedPort(node string) (*mappedPort, error) {
	c, err := rawverbs.OpenContext(node)
	if err != nil {
		return nil, err
	}
	p := &mappedPort{c: c}
	if err := p.setup(node); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *mappedPort) setup(node string) (err error) {
	if p.path, err = p.c.SelfPath(node); err != nil {
		return err
	}
	if p.pd, err = p.c.AllocPD(); err != nil {
		return err
	}
	_, p.addr = p.c.Mem.Data()
	if p.mr, err = p.c.RegMR(p.pd, p.addr, mrSize, rawverbs.AccessLocalWrite|rawverbs.AccessRemoteWrite|rawverbs.AccessRemoteRead|rawverbs.AccessRemoteAtom); err != nil {
		return err
	}
	return p.makeQueues()
}

// makeQueues makes CQ and QPs, and connects them.
func (p *mappedPort) makeQueues() (err error) {
	if p.cq, p.cqRing, err = p.createCQ(8*mappedDepth, rawverbs.NoChannel); err != nil {
		return err
	}
	for i := range p.qps {
		in := rawverbs.SmallQP(rawverbs.QPTypeRC, p.pd, p.cq)
		in.MaxSendWR, in.MaxRecvWR, in.MaxSendSGE, in.MaxRecvSGE = mappedDepth, mappedDepth, mappedSGE, mappedSGE
		if p.qps[i], err = p.createQP(in); err != nil {
			return err
		}
	}
	return p.connect()
}

func (p *mappedPort) connect() error {
	for i := range p.qps {
		far := rawverbs.Far{QPN: p.qps[1-i].num}
		if err := p.c.ToRTS(rawverbs.QPTypeRC, p.qps[i].handle, far, p.path); err != nil {
			return err
		}
	}
	return nil
}

// dropQueues undoes makeQueues, as far as that came.
func (p *mappedPort) dropQueues() error {
	var all []error
	for i := range p.qps {
		if p.qps[i].num != 0 {
			all = append(all, p.c.Destroy(rawverbs.QP, p.qps[i].handle))
		}
		p.qps[i] = mappedQP{}
	}
	all = append(all, p.c.Destroy(rawverbs.CQ, p.cq))
	p.unmap()
	return errors.Join(all...)
}

func (p *mappedPort) unmap() {
	for _, m := range p.maps {
		_ = unix.Munmap(m)
	}
	p.maps = nil
}

func (p *mappedPort) close() {
	p.unmap()
	p.c.Close()
}

// ring maps a queue.
func (p *mappedPort) mapRing(i abi.RXEMMInfo) (ring, error) {
	m, err := unix.Mmap(p.c.FD, int64(i.Offset), int(i.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return ring{}, fmt.Errorf("map %d bytes at %d: %w", i.Size, i.Offset, err)
	}
	p.maps = append(p.maps, m)
	return newRing(m), nil
}

func (p *mappedPort) createCQ(cqe uint32, channel int) (uint32, ring, error) {
	b, e := p.c.Call(abi.CmdCreateCQ, rawverbs.Bytes(&abi.CreateCQ{CQE: cqe, CompChannel: int32(channel)}), cqResp, true)
	if e != 0 {
		return 0, ring{}, fmt.Errorf("create a CQ: %w", e)
	}
	h := rawverbs.Decode[abi.CreateCQResp](b).CQHandle
	r, err := p.mapRing(rawverbs.Decode[abi.RXEMMInfo](b[cqResp:]))
	return h, r, err
}

func (p *mappedPort) createQP(in abi.CreateQP) (mappedQP, error) {
	size := rawverbs.SizeOf[abi.CreateQPResp]()
	b, e := p.c.Call(abi.CmdCreateQP, rawverbs.Bytes(&in), size, true)
	if e != 0 {
		return mappedQP{}, fmt.Errorf("create a QP: %w", e)
	}
	r, m := rawverbs.Decode[abi.CreateQPResp](b), rawverbs.Decode[abi.RXECreateQPResp](b[size:])
	q := mappedQP{handle: r.QPHandle, num: r.QPN, sqInfo: m.SQ}
	var err error
	if q.sq, err = p.mapRing(m.SQ); err == nil {
		q.rq, err = p.mapRing(m.RQ)
	}
	return q, err
}

// doorbell is librxe's post_send_db.
func (p *mappedPort) doorbell(q *mappedQP) error {
	body := rawverbs.Bytes(&abi.PostSend{QPHandle: q.handle, WQESize: uint32(rawverbs.SizeOf[abi.SendWR]())})
	if _, e := p.c.Call(abi.CmdPostSend, body, rawverbs.SizeOf[abi.PostResp](), false); e != 0 {
		return e
	}
	return nil
}

// putWrite makes a place of a send queue a good RDMA write of n bytes into the
// second half of the region.
func (p *mappedPort) putWrite(q *mappedQP, at, n uint32) {
	*q.sq.send(at) = abi.RXESendWQE{
		WR:  abi.RXESendWR{WRID: uint64(at), Opcode: rawverbs.OpRDMAWrite, SendFlags: rawverbs.SendSignaled},
		DMA: abi.RXEDMAInfo{Length: n, Resid: n, NumSGE: 1},
	}
	putRDMA(q.sq.send(at), p.addr+mrSize/2, p.mr.RKey)
	q.sq.putSendSGE(at, 0, abi.RXESGE{Addr: p.addr, Length: n, LKey: p.mr.LKey})
}

// write does one RDMA write from post to completion, as librxe's clients do.
func (p *mappedPort) write() error {
	q := &p.qps[0]
	at := q.sq.producer()
	p.putWrite(q, at, 64)
	q.sq.setProducer((at + 1) & q.sq.mask)
	if err := p.doorbell(q); err != nil {
		return err
	}
	for end := time.Now().Add(patience); p.cqRing.producer() == p.cqRing.consumer(); {
		if time.Now().After(end) {
			return errors.New("no completion")
		}
	}
	i := p.cqRing.consumer()
	status := p.cqRing.wc(i).Status
	p.cqRing.setConsumer((i + 1) & p.cqRing.mask)
	if status != 0 {
		return fmt.Errorf("status %d", status)
	}
	return nil
}
