// Package loop is the in-process fabric: it gives ports their LIDs, finds a
// port by LID or GID, holds the multicast groups, and remembers who waits for a
// queue pair that is not there yet. No bytes pass through it: engines on one
// fabric reach each other's memory directly.
//
// A fabric is one InfiniBand subnet or one Ethernet segment (RoCE v2). Ports of the
// one never reach those of the other, as on wires.
//
// Who may call it: hca/soft (and later engines) for their ports; cmd makes one
// Fabric of each link layer for the daemon. Nothing here calls out under a lock.
//
// Lock order: Fabric.mu and Fabric.parkMu are leaves, never held together and
// never across a call to an Endpoint, Member or Sleeper. Lookups take no lock.
package loop

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

const (
	// firstLID is the first unicast LID that the fabric gives out; 0 is
	// reserved (IBTA 1.4 §4.1.3).
	firstLID = 1
	// MulticastLIDBase is the first multicast LID (IBTA 1.4 §4.1.3).
	MulticastLIDBase = 0xC000
	// PermissiveLID addresses no port of this fabric.
	PermissiveLID = 0xFFFF
	// maxPorts bounds the table of LIDs; far below MulticastLIDBase.
	maxPorts = 1024
)

// Endpoint is what an engine hangs on a port: whatever it wants to get back
// from Resolve. The fabric never looks into it.
type Endpoint any

// Member is what an engine attaches to a multicast group, compared with ==.
type Member any

// Sleeper waits for a queue pair to appear; Wake must not block.
type Sleeper interface{ Wake() }

// Port is one attached port.
type Port struct {
	fabric *Fabric
	lid    uint16
	gids   []hca.GID // under Fabric.mu
	ep     Endpoint
}

// LID is the port's base LID; LMC is 0. An Ethernet port has none: 0.
func (p *Port) LID() uint16 { return p.lid }

// Endpoint is what Attach was given.
func (p *Port) Endpoint() Endpoint { return p.ep }

// view is an immutable picture of the fabric, replaced on every change so that
// the data path reads it without a lock.
type view struct {
	lids   []*Port // by LID; holes are nil
	gids   map[hca.GID]*Port
	groups map[hca.GID][]Member
}

// Fabric is one subnet or segment. Use New.
type Fabric struct {
	link hca.LinkLayer
	now  atomic.Pointer[view]

	// mu serialises changes to the view.
	mu sync.Mutex

	// parkMu guards parked.
	parkMu sync.Mutex
	parked map[uint32]map[Sleeper]struct{} // by the QPN waited for
}

// New makes an empty fabric with that link layer: hca.LinkInfiniBand or
// hca.LinkEthernet.
func New(link hca.LinkLayer) *Fabric {
	f := &Fabric{link: link, parked: make(map[uint32]map[Sleeper]struct{})}
	f.now.Store(&view{gids: map[hca.GID]*Port{}, groups: map[hca.GID][]Member{}})
	return f
}

// Link is the link layer of the fabric's ports.
func (f *Fabric) Link() hca.LinkLayer { return f.link }

// Attach adds a port that answers to these GIDs, and gives it the lowest free LID
// if the fabric is InfiniBand. EEXIST if another port has one of the GIDs, ENOSPC
// if no LID is left.
func (f *Fabric) Attach(ep Endpoint, gids ...hca.GID) (*Port, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.now.Load()
	for _, gid := range gids {
		if _, ok := v.gids[gid]; ok {
			return nil, fmt.Errorf("attach port: GID %s is another's: %w", gid, unix.EEXIST)
		}
	}
	p := &Port{fabric: f, gids: slices.Clone(gids), ep: ep}
	n := &view{lids: v.lids, gids: maps.Clone(v.gids), groups: v.groups}
	if f.link == hca.LinkInfiniBand {
		lid := firstLID
		for lid < len(v.lids) && v.lids[lid] != nil {
			lid++
		}
		if lid > maxPorts {
			return nil, fmt.Errorf("attach port: no LID left: %w", unix.ENOSPC)
		}
		p.lid = uint16(lid)
		n.lids = make([]*Port, max(lid+1, len(v.lids)))
		copy(n.lids, v.lids)
		n.lids[lid] = p
	}
	for _, gid := range gids {
		n.gids[gid] = p
	}
	f.now.Store(n)
	return p, nil
}

// GIDs are those that the port answers to.
func (p *Port) GIDs() []hca.GID {
	p.fabric.mu.Lock()
	defer p.fabric.mu.Unlock()
	return slices.Clone(p.gids)
}

// SetGIDs changes them. One that is another port's stays that port's.
func (p *Port) SetGIDs(gids []hca.GID) {
	f := p.fabric
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.now.Load()
	n := &view{lids: v.lids, gids: maps.Clone(v.gids), groups: v.groups}
	for _, gid := range p.gids {
		if n.gids[gid] == p {
			delete(n.gids, gid)
		}
	}
	p.gids = slices.Clone(gids)
	for _, gid := range gids {
		if n.gids[gid] == nil {
			n.gids[gid] = p
		}
	}
	f.now.Store(n)
}

// Detach takes the port out; its LID and GIDs may be given out again.
func (p *Port) Detach() {
	f := p.fabric
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.now.Load()
	n := &view{lids: slices.Clone(v.lids), gids: maps.Clone(v.gids), groups: v.groups}
	if p.lid != 0 && n.lids[p.lid] == p {
		n.lids[p.lid] = nil
	}
	for _, gid := range p.gids {
		if n.gids[gid] == p {
			delete(n.gids, gid)
		}
	}
	f.now.Store(n)
}

// Resolve finds the port that an address names: by GID when it is global and
// the GID is known, else by LID. Ethernet has GIDs only. Nil if there is none.
func (f *Fabric) Resolve(a *hca.AHAttr) *Port {
	v := f.now.Load()
	if a.IsGlobal {
		if p := v.gids[a.DGID]; p != nil {
			return p
		}
	}
	if int(a.DLID) < len(v.lids) {
		return v.lids[a.DLID]
	}
	return nil
}

// IsMulticast reports whether the address names a multicast group: a multicast
// LID, or a multicast GID.
func IsMulticast(a *hca.AHAttr) bool {
	return a.DLID >= MulticastLIDBase && a.DLID != PermissiveLID || a.IsGlobal && a.DGID.IsMulticast()
}

// Members are the QPs attached to a group. The slice is shared: do not change it.
func (f *Fabric) Members(mgid hca.GID) []Member { return f.now.Load().groups[mgid] }

// Join attaches m to a group. False if it was there already.
func (f *Fabric) Join(mgid hca.GID, m Member) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.now.Load()
	old := v.groups[mgid]
	if slices.Contains(old, m) {
		return false
	}
	f.setGroup(v, mgid, append(slices.Clone(old), m))
	return true
}

// Leave detaches m from a group. False if it was not attached.
func (f *Fabric) Leave(mgid hca.GID, m Member) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.now.Load()
	i := slices.Index(v.groups[mgid], m)
	if i < 0 {
		return false
	}
	f.setGroup(v, mgid, slices.Delete(slices.Clone(v.groups[mgid]), i, i+1))
	return true
}

func (f *Fabric) setGroup(v *view, mgid hca.GID, ms []Member) {
	n := &view{lids: v.lids, gids: v.gids, groups: maps.Clone(v.groups)}
	if len(ms) == 0 {
		delete(n.groups, mgid)
	} else {
		n.groups[mgid] = ms
	}
	f.now.Store(n)
}

// Groups is how many multicast groups have members.
func (f *Fabric) Groups() int { return len(f.now.Load().groups) }

// Park records that s waits for queue pair qpn. Look once more after it: the
// queue pair may have come in between.
func (f *Fabric) Park(qpn uint32, s Sleeper) {
	f.parkMu.Lock()
	defer f.parkMu.Unlock()
	m := f.parked[qpn]
	if m == nil {
		m = make(map[Sleeper]struct{}, 1)
		f.parked[qpn] = m
	}
	m[s] = struct{}{}
}

// Unpark takes s back.
func (f *Fabric) Unpark(qpn uint32, s Sleeper) {
	f.parkMu.Lock()
	defer f.parkMu.Unlock()
	m := f.parked[qpn]
	delete(m, s)
	if len(m) == 0 {
		delete(f.parked, qpn)
	}
}

// Announce wakes all who wait for qpn: it has come, or can take a message now.
func (f *Fabric) Announce(qpn uint32) {
	f.parkMu.Lock()
	m := f.parked[qpn]
	delete(f.parked, qpn)
	f.parkMu.Unlock()
	for s := range m {
		s.Wake()
	}
}
