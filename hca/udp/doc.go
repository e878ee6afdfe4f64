// Package udp is a roce.Link over the host's own IP stack: the daemon is a RoCE v2
// port beside whatever else the host does with its network interface.
//
// Packets go out through raw sockets that take them with their IP header (IP_HDRINCL,
// IPV6_HDRINCL), one socket for each address, bound to it and to the interface. So the
// kernel routes them and finds the neighbour, and changes nothing that the ICRC covers:
// any UDP source port, traffic class and hop limit go out as they were sealed,
// identification 0 stays 0 where "don't fragment" is set (ip_select_ident), a UDP sum of 0
// is left in IPv6 too, as rdma_rxe has it (rxe_net.c prepare_udp_hdr), and nothing is
// ever fragmented.
//
// They come in through one raw UDP socket for each family, with a socket filter that
// takes only packets to port 4791 and one of the addresses, or a group that was
// joined. IPv4's header is what came; IPv6's is made again from what the kernel
// tells of it, without extension headers, and with a flow label of 0. A firewall applies
// both ways, and so do routes.
//
// A UDP socket holds port 4791 of each address, so that nobody else takes it and
// peers get no "port unreachable". A filter drops what comes to it; the host counts
// that among its UDP receive errors.
//
// The interface's rx-gro-list has to be off, as it is by default: with it the kernel
// would join packets before a raw socket sees them.
//
// What a link sends to a group other programs of this host hear as well, the
// link itself does not.
//
// Who may call it: cmd makes links with New; engines use them as roce.Link. It needs
// CAP_NET_RAW in the network namespace that New is called in.
//
// A Send is a system call on the caller's thread and a Recv one on the receiver's; no
// goroutine stands between. One goroutine per link waits for news of the interface
// (rtnetlink) and calls the watcher.
//
// Lock order: Link.watchMu, then sources.mu. Leaves: Link.groupMu, buffers.mu,
// Link.batchMu. Link.life is held for reading through Recv, and for writing by
// Close alone, with nothing else held.
package udp
