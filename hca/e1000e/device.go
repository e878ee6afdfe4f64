package e1000e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/uverbsd/uverbsd/hca/nic"
)

const (
	vendorIntel = 0x8086
	// resetLimit, autoReadLimit: the kernel's driver gives the EEPROM 10 ms.
	resetLimit    = 100 * time.Millisecond
	autoReadLimit = 50 * time.Millisecond
	// phyConfigWait: after a reset the PHY's settings are loaded without a sign of when they
	// are (82571.c, e1000_reset_hw_82571).
	phyConfigWait = 25 * time.Millisecond
	// masterLimit is how long reads and writes under way may take (the kernel's
	// driver waits 80 ms).
	masterLimit = 80 * time.Millisecond
	eepromLimit = 20 * time.Millisecond
	phyLimit    = 10 * time.Millisecond
)

// deviceIDs of the 82574 and what they are.
var deviceIDs = map[uint16]string{0x10d3: "82574L", 0x10f6: "82574LA"}

// device is the function and its registers, while nobody else uses them: Open and the
// end of Close.
type device struct {
	fn             nic.Function
	bar            nic.BAR
	rxBase, txBase uint64
}

// until asks f again and again until it says yes or the time is over.
func until(limit time.Duration, f func() bool) bool {
	for end := time.Now().Add(limit); ; {
		if f() {
			return true
		}
		if time.Now().After(end) {
			return f()
		}
		time.Sleep(50 * time.Microsecond)
	}
}

func (d *device) set(reg int, set, clr uint32) {
	d.bar.Store32(reg, d.bar.Load32(reg)&^clr|set)
}

// identify checks that it is ours and maps its registers.
func (d *device) identify() error {
	var id [4]byte
	if err := d.fn.ReadConfig(0, id[:]); err != nil {
		return fmt.Errorf("read its identity: %w", err)
	}
	v, dev := binary.LittleEndian.Uint16(id[:]), binary.LittleEndian.Uint16(id[2:])
	if deviceIDs[dev] == "" || v != vendorIntel {
		return fmt.Errorf("PCI device %04x:%04x is no 82574 (8086:10d3 or 8086:10f6)", v, dev)
	}
	bar, err := d.fn.Map(0)
	if err != nil {
		return fmt.Errorf("map its registers: %w", err)
	}
	if bar.Len() < bar0Size {
		return fmt.Errorf("map its registers: BAR 0 has %d bytes, an 82574's %d", bar.Len(), bar0Size)
	}
	d.bar = bar
	return nil
}

// reset brings the registers to their defaults (DS 4.6, 10.2.2). QEMU's model keeps most of
// them, so start writes all that matter.
func (d *device) reset() error {
	if d.bar.Load32(regSTATUS) == allOnes {
		return nic.ErrGone
	}
	d.halt()
	owned := d.ownPHY()
	d.set(regCTRL, ctrlReset, 0)
	time.Sleep(time.Millisecond) // no access meanwhile
	done := until(resetLimit, func() bool { return d.bar.Load32(regCTRL)&ctrlReset == 0 })
	if !done {
		if d.bar.Load32(regSTATUS) == allOnes {
			return nic.ErrGone
		}
		return fmt.Errorf("its reset does not end within %v: power it off and on", resetLimit)
	}
	if owned {
		d.disownPHY()
	}
	if !until(autoReadLimit, func() bool { return d.bar.Load32(regEECD)&eecdAutoRead != 0 }) {
		return fmt.Errorf("its EEPROM is not read within %v after a reset: it is damaged or missing", autoReadLimit)
	}
	time.Sleep(phyConfigWait)
	d.bar.Store32(regIMC, allOnes)
	d.bar.Store32(regICR, d.bar.Load32(regICR))
	return nil
}

// halt stops both units, all interrupts and all DMA, and says whether the latter ended.
func (d *device) halt() bool {
	d.bar.Store32(regIMC, allOnes)
	d.bar.Store32(regRCTL, 0)
	d.bar.Store32(regTCTL, tctlPSP)
	d.set(regCTRL, ctrlMasterDisable, 0)
	return until(masterLimit, func() bool { return d.bar.Load32(regSTATUS)&statusMasterEnable == 0 })
}

// quiesce ends all that the device does to memory.
func (d *device) quiesce() error {
	var err error
	if d.bar.Load32(regSTATUS) != allOnes {
		if !d.halt() {
			err = fmt.Errorf("DMA does not end within %v; bus mastering is taken away", masterLimit)
		}
		d.set(regCTRL, ctrlReset, 0)
		time.Sleep(time.Millisecond)
		if !until(resetLimit, func() bool { return d.bar.Load32(regCTRL)&ctrlReset == 0 }) {
			err = errors.Join(err, fmt.Errorf("its reset does not end within %v", resetLimit))
		}
		d.bar.Store32(regIMC, allOnes)
	}
	if e := d.fn.BusMaster(false); e != nil && !errors.Is(e, nic.ErrGone) {
		err = errors.Join(err, fmt.Errorf("forbid DMA: %w", e))
	}
	return err
}

// readMAC is the address that the reset loaded from the EEPROM into the first
// receive address register, or else what the EEPROM says.
func (d *device) readMAC() (nic.MAC, error) {
	var m nic.MAC
	lo, hi := d.bar.Load32(regRAL0), d.bar.Load32(regRAH0)
	binary.LittleEndian.PutUint32(m[0:], lo)
	binary.LittleEndian.PutUint16(m[4:], uint16(hi))
	if hi&rahValid != 0 && usable(m) {
		return m, nil
	}
	for i := range 3 {
		w, err := d.readEEPROM(i)
		if err != nil {
			return nic.MAC{}, err
		}
		binary.LittleEndian.PutUint16(m[2*i:], w)
	}
	if !usable(m) {
		return nic.MAC{}, fmt.Errorf("its EEPROM has no Ethernet address but %x", m[:])
	}
	return m, nil
}

func usable(m nic.MAC) bool { return m[0]&1 == 0 && m != nic.MAC{} }

// readEEPROM reads a 16-bit word (DS 10.2.2, EERD).
func (d *device) readEEPROM(word int) (uint16, error) {
	d.bar.Store32(regEERD, uint32(word)<<eerdAddrShift|eerdStart)
	var v uint32
	if !until(eepromLimit, func() bool { v = d.bar.Load32(regEERD); return v&eerdDone != 0 }) {
		return 0, fmt.Errorf("read its EEPROM's word %d: no answer within %v", word, eepromLimit)
	}
	return uint16(v >> eerdDataShift), nil
}

// ownPHY takes the PHY from the firmware; a firmware that does not give it is let be.
func (d *device) ownPHY() bool {
	return until(phyLimit, func() bool {
		d.set(regEXTCNF, extcnfMDIOSoftware, 0)
		return d.bar.Load32(regEXTCNF)&extcnfMDIOSoftware != 0
	})
}

func (d *device) disownPHY() { d.set(regEXTCNF, 0, extcnfMDIOSoftware) }

// mdic does one access to a register of the PHY (DS 10.2.2, MDIC).
func (d *device) mdic(op uint32) (uint16, bool) {
	d.bar.Store32(regMDIC, op|mdicPHY1)
	var v uint32
	done := until(phyLimit, func() bool { v = d.bar.Load32(regMDIC); return v&mdicReady != 0 })
	return uint16(v), done && v&mdicError == 0
}

// startPHY wakes a PHY that another driver powered down, and has it negotiate. One that
// runs is left alone: its link stays up. If it cannot be reached, the link tells.
func (d *device) startPHY() {
	if !d.ownPHY() {
		return
	}
	defer d.disownPHY()
	v, ok := d.mdic(mdicRead | phyBMCR<<mdicRegShift)
	if !ok || v&bmcrNotRunning == 0 && v&bmcrAutoneg != 0 {
		return
	}
	v = v&^bmcrNotRunning | bmcrAutoneg | bmcrRestart
	d.mdic(mdicWrite | phyBMCR<<mdicRegShift | uint32(v))
}

// start programs everything and turns both units and the interrupts on.
func (p *Port) start(o Options) {
	b := p.bar
	// Link: speed and duplex as the PHY negotiates (DS 10.2.2, CTRL).
	p.set(regCTRL, ctrlFD|ctrlSLU|ctrlASDE,
		ctrlForceSpeed|ctrlForceDuplex|ctrlRxFlow|ctrlTxFlow|ctrlVLAN|ctrlMasterDisable|ctrlReserved29)
	p.errata()
	p.filters()
	p.vectors()

	// Receive (DS 7.1): no offloads, no delay, descriptors written back one at a time.
	b.Store32(regRXCSUM, 0)
	b.Store32(regRFCTL, 0)
	b.Store32(regMRQC, 0)
	b.Store32(regRDTR, 0)
	b.Store32(regRADV, 0)
	b.Store32(regRAID, 0)
	b.Store32(regRDLEN1, 0)
	b.Store32(regRXDCTL, dctlGran|1<<dctlWThreshShift)
	b.Store32(regRDBAL, uint32(p.rxBase))
	b.Store32(regRDBAH, uint32(p.rxBase>>32))
	b.Store32(regRDLEN, uint32(p.rx.n*descSize))
	b.Store32(regRDH, 0)
	b.Store32(regRDT, 0)
	_, bits := bufferSize(p.maxFrame)
	rctl := rctlEN | rctlBAM | rctlSECRC | bits
	if o.MTU > defaultMTU {
		rctl |= rctlLPE
	}

	// Transmit (DS 7.2): reports at once.
	b.Store32(regTIDV, 0)
	b.Store32(regTADV, 0)
	b.Store32(regTDLEN1, 0)
	p.set(regTXDCTL, dctlGran|1<<dctlWThreshShift|txdctlCountDesc, dctlWThreshMask)
	b.Store32(regTDBAL, uint32(p.txBase))
	b.Store32(regTDBAH, uint32(p.txBase>>32))
	b.Store32(regTDLEN, uint32(p.tx.n*descSize))
	b.Store32(regTDH, 0)
	b.Store32(regTDT, 0)
	b.Store32(regTCTL, tctlEN|tctlPSP|tctlCT<<tctlCTShift|tctlCOLD<<tctlCOLDShift)

	// The tail is written once the unit is on (DS 4.6).
	b.Store32(regRCTL, rctl)
	p.rx.fill(b)

	for _, c := range hwCounters {
		b.Load32(c.reg) // what was before is not ours
	}
	b.Store32(regIMS, linkCauses)
}

// errata sets bits that the datasheet calls reserved, as the kernel's driver does for the
// 82574 (82571.c, e1000_initialize_hw_bits_82571).
func (p *Port) errata() {
	p.set(regTARC0, tarcReserved26, tarcReserved27To30)
	p.set(regCTRLEXT, ctrlExt22, ctrlExt23)
	p.set(regGCR, 1<<22, 0)
	p.set(regGCR2, 1, 0)
}

// filters lets our own address and broadcast in, and no group yet.
func (p *Port) filters() {
	b := p.bar
	b.Store32(regRAL0, binary.LittleEndian.Uint32(p.mac[0:]))
	b.Store32(regRAH0, uint32(binary.LittleEndian.Uint16(p.mac[4:]))|rahValid)
	for i := 1; i < rarCount; i++ {
		b.Store32(regRAH0+8*i, 0) // first what makes it valid
		b.Store32(regRAL0+8*i, 0)
	}
	for i := range mtaWords {
		b.Store32(regMTA+4*i, 0)
	}
}

// vectors: frames to vector 0, unthrottled, all else to the last (DS 7.4, 10.2.4). The
// causes that only MSI-X knows are set up without it, too. Of several vectors, the frames'
// clears its cause and masks itself when its message is sent.
func (p *Port) vectors() {
	b := p.bar
	b.Store32(regITR, 0)
	for i := range eitrCount {
		b.Store32(regEITR+4*i, 0)
	}
	other := uint32(0)
	auto := uint32(0)
	p.rxCauses = causeRXQ0 | causeRXT0 // whichever it is: MSI-X with one vector, or none
	if p.several {
		other, auto = 1, causeRXQ0
		p.rxCauses = causeRXQ0
		b.Store32(regEITR+4, otherThrottle)
		p.set(regCTRLEXT, ctrlExtEIAME|ctrlExtPBAClr, ctrlExtIAME)
	} else {
		p.set(regCTRLEXT, 0, ctrlExtEIAME|ctrlExtPBAClr|ctrlExtIAME)
	}
	b.Store32(regEIAC, auto)
	b.Store32(regIAM, auto)
	b.Store32(regIVAR, ivarRXQ0Valid|other<<ivarOtherShift|ivarOtherValid)
}
