package ether

import (
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// Link is a roce.Link over an Ethernet port. Use New.
type Link struct {
	port nic.Port
	mac  nic.MAC
	net  *network

	clock    *clock
	stack    *stack.Stack
	stackEnd stackEnd
	queue    chan forStack
	plugged  chan struct{} // the port has come up
	done     chan struct{} // closed by Close
	fed      chan struct{} // closed when feed has ended

	view    atomic.Pointer[view]
	routes  routes
	hops    hops
	batches sync.Pool // *batch

	// groupMu guards groups, how often each was joined.
	groupMu sync.Mutex
	groups  map[hca.GID]int

	// watchMu guards watch and told, and has changes told in order.
	watchMu sync.Mutex
	watch   func(roce.LinkState)
	told    bool // the driver has told a state
	state   atomic.Pointer[roce.LinkState]

	closed    atomic.Bool
	closeOnce sync.Once
	closeErr  error

	count counters
}

var _ roce.Link = (*Link)(nil)

// counters are the link's own.
type counters struct {
	rxPackets, rxBytes atomic.Uint64
	txPackets, txBytes atomic.Uint64

	rx [kinds]atomic.Uint64 // what was received and is neither RoCE nor netstack's

	stackRx, stackFull, stackTx, stackLost atomic.Uint64

	badPacket, noRoute, held, unresolved atomic.Uint64
	ringWaits, ringLost                  atomic.Uint64
	asked, unreachable                   atomic.Uint64
}

// batch is what one call to the port takes.
type batch struct {
	in  [batchSize]nic.Frame
	out [batchSize][]byte
}

// New makes a link of a port, which is the link's from then on: Close closes it. If
// there is an error the port stays the caller's. The port's filter is set, and its
// state watched; nothing is received until Recv is called, by which ARP and neighbour
// discovery live too.
func New(port nic.Port, cfg Config) (*Link, error) {
	n, err := cfg.check(port)
	if err != nil {
		return nil, fmt.Errorf("RoCE link: %w", err)
	}
	l := &Link{
		port:    port,
		mac:     port.MAC(),
		net:     n,
		clock:   newClock(),
		queue:   make(chan forStack, stackQueue),
		plugged: make(chan struct{}, 1),
		done:    make(chan struct{}),
		fed:     make(chan struct{}),
		groups:  make(map[hca.GID]int),
	}
	l.routes.seed = maphash.MakeSeed()
	l.hops.m = make(map[netip.Addr]*hop)
	l.batches.New = func() any { return new(batch) }
	if err := l.newStack(); err != nil {
		l.stopStack()
		return nil, fmt.Errorf("RoCE link: %w", err)
	}
	if err := l.filter(); err != nil {
		l.stopStack()
		return nil, fmt.Errorf("RoCE link: %w", err)
	}
	st := roce.LinkState{MTU: roceMTU(n.mtu)}
	for _, p := range n.addrs {
		st.GIDs = append(st.GIDs, gidOf(p.Addr()))
	}
	l.state.Store(&st)
	go l.feed()
	port.Watch(func(s nic.State) { l.changed(s, false) })
	l.changed(port.State(), true)
	return l, nil
}

// changed takes the port's state and tells it on. It runs on the driver's goroutine,
// which may have locks that port.Send takes, so it calls neither that nor netstack.
// first is the state as New read it, which is old if the driver has told another.
func (l *Link) changed(p nic.State, first bool) {
	l.watchMu.Lock()
	defer l.watchMu.Unlock()
	if first && l.told {
		return
	}
	l.told = true
	old := l.state.Load()
	if old.Up == p.Up && old.Mbps == p.Mbps {
		return
	}
	st := *old
	st.Up, st.Mbps = p.Up, p.Mbps
	l.state.Store(&st)
	if p.Up && !old.Up && !first {
		select {
		case l.plugged <- struct{}{}:
		default:
		}
	}
	if l.watch != nil {
		l.watch(st)
	}
}

// replug is for a cable that may be in another switch now: netstack looks anew for
// everybody on their next use. Until it knows, their MACs stay in use.
func (l *Link) replug() {
	l.stack.ClearNeighbors(nicID, ipv4.ProtocolNumber)
	l.stack.ClearNeighbors(nicID, ipv6.ProtocolNumber)
}

// State implements roce.Link.
func (l *Link) State() roce.LinkState { return *l.state.Load() }

// Watch implements roce.Link.
func (l *Link) Watch(f func(roce.LinkState)) {
	l.watchMu.Lock()
	defer l.watchMu.Unlock()
	l.watch = f
}

// Reachable implements roce.Link. The port's own addresses are not: what is for them
// never gets to the wire.
func (l *Link) Reachable(dst hca.GID) bool {
	if dst.IsMulticast() {
		return true
	}
	if h := l.routes.find(dst); h != nil {
		return true
	}
	_, _, ok := l.net.nextHop(addrOf(dst))
	return ok
}

// failed makes the link's error of the port's; nil if the link may go on.
func (l *Link) failed(err error) error {
	switch {
	case err == nil || errors.Is(err, nic.ErrFull):
		return nil
	case l.closed.Load() || errors.Is(err, nic.ErrClosed):
		return roce.ErrClosed
	case errors.Is(err, nic.ErrGone):
		return roce.ErrGone
	}
	return fmt.Errorf("%w: %w", roce.ErrGone, err)
}

// Join implements roce.Link: EINVAL if the GID is no group's, ENOSPC if there are too
// many groups.
func (l *Link) Join(group hca.GID) error {
	if !group.IsMulticast() {
		return fmt.Errorf("join %s: not a multicast group: %w", group, unix.EINVAL)
	}
	l.groupMu.Lock()
	defer l.groupMu.Unlock()
	if l.closed.Load() {
		return roce.ErrClosed
	}
	if l.groups[group] > 0 {
		l.groups[group]++
		return nil
	}
	if len(l.groups) >= maxGroups {
		return fmt.Errorf("join %s: %d groups are joined already: %w", group, maxGroups, unix.ENOSPC)
	}
	a := addrOf(group)
	proto, _ := protocol(a)
	if err := l.stack.JoinGroup(proto, nicID, address(a)); err != nil {
		return fmt.Errorf("join %s: network stack says %s", group, err)
	}
	l.groups[group] = 1
	if err := l.filter(); err != nil {
		delete(l.groups, group)
		l.stack.LeaveGroup(proto, nicID, address(a))
		_ = l.filter()
		return fmt.Errorf("join %s: %w", group, err)
	}
	return nil
}

// Leave implements roce.Link: EINVAL if the group is not joined.
func (l *Link) Leave(group hca.GID) error {
	l.groupMu.Lock()
	defer l.groupMu.Unlock()
	switch n := l.groups[group]; {
	case n == 0:
		return fmt.Errorf("leave %s: not joined: %w", group, unix.EINVAL)
	case n > 1:
		l.groups[group]--
		return nil
	}
	delete(l.groups, group)
	if l.closed.Load() {
		return nil
	}
	a := addrOf(group)
	proto, _ := protocol(a)
	l.stack.LeaveGroup(proto, nicID, address(a)) // it knows of every group in groups
	if err := l.filter(); err != nil {
		return fmt.Errorf("leave %s: %w", group, err)
	}
	return nil
}

// filter tells the port, and our own look at frames, what is ours now. With groupMu
// held, or before anybody else has the link.
func (l *Link) filter() error {
	v := &view{mac: l.mac, vlan: l.net.vlan, accept: make(map[hca.GID]struct{}, len(l.net.addrs)+len(l.groups))}
	// All hosts, all nodes: queries of IGMP and MLD are sent to them.
	macs := map[nic.MAC]struct{}{{0x01, 0, 0x5e, 0, 0, 1}: {}, {0x33, 0x33, 0, 0, 0, 1}: {}}
	for _, p := range l.net.addrs {
		v.accept[gidOf(p.Addr())] = struct{}{}
		if p.Addr().Is6() {
			macs[groupMAC(solicited(p.Addr()))] = struct{}{}
		}
	}
	for g := range l.groups {
		v.accept[g] = struct{}{}
		macs[groupMAC(g)] = struct{}{}
	}
	list := make([]nic.MAC, 0, len(macs))
	for m := range macs {
		list = append(list, m)
	}
	l.view.Store(v) // what we do not want is dropped here, whatever the port does
	if err := l.port.Multicast(list); err != nil {
		return fmt.Errorf("port's multicast filter: %w", err)
	}
	return nil
}

// Close implements roce.Link. It leaves all groups, ends netstack, and closes the port.
// When it returns no goroutine of the link runs any more.
func (l *Link) Close() error {
	l.closeOnce.Do(func() {
		l.groupMu.Lock() // nobody is half way through a join
		l.closed.Store(true)
		l.groupMu.Unlock()
		close(l.done)
		<-l.fed
		l.stopStack()
		if err := l.port.Close(); err != nil {
			l.closeErr = fmt.Errorf("close RoCE link: %w", err)
		}
	})
	return l.closeErr
}

// stopStack ends netstack and its timers.
func (l *Link) stopStack() {
	l.stack.Destroy()
	l.clock.close()
}

// Counters implements roce.Link.
func (l *Link) Counters() map[string]uint64 {
	c := &l.count
	m := map[string]uint64{
		"rx_packets":            c.rxPackets.Load(),
		"rx_bytes":              c.rxBytes.Load(),
		"rx_stack":              c.stackRx.Load(),
		"rx_stack_full":         c.stackFull.Load(),
		"tx_packets":            c.txPackets.Load(),
		"tx_bytes":              c.txBytes.Load(),
		"tx_stack":              c.stackTx.Load(),
		"tx_stack_lost":         c.stackLost.Load(),
		"tx_bad_packet":         c.badPacket.Load(),
		"tx_no_route":           c.noRoute.Load(),
		"tx_held":               c.held.Load(),
		"tx_unresolved":         c.unresolved.Load(),
		"tx_ring_waits":         c.ringWaits.Load(),
		"tx_ring_full":          c.ringLost.Load(),
		"neighbour_asked":       c.asked.Load(),
		"neighbour_unreachable": c.unreachable.Load(),
	}
	for k, name := range kindNames {
		if name != "" {
			m[name] = c.rx[k].Load()
		}
	}
	return m
}
