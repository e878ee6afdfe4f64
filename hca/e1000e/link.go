package e1000e

import (
	"fmt"
	"time"

	"github.com/uverbsd/uverbsd/hca/nic"
)

const (
	// serviceTick is how often serve looks without being asked: for a device that is
	// gone, a change whose interrupt nobody took, and a transmit unit that hangs.
	serviceTick = 2 * time.Second
	// linkUp in Port.link stands beside the speed in Mbit/s.
	linkUp = 1 << 31
)

// linkOf reads STATUS (DS 10.2.2).
func linkOf(status uint32) uint32 {
	if status&statusLU == 0 {
		return 0
	}
	return linkUp | [4]uint32{10, 100, 1000, 1000}[status>>statusSpeedShift&3]
}

func stateOf(link uint32) nic.State {
	return nic.State{Up: link&linkUp != 0, Mbps: int(link &^ linkUp)}
}

// State is the link as last seen.
func (p *Port) State() nic.State { return stateOf(p.link.Load()) }

// Watch has f called after every change. See nic.Port.
func (p *Port) Watch(f func(nic.State)) { p.watch.Store(&f) }

// serve waits for what is not frames.
func (p *Port) serve() {
	defer p.wg.Done()
	kick := 0
	if p.several {
		kick = 1
	}
	next := time.Now().Add(serviceTick)
	for {
		p.linkPoll.wait(serviceTick)
		if p.over() != nil {
			return
		}
		if p.linkPoll.broken() {
			p.lost()
			return
		}
		if p.several {
			if n := p.linkPoll.take(0); n > 0 {
				p.stats.interrupts.Add(n)
				// Not read: that could take away a frame's cause before its message
				// was sent.
				p.bar.Store32(regICR, otherCauses)
				p.bar.Store32(regIMS, linkCauses)
			}
		}
		p.linkPoll.take(kick)
		if !p.look() {
			return
		}
		if now := time.Now(); now.After(next) {
			next = now.Add(serviceTick)
			if p.tx.stalled() && p.link.Load()&linkUp != 0 {
				p.stats.txStalls.Add(1)
			}
		}
	}
}

// look reads the link's state, and tells of a change.
func (p *Port) look() bool {
	status := p.bar.Load32(regSTATUS)
	if status == allOnes {
		p.lost()
		return false
	}
	link := linkOf(status)
	if p.link.Swap(link) != link {
		p.stats.linkFlap.Add(1)
		if f := p.watch.Load(); f != nil {
			(*f)(stateOf(link))
		}
	}
	return true
}

// Multicast sets the hash table, which lets other groups through as well (DS 10.2.5,
// MTA): 12 bits of the address, bits 47:36, say which of 4096 bits is looked at.
func (p *Port) Multicast(groups []nic.MAC) error {
	var mta [mtaWords]uint32
	for _, g := range groups {
		if g[0]&1 == 0 {
			return fmt.Errorf("receive multicast of %x on %s: it is no group", g[:], p.fn.Name())
		}
		h := (uint32(g[5])<<8 | uint32(g[4])) >> 4
		mta[h>>5] |= 1 << (h & 31)
	}
	p.cfg.Lock()
	defer p.cfg.Unlock()
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	for i, w := range mta {
		if p.mta[i] != w {
			p.bar.Store32(regMTA+4*i, w)
			p.mta[i] = w
		}
	}
	return nil
}
