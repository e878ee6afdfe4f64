// Package hca is the contract between the uverbs dispatcher and a device: the
// kernel's struct ib_device (include/rdma/ib_verbs.h) in Go terms, and the
// registry of the devices that exist.
//
// Who may call it: dispatch calls the methods below for its clients; hca/soft
// and later drivers implement them; cmd registers devices, and it and
// udev/sysfs are told of them. hca imports nothing of ours.
//
// The rules are those of the kernel's Documentation/infiniband/core_locking:
//
//   - CreateAH, PostSend, PostRecv, Poll, ReqNotify and their kin never sleep:
//     no wait, no I/O, no client memory touched, no lock held across either. All
//     other methods may sleep.
//   - Every method is fully reentrant; the driver synchronises.
//   - Callbacks (Notifier) never run from inside a verb's own call chain and
//     never twice at a time for one CQ. They must not block.
//   - What a post leaves to do (moving payloads, completing) is done by Run,
//     which the poster calls after it has answered its client (DESIGN.md
//     section 4): Run may sleep in a client's memory, and does so under no lock.
//   - A device stays usable until Registry.Unregister returns. An object that a
//     command held which was stuck in its client's memory may outlive it: its
//     methods must go on to return, and its Close to free it.
//
// Use counts (a PD that is in use cannot go) are kept by the caller, as the
// kernel keeps them in ib_core (verbs.c), not by drivers. A driver may rely on
// never being asked to destroy an object that another living object uses.
package hca

// Memory is the address space of the process that registered a region.
// Implementations are bound to the address space, not to the process: after
// exec or exit both methods fail and touch nothing. Both may block for ever
// (userfaultfd, a FUSE mapping): call them under no lock.
type Memory interface {
	// ReadAt fills p from addr, whole or not at all useful: any error means
	// that nothing in p may be used.
	ReadAt(p []byte, addr uint64) error
	// WriteAt stores p at addr; on error a prefix may have been written.
	WriteAt(p []byte, addr uint64) error
}

// Device is one HCA. Methods that create return a driver error that wraps the
// unix.Errno the kernel's driver would return.
type Device interface {
	// Ops says which optional methods work; commands that need another answer
	// EOPNOTSUPP (uverbs_uapi.c, uapi_compute_bundle_size's siblings).
	Ops() OpSet
	// Attr is query_device; constant over the device's life.
	Attr() *DeviceAttr
	// Port is query_port, from live state; port counts from 1. EINVAL if there
	// is no such port.
	Port(port uint8) (PortAttr, error)
	// GID is query_gid; EINVAL for an index outside Attr.GIDTableLen.
	GID(port uint8, index int) (GID, error)
	// PKey is query_pkey.
	PKey(port uint8, index int) (uint16, error)
	// Counters are the port's counters by their sysfs name
	// (ports/P/counters/NAME), port_xmit_data and port_rcv_data in 4-byte words.
	Counters(port uint8) (map[string]uint64, error)
	// AllocUContext is alloc_ucontext. If n is an Owner too, contexts of one owner
	// are bounded together in what they can take from others.
	AllocUContext(n Notifier) (UContext, error)
	// AllocXRCD is alloc_xrcd (OpXRC): of the device, since several contexts
	// share a domain.
	AllocXRCD() (XRCD, error)
}

// XRCD is an XRC domain (IBTA 1.4 §10.2.7).
type XRCD interface {
	// CreateQP makes an XRC target QP, which has neither PD nor CQs nor queues:
	// of init only Type and Handler count.
	CreateQP(QPInit) (QP, error)
	Close() error
}

// Notifier takes the unaffiliated events of a device for one context.
type Notifier interface {
	PortEvent(ev EventType, port uint8)
}

// Owner says whom a context belongs to, by something comparable: its user.
type Owner interface{ Owner() any }

// UContext is what one open file may create without a PD.
type UContext interface {
	AllocPD() (PD, error)
	CreateCQ(CQInit) (CQ, error)
	// Close is dealloc_ucontext; everything made through it is gone by then.
	Close() error
}

// PD is a protection domain. All objects below belong to exactly one.
type PD interface {
	RegMR(MRInit) (MR, error)
	// CreateAH checks the address as ib_core and the driver do: EINVAL, or ENODATA
	// for an empty place in the GID table. On Ethernet it must be global (EINVAL), and
	// source and destination of one family. The same holds of the addresses in
	// QP.Modify.
	CreateAH(AHAttr) (AH, error)
	CreateQP(QPInit) (QP, error)
	CreateSRQ(SRQInit) (SRQ, error)
	// AllocMW is alloc_mw (OpMW): a window that is bound to nothing.
	AllocMW(MWType) (MW, error)
	Close() error
}

// MRInit describes a region whose range and permissions the caller has already
// checked and charged, unless Access has AccessOnDemand: the bytes of such a
// region may not be there yet, or never be.
type MRInit struct {
	Mem    Memory
	Start  uint64 // the client's address of byte 0
	Length uint64 // bytes
	IOVA   uint64 // the address that work requests use for byte 0
	Access Access
	// Atomics are atomic to each other wherever they come from (IB_ATOMIC_HCA).
	// Space is comparable and names the address space, by however many Memories it
	// is reached; nil: Mem's own. Shared are the pieces of the range that other
	// clients may have too, under addresses of their own; they count for a region
	// with AccessRemoteAtomic only. SharedAt stands in for them in a region on demand,
	// whose bytes come and go: it says what is at one address now, by its Key, nil if
	// that is not shared. It may sleep, and is called under no lock.
	Space    any
	Shared   []SharedPiece
	SharedAt func(addr uint64) any
}

// SharedPiece is memory that is the same for all who name it by Key, which is
// comparable.
type SharedPiece struct {
	Start, End uint64 // the client's addresses
	Key        any
}

// MR is a memory region. Its keys, and those of windows, cannot be told from other
// keys of the device, and none is 0.
type MR interface {
	LKey() uint32
	RKey() uint32
	// Close invalidates both keys and waits until no copy through them is
	// running or will start. A copy stuck in the client's memory is not waited
	// for: it is marked, and finishes without effect on the daemon. EINVAL, and
	// nothing has changed, while a window is bound to the region (IBTA 1.4
	// §10.6.7.2.6, rxe_dereg_mr).
	Close() error
	// Rereg is rereg_user_mr (OpReregMR): it changes what in.Flags names and
	// returns the region that has taken this one's place, under the same keys;
	// this one is then closed, in every sense of Close: a request that has looked
	// the key up before and not yet copied fails. On error nothing has changed.
	// EINVAL while a window is bound to it, for what the window was checked
	// against would go; the kernel's rxe does not look.
	// The caller has checked and charged a new range as for RegMR.
	Rereg(in MRRereg) (MR, error)
}

// MRRereg says what Rereg changes.
type MRRereg struct {
	Flags  ReregFlags
	PD     PD     // ReregPD
	Mem    Memory // ReregTrans, with the three below; as in MRInit
	Start  uint64
	Length uint64
	IOVA   uint64
	Access Access // ReregAccess
	// ReregTrans and ReregAccess; as in MRInit
	Shared   []SharedPiece
	SharedAt func(addr uint64) any
}

// MW is a memory window (IBTA 1.4 §10.6.7.2): a part of a region, with rights of
// its own, that OpBindMW opens and closes in the order of a send queue. A device
// that has OpMW takes OpBindMW and OpLocalInv on RC, UC and XRC initiators. Its
// key is never a local key.
//
// Type 1: bound and bound anew at will, unbound with length 0, by any QP of its
// PD, and reached through every QP of its PD. Type 2, as the kernel's rxe has it
// (2B): bound only while it is free, then reached and invalidated (OpLocalInv, a
// peer's OpSendInv) only through the QP that bound it, and free again when that QP
// is closed.
//
// Window, region and QP are of one PD; the region has AccessMWBind, and
// AccessLocalWrite if the window is for writing or atomics; only type 2 may be
// zero based. A bind that is refused completes with WCMWBindErr, an invalidation
// at home with WCLocQPOpErr; nothing has changed then. When one that ends a
// binding completes, no copy through that binding is running or will start, in the
// sense of MR.Close.
type MW interface {
	// RKey is the key now: as allocated, with the low 8 bits of the last bind.
	// Nothing is reached by it while the window is not bound.
	RKey() uint32
	// Close unbinds the window.
	Close() error
}

// AHAttr is struct ib_uverbs_ah_attr / rdma_ah_attr. Over Ethernet only Port and what
// belongs to the GRH say anything.
type AHAttr struct {
	DLID         uint16
	SL           uint8
	SrcPathBits  uint8
	StaticRate   uint8
	IsGlobal     bool
	Port         uint8
	DGID         GID
	FlowLabel    uint32
	SGIDIndex    uint8
	HopLimit     uint8
	TrafficClass uint8
}

// AH is an address handle. Create and Close never sleep.
type AH interface {
	// Attr is the address as the device uses it: over Ethernet without LID, SL and
	// rate, and with the route's hop limit.
	Attr() AHAttr
	Close() error
}

// CQHandler takes a CQ's events. Completion is called at most once per
// ReqNotify, never concurrently for one CQ, never from inside a verb.
type CQHandler interface {
	Completion()
	CQEvent(EventType)
}

// CQInit is create_cq.
type CQInit struct {
	Entries int // at least this many; 1 … DeviceAttr.MaxCQE, checked by the driver (EINVAL)
	Vector  int
	Handler CQHandler
	// Queue takes the completions, and the client itself takes them out of it:
	// Poll and Await find nothing. nil: the device's own.
	Queue CompQueue
}

// CQ is a completion queue. Poll and ReqNotify never sleep.
type CQ interface {
	Entries() int
	// Poll moves up to len(wc) completions into wc.
	Poll(wc []WC) int
	// ReqNotify arms the handler. With ReportMissed it returns true when
	// completions are already there (IB_CQ_REPORT_MISSED_EVENTS).
	ReqNotify(f NotifyFlags) bool
	// Await is for a poll that found nothing: it arms w to be called once, as
	// soon as a completion is there, from whoever made it, under no lock of the
	// driver and after the driver has done all else. False (and w is not armed) when a completion is there already or
	// another waiter is armed. Cancel takes it back: true if w will not be
	// called any more.
	Await(w Waiter) bool
	Cancel(w Waiter) bool
	// Resize is OpResizeCQ; EINVAL if more are queued. to takes a mapped queue's
	// place, with what is queued, and is nil of any other; the old one is the
	// caller's again, on error to is.
	Resize(entries int, to CompQueue) error
	// Modify is modify_cq (OpModifyCQ): an armed handler is called when count
	// completions that it was armed for have come or period microseconds have
	// passed since the first of them, whichever is earlier, and when the queue is
	// full. 0 is no bound of its kind; 0 and 0, or count 1, is at once. Await is
	// not held back.
	Modify(count, period uint16) error
	Close() error
}

// Waiter is woken by a CQ; implemented by a pointer so that arming allocates
// nothing. linger says that its goroutine has nothing else to do for anybody, so
// that Wake may take its time; otherwise it must not block.
type Waiter interface{ Wake(linger bool) }

// SRQHandler takes a shared receive queue's events.
type SRQHandler interface{ SRQEvent(EventType) }

// SRQInit is create_srq.
type SRQInit struct {
	MaxWR, MaxSGE, Limit uint32
	Handler              SRQHandler
	// XRCD and CQ are set for an XRC SRQ (OpXRC): completions of what it
	// receives go to CQ, and its PD is that of the requests that name it. Both
	// nil: a plain one. No QP holds an XRC SRQ: Close may come while requests to
	// it are under way, and waits for them as QP.Close does.
	XRCD XRCD
	CQ   CQ
	// RQ is where the client writes receives, for PostRecv takes none; nil: the
	// device's own.
	RQ RecvQueue
}

// SRQAttr is struct ib_srq_attr.
type SRQAttr struct{ MaxWR, MaxSGE, Limit uint32 }

// SRQAttrMask selects what ModifySRQ changes (enum ib_srq_attr_mask).
type SRQAttrMask uint32

// Bits of SRQAttrMask.
const (
	SRQMaxWR SRQAttrMask = 1 << 0
	SRQLimit SRQAttrMask = 1 << 1
)

// SRQ is a shared receive queue.
type SRQ interface {
	// Num is an XRC SRQ's number, 24 bits, by which senders name it; 0 of a plain
	// SRQ.
	Num() uint32
	// Attr reports the actual sizes; Limit is 0 once it has fired.
	Attr() SRQAttr
	// to takes a mapped queue's place where m has SRQMaxWR, as in CQ.Resize; else it
	// is nil.
	Modify(a SRQAttr, m SRQAttrMask, to RecvQueue) error
	// PostRecv queues wrs in order and returns how many were taken; err says
	// why the next one was not (ENOMEM queue full, EINVAL too many SGEs).
	PostRecv(wrs []RecvWR) (int, error)
	// Run continues senders that waited for a receive. See QP.Run.
	Run()
	Close() error
}

// QPHandler takes a QP's asynchronous events.
type QPHandler interface{ QPEvent(EventType) }

// QPInit is create_qp.
type QPInit struct {
	Type           QPType
	SendCQ, RecvCQ CQ  // RecvCQ is nil for QPTypeXRCIni
	SRQ            SRQ // nil: own receive queue
	Cap            QPCap
	SigAll         bool
	Handler        QPHandler
	// SQ and RQ are where the client writes its requests; nil: the device's own.
	// There is no RQ beside an SRQ. The sizes of a mapped queue count instead of
	// Cap's, but for MaxRecvSGE.
	SQ SendQueue
	RQ RecvQueue
}

// QPCap is struct ib_qp_cap; the driver returns what it really gave, at least
// what was asked.
type QPCap struct {
	MaxSendWR, MaxRecvWR, MaxSendSGE, MaxRecvSGE, MaxInline uint32
}

// QP is a queue pair. PostSend and PostRecv never sleep.
type QP interface {
	Num() uint32
	Cap() QPCap
	// Modify checks the transition (IBTA 1.4 table 91-ish, ib_modify_qp_is_ok
	// in verbs.c) and changes what m names; on error nothing has changed.
	Modify(a *QPAttr, m QPAttrMask) error
	// Query fills everything it knows.
	Query() (QPAttr, QPInit)
	// PostSend copies wrs into the send queue, in order, and returns how many
	// were taken; err says why the next one was not: EINVAL (state RESET, INIT
	// or RTR; opcode; SGE count), ENOMEM (queue full). In SQE or ERR they are
	// taken and flushed. It moves no payload: the caller calls Run after it has
	// answered its client. Nothing of wrs is kept.
	//
	// With a mapped send queue it is the doorbell, wrs is not looked at (rxe_post_send
	// of a user's QP), and what is no request completes with WCLocQPOpErr in its turn.
	// PostRecv takes nothing where receives are mapped: EINVAL.
	PostSend(wrs []SendWR) (int, error)
	PostRecv(wrs []RecvWR) (int, error)
	// Run does what is queued on this QP and what its new receives allow its
	// peers to do: it is called on the goroutine that posted, after the answer.
	// One holder at a time runs a QP's send queue; a second caller hands its
	// work to the first and returns. May sleep in a client's memory.
	Run()
	// AttachMcast and DetachMcast are OpMcast. Duplicate attach: nil. Unknown
	// detach: EINVAL. On Ethernet nobody looks at lid.
	AttachMcast(gid GID, lid uint16) error
	DetachMcast(gid GID, lid uint16) error
	// Close is destroy_qp. When it returns the QP completes nothing more, and the
	// windows of type 2 that it has bound are free.
	Close() error
}
