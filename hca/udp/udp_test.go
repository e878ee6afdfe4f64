package udp_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/udp"
)

var (
	group4 = hca.IPv4GID([4]byte{239, 1, 2, 3})
	group6 = hca.GID{0: 0xff, 1: 0x0e, 14: 9, 15: 9}
	lo4a   = hca.IPv4GID([4]byte{127, 0, 0, 1})
	lo4b   = hca.IPv4GID([4]byte{127, 0, 0, 2})
	lo6a   = hca.GID{15: 1}
	lo6b   = hca.GID{0: 0xfd, 15: 1}
)

// open makes a link, which the test closes.
func open(t testing.TB, dev string, addrs ...string) *udp.Link {
	t.Helper()
	cfg := udp.Config{NetDev: dev}
	for _, a := range addrs {
		cfg.Addrs = append(cfg.Addrs, netip.MustParseAddr(a))
	}
	l, err := udp.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// loopback is two links over the loopback interface.
func loopback(t testing.TB) (a, b *udp.Link) {
	t.Helper()
	return open(t, "", "127.0.0.1", "::1"), open(t, "", "127.0.0.2", "fd00::1")
}

// full is packet n with all that a network may carry set.
func full(src, dst hca.GID, n int) roce.Packet {
	return roce.Packet{Src: src, Dst: dst, SrcPort: uint16(0xC000 + n), TrafficClass: uint8(n<<2 | roce.ECT0), HopLimit: uint8(1 + n%255),
		Op: roce.RC | roce.SendOnly, PKey: 0xffff, QPN: 0x123456, PSN: uint32(n)}
}

func seal(p roce.Packet, size int) roce.Buffer {
	buf := make([]byte, roce.Headroom+roce.MaxPacket)
	at := p.Build(buf)
	for i := range size {
		buf[at+i] = byte(i + int(p.PSN))
	}
	return roce.Seal(buf, at+size)
}

func send(t testing.TB, l *udp.Link, dst hca.GID, packets ...roce.Buffer) {
	t.Helper()
	if err := l.Send(dst, packets); err != nil {
		t.Fatal(err)
	}
}

// take receives count packets and gives copies.
func take(t testing.TB, l *udp.Link, count int) (ips [][]byte) {
	t.Helper()
	rs := make([]roce.Received, 7)
	defer time.AfterFunc(20*time.Second, func() {
		t.Errorf("packets do not come, counters are %v", l.Counters())
		l.Close()
	}).Stop()
	for len(ips) < count {
		n, err := l.Recv(rs[:min(len(rs), count-len(ips))])
		if err != nil {
			t.Fatal(err)
		}
		for i := range rs[:n] {
			ips = append(ips, bytes.Clone(rs[i].IP))
			rs[i].Release()
		}
	}
	return ips
}

// sniff opens a socket that sees what passes the loopback interface, from the IP
// header on, and depends on nothing of the link's.
func sniff(t *testing.T) func() []byte {
	t.Helper()
	const all = 0x0300 // ETH_P_ALL in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, all)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: 1}); err != nil {
		t.Fatal(err)
	}
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})
	buf := make([]byte, 1<<16)
	return func() []byte {
		for {
			n, from, err := unix.Recvfrom(fd, buf, 0)
			if err != nil {
				t.Fatal("nothing passes the loopback interface:", err)
			}
			if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
				return buf[:n]
			}
		}
	}
}

// TestWire: a packet is the same on the wire and at the receiver, to the last
// byte, and its ICRC is right.
func TestWire(t *testing.T) {
	a, b := loopback(t)
	wire := sniff(t)
	for _, c := range []struct{ src, dst hca.GID }{{lo4a, lo4b}, {lo6a, lo6b}} {
		for n, size := range []int{0, 1, 64, 1024, 4096} {
			want := full(c.src, c.dst, n)
			out := seal(want, size)
			send(t, a, c.dst, out)
			if got := wire(); !bytes.Equal(got, out[roce.Headroom:]) {
				t.Fatalf("%d bytes: sent %x\non the wire %x", size, out[roce.Headroom:][:48], got[:48])
			}
			in := take(t, b, 1)[0]
			if !bytes.Equal(in, out[roce.Headroom:]) {
				t.Fatalf("%d bytes: sent %x\ncame %x", size, out[roce.Headroom:][:48], in[:48])
			}
			var got roce.Packet
			if err := roce.Parse(in, &got); err != nil {
				t.Fatal(err)
			}
			if got.Payload = nil; !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		}
	}
	if c := a.Counters(); c["tx_packets"] != 10 || c["tx_lost"] != 0 {
		t.Errorf("counters are %v", c)
	}
	if c := b.Counters(); c["rx_packets"] != 10 || c["rx_overflow"] != 0 {
		t.Errorf("counters are %v", c)
	}
}

// TestForeign: packets of another sender, as rdma_rxe makes them and otherwise.
func TestForeign(t *testing.T) {
	_, b := loopback(t)
	raw := map[bool]int{}
	for _, fam := range []int{unix.AF_INET, unix.AF_INET6} {
		fd, err := unix.Socket(fam, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		raw[fam == unix.AF_INET] = fd
	}
	for _, c := range []struct {
		name     string
		src, dst hca.GID
		change   func(ip []byte)
		comes    bool
	}{
		{"identification", lo4a, lo4b, func(ip []byte) { ip[4], ip[5] = 0x12, 0x34 }, true},
		{"fragments allowed", lo4a, lo4b, func(ip []byte) { ip[4], ip[6] = 0x12, 0 }, true},
		{"flow label", lo6a, lo6b, func(ip []byte) { ip[1], ip[2], ip[3] = ip[1]|5, 6, 7 }, true},
		{"another port", lo4a, lo4b, func(ip []byte) { ip[23]++ }, false},
		{"another port", lo6a, lo6b, func(ip []byte) { ip[43]++ }, false},
		{"another address", lo4a, hca.IPv4GID([4]byte{127, 0, 0, 3}), nil, false},
		{"another address", lo6a, lo6a, nil, false},
		{"a group not joined", lo4a, group4, nil, false},
		{"short", lo4a, lo4b, func(ip []byte) { ip[25] = 0 }, true},
	} {
		p := full(c.src, c.dst, 1)
		buf := make([]byte, roce.Headroom+roce.MaxPacket)
		at := p.Build(buf)
		if c.change != nil {
			c.change(buf[roce.Headroom:])
		}
		out := roce.Seal(buf, at)[roce.Headroom:]
		to := func(out []byte, dst hca.GID) {
			var err error
			if a, v4 := dst.IPv4(); v4 {
				err = unix.Sendto(raw[true], out, 0, &unix.SockaddrInet4{Addr: a})
			} else {
				err = unix.Sendto(raw[false], out, 0, &unix.SockaddrInet6{Addr: dst})
			}
			if err != nil && c.comes {
				t.Fatal(c.name, err)
			}
		}
		to(out, c.dst)
		if !c.comes { // what follows it shows that it did not come
			p.Dst = lo4b
			if !p.V4() {
				p.Dst = lo6b
			}
			out = seal(p, 3)[roce.Headroom:]
			to(out, p.Dst)
		}
		var got roce.Packet
		in := take(t, b, 1)[0]
		if err := roce.Parse(in, &got); err != nil || len(in) != len(out) || got.PSN != 1 || got.FlowLabel != 0 {
			t.Errorf("%s: %v, %+v", c.name, err, got)
		}
	}
	// Ordinary UDP, with a sum, and longer than any packet.
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, n := range []int{0, 10, 5000, 60000} {
		if err := unix.Sendto(fd, make([]byte, n), 0, &unix.SockaddrInet6{Addr: lo6b, Port: roce.Port}); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range []int{48, 58} {
		if got := take(t, b, 1)[0]; len(got) != n {
			t.Errorf("%d bytes came, want %d", len(got), n)
		}
	}
	if c := b.Counters(); c["rx_malformed"] != 0 {
		t.Errorf("counters are %v", c)
	}
}

// TestOrder: more packets than a batch, both families mixed, come in each family's
// order.
func TestOrder(t *testing.T) {
	a, b := loopback(t)
	const count = 300
	var out4, out6 []roce.Buffer
	for i := range count {
		out4 = append(out4, seal(full(lo4a, lo4b, i), 100))
		out6 = append(out6, seal(full(lo6a, lo6b, i), 100))
	}
	send(t, a, lo4b, out4...)
	send(t, a, lo6b, out6...)
	next := map[bool]uint32{}
	for _, ip := range take(t, b, 2*count) {
		var p roce.Packet
		if err := roce.Parse(ip, &p); err != nil {
			t.Fatal(err)
		}
		if p.PSN != next[p.V4()] {
			t.Fatalf("PSN %d came, want %d", p.PSN, next[p.V4()])
		}
		next[p.V4()]++
	}
}

// TestRefused: what cannot be sent is lost and counted, and the rest goes.
func TestRefused(t *testing.T) {
	a, b := loopback(t)
	good := func(n int) roce.Buffer { return seal(full(lo4a, lo4b, n), 8) }
	bad := func(change func(ip []byte)) roce.Buffer {
		b := good(99)
		change(b[roce.Headroom:])
		return b
	}
	send(t, a, lo4b, good(0), roce.Buffer(make([]byte, 10)), good(1), bad(func(ip []byte) { ip[0] = 0x46 }), bad(func(ip []byte) { ip[19]++ }),
		bad(func(ip []byte) { ip[15]++ }), bad(func(ip []byte) { ip[0] = 0x60 }),
		bad(func(ip []byte) { ip[0] = 0x60; copy(ip[8:], lo4a[:]); copy(ip[24:], lo4b[:]) }), good(2))
	for i, ip := range take(t, b, 3) {
		var p roce.Packet
		if err := roce.Parse(ip, &p); err != nil || p.PSN != uint32(i) {
			t.Errorf("PSN %d came, %v", p.PSN, err)
		}
	}
	send(t, a, group6, seal(full(lo6a, group6, 1), 0), seal(full(lo4a, group6, 1), 0))
	c := a.Counters()
	if c["tx_malformed"] < 5 || c["tx_foreign_source"] < 1 || c["tx_lost"] < c["tx_malformed"]+c["tx_foreign_source"] || c["tx_packets"] < 3 {
		t.Errorf("counters are %v", c)
	}
}

// TestErrors: New says what is wrong.
func TestErrors(t *testing.T) {
	a := netip.MustParseAddr
	open(t, "", "127.0.0.1")
	veth(t)
	for _, c := range []struct {
		cfg  udp.Config
		want []string
	}{
		{udp.Config{}, []string{"give a network interface"}},
		{udp.Config{NetDev: "nosuch0"}, []string{"nosuch0", "ip link"}},
		{udp.Config{Addrs: []netip.Addr{a("192.0.2.77")}}, []string{"192.0.2.77", "ip address"}},
		{udp.Config{Addrs: []netip.Addr{a("127.0.0.3"), a("10.9.0.1")}}, []string{"10.9.0.1", "wire0", "lo"}},
		{udp.Config{Addrs: []netip.Addr{a("127.0.0.3"), a("127.0.0.1")}}, []string{"127.0.0.1", "4791", "rdma_rxe", "modprobe -r"}},
		{udp.Config{Addrs: make([]netip.Addr, 100)}, []string{"100 addresses"}},
	} {
		l, err := udp.New(c.cfg)
		if err == nil {
			l.Close()
			t.Errorf("%v: no error", c.cfg)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v: %q does not say %q", c.cfg, err, w)
			}
		}
	}
}

// TestClose: it ends all who wait, gives the port back, and buffers that are out stay.
func TestClose(t *testing.T) {
	a, b := loopback(t)
	send(t, a, lo4b, seal(full(lo4a, lo4b, 1), 8))
	rs := make([]roce.Received, 1)
	if _, err := b.Recv(rs); err != nil {
		t.Fatal(err)
	}
	was := bytes.Clone(rs[0].IP)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := b.Recv(make([]roce.Received, 4)); !errors.Is(err, roce.ErrClosed) {
				t.Errorf("Recv: %v", err)
			}
		})
	}
	b.Close()
	wg.Wait()
	if !bytes.Equal(rs[0].IP, was) {
		t.Error("a buffer changed by Close")
	}
	rs[0].Release()
	if err := b.Send(lo4a, nil); !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Send: %v", err)
	}
	if err := b.Join(group4); !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Join: %v", err)
	}
	b.Close()
	b.Counters()
	open(t, "", "127.0.0.2")
}

// TestBuffers: a link whose buffers are all out waits for one.
func TestBuffers(t *testing.T) {
	a, b := loopback(t)
	const all = 2048
	rs := make([]roce.Received, all)
	for n := 0; n < all; {
		send(t, a, lo4b, seal(full(lo4a, lo4b, n), 8))
		got, err := b.Recv(rs[n:])
		if err != nil {
			t.Fatal(err)
		}
		n += got
	}
	send(t, a, lo4b, seal(full(lo4a, lo4b, 7), 8))
	done := make(chan int)
	go func() { done <- len(take(t, b, 1)) }()
	rs[0].Release()
	<-done
	for i := range rs {
		rs[i].Release()
	}
	// And one that waits for a buffer sees the end.
	for n := 0; n < all; {
		send(t, a, lo4b, seal(full(lo4a, lo4b, n), 8))
		got, err := b.Recv(rs[n:])
		if err != nil {
			t.Fatal(err)
		}
		n += got
	}
	ended := make(chan error)
	go func() {
		_, err := b.Recv(make([]roce.Received, 1))
		ended <- err
	}()
	b.Close()
	if err := <-ended; !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Recv: %v", err)
	}
}

// TestCrowd: several send and several receive at once, and nothing is lost or
// comes twice.
func TestCrowd(t *testing.T) {
	a, b := loopback(t)
	const crowd, each = 3, 400
	var got sync.Map
	var left sync.WaitGroup
	left.Add(crowd * each)
	var wg sync.WaitGroup
	for range crowd {
		wg.Go(func() {
			rs := make([]roce.Received, 5)
			for {
				n, err := b.Recv(rs)
				if err != nil {
					return
				}
				for i := range rs[:n] {
					var p roce.Packet
					if err := roce.Parse(rs[i].IP, &p); err != nil {
						t.Error(err)
					}
					rs[i].Release()
					if _, twice := got.LoadOrStore(p.PSN, true); twice {
						t.Errorf("PSN %d came twice", p.PSN)
						continue
					}
					left.Done()
				}
			}
		})
	}
	for i := range crowd {
		wg.Go(func() {
			for n := range each {
				src, dst := lo4a, lo4b
				if n%2 == 1 {
					src, dst = lo6a, lo6b
				}
				send(t, a, dst, seal(full(src, dst, i*each+n), 200))
			}
		})
	}
	left.Wait()
	b.Close()
	wg.Wait()
}

// veth makes a wire whose one end, wire0, is here, and returns the other's name.
func veth(t testing.TB) string {
	t.Helper()
	mustIP(t, "link add wire0 type veth peer name wire1", "address add 10.9.0.1/24 dev wire0", "-6 address add fd09::1/64 dev wire0 nodad",
		"link set wire0 address 02:00:00:00:00:01 mtu 9000 up")
	t.Cleanup(func() { ip("link del wire0") })
	return "wire1"
}

// waitUp waits until the link is up: a wire loses what is sent while its ends are
// not there yet. It takes the link's only watcher.
func waitUp(l *udp.Link) error {
	news := make(chan struct{}, 1)
	l.Watch(func(roce.LinkState) {
		select {
		case news <- struct{}{}:
		default:
		}
	})
	for !l.State().Up {
		select {
		case <-news:
		case <-time.After(20 * time.Second):
			return fmt.Errorf("link does not come up: %+v", l.State())
		}
	}
	return nil
}

// peer starts the echo in its own network namespace, at the other end of wire0.
func peer(t testing.TB) {
	t.Helper()
	dev := veth(t)
	cmd := command("peer", dev)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error("peer:", err)
		}
	})
	mustIP(t, fmt.Sprintf("link set %s netns %d", dev, cmd.Process.Pid))
	in.Write([]byte{1})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatal("peer is not ready:", line, err)
	}
}

// TestPeer: another host of both families, its groups too, and link-local addresses.
func TestPeer(t *testing.T) {
	peer(t)
	l := open(t, "wire0")
	if err := waitUp(l); err != nil {
		t.Fatal(err)
	}
	far4, far6 := hca.IPv4GID([4]byte{10, 9, 0, 2}), hca.GID{0: 0xfd, 1: 9, 15: 2}
	near4, near6 := hca.IPv4GID([4]byte{10, 9, 0, 1}), hca.GID{0: 0xfd, 1: 9, 15: 1}
	s := l.State()
	if !s.Up || s.MTU != 4096 || s.NetDev != "wire0" || s.Mbps != 10000 || !slices.Contains(s.GIDs, near4) || !slices.Contains(s.GIDs, near6) {
		t.Errorf("state is %+v", s)
	}
	for _, c := range []struct{ src, dst, from hca.GID }{{near4, far4, far4}, {near6, far6, far6}, {near4, group4, far4}, {near6, group6, far6}} {
		if !l.Reachable(c.dst) {
			t.Errorf("%s is not reachable", c.dst)
		}
		for n, size := range []int{0, 1000, 4096} {
			p := full(c.src, c.dst, n+40)
			send(t, l, c.dst, seal(p, size))
			var got roce.Packet
			if err := roce.Parse(take(t, l, 1)[0], &got); err != nil {
				t.Fatal(err)
			}
			p.Src, p.Dst = c.from, c.src
			if len(got.Payload) != size {
				t.Errorf("%d bytes came, want %d", len(got.Payload), size)
			}
			if got.Payload = nil; !reflect.DeepEqual(got, p) {
				t.Errorf("got  %+v\nwant %+v", got, p)
			}
		}
	}
	for _, g := range []hca.GID{hca.IPv4GID([4]byte{192, 0, 2, 1}), {0: 0x20, 1: 1}} {
		if l.Reachable(g) {
			t.Errorf("%s is reachable", g)
		}
	}
	if c := l.Counters(); c["tx_lost"] != 0 {
		t.Errorf("counters are %v", c)
	}
}

// TestGroups: a link hears the groups that it joined, as often as it joined them, and
// not itself; others of the host hear it.
func TestGroups(t *testing.T) {
	peer(t)
	l := open(t, "wire0", "10.9.0.1", "fd09::1")
	if err := waitUp(l); err != nil {
		t.Fatal(err)
	}
	other, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	a, _ := group4.IPv4()
	if err := errors.Join(unix.Bind(other, &unix.SockaddrInet4{Port: roce.Port, Addr: a}),
		unix.SetsockoptIPMreq(other, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, &unix.IPMreq{Multiaddr: a, Interface: [4]byte{10, 9, 0, 1}}),
		unix.SetsockoptTimeval(other, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})); err != nil {
		t.Fatal(err)
	}
	near := map[hca.GID]hca.GID{group4: hca.IPv4GID([4]byte{10, 9, 0, 1}), group6: {0: 0xfd, 1: 9, 15: 1}}
	for g, src := range near {
		if err := errors.Join(l.Join(g), l.Join(g), l.Leave(g)); err != nil {
			t.Fatal(err)
		}
		p := full(src, g, 1)
		p.HopLimit = 1
		send(t, l, g, seal(p, 8))
		var got roce.Packet
		if err := roce.Parse(take(t, l, 1)[0], &got); err != nil || got.Src == src {
			t.Errorf("%v, %+v", err, got)
		}
		if err := l.Leave(g); err != nil {
			t.Error(err)
		}
		if l.Leave(g) == nil || l.Join(src) == nil {
			t.Error("groups are not counted")
		}
	}
	if n, _, err := unix.Recvfrom(other, make([]byte, 100), 0); err != nil || n != 24 {
		t.Errorf("another program of this host heard %d bytes: %v", n, err)
	}
	if n := l.Counters()["rx_own_multicast"]; n != 2 {
		t.Errorf("the link heard itself %d times", n)
	}
}

// TestState follows an interface through its life.
func TestState(t *testing.T) {
	veth(t)
	mustIP(t, "link set wire1 up")
	l := open(t, "wire0")
	news := make(chan roce.LinkState, 100)
	l.Watch(func(s roce.LinkState) { news <- s })
	until := func(what string, ok func(roce.LinkState) bool) {
		t.Helper()
		for !ok(l.State()) {
			select {
			case <-news:
			case <-time.After(10 * time.Second):
				t.Fatalf("%s: state is %+v", what, l.State())
			}
		}
	}
	near := hca.IPv4GID([4]byte{10, 9, 0, 7})
	has := func(s roce.LinkState) bool { return slices.Contains(s.GIDs, near) }
	until("link-local first", func(s roce.LinkState) bool { return s.Up && len(s.GIDs) == 3 && s.GIDs[0][0] == 0xfe })
	mustIP(t, "address add 10.9.0.7/24 dev wire0")
	until("address added", has)
	send(t, l, near, seal(full(near, near, 1), 8))
	take(t, l, 1)
	mustIP(t, "address del 10.9.0.7/24 dev wire0")
	until("address deleted", func(s roce.LinkState) bool { return !has(s) })
	mtus := []struct{ ethernet, want int }{{1500, 1024}, {4200, 4096}, {2200, 2048}, {1280, 1024}, {4183, 2048}, {4184, 4096}}
	for _, c := range mtus {
		mustIP(t, fmt.Sprint("link set wire0 mtu ", c.ethernet))
		until(fmt.Sprint("MTU ", c.ethernet), func(s roce.LinkState) bool { return s.MTU == c.want })
	}
	mustIP(t, "link set wire1 down")
	until("down", func(s roce.LinkState) bool { return !s.Up })
	mustIP(t, "link set wire1 up")
	until("up", func(s roce.LinkState) bool { return s.Up })
	done := make(chan error)
	go func() {
		_, err := l.Recv(make([]roce.Received, 1))
		done <- err
	}()
	mustIP(t, "link del wire0")
	if err := <-done; !errors.Is(err, roce.ErrGone) {
		t.Errorf("Recv: %v", err)
	}
	if err := l.Send(near, nil); !errors.Is(err, roce.ErrGone) {
		t.Errorf("Send: %v", err)
	}
	until("gone", func(s roce.LinkState) bool { return !s.Up && len(s.GIDs) == 0 })
}

// TestTaken: an address whose port is another's when it comes is left out, and so is
// one that the link was told not to use; one that comes again is used again.
func TestTaken(t *testing.T) {
	veth(t)
	l := open(t, "", "10.9.0.1", "fd09::1")
	news := make(chan roce.LinkState, 100)
	l.Watch(func(s roce.LinkState) { news <- s })
	until := func(gids ...hca.GID) {
		t.Helper()
		for !slices.Equal(l.State().GIDs, gids) {
			select {
			case <-news:
			case <-time.After(10 * time.Second):
				t.Fatalf("GIDs are %v, want %v", l.State().GIDs, gids)
			}
		}
	}
	near4, near6 := hca.IPv4GID([4]byte{10, 9, 0, 1}), hca.GID{0: 0xfd, 1: 9, 15: 1}
	until(near4, near6)
	mustIP(t, "address add 10.9.0.7/24 dev wire0", "address del 10.9.0.1/24 dev wire0")
	until(near6)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: roce.Port}); err != nil {
		t.Fatal(err)
	}
	mustIP(t, "address add 10.9.0.1/24 dev wire0", "link set wire0 mtu 3000")
	for l.State().MTU != 2048 {
		<-news
	}
	until(near6)
	if n := l.Counters()["addresses_refused"]; n == 0 {
		t.Error("the address that was refused is not counted")
	}
}

// TestLinkLocal: an IPv6 link-local address needs no scope.
func TestLinkLocal(t *testing.T) {
	veth(t)
	mustIP(t, "link set wire1 up", "-6 address add fe80::7/64 dev wire0 nodad", "-6 address add fe80::8/64 dev wire0 nodad")
	a, b := open(t, "wire0", "fe80::7"), open(t, "wire0", "fe80::8")
	ga, gb := hca.GID{0: 0xfe, 1: 0x80, 15: 7}, hca.GID{0: 0xfe, 1: 0x80, 15: 8}
	if !a.Reachable(gb) || a.Reachable(lo4b) || a.Reachable(group4) || !a.Reachable(group6) {
		t.Error("Reachable is wrong")
	}
	send(t, a, gb, seal(full(ga, gb, 1), 8))
	var p roce.Packet
	if err := roce.Parse(take(t, b, 1)[0], &p); err != nil || p.Src != ga {
		t.Errorf("%v, %+v", err, p)
	}
	if c := a.Counters(); c["tx_lost"] != 0 {
		t.Errorf("counters are %v", c)
	}
}

// TestTooLong: a packet that the interface's MTU does not let through is lost, and
// never a fragment.
func TestTooLong(t *testing.T) {
	veth(t)
	mustIP(t, "link set wire1 up", "link set wire0 mtu 1500", "neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev wire0")
	l := open(t, "wire0", "10.9.0.1")
	near, far := hca.IPv4GID([4]byte{10, 9, 0, 1}), hca.IPv4GID([4]byte{10, 9, 0, 2})
	send(t, l, far, seal(full(near, far, 1), 8), seal(full(near, far, 2), 1440), seal(full(near, far, 3), 1460), seal(full(near, far, 4), 8))
	if c := l.Counters(); c["tx_too_long"] != 1 || c["tx_lost"] != 1 || c["tx_packets"] != 3 {
		t.Errorf("counters are %v", c)
	}
	mustIP(t, "link set wire0 down")
	send(t, l, far, seal(full(near, far, 5), 8))
	if c := l.Counters(); c["tx_no_route"] != 1 {
		t.Errorf("counters are %v", c)
	}
}
