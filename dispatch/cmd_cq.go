package dispatch

import (
	"sync"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
	"golang.org/x/sys/unix"
)

// wcBatch is how many completions one step of POLL_CQ takes from the device, and
// as many as clients usually ask for: more make its scratch memory grow.
const wcBatch = 16

type cqObject struct {
	parents
	hca        hca.CQ
	user       uint64 // user_handle: names the CQ in its events
	channel    *eventFile
	async      *eventFile
	compEvents eventSource
	asyncEvts  eventSource
	poller     poller
	mapped     mapped
	resizing   sync.Mutex // guards the idr.Object's Cost after the create; outermost
}

// Completion queues a channel event (ib_uverbs_comp_handler).
func (o *cqObject) Completion() {
	if o.channel != nil {
		o.channel.push(o.user, 0, &o.compEvents)
	}
}

// CQEvent queues an asynchronous event (ib_uverbs_cq_event_handler).
func (o *cqObject) CQEvent(ev hca.EventType) { o.async.push(o.user, uint32(ev), &o.asyncEvts) }

func (o *cqObject) close() error {
	o.poller.end()
	if err := o.hca.Close(); err != nil {
		return err
	}
	if o.mapped.ending() {
		// Who polls in memory would never hear of it.
		o.mapped.list[0].(hca.CompQueue).Push(&hca.WC{Status: hca.WCFatalErr}, true)
	}
	o.mapped.close()
	// ib_uverbs_release_ucq: unread events go, read ones stay counted.
	if o.channel != nil {
		o.channel.purge(&o.compEvents)
	}
	o.async.purge(&o.asyncEvts)
	return nil
}

func createCQ(c *call, in *abi.CreateCQ, out *abi.CreateCQResp) error {
	return c.makeCQ(&abi.ExCreateCQ{UserHandle: in.UserHandle, CQE: in.CQE, CompVector: in.CompVector, CompChannel: in.CompChannel}, out)
}

func exCreateCQ(c *call, in *abi.ExCreateCQ, out *abi.ExCreateCQResp) error {
	if in.CompMask != 0 || in.Reserved != 0 {
		return unix.EINVAL
	}
	out.ResponseLength = c.responseLength(sizeOf[abi.ExCreateCQResp]())
	return c.makeCQ(in, &out.Base)
}

// makeCQ is create_cq (uverbs_cmd.c).
func (c *call) makeCQ(in *abi.ExCreateCQ, out *abi.CreateCQResp) error {
	u, err := c.context()
	if err != nil {
		return err
	}
	if in.CompVector >= uint32(c.f.dev.cfg.HCA.Attr().CompVectors) {
		return unix.EINVAL
	}
	cq := &cqObject{user: in.UserHandle, async: u.async}
	if in.CompChannel >= 0 {
		if cq.channel, err = c.f.channel(c.tid, in.CompChannel); err != nil {
			return err
		}
	}
	if in.Flags != 0 {
		return unix.EOPNOTSUPP // as the kernel's software drivers
	}
	if in.CQE > c.f.dev.cfg.HCA.Attr().MaxCQE {
		return unix.EINVAL
	}
	if err := c.f.depth(in.CQE); err != nil {
		return err
	}
	init := hca.CQInit{Entries: int(in.CQE), Vector: int(in.CompVector), Handler: cq}
	if err := c.mapCQ(u, &init, cq); err != nil {
		return err
	}
	o, err := c.begin(kindCQ, queueBytes(in.CQE, cqeBytes))
	if err == nil {
		cq.hca, err = u.hca.CreateCQ(init)
	}
	if err != nil {
		cq.mapped.close()
		return err
	}
	cq.poller.init(c.f, cq.hca)
	o.Value = cq
	*out = abi.CreateCQResp{CQHandle: o.ID(), CQE: uint32(cq.hca.Entries())}
	return nil
}

// mapCQ gives the queue memory that the client maps, if it does.
func (c *call) mapCQ(u *ucontext, init *hca.CQInit, cq *cqObject) error {
	queues, err := u.queues(c.f)
	if queues == nil || err != nil {
		return err
	}
	if init.Entries < 1 {
		return unix.EINVAL
	}
	if init.Queue, err = queues.NewCompQueue(init.Entries); err != nil {
		return err
	}
	if err := c.answer(queues.CQAnswer(init.Queue)); err != nil {
		init.Queue.Close()
		return err
	}
	cq.mapped = u.mapped(init.Queue)
	return nil
}

func resizeCQ(c *call, in *abi.ResizeCQ, out *abi.ResizeCQResp) error {
	o, err := c.use(kindCQ, in.CQHandle)
	if err != nil {
		return err
	}
	cq := o.Value.(*cqObject)
	if in.CQE > c.f.dev.cfg.HCA.Attr().MaxCQE {
		return unix.EINVAL
	}
	if err := c.f.depth(in.CQE); err != nil {
		return err
	}
	cq.resizing.Lock() // two resizes share the handle; what is paid must be what is had
	defer cq.resizing.Unlock()
	u, err := c.context()
	if err != nil {
		return err
	}
	var init hca.CQInit
	init.Entries = int(in.CQE)
	next := &cqObject{}
	if err := c.mapCQ(u, &init, next); err != nil {
		return err
	}
	cost := objectBytes + queueBytes(in.CQE, cqeBytes)
	if err := c.f.recharge(o, cost, func() error { return cq.hca.Resize(int(in.CQE), init.Queue) }); err != nil {
		next.mapped.close()
		return err
	}
	cq.mapped, next.mapped = next.mapped, cq.mapped
	next.mapped.close()
	out.CQE = uint32(cq.hca.Entries())
	return nil
}

// exModifyCQ is moderation, the one thing that it modifies.
func exModifyCQ(c *call, in *abi.ExModifyCQ) error {
	if in.AttrMask == 0 || in.Reserved != 0 {
		return unix.EINVAL
	}
	if in.AttrMask > abi.CQModerate {
		return unix.EOPNOTSUPP
	}
	o, err := c.use(kindCQ, in.CQHandle)
	if err != nil {
		return err
	}
	return o.Value.(*cqObject).hca.Modify(in.CQCount, in.CQPeriod)
}

func destroyCQ(c *call, in *abi.DestroyCQ, out *abi.DestroyCQResp) error {
	return c.f.destroyHandle(kindCQ, in.CQHandle, func(o *idr.Object) error {
		cq := o.Value.(*cqObject)
		if err := c.f.destroy(o); err != nil {
			return err
		}
		*out = abi.DestroyCQResp{CompEventsReported: cq.compEvents.count(), AsyncEventsReported: cq.asyncEvts.count()}
		return nil
	})
}

func reqNotifyCQ(c *call, in *abi.ReqNotifyCQ) error {
	o, err := c.use(kindCQ, in.CQHandle)
	if err != nil {
		return err
	}
	f := hca.NotifyNextComp
	if in.SolicitedOnly != 0 {
		f = hca.NotifySolicited
	}
	o.Value.(*cqObject).hca.ReqNotify(f)
	return nil
}

// pollCQ answers with what is there. An empty queue is waited on for a bounded
// moment (poller), since the client would only ask again.
func pollCQ(c *call) error {
	in := at[abi.PollCQ](c.in[:])
	if err := c.request(bytesOf(in)); err != nil {
		return err
	}
	o, err := c.use(kindCQ, in.CQHandle)
	if err != nil {
		return err
	}
	cq := o.Value.(*cqObject)
	sys := c.f.dev.cfg.System
	wait := in.NE != 0 && cq.poller.wants()
	// Also "none" is written now, by the one whose memory it is: see poller.
	n, err := deliverWC(sys, c.r, c.tid, cq.hca, in.Response, in.NE, true)
	if n != 0 || err != nil || !wait {
		return err
	}
	if cq.poller.park(c.r, c.tid, c.size, in.Response, in.NE) {
		c.deferred = true
		return nil
	}
	// A completion came in between, or another thread waits here already.
	_, err = deliverWC(sys, c.r, c.tid, cq.hca, in.Response, in.NE, false)
	return err
}

// Sizes of ib_uverbs_poll_cq_resp's head and of ib_uverbs_wc, in bytes.
const (
	pollHead = 8
	wcSize   = 48
)

// maxPoll bounds what one POLL_CQ returns: it goes to the client in one write
// (see respondWith), and 192 KiB are enough for one.
const maxPoll = 4096

// wcScratch is the memory that one delivery works in; buf grows for a poll of
// more than one batch.
type wcScratch struct {
	wcs [wcBatch]hca.WC
	buf []byte
}

var wcScratches = sync.Pool{New: func() any { return &wcScratch{buf: make([]byte, pollHead+wcBatch*wcSize)} }}

// deliverWC is ib_uverbs_poll_cq: it moves at most ne completions to the
// client's response, bounded by ne and not by out_words, as there. Nothing is
// written if there are none, unless even is set.
func deliverWC(sys System, r Request, tid int, cq hca.CQ, resp uint64, ne uint32, even bool) (int, error) {
	s := wcScratches.Get().(*wcScratch)
	defer wcScratches.Put(s)
	buf, total, most := s.buf, 0, int(min(ne, maxPoll))
	for total < most {
		want := min(most-total, wcBatch)
		n := cq.Poll(s.wcs[:want])
		if need := pollHead + (total+n)*wcSize; need > len(buf) {
			buf = append(buf, make([]byte, max(need, 2*len(buf))-len(buf))...)
		}
		for i := range n {
			w := toWC(&s.wcs[i])
			copy(buf[pollHead+(total+i)*wcSize:], bytesOf(&w))
		}
		total += n
		if n < want {
			break
		}
	}
	if total == 0 && !even {
		return 0, nil
	}
	head := abi.PollCQResp{Count: uint32(total)}
	copy(buf, bytesOf(&head))
	if !r.Pending() || sys.Write(tid, buf[:pollHead+total*wcSize], resp) != nil {
		return total, unix.EFAULT
	}
	return total, nil
}

func toWC(w *hca.WC) abi.WC {
	return abi.WC{
		WRID: w.ID, Status: uint32(w.Status), Opcode: uint32(w.Opcode), VendorErr: w.VendorErr,
		ByteLen: w.ByteLen, Imm: w.Imm, QPNum: w.QPN, SrcQP: w.SrcQP, WCFlags: uint32(w.Flags),
		PKeyIndex: w.PKeyIndex, SLID: w.SLID, SL: w.SL, DLIDPathBits: w.DLIDPathBit, PortNum: w.Port,
	}
}
