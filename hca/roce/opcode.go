package roce

// Opcode is BTH's: the transport in the upper three bits, the operation in the
// lower five (IBTA 1.4 §9.2.1, table 38).
type Opcode uint8

// Transports, as the upper bits of an Opcode.
const (
	RC   Opcode = 0x00
	UC   Opcode = 0x20
	UD   Opcode = 0x60
	CNP  Opcode = 0x81 // a congestion notification packet, whole (Annex A17.9.3)
	XRC  Opcode = 0xA0
	kind        = 0xE0
)

// Operations, as the lower bits of an Opcode.
const (
	SendFirst        Opcode = 0x00
	SendMiddle       Opcode = 0x01
	SendLast         Opcode = 0x02
	SendLastImm      Opcode = 0x03
	SendOnly         Opcode = 0x04
	SendOnlyImm      Opcode = 0x05
	WriteFirst       Opcode = 0x06
	WriteMiddle      Opcode = 0x07
	WriteLast        Opcode = 0x08
	WriteLastImm     Opcode = 0x09
	WriteOnly        Opcode = 0x0A
	WriteOnlyImm     Opcode = 0x0B
	ReadRequest      Opcode = 0x0C
	ReadRespFirst    Opcode = 0x0D
	ReadRespMiddle   Opcode = 0x0E
	ReadRespLast     Opcode = 0x0F
	ReadRespOnly     Opcode = 0x10
	Acknowledge      Opcode = 0x11
	AtomicAck        Opcode = 0x12
	CompareSwap      Opcode = 0x13
	FetchAdd         Opcode = 0x14
	SendLastInv      Opcode = 0x16
	SendOnlyInv      Opcode = 0x17
	Flush            Opcode = 0x1C // RC; and the next (IBTA 1.5 annex A19)
	AtomicWrite      Opcode = 0x1D
	operations              = 0x1F
	headerKindsCount        = 0x20
)

// headers says which extended headers an operation has and what may follow.
type headers uint16

const (
	hasRETH headers = 1 << iota
	hasAtomicETH
	hasAETH
	hasAtomicAckETH
	hasImm
	hasIETH
	hasFETH
	hasPayload
	isFirst // or middle: the payload is the path MTU, without padding
	isLast
	isResponse
	isKnown
)

// operationHeaders is by operation (IBTA 1.4 §9.2.1, table 38).
var operationHeaders = [headerKindsCount]headers{
	SendFirst:      isKnown | hasPayload | isFirst,
	SendMiddle:     isKnown | hasPayload | isFirst,
	SendLast:       isKnown | hasPayload | isLast,
	SendLastImm:    isKnown | hasImm | hasPayload | isLast,
	SendOnly:       isKnown | hasPayload | isLast,
	SendOnlyImm:    isKnown | hasImm | hasPayload | isLast,
	WriteFirst:     isKnown | hasRETH | hasPayload | isFirst,
	WriteMiddle:    isKnown | hasPayload | isFirst,
	WriteLast:      isKnown | hasPayload | isLast,
	WriteLastImm:   isKnown | hasImm | hasPayload | isLast,
	WriteOnly:      isKnown | hasRETH | hasPayload | isLast,
	WriteOnlyImm:   isKnown | hasRETH | hasImm | hasPayload | isLast,
	ReadRequest:    isKnown | hasRETH | isLast,
	ReadRespFirst:  isKnown | hasAETH | hasPayload | isFirst | isResponse,
	ReadRespMiddle: isKnown | hasPayload | isFirst | isResponse,
	ReadRespLast:   isKnown | hasAETH | hasPayload | isLast | isResponse,
	ReadRespOnly:   isKnown | hasAETH | hasPayload | isLast | isResponse,
	Acknowledge:    isKnown | hasAETH | isLast | isResponse,
	AtomicAck:      isKnown | hasAETH | hasAtomicAckETH | isLast | isResponse,
	CompareSwap:    isKnown | hasAtomicETH | isLast,
	FetchAdd:       isKnown | hasAtomicETH | isLast,
	SendLastInv:    isKnown | hasIETH | hasPayload | isLast,
	SendOnlyInv:    isKnown | hasIETH | hasPayload | isLast,
	Flush:          isKnown | hasFETH | hasRETH | isLast,
	AtomicWrite:    isKnown | hasRETH | hasPayload | isLast,
}

// Transport is the upper bits.
func (o Opcode) Transport() Opcode { return o & kind }

// Operation is the lower bits.
func (o Opcode) Operation() Opcode { return o & operations }

// IsResponse: it goes from a responder to a requester.
func (o Opcode) IsResponse() bool { return operationHeaders[o&operations]&isResponse != 0 }

// IsLast: it is the last packet of its message, or the only one.
func (o Opcode) IsLast() bool { return operationHeaders[o&operations]&isLast != 0 }

// IsKnown: it is an opcode of one of the transports above. UC has sends and
// writes, UD sends of one packet, XRC what RC has but for the last two.
func (o Opcode) IsKnown() bool {
	op := o.Operation()
	switch o.Transport() {
	case RC:
		return operationHeaders[op]&isKnown != 0
	case XRC:
		return operationHeaders[op]&isKnown != 0 && op < Flush
	case UC:
		return op <= WriteOnlyImm
	case UD:
		return op == SendOnly || op == SendOnlyImm
	}
	return o == CNP
}

// Extended header sizes in bytes (IBTA 1.4 §9.2, 9.3).
const (
	bthSize       = 12
	dethSize      = 8
	xrcethSize    = 4
	rethSize      = 16
	atomicETHSize = 28
	aethSize      = 4
	atomicAckSize = 8
	immSize       = 4
	iethSize      = 4
	fethSize      = 4
	cnpSize       = 16 // reserved bytes after a CNP's BTH
	icrcSize      = 4

	ipv4Size = 20
	ipv6Size = 40
	udpSize  = 8

	// Port is RoCE v2's UDP port (Annex A17.3.1).
	Port = 4791
	// MaxPayload is the largest payload of a packet (IBTA 1.4 §7.6).
	MaxPayload = 4096
	// MaxPacket is the most that Parse takes and Build and Seal make, from IP
	// header to ICRC: IPv6, UDP, BTH, XRCETH and the longest pair of RETH with
	// ImmDt; padding is within MaxPayload.
	MaxPacket = ipv6Size + udpSize + bthSize + dethSize + xrcethSize + rethSize + immSize + MaxPayload + icrcSize
)

// extended is how many bytes the extended headers of o take.
func (o Opcode) extended() int {
	if o == CNP {
		return cnpSize
	}
	n := 0
	switch o.Transport() {
	case UD:
		n = dethSize
	case XRC:
		if !o.IsResponse() {
			n = xrcethSize
		}
	}
	h := operationHeaders[o&operations]
	if h&hasFETH != 0 {
		n += fethSize
	}
	if h&hasRETH != 0 {
		n += rethSize
	}
	if h&hasAtomicETH != 0 {
		n += atomicETHSize
	}
	if h&hasAETH != 0 {
		n += aethSize
	}
	if h&hasAtomicAckETH != 0 {
		n += atomicAckSize
	}
	if h&hasImm != 0 {
		n += immSize
	}
	if h&hasIETH != 0 {
		n += iethSize
	}
	return n
}
