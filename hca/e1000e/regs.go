package e1000e

// Registers in BAR 0, by byte offset; all are 32 bits (DS 10.2).
const (
	regCTRL    = 0x00000 // device control (DS 10.2.2)
	regSTATUS  = 0x00008
	regEECD    = 0x00010 // EEPROM control
	regEERD    = 0x00014 // EEPROM read
	regCTRLEXT = 0x00018
	regMDIC    = 0x00020 // PHY access
	regICR     = 0x000C0 // interrupt cause (DS 10.2.4)
	regITR     = 0x000C4 // throttling, units of 256 ns
	regIMS     = 0x000D0 // mask set
	regIMC     = 0x000D8 // mask clear
	regEIAC    = 0x000DC // auto clear
	regIAM     = 0x000E0 // auto mask
	regIVAR    = 0x000E4 // vectors of causes
	regEITR    = 0x000E8 // throttling of MSI-X vectors, 5 of them
	regRCTL    = 0x00100 // receive control (DS 10.2.5)
	regTCTL    = 0x00400 // transmit control (DS 10.2.6)
	regEXTCNF  = 0x00F00 // who owns the PHY
	regRDBAL   = 0x02800
	regRDBAH   = 0x02804
	regRDLEN   = 0x02808
	regRDH     = 0x02810
	regRDT     = 0x02818
	regRDTR    = 0x02820 // receive interrupt delay
	regRXDCTL  = 0x02828
	regRADV    = 0x0282C
	regRDLEN1  = 0x02908 // second queue
	regRAID    = 0x02C08
	regTDBAL   = 0x03800
	regTDBAH   = 0x03804
	regTDLEN   = 0x03808
	regTDH     = 0x03810
	regTDT     = 0x03818
	regTIDV    = 0x03820
	regTXDCTL  = 0x03828
	regTADV    = 0x0382C
	regTARC0   = 0x03840
	regTDLEN1  = 0x03908
	regRXCSUM  = 0x05000
	regRFCTL   = 0x05008
	regMTA     = 0x05200 // 128 words: multicast table
	regRAL0    = 0x05400 // 16 pairs: receive addresses
	regRAH0    = 0x05404
	regMRQC    = 0x05818
	regGCR     = 0x05B00
	regGCR2    = 0x05B64

	bar0Size  = 128 << 10
	mtaWords  = 128
	rarCount  = 16
	eitrCount = 5
	// otherThrottle, 1 ms in units of 256 ns, is for a link that flaps, and for
	// overruns, which are told with it.
	otherThrottle = 3906
	descSize      = 16
	ringAlign     = 8    // RDLEN and TDLEN are multiples of 128 bytes
	maxRing       = 4096 // as the kernel's driver allows
	minRing       = 16
	allOnes       = ^uint32(0) // what a read from a function that is gone gives
	minFrame      = 60         // IEEE 802.3 §3.2.8 without FCS
	ethHeader     = 14
	vlanHeader    = 4 // 802.1Q tag
	fcsSize       = 4
	// MaxMTU is the largest Ethernet MTU. The kernel's driver takes 9216 (82571.c,
	// max_hw_frame_size of the 82574).
	MaxMTU     = 9000
	defaultMTU = 1500
)

const (
	ctrlFD            = 1 << 0
	ctrlMasterDisable = 1 << 2
	ctrlASDE          = 1 << 5
	ctrlSLU           = 1 << 6
	ctrlForceSpeed    = 1 << 11
	ctrlForceDuplex   = 1 << 12
	ctrlReset         = 1 << 26
	ctrlRxFlow        = 1 << 27
	ctrlTxFlow        = 1 << 28
	ctrlReserved29    = 1 << 29
	ctrlVLAN          = 1 << 30

	ctrlExt22     = 1 << 22
	ctrlExt23     = 1 << 23
	ctrlExtEIAME  = 1 << 24
	ctrlExtIAME   = 1 << 27
	ctrlExtPBAClr = 1 << 31

	statusLU           = 1 << 1
	statusSpeedShift   = 6
	statusMasterEnable = 1 << 19

	eecdAutoRead = 1 << 9

	eerdStart     = 1 << 0
	eerdDone      = 1 << 1
	eerdAddrShift = 2
	eerdDataShift = 16

	extcnfMDIOSoftware = 1 << 5

	mdicRegShift = 16
	mdicPHY1     = 1 << 21
	mdicWrite    = 1 << 26
	mdicRead     = 2 << 26
	mdicReady    = 1 << 28
	mdicError    = 1 << 30

	phyBMCR        = 0      // IEEE 802.3 §22.2.4.1
	bmcrRestart    = 1 << 9 // autonegotiation
	bmcrIsolate    = 1 << 10
	bmcrPowerDown  = 1 << 11
	bmcrAutoneg    = 1 << 12
	bmcrNotRunning = bmcrPowerDown | bmcrIsolate

	rctlEN        = 1 << 1
	rctlLPE       = 1 << 5
	rctlBAM       = 1 << 15
	rctlBSIZEBits = 16
	rctlBSEX      = 1 << 25
	rctlSECRC     = 1 << 26

	tctlEN        = 1 << 1
	tctlPSP       = 1 << 3
	tctlCTShift   = 4
	tctlCOLDShift = 12
	// collision threshold and distance in full duplex (DS 10.2.6)
	tctlCT   = 0x0F
	tctlCOLD = 0x3F

	dctlGran           = 1 << 24
	dctlWThreshShift   = 16
	dctlWThreshMask    = 0x3F << dctlWThreshShift
	txdctlCountDesc    = 1 << 22
	tarcReserved26     = 1 << 26
	tarcReserved27To30 = 0xF << 27

	rahValid = 1 << 31

	ivarRXQ0Valid  = 1 << 3
	ivarOtherShift = 16
	ivarOtherValid = 1 << 19

	causeLSC   = 1 << 2
	causeRXT0  = 1 << 7
	causeRXQ0  = 1 << 20
	causeOther = 1 << 24

	linkCauses = causeLSC | causeOther
	// otherCauses are what OTHER stands for: LSC, RXO, MDAC, SRPD, ACK, MNG. They are
	// cleared with it, or it would come again.
	otherCauses = causeOther | causeLSC | 1<<6 | 1<<9 | 1<<16 | 1<<17 | 1<<18
)

// A descriptor is an address and a word of the rest (DS 7.1 and 7.2, legacy format).
const (
	rxLenMask     = 0xFFFF
	rxDD          = 1 << 32
	rxEOP         = 1 << 33
	rxErrorsShift = 40
	// CE, SE, SEQ, CXE, RXE; not the checksums', which are off.
	rxErrors = 0x97

	txCmdEOP  = 1 << 24
	txCmdIFCS = 1 << 25
	txCmdRS   = 1 << 27
	txDD      = 1 << 32
)

// Statistics, cleared by a read (DS 10.2.7).
const (
	regCRCERRS  = 0x04000
	regALGNERRC = 0x04004
	regRXERRC   = 0x0400C
	regMPC      = 0x04010
	regECOL     = 0x04018
	regLATECOL  = 0x04020
	regSEC      = 0x04038
	regCEXTERR  = 0x0403C
	regRLEC     = 0x04040
	regRNBC     = 0x040A0
	regRUC      = 0x040A4
	regRFC      = 0x040A8
	regROC      = 0x040AC
	regRJC      = 0x040B0
)
