// Package capture lets somebody listen to a RoCE link's packets, and writes them into
// a file that Wireshark and tcpdump read.
//
// A Tap stands between the engine and its link. While nobody listens it costs one
// atomic load a call. A subscriber has a ring of its own, made when it subscribes: a
// packet is copied into a free place of it, or counted as dropped where there is none.
// So a listener that is slow, or stuck, costs the data path a copy at most, and nobody
// allocates or waits.
//
// The file is pcapng (draft-ietf-opsawg-pcapng), one section with one interface of raw
// IP packets (LINKTYPE_RAW), written here: gopacket's writer could do it, but brings
// six megabytes of packet decoders into the program for what is a page of code.
//
// Who may call it: cmd makes a Tap, over a link if there is one, subscribes for who
// asks, and calls Copy; the engine sees a roce.Link, and calls Wants and Note for what
// it moves without a link.
//
// Lock order: Tap.mu is a leaf, and guards only who listens.
package capture

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

const (
	// MaxSubscribers bounds who listens at a time, as each costs the data path a copy.
	MaxSubscribers = 8
	// MaxPackets bounds the packets that wait for a subscriber.
	MaxPackets = 1 << 16
	// MaxSnap is the most bytes kept of a packet: the largest payload of 4096 with
	// all headers, and what else an Ethernet MTU of 9000 lets in. A subscriber of
	// MaxPackets of these holds 564 MiB.
	MaxSnap = 9024
	// DefaultPackets is what 0 packets mean to Subscribe: 4.1 MiB with DefaultSnap.
	DefaultPackets = 1024
	// DefaultSnap is what 0 bytes mean to Subscribe: the largest packet with a payload
	// of 4096 (IPv6, UDP, BTH, XRCETH, RETH, ImmDt and ICRC are 88 bytes).
	DefaultSnap = 4096 + 88
)

// Dir is which way a packet went. The numbers are pcapng's (§4.3.1, epb_flags).
type Dir uint8

// Directions.
const (
	In  Dir = 1
	Out Dir = 2
)

// Packet is a captured IP packet, ICRC included.
type Packet struct {
	Time time.Time
	Dir  Dir
	// Len is the packet's length in bytes; Data is its beginning, as much as the
	// subscriber wanted.
	Len  int
	Data []byte
}

// Tap is a roce.Link over another, with listeners. Without one below it is no link: it
// has what is noted, and nothing else may be called but what is about listeners and
// Close. Use New.
type Tap struct {
	roce.Link
	subs atomic.Pointer[[]*Subscription] // nil while nobody listens; immutable

	// mu serialises changes to subs.
	mu     sync.Mutex
	closed bool
}

var _ roce.Link = (*Tap)(nil)

// New puts a tap over a link, which is the tap's from then on; nil is none.
func New(link roce.Link) *Tap { return &Tap{Link: link} }

// Send implements roce.Link. What it shows is what was to be sent: a packet may be
// lost behind it.
func (t *Tap) Send(dst hca.GID, packets []roce.Buffer) error {
	if subs := t.subs.Load(); subs != nil {
		now := time.Now()
		for _, p := range packets {
			if len(p) > roce.Headroom {
				deliver(*subs, now, Out, p[roce.Headroom:], len(p)-roce.Headroom)
			}
		}
	}
	return t.Link.Send(dst, packets)
}

// Recv implements roce.Link.
func (t *Tap) Recv(rs []roce.Received) (int, error) {
	n, err := t.Link.Recv(rs)
	if subs := t.subs.Load(); subs != nil {
		now := time.Now()
		for i := range rs[:n] {
			deliver(*subs, now, In, rs[i].IP, len(rs[i].IP))
		}
	}
	return n, err
}

// Note shows the listeners an IP packet that went past no link, as between two queue
// pairs of one daemon. It copies what it keeps. ip may be the beginning of a packet of
// n bytes. Ask Wants before making one.
func (t *Tap) Note(dir Dir, ip []byte, n int) {
	if subs := t.subs.Load(); subs != nil {
		deliver(*subs, time.Now(), dir, ip, n)
	}
}

// Listening says whether there is any listener.
func (t *Tap) Listening() bool { return t.subs.Load() != nil }

// Wants is the most bytes of a packet that a listener keeps; 0: nobody listens, which
// costs one atomic load to find out.
func (t *Tap) Wants() int {
	subs := t.subs.Load()
	if subs == nil {
		return 0
	}
	n := 0
	for _, s := range *subs {
		n = max(n, s.snap)
	}
	return n
}

// Close closes the link and ends every subscription, once it has read what is there.
func (t *Tap) Close() error {
	var err error
	if t.Link != nil {
		err = t.Link.Close()
	}
	t.mu.Lock()
	subs := t.subs.Swap(nil)
	t.closed = true
	t.mu.Unlock()
	if subs != nil {
		for _, s := range *subs {
			s.end()
		}
	}
	return err
}

// Subscription is one listener's packets. One goroutine reads it; Close, Received and
// Dropped may be called from any.
type Subscription struct {
	tap  *Tap
	snap int

	// A slot's number is in free, in full, or in the hands of who took it.
	slots []slot
	free  chan int
	full  chan int
	held  int // the slot behind the packet that Next gave last; -1 if none

	received, dropped atomic.Uint64
	start             time.Time
	done              chan struct{}
	once              sync.Once
}

type slot struct {
	p Packet
	b []byte
}

// Subscribe adds a listener, for which at most so many packets wait, with at most snap
// bytes of each; 0 is DefaultPackets and DefaultSnap. EINVAL if a number is not
// between 1 and MaxPackets or MaxSnap, EBUSY if there are MaxSubscribers already,
// roce.ErrClosed.
func (t *Tap) Subscribe(packets, snap int) (*Subscription, error) {
	if packets == 0 {
		packets = DefaultPackets
	}
	if snap == 0 {
		snap = DefaultSnap
	}
	if packets < 0 || packets > MaxPackets || snap < 0 || snap > MaxSnap {
		return nil, fmt.Errorf("capture %d packets of %d bytes: at most %d of %d are kept: %w",
			packets, snap, MaxPackets, MaxSnap, unix.EINVAL)
	}
	s := &Subscription{
		tap: t, snap: snap, held: -1, start: time.Now(), done: make(chan struct{}),
		slots: make([]slot, packets), free: make(chan int, packets), full: make(chan int, packets),
	}
	mem := make([]byte, packets*snap)
	for i := range s.slots {
		s.slots[i].b = mem[i*snap : (i+1)*snap : (i+1)*snap]
		s.free <- i
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, roce.ErrClosed
	}
	var subs []*Subscription
	if old := t.subs.Load(); old != nil {
		subs = *old
	}
	if len(subs) >= MaxSubscribers {
		return nil, fmt.Errorf("capture: %d listen already, end one: %w", len(subs), unix.EBUSY)
	}
	subs = append(subs[:len(subs):len(subs)], s)
	t.subs.Store(&subs)
	return s, nil
}

func deliver(subs []*Subscription, now time.Time, dir Dir, ip []byte, n int) {
	for _, s := range subs {
		s.put(now, dir, ip, n)
	}
}

// put copies a packet into a free slot, or counts it as dropped.
func (s *Subscription) put(now time.Time, dir Dir, ip []byte, n int) {
	s.received.Add(1)
	select {
	case i := <-s.free:
		sl := &s.slots[i]
		sl.p = Packet{Time: now, Dir: dir, Len: n, Data: sl.b[:copy(sl.b, ip)]}
		s.full <- i // has room for all slots
	default:
		s.dropped.Add(1)
	}
}

// Next waits for a packet. Its Data is good until the next call. The error is ctx's, or
// io.EOF after Close, when all that came before was read.
func (s *Subscription) Next(ctx context.Context) (Packet, error) {
	if s.held >= 0 {
		s.free <- s.held
		s.held = -1
	}
	select {
	case s.held = <-s.full: // before an end is looked for
		return s.slots[s.held].p, nil
	default:
	}
	select {
	case s.held = <-s.full:
		return s.slots[s.held].p, nil
	case <-ctx.Done():
		return Packet{}, ctx.Err()
	case <-s.done:
	}
	select {
	case s.held = <-s.full:
		return s.slots[s.held].p, nil
	default:
		return Packet{}, io.EOF
	}
}

// Received is how many packets went past so far, with those that were dropped.
func (s *Subscription) Received() uint64 { return s.received.Load() }

// Dropped is how many found no room.
func (s *Subscription) Dropped() uint64 { return s.dropped.Load() }

// Done is closed at the subscription's end, by its Close or the tap's.
func (s *Subscription) Done() <-chan struct{} { return s.done }

// Close takes the listener away. It does not wait.
func (s *Subscription) Close() {
	t := s.tap
	t.mu.Lock()
	if old := t.subs.Load(); old != nil {
		var subs []*Subscription
		for _, o := range *old {
			if o != s {
				subs = append(subs, o)
			}
		}
		if subs == nil {
			t.subs.Store(nil)
		} else {
			t.subs.Store(&subs)
		}
	}
	t.mu.Unlock()
	s.end()
}

func (s *Subscription) end() { s.once.Do(func() { close(s.done) }) }
