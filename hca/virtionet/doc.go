// Package virtionet drives a virtio network device over modern PCI from user space
// (Virtual I/O Device Version 1.2, OASIS committee specification 01: sections 2.7
// split virtqueues, 4.1 PCI, 5.1 network device; "§" below is a section of it). It
// gives hca/nic.Port on hca/nic.Function: one queue pair, no offload, whole frames.
//
// Who may call it: cmd opens ports, roce/ether uses them.
//
// Nothing that the device writes is trusted: identifiers and lengths of used
// buffers are checked against what this side has given out, and one that is
// wrong ends the port with ErrGone, since nobody knows then which buffer is whose.
// Every wait for the device is bounded.
//
// Receive: buffer i always stands behind descriptor i, so that a buffer goes back to
// the device with one entry of the available ring. Frames are lent out of
// these buffers; ReleaseFrame takes no lock that a receiver holds: it pushes the
// buffer on a stack, and whoever holds or gets the queue posts it. Of the goroutines
// in Recv that found nothing one leads: it looks a while if frames come fast, asks
// for an interrupt and sleeps; it gives the lead on when it goes.
//
// Send copies frames into the slots of the transmit descriptors, outside the lock,
// and takes slots back when it needs them; there are no transmit interrupts.
//
// One goroutine (watch) waits for changes of the configuration, and looks every
// healthTick whether the device still answers; another waits for the Function to be
// asked back. A function with one interrupt only has watch wait for it, and pass it on
// to the receivers.
//
// Locks: rxQueue.mu, txQueue.mu, ctrlQueue.mu and Port.watchMu, never two together.
// Port.end is without. A queue's DMA memory and doorbell are reached only under its
// mu and while it is not shut (but for transmit slots, see txQueue.copying), so that
// Close knows when nobody does any more.
package virtionet

import "time"

const (
	// defaultEntries is the size of a ring that is asked for, if the device has as
	// many: QEMU's default (hw/net/virtio-net.c). maxEntries bounds memory: at 9 KB a
	// frame it is 4.6 MB for each direction.
	defaultEntries = 256
	maxEntries     = 512
	// minEntries keeps all words of a ring that are accessed at once aligned.
	minEntries = 2
	// defaultMTU is that of IEEE 802.3; maxMTU is the largest that jumbo frames have
	// in the field (no packet of RoCE is longer than 4.2 KB). minMTU is §5.1.4.1's.
	defaultMTU = 1500
	maxMTU     = 9216
	minMTU     = 68
	// ethHeader and vlanTag are what a frame has beside its payload (IEEE 802.3 §3,
	// 802.1Q §9), without FCS.
	ethHeader = 14
	vlanTag   = 4
	// netHdr is the bytes of struct virtio_net_hdr in front of each frame (§5.1.6);
	// it ends with num_buffers.
	netHdr       = 12
	hdrNumBuffer = 10
	// maxGroups is what a filter table is tried with before all groups are let
	// through: QEMU's MAC_TABLE_ENTRIES, with room for our own address.
	maxGroups = 63
	// txBatch is the frames that Send copies between two looks at the ring: enough to
	// share the price of a doorbell, few enough that the device starts meanwhile.
	txBatch = 64
	// txLazy is from how many slots under way on it is worth a look whether some are
	// back: a few that are used over and over stay in the cache, all of them do not.
	txLazy = 32
)

// Bounds of waits. A test shortens them.
var (
	// resetWait: hardware may take its time to reset; QEMU resets at once.
	resetWait = time.Second
	// ctrlWait: a control command may have to wait for a host under load.
	ctrlWait = time.Second
	// healthTick is how often it is looked whether the device still answers: one
	// register read, which is an exit of some microseconds in a guest.
	healthTick = time.Second
)
