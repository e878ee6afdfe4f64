package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
)

// act is the active end of a round.
func (e *end) act(sp spec, items []item) error {
	for i, it := range items {
		switch sp.Op {
		case opRead, opAtomic:
			wipe(e.in(i))
		default:
			wipe(e.out(i))
			fill(e.out(i)[it.off:][:it.size], it.key)
			if e.kind == linkSRQ {
				binary.LittleEndian.PutUint64(e.out(i), it.key)
			}
		}
	}
	if _, err := e.ctl.receive(stepGo); err != nil {
		return err
	}
	cells := cellValues(items)
	signaled := 0
	for i, it := range items {
		if err := e.postSend(sp.Op, i, it, cells[i]); err != nil {
			return fmt.Errorf("post: %w", err)
		}
		if it.signaled {
			signaled++
		}
	}
	wcs, err := e.reap(signaled)
	if err != nil {
		return err
	}
	if err := e.checkSent(wcs, items); err != nil {
		return err
	}
	for i, it := range items {
		var err error
		switch sp.Op {
		case opRead:
			err = checkSlot(e.in(i), it, it.key)
		case opAtomic:
			b := e.in(i)[it.off:]
			if got := binary.NativeEndian.Uint64(b); got != cells[i] {
				err = fmt.Errorf("the cell held %#x, not %#x", got, cells[i])
			}
			err = errors.Join(err, checkBlank(e.in(i)[:it.off]), checkBlank(b[atomicLen:]))
		}
		if err != nil {
			return wrongError{fmt.Errorf("%v, item %d: %w", sp.Op, i, err)}
		}
	}
	return e.ctl.send(message{Step: stepDone})
}

// serve is the other end of a round.
func (e *end) serve(sp spec, items []item) error {
	cells := cellValues(items)
	for i, it := range items {
		switch sp.Op {
		case opRead:
			wipe(e.out(i))
			fill(e.out(i)[it.off:][:it.size], it.key)
		default:
			wipe(e.in(i))
		}
		if sp.Op.receives() {
			rit := it
			if sp.Op == opWriteImm {
				rit = item{}
			} else if e.kind == linkSRQ {
				rit = item{size: slotLen}
			}
			if err := e.postRecv(i, rit); err != nil {
				return fmt.Errorf("post a receive: %w", err)
			}
		}
	}
	if sp.Op == opAtomic {
		binary.NativeEndian.PutUint64(e.in(0)[items[0].off:], cells[0])
	}
	if err := e.ctl.send(message{Step: stepGo}); err != nil {
		return err
	}
	if _, err := e.ctl.receive(stepDone); err != nil {
		return err
	}
	if sp.Op.receives() {
		wcs, err := e.reap(len(items))
		if err != nil {
			return err
		}
		return e.checkReceived(sp.Op, wcs, items)
	}
	var err error
	for i, it := range items {
		switch {
		case sp.Op == opWrite:
			err = checkSlot(e.in(i), it, it.key)
		case sp.Op == opAtomic && i == 0:
			b := e.in(0)[it.off:]
			if got := binary.NativeEndian.Uint64(b); got != cells[len(items)] {
				err = fmt.Errorf("the cell holds %#x, not %#x", got, cells[len(items)])
			}
			err = errors.Join(err, checkBlank(e.in(0)[:it.off]), checkBlank(b[atomicLen:]))
		}
		if err != nil {
			return wrongError{fmt.Errorf("%v, item %d: %w", sp.Op, i, err)}
		}
	}
	return nil
}

// cellValues are what an atomic's cell holds before each item, and at the end.
func cellValues(items []item) []uint64 {
	v := []uint64{mix(items[0].key)}
	for i, it := range items {
		next := v[i]
		switch {
		case !it.cas:
			next += it.add
		case it.match:
			next = it.add
		}
		v = append(v, next)
	}
	return v
}

// checkSlot says that the item's pattern is in its slot, and nothing else.
func checkSlot(slot []byte, it item, key uint64) error {
	at := it.off + it.head
	return errors.Join(checkBlank(slot[:it.off]), check(slot[at:][:it.size], key), checkBlank(slot[at+it.size:]))
}

// checkSent compares the completions with the items that asked for one: those of
// a queue pair come in its order.
func (e *end) checkSent(wcs []abi.WC, items []item) error {
	next := make([]int, len(e.qps))
	for _, wc := range wcs {
		q := e.qpOf(wc.QPNum)
		if q < 0 {
			return wrongError{fmt.Errorf("a completion of QP %d, which is not this link's", wc.QPNum)}
		}
		for next[q] < len(items) && (!items[next[q]].signaled || items[next[q]].qp != q) {
			next[q]++
		}
		if wc.Status != rawverbs.WCSuccess {
			return fmt.Errorf("request %d ended with status %d", wc.WRID, wc.Status)
		}
		if wc.WRID != uint64(next[q]) {
			return wrongError{fmt.Errorf("a completion of request %d, not %d", wc.WRID, next[q])}
		}
		next[q]++
	}
	return nil
}

func (e *end) qpOf(num uint32) int {
	for i, q := range e.qps {
		if q.QPN == num {
			return i
		}
	}
	return -1
}

// checkReceived compares completions and data with the items.
func (e *end) checkReceived(op opKind, wcs []abi.WC, items []item) error {
	seen := make([]bool, len(items))
	for n, wc := range wcs {
		if wc.Status != rawverbs.WCSuccess {
			return fmt.Errorf("a receive ended with status %d", wc.Status)
		}
		i := n
		if e.kind == linkSRQ {
			// Two queue pairs share the queue: either may have been first, and
			// either may have ended first.
			i = e.itemIn(wc, items)
		} else if wc.WRID != uint64(n) {
			i = -1
		}
		if i < 0 || seen[i] {
			return wrongError{fmt.Errorf("receive %d of %d: filled %d, with item %d (-1: none)", n, len(items), wc.WRID, i)}
		}
		seen[i] = true
		slot := e.in(int(wc.WRID))
		if err := e.checkArrival(op, wc, items[i], slot); err != nil {
			return wrongError{fmt.Errorf("%v, item %d of %d bytes: %w", op, i, items[i].size, err)}
		}
	}
	return nil
}

// itemIn is the number of the item that a shared queue's receive holds, or -1.
func (e *end) itemIn(wc abi.WC, items []item) int {
	if wc.WRID >= uint64(len(items)) {
		return -1
	}
	key := binary.LittleEndian.Uint64(e.in(int(wc.WRID)))
	return slices.IndexFunc(items, func(it item) bool { return it.key == key })
}

func (e *end) checkArrival(op opKind, wc abi.WC, it item, slot []byte) error {
	opcode := uint32(rawverbs.WCRecv)
	if op == opWriteImm {
		opcode = rawverbs.WCRecvImm
	}
	switch {
	case wc.Opcode != opcode:
		return fmt.Errorf("opcode %d", wc.Opcode)
	case int(wc.ByteLen) != it.room():
		return fmt.Errorf("%d bytes", wc.ByteLen)
	case wc.QPNum != e.qps[it.qp].QPN:
		return fmt.Errorf("at QP %d, not %d", wc.QPNum, e.qps[it.qp].QPN)
	case (wc.WCFlags&rawverbs.WCFlagImm != 0) != (op != opSend):
		return fmt.Errorf("flags %#x", wc.WCFlags)
	case op != opSend && wc.Imm != it.imm:
		return fmt.Errorf("immediate %#x, not %#x", wc.Imm, it.imm)
	case e.kind == linkUD && wc.SrcQP != e.peer.QPN[0]:
		return fmt.Errorf("from QP %d, not %d", wc.SrcQP, e.peer.QPN[0])
	}
	if e.kind == linkSRQ {
		binary.LittleEndian.PutUint64(slot, mix(it.key)) // the pattern's own first word
	}
	return checkSlot(slot, it, it.key)
}

// sges are the item's scatter elements at addr.
func (e *end) sges(addr uint64, it item, n int) []abi.SGE {
	switch {
	case n == 0:
		return nil
	case it.split == 0:
		return []abi.SGE{{Addr: addr, Length: uint32(n), LKey: e.mr.LKey}}
	}
	return []abi.SGE{
		{Addr: addr, Length: uint32(it.split), LKey: e.mr.LKey},
		{Addr: addr + uint64(it.split), Length: uint32(n - it.split), LKey: e.mr.LKey},
	}
}

func (e *end) postRecv(i int, it item) error {
	s := e.sges(rawverbs.AddrOf(e.in(i)[it.off:]), it, it.room())
	if e.kind == linkSRQ {
		return e.c.SRQRecv(e.srq, uint64(i), s...)
	}
	return e.c.Recv(e.qps[0].QPHandle, uint64(i), s...)
}

// postSend posts item i. cell: what an atomic's cell holds before it.
func (e *end) postSend(op opKind, i int, it item, cell uint64) error {
	wr := abi.SendWR{WRID: uint64(i), Imm: it.imm}
	if it.signaled {
		wr.SendFlags = rawverbs.SendSignaled
	}
	local := e.out(i)
	offset := uint64(i*slotLen + it.off)
	switch op {
	case opSend, opSendImm:
		wr.Opcode = rawverbs.OpSend
		if op == opSendImm {
			wr.Opcode = rawverbs.OpSendImm
		}
		if e.kind == linkUD {
			wr = rawverbs.Datagram(wr, e.ah, e.peer.QPN[0], e.peer.QKey)
		}
	case opWrite, opWriteImm:
		wr.Opcode = rawverbs.OpRDMAWrite
		if op == opWriteImm {
			wr.Opcode = rawverbs.OpRDMAWriteImm
		}
		wr.RemoteAddr, wr.CompareAdd = e.peer.In+offset, uint64(e.peer.RKey)
	case opRead:
		wr.Opcode = rawverbs.OpRDMARead
		wr.RemoteAddr, wr.CompareAdd = e.peer.Out+offset, uint64(e.peer.RKey)
		local = e.in(i)
	case opAtomic:
		wr = e.atomic(wr, it, cell)
		local = e.in(i)
	}
	return e.c.Send(e.qps[it.qp].QPHandle, wr, e.sges(rawverbs.AddrOf(local[it.off:]), it, it.size)...)
}
