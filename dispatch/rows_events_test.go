package dispatch_test

import (
	"fmt"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

// readable says whether an event file has something to read.
func readable(h dispatch.Handle) bool {
	r := newRequest(100)
	h.Poll(r, 1, false)
	return (<-r.ch).revents&unix.POLLIN != 0
}

// readEvents reads n events, waiting for each.
func readEvents(h dispatch.Handle, n, size int) (got [][]byte) {
	for range n {
		r := newRequest(100)
		h.Read(r, size)
		got = append(got, (<-r.ch).data)
	}
	return got
}

// Failure class 14: for each kind of object with events, with some read, some
// unread and some of another object in between: the destroy tells exactly how
// many were read, its unread ones are gone, the other object's stay, in order.
func TestRow14ExactCounts(t *testing.T) {
	for _, read := range []int{0, 1, 3} {
		t.Run(fmt.Sprintf("%d of 5 read", read), func(t *testing.T) {
			g := newRig(t)
			c := g.client(100)
			async := g.opened[int(c.context().AsyncFD)]
			c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
			fd := int32(out[abi.CreateCompChannelResp](c).FD)
			ch := g.opened[int(fd)]
			pd := c.pd()
			cqs := []uint32{c.cq(fd), c.cq(fd)}
			var qps []uint32
			for _, cq := range cqs {
				qp := c.qp(pd, cq, hca.QPTypeRC).QPHandle
				for _, st := range []hca.QPState{hca.QPInitState, hca.QPErr} {
					m := hca.QPMaskState
					if st == hca.QPInitState {
						m |= hca.QPMaskPKeyIndex | hca.QPMaskPort | hca.QPMaskAccess
					}
					c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp, QPState: uint8(st), PortNum: 1, AttrMask: uint32(m)}))
				}
				qps = append(qps, qp)
			}
			// tell makes one event of a CQ: a receive in ERR completes at once.
			tell := func(i int) {
				t.Helper()
				c.cmd(0, abi.CmdReqNotifyCQ, 0, raw(abi.ReqNotifyCQ{CQHandle: cqs[i]}))
				if e, _ := c.posted(post(abi.CmdPostRecv, qps[i], 16, recvWRs(1, 0), nil)); e != 0 {
					t.Fatal(e)
				}
			}
			for i := range 5 {
				tell(0)
				if i < read {
					if got := readEvents(ch, 1, 8); len(got[0]) != 8 {
						t.Fatalf("event %d: % x", i, got[0])
					}
				}
				if i == read { // between the unread ones
					tell(1)
				}
			}
			for _, qp := range qps {
				c.cmd(0, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: qp}))
			}
			destroy := func(i int, want abi.DestroyCQResp) {
				t.Helper()
				c.cmd(0, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: cqs[i]}))
				if got := out[abi.DestroyCQResp](c); got != want {
					t.Errorf("CQ %d: %+v, want %+v", i, got, want)
				}
			}
			destroy(0, abi.DestroyCQResp{CompEventsReported: uint32(read)})
			readEvents(ch, 1, 8) // the other CQ's event is still there
			if readable(ch) {
				t.Error("an event of a dead CQ")
			}
			destroy(1, abi.DestroyCQResp{CompEventsReported: 1})
			if readable(async) {
				t.Error("an asynchronous event")
			}
			c.h.Release()
			async.Release()
			ch.Release()
			g.empty()
		})
	}
}

// Failure class 14: an SRQ's event, read and unread.
func TestRow14SRQEvents(t *testing.T) {
	for _, read := range []bool{true, false} {
		g := newRig(t)
		c := g.client(100)
		async := g.opened[int(c.context().AsyncFD)]
		pd, cq := c.pd(), c.cq(-1)
		srq := c.srq(pd, 8, 1).SRQHandle
		create := abi.CreateQP{Response: resp, UserHandle: 0x9b, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, SRQHandle: srq, IsSRQ: 1,
			MaxSendWR: 8, MaxSendSGE: 1, QPType: uint8(hca.QPTypeRC)}
		c.cmd(0, abi.CmdCreateQP, 32, raw(create))
		qp := out[abi.CreateQPResp](c)
		port, _ := g.engine.Port(1)
		c.connect(qp.QPHandle, qp.QPN, port.LID)
		if e, _ := c.posted(post(abi.CmdPostSRQRecv, srq, 16, recvWRs(2, 0), nil)); e != 0 {
			t.Fatal(e)
		}
		c.cmd(0, abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: srq, AttrMask: uint32(hca.SRQLimit), SRQLimit: 2}))
		if e, _ := c.posted(post(abi.CmdPostSend, qp.QPHandle, 56, [][]byte{raw(abi.SendWR{Opcode: uint32(hca.OpSend)})}, nil)); e != 0 {
			t.Fatal(e)
		}
		c.completions(cq, 1)
		want := uint32(0)
		if read {
			want = 1
			got := decode[abi.AsyncEvent](readEvents(async, 1, 16)[0])
			if got != (abi.AsyncEvent{Element: 0x59, EventType: uint32(hca.EventSRQLimitReached)}) {
				t.Errorf("%+v", got)
			}
		} else {
			for !readable(async) {
				runtime.Gosched()
			}
		}
		c.cmd(0, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: qp.QPHandle}))
		if n := out[abi.EventsResp](c).EventsReported; n != 0 {
			t.Errorf("%d events of the QP", n)
		}
		c.cmd(0, abi.CmdDestroySRQ, 4, raw(abi.DestroyQP{Response: resp, QPHandle: srq}))
		if n := out[abi.EventsResp](c).EventsReported; n != want {
			t.Errorf("%d events of the SRQ, want %d", n, want)
		}
		if readable(async) {
			t.Error("an event of a dead SRQ")
		}
		c.h.Release()
		async.Release()
		g.empty()
	}
}

// Failure class 33: an overrun is told on the asynchronous file by the CQ's and
// the QP's own names, what was there stays, and the counts are exact.
func TestRow33Overrun(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	async := g.opened[int(c.context().AsyncFD)]
	pd, cq := c.pd(), c.cq(-1) // of 16
	qp := c.qp(pd, cq, hca.QPTypeRC)
	port, _ := g.engine.Port(1)
	c.connect(qp.QPHandle, qp.QPN, port.LID)
	for i := range uint64(17) {
		wr := abi.SendWR{WRID: i, Opcode: uint32(hca.OpRDMAWrite), SendFlags: uint32(hca.SendSignaled)}
		if e, _ := c.posted(post(abi.CmdPostSend, qp.QPHandle, 56, [][]byte{raw(wr)}, nil)); e != 0 {
			t.Fatal(i, e)
		}
	}
	seen := map[abi.AsyncEvent]int{}
	for _, b := range readEvents(async, 2, 16) {
		seen[decode[abi.AsyncEvent](b)]++
	}
	for _, want := range []abi.AsyncEvent{{Element: 0xc0ffee, EventType: uint32(hca.EventCQErr)}, {Element: 0x9b, EventType: uint32(hca.EventQPFatal)}} {
		if seen[want] != 1 {
			t.Errorf("events %+v, want one %+v", seen, want)
		}
	}
	for i, w := range c.completions(cq, 16) {
		if w.WRID != uint64(i) || w.Status != 0 {
			t.Errorf("completion %d: %+v", i, w)
		}
	}
	c.cmd(0, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: qp.QPHandle}))
	if n := out[abi.EventsResp](c).EventsReported; n != 1 {
		t.Errorf("%d events of the QP", n)
	}
	c.cmd(0, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: cq}))
	if got := out[abi.DestroyCQResp](c); got != (abi.DestroyCQResp{AsyncEventsReported: 1}) {
		t.Errorf("%+v", got)
	}
	if readable(async) {
		t.Error("one more event")
	}
	c.h.Release()
	async.Release()
	g.empty()
}

// Failure class 30: a poll that found an event is told of the next one all the
// same, once; so is one that found none.
func TestRow30EdgeTriggered(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
	fd := int32(out[abi.CreateCompChannelResp](c).FD)
	ch := g.opened[int(fd)]
	pd, cq := c.pd(), c.cq(fd)
	qp := c.qp(pd, cq, hca.QPTypeRC).QPHandle
	c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp, QPState: uint8(hca.QPInitState), PortNum: 1,
		AttrMask: uint32(hca.QPMaskState | hca.QPMaskPKeyIndex | hca.QPMaskPort | hca.QPMaskAccess)}))
	c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp, QPState: uint8(hca.QPErr), AttrMask: uint32(hca.QPMaskState)}))
	const kh = 7
	notified := func() int {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.woken[kh]
	}
	poll := func() {
		r := newRequest(100)
		ch.Poll(r, kh, true)
		<-r.ch
	}
	tell := func(want int) {
		t.Helper()
		c.cmd(0, abi.CmdReqNotifyCQ, 0, raw(abi.ReqNotifyCQ{CQHandle: cq}))
		if e, _ := c.posted(post(abi.CmdPostRecv, qp, 16, recvWRs(1, 0), nil)); e != 0 {
			t.Fatal(e)
		}
		for notified() < want {
			runtime.Gosched()
		}
	}
	poll()
	tell(1)
	poll() // finds the event
	readEvents(ch, 1, 8)
	tell(2)
	tell(2) // nobody has polled since
	poll()
	tell(3)
	readEvents(ch, 3, 8)
	if n := notified(); n != 3 {
		t.Errorf("notified %d times, want 3", n)
	}
	c.h.Release()
	ch.Release()
	g.empty()
}
