package rxe

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

// cqeSize is the kernel's struct rxe_cqe (rxe_verbs.h), the larger of ib_wc, 72
// bytes, and ib_uverbs_wc, which the client reads; as an entry it is 128.
const cqeSize = 72

// queues are those of one context.
type queues struct {
	arena hca.Arena

	// mu guards what is below. Leaf.
	mu   sync.RWMutex
	ahs  []hca.AH // by number less one; nil where there is none
	free []uint32 // numbers that were used and are not
}

var _ hca.Queues = (*queues)(nil)

// NewCompQueue: see rxe_cq_from_init.
func (q *queues) NewCompQueue(entries int) (hca.CompQueue, error) {
	c := &compQueue{}
	if err := c.init(q.arena, entries, cqeSize); err != nil {
		return nil, err
	}
	return c, nil
}

// NewSendQueue gives pieces and inline bytes one and the same room (rxe_init_sq).
func (q *queues) NewSendQueue(c hca.QPCap) (hca.SendQueue, error) {
	if c.MaxSendSGE > MaxSGE || c.MaxInline > MaxInline {
		return nil, fmt.Errorf("sends of %d pieces or %d bytes inline: %w", c.MaxSendSGE, c.MaxInline, unix.EINVAL)
	}
	room := max(int(c.MaxSendSGE)*sgeSize, int(c.MaxInline))
	s := &sendQueue{queues: q, maxSGE: uint32(room / sgeSize), maxInline: uint32(room)}
	if err := s.init(q.arena, int(c.MaxSendWR), sendWQESize+room); err != nil {
		return nil, err
	}
	return s, nil
}

// NewRecvQueue: see rxe_init_rq and rcv_wqe_size.
func (q *queues) NewRecvQueue(maxWR, maxSGE uint32) (hca.RecvQueue, error) {
	if maxSGE > MaxSGE {
		return nil, fmt.Errorf("receives of %d pieces: %w", maxSGE, unix.EINVAL)
	}
	r := &recvQueue{maxSGE: maxSGE}
	if err := r.init(q.arena, int(maxWR), recvWQESize+int(maxSGE)*sgeSize); err != nil {
		return nil, err
	}
	return r, nil
}

// AddAH gives the smallest number that was given back last, or the next.
func (q *queues) AddAH(ah hca.AH) (uint32, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if n := len(q.free); n > 0 {
		num := q.free[n-1]
		q.free = q.free[:n-1]
		q.ahs[num-1] = ah
		return num, nil
	}
	q.ahs = append(q.ahs, ah)
	return uint32(len(q.ahs)), nil
}

// RemoveAH takes a number back that AddAH gave.
func (q *queues) RemoveAH(num uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if num == 0 || int(num) > len(q.ahs) || q.ahs[num-1] == nil {
		return
	}
	q.ahs[num-1] = nil
	q.free = append(q.free, num)
}

// ah is what a request names, nil if it is nothing.
func (q *queues) ah(num uint32) hca.AH {
	if num == 0 {
		return nil
	}
	q.mu.RLock()
	defer q.mu.RUnlock()
	if int(num) > len(q.ahs) {
		return nil
	}
	return q.ahs[num-1]
}

func mmInfo(m hca.Mapped) abi.RXEMMInfo {
	i := m.Info()
	return abi.RXEMMInfo{Offset: i.Offset, Size: i.Size}
}

// CQAnswer is struct rxe_create_cq_resp, and rxe_resize_cq_resp.
func (q *queues) CQAnswer(c hca.CompQueue) []byte {
	a := mmInfo(c)
	return answer(&a)
}

// QPAnswer is struct rxe_create_qp_resp.
func (q *queues) QPAnswer(rq hca.RecvQueue, sq hca.SendQueue) []byte {
	var a abi.RXECreateQPResp
	if rq != nil {
		a.RQ = mmInfo(rq)
	}
	if sq != nil {
		a.SQ = mmInfo(sq)
	}
	return answer(&a)
}

// SRQAnswer is struct rxe_create_srq_resp.
func (q *queues) SRQAnswer(rq hca.RecvQueue, num uint32) []byte {
	return answer(&abi.RXECreateSRQResp{MI: mmInfo(rq), SRQNum: num})
}

// AHAnswer is struct rxe_create_ah_resp.
func (q *queues) AHAnswer(num uint32) []byte { return answer(&abi.RXECreateAHResp{AHNum: num}) }

// SRQResizeAnswer is struct mminfo, at the address in struct rxe_modify_srq_cmd.
func (q *queues) SRQResizeAnswer(rq hca.RecvQueue) []byte {
	a := mmInfo(rq)
	return answer(&a)
}
