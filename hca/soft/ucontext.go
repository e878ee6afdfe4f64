package soft

import (
	"fmt"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
)

// UContext is one open file's view of the device. touch bounds how many
// messages at a time may touch its memory.
type UContext struct {
	dev      *Device
	notifier hca.Notifier
	guard    guard // of PortEvent
	owner    any
	party    *party
	touch    touching
	away     atomic.Int32 // its posters' goroutines in other contexts' memory
	held     atomic.Int32 // goroutines of wirePort that are stuck in its memory
	late     [][]byte     // packets that wait for that; under wirePort.mu
}

var _ hca.UContext = (*UContext)(nil)

// AllocUContext makes a context; n, which may be nil, gets the port's events.
func (d *Device) AllocUContext(n hca.Notifier) (hca.UContext, error) {
	c := &UContext{dev: d, notifier: n}
	c.touch.init(touchLimit)
	d.mu.Lock()
	defer d.mu.Unlock()
	c.party = d.partyLocked(ownerOf(n))
	c.owner = ownerOf(n)
	d.contexts[c] = struct{}{}
	return c, nil
}

// InFlight is how many accesses to the context's memory are under way, those
// included that are stuck in it since before its Close.
func (c *UContext) InFlight() int { return int(c.touch.now.Load()) }

// Close ends the context's events, those that are queued too. It waits, within
// stuckWait, for one that is being told.
func (c *UContext) Close() error {
	c.dev.mu.Lock()
	if _, open := c.dev.contexts[c]; open {
		delete(c.dev.contexts, c)
		if c.party.refs--; c.party.refs == 0 && c.owner != nil {
			delete(c.dev.parties, c.owner)
		}
	}
	c.dev.mu.Unlock()
	c.guard.close()
	return nil
}

// PD is a protection domain; it has no state of its own.
type PD struct{ ctx *UContext }

var _ hca.PD = (*PD)(nil)

// AllocPD: ENOMEM when MaxPD exist.
func (c *UContext) AllocPD() (hca.PD, error) {
	if err := take(&c.dev.nPD, c.dev.attr.MaxPD, "alloc pd"); err != nil {
		return nil, err
	}
	return &PD{ctx: c}, nil
}

// Close frees the PD's place.
func (p *PD) Close() error {
	p.ctx.dev.nPD.Add(-1)
	return nil
}

// AH is an address handle; immutable, so that a work request may keep it after
// its Close.
type AH struct {
	pd   *PD
	attr hca.AHAttr
}

var _ hca.AH = (*AH)(nil)

// CreateAH checks the address (checkAddress) and takes it over, as path leaves it.
// ENOMEM when MaxAH exist. It never sleeps.
func (p *PD) CreateAH(a hca.AHAttr) (hca.AH, error) {
	d := p.ctx.dev
	if err := d.checkAddress(&a, true); err != nil {
		return nil, fmt.Errorf("create ah: %w", err)
	}
	if err := take(&d.nAH, d.attr.MaxAH, "create ah"); err != nil {
		return nil, err
	}
	return &AH{pd: p, attr: d.path(a)}, nil
}

// Attr is the address as path has left it.
func (a *AH) Attr() hca.AHAttr { return a.attr }

// Close never sleeps.
func (a *AH) Close() error {
	a.pd.ctx.dev.nAH.Add(-1)
	return nil
}

// checkAddress: port and GID index (rdma_check_ah_attr, rdma_get_gid_attr), EINVAL,
// and ENODATA for an empty place in the GID table. Then, on Ethernet, checkRoute; on
// InfiniBand rdmavt's rvt_check_ah with qib's additions: SL, LID and rate, all
// EINVAL. A global address needs no LID here, because the fabric finds ports by GID
// too.
func (d *Device) checkAddress(a *hca.AHAttr, mcastOK bool) error {
	mlid := a.DLID >= loop.MulticastLIDBase
	switch {
	case a.Port != physPort:
		return fmt.Errorf("port %d: %w", a.Port, einval)
	case a.IsGlobal && a.SGIDIndex >= gidTableLen:
		return fmt.Errorf("SGID index %d: %w", a.SGIDIndex, einval)
	case a.IsGlobal && d.gid(int(a.SGIDIndex)) == hca.GID{}:
		return fmt.Errorf("SGID index %d: %w", a.SGIDIndex, enodata)
	case d.ethernet():
		return d.checkRoute(a)
	case a.SL > 15:
		return fmt.Errorf("SL %d: %w", a.SL, einval)
	case a.DLID == 0 && !a.IsGlobal:
		return fmt.Errorf("DLID 0: %w", einval)
	case mlid && (!mcastOK || a.DLID != loop.PermissiveLID && !a.IsGlobal):
		return fmt.Errorf("multicast DLID %#x: %w", a.DLID, einval)
	case a.StaticRate > 18: // the last of enum ib_rate that the kernel's table knows
		return fmt.Errorf("static rate %d: %w", a.StaticRate, einval)
	}
	return nil
}
