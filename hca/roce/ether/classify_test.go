package ether

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
)

var (
	testMAC   = nic.MAC{2, 0, 0, 0, 0, 1}
	otherMAC  = nic.MAC{2, 0, 0, 0, 0, 2}
	testSix   = hca.GID{0: 0x20, 1: 1, 15: 1}
	testGroup = hca.GID{0: 0xff, 1: 0x0e, 15: 1}
	testFour  = hca.IPv4GID([4]byte{192, 0, 2, 1})
	testGrp4  = hca.IPv4GID([4]byte{239, 0, 0, 1})
)

func testView(vlan uint16) *view {
	return &view{mac: testMAC, vlan: vlan, accept: map[hca.GID]struct{}{testSix: {}, testGroup: {}, testFour: {}, testGrp4: {}}}
}

// four makes an IPv4 frame; edit is called before the checksum is made.
func four(dst nic.MAC, to [4]byte, port uint16, body int, edit func(ip []byte)) []byte {
	f := make([]byte, 14+20+8+body)
	copy(f, dst[:])
	copy(f[6:], otherMAC[:])
	f[12] = 8
	ip := f[14:]
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	binary.BigEndian.PutUint16(ip[2:], uint16(28+body))
	copy(ip[12:], []byte{192, 0, 2, 2})
	copy(ip[16:], to[:])
	binary.BigEndian.PutUint16(ip[22:], port)
	if edit != nil {
		edit(ip)
	}
	n := min(max(int(ip[0]&15)*4, 20), len(ip))
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum(ip[:n])))
	return f
}

func six(dst nic.MAC, to hca.GID, port uint16, body int, edit func(ip []byte)) []byte {
	f := make([]byte, 14+40+8+body)
	copy(f, dst[:])
	copy(f[6:], otherMAC[:])
	f[12], f[13] = 0x86, 0xdd
	ip := f[14:]
	ip[0], ip[6], ip[7] = 0x60, 17, 64
	binary.BigEndian.PutUint16(ip[4:], uint16(8+body))
	copy(ip[24:], to[:])
	binary.BigEndian.PutUint16(ip[42:], port)
	if edit != nil {
		edit(ip)
	}
	return f
}

func withTag(f []byte, tci ...uint16) []byte {
	g := append([]byte(nil), f[:12]...)
	for _, t := range tci {
		g = binary.BigEndian.AppendUint16(g, typeVLAN)
		g = binary.BigEndian.AppendUint16(g, t)
	}
	return append(g, f[12:]...)
}

type frameCase struct {
	name    string
	vlan    uint16
	f       []byte
	want    kind
	l3, end int
}

func frameCases() []frameCase {
	us, them := [4]byte{192, 0, 2, 1}, [4]byte{192, 0, 2, 9}
	grp := [4]byte{239, 0, 0, 1}
	bcast, mc := nic.MAC{255, 255, 255, 255, 255, 255}, nic.MAC{1, 0, 0x5e, 0, 0, 1}
	v4, v6 := four(testMAC, us, 4791, 16, nil), six(testMAC, testSix, 4791, 16, nil)
	put := func(off int, v uint16) func([]byte) {
		return func(ip []byte) { binary.BigEndian.PutUint16(ip[off:], v) }
	}
	arp := four(bcast, us, 0, 0, nil)
	arp[13] = 6
	lldp := four(mc, us, 0, 0, nil)
	lldp[12], lldp[13] = 0x88, 0xcc
	length := four(testMAC, us, 4791, 0, nil) // 802.3 with a length
	length[12], length[13] = 0, 28
	sumless := four(testMAC, us, 4791, 16, nil)
	sumless[24]++
	return []frameCase{
		{"IPv4", 0, v4, kindRoCE, 14, len(v4)},
		{"IPv6", 0, v6, kindRoCE, 14, len(v6)},
		{"IPv4 padded", 0, append(bytes.Clone(v4), make([]byte, 18)...), kindRoCE, 14, len(v4)},
		{"IPv6 padded", 0, append(bytes.Clone(v6), 1, 2, 3), kindRoCE, 14, len(v6)},
		{"IPv4 DF", 0, four(testMAC, us, 4791, 4, put(6, 0x4000)), kindRoCE, 14, 46},
		{"IPv4 options", 0, four(testMAC, us, 4791, 16, func(ip []byte) {
			ip[0] = 0x46
			binary.BigEndian.PutUint16(ip[26:], 4791)
		}), kindRoCE, 14, 58},
		{"IPv4 group", 0, four(mc, grp, 4791, 4, nil), kindRoCE, 14, 46},
		{"IPv6 group", 0, six(nic.MAC{0x33, 0x33, 0, 0, 0, 1}, testGroup, 4791, 4, nil), kindRoCE, 14, 66},
		{"priority tag", 0, withTag(v4, 5<<13), kindRoCE, 18, len(v4) + 4},
		{"VLAN", 7, withTag(v6, 5<<13|7), kindRoCE, 18, len(v6) + 4},
		{"no payload", 0, four(testMAC, us, 4791, 0, nil), kindRoCE, 14, 42},

		{"IPv4 more fragments", 0, four(testMAC, us, 4791, 16, put(6, 0x2000)), kindStack, 14, len(v4)},
		{"IPv4 last fragment", 0, four(testMAC, us, 4791, 16, put(6, 3)), kindStack, 14, len(v4)},
		{"IPv6 fragment", 0, six(testMAC, testSix, 4791, 16, func(ip []byte) { ip[6] = 44 }), kindStack, 14, len(v6)},
		{"IPv6 hop by hop", 0, six(testMAC, testSix, 4791, 16, func(ip []byte) { ip[6] = 0 }), kindStack, 14, len(v6)},
		{"TCP", 0, four(testMAC, us, 4791, 16, func(ip []byte) { ip[9] = 6 }), kindStack, 14, len(v4)},
		{"other port", 0, four(testMAC, us, 4790, 16, nil), kindStack, 14, len(v4)},
		{"other port in IPv6", 0, six(testMAC, testSix, 4790, 16, nil), kindStack, 14, len(v6)},
		{"ARP", 0, arp, kindStack, 14, len(arp)},
		{"ARP in the VLAN", 7, withTag(arp, 7), kindStack, 18, len(arp) + 4},

		{"empty", 0, nil, kindShort, 0, 0},
		{"no type", 0, v4[:13], kindShort, 0, 0},
		{"tag cut", 0, withTag(v4, 0)[:17], kindShort, 0, 0},
		{"other VLAN", 7, withTag(v4, 8), kindVLAN, 0, 0},
		{"tag unasked for", 0, withTag(v4, 7), kindVLAN, 0, 0},
		{"no tag", 7, v4, kindVLAN, 0, 0},
		{"two tags", 7, withTag(v4, 7, 7), kindType, 0, 0},
		{"other host", 0, four(otherMAC, us, 4791, 16, nil), kindHost, 0, 0},
		{"LLDP", 0, lldp, kindType, 0, 0},
		{"802.3 length", 0, length, kindType, 0, 0},

		{"header only", 0, v4[:14], kindMalformed, 0, 0},
		{"IPv4 cut", 0, v4[:33], kindMalformed, 0, 0},
		{"IPv4 version", 0, four(testMAC, us, 4791, 16, func(ip []byte) { ip[0] = 0x65 }), kindMalformed, 0, 0},
		{"IPv4 IHL small", 0, four(testMAC, us, 4791, 16, func(ip []byte) { ip[0] = 0x44 }), kindMalformed, 0, 0},
		{"IPv4 IHL large", 0, four(testMAC, us, 4791, 16, func(ip []byte) { ip[0] = 0x4f }), kindMalformed, 0, 0},
		{"IPv4 long", 0, four(testMAC, us, 4791, 16, put(2, 45)), kindMalformed, 0, 0},
		{"IPv4 short", 0, four(testMAC, us, 4791, 16, put(2, 19)), kindMalformed, 0, 0},
		{"IPv4 no UDP header", 0, four(testMAC, us, 4791, 16, put(2, 27)), kindMalformed, 0, 0},
		{"IPv4 checksum", 0, sumless, kindMalformed, 0, 0},
		{"IPv6 cut", 0, v6[:53], kindMalformed, 0, 0},
		{"IPv6 version", 0, six(testMAC, testSix, 4791, 16, func(ip []byte) { ip[0] = 0x40 }), kindMalformed, 0, 0},
		{"IPv6 long", 0, six(testMAC, testSix, 4791, 16, put(4, 25)), kindMalformed, 0, 0},
		{"IPv6 no UDP header", 0, six(testMAC, testSix, 4791, 16, put(4, 7)), kindMalformed, 0, 0},

		{"other address", 0, four(testMAC, them, 4791, 16, nil), kindNotOurs, 0, 0},
		{"other address in IPv6", 0, six(testMAC, hca.GID{0: 0x20, 15: 7}, 4791, 16, nil), kindNotOurs, 0, 0},
		{"other group", 0, four(mc, [4]byte{239, 1, 0, 1}, 4791, 16, nil), kindNotOurs, 0, 0},
		{"address by broadcast", 0, four(bcast, us, 4791, 16, nil), kindNotOurs, 0, 0},
		{"group by unicast", 0, four(testMAC, grp, 4791, 16, nil), kindNotOurs, 0, 0},
	}
}

func TestClassify(t *testing.T) {
	for _, tt := range frameCases() {
		k, l3, end := testView(tt.vlan).classify(tt.f)
		if k != tt.want || l3 != tt.l3 || end != tt.end {
			t.Errorf("%s: %d, %d to %d; want %d, %d to %d", tt.name, k, l3, end, tt.want, tt.l3, tt.end)
		}
	}
}

// However a frame is cut, what is called a RoCE packet lies in it and is to us.
func FuzzClassify(f *testing.F) {
	for _, tt := range frameCases() {
		f.Add(tt.f, tt.vlan)
	}
	f.Fuzz(func(t *testing.T, b []byte, vlan uint16) {
		v := testView(vlan & 0xfff)
		for n := len(b); n >= 0; n-- {
			k, l3, end := v.classify(b[:n:n])
			switch k {
			case kindRoCE:
				ip := b[l3:end]
				hlen, dst := 40, hca.GID{}
				if ip[0]>>4 == 4 {
					hlen, dst = int(ip[0]&15)*4, hca.IPv4GID([4]byte(ip[16:]))
				} else {
					copy(dst[:], ip[24:])
				}
				if end > n || len(ip) < hlen+8 || binary.BigEndian.Uint16(ip[hlen+2:]) != 4791 {
					t.Fatalf("%x is no RoCE packet", b[:n])
				}
				if _, ok := v.accept[dst]; !ok {
					t.Fatalf("%x is not to us", b[:n])
				}
			case kindStack:
				if l3 < ethHeader || end != n || l3 > end {
					t.Fatalf("%x: %d to %d", b[:n], l3, end)
				}
			default:
				if k >= kinds || kindNames[k] == "" || l3 != 0 || end != 0 {
					t.Fatalf("%x is %d, %d to %d", b[:n], k, l3, end)
				}
			}
			if n < len(b)-64 && n > 64 {
				n = 64
			}
		}
	})
}
