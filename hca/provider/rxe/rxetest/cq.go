package rxetest

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

// CQ is librxe's side of a CQ.
type CQ struct {
	hca.CQ
	c *Context

	// mu guards the rest; it is librxe's lock of the CQ.
	mu   sync.Mutex
	q    *tee
	Ring Ring

	// OnPush, if set before any traffic, is called before each completion, by the
	// device and under its locks.
	OnPush func()

	// waitMu guards the waiter. Inside mu and the device's locks.
	waitMu sync.Mutex
	waiter hca.Waiter
	failed bool
}

// tee is the daemon's side: librxe's clients wait by polling, those of this package
// by hca.CQ's Await.
type tee struct {
	hca.CompQueue
	cq *CQ
}

func (q *tee) Push(wc *hca.WC, solicited bool) bool {
	if q.cq.OnPush != nil {
		q.cq.OnPush()
	}
	ok := q.CompQueue.Push(wc, solicited)
	q.cq.wake(!ok)
	return ok
}

func (q *tee) MoveTo(to hca.CompQueue) bool { return q.CompQueue.MoveTo(to.(*tee).CompQueue) }

// wake wakes from a goroutine of its own: the caller has locks.
func (q *CQ) wake(failed bool) {
	q.waitMu.Lock()
	defer q.waitMu.Unlock()
	q.failed = q.failed || failed
	if w := q.waiter; w != nil {
		q.waiter = nil
		go w.Wake(false)
	}
}

// CreateCQ makes and maps a queue.
func (c *Context) CreateCQ(in hca.CQInit) (hca.CQ, error) {
	cq := &CQ{c: c}
	if in.Entries < 1 || in.Entries > 1<<16 { // the device says what it thinks of it
		return c.UContext.CreateCQ(in)
	}
	q, err := c.Queues.NewCompQueue(in.Entries)
	if err != nil {
		return nil, err
	}
	cq.q = &tee{q, cq}
	in.Queue = cq.q
	if cq.CQ, err = c.UContext.CreateCQ(in); err != nil {
		q.Close()
		return nil, err
	}
	cq.Ring = c.ringOf(Answer[abi.RXEMMInfo](c.Queues.CQAnswer(q)))
	return cq, nil
}

// Poll is rxe_poll_cq.
func (q *CQ) Poll(wc []hca.WC) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.q == nil {
		return 0
	}
	n := 0
	for ; n < len(wc) && !q.Ring.Empty(); n++ {
		i := q.Ring.Consumer()
		w := *q.Ring.WC(i)
		q.Ring.SetConsumer(q.Ring.Next(i))
		wc[n] = hca.WC{
			ID: w.WRID, Status: hca.WCStatus(w.Status), Opcode: hca.WCOpcode(w.Opcode), VendorErr: w.VendorErr,
			ByteLen: w.ByteLen, Imm: w.Imm, QPN: w.QPNum, SrcQP: w.SrcQP, Flags: hca.WCFlags(w.WCFlags),
			PKeyIndex: w.PKeyIndex, SLID: w.SLID, SL: w.SL, DLIDPathBit: w.DLIDPathBits, Port: w.PortNum,
		}
	}
	return n
}

// Await is for what waits in the tests.
func (q *CQ) Await(w hca.Waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waitMu.Lock()
	defer q.waitMu.Unlock()
	if q.q == nil || q.waiter != nil || q.failed || !q.Ring.Empty() {
		return false
	}
	q.waiter = w
	return true
}

// Cancel takes w back.
func (q *CQ) Cancel(w hca.Waiter) bool {
	q.waitMu.Lock()
	defer q.waitMu.Unlock()
	if q.waiter != w {
		return false
	}
	q.waiter = nil
	return true
}

// Resize is rxe_resize_cq.
func (q *CQ) Resize(entries int, _ hca.CompQueue) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.q == nil {
		return unix.EINVAL
	}
	if entries < 1 || entries > int(1<<16) {
		return q.CQ.Resize(entries, nil)
	}
	n, err := q.c.Queues.NewCompQueue(entries)
	if err != nil {
		return err
	}
	to := &tee{n, q}
	if err := q.CQ.Resize(entries, to); err != nil {
		n.Close()
		return err
	}
	q.q.Close()
	q.q = to
	q.Ring = q.c.ringOf(Answer[abi.RXEMMInfo](q.c.Queues.CQAnswer(n)))
	return nil
}

// Close is rxe_destroy_cq.
func (q *CQ) Close() error {
	if err := q.CQ.Close(); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.q != nil {
		q.q.Close()
		q.q = nil
		q.wake(false)
	}
	return nil
}
