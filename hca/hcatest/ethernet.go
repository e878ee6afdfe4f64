package hcatest

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// RunEthernet runs what a port's link layer has to do with, on devices whose ports
// are Ethernet and have an IPv4 address each.
func RunEthernet(t *testing.T, open func(t testing.TB) Pair) {
	for _, c := range concat(ethernetCases, objectCases, stateCases, rcCases, retryCases, udCases, ucCases, xrcCases) {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
}

var ethernetCases = []testCase{
	{"EthernetPort", testEthernetPort},
	{"EthernetPaths", testEthernetPaths},
	{"EthernetEachGID", testEthernetEachGID},
	{"EthernetOtherGID", testEthernetOtherGID},
	{"EthernetHeaders", testEthernetHeaders},
	{"EthernetMulticast", testEthernetMulticast},
}

// The GID table: what is where.
const (
	linkLocal = 0
	mapped    = 1
	noGID     = 2 // the first empty place
)

func testEthernetPort(t *testing.T, p Pair) {
	for _, dev := range []hca.Device{p.A, p.B} {
		a, err := dev.Port(1)
		must(t, err)
		if a.LinkLayer != hca.LinkEthernet || a.LID != 0 || a.SMLID != 0 || a.PortCapFlags != 1<<16 || a.SubnetTimeout != 0 {
			t.Errorf("port %+v", a)
		}
		want := hca.GID{0: 0xfe, 1: 0x80}
		guid := dev.Attr().NodeGUID
		copy(want[8:], guid[:])
		if got := gidAt(t, dev, linkLocal); got != want {
			t.Errorf("GID 0 %s, want %s", got, want)
		}
		if got := gidAt(t, dev, mapped); !bytes.Equal(got[:12], []byte{10: 0xff, 11: 0xff}) {
			t.Errorf("GID 1 %s", got)
		}
		for i := noGID; i < dev.Attr().GIDTableLen; i++ {
			if got := gidAt(t, dev, i); got != (hca.GID{}) {
				t.Errorf("GID %d %s", i, got)
			}
		}
	}
}

func gidAt(t *testing.T, dev hca.Device, i int) hca.GID {
	t.Helper()
	g, err := dev.GID(1, i)
	must(t, err)
	return g
}

var (
	group6 = hca.GID{0: 0xff, 1: 0x0e, 15: 7}
	group4 = hca.IPv4GID([4]byte{225, 1, 2, 3})
)

// testEthernetPaths has what the kernel's rxe answered, in Linux 6.1 and 6.12.
func testEthernetPaths(t *testing.T, p Pair) {
	local, v4 := gidAt(t, p.B, linkLocal), gidAt(t, p.B, mapped)
	nobody := v4
	nobody[14]++
	type attr = hca.AHAttr
	for _, c := range []struct {
		name  string
		a     attr
		errno unix.Errno // 0: taken
		want  attr       // and reported so
	}{
		{"no GRH", attr{DLID: 1}, unix.EINVAL, attr{}},
		{"no GRH, but a GID", attr{DGID: v4, SGIDIndex: mapped}, unix.EINVAL, attr{}},
		{"empty GID", attr{IsGlobal: true, DGID: v4, SGIDIndex: noGID}, unix.ENODATA, attr{}},
		{"no such GID", attr{IsGlobal: true, DGID: v4, SGIDIndex: 200}, unix.EINVAL, attr{}},
		{"IPv4 to IPv6", attr{IsGlobal: true, DGID: local, SGIDIndex: mapped}, unix.EINVAL, attr{}},
		{"IPv6 to IPv4", attr{IsGlobal: true, DGID: v4, SGIDIndex: linkLocal}, unix.EINVAL, attr{}},
		{"IPv4", attr{IsGlobal: true, DGID: v4, SGIDIndex: mapped, HopLimit: 9, TrafficClass: 1, FlowLabel: 2}, 0,
			attr{IsGlobal: true, DGID: v4, SGIDIndex: mapped, HopLimit: routeHops, TrafficClass: 1, FlowLabel: 2}},
		{"IPv6", attr{IsGlobal: true, DGID: local}, 0, attr{IsGlobal: true, DGID: local, HopLimit: routeHops}},
		{"what Ethernet has not", attr{IsGlobal: true, DGID: local, DLID: 0xc001, SL: 16, StaticRate: 77, SrcPathBits: 5}, 0,
			attr{IsGlobal: true, DGID: local, HopLimit: routeHops}},
		{"nobody's", attr{IsGlobal: true, DGID: nobody, SGIDIndex: mapped}, 0,
			attr{IsGlobal: true, DGID: nobody, SGIDIndex: mapped, HopLimit: routeHops}},
		{"IPv6 group", attr{IsGlobal: true, DGID: group6, HopLimit: 9}, 0, attr{IsGlobal: true, DGID: group6, HopLimit: 9}},
		{"IPv4 group", attr{IsGlobal: true, DGID: group4, SGIDIndex: mapped}, 0, attr{IsGlobal: true, DGID: group4, SGIDIndex: mapped}},
		{"IPv6 group from IPv4", attr{IsGlobal: true, DGID: group6, SGIDIndex: mapped}, 0, attr{IsGlobal: true, DGID: group6, SGIDIndex: mapped}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.a.Port, c.want.Port = 1, 1
			for _, typ := range []hca.QPType{rc, uc, ini, tgt} {
				e := newEnd(t, p.A, defaults().with(func(o *opts) { o.typ = typ }))
				e.toInit()
				at, m := e.rtrAttr(e)
				at.AH = c.a
				err := e.qp.Modify(&at, m)
				got, _ := e.qp.Query()
				if c.errno != 0 {
					wantErrno(t, err, c.errno)
					if got.State != inS {
						t.Errorf("type %d: state %d after an error", typ, got.State)
					}
					continue
				}
				must(t, err)
				if got.AH != c.want {
					t.Errorf("type %d: path\n%+v, want\n%+v", typ, got.AH, c.want)
				}
			}
			ah, err := newEnd(t, p.A, udOpts()).pd.CreateAH(c.a)
			if c.errno != 0 {
				wantErrno(t, err, c.errno)
				return
			}
			must(t, err)
			if ah.Attr() != c.want {
				t.Errorf("address handle\n%+v, want\n%+v", ah.Attr(), c.want)
			}
			must(t, ah.Close())
		})
	}
	// Path migration is InfiniBand's.
	e := newEnd(t, p.A, defaults())
	e.toInit()
	at, m := e.rtrAttr(e)
	at.AltAH, at.AltPort = at.AH, 1
	wantErrno(t, e.qp.Modify(&at, m|hca.QPMaskAltPath), unix.EINVAL)
	must(t, e.qp.Modify(&at, m))
}

// onGID makes an end that goes by one of its port's GIDs.
func onGID(t *testing.T, dev hca.Device, o opts, index int) *end {
	e := newEnd(t, dev, o)
	e.gid, e.gidIndex = gidAt(t, dev, index), uint8(index)
	return e
}

// testEthernetEachGID: by each GID, to another port and to oneself.
func testEthernetEachGID(t *testing.T, p Pair) {
	for _, typ := range []hca.QPType{rc, uc} {
		for _, index := range []int{linkLocal, mapped} {
			for _, to := range []hca.Device{p.A, p.B} {
				o := defaults().with(func(o *opts) { o.typ = typ })
				a, b := onGID(t, p.A, o, index), onGID(t, to, o, index)
				link(a, b)
				a.mem.Set(0, Pattern(index, 9000))
				b.postRecv(1, b.sge(0, 9000))
				a.postSend(a.send(2, 0, 9000))
				one(t, a.scq, 2, hca.WCSuccess)
				if wc := one(t, b.rcq, 1, hca.WCSuccess); wc.SLID != 0 || wc.SL != 0 {
					t.Errorf("completion %+v", wc)
				}
				equal(t, b.mem.Get(0, 9000), Pattern(index, 9000))
			}
		}
	}
}

// testEthernetOtherGID: a responder whose own path goes by another GID of the same
// two ports takes nothing (check_addr, rxe_recv.c).
func testEthernetOtherGID(t *testing.T, p Pair) {
	o := defaults().with(func(o *opts) { o.timeout, o.retryCnt = 8, 1 })
	a, b := onGID(t, p.A, o, linkLocal), onGID(t, p.B, o, mapped)
	toB, toA := *b, *a
	toB.gid, toA.gid = gidAt(t, p.B, linkLocal), gidAt(t, p.A, mapped)
	a.toInit()
	b.toInit()
	a.toRTR(&toB)
	b.toRTR(&toA)
	a.toRTS()
	b.toRTS()
	b.postRecv(1, b.sge(0, 64))
	start := time.Now()
	a.postSend(a.send(2, 0, 8))
	one(t, a.scq, 2, hca.WCRetryExcErr)
	if d, least := time.Since(start), 4096*time.Nanosecond<<8; d < least {
		t.Errorf("gave up after %v, want at least %v", d, least)
	}
	none(t, b.rcq)
}

// testEthernetHeaders: what a datagram's receiver finds in the room of the GRH.
func testEthernetHeaders(t *testing.T, p Pair) {
	for _, c := range []struct {
		name   string
		index  int
		n      int
		imm    bool
		length uint16 // of what follows the network header: UDP's 8, BTH, DETH, payload, ICRC
	}{
		{"IPv4", mapped, 33, false, 8 + 12 + 8 + 36 + 4},
		{"IPv4, immediate", mapped, 0, true, 8 + 12 + 8 + 4 + 4},
		{"IPv4, whole MTU", mapped, 4096, false, 8 + 12 + 8 + 4096 + 4},
		{"IPv6", linkLocal, 33, false, 8 + 12 + 8 + 36 + 4},
		{"IPv6, immediate", linkLocal, 64, true, 8 + 12 + 8 + 4 + 64 + 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := onGID(t, p.A, udOpts(), c.index), onGID(t, p.B, udOpts(), c.index)
			link(a, b)
			b.mem.Set(0, bytes.Repeat([]byte{0xee}, grh+c.n))
			b.postRecv(1, b.sge(0, grh+c.n))
			a.mem.Set(0, Pattern(1, c.n))
			w := a.dgram(2, 0, c.n, b, a.ah(b))
			flags := hca.WCGRH
			if c.imm {
				w.Opcode, w.Imm = hca.OpSendImm, 5
				flags |= hca.WCWithImm
			}
			a.postSend(w)
			one(t, a.scq, 2, hca.WCSuccess)
			wc := one(t, b.rcq, 1, hca.WCSuccess)
			if wc.Flags != flags || wc.SLID != 0 || wc.SL != 0 || int(wc.ByteLen) != grh+c.n {
				t.Errorf("completion %+v", wc)
			}
			equal(t, b.mem.Get(grh, c.n), Pattern(1, c.n))
			h := b.mem.Get(0, grh)
			if c.index == mapped {
				ip4Header(t, h, a, b, c.length)
				return
			}
			want := []byte{0x65, 0xa0, 0, 0, byte(c.length >> 8), byte(c.length), 17, routeHops}
			equal(t, h, append(append(want, a.gid[:]...), b.gid[:]...))
		})
	}
}

// ip4Header checks the 40 bytes at h: zeros, then an IPv4 header.
func ip4Header(t *testing.T, h []byte, a, b *end, length uint16) {
	t.Helper()
	var sum uint32
	for i := 20; i < grh; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	if sum>>16+sum&0xffff != 0xffff {
		t.Errorf("the sum of header %x is wrong", h[20:])
	}
	h[30], h[31] = 0, 0
	want := make([]byte, 20, grh)
	want = append(want, 0x45, 0x5a, byte((length+20)>>8), byte(length+20), 0, 0, 0x40, 0, routeHops, 17, 0, 0)
	equal(t, h, append(append(want, a.gid[12:]...), b.gid[12:]...))
}

// testEthernetMulticast: a group is its GID; LIDs are not looked at.
func testEthernetMulticast(t *testing.T, p Pair) {
	for _, c := range []struct {
		name  string
		index int
		group hca.GID
		lid   uint16
	}{
		{"IPv6", linkLocal, group6, 0},
		{"IPv6, with a LID", linkLocal, group6, 0x17},
		{"IPv4", mapped, group4, 0},
		{"IPv6 from IPv4", mapped, group6, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := onGID(t, p.A, udOpts(), c.index), onGID(t, p.B, udOpts(), c.index)
			link(a, b)
			for _, g := range []hca.GID{{}, b.gid, hca.IPv4GID([4]byte{240, 0, 0, 1})} {
				wantErrno(t, b.qp.AttachMcast(g, c.lid), unix.EINVAL)
			}
			must(t, b.qp.AttachMcast(c.group, c.lid))
			ah, err := a.pd.CreateAH(hca.AHAttr{Port: 1, IsGlobal: true, DGID: c.group, SGIDIndex: a.gidIndex, HopLimit: 1})
			must(t, err)
			w := a.dgram(1, 0, 77, b, ah)
			w.RemoteQPN = 0xffffff
			b.postRecv(2, b.sge(0, 200))
			a.postSend(w)
			one(t, a.scq, 1, hca.WCSuccess)
			if wc := one(t, b.rcq, 2, hca.WCSuccess); wc.Flags != hca.WCGRH || wc.ByteLen != grh+77 {
				t.Errorf("completion %+v", wc)
			}
			must(t, b.qp.DetachMcast(c.group, c.lid))
			wantErrno(t, b.qp.DetachMcast(c.group, c.lid), unix.EINVAL)
			a.postSend(w)
			one(t, a.scq, 1, hca.WCSuccess)
			none(t, b.rcq)
			must(t, ah.Close())
		})
	}
}
