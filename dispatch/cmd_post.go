package dispatch

import (
	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"golang.org/x/sys/unix"
)

// MaxInlineSum bounds the inline bytes of one POST_SEND, so that a list of
// inline requests cannot make the daemon copy more than a command's own size
// several times over. Above it: ENOMEM.
const MaxInlineSum = 1 << 20

// postBody is a post command taken apart: its head, its WR array and its SGEs.
type postBody struct {
	head abi.PostSend
	wqes []byte
	sges []byte
}

// parsePost follows the iterator of ib_uverbs_post_send and _unmarshall_recv:
// arrays past the input ENOSPC, a remainder that is not zero EOPNOTSUPP, a
// wqe_size below the struct EINVAL, which of receives comes first.
func (c *call) parsePost(p *postBody, wrSize int, receives bool) error {
	const headSize = 24
	copy(bytesOf(&p.head), c.core)
	if receives && p.head.WQESize < uint32(wrSize) {
		return unix.EINVAL
	}
	rest := c.core[headSize:]
	wqes := uint64(p.head.WQESize) * uint64(p.head.WRCount) // 32 bits each: cannot wrap
	sges := uint64(p.head.SGECount) * 16
	if wqes > uint64(len(rest)) || sges > uint64(len(rest))-wqes {
		return unix.ENOSPC
	}
	p.wqes, rest = rest[:wqes], rest[wqes:]
	p.sges, rest = rest[:sges], rest[sges:]
	if err := zeros(rest); err != nil {
		return err
	}
	if p.head.WQESize < uint32(wrSize) {
		return unix.EINVAL
	}
	return nil
}

// takeSGEs appends the next n elements of the command to c.sges.
func (c *call) takeSGEs(p *postBody, n uint32) error {
	if uint64(n)*16 > uint64(len(p.sges)) {
		return unix.EINVAL
	}
	for range n {
		var s abi.SGE
		copy(bytesOf(&s), p.sges)
		p.sges = p.sges[16:]
		c.sges = append(c.sges, hca.SGE{Addr: s.Addr, Length: s.Length, LKey: s.LKey})
	}
	return nil
}

// answerPost writes bad_wr, a 1-based index or 0, together with err.
func (c *call) answerPost(done, asked int, err error) error {
	var out abi.PostResp
	if err != nil && done < asked {
		out.BadWR = uint32(done) + 1
	}
	if e := c.respond(bytesOf(&out)); e != nil {
		return e
	}
	return err
}

func postSend(c *call) error {
	var p postBody
	if err := c.parsePost(&p, sizeOf[abi.SendWR](), false); err != nil {
		return err
	}
	o, err := c.use(kindQP, p.head.QPHandle)
	if err != nil {
		return err
	}
	qp := o.Value.(*qpObject)
	if err := c.decodeSends(&p, qp); err != nil {
		return err
	}
	done, err := qp.hca.PostSend(c.sends)
	if done > 0 {
		c.after = qp.hca
	}
	if qp.mapped.list != nil && len(c.sends) == 0 && err == nil {
		// The doorbell of a mapped queue. That no request was bad is in the result
		// already: a write into the client's memory, which nobody reads, would be the
		// only system call before the answer.
		c.after = qp.hca
		return nil
	}
	return c.answerPost(done, len(c.sends), err)
}

// decodeSends fills c.sends. All or nothing: a WR that cannot be read means
// that none is posted, as in the kernel.
func (c *call) decodeSends(p *postBody, qp *qpObject) error {
	maxInline := uint64(qp.hca.Cap().MaxInline)
	// SGE and inline slices are cut out of scratch that may move as it grows:
	// lengths now, slices below.
	for i := range int(p.head.WRCount) {
		var w abi.SendWR
		copy(bytesOf(&w), p.wqes[i*int(p.head.WQESize):])
		first := len(c.sges)
		if err := c.takeSGEs(p, w.NumSGE); err != nil {
			return err
		}
		s := hca.SendWR{ID: w.WRID, Opcode: hca.SendOpcode(w.Opcode), Flags: hca.SendFlags(w.SendFlags), Imm: w.Imm}
		if err := c.decodeUnion(&s, &w, qp.typ); err != nil {
			return err
		}
		if s.Flags&hca.SendInline != 0 {
			if err := c.readInline(first, maxInline); err != nil {
				return err
			}
		}
		c.sends = append(c.sends, s)
	}
	// Second pass over the same numbers, now that the scratch stands still.
	sges, inline := c.sges, c.inline
	for i := range c.sends {
		var w abi.SendWR
		copy(bytesOf(&w), p.wqes[i*int(p.head.WQESize):])
		mine := sges[:w.NumSGE:w.NumSGE]
		sges = sges[w.NumSGE:]
		if c.sends[i].Flags&hca.SendInline == 0 {
			c.sends[i].SGE = mine
			continue
		}
		n := 0
		for _, s := range mine {
			n += int(s.Length)
		}
		c.sends[i].Inline, inline = inline[:n:n], inline[n:]
	}
	return nil
}

// decodeUnion fills the members that the opcode has (ib_uverbs_post_send).
func (c *call) decodeUnion(s *hca.SendWR, w *abi.SendWR, typ hca.QPType) error {
	if typ == hca.QPTypeUD {
		if s.Opcode != hca.OpSend && s.Opcode != hca.OpSendImm {
			return unix.EINVAL
		}
		// wr.ud: ah, remote_qpn at byte 24, remote_qkey at 32.
		ah, err := c.use(kindAH, uint32(w.RemoteAddr))
		if err != nil {
			return err
		}
		s.AH = ah.Value.(*ahObject).hca
		s.RemoteQPN, s.RemoteQKey = uint32(w.RemoteAddr>>32), uint32(w.CompareAdd)
		return nil
	}
	switch s.Opcode {
	case hca.OpRDMAWrite, hca.OpRDMAWriteImm, hca.OpRDMARead:
		s.RemoteAddr, s.RKey = w.RemoteAddr, uint32(w.CompareAdd)
	case hca.OpAtomicCmpSwap, hca.OpAtomicFetchAdd:
		s.RemoteAddr, s.CompareAdd, s.Swap, s.RKey = w.RemoteAddr, w.CompareAdd, w.Swap, w.RKey
	case hca.OpSend, hca.OpSendImm, hca.OpSendInv:
	default:
		return unix.EINVAL
	}
	return nil
}

// readInline copies what an inline WR points at, in the client's memory: no
// keys are checked and the client may reuse it once the post returns.
func (c *call) readInline(first int, maxInline uint64) error {
	var sum uint64
	for _, s := range c.sges[first:] {
		sum += uint64(s.Length) // at most 2^16 elements of 2^32: no wrap
	}
	if sum > maxInline {
		return unix.EINVAL
	}
	if uint64(len(c.inline))+sum > MaxInlineSum {
		return unix.ENOMEM
	}
	for _, s := range c.sges[first:] {
		at := len(c.inline)
		c.inline = append(c.inline, make([]byte, s.Length)...)
		if err := c.read(c.inline[at:], s.Addr); err != nil {
			return err
		}
	}
	return nil
}

// decodeRecvs fills c.recvs (ib_uverbs_unmarshall_recv).
func (c *call) decodeRecvs(p *postBody) error {
	if err := c.parsePost(p, sizeOf[abi.RecvWR](), true); err != nil {
		return err
	}
	// Two passes: see decodeSends.
	for i := range int(p.head.WRCount) {
		var w abi.RecvWR
		copy(bytesOf(&w), p.wqes[i*int(p.head.WQESize):])
		if err := c.takeSGEs(p, w.NumSGE); err != nil {
			return err
		}
		c.recvs = append(c.recvs, hca.RecvWR{ID: w.WRID})
	}
	sges := c.sges
	for i := range c.recvs {
		var w abi.RecvWR
		copy(bytesOf(&w), p.wqes[i*int(p.head.WQESize):])
		c.recvs[i].SGE, sges = sges[:w.NumSGE:w.NumSGE], sges[w.NumSGE:]
	}
	return nil
}

func postRecv(c *call) error {
	var p postBody
	if err := c.decodeRecvs(&p); err != nil {
		return err
	}
	o, err := c.use(kindQP, p.head.QPHandle)
	if err != nil {
		return err
	}
	qp := o.Value.(*qpObject).hca
	done, err := qp.PostRecv(c.recvs)
	if done > 0 {
		c.after = qp
	}
	return c.answerPost(done, len(c.recvs), err)
}

func postSRQRecv(c *call) error {
	var p postBody
	if err := c.decodeRecvs(&p); err != nil {
		return err
	}
	o, err := c.use(kindSRQ, p.head.QPHandle)
	if err != nil {
		return err
	}
	srq := o.Value.(*srqObject).hca
	done, err := srq.PostRecv(c.recvs)
	if done > 0 {
		c.after = srq
	}
	return c.answerPost(done, len(c.recvs), err)
}
