package ether

import (
	"encoding/binary"
	"hash/maphash"
	"net/netip"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// head is a ready Ethernet header. It is not changed once others see it.
type head struct {
	b [ethHeader + vlanTag]byte
	n int
}

// header makes the Ethernet header of packets to dst.
func (l *Link) header(dst nic.MAC, v4 bool) (h head) {
	typ := uint16(typeIPv6)
	if v4 {
		typ = typeIPv4
	}
	h.n = l.putHeader(h.b[:], dst, typ)
	return h
}

// putHeader writes an Ethernet header and returns its length.
func (l *Link) putHeader(b []byte, dst nic.MAC, typ uint16) int {
	copy(b, dst[:])
	copy(b[6:], l.mac[:])
	n := 12
	if l.net.vlan != 0 {
		binary.BigEndian.PutUint16(b[n:], typeVLAN)
		binary.BigEndian.PutUint16(b[n+2:], l.net.vlan)
		n += vlanTag
	}
	binary.BigEndian.PutUint16(b[n:], typ)
	return n + 2
}

// hop is a neighbour that packets go to: their destination, or a gateway.
type hop struct {
	addr, local netip.Addr
	gateway     bool
	// head is nil while the MAC is not known.
	head atomic.Pointer[head]
	// stale: netstack wants to know of the next use, to look whether the neighbour
	// is still there.
	stale atomic.Bool
	// dead: it is in the table no more.
	dead atomic.Bool

	// mu guards what follows, and that what was held goes before what comes later.
	mu     sync.Mutex
	asking bool // netstack was asked, and has not answered
	held   [][]byte
}

// hops is the table of next hops; of each address there is one that is not dead.
type hops struct {
	mu sync.Mutex
	m  map[netip.Addr]*hop
	// asking counts the hops that are being resolved, gateways not.
	asking atomic.Int32
}

// get finds an address's hop or makes one.
func (t *hops) get(addr, local netip.Addr, gateway bool) *hop {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[addr]; h != nil {
		return h
	}
	if len(t.m) >= maxHops {
		t.evict()
	}
	h := &hop{addr: addr, local: local, gateway: gateway}
	t.m[addr] = h
	return h
}

// evict puts out one hop, any that nobody waits for; there always is one, as
// maxAsking is less than maxHops. With t.mu held.
func (t *hops) evict() {
	for addr, h := range t.m {
		h.mu.Lock()
		out := !h.asking && !h.gateway
		if out {
			h.dead.Store(true)
			h.head.Store(nil)
		}
		h.mu.Unlock()
		if out {
			delete(t.m, addr)
			return
		}
	}
}

// find is an address's hop, nil if there is none.
func (t *hops) find(addr netip.Addr) *hop {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.m[addr]
}

// route says by which hop a destination is reached.
type route struct {
	dst hca.GID
	hop *hop
}

// routes is a cache of destinations: sets of a few ways, found by a hash that clients
// cannot foresee, read without a lock.
type routes struct {
	seed maphash.Seed
	sets [routeSets][routeWays]atomic.Pointer[route]
}

func (r *routes) set(dst hca.GID) *[routeWays]atomic.Pointer[route] {
	return &r.sets[maphash.Comparable(r.seed, dst)%routeSets]
}

// find is a destination's hop, nil if it is not in the cache.
func (r *routes) find(dst hca.GID) *hop {
	s := r.set(dst)
	for i := range s {
		if e := s[i].Load(); e != nil && e.dst == dst {
			return e.hop
		}
	}
	return nil
}

// put adds a destination, in place of itself, a free way, or the one that is there
// longest.
func (r *routes) put(dst hca.GID, h *hop) {
	s := r.set(dst)
	e := &route{dst, h}
	for i := range s {
		if old := s[i].Load(); old == nil || old.dst == dst || old.hop.dead.Load() {
			s[i].Store(e)
			return
		}
	}
	for i := range s {
		e = s[i].Swap(e)
	}
}

// route finds a destination's hop by the tables, and puts it into the cache; nil if
// there is no way.
func (l *Link) route(dst hca.GID) *hop {
	addr := addrOf(dst)
	next, local, ok := l.net.nextHop(addr)
	if !ok {
		return nil
	}
	h := l.hops.get(next, local, next != addr)
	l.routes.put(dst, h)
	return h
}

// hold is for packets whose hop has no MAC yet: a few are held back, and netstack is
// asked unless it is.
func (l *Link) hold(h *hop, packets []roce.Buffer) error {
	h.mu.Lock()
	if hd := h.head.Load(); hd != nil {
		h.mu.Unlock()
		return l.transmit(hd, packets, true)
	}
	ask := !h.asking && !h.dead.Load()
	if ask && !h.gateway && l.hops.asking.Add(1) > maxAsking {
		l.hops.asking.Add(-1)
		ask = false
	}
	if ask {
		h.asking = true
	}
	if h.asking {
		for len(packets) > 0 && len(h.held) < maxHeld {
			if p := packets[0]; l.fits(p) {
				h.held = append(h.held, append([]byte(nil), p...))
				l.count.held.Add(1)
			}
			packets = packets[1:]
		}
	}
	h.mu.Unlock()
	l.count.unresolved.Add(uint64(len(packets)))
	if ask {
		l.ask(h)
	}
	return nil
}

// ask has netstack resolve or confirm a hop. It does not wait.
func (l *Link) ask(h *hop) {
	l.count.asked.Add(1)
	proto, _ := protocol(h.addr)
	err := l.stack.GetLinkAddress(nicID, address(h.addr), address(h.local), proto,
		func(r stack.LinkResolutionResult) {
			switch r.Err.(type) {
			case nil:
				l.learn(h, r.LinkAddress)
			case *tcpip.ErrAborted:
				// netstack's table was full: it is not known whether the
				// neighbour is there.
				h.stale.Store(true)
				l.settle(h)
			default:
				l.lose(h)
			}
		})
	switch err.(type) {
	case nil, *tcpip.ErrWouldBlock:
	default:
		l.lose(h) // netstack is closed
	}
}

// learn takes a hop's MAC, and sends what was held back.
func (l *Link) learn(h *hop, link tcpip.LinkAddress) {
	if len(link) != len(nic.MAC{}) {
		return
	}
	mac := nic.MAC([]byte(link))
	if mac == (nic.MAC{}) || mac[0]&1 != 0 {
		// A neighbour that gives a group's address would have us flood the link.
		l.lose(h)
		return
	}
	hd := l.header(mac, h.addr.Is4())
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dead.Load() {
		l.settleLocked(h)
		return
	}
	if old := h.head.Load(); old != nil && *old == hd {
		return
	}
	for _, p := range h.held {
		_ = l.transmit(&hd, []roce.Buffer{p}, false) // locks of netstack's are held
	}
	h.head.Store(&hd)
	h.held = nil
	l.settleLocked(h)
}

// lose takes a hop's MAC away: the neighbour does not answer.
func (l *Link) lose(h *hop) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.head.Store(nil)
	l.settleLocked(h)
}

// settle ends a question, and drops what is still held.
func (l *Link) settle(h *hop) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l.settleLocked(h)
}

func (l *Link) settleLocked(h *hop) {
	l.count.unresolved.Add(uint64(len(h.held)))
	h.held = nil
	if h.asking && !h.gateway {
		l.hops.asking.Add(-1)
	}
	h.asking = false
}

// neighbours hears of netstack's neighbour table (stack.NUDDispatcher).
type neighbours struct{ l *Link }

func (n neighbours) OnNeighborAdded(_ tcpip.NICID, e stack.NeighborEntry)   { n.changed(e) }
func (n neighbours) OnNeighborChanged(_ tcpip.NICID, e stack.NeighborEntry) { n.changed(e) }

func (n neighbours) changed(e stack.NeighborEntry) {
	h := n.l.hops.find(netAddr(e.Addr))
	if h == nil {
		return
	}
	switch e.State {
	case stack.Reachable, stack.Delay, stack.Probe, stack.Static:
		h.stale.Store(false)
		n.l.learn(h, e.LinkAddr)
	case stack.Stale:
		h.stale.Store(true)
		n.l.learn(h, e.LinkAddr)
	case stack.Unreachable:
		n.l.count.unreachable.Add(1)
		n.l.lose(h)
	}
}

// OnNeighborRemoved implements stack.NUDDispatcher. The MAC stays in use, as it is no
// less right than before; the next use has netstack look again.
func (n neighbours) OnNeighborRemoved(_ tcpip.NICID, e stack.NeighborEntry) {
	if h := n.l.hops.find(netAddr(e.Addr)); h != nil {
		h.stale.Store(true)
	}
}

// protocol is netstack's number for an address's protocol, and its bits.
func protocol(a netip.Addr) (tcpip.NetworkProtocolNumber, int) {
	if a.Is4() {
		return header.IPv4ProtocolNumber, 32
	}
	return header.IPv6ProtocolNumber, 128
}

func address(a netip.Addr) tcpip.Address {
	if a.Is4() {
		return tcpip.AddrFrom4(a.As4())
	}
	return tcpip.AddrFrom16(a.As16())
}

func netAddr(a tcpip.Address) netip.Addr {
	if a.Len() == 4 {
		return netip.AddrFrom4(a.As4())
	}
	return netip.AddrFrom16(a.As16())
}
