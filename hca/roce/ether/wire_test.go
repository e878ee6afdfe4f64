package ether_test

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/ether"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// port is a nic.Port in memory. What it sends goes into out; what inject is given is
// received. Its buffers are counted, so that a frame released twice or never shows.
type port struct {
	mac      nic.MAC
	maxFrame int

	mu     sync.Mutex
	state  nic.State
	watch  func(nic.State)
	groups []nic.MAC
	rxq    [][]byte // buffers with a frame in them
	wake   chan struct{}
	dead   error
	err    error // what Multicast says

	free   chan []byte
	bufs   []slot
	out    func(frame []byte) // called with the bytes for the call alone; nil drops
	full   atomic.Int32       // that many calls of Send find the ring full
	badOne atomic.Bool        // the next frame is refused
	misses atomic.Int32
	t      testing.TB
}

type slot struct {
	b    []byte
	out  atomic.Bool
	used int
}

const slots = 512

func newPort(t testing.TB, mac nic.MAC) *port {
	p := &port{t: t, mac: mac, maxFrame: 1518, state: nic.State{Up: true, Mbps: 1000}, wake: make(chan struct{}, 1)}
	p.bufs = make([]slot, slots)
	p.free = make(chan []byte, slots)
	for i := range p.bufs {
		b := make([]byte, 9100)
		binary.LittleEndian.PutUint32(b[9000:], uint32(i))
		p.bufs[i].b = b
		p.free <- b
	}
	return p
}

// pair joins two ports by a cable.
func pair(t testing.TB) (a, b *port) {
	a, b = newPort(t, nic.MAC{2, 0, 0, 0, 0, 0xa}), newPort(t, nic.MAC{2, 0, 0, 0, 0, 0xb})
	a.out, b.out = b.inject, a.inject
	return a, b
}

func (p *port) inject(f []byte) {
	var b []byte
	select {
	case b = <-p.free:
	default:
		p.misses.Add(1)
		return
	}
	i := binary.LittleEndian.Uint32(b[9000:])
	n := copy(b[:9000], f)
	p.mu.Lock()
	p.bufs[i].used = n
	p.rxq = append(p.rxq, b)
	p.mu.Unlock()
	p.kick()
}

func (p *port) kick() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *port) ReleaseFrame(token int) {
	s := &p.bufs[token]
	if !s.out.CompareAndSwap(true, false) {
		p.t.Errorf("buffer %d was released twice", token)
		return
	}
	p.free <- s.b
}

// outstanding is how many frames were not released.
func (p *port) outstanding() (n int) {
	for i := range p.bufs {
		if p.bufs[i].out.Load() {
			n++
		}
	}
	return n
}

func (p *port) MAC() nic.MAC  { return p.mac }
func (p *port) MaxFrame() int { return p.maxFrame }

func (p *port) State() nic.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

func (p *port) Watch(f func(nic.State)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watch = f
}

// cable has f get what is sent from now on.
func (p *port) cable(f func([]byte)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out = f
}

func (p *port) set(s nic.State) {
	p.mu.Lock()
	p.state = s
	f := p.watch
	p.mu.Unlock()
	f(s)
}

func (p *port) Multicast(groups []nic.MAC) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return p.err
	}
	p.groups = groups
	return nil
}

func (p *port) failMulticast(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

func (p *port) filters(m nic.MAC) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.groups {
		if g == m {
			return true
		}
	}
	return false
}

func (p *port) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dead
}

func (p *port) Send(frames [][]byte) (int, error) {
	p.mu.Lock()
	err, out := p.dead, p.out
	p.mu.Unlock()
	if err != nil {
		return 0, err
	}
	for i, f := range frames {
		if len(f) > p.maxFrame {
			p.t.Errorf("a frame of %d bytes", len(f))
		}
		if p.full.Load() > 0 && p.full.Add(-1) >= 0 {
			return i, nic.ErrFull
		}
		if p.badOne.Swap(false) {
			return i, errBad
		}
		if out != nil {
			out(f)
		}
	}
	return len(frames), nil
}

type badFrame struct{}

func (badFrame) Error() string { return "no frame" }

var errBad = badFrame{}

func (p *port) Recv(fs []nic.Frame) (int, error) {
	for {
		p.mu.Lock()
		if p.dead != nil {
			p.mu.Unlock()
			p.kick()
			return 0, p.dead
		}
		n := 0
		for n < len(fs) && len(p.rxq) > 0 {
			b := p.rxq[0]
			p.rxq = p.rxq[:copy(p.rxq, p.rxq[1:])]
			i := int(binary.LittleEndian.Uint32(b[9000:]))
			p.bufs[i].out.Store(true)
			fs[n] = nic.Frame{Data: b[:p.bufs[i].used], Buf: p, Token: i}
			n++
		}
		more := len(p.rxq) > 0
		p.mu.Unlock()
		if more {
			p.kick()
		}
		if n > 0 {
			return n, nil
		}
		<-p.wake
	}
}

func (p *port) Counters() map[string]uint64 { return nil }

func (p *port) kill(err error) {
	p.mu.Lock()
	if p.dead == nil {
		p.dead = err
	}
	p.mu.Unlock()
	p.kick()
}

func (p *port) Close() error {
	p.kill(nic.ErrClosed)
	return nil
}

// receiver runs Recv and hands on what came.
type receiver struct {
	packets chan []byte
	err     chan error
}

func receive(l *ether.Link) *receiver {
	r := &receiver{packets: make(chan []byte, 1024), err: make(chan error, 1)}
	go func() {
		rs := make([]roce.Received, 16)
		for {
			n, err := l.Recv(rs)
			for i := range rs[:n] {
				select {
				case r.packets <- append([]byte(nil), rs[i].IP...):
				default:
				}
				rs[i].Release()
			}
			if err != nil {
				r.err <- err
				return
			}
		}
	}()
	return r
}

func newLink(t testing.TB, p *port, cfg ether.Config) *ether.Link {
	t.Helper()
	l, err := ether.New(p, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// finish closes a link whose Recv runs, and looks that all is given back.
func finish(t testing.TB, l *ether.Link, p *port, r *receiver) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := <-r.err; !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Recv ended with %v", err)
	}
	if n := p.outstanding(); n != 0 {
		t.Errorf("%d frames were not released", n)
	}
}

// quiet waits, in a bubble, until nobody has anything to do at once.
func quiet() {
	time.Sleep(time.Millisecond)
	synctest.Wait()
}

// packet makes a UDP packet to RoCE's port with a payload, in headroom.
func packet(src, dst netip.Addr, payload []byte) roce.Buffer {
	b := make(roce.Buffer, roce.Headroom)
	b = append(b, udp(src, dst, 4791, payload)...)
	return b
}

func udp(src, dst netip.Addr, port uint16, payload []byte) []byte {
	u := make([]byte, 8, 8+len(payload))
	binary.BigEndian.PutUint16(u, 0xc000)
	binary.BigEndian.PutUint16(u[2:], port)
	binary.BigEndian.PutUint16(u[4:], uint16(8+len(payload)))
	return ip(src, dst, 17, append(u, payload...))
}

func ip(src, dst netip.Addr, proto byte, body []byte) []byte {
	if src.Is4() {
		h := make([]byte, 20, 20+len(body))
		h[0], h[6], h[8], h[9] = 0x45, 0x40, 64, proto
		binary.BigEndian.PutUint16(h[2:], uint16(20+len(body)))
		s, d := src.As4(), dst.As4()
		copy(h[12:], s[:])
		copy(h[16:], d[:])
		binary.BigEndian.PutUint16(h[10:], ^checksum(h))
		return append(h, body...)
	}
	h := make([]byte, 40, 40+len(body))
	h[0], h[6], h[7] = 0x60, proto, 64
	binary.BigEndian.PutUint16(h[4:], uint16(len(body)))
	s, d := src.As16(), dst.As16()
	copy(h[8:], s[:])
	copy(h[24:], d[:])
	return append(h, body...)
}

func checksum(parts ...[]byte) uint16 {
	var s uint32
	for _, p := range parts {
		for i := 0; i < len(p); i += 2 {
			s += uint32(p[i]) << 8
			if i+1 < len(p) {
				s += uint32(p[i+1])
			}
		}
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

func frame(dst, src nic.MAC, typ uint16, l3 []byte) []byte {
	f := append(append([]byte{}, dst[:]...), src[:]...)
	f = binary.BigEndian.AppendUint16(f, typ)
	return append(f, l3...)
}

func tagged(f []byte, tci uint16) []byte {
	g := append([]byte{}, f[:12]...)
	g = binary.BigEndian.AppendUint16(g, 0x8100)
	g = binary.BigEndian.AppendUint16(g, tci)
	return append(g, f[12:]...)
}

func gid(s string) hca.GID { return hca.GID(netip.MustParseAddr(s).As16()) }

func prefixes(s ...string) (ps []netip.Prefix) {
	for _, p := range s {
		ps = append(ps, netip.MustParsePrefix(p))
	}
	return ps
}
