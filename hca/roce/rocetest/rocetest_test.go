package rocetest_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/rocetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// packet is number n from a to b, with an ECN capable traffic class.
func packet(a, b hca.GID, n int) roce.Buffer {
	p := roce.Packet{Src: a, Dst: b, SrcPort: 0xC000, TrafficClass: roce.ECT0, HopLimit: 64, Op: roce.RC | roce.SendOnly, PSN: uint32(n)}
	buf := make([]byte, roce.Headroom+roce.MaxPacket)
	at := p.Build(buf)
	return roce.Seal(buf, at+copy(buf[at:], fmt.Sprintf("packet %d", n)))
}

// drain takes all that is there by the time everybody waits, as PSNs; -1 is one that
// cannot be read.
type drain struct {
	mu   sync.Mutex
	psns []int
	ce   int
	done chan struct{}
}

func receive(t *testing.T, l *rocetest.Link) *drain {
	d := &drain{done: make(chan struct{})}
	go func() {
		defer close(d.done)
		rs := make([]roce.Received, 4)
		for {
			n, err := l.Recv(rs)
			if err != nil {
				if !errors.Is(err, roce.ErrClosed) && !errors.Is(err, roce.ErrGone) {
					t.Errorf("Recv: %v", err)
				}
				return
			}
			d.mu.Lock()
			for i := range rs[:n] {
				var p roce.Packet
				if err := roce.Parse(rs[i].IP, &p); err != nil {
					d.psns = append(d.psns, -1)
				} else {
					d.psns = append(d.psns, int(p.PSN))
				}
				if p.TrafficClass&roce.ECNMask == roce.CE {
					d.ce++
				}
				rs[i].Release()
			}
			d.mu.Unlock()
		}
	}()
	return d
}

// run sends count packets by cfg, one at a time, and returns what came.
func run(t *testing.T, cfg rocetest.Config, count int) (psns []int, ce int, counters map[string]uint64) {
	synctest.Test(t, func(t *testing.T) {
		a, b := rocetest.NewPair(cfg)
		d := receive(t, b)
		for i := range count {
			if err := a.Send(b.IPv4(), []roce.Buffer{packet(a.IPv4(), b.IPv4(), i)}); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		timePasses()
		b.Net().Close()
		<-d.done
		if n := b.Outstanding(); n != 0 {
			t.Errorf("%d buffers are out", n)
		}
		psns, ce, counters = d.psns, d.ce, a.Counters()
	})
	return psns, ce, counters
}

func TestFaults(t *testing.T) {
	const count = 2000
	all := make([]int, count)
	for i := range all {
		all[i] = i
	}
	for _, c := range []struct {
		name    string
		faults  rocetest.Faults
		counter string
		check   func(t *testing.T, psns []int, hit int)
	}{
		{"none", rocetest.Faults{}, "lost", func(t *testing.T, psns []int, hit int) {
			if hit != 0 || !slices.Equal(psns, all) {
				t.Errorf("%d lost, %d came", hit, len(psns))
			}
		}},
		{"loss", rocetest.Faults{Loss: 0.1}, "lost", func(t *testing.T, psns []int, hit int) {
			if len(psns) != count-hit || !slices.IsSorted(psns) {
				t.Errorf("%d lost, %d came", hit, len(psns))
			}
		}},
		{"duplicates", rocetest.Faults{Duplicate: 0.1}, "duplicated", func(t *testing.T, psns []int, hit int) {
			if len(psns) != count+hit || !slices.Equal(slices.Compact(psns), all) {
				t.Errorf("%d duplicated, %d came", hit, len(psns))
			}
		}},
		{"order", rocetest.Faults{Reorder: 0.1, ReorderBy: 5}, "reordered", func(t *testing.T, psns []int, _ int) {
			if slices.IsSorted(psns) {
				t.Error("all came in order")
			}
			for at, n := range psns {
				if at-n > 5+5 {
					t.Errorf("packet %d came at %d", n, at)
				}
			}
			slices.Sort(psns)
			if !slices.Equal(psns, all) {
				t.Errorf("%d came", len(psns))
			}
		}},
		{"corruption", rocetest.Faults{Corrupt: 0.1}, "corrupted", func(t *testing.T, psns []int, hit int) {
			bad := 0
			for _, n := range psns {
				if n < 0 {
					bad++
				}
			}
			// A bit that the ICRC does not cover does no harm.
			if len(psns) != count || bad == 0 || bad > hit || bad < hit/2 {
				t.Errorf("%d corrupted, %d of %d came so", hit, bad, len(psns))
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := rocetest.Config{Seed: 7, Queue: 2 * count, Faults: c.faults}
			psns, _, counters := run(t, cfg, count)
			hit := int(counters[c.counter])
			if c.name != "none" && (hit < count/20 || hit > count/5) {
				t.Errorf("%d of %d were hit, want about a tenth", hit, count)
			}
			c.check(t, slices.Clone(psns), hit)
			if again, _, _ := run(t, cfg, count); !slices.Equal(psns, again) {
				t.Error("the same seed did something else")
			}
			cfg.Seed++
			if other, _, _ := run(t, cfg, count); c.name != "none" && slices.Equal(psns, other) {
				t.Error("another seed did the same")
			}
		})
	}
}

func TestMark(t *testing.T) {
	psns, ce, counters := run(t, rocetest.Config{Faults: rocetest.Faults{Mark: 0.5}}, 100)
	if len(psns) != 100 || slices.Contains(psns, -1) || ce == 0 || ce == 100 || ce != int(counters["marked"]) {
		t.Errorf("%d came, %d with CE, %d marked", len(psns), ce, counters["marked"])
	}
}

// TestMarkSum: the sum of a marked IPv4 header is right, and what is not ECN
// capable is left alone.
func TestMarkSum(t *testing.T) {
	a, b := rocetest.NewPair(rocetest.Config{Faults: rocetest.Faults{Mark: 1}})
	defer a.Net().Close()
	for _, c := range []struct {
		src, dst  hca.GID
		was, want uint8
	}{
		{a.IPv4(), b.IPv4(), 0x41, 0x43}, {a.IPv4(), b.IPv4(), 0x42, 0x43}, {a.IPv4(), b.IPv4(), 0x40, 0x40}, {a.IPv4(), b.IPv4(), 3, 3},
		{a.IPv6(), b.IPv6(), 0x41, 0x43}, {a.IPv6(), b.IPv6(), 0x42, 0x43}, {a.IPv6(), b.IPv6(), 0x40, 0x40}, {a.IPv6(), b.IPv6(), 3, 3},
	} {
		p := roce.Packet{Src: c.src, Dst: c.dst, TrafficClass: c.was, Op: roce.CNP}
		buf := make([]byte, roce.Headroom+roce.MaxPacket)
		a.Send(c.dst, []roce.Buffer{roce.Seal(buf, p.Build(buf))})
		rs := make([]roce.Received, 1)
		if _, err := b.Recv(rs); err != nil {
			t.Fatal(err)
		}
		if err := roce.Parse(rs[0].IP, &p); err != nil || p.TrafficClass != c.want {
			t.Errorf("%#x became %#x, %v, want %#x", c.was, p.TrafficClass, err, c.want)
		}
		if p.V4() {
			sum := uint32(0)
			for i := 0; i < 20; i += 2 {
				sum += uint32(binary.BigEndian.Uint16(rs[0].IP[i:]))
			}
			if sum = sum&0xffff + sum>>16; sum != 0xffff {
				t.Errorf("traffic class %#x: header sums up to %#x", c.was, sum)
			}
		}
		rs[0].Release()
	}
}

// TestHeldAlone: a packet that is held back comes though no other does.
func TestHeldAlone(t *testing.T) {
	for range 3 {
		if psns, _, _ := run(t, rocetest.Config{Faults: rocetest.Faults{Reorder: 1}}, 1); !slices.Equal(psns, []int{0}) {
			t.Errorf("%v came", psns)
		}
	}
}

func TestFilter(t *testing.T) {
	var inject *rocetest.Link
	cfg := rocetest.Config{Filter: func(from, to int, ip []byte) rocetest.Verdict {
		var p roce.Packet
		if err := roce.Parse(ip, &p); err != nil || from != 0 || to != 1 {
			t.Errorf("filter sees %d to %d: %v", from, to, err)
		}
		switch p.PSN {
		case 1:
			return rocetest.Verdict{Drop: true}
		case 2:
			return rocetest.Verdict{Packet: []byte(packet(p.Src, p.Dst, 77))[roce.Headroom:]}
		case 3:
			inject.Inject([]byte("nonsense"))
		}
		return rocetest.Verdict{}
	}}
	synctest.Test(t, func(t *testing.T) {
		a, b := rocetest.NewPair(cfg)
		inject = b
		d := receive(t, b)
		var all []roce.Buffer
		for i := range 5 {
			all = append(all, packet(a.IPv6(), b.IPv6(), i))
		}
		a.Send(b.IPv6(), all)
		if all[0][0] == 0 {
			t.Error("Send left the headroom alone")
		}
		synctest.Wait()
		a.Net().Close()
		<-d.done
		if want := []int{0, 77, -1, 3, 4}; !slices.Equal(d.psns, want) {
			t.Errorf("%v came, want %v", d.psns, want)
		}
	})
}

func TestGroups(t *testing.T) {
	net := rocetest.NewNet(3, rocetest.Config{})
	defer net.Close()
	group := hca.GID{0: 0xff, 1: 0x0e, 15: 1}
	a, b, c := net.Link(0), net.Link(1), net.Link(2)
	for _, l := range []*rocetest.Link{a, b, b, c} {
		if err := l.Join(group); err != nil {
			t.Fatal(err)
		}
	}
	send := func() { a.Send(group, []roce.Buffer{packet(a.IPv6(), group, 1)}) }
	leave := func(l *rocetest.Link) {
		if err := l.Leave(group); err != nil {
			t.Error(err)
		}
	}
	got := func() [3]uint64 {
		return [3]uint64{a.Counters()["rx_packets"], b.Counters()["rx_packets"], c.Counters()["rx_packets"]}
	}
	send()
	leave(b)
	send()
	leave(b)
	send()
	if want := [3]uint64{0, 2, 3}; got() != want {
		t.Errorf("%v came, want %v", got(), want)
	}
	if b.Leave(group) == nil || b.Join(b.IPv4()) == nil || len(b.Groups()) != 0 || c.Groups()[group] != 1 {
		t.Error("groups are not counted")
	}
	if !a.Reachable(group) || !a.Reachable(b.IPv4()) || a.Reachable(hca.GID{1}) {
		t.Error("Reachable is wrong")
	}
	if a.Send(hca.GID{1}, []roce.Buffer{packet(a.IPv6(), group, 1)}); a.Counters()["tx_unreachable"] != 1 {
		t.Error("a packet to nobody was not counted")
	}
}

// TestBounds: the queue, the buffers and the length are bounded.
func TestBounds(t *testing.T) {
	a, b := rocetest.NewPair(rocetest.Config{Queue: 4, MTU: 256, GIDs: [][]hca.GID{{{1}}, {{2}, hca.IPv4GID([4]byte{10})}}})
	defer a.Net().Close()
	if b.State().GIDs[0] != (hca.GID{2}) || b.IPv6() != (hca.GID{2}) || a.IPv4() != (hca.GID{}) || b.State().MTU != 256 || b.Index() != 1 {
		t.Errorf("state is %+v", b.State())
	}
	send := func(n int) {
		for i := range n {
			a.Send(hca.GID{2}, []roce.Buffer{packet(hca.GID{1}, hca.GID{2}, i)})
		}
	}
	send(6)
	if c := b.Counters(); c["rx_packets"] != 4 || c["rx_no_buffer"] != 2 {
		t.Errorf("counters are %v", c)
	}
	var out []roce.Received
	for range 4 {
		rs := make([]roce.Received, 8)
		n, err := b.Recv(rs)
		if err != nil || n != 4 {
			t.Fatal(n, err)
		}
		out = append(out, rs[:n]...)
		send(4)
	}
	if b.Outstanding() != 16 || b.Counters()["rx_no_buffer"] != 6 {
		t.Errorf("%d are out, counters are %v", b.Outstanding(), b.Counters())
	}
	kept := out[0].IP
	again := out[0]
	out[0].Release()
	if !bytes.Equal(kept, bytes.Repeat([]byte{0xdb}, len(kept))) {
		t.Error("a buffer that was given back was not overwritten")
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("a second release did nothing")
			}
		}()
		again.Release()
	}()
	a.Send(hca.GID{2}, []roce.Buffer{make([]byte, roce.Headroom), make([]byte, roce.Headroom+roce.MaxPacket)})
	if n := a.Counters()["tx_bad_length"]; n != 2 {
		t.Errorf("%d bad lengths", n)
	}
}

func TestUpAndDown(t *testing.T) {
	a, b := rocetest.NewPair(rocetest.Config{})
	var seen []bool
	b.Watch(func(s roce.LinkState) { seen = append(seen, s.Up) })
	send := func() { a.Send(b.IPv4(), []roce.Buffer{packet(a.IPv4(), b.IPv4(), 1)}) }
	b.SetUp(false)
	send()
	b.SetUp(true)
	a.SetUp(false)
	send()
	a.SetUp(true)
	send()
	b.SetState(func(s *roce.LinkState) { s.MTU = 4096 })
	if b.State().MTU != 4096 || !slices.Equal(seen, []bool{false, true, true}) {
		t.Errorf("state is %+v, seen %v", b.State(), seen)
	}
	if a.Counters()["tx_link_down"] != 1 || b.Counters()["rx_link_down"] != 1 || b.Counters()["rx_packets"] != 1 {
		t.Errorf("counters are %v, %v", a.Counters(), b.Counters())
	}
	a.Break()
	if err := a.Send(b.IPv4(), nil); !errors.Is(err, roce.ErrGone) {
		t.Errorf("Send on a broken link: %v", err)
	}
	a.Net().Close()
	if _, err := b.Recv(make([]roce.Received, 1)); !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Recv on a closed link: %v", err)
	}
	if err := b.Join(hca.GID{0: 0xff}); !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Join on a closed link: %v", err)
	}
	a.Break() // and what was closed stays so
	if err := a.Send(b.IPv4(), nil); !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Send on a closed link: %v", err)
	}
}

// TestCrowd: several send and several receive at once, and all is there.
func TestCrowd(t *testing.T) {
	const senders, each = 4, 500
	net := rocetest.NewNet(senders+1, rocetest.Config{Queue: senders * each, Faults: rocetest.Faults{Reorder: 0.2, Duplicate: 0.1}})
	to := net.Link(senders)
	ds := []*drain{receive(t, to), receive(t, to), receive(t, to)}
	var wg sync.WaitGroup
	for i := range senders {
		wg.Go(func() {
			from := net.Link(i)
			for n := range each {
				from.Send(to.IPv4(), []roce.Buffer{packet(from.IPv4(), to.IPv4(), n)})
			}
		})
	}
	wg.Wait()
	seen := func() (n int) {
		for _, d := range ds {
			d.mu.Lock()
			n += len(d.psns)
			d.mu.Unlock()
		}
		return n
	}
	want := uint64(senders * each)
	for i := range senders {
		want += net.Link(i).Counters()["duplicated"]
	}
	for uint64(seen()) < want {
		yield()
	}
	net.Close()
	for _, d := range ds {
		<-d.done
	}
	if to.Outstanding() != 0 {
		t.Errorf("%d buffers are out", to.Outstanding())
	}
}

// BenchmarkLink is a packet sent and received.
func BenchmarkLink(b *testing.B) {
	x, y := rocetest.NewPair(rocetest.Config{})
	defer x.Net().Close()
	out := []roce.Buffer{packet(x.IPv4(), y.IPv4(), 1)}
	rs := make([]roce.Received, 8)
	b.ReportAllocs()
	for b.Loop() {
		x.Send(y.IPv4(), out)
		n, _ := y.Recv(rs)
		for i := range rs[:n] {
			rs[i].Release()
		}
	}
}
