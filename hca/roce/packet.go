package roce

import (
	"encoding/binary"
	"errors"
	"hash/crc32"

	"github.com/uverbsd/uverbsd/hca"
)

// Why Parse refuses a packet. A link or an engine counts them.
var (
	ErrShort  = errors.New("packet is shorter than its headers say")
	ErrIP     = errors.New("not a whole IP packet without options")
	ErrUDP    = errors.New("not UDP to port 4791")
	ErrBTH    = errors.New("base transport header of an unknown opcode or version")
	ErrLength = errors.New("packet's length does not go with its opcode")
	ErrICRC   = errors.New("ICRC is wrong")
)

// Codepoints of the two ECN bits of a traffic class (RFC 3168 §5).
const (
	ECNMask = 3
	ECT0    = 2
	CE      = 3
)

// Packet is a RoCE packet's headers, and its payload when it was read. Which of
// the fields count is by the opcode.
type Packet struct {
	// Network: addresses, and what stands beside them.
	Src, Dst     hca.GID
	SrcPort      uint16 // UDP
	TrafficClass uint8  // with ECN
	FlowLabel    uint32 // 20 bits; IPv6 only
	HopLimit     uint8

	// BTH (§9.2).
	Op        Opcode
	Solicited bool
	Migrated  bool // MigReq
	AckReq    bool
	FECN      bool
	BECN      bool
	PKey      uint16
	QPN       uint32 // destination, 24 bits
	PSN       uint32 // 24 bits

	QKey  uint32 // DETH
	SrcQP uint32 // DETH, 24 bits
	SRQN  uint32 // XRCETH, 24 bits

	FlushType  uint8 // FETH, 4 bits
	FlushLevel uint8 // FETH, 2 bits

	VA     uint64 // RETH, AtomicETH
	RKey   uint32 // RETH, AtomicETH
	DMALen uint32 // RETH

	Swap    uint64 // AtomicETH: swap or add
	Compare uint64 // AtomicETH

	Syndrome uint8  // AETH, see the constants of aeth.go
	MSN      uint32 // AETH, 24 bits
	Orig     uint64 // AtomicAckETH

	Imm        uint32 // ImmDt, as the number whose big endian bytes are on the wire
	Invalidate uint32 // IETH: an R_Key

	// Payload is a part of what was parsed, without padding.
	Payload []byte
}

// V4 says whether the packet goes in IPv4: its addresses are IPv4-mapped. A
// group's may be as well.
func (p *Packet) V4() bool {
	_, v4 := p.Src.IPv4()
	return v4
}

// ipSize is the size of the packet's IP header.
func (p *Packet) ipSize() int {
	if p.V4() {
		return ipv4Size
	}
	return ipv6Size
}

// Parse reads an IP packet, IP header to ICRC, into p, whose every field it sets.
// ip may be longer than the packet (Ethernet pads). It checks the IP and UDP headers
// (no options, no extension headers, no fragment; the IPv4 header's sum is for the IP
// stack or the NIC, and UDP's is not used), that the opcode is known and the
// length is one that it can have, and the ICRC. It does not look into addresses, keys,
// sequence or queue pairs.
func Parse(ip []byte, p *Packet) error {
	*p = Packet{}
	if len(ip) < ipv4Size {
		return ErrShort
	}
	var udp []byte
	head := 0
	switch ip[0] >> 4 {
	case 4:
		n := int(binary.BigEndian.Uint16(ip[2:]))
		switch {
		case ip[0] != 4<<4|ipv4Size/4, ip[9] != protoUDP, binary.BigEndian.Uint16(ip[6:])&(moreFragments|fragmentOffset) != 0:
			return ErrIP
		case n > len(ip) || n < ipv4Size+udpSize:
			return ErrShort
		}
		ip, head = ip[:n], ipv4Size
		p.Src, p.Dst = hca.IPv4GID([4]byte(ip[12:16])), hca.IPv4GID([4]byte(ip[16:20]))
		p.TrafficClass, p.HopLimit = ip[1], ip[8]
	case 6:
		if len(ip) < ipv6Size {
			return ErrShort
		}
		n := ipv6Size + int(binary.BigEndian.Uint16(ip[4:]))
		switch {
		case ip[6] != protoUDP:
			return ErrIP
		case n > len(ip) || n < ipv6Size+udpSize:
			return ErrShort
		}
		ip, head = ip[:n], ipv6Size
		first := binary.BigEndian.Uint32(ip)
		p.Src, p.Dst = hca.GID(ip[8:24]), hca.GID(ip[24:40])
		p.TrafficClass, p.FlowLabel, p.HopLimit = uint8(first>>20), first&0xfffff, ip[7]
		// A mapped address in an IPv6 header would pass for an IPv4 peer's, past all
		// filters for those; no host sends one (draft-itojun-v6ops-v4mapped-harmful), and
		// Linux lets them in.
		if _, mapped := p.Src.IPv4(); mapped {
			return ErrIP
		}
		if _, mapped := p.Dst.IPv4(); mapped {
			return ErrIP
		}
	default:
		return ErrIP
	}
	udp = ip[head:]
	p.SrcPort = binary.BigEndian.Uint16(udp)
	if binary.BigEndian.Uint16(udp[2:]) != Port {
		return ErrUDP
	}
	if n := int(binary.BigEndian.Uint16(udp[4:])); n != len(udp) {
		return ErrShort
	}
	b := udp[udpSize:]
	if len(b) < bthSize+icrcSize {
		return ErrShort
	}
	if err := p.parseBTH(b[:len(b)-icrcSize]); err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(b[len(b)-icrcSize:]) != icrc(ip[:len(ip)-icrcSize], head) {
		return ErrICRC
	}
	return nil
}

// parseBTH reads from BTH to the end of the padding.
func (p *Packet) parseBTH(b []byte) error {
	op, flags := Opcode(b[0]), b[1]
	if flags&0xf != 0 || !op.IsKnown() { // TVer
		return ErrBTH
	}
	p.Op, p.Solicited, p.Migrated = op, flags&0x80 != 0, flags&0x40 != 0
	pad := int(flags >> 4 & 3)
	p.PKey = binary.BigEndian.Uint16(b[2:])
	p.FECN, p.BECN = b[4]&0x80 != 0, b[4]&0x40 != 0
	p.QPN = binary.BigEndian.Uint32(b[4:]) & 0xffffff
	p.AckReq, p.PSN = b[8]&0x80 != 0, binary.BigEndian.Uint32(b[8:])&0xffffff
	n := op.extended()
	b = b[bthSize:]
	if len(b) < n+pad {
		return ErrShort
	}
	p.parseExtended(b[:n])
	b = b[n:]
	h := operationHeaders[op.Operation()]
	switch {
	case len(b)%4 != 0, len(b) > MaxPayload:
		return ErrLength
	case op == CNP || h&hasPayload == 0:
		if len(b) != 0 {
			return ErrLength
		}
	case h&isFirst != 0:
		if pad != 0 || len(b) == 0 {
			return ErrLength
		}
	}
	p.Payload = b[:len(b)-pad]
	return nil
}

// parseExtended reads the extended headers, of which there are enough bytes.
func (p *Packet) parseExtended(b []byte) {
	if p.Op == CNP {
		return
	}
	switch p.Op.Transport() {
	case UD:
		p.QKey, p.SrcQP = binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])&0xffffff
		b = b[dethSize:]
	case XRC:
		if !p.Op.IsResponse() {
			p.SRQN = binary.BigEndian.Uint32(b) & 0xffffff
			b = b[xrcethSize:]
		}
	}
	h := operationHeaders[p.Op.Operation()]
	if h&hasFETH != 0 {
		p.FlushType, p.FlushLevel = b[3]&0xf, b[3]>>4&3
		b = b[fethSize:]
	}
	if h&hasRETH != 0 {
		p.VA, p.RKey, p.DMALen = binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])
		b = b[rethSize:]
	}
	if h&hasAtomicETH != 0 {
		p.VA, p.RKey = binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])
		p.Swap, p.Compare = binary.BigEndian.Uint64(b[12:]), binary.BigEndian.Uint64(b[20:])
		b = b[atomicETHSize:]
	}
	if h&hasAETH != 0 {
		v := binary.BigEndian.Uint32(b)
		p.Syndrome, p.MSN = uint8(v>>24), v&0xffffff
		b = b[aethSize:]
	}
	if h&hasAtomicAckETH != 0 {
		p.Orig = binary.BigEndian.Uint64(b)
		b = b[atomicAckSize:]
	}
	if h&hasImm != 0 {
		p.Imm = binary.BigEndian.Uint32(b)
		b = b[immSize:]
	}
	if h&hasIETH != 0 {
		p.Invalidate = binary.BigEndian.Uint32(b)
	}
}

// Build writes p's headers into buf, which is Headroom and MaxPacket bytes long,
// from Headroom on, and returns where in buf the payload goes. p's addresses are of
// one family.
func (p *Packet) Build(buf []byte) int {
	ip := buf[Headroom:]
	n := p.ipSize()
	if n == ipv4Size {
		// Identification 0 and "don't fragment": RFC 6864 §4.1 lets an atomic datagram
		// have any, and the ICRC covers it, so that it has to be known here.
		binary.BigEndian.PutUint32(ip, 4<<28|ipv4Size/4<<24|uint32(p.TrafficClass)<<16)
		binary.BigEndian.PutUint32(ip[4:], dontFragment)
		binary.BigEndian.PutUint32(ip[8:], uint32(p.HopLimit)<<24|protoUDP<<16)
		copy(ip[12:], p.Src[12:])
		copy(ip[16:], p.Dst[12:])
	} else {
		binary.BigEndian.PutUint32(ip, 6<<28|uint32(p.TrafficClass)<<20|p.FlowLabel&0xfffff)
		binary.BigEndian.PutUint32(ip[4:], protoUDP<<8|uint32(p.HopLimit))
		copy(ip[8:], p.Src[:])
		copy(ip[24:], p.Dst[:])
	}
	udp := ip[n:]
	binary.BigEndian.PutUint32(udp, uint32(p.SrcPort)<<16|Port)
	binary.BigEndian.PutUint32(udp[4:], 0)
	b := udp[udpSize:]
	b[0], b[1] = byte(p.Op), bit(p.Solicited, 0x80)|bit(p.Migrated, 0x40)
	binary.BigEndian.PutUint16(b[2:], p.PKey)
	binary.BigEndian.PutUint32(b[4:], p.QPN&0xffffff)
	b[4] = bit(p.FECN, 0x80) | bit(p.BECN, 0x40)
	binary.BigEndian.PutUint32(b[8:], p.PSN&0xffffff)
	b[8] = bit(p.AckReq, 0x80)
	e := b[bthSize:]
	p.buildExtended(e)
	return Headroom + n + udpSize + bthSize + p.Op.extended()
}

func bit(set bool, b byte) byte {
	if set {
		return b
	}
	return 0
}

// buildExtended writes the extended headers.
func (p *Packet) buildExtended(b []byte) {
	if p.Op == CNP {
		clear(b[:cnpSize])
		return
	}
	switch p.Op.Transport() {
	case UD:
		binary.BigEndian.PutUint32(b, p.QKey)
		binary.BigEndian.PutUint32(b[4:], p.SrcQP&0xffffff)
		b = b[dethSize:]
	case XRC:
		if !p.Op.IsResponse() {
			binary.BigEndian.PutUint32(b, p.SRQN&0xffffff)
			b = b[xrcethSize:]
		}
	}
	h := operationHeaders[p.Op.Operation()]
	if h&hasFETH != 0 {
		binary.BigEndian.PutUint32(b, uint32(p.FlushLevel&3)<<4|uint32(p.FlushType&0xf))
		b = b[fethSize:]
	}
	if h&hasRETH != 0 {
		binary.BigEndian.PutUint64(b, p.VA)
		binary.BigEndian.PutUint32(b[8:], p.RKey)
		binary.BigEndian.PutUint32(b[12:], p.DMALen)
		b = b[rethSize:]
	}
	if h&hasAtomicETH != 0 {
		binary.BigEndian.PutUint64(b, p.VA)
		binary.BigEndian.PutUint32(b[8:], p.RKey)
		binary.BigEndian.PutUint64(b[12:], p.Swap)
		binary.BigEndian.PutUint64(b[20:], p.Compare)
		b = b[atomicETHSize:]
	}
	if h&hasAETH != 0 {
		binary.BigEndian.PutUint32(b, uint32(p.Syndrome)<<24|p.MSN&0xffffff)
		b = b[aethSize:]
	}
	if h&hasAtomicAckETH != 0 {
		binary.BigEndian.PutUint64(b, p.Orig)
		b = b[atomicAckSize:]
	}
	if h&hasImm != 0 {
		binary.BigEndian.PutUint32(b, p.Imm)
		b = b[immSize:]
	}
	if h&hasIETH != 0 {
		binary.BigEndian.PutUint32(b, p.Invalidate)
	}
}

// Seal ends a packet that Build began in buf and whose payload ends at end: it adds
// padding, fills in the lengths, the IPv4 header's sum and the ICRC, and returns
// what to send. UDP's sum stays 0, as RoCE v2 has it (Annex A17.4.2.1).
func Seal(buf []byte, end int) Buffer {
	ip := buf[Headroom:]
	head := ipv6Size
	if ip[0]>>4 == 4 {
		head = ipv4Size
	}
	n := end - Headroom
	bth := ip[head+udpSize:]
	for pad := -(n - head - udpSize) & 3; pad > 0; pad-- {
		ip[n] = 0
		bth[1] += 1 << 4
		n++
	}
	total := n + icrcSize
	if head == ipv4Size {
		binary.BigEndian.PutUint16(ip[2:], uint16(total))
		binary.BigEndian.PutUint16(ip[10:], ipv4Sum(ip))
	} else {
		binary.BigEndian.PutUint16(ip[4:], uint16(total-ipv6Size))
	}
	binary.BigEndian.PutUint16(ip[head+4:], uint16(total-head))
	binary.LittleEndian.PutUint32(ip[n:], icrc(ip[:n], head))
	return Buffer(buf[:Headroom+total])
}

// ipv4Sum is the sum of an IPv4 header whose own sum field counts as 0.
func ipv4Sum(h []byte) uint16 {
	var sum uint32
	for i := 0; i < ipv4Size; i += 2 {
		if i != 10 {
			sum += uint32(binary.BigEndian.Uint16(h[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

const (
	protoUDP       = 17
	dontFragment   = 0x4000 << 16 // of the word that begins with the identification
	moreFragments  = 0x2000
	fragmentOffset = 0x1fff
)

// icrcSeed is the CRC's state after the eight bytes of ones that stand for the
// LRH (IBTA 1.4 §7.8.1, Annex A17.3.3).
var icrcSeed = ^crc32.ChecksumIEEE([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})

// icrc is the invariant CRC of a packet without its last four bytes, whose IP
// header takes head. What a router may change counts as ones: traffic class, flow
// label, hop limit, sums, and the byte of BTH with FECN and BECN. On the wire it is in
// little endian order (rxe_icrc.c).
func icrc(ip []byte, head int) uint32 {
	c, t := icrcSeed, crc32.IEEETable
	step := func(b byte) { c = t[byte(c)^b] ^ c>>8 }
	if head == ipv4Size {
		for i, b := range ip[:ipv4Size] {
			switch i {
			case 1, 8, 10, 11:
				b = 0xff
			}
			step(b)
		}
	} else {
		for i, b := range ip[:ipv6Size] {
			switch i {
			case 0:
				b |= 0x0f
			case 1, 2, 3, 7:
				b = 0xff
			}
			step(b)
		}
	}
	for _, b := range ip[head : head+udpSize-2] {
		step(b)
	}
	step(0xff)
	step(0xff)
	bth := ip[head+udpSize:]
	for _, b := range bth[:4] {
		step(b)
	}
	step(0xff)
	return crc32.Update(^c, t, bth[5:])
}
