package soft_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/capture"
	"github.com/uverbsd/uverbsd/hca/soft"
)

// keepCapture names a file for the packets of TestTap, for other judges
// (integration/scripts/judge.sh).
const keepCapture = "UVERBSD_KEEP_CAPTURE"

const (
	tapMTU  = 1024
	tapPSN  = 0xfffffd // so that the numbers wrap
	tapWait = 20 * time.Second
)

// tapped is a device with a tap.
func tapped(t testing.TB, f *loop.Fabric, id byte) (*soft.Device, *capture.Tap) {
	tap := capture.New(nil)
	cfg := soft.Config{GUID: hca.GUID{0, 2, 0xc9, 3, 7: id}, NodeDesc: "test", Mapped: true, Tap: tap}
	if f.Link() == hca.LinkEthernet {
		cfg.Address = [4]byte{192, 0, 2, id}
	}
	d, err := soft.New(f, cfg)
	check(t, err)
	t.Cleanup(func() { check(t, d.Close()) })
	return d, tap
}

// hearing reads a subscription.
type hearing struct {
	t   testing.TB
	s   *capture.Subscription
	ctx context.Context
	all *[]capture.Packet // nil: not kept
}

func hearTap(t testing.TB, tap *capture.Tap, snap int, all *[]capture.Packet) *hearing {
	t.Helper()
	s, err := tap.Subscribe(capture.DefaultPackets, snap)
	check(t, err)
	t.Cleanup(s.Close)
	ctx, cancel := context.WithTimeout(t.Context(), tapWait)
	t.Cleanup(cancel)
	return &hearing{t, s, ctx, all}
}

// next is the next packet, which is whole and right.
func (h *hearing) next() (capture.Packet, roce.Packet) {
	h.t.Helper()
	p, err := h.s.Next(h.ctx)
	check(h.t, err)
	p.Data = slices.Clone(p.Data)
	if h.all != nil {
		*h.all = append(*h.all, p)
	}
	var k roce.Packet
	if p.Len == len(p.Data) {
		if err := roce.Parse(p.Data, &k); err != nil {
			h.t.Fatalf("packet %x: %v", p.Data, err)
		}
	}
	return p, k
}

// say is a packet in short: direction, transport and operation, PSN from the first
// one, what was asked for.
func say(p capture.Packet, k *roce.Packet) string {
	if len(p.Data) < p.Len {
		return fmt.Sprintf("%d cut %d of %d", p.Dir, len(p.Data), p.Len)
	}
	s := fmt.Sprintf("%d %02x+%d", p.Dir, uint8(k.Op), (k.PSN-tapPSN)&roce.PSNMask)
	if n := len(k.Payload); n > 0 {
		s += fmt.Sprintf(" %d", n)
	}
	if k.Op.IsResponse() && k.Op.Operation() != roce.ReadRespMiddle {
		s += fmt.Sprintf(" s%02x m%d", k.Syndrome, k.MSN)
	}
	if k.AckReq {
		s += " ask"
	}
	return s
}

func pattern(n int, seed byte) flat {
	b := make(flat, n)
	for i := range b {
		b[i] = byte(i*7>>3) + byte(i) + seed
	}
	return b
}

// What is said of each kind of message.
var tapCases = []struct {
	name string
	typ  hca.QPType
	op   hca.SendOpcode
	n    int
	want []string // of two devices, at the sender's
}{
	{"send", hca.QPTypeRC, hca.OpSend, 5, []string{"2 04+0 5 ask", "1 11+0 s1f m1"}},
	{"send nothing", hca.QPTypeRC, hca.OpSend, 0, []string{"2 04+0 ask", "1 11+0 s1f m1"}},
	{"send long", hca.QPTypeRC, hca.OpSend, 2500, []string{"2 00+0 1024", "2 01+1 1024", "2 02+2 452 ask", "1 11+2 s1f m1"}},
	{"send immediate", hca.QPTypeRC, hca.OpSendImm, 1025, []string{"2 00+0 1024", "2 03+1 1 ask", "1 11+1 s1f m1"}},
	{"send little immediate", hca.QPTypeRC, hca.OpSendImm, 8, []string{"2 05+0 8 ask", "1 11+0 s1f m1"}},
	{"send with invalidate", hca.QPTypeRC, hca.OpSendInv, 9, []string{"2 17+0 9 ask", "1 11+0 s1f m1"}},
	{"send long with invalidate", hca.QPTypeRC, hca.OpSendInv, 1100, []string{"2 00+0 1024", "2 16+1 76 ask", "1 11+1 s1f m1"}},
	{"write", hca.QPTypeRC, hca.OpRDMAWrite, 4096, []string{"2 06+0 1024", "2 07+1 1024", "2 07+2 1024", "2 08+3 1024 ask", "1 11+3 s1f m1"}},
	{"write a little", hca.QPTypeRC, hca.OpRDMAWrite, 3, []string{"2 0a+0 3 ask", "1 11+0 s1f m1"}},
	{"write nothing", hca.QPTypeRC, hca.OpRDMAWrite, 0, []string{"2 0a+0 ask", "1 11+0 s1f m1"}},
	{"write immediate", hca.QPTypeRC, hca.OpRDMAWriteImm, 1030, []string{"2 06+0 1024", "2 09+1 6 ask", "1 11+1 s1f m1"}},
	{"write little immediate", hca.QPTypeRC, hca.OpRDMAWriteImm, 1, []string{"2 0b+0 1 ask", "1 11+0 s1f m1"}},
	{"read", hca.QPTypeRC, hca.OpRDMARead, 2049, []string{"2 0c+0 ask", "1 0d+0 1024 s1f m1", "1 0e+1 1024", "1 0f+2 1 s1f m1"}},
	{"read a little", hca.QPTypeRC, hca.OpRDMARead, 1024, []string{"2 0c+0 ask", "1 10+0 1024 s1f m1"}},
	{"read nothing", hca.QPTypeRC, hca.OpRDMARead, 0, []string{"2 0c+0 ask", "1 10+0 s1f m1"}},
	{"compare and swap", hca.QPTypeRC, hca.OpAtomicCmpSwap, 8, []string{"2 13+0 ask", "1 12+0 s1f m1"}},
	{"fetch and add", hca.QPTypeRC, hca.OpAtomicFetchAdd, 8, []string{"2 14+0 ask", "1 12+0 s1f m1"}},
	{"UC send", hca.QPTypeUC, hca.OpSend, 2100, []string{"2 20+0 1024", "2 21+1 1024", "2 22+2 52"}},
	{"UC send immediate", hca.QPTypeUC, hca.OpSendImm, 2, []string{"2 25+0 2"}},
	{"UC write", hca.QPTypeUC, hca.OpRDMAWrite, 1500, []string{"2 26+0 1024", "2 28+1 476"}},
	{"UC write immediate", hca.QPTypeUC, hca.OpRDMAWriteImm, 4, []string{"2 2b+0 4"}},
	{"UD send", hca.QPTypeUD, hca.OpSend, 1030, []string{"2 64+0 1030"}},
	{"UD send immediate", hca.QPTypeUD, hca.OpSendImm, 3, []string{"2 65+0 3"}},
	{"XRC send", hca.QPTypeXRCIni, hca.OpSend, 1027, []string{"2 a0+0 1024", "2 a2+1 3 ask", "1 b1+1 s1f m1"}},
	{"XRC write", hca.QPTypeXRCIni, hca.OpRDMAWrite, 7, []string{"2 aa+0 7 ask", "1 b1+0 s1f m1"}},
	{"XRC read", hca.QPTypeXRCIni, hca.OpRDMARead, 7, []string{"2 ac+0 ask", "1 b0+0 7 s1f m1"}},
	{"XRC fetch and add", hca.QPTypeXRCIni, hca.OpAtomicFetchAdd, 8, []string{"2 b4+0 ask", "1 b2+0 s1f m1"}},
}

// tapPair is two connected clients at one device or two, and what is heard there.
type tapPair struct {
	a, b   *client
	ta, tb *capture.Tap
}

func newTapPair(t testing.TB, how string, typ hca.QPType) *tapPair {
	t.Helper()
	f := loop.New(hca.LinkEthernet)
	if strings.HasPrefix(how, "InfiniBand") {
		f = loop.New(hca.LinkInfiniBand)
	}
	p := &tapPair{}
	da, ta := tapped(t, f, 1)
	db, tb := da, ta
	if !strings.HasSuffix(how, "one device") {
		db, tb = tapped(t, f, 2)
	}
	p.ta, p.tb = ta, tb
	peer := typ
	if typ == hca.QPTypeXRCIni {
		peer = hca.QPTypeXRCTgt
	}
	p.a, p.b = newClient(t, da, typ, 1<<20), newClient(t, db, peer, 1<<20)
	p.a.way, p.b.way = p.b.way, p.a.way
	if strings.HasPrefix(how, "IPv6") {
		for c, d := range map[*client]*soft.Device{p.a: db, p.b: da} {
			gid, err := d.GID(1, 0)
			check(t, err)
			c.way = hca.AHAttr{Port: 1, IsGlobal: true, DGID: gid, TrafficClass: 0x20, FlowLabel: 0x12345}
		}
	}
	connectAt(t, p.a, p.b, typ, 3, tapPSN)
	return p
}

func (p *tapPair) request(t testing.TB, op hca.SendOpcode, n int) hca.SendWR {
	w := hca.SendWR{
		ID: 1, Opcode: op, Flags: hca.SendSignaled | hca.SendSolicited, RemoteAddr: flatBase + 8, RKey: p.b.mr.RKey(), Imm: 0x01020304,
		SGE: []hca.SGE{{Addr: flatBase, Length: uint32(n), LKey: p.a.mr.LKey()}}, CompareAdd: 5, Swap: 6,
	}
	if p.b.srq != nil {
		w.RemoteSRQN = p.b.srq.Num()
	}
	if _, in := p.a.qp.Query(); in.Type == hca.QPTypeUD {
		ah, err := p.a.pd.CreateAH(p.a.way)
		check(t, err)
		t.Cleanup(func() { check(t, ah.Close()) })
		w.AH, w.RemoteQPN, w.RemoteQKey = ah, p.b.qp.Num(), 5
	}
	return w
}

func (p *tapPair) receive(t testing.TB) {
	w := []hca.RecvWR{{ID: 2, SGE: []hca.SGE{{Addr: flatBase, Length: 1 << 19, LKey: p.b.mr.LKey()}}}}
	var err error
	if p.b.srq != nil {
		_, err = p.b.srq.PostRecv(w)
	} else {
		_, err = p.b.qp.PostRecv(w)
	}
	check(t, err)
}

func (p *tapPair) post(t testing.TB, w hca.SendWR) {
	_, err := p.a.qp.PostSend([]hca.SendWR{w})
	check(t, err)
	p.a.qp.Run()
}

// TestTap: each kind of message is heard as the packets that it would be, at both ends.
func TestTap(t *testing.T) {
	var all []capture.Packet
	for _, how := range []string{"InfiniBand", "InfiniBand, one device", "IPv4", "IPv4, one device", "IPv6"} {
		for _, c := range tapCases {
			t.Run(how+"/"+c.name, func(t *testing.T) {
				p := newTapPair(t, how, c.typ)
				one := p.ta == p.tb
				ends := []*hearing{hearTap(t, p.ta, 0, &all)}
				if !one {
					ends = append(ends, hearTap(t, p.tb, 0, nil))
				}
				messages := 2
				if c.op == hca.OpSendInv {
					messages = 1 // there is no such window, and the receiver fails
				}
				for range messages {
					p.receive(t)
				}
				for range messages {
					p.post(t, p.request(t, c.op, c.n))
				}
				for i, h := range ends {
					var got []byte
					var psn uint32
					for j := range messages * len(c.want) {
						k, r := h.next()
						if i == 1 {
							k.Dir ^= 3
						}
						if one && k.Dir == capture.Out && r.Op.IsResponse() {
							k.Dir = capture.In // as the others
						}
						if j < len(c.want) {
							if s := say(k, &r); s != c.want[j] {
								t.Errorf("packet %d at end %d is %q, want %q", j, i, s, c.want[j])
							}
							got = append(got, r.Payload...)
							if r.Op.IsResponse() != (k.Dir == capture.In) || !r.Op.IsResponse() && r.QPN != p.b.qp.Num() || r.Op.IsResponse() && r.QPN != p.a.qp.Num() {
								t.Errorf("packet to QP %d, dir %d", r.QPN, k.Dir)
							}
							if _, v4 := r.Src.IPv4(); v4 != strings.HasPrefix(how, "IPv4") || r.Src == r.Dst != one {
								t.Errorf("from %s to %s", r.Src, r.Dst)
							}
							if r.Op.IsLast() && !r.Op.IsResponse() && !r.Solicited && c.op != hca.OpRDMARead && c.n != 8 {
								t.Error("not solicited")
							}
							if c.op == hca.OpSendInv && r.Op.IsLast() && !r.Op.IsResponse() && r.Invalidate != 0x01020304 {
								t.Errorf("key %x", r.Invalidate)
							}
							if c.op == hca.OpSendImm && r.Op.IsLast() && !r.Op.IsResponse() && r.Imm != 0x01020304 {
								t.Errorf("immediate %x", r.Imm)
							}
						} else if j == len(c.want) {
							psn = r.PSN
						}
					}
					next := (tapPSN + uint32(max((len(got)+tapMTU-1)/tapMTU, 1))) & roce.PSNMask
					if c.typ == hca.QPTypeUD {
						next = (tapPSN + 1) & roce.PSNMask
					}
					if messages > 1 && psn != next {
						t.Errorf("second message at PSN %x, want %x", psn, next)
					}
				}
			})
		}
	}
	keep(t, "", all)
}

// keep writes packets to the file for other judges, if they are wanted.
func keep(t *testing.T, suffix string, all []capture.Packet) {
	t.Helper()
	name := os.Getenv(keepCapture)
	if name == "" {
		return
	}
	var file bytes.Buffer
	w, err := capture.NewWriter(&file, "test", capture.DefaultSnap)
	check(t, err)
	for _, p := range all {
		check(t, w.Write(p))
	}
	check(t, w.Finish(time.Now(), uint64(len(all)), 0))
	check(t, os.WriteFile(name+suffix, file.Bytes(), 0o600))
}

// TestTapHeaders: what the extended headers say, and that payload is the message's.
func TestTapHeaders(t *testing.T) {
	p := newTapPair(t, "IPv4", hca.QPTypeRC)
	h := hearTap(t, p.ta, 0, nil)
	// A message longer than a chunk of the copy.
	const n = 700_000
	text := pattern(n, 1)
	check(t, writeFlat(p.a, text))
	p.post(t, p.request(t, hca.OpRDMAWrite, n))
	var got []byte
	for len(got) < n {
		_, k := h.next()
		if len(got) == 0 && (k.Op != roce.RC|roce.WriteFirst || k.VA != flatBase+8 || k.RKey != p.b.mr.RKey() || k.DMALen != n) {
			t.Fatalf("first packet %+v", k)
		}
		got = append(got, k.Payload...)
	}
	if !bytes.Equal(got, text) {
		t.Error("another payload")
	}
	if _, k := h.next(); k.Op != roce.Acknowledge || k.PSN != (tapPSN+(n-1)/tapMTU)&roce.PSNMask {
		t.Errorf("acknowledgement %+v", k)
	}
	for i, op := range []hca.SendOpcode{hca.OpAtomicFetchAdd, hca.OpAtomicCmpSwap} {
		p.post(t, p.request(t, op, 8))
		_, k := h.next()
		if k.VA != flatBase+8 || k.Swap != []uint64{5, 6}[i] || k.Compare != []uint64{0, 5}[i] {
			t.Errorf("atomic %+v", k)
		}
		if _, r := h.next(); r.Orig != binary.NativeEndian.Uint64(text)+[]uint64{0, 5}[i] {
			t.Errorf("answer %+v, was %x", r, text[:8])
		}
	}
	u := newTapPair(t, "IPv6", hca.QPTypeUD)
	h = hearTap(t, u.ta, 0, nil)
	u.post(t, u.request(t, hca.OpSend, 10))
	if _, k := h.next(); k.QKey != 5 || k.SrcQP != u.a.qp.Num() || k.TrafficClass != 0x20 || k.FlowLabel != 0x12345 {
		t.Errorf("datagram %+v", k)
	}
	x := newTapPair(t, "IPv6", hca.QPTypeXRCIni)
	h = hearTap(t, x.ta, 0, nil)
	x.post(t, x.request(t, hca.OpRDMAWrite, 10))
	if _, k := h.next(); k.SRQN != x.b.srq.Num() {
		t.Errorf("XRC %+v", k)
	}
}

func writeFlat(c *client, b []byte) error { return c.mem.WriteAt(b, flatBase) }

// TestTapRefused: what a responder refuses, and what is cut off.
func TestTapRefused(t *testing.T) {
	const ip4 = 20 + 8 + 12 // to the end of BTH
	var all []capture.Packet
	defer func() { keep(t, ".refused", all) }()
	for _, c := range []struct {
		name string
		typ  hca.QPType
		op   hca.SendOpcode
		n    int
		with func(*hca.SendWR)
		want []string
	}{
		{"no receive", hca.QPTypeRC, hca.OpSend, 5, nil, []string{"2 04+0 5 ask", "1 11+0 s2c m0"}},
		{"no receive for a long one", hca.QPTypeRC, hca.OpSend, 10_000, nil, []string{fmt.Sprintf("2 cut %d of %d", ip4, ip4+1024+4), "1 11+0 s2c m0"}},
		{"wrong key", hca.QPTypeRC, hca.OpRDMAWrite, 2000, func(w *hca.SendWR) { w.RKey ^= 0x5500 },
			[]string{fmt.Sprintf("2 cut %d of %d", ip4+16, ip4+16+1024+4), "1 11+0 s62 m0"}},
		{"wrong key to read", hca.QPTypeRC, hca.OpRDMARead, 2000, func(w *hca.SendWR) { w.RKey ^= 0x5500 }, []string{"2 0c+0 ask", "1 11+0 s62 m0"}},
		{"crooked atomic", hca.QPTypeRC, hca.OpAtomicFetchAdd, 8, func(w *hca.SendWR) { w.RemoteAddr++ }, []string{"2 14+0 ask", "1 11+0 s61 m0"}},
		{"UC, no receive", hca.QPTypeUC, hca.OpSend, 10_000, nil, []string{fmt.Sprintf("2 cut %d of %d", ip4, ip4+1024+4)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newTapPair(t, "IPv4", c.typ)
			h := hearTap(t, p.ta, 0, &all)
			w := p.request(t, c.op, c.n)
			if c.with != nil {
				c.with(&w)
			}
			p.post(t, w)
			for i, want := range c.want {
				k, r := h.next()
				if s := say(k, &r); s != want {
					t.Errorf("packet %d is %q, want %q", i, s, want)
				}
			}
		})
	}
}

// TestTapSnap: no more is kept than is wanted, and the lengths are right.
func TestTapSnap(t *testing.T) {
	p := newTapPair(t, "IPv4", hca.QPTypeRC)
	h := hearTap(t, p.ta, 60, nil)
	p.receive(t)
	text := pattern(2048, 3)
	check(t, writeFlat(p.a, text))
	p.post(t, p.request(t, hca.OpSend, 2048))
	for i := range 2 {
		k, _ := h.next()
		if k.Len != 40+1024+4 || len(k.Data) != 60 || !bytes.Equal(k.Data[40:], text[i*1024:i*1024+20]) {
			t.Errorf("packet %d: %d bytes of %d, %x", i, len(k.Data), k.Len, k.Data)
		}
	}
	if k, _ := h.next(); k.Len != 48 || len(k.Data) != 48 {
		t.Errorf("acknowledgement %+v", k)
	}
}

// TestTapGroup: a datagram to a group is heard once at each device.
func TestTapGroup(t *testing.T) {
	f := loop.New(hca.LinkInfiniBand)
	group := hca.GID{0xff, 0x0e, 15: 7}
	var taps []*capture.Tap
	var cs []*client
	for id := range byte(3) {
		d, tap := tapped(t, f, id+1)
		taps = append(taps, tap)
		pair := []*client{newClient(t, d, hca.QPTypeUD, 1<<16), newClient(t, d, hca.QPTypeUD, 1<<16)}
		connectAt(t, pair[0], pair[1], hca.QPTypeUD, 3, tapPSN)
		for _, c := range pair {
			check(t, c.qp.AttachMcast(group, loop.MulticastLIDBase))
			t.Cleanup(func() { check(t, c.qp.DetachMcast(group, loop.MulticastLIDBase)) })
			cs = append(cs, c)
		}
	}
	var hs []*hearing
	for _, tap := range taps {
		hs = append(hs, hearTap(t, tap, 0, nil))
	}
	a := cs[0]
	ah, err := a.pd.CreateAH(hca.AHAttr{Port: 1, DLID: loop.MulticastLIDBase, IsGlobal: true, DGID: group})
	check(t, err)
	t.Cleanup(func() { check(t, ah.Close()) })
	for range 2 {
		_, err = a.qp.PostSend([]hca.SendWR{{Opcode: hca.OpSend, AH: ah, RemoteQPN: 0xffffff, RemoteQKey: 5, SGE: []hca.SGE{{Addr: flatBase, Length: 9, LKey: a.mr.LKey()}}}})
		check(t, err)
	}
	a.qp.Run()
	for i, h := range hs {
		for n := range 2 {
			k, r := h.next()
			dir := capture.In
			if i == 0 {
				dir = capture.Out
			}
			want := fmt.Sprintf("%d 64+%d 9", dir, n)
			if s := say(k, &r); s != want || r.Dst != group || r.QPN != 0xffffff {
				t.Errorf("device %d: %q to %s, want %q", i, s, r.Dst, want)
			}
		}
		if n := h.s.Received(); n != 2 {
			t.Errorf("device %d heard %d packets", i, n)
		}
	}
}

// listened is a device at which somebody listens all the time, and looks at every
// packet.
func listened(t testing.TB, f *loop.Fabric, id byte) *soft.Device {
	d, tap := tapped(t, f, id)
	s, err := tap.Subscribe(0, 0)
	check(t, err)
	done := make(chan struct{})
	t.Cleanup(func() {
		s.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			p, err := s.Next(context.Background())
			if err != nil {
				return
			}
			var k roce.Packet
			if err := roce.Parse(p.Data, &k); p.Len == len(p.Data) && err != nil {
				t.Errorf("packet %x: %v", p.Data, err)
			}
		}
	}()
	return d
}

// TestListened is the suite with listeners: whatever is refused, stuck, closed or
// reset, and with many at it.
func TestListened(t *testing.T) {
	if testing.Short() {
		t.Skip("the suite once more")
	}
	on := func(link hca.LinkLayer) func(testing.TB) hcatest.Pair {
		return func(t testing.TB) hcatest.Pair {
			f := loop.New(link)
			return hcatest.Pair{A: listened(t, f, 1), B: listened(t, f, 2)}
		}
	}
	hcatest.RunEthernet(t, on(hca.LinkEthernet))
	hcatest.Run(t, on(hca.LinkInfiniBand))
}

// A listener that reads nothing holds up nobody.
func TestTapFull(t *testing.T) {
	p := newTapPair(t, "IPv4", hca.QPTypeRC)
	s, err := p.ta.Subscribe(2, 0)
	check(t, err)
	defer s.Close()
	wc := make([]hca.WC, 1)
	for range 100 {
		p.post(t, p.request(t, hca.OpRDMAWrite, 5000))
		if p.a.cq.Poll(wc) != 1 || wc[0].Status != hca.WCSuccess {
			t.Fatalf("%+v", wc)
		}
	}
	if s.Received() != 600 || s.Dropped() != 598 {
		t.Errorf("dropped %d of %d", s.Dropped(), s.Received())
	}
}

// TestNoAllocTap: a tap that nobody listens at, and one that is full, cost no
// allocation a message.
func TestNoAllocTap(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, how := range []string{"nobody", "somebody"} {
		p := newTapPair(t, "IPv4, one device", hca.QPTypeRC)
		if how == "somebody" {
			s, err := p.ta.Subscribe(2, 0)
			check(t, err)
			defer s.Close()
		}
		wr := []hca.SendWR{p.request(t, hca.OpRDMAWrite, 3000)}
		wc := make([]hca.WC, 1)
		if n := testing.AllocsPerRun(1000, func() {
			_, _ = p.a.qp.PostSend(wr)
			p.a.qp.Run()
			p.a.cq.Poll(wc)
		}); n > 0 {
			t.Errorf("%s: %v allocations a message", how, n)
		}
	}
}

func BenchmarkTap(b *testing.B) {
	for _, how := range []string{"nobody", "headers", "everything"} {
		for _, n := range []int{64, 65536} {
			b.Run(fmt.Sprintf("%s/%d", how, n), func(b *testing.B) {
				p := newTapPair(b, "IPv4, one device", hca.QPTypeRC)
				if how != "nobody" {
					s, err := p.ta.Subscribe(16, map[string]int{"headers": 96, "everything": 0}[how])
					check(b, err)
					defer s.Close()
				}
				wr := []hca.SendWR{p.request(b, hca.OpRDMAWrite, n)}
				wc := make([]hca.WC, 1)
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					_, _ = p.a.qp.PostSend(wr)
					p.a.qp.Run()
					p.a.cq.Poll(wc)
				}
			})
		}
	}
}
