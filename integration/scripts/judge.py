#!/usr/bin/env python3
"""Recomputes the ICRC of every whole RoCE v2 packet of a pcapng file, and counts
packets by opcode.

usage: judge.py FILE

IPv4 packets are given to scapy's contrib.roce layer and to the sum below, which takes
the fields from the packet's bytes; IPv6, which scapy has no sum for, to the second
alone. A packet that was cut off has no ICRC. Exit status 1 if a sum is wrong, if a
packet is not RoCE v2, or if there is none.
"""
import collections
import logging
import struct
import sys
import zlib

logging.getLogger("scapy").setLevel(logging.ERROR)
from scapy.config import conf  # noqa: E402

conf.ipv6_enabled = False  # of the host: its routes are not needed
from scapy.contrib.roce import BTH  # noqa: E402
from scapy.layers.inet import IP, UDP  # noqa: E402
from scapy.utils import RawPcapNgReader  # noqa: E402

LINKTYPE_RAW, UDP_PROTO, PORT = 101, 17, 4791


def headers(b):
    """The offset of UDP, and of the packet's end."""
    if b[0] >> 4 == 4:
        return (b[0] & 15) * 4, struct.unpack_from(">H", b, 2)[0], b[9]
    return 40, 40 + struct.unpack_from(">H", b, 4)[0], b[6]


def own_icrc(b, udp):
    """IBTA Annex A17.3.3: what may change on the way counts as ones."""
    m = bytearray(b[:-4])
    if udp == 40:
        m[0] |= 0x0F
        m[1] = m[2] = m[3] = m[7] = 0xFF
    else:
        m[1] = m[8] = m[10] = m[11] = 0xFF
    m[udp + 6] = m[udp + 7] = 0xFF
    m[udp + 8 + 4] = 0xFF
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + bytes(m)))


def scapy_icrc(b):
    p = IP(b)
    return p[BTH].compute_icrc(None)


def main():
    ops, bad, cut, by_scapy, whole = collections.Counter(), [], 0, 0, 0
    for n, (b, meta) in enumerate(RawPcapNgReader(sys.argv[1]), 1):
        if meta.linktype != LINKTYPE_RAW:
            bad.append("packet %d: link type %d" % (n, meta.linktype))
            continue
        try:
            udp, end, proto = headers(b)
            port, opcode = struct.unpack_from(">H", b, udp + 2)[0], b[udp + 8]
        except (IndexError, struct.error):
            if len(b) < meta.wirelen:
                cut += 1
            else:
                bad.append("packet %d: too short" % n)
            continue
        if proto != UDP_PROTO or port != PORT or end != meta.wirelen:
            bad.append("packet %d: protocol %d, port %d, length %d of %d" % (n, proto, port, end, meta.wirelen))
            continue
        ops[(udp == 40, opcode)] += 1
        if len(b) < meta.wirelen:
            cut += 1
            continue
        whole += 1
        if own_icrc(b, udp) != b[-4:]:
            bad.append("packet %d: ICRC %s, by the annex %s" % (n, b[-4:].hex(), own_icrc(b, udp).hex()))
        if udp == 20:
            by_scapy += 1
            if scapy_icrc(b) != b[-4:]:
                bad.append("packet %d: ICRC %s, by scapy %s" % (n, b[-4:].hex(), scapy_icrc(b).hex()))
    for (v6, op), k in sorted(ops.items()):
        print("IPv%d opcode %#04x: %d" % (6 if v6 else 4, op, k))
    print("%d packets, %d cut off, %d ICRCs checked, %d of them by scapy" % (sum(ops.values()), cut, whole, by_scapy))
    for line in bad[:20]:
        print(line)
    if len(bad) > 20:
        print("and %d more" % (len(bad) - 20))
    return 1 if bad or not ops else 0


if __name__ == "__main__":
    sys.exit(main())
