package udp

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// Offsets of fields (RFC 791 §3.1, RFC 8200 §3, RFC 768).
const (
	ipv4Size   = 20
	ipv6Size   = 40
	v4Src      = 12
	v4Dst      = 16
	v6Src      = 8
	v6Dst      = 24
	udpDstPort = 2
	v4First    = 0x45 // version 4, no options

	// longest is what a filter lets through of a packet, and MaxPacket bounds it:
	// what is longer is no RoCE packet.
	longest = roce.MaxPacket
)

// Instructions of a classic BPF program (linux/bpf_common.h).
const (
	ldWord = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	ldHalf = unix.BPF_LD | unix.BPF_H | unix.BPF_ABS
	ldByte = unix.BPF_LD | unix.BPF_B | unix.BPF_ABS
	ldLen  = unix.BPF_LD | unix.BPF_W | unix.BPF_LEN
	and    = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	jEq    = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	jGt    = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	ret    = unix.BPF_RET | unix.BPF_K
	// network is the offset of the IP header, wherever the packet begins for the
	// socket (SKF_NET_OFF, linux/filter.h).
	network = -0x100000
)

// at is an offset as an instruction has it.
func at(off int) uint32 { return uint32(int32(off)) }

// nothing is the filter of a socket that shall receive nothing.
func nothing() []unix.SockFilter { return []unix.SockFilter{{Code: ret, K: 0}} }

// filter4 takes RoCE packets to one of own, or a group; a raw IPv4 socket's packet
// begins with the IP header.
func filter4(own []hca.GID) []unix.SockFilter {
	f := []unix.SockFilter{
		{Code: ldHalf, K: ipv4Size + udpDstPort},
		{Code: jEq, K: roce.Port, Jt: 1},
		{Code: ret, K: 0},
		{Code: ldByte, K: 0},
		{Code: jEq, K: v4First, Jt: 1},
		{Code: ret, K: 0},
		{Code: ldLen},
		{Code: jGt, K: longest, Jf: 1},
		{Code: ret, K: 0},
		{Code: ldByte, K: v4Dst},
		{Code: and, K: 0xf0},
		{Code: jEq, K: 0xe0, Jf: 1},
		{Code: ret, K: longest},
		{Code: ldWord, K: v4Dst},
	}
	for _, g := range own {
		if a, v4 := g.IPv4(); v4 {
			f = append(f, unix.SockFilter{Code: jEq, K: binary.BigEndian.Uint32(a[:]), Jf: 1}, unix.SockFilter{Code: ret, K: longest})
		}
	}
	return append(f, unix.SockFilter{Code: ret, K: 0})
}

// filter6 is the same for IPv6, where a raw socket's packet begins with the UDP
// header.
func filter6(own []hca.GID) []unix.SockFilter {
	f := []unix.SockFilter{
		{Code: ldHalf, K: udpDstPort},
		{Code: jEq, K: roce.Port, Jt: 1},
		{Code: ret, K: 0},
		{Code: ldLen},
		{Code: jGt, K: longest - ipv6Size, Jf: 1},
		{Code: ret, K: 0},
		{Code: ldByte, K: at(network + v6Dst)},
		{Code: jEq, K: 0xff, Jf: 1},
		{Code: ret, K: longest},
	}
	for _, g := range own {
		if _, v4 := g.IPv4(); v4 {
			continue
		}
		const words = 4
		for w := range words {
			f = append(f,
				unix.SockFilter{Code: ldWord, K: at(network + v6Dst + 4*w)},
				// To the next address.
				unix.SockFilter{Code: jEq, K: binary.BigEndian.Uint32(g[4*w:]), Jf: uint8(2*(words-w) - 1)})
		}
		f = append(f, unix.SockFilter{Code: ret, K: longest})
	}
	return append(f, unix.SockFilter{Code: ret, K: 0})
}
