package soft

import (
	"fmt"

	"github.com/uverbsd/uverbsd/hca"
)

// doorbell says that there is more in the mapped send queue. What was written before
// a doorbell that failed stays there and is found by the next (rxe_post_send).
func (q *QP) doorbell(wrs int, n *notes) (int, error) {
	q.s.mu.Lock()
	state := q.s.attr.State
	if q.s.closed || state < hca.QPRTS {
		q.s.mu.Unlock()
		return 0, fmt.Errorf("post send in state %d: %w", state, einval)
	}
	// In SQD they wait where they are. A runner flushes what comes after his own.
	switch {
	case state == hca.QPRTS:
		q.refillLocked()
	case state >= hca.QPSQE && !q.sendBusyLocked():
		q.flushSQLocked(n)
	}
	q.s.mu.Unlock()
	if state == hca.QPErr {
		q.flushLate(n)
	}
	if !n.empty() {
		n.later(q.dev)
	}
	return wrs, nil
}

// pendingLocked: is there a send, in the ring or to be taken into it?
func (q *QP) pendingLocked() bool {
	return q.s.ring.count > 0 || q.s.attr.State == hca.QPRTS && q.refillLocked() > 0
}

// refillLocked takes sends from a mapped queue as long as there is room, and says
// how many. What cannot be posted fails in its turn.
func (q *QP) refillLocked() int {
	r := &q.s.ring
	took := 0
	for ; r.next(); took++ {
		w := &r.in
		ah, err := q.checkSend(w)
		if err != nil {
			*w = hca.SendWR{ID: w.ID, Opcode: hca.OpInvalid}
		}
		r.push(w, ah)
	}
	return took
}

// flushLate completes the receives that came into a mapped queue in ERR.
func (q *QP) flushLate(n *notes) {
	if q.rq == nil {
		return
	}
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	if q.r.state == hca.QPErr && q.r.claimer == nil {
		q.flushRQLocked(n)
	}
}

// pushOwn completes a receive of q's own queue, or of its SRQ, under r.mu; false
// on overrun.
func (q *QP) pushOwn(wc *hca.WC, solicited bool, n *notes) bool {
	q.r.ring.done()
	return q.recvCQ.push(wc, solicited, n)
}
