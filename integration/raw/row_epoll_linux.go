package main

import (
	"errors"
	"fmt"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// notified is a port that is connected to itself, with a completion channel in
// an edge-triggered epoll.
type notified struct {
	*port
	ch, ep int
	addr   uint64
	mr     abi.RegMRResp
}

func newNotified(node string) (*notified, error) {
	c, err := rawverbs.OpenContext(node)
	if err != nil {
		return nil, err
	}
	n := &notified{port: &port{c: c}}
	if n.path, err = c.SelfPath(node); err != nil {
		return nil, err
	}
	if n.pd, err = c.AllocPD(); err != nil {
		return nil, err
	}
	if n.ch, err = c.CreateChannel(); err != nil {
		return nil, err
	}
	if n.cq, err = c.CreateCQ(64, n.ch); err != nil {
		return nil, err
	}
	if n.qp, err = c.CreateQP(rawverbs.SmallQP(rawverbs.QPTypeRC, n.pd, n.cq)); err != nil {
		return nil, err
	}
	if err := c.Connect(n.qp.QPHandle, n.qp.QPN, n.path); err != nil {
		return nil, err
	}
	_, n.addr = c.Mem.Data()
	if n.mr, err = c.RegMR(n.pd, n.addr, rawverbs.Page, rawverbs.AccessLocalWrite|rawverbs.AccessRemoteWrite); err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(n.ch, true); err != nil {
		return nil, err
	}
	if n.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, err
	}
	return n, unix.EpollCtl(n.ep, unix.EPOLL_CTL_ADD, n.ch, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(n.ch)})
}

func (n *notified) close() {
	_ = unix.Close(n.ep)
	_ = unix.Close(n.ch)
	n.c.Close()
}

// send completes once, or twice with a receive: its completion is solicited
// or not.
func (n *notified) send(recv, solicited bool) error {
	sge := abi.SGE{Addr: n.addr, Length: 8, LKey: n.mr.LKey}
	if !recv {
		return n.c.Send(n.qp.QPHandle, rawverbs.RDMA(rawverbs.OpRDMAWrite, n.addr, n.mr.RKey), sge)
	}
	if err := n.c.Recv(n.qp.QPHandle, 2, sge); err != nil {
		return err
	}
	wr := abi.SendWR{WRID: 1, Opcode: rawverbs.OpSend}
	if solicited {
		wr.SendFlags = 1 << 2 // IB_SEND_SOLICITED
	}
	return n.c.Send(n.qp.QPHandle, wr, sge)
}

// edges waits at most ms milliseconds for an edge.
func (n *notified) edges(ms int) (int, error) {
	ev := make([]unix.EpollEvent, 4)
	for {
		got, err := unix.EpollWait(n.ep, ev, ms)
		if !errors.Is(err, unix.EINTR) {
			return got, err
		}
	}
}

// edge wants one, read as the event of the CQ.
func (n *notified) edge() error {
	if got, err := n.edges(int(patience.Milliseconds())); err != nil || got != 1 {
		return fmt.Errorf("%d edges, want one (%v)", got, err)
	}
	return n.event()
}

func (n *notified) event() error {
	buf := make([]byte, 64)
	k, err := unix.Read(n.ch, buf)
	if err != nil || k != 8 {
		return fmt.Errorf("%d bytes of an event (%v)", k, err)
	}
	if h := rawverbs.Decode[uint64](buf); h != 0xc9 {
		return fmt.Errorf("an event of CQ %#x", h)
	}
	return nil
}

// quiet wants no edge and nothing to read, and what was completed by then.
func (n *notified) quiet() error {
	if got, err := n.edges(0); err != nil || got != 0 {
		return fmt.Errorf("%d edges, want none (%v)", got, err)
	}
	if k, err := unix.Read(n.ch, make([]byte, 8)); !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("a read of no event: %d bytes, %v", k, err)
	}
	return nil
}

func (n *notified) take(want int) error {
	for range want {
		if err := eventually("a completion", func() bool {
			_, ok, err := n.c.Poll(n.cq)
			return ok || err != nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// row30: no wake-up is lost, around arming, for solicited ones only, and with an
// edge-triggered epoll, which says nothing twice.
func row30(t *rowTest) {
	n, err := newNotified(t.node)
	t.check("setup", err)
	if err != nil {
		return
	}
	defer n.close()
	steps := func(fs ...func() error) error {
		for i, f := range fs {
			if err := f(); err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
		}
		return nil
	}
	arm := func() error { return n.c.ReqNotify(n.cq) }
	armSolicited := func() error {
		body := abi.ReqNotifyCQ{CQHandle: n.cq, SolicitedOnly: 1}
		if _, e := n.c.Call(abi.CmdReqNotifyCQ, rawverbs.Bytes(&body), 0, false); e != 0 {
			return e
		}
		return nil
	}
	write := func() error { return n.send(false, false) }
	take1, take2 := func() error { return n.take(1) }, func() error { return n.take(2) }
	t.check("a completion just before arming is polled, not told", steps(write, take1, arm, n.quiet))
	t.check("one just after it is told, once", steps(write, n.edge, take1, n.quiet))
	t.check("one that is there when armed is not told, the next is", steps(write, arm, write, n.edge, take2, n.quiet))
	t.check("not armed: nothing", steps(write, take1, n.quiet))
	t.check("solicited only", steps(armSolicited, func() error { return n.send(true, false) }, take1, n.quiet,
		func() error { return n.send(true, true) }, n.edge, take1, n.quiet))
	// The event is read late: a second one beside it is an edge again.
	t.check("an edge for each event, the first unread", steps(arm, write,
		func() error { _, err := n.edges(int(patience.Milliseconds())); return err },
		arm, write, n.edge, n.event, take2, n.quiet))
	count := 2000
	if t.long {
		count = 100000
	}
	t.check(fmt.Sprintf("%d times arm, poll, wait", count), func() error {
		// As a program does it: an event says only that something may be there.
		done := make(chan error, 1)
		sender, err := n.c.Share()
		if err != nil {
			return err
		}
		sge := abi.SGE{Addr: n.addr, Length: 8, LKey: n.mr.LKey}
		// As many as the CQ has room for: it must not overrun.
		room := make(chan struct{}, 32)
		go func() {
			for i := 0; i < count; {
				room <- struct{}{}
				switch err := sender.Send(n.qp.QPHandle, rawverbs.RDMA(rawverbs.OpRDMAWrite, n.addr, n.mr.RKey), sge); {
				case err == nil:
					i++
				case errors.Is(err, unix.ENOMEM): // as many are queued as can be
					<-room
				default:
					done <- err
					return
				}
			}
			done <- nil
		}()
		for got := 0; got < count; {
			if err := arm(); err != nil {
				return err
			}
			for {
				_, ok, err := n.c.Poll(n.cq)
				if err != nil {
					return err
				}
				if !ok {
					break
				}
				got++
				<-room
			}
			if got == count {
				break
			}
			if k, err := n.edges(int(patience.Milliseconds())); err != nil || k != 1 {
				unread := n.event() == nil
				_, there, _ := n.c.Poll(n.cq)
				return fmt.Errorf("after %d completions: %d edges, want one (%v); an event is unread: %v, a completion is there: %v", got, k, err, unread, there)
			}
			for n.event() == nil { // until there is none, as edges demand
			}
		}
		return <-done
	}())
}
