// Package roce is the wire format of RoCE v2 (IBTA 1.4 Annex A17): BTH and extended
// headers in UDP in IPv4 or IPv6, with ICRC; and the Link that carries it.
//
// A packet being made is a Buffer: Build writes the headers and says where the
// payload goes, the caller reads the payload right there, Seal fills in the lengths,
// the padding and the ICRC. A packet that came in is read by Parse, which checks all
// that can be known without a queue pair, and copies nothing.
//
// Who may call it: links (hca/udp, hca/roce/ether), the engine (hca/soft), the
// capture. It holds no lock and, but for Link's implementations elsewhere, no
// state; nothing in it allocates.
package roce
