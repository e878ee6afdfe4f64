// Package rocetest is RoCE links for tests: n roce.Links joined by one network in
// memory, which loses, duplicates, reorders, corrupts and marks packets by a seed, and
// shows every packet to a filter.
//
// Who may call it: tests only. It uses no real I/O, only condition variables and
// timers, so that it runs in the bubbles of testing/synctest as well. It is stricter
// than a real link: a buffer that is given back is overwritten, one that is
// given back twice panics, and the headroom of what was sent is written to.
//
// Lock order: Link.watchMu, then path.mu, then Link.mu. The filter and the watcher
// are called with neither of the last two held.
package rocetest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

const (
	// defaultMTU is a link's when Config gives none: what fits into Ethernet's 1500.
	defaultMTU = 1024
	// defaultQueue is how many packets wait at a link when Config does not say.
	defaultQueue = 1024
	// lentFactor bounds the buffers of a link, those that wait and those that are
	// lent out, as a multiple of its queue.
	lentFactor = 4
	// defaultReorderBy is the most packets that overtake one that is held back.
	defaultReorderBy = 3
	// holdTime is how long a packet that was held back waits for others to overtake
	// it. It is far below the shortest timeout of a queue pair in use (IBTA 1.4
	// §9.7.6.1.3), and in a bubble it passes when everybody waits.
	holdTime = time.Millisecond
	// headersMax is the most that a packet has beside its payload.
	headersMax = roce.MaxPacket - roce.MaxPayload
)

// Faults are the probabilities, 0 to 1, of what happens to a packet on its way.
// Each is drawn for each packet and each receiver.
type Faults struct {
	Loss, Duplicate, Corrupt float64
	// Reorder holds a packet back behind 1 to ReorderBy later ones of the same way,
	// or for a millisecond if so many do not come. ReorderBy 0 is 3.
	Reorder   float64
	ReorderBy int
	// Mark sets CE in packets that are ECN capable (ECT(0) or ECT(1)).
	Mark float64
}

// Verdict is what a Filter says of a packet. The zero Verdict lets it pass.
type Verdict struct {
	Drop bool
	// Packet is sent in its place, if it is not nil. It is copied.
	Packet []byte
}

// Filter sees each packet that goes from a link to another (each receiver's of a
// group), IP header to ICRC, before any fault. It may not keep or change ip; it runs
// on the sender's goroutine and may call Inject, Send and SetFaults.
type Filter func(from, to int, ip []byte) Verdict

// Config is what a network is made by; the zero Config is a network without faults.
type Config struct {
	// Seed makes the faults. They depend on it, on from and to, and on how many
	// packets went that way before; not on time or on other ways.
	Seed uint64
	// MTU of every link, default 1024.
	MTU int
	// GIDs by link. By default link i has fe80::i+1, 10.77.0.i+1, and fd77::i+1.
	GIDs [][]hca.GID
	// Queue is how many packets wait at a link, default 1024; what comes then is
	// dropped.
	Queue  int
	Faults Faults
	Filter Filter
}

// Net is a network.
type Net struct {
	links  []*Link
	paths  []path // from*len(links)+to
	faults atomic.Pointer[Faults]
	filter atomic.Pointer[Filter]
}

// NewNet joins n links.
func NewNet(n int, cfg Config) *Net {
	net := &Net{paths: make([]path, n*n)}
	net.SetFaults(cfg.Faults)
	net.SetFilter(cfg.Filter)
	if cfg.MTU == 0 {
		cfg.MTU = defaultMTU
	}
	if cfg.Queue == 0 {
		cfg.Queue = defaultQueue
	}
	for i := range n {
		l := &Link{net: net, index: i, queue: make([]int, cfg.Queue), groups: map[hca.GID]int{}}
		l.ready.L = &l.mu
		state := roce.LinkState{Up: true, MTU: cfg.MTU, Mbps: 100000, NetDev: fmt.Sprintf("test%d", i)}
		if i < len(cfg.GIDs) {
			state.GIDs = slices.Clone(cfg.GIDs[i])
		} else {
			hi, lo := byte((i+1)>>8), byte(i+1)
			state.GIDs = []hca.GID{
				{0: 0xfe, 1: 0x80, 14: hi, 15: lo},
				hca.IPv4GID([4]byte{10, 77, hi, lo}),
				{0: 0xfd, 1: 0x77, 14: hi, 15: lo},
			}
		}
		l.state.Store(&state)
		net.links = append(net.links, l)
	}
	for i := range net.paths {
		p := &net.paths[i]
		p.to = net.links[i%n]
		p.rand = rand.New(rand.NewPCG(cfg.Seed, uint64(i/n)<<32|uint64(i%n)))
	}
	return net
}

// NewPair is a network of two links.
func NewPair(cfg Config) (a, b *Link) {
	n := NewNet(2, cfg)
	return n.links[0], n.links[1]
}

// Link is link i.
func (n *Net) Link(i int) *Link { return n.links[i] }

// SetFaults changes the probabilities from the next packet on.
func (n *Net) SetFaults(f Faults) {
	if f.ReorderBy == 0 {
		f.ReorderBy = defaultReorderBy
	}
	n.faults.Store(&f)
}

// SetFilter puts f, or none if it is nil, in place of the filter.
func (n *Net) SetFilter(f Filter) { n.filter.Store(&f) }

// Close closes all links.
func (n *Net) Close() {
	for _, l := range n.links {
		l.Close()
	}
}

// path is the way from one link to another.
type path struct {
	to *Link

	// mu guards what follows and keeps the packets of this way in order.
	mu    sync.Mutex
	rand  *rand.Rand
	held  []held
	timer *time.Timer // lets all go that is held
}

// held is a packet that waits until behind others have passed it.
type held struct {
	ip     []byte
	behind int
}

// send carries a packet on from the filter.
func (p *path) send(ip []byte, f *Faults, c *counters) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// All are drawn always: one fault's probability does not change another's luck.
	loss, duplicate, corrupt := p.rand.Float64(), p.rand.Float64(), p.rand.Float64()
	reorder, mark := p.rand.Float64(), p.rand.Float64()
	bit, behind := p.rand.Uint64(), p.rand.IntN(max(f.ReorderBy, 1))+1
	if loss < f.Loss {
		c.lost.Add(1)
		return
	}
	change := func(b []byte) {
		if mark < f.Mark && markCE(b) {
			c.marked.Add(1)
		}
		if corrupt < f.Corrupt {
			bit := bit % (uint64(len(b)) * 8)
			b[bit/8] ^= 1 << (bit % 8)
			c.corrupted.Add(1)
		}
	}
	if reorder < f.Reorder {
		c.reordered.Add(1)
		b := slices.Clone(ip)
		change(b)
		p.held = append(p.held, held{b, behind})
		if len(p.held) == 1 {
			if p.timer == nil {
				p.timer = time.AfterFunc(holdTime, p.letGo)
			} else {
				p.timer.Reset(holdTime)
			}
		}
	} else {
		p.to.receive(ip, change)
		p.pass()
	}
	if duplicate < f.Duplicate {
		c.duplicated.Add(1)
		p.to.receive(ip, nil)
	}
}

// pass counts a packet that went by those that are held, and lets go whom enough
// have passed.
func (p *path) pass() {
	rest := p.held[:0]
	for _, h := range p.held {
		if h.behind--; h.behind == 0 {
			p.to.receive(h.ip, nil)
		} else {
			rest = append(rest, h)
		}
	}
	clear(p.held[len(rest):])
	p.held = rest
}

// letGo is the timer's.
func (p *path) letGo() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range p.held {
		p.to.receive(h.ip, nil)
	}
	p.held = nil
}
