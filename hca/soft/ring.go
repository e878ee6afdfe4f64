package soft

import "github.com/uverbsd/uverbsd/hca"

// recvSlot is a posted receive; its SGEs lie in the ring's sges.
type recvSlot struct {
	id    uint64
	total uint64 // sum of the SGEs' lengths
	nsge  int
	bad   bool // no receive: it fails the message that takes it
}

// recvRing is a receive queue's storage. Its owner's lock guards it. It starts
// small and doubles up to max. In front of a mapped queue it holds the one receive
// that was looked at and not taken yet.
type recvRing struct {
	queue       hca.RecvQueue // nil: not mapped
	in          hca.RecvWR    // what queue.Next fills
	slots       []recvSlot
	sges        []hca.SGE // stride per slot
	stride, max int
	head, count int
}

func (r *recvRing) init(maxWR, stride int, queue hca.RecvQueue) {
	r.max, r.stride, r.queue = maxWR, stride, queue
	if queue != nil {
		maxWR = 1
	}
	r.resize(min(maxWR, initialRing))
}

// resize moves what is queued to storage for n entries; n is at least count.
func (r *recvRing) resize(n int) {
	slots, sges := make([]recvSlot, n), make([]hca.SGE, n*r.stride)
	for i := range r.count {
		j := (r.head + i) % len(r.slots)
		slots[i] = r.slots[j]
		copy(sges[i*r.stride:(i+1)*r.stride], r.sges[j*r.stride:])
	}
	r.slots, r.sges, r.head = slots, sges, 0
}

// fill looks for a receive in the mapped queue; false if there is none.
func (r *recvRing) fill() bool {
	if r.queue == nil {
		return false
	}
	r.in.SGE = r.sges[:0:r.stride]
	ok, bad := r.queue.Next(&r.in)
	if !ok {
		return false
	}
	s := &r.slots[0]
	*s = recvSlot{id: r.in.ID, nsge: len(r.in.SGE), bad: bad}
	for k := range r.in.SGE {
		s.total += uint64(r.in.SGE[k].Length)
	}
	if bad {
		s.nsge, s.total = 0, 1<<64-1 // never too small: the message is to meet it
	}
	r.head, r.count = 0, 1
	return true
}

// posted is how many receives there are, in a mapped queue as far as its client
// says, and with the one that is being filled.
func (r *recvRing) posted() int {
	if r.queue != nil {
		return r.queue.Queued()
	}
	return r.count
}

// most is more than posted can be.
func (r *recvRing) most() int {
	if r.queue != nil {
		return r.queue.Len() + 1
	}
	return r.count
}

// done gives the place of the oldest receive that was popped back to the client.
func (r *recvRing) done() {
	if r.queue != nil {
		r.queue.Done(1)
	}
}

// push queues a receive; false if the ring is full.
func (r *recvRing) push(w *hca.RecvWR) bool {
	if r.count == len(r.slots) {
		if r.count >= r.max {
			return false
		}
		r.resize(min(max(2*r.count, initialRing), r.max))
	}
	i := r.head + r.count
	if i >= len(r.slots) {
		i -= len(r.slots)
	}
	s := &r.slots[i]
	*s = recvSlot{id: w.ID, nsge: len(w.SGE)}
	for k := range w.SGE {
		s.total += uint64(w.SGE[k].Length)
	}
	copy(r.sges[i*r.stride:], w.SGE)
	r.count++
	return true
}

// peek is the oldest receive, nil if there is none.
func (r *recvRing) peek() *recvSlot {
	if r.count == 0 && !r.fill() {
		return nil
	}
	return &r.slots[r.head]
}

// pop takes the oldest receive and copies its SGEs to dst.
func (r *recvRing) pop(dst []hca.SGE) recvSlot {
	s := r.slots[r.head]
	copy(dst, r.sges[r.head*r.stride:r.head*r.stride+s.nsge])
	r.drop()
	return s
}

// drop removes the oldest receive.
func (r *recvRing) drop() {
	r.head++
	if r.head == len(r.slots) {
		r.head = 0
	}
	r.count--
}

func (r *recvRing) reset() {
	r.head, r.count = 0, 0
	if r.queue != nil {
		r.queue.Reset()
	}
}

// sendSlot is a posted send; its SGEs and inline bytes lie in the ring's.
type sendSlot struct {
	id         uint64
	op         hca.SendOpcode
	flags      hca.SendFlags
	imm        uint32
	nsge       int
	ninline    int
	total      uint64 // bytes of payload, if the SGEs hold
	remoteAddr uint64
	rkey       uint32
	compareAdd uint64
	swap       uint64
	ah         *AH
	qpn        uint32
	qkey       uint32
	srqn       uint32

	compareAddMask, swapMask uint64
}

// setBind and bind keep a bind request in members that it does not need, so that
// a slot stays within what a send is charged for.
func (s *sendSlot) setBind(b *hca.Bind) {
	s.qpn, s.qkey, s.rkey, s.srqn = b.MW, b.MR, b.RKey, uint32(b.Access)
	s.remoteAddr, s.compareAdd = b.Addr, b.Length
}

// setFlush and flush do the same with a flush.
func (s *sendSlot) setFlush(f *hca.Flush) {
	s.compareAdd, s.qpn, s.qkey = uint64(f.Length), uint32(f.Type), uint32(f.Level)
}

func (s *sendSlot) flush() hca.Flush {
	return hca.Flush{Length: uint32(s.compareAdd), Type: uint8(s.qpn), Level: uint8(s.qkey)}
}

func (s *sendSlot) bind() hca.Bind {
	return hca.Bind{MW: s.qpn, MR: s.qkey, RKey: s.rkey, Access: hca.Access(s.srqn), Addr: s.remoteAddr, Length: s.compareAdd}
}

// sendRing is a send queue's storage; like recvRing. In front of a mapped queue it
// holds the requests that were taken, at most sendAhead.
type sendRing struct {
	queue           hca.SendQueue // nil: not mapped
	in              hca.SendWR    // what queue.Next fills
	slots           []sendSlot
	sges            []hca.SGE
	inline          []byte
	stride, istride int
	max             int
	head, count     int
}

func (r *sendRing) init(maxWR, stride, istride int, queue hca.SendQueue) {
	r.max, r.stride, r.istride, r.queue = maxWR, stride, istride, queue
	if queue != nil {
		r.max = min(maxWR, sendAhead)
	}
	r.resize(min(r.max, initialRing))
}

// next takes the next request from the mapped queue into r.in, with the storage of
// the slot that push will give it; false if there is none or no room.
func (r *sendRing) next() bool {
	if r.queue == nil || r.count == r.max {
		return false
	}
	if r.count == len(r.slots) {
		r.resize(min(max(2*r.count, initialRing), r.max))
	}
	i := r.head + r.count
	if i >= len(r.slots) {
		i -= len(r.slots)
	}
	r.in = hca.SendWR{
		SGE:    r.sges[i*r.stride : i*r.stride : (i+1)*r.stride],
		Inline: r.inline[i*r.istride : i*r.istride : (i+1)*r.istride],
	}
	return r.queue.Next(&r.in)
}

func (r *sendRing) resize(n int) {
	slots, sges, inline := make([]sendSlot, n), make([]hca.SGE, n*r.stride), make([]byte, n*r.istride)
	for i := range r.count {
		j := (r.head + i) % len(r.slots)
		slots[i] = r.slots[j]
		copy(sges[i*r.stride:(i+1)*r.stride], r.sges[j*r.stride:])
		copy(inline[i*r.istride:(i+1)*r.istride], r.inline[j*r.istride:])
	}
	r.slots, r.sges, r.inline, r.head = slots, sges, inline, 0
}

// push queues a send that was checked; false if the ring is full.
func (r *sendRing) push(w *hca.SendWR, ah *AH) bool {
	if r.count == len(r.slots) {
		if r.count >= r.max {
			return false
		}
		r.resize(min(max(2*r.count, initialRing), r.max))
	}
	i := r.head + r.count
	if i >= len(r.slots) {
		i -= len(r.slots)
	}
	r.slots[i] = sendSlot{
		id: w.ID, op: w.Opcode, flags: w.Flags, imm: w.Imm,
		nsge: len(w.SGE), ninline: len(w.Inline),
		remoteAddr: w.RemoteAddr, rkey: w.RKey, compareAdd: w.CompareAdd, swap: w.Swap,
		ah: ah, qpn: w.RemoteQPN, qkey: w.RemoteQKey, srqn: w.RemoteSRQN,
		compareAddMask: w.CompareAddMask, swapMask: w.SwapMask,
	}
	switch w.Opcode {
	case hca.OpBindMW:
		r.slots[i].setBind(&w.Bind)
	case hca.OpFlush:
		r.slots[i].setFlush(&w.Flush)
	}
	for k := range w.SGE {
		r.slots[i].total += uint64(w.SGE[k].Length)
	}
	copy(r.sges[i*r.stride:], w.SGE)
	copy(r.inline[i*r.istride:], w.Inline)
	r.count++
	return true
}

// front is the oldest send with its SGEs and inline bytes; count must not be 0.
func (r *sendRing) front() (*sendSlot, []hca.SGE, []byte) {
	s := &r.slots[r.head]
	return s, r.sges[r.head*r.stride:][:s.nsge], r.inline[r.head*r.istride:][:s.ninline]
}

// drop removes the oldest send, and gives its place back to the client.
func (r *sendRing) drop() {
	r.slots[r.head].ah = nil
	r.head++
	if r.head == len(r.slots) {
		r.head = 0
	}
	r.count--
	if r.queue != nil {
		r.queue.Done(1)
	}
}

func (r *sendRing) reset() {
	r.head, r.count = 0, 0
	if r.queue != nil {
		r.queue.Reset()
	}
}

// entry is the i-th send after the oldest, like front; at is its slot alone. i is
// below count.
func (r *sendRing) entry(i int) (*sendSlot, []hca.SGE, []byte) {
	i += r.head
	if i >= len(r.slots) {
		i -= len(r.slots)
	}
	s := &r.slots[i]
	return s, r.sges[i*r.stride:][:s.nsge], r.inline[i*r.istride:][:s.ninline]
}

func (r *sendRing) at(i int) *sendSlot {
	s, _, _ := r.entry(i)
	return s
}
