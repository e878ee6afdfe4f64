package hca

// What a provider whose library maps its queues adds to the contract. Such a
// queue lies in memory that a client and the daemon share. The client writes into
// it at any time whatever it likes: every implementation keeps the sizes and its
// own index to itself, masks what it reads, copies an entry once, and looks at
// the copy only. What the client makes of the other index decides how many entries
// there are to it, never which memory is touched.
//
// Whoever gives a queue to a device (CQInit, QPInit, SRQInit, Resize, Modify) closes
// it after the object's Close, or the call that took it out, has returned: nothing of
// the device touches it from then on, not even a runner that was stuck in a client's
// memory and comes back later. A device therefore looks under its own lock whether
// the object is closed before each call.

// Mapper is a Provider whose library maps its queues (MapsQueues is true).
type Mapper interface {
	Provider
	// NewQueues begins a context whose queues lie in a.
	NewQueues(a Arena) Queues
}

// Arena is memory that one client's context and the daemon share. Its size is the
// daemon's alone to change, so that an access to what was given never faults. Commands
// of one client use it at the same time.
type Arena interface {
	// Alloc gives n bytes, rounded up to whole pages, all 0, and the offset at
	// which the client maps them; ENOMEM over a bound. Free takes them back: the
	// caller does not touch them any more. Both may sleep.
	Alloc(n int) (mem []byte, offset uint64, err error)
	Free(offset uint64)
}

// MapInfo is what the client passes to mmap(): bytes, a multiple of the page size.
type MapInfo struct {
	Offset uint64
	Size   uint32
}

// Queues are the queues of one context, in the provider's layout. All methods may
// sleep but AH's, and may be called by several at a time; the caller has checked the
// sizes against the device's limits.
type Queues interface {
	// NewCompQueue has room for at least entries completions.
	NewCompQueue(entries int) (CompQueue, error)
	// NewSendQueue has room for at least what c asks, NewRecvQueue for at least
	// maxWR receives of maxSGE pieces.
	NewSendQueue(c QPCap) (SendQueue, error)
	NewRecvQueue(maxWR, maxSGE uint32) (RecvQueue, error)
	// AddAH gives an address handle a number that send requests name it by; never
	// 0. RemoveAH takes it back. Requests that were not taken by then fail.
	AddAH(AH) (num uint32, err error)
	RemoveAH(num uint32)
	// The driver's part of the answers to create_cq and resize_cq, create_qp
	// (a nil queue is one that the QP does not have), create_srq and create_ah;
	// and what modify_srq writes where the client asks for it.
	CQAnswer(q CompQueue) []byte
	QPAnswer(rq RecvQueue, sq SendQueue) []byte
	SRQAnswer(rq RecvQueue, num uint32) []byte
	AHAnswer(num uint32) []byte
	SRQResizeAnswer(rq RecvQueue) []byte
}

// Mapped is what all mapped queues have.
type Mapped interface {
	Info() MapInfo
	// Len is the entries that fit at a time.
	Len() int
	// Close gives the memory back; nobody uses the queue any more.
	Close()
}

// CompQueue is a mapped completion queue. The device calls it under the CQ's lock;
// nothing sleeps.
type CompQueue interface {
	Mapped
	// Push writes a completion; false when the client has taken too few out.
	Push(wc *WC, solicited bool) bool
	// Queued is how many the client has not taken out, as far as it says.
	Queued() int
	// MoveTo makes to the queue: what is queued is copied. False, and nothing has
	// happened, if that is more than it has room for, or to is of another kind.
	MoveTo(to CompQueue) bool
}

// SendQueue is a mapped send queue. The device calls it under the QP's lock;
// nothing sleeps.
type SendQueue interface {
	Mapped
	// Cap is what the queue really has: MaxSendWR, MaxSendSGE, MaxInline.
	Cap() QPCap
	// Next copies the next request that was not taken yet into w, whose SGE and
	// Inline are within the arrays that the caller gave them (capacity), and says
	// whether there was one. What is no request (an opcode or address handle that
	// does not exist, too many pieces) is returned with Opcode OpInvalid: it is
	// to fail in its turn.
	//
	// At most Len requests are taken and not done with at any time, whatever the
	// client says.
	Next(w *SendWR) bool
	// Done tells the client that the n oldest requests taken are done with: their
	// places are its again. It comes before their completions.
	Done(n int)
	// Reset empties the queue, for a QP in RESET.
	Reset()
}

// RecvQueue is a mapped receive queue, of a QP or an SRQ; see SendQueue.
type RecvQueue interface {
	Mapped
	// Next is SendQueue's. bad says that it is no receive (it has more pieces than
	// there may be): it has an ID only, and is to fail in its turn.
	Next(w *RecvWR) (ok, bad bool)
	Done(n int)
	// Queued is how many are not done with, as far as the client says.
	Queued() int
	Reset()
	// MoveTo is CompQueue's; what was taken and is not done with moves too, and
	// remains taken.
	MoveTo(to RecvQueue) bool
}
