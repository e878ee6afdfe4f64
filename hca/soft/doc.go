// Package soft is the verbs engine: PD, MR, MW, CQ, SRQ, QP, AH and XRC domain of
// a software HCA, their state machines, the data path between queue pairs of one daemon,
// completions and events.
//
// Who may call it: cmd makes devices with New and closes them; dispatch uses
// them through the interfaces of package hca.
//
// A post copies work requests into a ring. Run executes them on its caller's
// goroutine: whoever takes the queue's token (QP.busy) runs it, anybody else
// returns at once. Payload goes from one client's Memory to the other's in
// chunks, under no lock, because either side can block for ever. A queue pair
// that has to wait (no receive posted, peer not ready, a client with too many
// copies under way) gives up its token and is parked in a list of what it waits
// for; nobody sleeps for it. One that found no receive waits at least as long as
// the responder's min_rnr_timer, as it would on a wire; after that a receive
// wakes it, and no timer ticks for one that waits for ever. Only where receives are
// written to mapped memory, without a word to anybody, does it look again by timer.
//
// Of a queue that the client maps (hca.SendQueue and its kin) the engine takes a
// request or a receive once, into its own ring, and goes on from the copy. A send's
// place is given back when it is completed or flushed, a receive's when it is
// completed or flushed, and one of an SRQ when it is taken (rxe_comp.c do_complete,
// rxe_resp.c do_complete and get_srq_wqe). Receives that come in ERR are flushed when
// the QP's doorbell rings, or it is moved to ERR again; in rxe nothing looks for them.
// Mapped queues are used under the lock that guards their object's state, and never
// once it is closed.
//
// What goes to another host goes as packets over a roce.Link: wire.go says how. For
// listeners, messages within a fabric are made into such packets too: tap.go.
//
// A copy that does not return must not hold up state changes. Every half of a
// queue pair counts epochs. A change that finds a half in use waits for
// stuckWait, then takes the half away: it advances the epoch and flushes what
// was in flight. The stuck runner, when it comes back, sees the epoch and
// touches nothing.
//
// Work for a client other than the poster's own goes to the device's workers
// where it could block the poster for the other's sake; how much of that there can
// be is bounded by context and by party, which is all contexts of one owner
// (party.go).
// Large messages have a lane of their own in the pool, on whatever goroutine they
// are copied: one less than there are processors at a time, so that small ones, and
// all other commands, find a processor whatever others send.
//
// Lock order, outermost first; a QP never holds its own locks while it takes
// another QP's:
//
//	QP.s.mu (requester half, attributes)
//	QP.r.mu (responder half, receive queue)
//	SRQ.mu
//	CQ.mu
//	MW.mu
//	leaves: windowList.mu, waitList.mu, events.mu, pool.mu, mrTable.mu, numTable.mu,
//	        Device.mu, wirePort.mu, loop.Fabric's
//
// MW.mu is taken with none of the others held.
//
// Packets are handed to the link under no lock.
//
// Callbacks (hca.CQHandler and its kin, hca.Waiter) run under none of them. A CQ's
// moderation timer takes CQ.mu alone, and makes its callback after it.
package soft

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// chunkSize is how much is copied per step: so much that the system calls for
	// it cost little beside it (BenchmarkTwoProcesses of cmd/uverbsd), and half of
	// a second-level cache.
	chunkSize = 512 << 10
	// smallSize is what a runner's own buffer holds; it is also the largest
	// MTU, so that every datagram fits.
	smallSize = 4096
	// runBatchWRs and runBatchBytes bound what one Run does on its caller's
	// goroutine before it hands the queue to a worker.
	runBatchWRs   = 64
	runBatchBytes = 4 << 20
	// postBatchBytes is runBatchBytes for small messages on a poster's goroutine:
	// of these there can be many at once.
	postBatchBytes = 256 << 10
	// stuckWait is how long a close or a state change waits for a running copy
	// before it goes on without it.
	stuckWait = 50 * time.Millisecond
	// touchLimit and partyTouchLimit bound the accesses under way to the memory of
	// one context, and of one party, and so the goroutines (threads) that blocking
	// memory can hold, but for those that began together.
	touchLimit      = 16
	partyTouchLimit = 32
	// awayLimit bounds the goroutines of one context's posts that may be in
	// another context's memory, partyAwayLimit those of all of a party's in other
	// parties': they are what answers commands (of a file at most 8 at a time, of
	// a user 32: package cuse). What goes beyond is done by workers.
	awayLimit      = 3
	partyAwayLimit = 8
	// guestLimit bounds the goroutines of other parties' posts that may be in one
	// party's memory.
	guestLimit = 8
	// bulkMin is the payload in bytes from which a message goes through the lane
	// for large ones: its copy takes longer than a command does. From inlineMax on
	// workers alone do it, who can pause.
	bulkMin   = 128 << 10
	inlineMax = 4 << 20
	// turnBytes is after how much of one message others get their turn.
	turnBytes = 4 << 20
	// maxStuck bounds each lane with those that are stuck: far from the 10,000
	// threads at which the Go runtime gives up.
	maxStuck = 1024
	// watchTick is how long a worker may rest in one chunk before it counts as
	// stuck, while others wait for its place. One chunk takes some
	// milliseconds on the slowest machines.
	watchTick = 50 * time.Millisecond
	// idleWorkers stay when there is nothing to do.
	idleWorkers = 2
	// inboundMax bounds the datagrams queued at one UD queue pair; more are
	// dropped, as a port drops when its buffers are full.
	inboundMax = 128
	// sendAhead is how many requests of a mapped send queue are taken at a time, from
	// which on their memory is not looked at any more: a few, so that the queue's lock
	// is not held for long and an idle QP has no second queue of its own.
	sendAhead = 16
	// rnrLookMin, rnrLookMax and rnrLookShare say when a sender without end of its
	// retries looks again for a receive that comes without a doorbell: after the responder's min_rnr_timer or
	// this share of the time it has waited so far, whichever is longer, within the two
	// bounds. A look takes some microseconds of a processor, so that one sender costs
	// a few per cent of one at first and some hundredths of that in the end, and a
	// receive is found at the latest an eighth later than it would have been.
	rnrLookMin   = 100 * time.Microsecond
	rnrLookMax   = 100 * time.Millisecond
	rnrLookShare = 8
	// initialRing is the entries a ring starts with; it doubles on demand up to
	// what was asked for, so that idle queues cost little.
	initialRing = 16

	// maxXRCD bounds the XRC domains; no attribute of the device tells it.
	maxXRCD = 65536

	// maxSGE and maxInline are the engine's own limits: they size arrays in exec.
	maxSGE    = 32
	maxInline = 512
	// maxMsg is the largest message, 2^31 bytes (IBTA 1.4 §9.7.7).
	maxMsg = 1 << 31
	// grhSize is the room in front of a datagram's payload (IBTA 1.4 §11.4.1.2).
	grhSize = 40
	// atomicSize is the bytes that an atomic works on and answers (IBTA 1.4 §9.4.5).
	atomicSize = 8
)

const (
	einval     = unix.EINVAL
	enodata    = unix.ENODATA
	enomem     = unix.ENOMEM
	eopnotsupp = unix.EOPNOTSUPP
)
