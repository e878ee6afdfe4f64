package ether_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/ether"
)

var (
	addrA, addrB = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	sixA, sixB   = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	llA, llB     = netip.MustParseAddr("fe80::ff:fe00:a"), netip.MustParseAddr("fe80::ff:fe00:b")
	cfgA         = ether.Config{Addresses: prefixes("192.0.2.1/24", "2001:db8::1/64")}
	cfgB         = ether.Config{Addresses: prefixes("192.0.2.2/24", "2001:db8::2/64")}
)

func TestState(t *testing.T) {
	for _, tt := range []struct {
		maxFrame, mtu, vlan, want int
	}{
		{1518, 0, 0, 1024},
		{1518, 0, 5, 1024},
		{9018, 0, 0, 1024},
		{9018, 9000, 0, 4096},
		{9018, 4176, 0, 4096},
		{9018, 4175, 0, 2048},
		{1294, 0, 0, 1024},
		{2222, 2127, 0, 1024},
		{2222, 2128, 0, 2048},
	} {
		a, _ := pair(t)
		a.maxFrame = tt.maxFrame
		cfg := cfgA
		cfg.MTU, cfg.VLAN = tt.mtu, tt.vlan
		l := newLink(t, a, cfg)
		want := roce.LinkState{Up: true, MTU: tt.want, Mbps: 1000,
			GIDs: []hca.GID{gid("fe80::ff:fe00:a"), hca.IPv4GID([4]byte{192, 0, 2, 1}), gid("2001:db8::1")}}
		if got := l.State(); !reflect.DeepEqual(got, want) {
			t.Errorf("%+v: state %+v, want %+v", tt, got, want)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestConfig(t *testing.T) {
	many := make([]netip.Prefix, 128)
	for i := range many {
		many[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 24)
	}
	for name, cfg := range map[string]ether.Config{
		"group":                {Addresses: prefixes("224.0.0.1/24")},
		"unspecified":          {Addresses: prefixes("0.0.0.0/24")},
		"loopback":             {Addresses: prefixes("::1/128")},
		"no prefix":            {Addresses: []netip.Prefix{{}}},
		"mapped":               {Addresses: prefixes("::ffff:192.0.2.1/120")},
		"class E":              {Addresses: prefixes("250.0.0.1/24")},
		"twice":                {Addresses: prefixes("192.0.2.1/24", "192.0.2.1/16")},
		"link-local again":     {Addresses: prefixes("fe80::ff:fe00:a/64")},
		"many":                 {Addresses: many},
		"VLAN":                 {VLAN: 4095},
		"negative VLAN":        {VLAN: -1},
		"MTU of the port":      {MTU: 1505},
		"MTU of IPv6":          {MTU: 1279},
		"gateway elsewhere":    {Addresses: prefixes("192.0.2.1/24"), Gateway4: netip.MustParseAddr("192.0.3.1")},
		"gateway ourselves":    {Addresses: prefixes("192.0.2.1/24"), Gateway4: addrA},
		"gateway of the other": {Addresses: prefixes("192.0.2.1/24"), Gateway6: addrB},
		"gateway group":        {Gateway6: netip.MustParseAddr("ff02::1")},
	} {
		a, _ := pair(t)
		if l, err := ether.New(a, cfg); err == nil {
			t.Errorf("%s: no error", name)
			_ = l.Close()
		}
		if a.failure() != nil {
			t.Errorf("%s: the port was closed", name)
		}
	}
	a, _ := pair(t)
	a.failMulticast(errBad)
	if _, err := ether.New(a, cfgA); !errors.Is(err, errBad) {
		t.Errorf("multicast filter: %v", err)
	}
	for _, mac := range []nic.MAC{{}, {1, 2, 3, 4, 5, 6}} {
		if _, err := ether.New(newPort(t, mac), cfgA); err == nil {
			t.Errorf("MAC %v: no error", mac)
		}
	}
}

// Each of two ports finds the other by ARP and neighbour discovery, and what was sent
// before that comes through first.
func TestResolve(t *testing.T) {
	for _, vlan := range []int{0, 7} {
		t.Run(fmt.Sprint(vlan), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := pair(t)
				ca, cb := cfgA, cfgB
				ca.VLAN, cb.VLAN = vlan, vlan
				la, lb := newLink(t, a, ca), newLink(t, b, cb)
				ra, rb := receive(la), receive(lb)
				for _, x := range []struct{ src, dst netip.Addr }{{addrA, addrB}, {sixA, sixB}, {llA, llB}} {
					for i := range 3 {
						body := bytes.Repeat([]byte{byte(i)}, 1+40*i) // the first is padded
						p := packet(x.src, x.dst, body)
						want := append([]byte(nil), p[roce.Headroom:]...)
						if err := la.Send(gid(x.dst.String()), []roce.Buffer{p}); err != nil {
							t.Fatal(err)
						}
						if i > 0 { // the second is sent while the first is held
							continue
						}
						p2 := packet(x.src, x.dst, []byte("second"))
						if err := la.Send(gid(x.dst.String()), []roce.Buffer{p2}); err != nil {
							t.Fatal(err)
						}
						if got := <-rb.packets; !bytes.Equal(got, want) {
							t.Fatalf("%s: got %x, want %x", x.dst, got, want)
						}
						if got := <-rb.packets; string(got[len(got)-6:]) != "second" {
							t.Fatalf("%s: then %x", x.dst, got)
						}
					}
					<-rb.packets
					<-rb.packets
				}
				// b has heard a's questions, and needs none of its own.
				if err := lb.Send(gid("192.0.2.1"), []roce.Buffer{packet(addrB, addrA, nil)}); err != nil {
					t.Fatal(err)
				}
				<-ra.packets
				if c := la.Counters(); c["tx_held"] < 3 || c["tx_held"] > 6 || c["tx_unresolved"] != 0 || c["tx_packets"] != 12 {
					t.Errorf("counters: %v", c)
				}
				finish(t, la, a, ra)
				finish(t, lb, b, rb)
			})
		})
	}
}

// A neighbour that is used stays known for hours, and one that goes away is noticed.
func TestAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		la, lb := newLink(t, a, cfgA), newLink(t, b, cfgB)
		ra, rb := receive(la), receive(lb)
		send := func(l *ether.Link, src, dst netip.Addr) {
			t.Helper()
			if err := l.Send(gid(dst.String()), []roce.Buffer{packet(src, dst, nil)}); err != nil {
				t.Fatal(err)
			}
			quiet()
		}
		n := 0
		for range 100 {
			for _, x := range []struct{ src, dst netip.Addr }{{addrA, addrB}, {sixA, sixB}} {
				send(la, x.src, x.dst)
				n++
			}
			time.Sleep(time.Minute)
		}
		if c := la.Counters(); len(rb.packets) != n || c["tx_held"] != 2 || c["neighbour_unreachable"] != 0 {
			t.Fatalf("%d of %d came: %v", len(rb.packets), n, c)
		}
		// The other side goes silent.
		b.cable(nil)
		for range 60 {
			send(la, addrA, addrB)
			time.Sleep(time.Second)
		}
		if c := la.Counters(); c["neighbour_unreachable"] == 0 || c["tx_unresolved"] == 0 {
			t.Fatalf("silence was not noticed: %v", c)
		}
		// And comes back.
		b.cable(a.inject)
		time.Sleep(10 * time.Second)
		for len(rb.packets) > 0 {
			<-rb.packets
		}
		send(la, addrA, addrB)
		time.Sleep(time.Second)
		if len(rb.packets) != 1 {
			t.Fatalf("%d packets", len(rb.packets))
		}
		finish(t, la, a, ra)
		finish(t, lb, b, rb)
	})
}

// What nobody answers for is held in bounds, and lost.
func TestUnresolved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPort(t, nic.MAC{2, 0, 0, 0, 0, 0xa})
		l := newLink(t, p, ether.Config{Addresses: prefixes("10.0.0.1/8"), Gateway4: netip.MustParseAddr("10.0.0.2")})
		r := receive(l)
		const dsts, each = 2000, 6
		for i := range dsts {
			dst := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
			var ps []roce.Buffer
			for range each {
				ps = append(ps, packet(netip.MustParseAddr("10.0.0.1"), dst, nil))
			}
			if err := l.Send(hca.GID(dst.As16()), ps); err != nil {
				t.Fatal(err)
			}
		}
		quiet()
		c := l.Counters()
		if c["neighbour_asked"] != 128 || c["tx_held"] != 128*4 || c["tx_unresolved"] != dsts*each-128*4 {
			t.Errorf("while they are asked for: %v", c)
		}
		// A gateway is asked for all the same.
		far := netip.MustParseAddr("198.51.100.1")
		_ = l.Send(gid("198.51.100.1"), []roce.Buffer{packet(netip.MustParseAddr("10.0.0.1"), far, nil)})
		quiet()
		if c := l.Counters(); c["neighbour_asked"] != 129 {
			t.Errorf("with the gateway: %v", c)
		}
		time.Sleep(5 * time.Second)
		c = l.Counters()
		if c["tx_unresolved"] != dsts*each+1 || c["tx_packets"] != 0 || c["neighbour_unreachable"] != 129 {
			t.Errorf("after they gave up: %v", c)
		}
		finish(t, l, p, r)
	})
}

// More neighbours than both tables hold.
func TestManyNeighbours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newPort(t, nic.MAC{2, 0, 0, 0, 0, 0xa})
		mac := func(ip []byte) nic.MAC { return nic.MAC{2, 1, ip[0], ip[1], ip[2], ip[3]} }
		var mu sync.Mutex
		bad, sent := 0, 0
		a.cable(func(f []byte) {
			switch binary.BigEndian.Uint16(f[12:]) {
			case 0x0806:
				if f[21] != 1 {
					return
				}
				m, who := mac(f[38:42]), append([]byte(nil), f[38:42]...)
				arp := append(append([]byte{0, 1, 8, 0, 6, 4, 0, 2}, m[:]...), who...)
				arp = append(arp, a.mac[:]...)
				a.inject(frame(a.mac, m, 0x0806, append(arp, 10, 0, 0, 1)))
			case 0x0800:
				if f[23] != 17 {
					return
				}
				mu.Lock()
				defer mu.Unlock()
				if sent++; nic.MAC(f[:6]) != mac(f[30:34]) {
					bad++
				}
			}
		})
		l := newLink(t, a, ether.Config{Addresses: prefixes("10.0.0.1/8")})
		r := receive(l)
		const n = 3000
		for range 2 {
			for i := range n {
				dst := netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)})
				_ = l.Send(hca.GID(dst.As16()), []roce.Buffer{packet(netip.MustParseAddr("10.0.0.1"), dst, nil)})
				if i%64 == 63 {
					quiet()
				}
			}
		}
		quiet()
		mu.Lock()
		if bad != 0 || sent != 2*n {
			t.Errorf("%d packets went out, %d to the wrong neighbour: %v", sent, bad, l.Counters())
		}
		mu.Unlock()
		finish(t, l, a, r)
	})
}

// A neighbour that claims a group's MAC gets nothing.
func TestGroupMAC(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newPort(t, nic.MAC{2, 0, 0, 0, 0, 0xa})
		a.cable(func(f []byte) {
			if binary.BigEndian.Uint16(f[12:]) == 0x0806 {
				arp := []byte{0, 1, 8, 0, 6, 4, 0, 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 192, 0, 2, 2}
				arp = append(arp, a.mac[:]...)
				a.inject(frame(a.mac, nic.MAC{2, 0, 0, 0, 0, 0xb}, 0x0806, append(arp, 192, 0, 2, 1)))
			}
			if binary.BigEndian.Uint16(f[12:]) == 0x0800 && f[23] == 17 {
				t.Errorf("sent %x", f)
			}
		})
		l := newLink(t, a, cfgA)
		r := receive(l)
		for range 10 {
			_ = l.Send(gid("192.0.2.2"), []roce.Buffer{packet(addrA, addrB, nil)})
			time.Sleep(time.Second)
		}
		finish(t, l, a, r)
	})
}

func TestRouting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		ca := cfgA
		ca.Gateway4, ca.Gateway6 = addrB, llB
		la, lb := newLink(t, a, ca), newLink(t, b, cfgB)
		ra, rb := receive(la), receive(lb)
		seen := make(chan []byte, 64)
		a.cable(func(f []byte) {
			if len(f) > 60 {
				seen <- append([]byte(nil), f...)
			}
			b.inject(f)
		})
		for _, tt := range []struct {
			dst string
			ok  bool
		}{
			{"198.51.100.7", true},
			{"2001:db8:1::7", true},
			{"192.0.2.2", true},
			{"192.0.2.1", false},
			{"192.0.2.255", false},
			{"192.0.2.0", false},
			{"0.0.0.0", false},
			{"127.0.0.1", false},
			{"255.255.255.255", false},
			{"::", false},
			{"::1", false},
			{"2001:db8::1", false},
			{"fe80::ff:fe00:a", false},
			{"fe80::ff:fe00:b", true},
			{"224.0.0.5", true},
			{"ff0e::5", true},
		} {
			dst := netip.MustParseAddr(tt.dst)
			for range 2 { // also from the cache
				if got := la.Reachable(gid(tt.dst)); got != tt.ok {
					t.Errorf("Reachable(%s) = %v", tt.dst, got)
				}
				src := addrA
				if dst.Is6() {
					src = sixA
				}
				if err := la.Send(gid(tt.dst), []roce.Buffer{packet(src, dst, make([]byte, 64))}); err != nil {
					t.Error(err)
				}
			}
			quiet()
			n := 0
			for len(seen) > 0 {
				f := <-seen
				to := f[24+14-8:]
				if dst.Is6() {
					to = f[38:]
				}
				if got, _ := netip.AddrFromSlice(to[:dst.BitLen()/8]); got == dst {
					n++
					if !dst.IsMulticast() && nic.MAC(f[:6]) != b.mac {
						t.Errorf("%s went to %x", tt.dst, f[:6])
					}
				}
			}
			if want := map[bool]int{true: 2}[tt.ok]; n != want {
				t.Errorf("%s: %d frames, want %d", tt.dst, n, want)
			}
		}
		if lb.Reachable(gid("198.51.100.7")) || lb.Reachable(gid("2001:db8:1::7")) {
			t.Error("without a gateway all is reachable")
		}
		_ = lb.Send(gid("198.51.100.7"), []roce.Buffer{packet(addrB, netip.MustParseAddr("198.51.100.7"), nil)})
		if c := lb.Counters(); c["tx_no_route"] != 1 {
			t.Errorf("counters: %v", c)
		}
		finish(t, la, a, ra)
		finish(t, lb, b, rb)
	})
}

func TestPing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		la := newLink(t, a, cfgA)
		ra := receive(la)
		replies := make(chan []byte, 64)
		a.cable(func(f []byte) { replies <- append([]byte(nil), f...) })
		// b is ourselves: first it is asked for by the one who is to answer.
		arp := []byte{0, 1, 8, 0, 6, 4, 0, 1}
		arp = append(append(arp, b.mac[:]...), 192, 0, 2, 2)
		arp = append(append(arp, 0, 0, 0, 0, 0, 0), 192, 0, 2, 1)
		bcast := nic.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
		a.inject(frame(bcast, b.mac, 0x0806, arp))
		await := func(what string, ok func(f []byte) bool) {
			t.Helper()
			for {
				select {
				case f := <-replies:
					if ok(f) {
						return
					}
				case <-time.After(time.Minute):
					t.Fatalf("no %s", what)
				}
			}
		}
		await("ARP reply", func(f []byte) bool {
			return nic.MAC(f[:6]) == b.mac && binary.BigEndian.Uint16(f[12:]) == 0x0806 && f[21] == 2 &&
				nic.MAC(f[22:28]) == a.mac && len(f) == 60
		})
		echo := []byte{8, 0, 0, 0, 1, 2, 3, 4, 'p', 'i', 'n', 'g'}
		binary.BigEndian.PutUint16(echo[2:], ^checksum(echo))
		a.inject(frame(a.mac, b.mac, 0x0800, ip(addrB, addrA, 1, echo)))
		await("echo reply", func(f []byte) bool {
			return binary.BigEndian.Uint16(f[12:]) == 0x0800 && f[23] == 1 && f[34] == 0 && bytes.Contains(f, []byte("ping"))
		})
		// IPv6: a solicitation from b, then an echo.
		solicit := func(body []byte, src, dst netip.Addr) []byte {
			s, d := src.As16(), dst.As16()
			pseudo := binary.BigEndian.AppendUint32(append(append([]byte{}, s[:]...), d[:]...), uint32(len(body)))
			pseudo = append(pseudo, 0, 0, 0, 58)
			binary.BigEndian.PutUint16(body[2:], ^checksum(pseudo, body))
			p := ip(src, dst, 58, body)
			p[7] = 255
			return p
		}
		target := llA.As16()
		ns := append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, target[:]...)
		ns = append(append(ns, 1, 1), b.mac[:]...)
		group := netip.MustParseAddr("ff02::1:ff00:a")
		a.inject(frame(nic.MAC{0x33, 0x33, 0xff, 0, 0, 0xa}, b.mac, 0x86dd, solicit(ns, llB, group)))
		await("advertisement", func(f []byte) bool {
			return binary.BigEndian.Uint16(f[12:]) == 0x86dd && f[20] == 58 && f[54] == 136
		})
		a.inject(frame(a.mac, b.mac, 0x86dd, solicit([]byte{128, 0, 0, 0, 0, 1, 0, 2, 'p', 'o', 'n', 'g'}, llB, llA)))
		await("echo reply", func(f []byte) bool {
			return binary.BigEndian.Uint16(f[12:]) == 0x86dd && f[20] == 58 && f[54] == 129
		})
		finish(t, la, a, ra)
	})
}

func TestMulticast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		la, lb := newLink(t, a, cfgA), newLink(t, b, cfgB)
		ra, rb := receive(la), receive(lb)
		reports := make(chan byte, 256)
		b.cable(func(f []byte) {
			if f[12] == 0x08 && f[13] == 0 && f[23] == 2 {
				reports <- 4
			}
			if f[12] == 0x86 && f[20] == 0 && f[54] == 58 {
				reports <- 6
			}
		})
		for _, m := range []nic.MAC{{1, 0, 0x5e, 0, 0, 1}, {0x33, 0x33, 0, 0, 0, 1}, {0x33, 0x33, 0xff, 0, 0, 0xb}, {0x33, 0x33, 0xff, 0, 0, 2}} {
			if !b.filters(m) {
				t.Errorf("%x is not received", m)
			}
		}
		for _, x := range []struct {
			group string
			mac   nic.MAC
			v     byte
			src   netip.Addr
		}{
			{"239.129.2.3", nic.MAC{1, 0, 0x5e, 1, 2, 3}, 4, addrA},
			{"ff0e::aa01:203", nic.MAC{0x33, 0x33, 0xaa, 1, 2, 3}, 6, sixA},
		} {
			g, dst := gid(x.group), netip.MustParseAddr(x.group)
			send := func(want int) {
				t.Helper()
				if err := la.Send(g, []roce.Buffer{packet(x.src, dst, nil), packet(x.src, dst, nil)}); err != nil {
					t.Fatal(err)
				}
				quiet()
				if len(rb.packets) != want {
					t.Errorf("%s: %d packets, want %d", g, len(rb.packets), want)
				}
				for len(rb.packets) > 0 {
					<-rb.packets
				}
			}
			send(0)
			if err := lb.Leave(g); !errors.Is(err, unix.EINVAL) {
				t.Errorf("leave what is not joined: %v", err)
			}
			for range 2 {
				if err := lb.Join(g); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(2 * time.Minute) // reports are sent at random times
			got := 0
			for len(reports) > 0 {
				if <-reports == x.v {
					got++
				}
			}
			if got == 0 {
				t.Errorf("%s: no membership report", g)
			}
			if !b.filters(x.mac) {
				t.Errorf("%x is not received", x.mac)
			}
			send(2)
			if err := lb.Leave(g); err != nil {
				t.Error(err)
			}
			send(2)
			if err := lb.Leave(g); err != nil {
				t.Error(err)
			}
			send(0)
			if b.filters(x.mac) {
				t.Errorf("%x is still received", x.mac)
			}
			b.failMulticast(errBad)
			if err := lb.Join(g); !errors.Is(err, errBad) {
				t.Errorf("join with a port that refuses: %v", err)
			}
			b.failMulticast(nil)
			send(0)
		}
		if err := lb.Join(gid("192.0.2.9")); !errors.Is(err, unix.EINVAL) {
			t.Errorf("join a host: %v", err)
		}
		if c := lb.Counters(); c["rx_other_group"] == 0 {
			t.Errorf("counters: %v", c)
		}
		if err := lb.Join(gid("ff0e::1")); err != nil {
			t.Error(err)
		}
		finish(t, la, a, ra)
		finish(t, lb, b, rb)
		if err := lb.Leave(gid("ff0e::1")); err != nil {
			t.Errorf("leave after close: %v", err)
		}
		if err := lb.Join(gid("ff0e::1")); !errors.Is(err, roce.ErrClosed) {
			t.Errorf("join after close: %v", err)
		}
	})
}

func TestWatch(t *testing.T) {
	a, _ := pair(t)
	l := newLink(t, a, cfgA)
	var got []roce.LinkState
	l.Watch(func(s roce.LinkState) { got = append(got, s) })
	a.set(nic.State{Up: true, Mbps: 1000}) // no change
	a.set(nic.State{})
	a.set(nic.State{Up: true, Mbps: 100})
	if len(got) != 2 || got[0].Up || got[0].MTU != 1024 || !got[1].Up || got[1].Mbps != 100 {
		t.Errorf("told %+v", got)
	}
	if s := l.State(); s.Mbps != 100 {
		t.Errorf("state %+v", s)
	}
	_ = l.Close()
}

func TestClose(t *testing.T) {
	a, b := pair(t)
	la, lb := newLink(t, a, cfgA), newLink(t, b, cfgB)
	var rs []*receiver
	for range 4 {
		rs = append(rs, receive(la))
	}
	rb := receive(lb)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() { // somebody sends all the while
		for {
			_ = la.Send(gid("192.0.2.2"), []roce.Buffer{packet(addrA, addrB, nil)})
			select {
			case <-stop:
				err := la.Send(gid("192.0.2.2"), []roce.Buffer{packet(addrA, addrB, nil)})
				if !errors.Is(err, roce.ErrClosed) {
					t.Errorf("Send: %v", err)
				}
				return
			default:
			}
		}
	})
	<-rb.packets
	for range 2 {
		wg.Go(func() { _ = la.Close() })
	}
	for _, r := range rs {
		if err := <-r.err; !errors.Is(err, roce.ErrClosed) {
			t.Errorf("Recv: %v", err)
		}
	}
	_ = la.Close()
	close(stop)
	wg.Wait()
	if _, err := la.Recv(make([]roce.Received, 1)); !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Recv after close: %v", err)
	}
	finish(t, lb, b, rb)
}

func TestGone(t *testing.T) {
	a, b := pair(t)
	l := newLink(t, a, cfgA)
	r := receive(l)
	a.kill(fmt.Errorf("slot 3: %w", nic.ErrGone))
	if err := <-r.err; !errors.Is(err, roce.ErrGone) {
		t.Errorf("Recv: %v", err)
	}
	if err := l.Send(gid("ff02::5"), []roce.Buffer{packet(llA, llB, nil)}); !errors.Is(err, roce.ErrGone) {
		t.Errorf("Send: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	l = newLink(t, b, cfgB)
	b.kill(errBad)
	if _, err := l.Recv(make([]roce.Received, 1)); !errors.Is(err, roce.ErrGone) {
		t.Errorf("Recv with an odd error: %v", err)
	}
	_ = l.Close()
}

// A port whose ring is full is waited for, in bounds; a frame that it refuses does not
// keep the others.
func TestRing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		la, lb := newLink(t, a, cfgA), newLink(t, b, cfgB)
		ra, rb := receive(la), receive(lb)
		group := gid("ff0e::1")
		if err := lb.Join(group); err != nil {
			t.Fatal(err)
		}
		dst := netip.MustParseAddr("ff0e::1")
		send := func(n int) {
			t.Helper()
			var ps []roce.Buffer
			for range n {
				ps = append(ps, packet(sixA, dst, nil))
			}
			if err := la.Send(group, ps); err != nil {
				t.Fatal(err)
			}
			quiet()
		}
		count := func(want int) {
			t.Helper()
			if len(rb.packets) != want {
				t.Errorf("%d packets, want %d: %v", len(rb.packets), want, la.Counters())
			}
			for len(rb.packets) > 0 {
				<-rb.packets
			}
		}
		a.full.Store(50)
		send(200)
		count(200)
		a.full.Store(1 << 30)
		send(200)
		count(0)
		a.full.Store(0)
		a.badOne.Store(true)
		send(200)
		count(199)
		if c := la.Counters(); c["tx_ring_full"] != 200 || c["tx_bad_packet"] != 1 || c["tx_packets"] != 399 {
			t.Errorf("counters: %v", c)
		}
		// What is none.
		if err := la.Send(group, []roce.Buffer{nil, make(roce.Buffer, 30), make(roce.Buffer, 3000), packet(sixA, dst, nil)}); err != nil {
			t.Fatal(err)
		}
		quiet()
		count(1)
		if c := la.Counters(); c["tx_bad_packet"] != 4 {
			t.Errorf("counters: %v", c)
		}
		finish(t, la, a, ra)
		finish(t, lb, b, rb)
	})
}

// A flood of ARP requests pushes all out of netstack's table: who is known stays
// known, and who is being asked for can be asked for again.
func TestFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		la, lb := newLink(t, a, cfgA), newLink(t, b, cfgB)
		ra, rb := receive(la), receive(lb)
		send := func(dst netip.Addr) {
			t.Helper()
			if err := la.Send(gid(dst.String()), []roce.Buffer{packet(addrA, dst, nil)}); err != nil {
				t.Fatal(err)
			}
		}
		nobody := netip.MustParseAddr("192.0.2.77")
		send(addrB)
		quiet()
		send(nobody)
		quiet()
		for i := range 1000 {
			arp := []byte{0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 0xc, 10, 9, byte(i >> 8), byte(i), 0, 0, 0, 0, 0, 0, 192, 0, 2, 1}
			a.inject(frame(a.mac, nic.MAC{2, 0, 0, 0, 0, 0xc}, 0x0806, arp))
			if i%100 == 0 {
				quiet()
			}
		}
		quiet()
		c := la.Counters()
		if c["tx_unresolved"] != 1 || c["neighbour_unreachable"] != 0 {
			t.Errorf("after the flood: %v", c)
		}
		b.cable(nil) // nobody answers
		send(addrB)
		quiet()
		if len(rb.packets) != 2 {
			t.Errorf("%d packets came to a neighbour that was known", len(rb.packets))
		}
		send(nobody)
		time.Sleep(10 * time.Second)
		if c := la.Counters(); c["neighbour_asked"] != 4 || c["tx_unresolved"] != 2 || c["neighbour_unreachable"] != 2 {
			t.Errorf("after nobody answered: %v", c)
		}
		finish(t, la, a, ra)
		finish(t, lb, b, rb)
	})
}

// After the cable was out, neighbours are looked for anew.
func TestReplug(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		la, lb := newLink(t, a, cfgA), newLink(t, b, cfgB)
		ra, rb := receive(la), receive(lb)
		for range 2 {
			for range 3 {
				if err := la.Send(gid("2001:db8::2"), []roce.Buffer{packet(sixA, sixB, nil)}); err != nil {
					t.Fatal(err)
				}
				quiet()
			}
			a.set(nic.State{})
			a.set(nic.State{Up: true, Mbps: 1000})
			quiet()
		}
		if c := la.Counters(); len(rb.packets) != 6 || c["neighbour_asked"] != 2 || c["tx_held"] != 1 {
			t.Errorf("%d packets: %v", len(rb.packets), c)
		}
		finish(t, la, a, ra)
		finish(t, lb, b, rb)
	})
}
