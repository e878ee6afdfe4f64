package e1000e

import "sync/atomic"

// stats are what the driver counts itself.
type stats struct {
	rxPackets, rxBytes   atomic.Uint64
	rxBadDesc            atomic.Uint64 // descriptors that cannot be
	rxOversize           atomic.Uint64 // frames larger than MaxFrame
	rxFrameErrors        atomic.Uint64 // frames with an error in their descriptor
	rxBadRelease         atomic.Uint64 // frames released that were not lent
	rxMissedInterrupts   atomic.Uint64 // frames found when nothing told of them
	txPackets, txBytes   atomic.Uint64
	txDropped            atomic.Uint64 // because the link was down
	txFull               atomic.Uint64 // times that Send found no slot
	txStalls             atomic.Uint64 // ticks in which no frame left a link that is up
	interrupts, linkFlap atomic.Uint64
}

// hwCounters are the statistics registers that are accumulated (DS 10.2.7). They stop at
// 2^32-1 and are cleared by a read.
var hwCounters = [...]struct {
	reg  int
	name string
	sum  string // what else it adds to
}{
	{regCRCERRS, "rx_crc_errors", "rx_errors"},
	{regALGNERRC, "rx_align_errors", "rx_errors"},
	{regRXERRC, "rx_symbol_errors", "rx_errors"},
	{regSEC, "rx_sequence_errors", "rx_errors"},
	{regCEXTERR, "rx_carrier_errors", "rx_errors"},
	{regRLEC, "rx_length_errors", "rx_errors"},
	{regRUC, "rx_undersize", "rx_errors"},
	{regRFC, "rx_fragments", "rx_errors"},
	{regROC, "rx_hw_oversize", "rx_errors"},
	{regRJC, "rx_jabbers", "rx_errors"},
	{regMPC, "rx_missed", "rx_dropped"},
	{regRNBC, "rx_no_buffer", ""},
	{regECOL, "tx_excess_collisions", "tx_errors"},
	{regLATECOL, "tx_late_collisions", "tx_errors"},
}

// Counters are the driver's and the hardware's, by name. rx_dropped is what the
// hardware had no room for (rx_missed); rx_no_buffer counts frames that had to wait
// for a buffer, dropped or not.
func (p *Port) Counters() map[string]uint64 {
	p.cfg.Lock()
	defer p.cfg.Unlock()
	if p.enter() == nil {
		if p.alive() {
			for i, c := range hwCounters {
				p.hw[i] += uint64(p.bar.Load32(c.reg))
			}
		}
		p.leave()
	}
	s := &p.stats
	m := map[string]uint64{
		"rx_packets": s.rxPackets.Load(), "rx_bytes": s.rxBytes.Load(),
		"rx_bad_descriptors": s.rxBadDesc.Load(), "rx_oversize": s.rxOversize.Load(),
		"rx_bad_frames": s.rxFrameErrors.Load(), "rx_bad_releases": s.rxBadRelease.Load(),
		"rx_missed_interrupts": s.rxMissedInterrupts.Load(),
		"rx_errors":            s.rxBadDesc.Load() + s.rxOversize.Load() + s.rxFrameErrors.Load(),
		"rx_dropped":           0,
		"tx_packets":           s.txPackets.Load(), "tx_bytes": s.txBytes.Load(),
		"tx_dropped": s.txDropped.Load(), "tx_full": s.txFull.Load(),
		"tx_stalls": s.txStalls.Load(), "tx_errors": 0,
		"interrupts": s.interrupts.Load(), "link_changes": s.linkFlap.Load(),
	}
	free, lent := p.rx.pool.counts()
	m["rx_buffers_free"], m["rx_buffers_lent"] = uint64(free), uint64(lent)
	for i, c := range hwCounters {
		m[c.name] = p.hw[i]
		if c.sum != "" {
			m[c.sum] += p.hw[i]
		}
	}
	return m
}
