// Package ether is the RoCE v2 link over an Ethernet port that the daemon drives
// itself (nic.Port). RoCE packets go between the caller and the port with no copy and
// no allocation; all else that a host on an Ethernet has to say and to answer (ARP,
// neighbour discovery, IGMP and MLD reports, ICMP echo) is gVisor's netstack's.
//
// A received frame is looked at on the goroutine that called Recv (classify.go). What
// is no RoCE packet of ours is copied into a queue, from which one goroutine feeds
// netstack; a full queue drops. A packet to be sent finds its Ethernet header in a
// cache that is read without a lock (neigh.go). The cache mirrors netstack's
// neighbour table: netstack tells every change of an entry, and is asked for one when
// a packet misses it, or uses one that has gone stale.
//
// Who may call it: cmd makes a Link with New and closes it; the engine uses it as a
// roce.Link.
//
// Lock order, outermost first:
//
//	Link.groupMu (groups; held over port.Multicast and netstack's join)
//	netstack's own locks
//	hops.mu (the table of next hops)
//	hop.mu (one next hop; held over port.Send of what was held back for it)
//	clock.mu
//
// Link.watchMu (the state, and who watches it) is held over the watcher's call, and
// taken with none of the others held.
//
// netstack calls us with its locks held (changes of its neighbour table, frames to be
// sent), so nothing calls netstack with hops.mu or hop.mu held.
package ether

import "time"

const (
	// defaultMTU is Ethernet's own (IEEE 802.3 §3.2.7).
	defaultMTU = 1500
	// minMTU is the least that IPv6 stands on (RFC 8200 §5).
	minMTU = 1280
	// maxHeaders is what the kernel takes off the Ethernet MTU before it looks for
	// the largest RoCE MTU that fits: IPv6, UDP, BTH, RETH and ICRC
	// (RXE_MAX_HDR_LENGTH, drivers/infiniband/sw/rxe/rxe_hdr.h).
	maxHeaders = 80
	// maxAddresses bounds the addresses of one port: each is a GID, and a solicited
	// node's group.
	maxAddresses = 128
	// maxGroups bounds the multicast groups joined at a time (RXE_MAX_MCAST_GRP,
	// drivers/infiniband/sw/rxe/rxe_param.h).
	maxGroups = 8192

	// batchSize is how many frames go through the port in one call: enough that the
	// call's cost is spread, few enough that a batch stays in the first-level cache.
	batchSize = 64
	// stackQueue is the frames that wait for netstack. A burst of all neighbours'
	// answers at once fits; a flood is dropped here, at the cost of one look.
	stackQueue = 256

	// maxHops bounds the next hops that are known, twice netstack's own table
	// (stack.NeighborCacheSize), so that one which netstack forgot under an ARP flood
	// is still known here while it is used.
	maxHops = 1024
	// maxAsking bounds the addresses that are being resolved, gateways not counted:
	// each costs one broadcast a second for three seconds, and clients choose them.
	maxAsking = 128
	// maxHeld is the packets held back for each of them: the first of a connection,
	// and a datagram or two. More is lost, as netstack does with its own.
	maxHeld = 4
	// routeSets and routeWays are the shape of the cache of destinations. One that is
	// put out costs a look at the tables behind it, no packet.
	routeSets = 1024
	routeWays = 4

	// ringTries and ringWait are how often, and how far apart, a full transmit ring
	// is tried again before what is left is lost: in sum longer than a ring of 1024
	// jumbo frames takes at 10 Gbit/s (some 7 ms).
	ringTries = 100
	ringWait  = 100 * time.Microsecond
)
