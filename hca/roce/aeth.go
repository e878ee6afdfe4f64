package roce

// AETH's syndrome (IBTA 1.4 §9.7.5.2, tables 44–46): three bits of kind, five of
// credits, RNR timer or NAK code.
const (
	SyndromeKind = 0xE0
	SyndromeCode = 0x1F

	SyndromeACK = 0x00
	SyndromeRNR = 0x20
	SyndromeNAK = 0x60

	NAKSequence      = 0
	NAKInvalidReq    = 1
	NAKRemoteAccess  = 2
	NAKRemoteOp      = 3
	NAKInvalidRD     = 4
	CreditsUnlimited = 0x1F // of an ACK: it counts no credits
)

// PSNMask is the 24 bits of a packet sequence number.
const PSNMask = 0xffffff

// PSNDiff is a-b in the sequence of PSNs: negative if a is before b, within half the
// space (§9.7.1).
func PSNDiff(a, b uint32) int32 { return int32((a-b)<<8) >> 8 }
