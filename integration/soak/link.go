package main

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

const (
	// areaLen is the memory of a link's end: what comes in, and what goes out.
	areaLen = 2 * depth * slotLen
	// cqDepth holds a round's completions and those of a bye.
	cqDepth = 32
	// userHandle is what CreateCQ of package rawverbs gives as the CQ's name in events.
	userHandle = 0xc9
)

// end is one end of a link during one connection.
type end struct {
	c    *rawverbs.Client
	ctl  *control
	kind linkKind
	path rawverbs.Path
	area []byte

	pd, cq, srq, ah uint32
	channel         int
	mr              abi.RegMRResp
	qps             []abi.CreateQPResp
	qkey            uint32
	peer            hello

	armed  bool
	events uint32 // read from the channel

	undo []func() error
}

func (k linkKind) qpType() uint8 {
	return [...]uint8{rawverbs.QPTypeRC, rawverbs.QPTypeRC, rawverbs.QPTypeUC, rawverbs.QPTypeUD}[k]
}

// in and out are slot i of the two areas.
func (e *end) in(i int) []byte  { return e.area[i*slotLen:][:slotLen] }
func (e *end) out(i int) []byte { return e.area[(depth+i)*slotLen:][:slotLen] }

func (e *end) onClose(f func() error) { e.undo = append(e.undo, f) }

// create makes all objects of the end. withEvents: completions are waited for at a channel.
func (e *end) create(r *rand.Rand, withEvents bool) (err error) {
	c := e.c
	if e.pd, err = c.AllocPD(); err != nil {
		return err
	}
	e.onClose(func() error { return c.Destroy(rawverbs.PD, e.pd) })
	const access = rawverbs.AccessLocalWrite | rawverbs.AccessRemoteWrite | rawverbs.AccessRemoteRead | rawverbs.AccessRemoteAtom
	if e.mr, err = c.RegMR(e.pd, rawverbs.AddrOf(e.area), areaLen, access); err != nil {
		return err
	}
	e.onClose(func() error { return c.Destroy(rawverbs.MR, e.mr.MRHandle) })
	e.channel = rawverbs.NoChannel
	if withEvents {
		if e.channel, err = c.CreateChannel(); err != nil {
			return err
		}
		e.onClose(func() error { return unix.Close(e.channel) })
	}
	if e.cq, err = c.CreateCQ(cqDepth, e.channel); err != nil {
		return err
	}
	e.onClose(e.destroyCQ)
	if e.kind == linkSRQ {
		if e.srq, err = c.CreateSRQ(e.pd, depth, 2); err != nil {
			return err
		}
		e.onClose(func() error { return c.Destroy(rawverbs.SRQ, e.srq) })
	}
	if e.kind == linkUD {
		if e.ah, err = c.CreateAH(e.pd, e.path.AH()); err != nil {
			return err
		}
		e.onClose(func() error { return c.Destroy(rawverbs.AH, e.ah) })
	}
	e.qkey = r.Uint32() &^ (1 << 31) // the top bit means a controlled key
	for range e.kind.qps() {
		in := rawverbs.SmallQP(e.kind.qpType(), e.pd, e.cq)
		in.MaxSendWR, in.MaxRecvWR, in.MaxSendSGE, in.MaxRecvSGE = depth, depth, 2, 2
		if e.kind == linkSRQ {
			in.IsSRQ, in.SRQHandle, in.MaxRecvWR = 1, e.srq, 0
		}
		qp, err := c.CreateQP(in)
		if err != nil {
			return err
		}
		e.qps = append(e.qps, qp)
		e.onClose(func() error { return c.Destroy(rawverbs.QP, qp.QPHandle) })
	}
	return nil
}

// destroyCQ also checks that no more and no fewer events were counted than read.
func (e *end) destroyCQ() error {
	n, err := e.c.DestroyCQ(e.cq)
	if err == nil && n != e.events {
		err = fmt.Errorf("the CQ says that %d events were read, not %d", n, e.events)
	}
	return err
}

// connect tells the peer of this end and takes the queue pairs to RTS.
func (e *end) connect() error {
	h := hello{
		QKey: e.qkey, RKey: e.mr.RKey,
		In: rawverbs.AddrOf(e.in(0)), Out: rawverbs.AddrOf(e.out(0)),
	}
	for i, q := range e.qps {
		h.QPN[i] = q.QPN
	}
	if err := e.ctl.send(message{Step: stepHello, Hello: h}); err != nil {
		return err
	}
	m, err := e.ctl.receive(stepHello)
	if err != nil {
		return err
	}
	e.peer = m.Hello
	for i, q := range e.qps {
		far := rawverbs.Far{QPN: e.peer.QPN[i], QKey: e.qkey}
		if err := e.c.ToRTS(e.kind.qpType(), q.QPHandle, far, e.path); err != nil {
			return err
		}
	}
	if err := e.ctl.send(message{Step: stepReady}); err != nil {
		return err
	}
	_, err = e.ctl.receive(stepReady)
	return err
}

// close destroys everything, whatever is still under way.
func (e *end) close() error {
	var errs []error
	for i := len(e.undo) - 1; i >= 0; i-- {
		errs = append(errs, e.undo[i]())
	}
	e.undo = nil
	return errors.Join(errs...)
}

// bye is how this end prepares its own destruction.
func (e *end) bye(sp spec) error {
	switch {
	case sp.Mess:
		return e.mess()
	case sp.Flush && e.kind != linkSRQ:
		return e.flush()
	}
	return nil
}

// mess leaves work in every queue, some of it on its way.
func (e *end) mess() error {
	for i := range depth {
		if err := e.postRecv(i, item{size: slotLen}); err != nil {
			return err
		}
		it := item{size: min(8192, maxDatagram), signaled: true}
		op := opWrite
		if e.kind == linkUD || e.kind == linkSRQ {
			op = opSend
		}
		if err := e.postSend(op, i, it, 0); err != nil {
			return err
		}
	}
	return nil
}

// flush ends through the error state: every receive comes back as flushed.
func (e *end) flush() error {
	for i := range depth {
		if err := e.postRecv(i, item{size: slotLen}); err != nil {
			return err
		}
	}
	if err := e.c.ModifyQP(abi.ModifyQP{QPHandle: e.qps[0].QPHandle, AttrMask: rawverbs.MaskState, QPState: rawverbs.QPErr}); err != nil {
		return err
	}
	wcs, err := e.reap(depth)
	if err != nil {
		return err
	}
	for i, wc := range wcs {
		if wc.Status != rawverbs.WCFlushErr || wc.WRID != uint64(i) {
			return fmt.Errorf("receive %d came back with status %d as %d", i, wc.Status, wc.WRID)
		}
	}
	return nil
}
