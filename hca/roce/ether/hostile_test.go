package ether_test

import (
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/ether"
)

// A wire full of nonsense: nothing gets through, nothing is kept, and the link goes on.
func TestHostile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		la, lb := newLink(t, a, cfgA), newLink(t, b, cfgB)
		ra, rb := receive(la), receive(lb)
		good := [][]byte{
			frame(b.mac, a.mac, 0x0800, udp(addrA, addrB, 4791, make([]byte, 40))),
			frame(b.mac, a.mac, 0x86dd, udp(sixA, sixB, 4791, make([]byte, 40))),
			frame(b.mac, a.mac, 0x0800, udp(addrA, addrB, 53, make([]byte, 40))),
			frame(b.mac, a.mac, 0x0800, ip(addrA, addrB, 1, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0})),
			frame(b.mac, a.mac, 0x86dd, ip(llA, llB, 58, make([]byte, 40))),
			frame(b.mac, a.mac, 0x86dd, ip(llA, llB, 44, []byte{17, 0, 0, 1, 0, 0, 0, 1, 0, 0, 18, 0xb7})),
			frame(b.mac, a.mac, 0x0806, []byte{0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 0xa, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 192, 0, 2, 2}),
		}
		rng := rand.New(rand.NewPCG(1, 2))
		for i := range 20000 {
			f := append([]byte(nil), good[rng.IntN(len(good))]...)
			for range rng.IntN(4) {
				f[6+rng.IntN(len(f)-6)] = byte(rng.Uint32())
			}
			if rng.IntN(4) == 0 {
				f = f[:rng.IntN(len(f))]
			}
			if len(f) > 12 && rng.IntN(8) == 0 {
				f = tagged(f, uint16(rng.Uint32()))
			}
			b.inject(f)
			if i%100 == 0 {
				quiet()
				for len(rb.packets) > 0 {
					<-rb.packets
				}
			}
		}
		time.Sleep(time.Minute)
		// More for netstack than its queue holds.
		for range 3 {
			for range slots {
				b.inject(good[6])
			}
			quiet()
		}
		for len(rb.packets) > 0 {
			<-rb.packets
		}
		if err := la.Send(gid("192.0.2.2"), []roce.Buffer{packet(addrA, addrB, nil)}); err != nil {
			t.Fatal(err)
		}
		<-rb.packets
		c := lb.Counters()
		for _, name := range []string{"rx_packets", "rx_stack", "rx_short", "rx_other_vlan", "rx_other_type", "rx_malformed", "rx_other_group"} {
			if c[name] == 0 {
				t.Errorf("no %s: %v", name, c)
			}
		}
		finish(t, la, a, ra)
		finish(t, lb, b, rb)
	})
}

// benchPort gives frames without end, and takes any.
type benchPort struct {
	*port
	data []byte
	next [][]byte // given before data
	took atomic.Uint64
}

func (p *benchPort) Send(frames [][]byte) (int, error) {
	p.took.Add(uint64(len(frames)))
	return len(frames), nil
}

func (p *benchPort) ReleaseFrame(int) {}

func (p *benchPort) Recv(fs []nic.Frame) (int, error) {
	if p.failure() != nil {
		return 0, p.failure()
	}
	for i := range fs {
		d := p.data
		if len(p.next) > 0 {
			d, p.next = p.next[0], p.next[1:]
		}
		fs[i] = nic.Frame{Data: d, Buf: p, Token: i}
	}
	return len(fs), nil
}

func newBench(b *testing.B, p *benchPort) *ether.Link {
	l, err := ether.New(p, cfgA)
	if err != nil {
		b.Fatal(err)
	}
	return l
}

// known has the link know of 192.0.2.2: it is asked for itself by that host.
func known(b *testing.B, l *ether.Link, p *benchPort) {
	arp := []byte{0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 0xb, 192, 0, 2, 2, 0, 0, 0, 0, 0, 0, 192, 0, 2, 1}
	roceFrame := frame(p.mac, nic.MAC{2, 0, 0, 0, 0, 0xb}, 0x0800, udp(addrB, addrA, 4791, nil))
	rs := make([]roce.Received, 1)
	for p.took.Store(0); p.took.Load() < 1; {
		p.next = [][]byte{frame(p.mac, nic.MAC{2, 0, 0, 0, 0, 0xb}, 0x0806, arp), roceFrame}
		if _, err := l.Recv(rs); err != nil {
			b.Fatal(err)
		}
		rs[0].Release()
		runtime.Gosched()
	}
	before := l.Counters()["tx_packets"]
	for l.Counters()["tx_packets"] == before {
		if err := l.Send(gid("192.0.2.2"), []roce.Buffer{packet(addrA, addrB, nil)}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRecv(b *testing.B) {
	p := &benchPort{port: newPort(b, nic.MAC{2, 0, 0, 0, 0, 0xa})}
	p.data = frame(p.mac, nic.MAC{2, 0, 0, 0, 0, 0xb}, 0x0800, udp(addrB, addrA, 4791, make([]byte, 1040)))
	l := newBench(b, p)
	defer func() { _ = l.Close() }()
	rs := make([]roce.Received, 32)
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if n%len(rs) == 0 { // one op is one packet
			k, err := l.Recv(rs)
			if err != nil || k != len(rs) {
				b.Fatal(k, err)
			}
			for i := range rs {
				rs[i].Release()
			}
		}
	}
}

func BenchmarkSend(b *testing.B) {
	p := &benchPort{port: newPort(b, nic.MAC{2, 0, 0, 0, 0, 0xa})}
	l := newBench(b, p)
	defer func() { _ = l.Close() }()
	group := gid("ff0e::1")
	ps := make([]roce.Buffer, 32)
	for i := range ps {
		ps[i] = packet(sixA, sixB, make([]byte, 1040))
	}
	for _, name := range []string{"neighbour", "group"} {
		b.Run(name, func(b *testing.B) {
			dst := group
			if name == "neighbour" {
				dst = gid("192.0.2.2")
				known(b, l, p)
			}
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				if n%len(ps) == 0 {
					if err := l.Send(dst, ps); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
