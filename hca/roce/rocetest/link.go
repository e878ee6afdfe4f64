package rocetest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

const (
	poison   = 0xdb // what a buffer that was given back holds
	scribble = 0xee // what the headroom of a packet that was sent holds
)

// poisoned is copied, which is faster than a loop, the more so with -race.
var poisoned = bytes.Repeat([]byte{poison}, roce.MaxPacket)

// counters are a link's, of what it sent but for those that begin with rx.
type counters struct {
	tx, txBytes, txDown, txBad, unreachable                  atomic.Uint64
	filtered, lost, duplicated, reordered, corrupted, marked atomic.Uint64
	rx, rxBytes, rxDown, rxNoBuffer                          atomic.Uint64
}

// Link is one port's link. It is a roce.Link.
type Link struct {
	net   *Net
	index int
	state atomic.Pointer[roce.LinkState]
	count counters

	// watchMu keeps changes of the state, and calls of the watcher, one at a time.
	watchMu sync.Mutex
	watch   func(roce.LinkState)

	// mu guards what follows.
	mu     sync.Mutex
	ready  sync.Cond // packets came, a buffer did, or the end
	err    error     // why it ended
	groups map[hca.GID]int
	slots  []slot
	free   []int // of slots
	queue  []int // of slots, a ring
	head   int
	queued int
}

// slot is a buffer for a packet.
type slot struct {
	buf  []byte
	lent bool
}

var _ roce.Link = (*Link)(nil)

// Net is the network that the link is of.
func (l *Link) Net() *Net { return l.net }

// Index is the link's number, as the filter sees it.
func (l *Link) Index() int { return l.index }

// State is the link as it is now.
func (l *Link) State() roce.LinkState { return *l.state.Load() }

// IPv4 is the first IPv4-mapped GID, zero if there is none.
func (l *Link) IPv4() hca.GID {
	for _, g := range l.State().GIDs {
		if _, v4 := g.IPv4(); v4 {
			return g
		}
	}
	return hca.GID{}
}

// IPv6 is the last IPv6 GID, zero if there is none.
func (l *Link) IPv6() hca.GID {
	for _, g := range slices.Backward(l.State().GIDs) {
		if _, v4 := g.IPv4(); !v4 {
			return g
		}
	}
	return hca.GID{}
}

// Watch has f called after every change that SetUp or SetState makes.
func (l *Link) Watch(f func(roce.LinkState)) {
	l.watchMu.Lock()
	defer l.watchMu.Unlock()
	l.watch = f
}

// SetUp cuts the link or mends it. One that is cut loses what it sends and what is
// sent to it.
func (l *Link) SetUp(up bool) { l.SetState(func(s *roce.LinkState) { s.Up = up }) }

// SetState changes the link's state. It waits for the watcher.
func (l *Link) SetState(change func(*roce.LinkState)) {
	l.watchMu.Lock()
	defer l.watchMu.Unlock()
	s := l.State()
	s.GIDs = slices.Clone(s.GIDs)
	change(&s)
	l.state.Store(&s)
	if l.watch != nil {
		l.watch(s)
	}
}

// Send carries packets to the links that have dst or joined it. A link does not
// hear what it sends to a group.
func (l *Link) Send(dst hca.GID, packets []roce.Buffer) error {
	if err := l.ended(); err != nil {
		return err
	}
	state := l.state.Load()
	for _, b := range packets {
		if len(b) <= roce.Headroom || len(b) > roce.Headroom+headersMax+state.MTU {
			l.count.txBad.Add(1)
			continue
		}
		for i := range roce.Headroom {
			b[i] = scribble
		}
		if !state.Up {
			l.count.txDown.Add(1)
			continue
		}
		l.count.tx.Add(1)
		l.count.txBytes.Add(uint64(len(b) - roce.Headroom))
		l.carry(dst, b[roce.Headroom:])
	}
	return nil
}

// carry takes a packet to its receivers.
func (l *Link) carry(dst hca.GID, ip []byte) {
	found, group := false, dst.IsMulticast()
	filter, faults := *l.net.filter.Load(), l.net.faults.Load()
	for i, to := range l.net.links {
		if group && (i == l.index || !to.joined(dst)) || !group && !slices.Contains(to.state.Load().GIDs, dst) {
			continue
		}
		found = true
		packet := ip
		if filter != nil {
			v := filter(l.index, i, ip)
			if v.Drop {
				l.count.filtered.Add(1)
				continue
			}
			if v.Packet != nil {
				packet = v.Packet
			}
		}
		l.net.paths[l.index*len(l.net.links)+i].send(packet, faults, &l.count)
	}
	if !found {
		l.count.unreachable.Add(1)
	}
}

// Inject has the link receive ip, any bytes, as if they came from the network:
// without filter and faults. They are copied.
func (l *Link) Inject(ip []byte) { l.receive(ip, nil) }

// receive queues a copy of ip, on which change, if there is any, was called.
func (l *Link) receive(ip []byte, change func([]byte)) {
	if !l.state.Load().Up {
		l.count.rxDown.Add(1)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return
	}
	token := l.takeLocked()
	if token < 0 {
		l.count.rxNoBuffer.Add(1)
		return
	}
	s := &l.slots[token]
	s.buf = append(s.buf[:0], ip...)
	if change != nil {
		change(s.buf)
	}
	l.queue[(l.head+l.queued)%len(l.queue)] = token
	l.queued++
	l.count.rx.Add(1)
	l.count.rxBytes.Add(uint64(len(ip)))
	l.ready.Signal()
}

// takeLocked is a free slot, -1 if the queue is full or all buffers are lent out.
func (l *Link) takeLocked() int {
	switch n := len(l.free); {
	case l.queued == len(l.queue):
		return -1
	case n > 0:
		token := l.free[n-1]
		l.free = l.free[:n-1]
		return token
	case len(l.slots) < lentFactor*len(l.queue):
		l.slots = append(l.slots, slot{})
		return len(l.slots) - 1
	}
	return -1
}

// Recv waits for packets.
func (l *Link) Recv(rs []roce.Received) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.queued == 0 && l.err == nil {
		l.ready.Wait()
	}
	if l.err != nil {
		return 0, l.err
	}
	n := min(len(rs), l.queued)
	for i := range n {
		token := l.queue[l.head]
		l.head = (l.head + 1) % len(l.queue)
		s := &l.slots[token]
		s.lent = true
		rs[i] = roce.Received{IP: s.buf, Buf: l, Token: token}
	}
	if l.queued -= n; l.queued > 0 {
		l.ready.Signal() // what another's batch was too short for
	}
	return n, nil
}

// ReleaseFrame takes a buffer back and overwrites it.
func (l *Link) ReleaseFrame(token int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &l.slots[token]
	if !s.lent {
		panic(fmt.Sprintf("rocetest: buffer %d of link %d was given back twice", token, l.index))
	}
	s.lent = false
	for b := s.buf; len(b) > 0; {
		b = b[copy(b, poisoned):]
	}
	l.free = append(l.free, token)
}

// Outstanding is how many buffers are lent out and were not released.
func (l *Link) Outstanding() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, s := range l.slots {
		if s.lent {
			n++
		}
	}
	return n
}

// Reachable says whether any link has dst, or it is a group.
func (l *Link) Reachable(dst hca.GID) bool {
	return dst.IsMulticast() || slices.ContainsFunc(l.net.links, func(o *Link) bool {
		return slices.Contains(o.state.Load().GIDs, dst)
	})
}

func (l *Link) joined(group hca.GID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.groups[group] > 0
}

// Join has the link hear a group.
func (l *Link) Join(group hca.GID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	if !group.IsMulticast() {
		return fmt.Errorf("join group %s: it is not a multicast GID", group)
	}
	l.groups[group]++
	return nil
}

// Leave undoes one Join.
func (l *Link) Leave(group hca.GID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.groups[group] == 0 {
		return fmt.Errorf("leave group %s: the link did not join it", group)
	}
	if l.groups[group]--; l.groups[group] == 0 {
		delete(l.groups, group)
	}
	return nil
}

// Groups are the groups that the link is in, with how often it joined.
func (l *Link) Groups() map[hca.GID]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.groups)
}

// Counters are of what the link sent and, rx, received.
func (l *Link) Counters() map[string]uint64 {
	c := &l.count
	return map[string]uint64{
		"tx_packets": c.tx.Load(), "tx_bytes": c.txBytes.Load(), "tx_link_down": c.txDown.Load(),
		"tx_bad_length": c.txBad.Load(), "tx_unreachable": c.unreachable.Load(),
		"filtered": c.filtered.Load(), "lost": c.lost.Load(), "duplicated": c.duplicated.Load(),
		"reordered": c.reordered.Load(), "corrupted": c.corrupted.Load(), "marked": c.marked.Load(),
		"rx_packets": c.rx.Load(), "rx_bytes": c.rxBytes.Load(), "rx_link_down": c.rxDown.Load(),
		"rx_no_buffer": c.rxNoBuffer.Load(),
	}
}

// Close ends every Recv with ErrClosed.
func (l *Link) Close() error { return l.end(roce.ErrClosed) }

// Break ends every Recv and Send with ErrGone, as a NIC that was unplugged.
func (l *Link) Break() { l.end(roce.ErrGone) }

// end ends the link for the reason err, if it has not ended yet.
func (l *Link) end(err error) error {
	for i := range l.net.links {
		p := &l.net.paths[i*len(l.net.links)+l.index]
		p.mu.Lock()
		if p.timer != nil {
			p.timer.Stop()
		}
		p.held = nil
		p.mu.Unlock()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil || err == roce.ErrClosed {
		l.err = err
	}
	l.ready.Broadcast()
	return nil
}

func (l *Link) ended() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// markCE sets CE in the traffic class of an ECN capable packet (RFC 3168 §5), with
// the IPv4 header's sum, and says whether it did.
func markCE(ip []byte) bool {
	if len(ip) < 20 {
		return false
	}
	switch ip[0] >> 4 {
	case 4:
		if e := ip[1] & roce.ECNMask; e == 0 || e == roce.CE {
			return false
		}
		was := binary.BigEndian.Uint16(ip)
		ip[1] |= roce.CE
		// RFC 1624 §3, equation 3.
		sum := uint32(^binary.BigEndian.Uint16(ip[10:])) + uint32(^was) + uint32(binary.BigEndian.Uint16(ip))
		sum = sum&0xffff + sum>>16
		sum = sum&0xffff + sum>>16
		binary.BigEndian.PutUint16(ip[10:], ^uint16(sum))
	case 6:
		if e := ip[1] >> 4 & roce.ECNMask; e == 0 || e == roce.CE {
			return false
		}
		ip[1] |= roce.CE << 4
	default:
		return false
	}
	return true
}
