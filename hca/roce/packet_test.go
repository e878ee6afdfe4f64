package roce_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

var (
	v4a, v4b = hca.IPv4GID([4]byte{10, 0, 0, 1}), hca.IPv4GID([4]byte{10, 0, 0, 2})
	v6a, v6b = hca.GID{0xfd, 2, 15: 1}, hca.GID{0xfd, 2, 15: 2}
)

// full is a packet with every field of every header set.
func full(op roce.Opcode, v4 bool) roce.Packet {
	p := roce.Packet{
		Src: v6a, Dst: v6b, SrcPort: 0xC123, TrafficClass: 0x42, FlowLabel: 0xabcde, HopLimit: 63,
		Op: op, Solicited: true, Migrated: true, AckReq: true, FECN: true, BECN: true, PKey: 0xffff,
		QPN: 0x123456, PSN: 0xfedcba,
	}
	if v4 {
		p.Src, p.Dst, p.FlowLabel = v4a, v4b, 0
	}
	return p
}

// fields sets the extended headers' fields that op has.
func fields(p *roce.Packet) {
	op := p.Op.Operation()
	if p.Op == roce.CNP {
		return
	}
	switch p.Op.Transport() {
	case roce.UD:
		p.QKey, p.SrcQP = 0x80010001, 0x654321
	case roce.XRC:
		if !p.Op.IsResponse() {
			p.SRQN = 0x70605
		}
	}
	switch op {
	case roce.WriteFirst, roce.WriteOnly, roce.WriteOnlyImm, roce.ReadRequest, roce.Flush, roce.AtomicWrite:
		p.VA, p.RKey, p.DMALen = 0x1122334455667788, 0xdeadbeef, 0x10203040
	case roce.CompareSwap, roce.FetchAdd:
		p.VA, p.RKey, p.Swap, p.Compare = 0x1122334455667788, 0xdeadbeef, 1<<63|5, 7
	case roce.ReadRespFirst, roce.ReadRespLast, roce.ReadRespOnly, roce.Acknowledge:
		p.Syndrome, p.MSN = 0x1f, 0x112233
	case roce.AtomicAck:
		p.Syndrome, p.MSN, p.Orig = 0x1f, 0x112233, 0x99
	}
	if op == roce.Flush {
		p.FlushType, p.FlushLevel = 3, 1
	}
	switch op {
	case roce.SendLastImm, roce.SendOnlyImm, roce.WriteLastImm, roce.WriteOnlyImm:
		p.Imm = 0xcafe
	case roce.SendLastInv, roce.SendOnlyInv:
		p.Invalidate = 0x777
	}
}

func build(t *testing.T, p roce.Packet, payload []byte) roce.Buffer {
	t.Helper()
	buf := make([]byte, roce.Headroom+roce.MaxPacket)
	at := p.Build(buf)
	return roce.Seal(buf, at+copy(buf[at:], payload))
}

func hasPayload(op roce.Opcode) bool {
	switch op.Operation() {
	case roce.ReadRequest, roce.Acknowledge, roce.AtomicAck, roce.CompareSwap, roce.FetchAdd, roce.Flush:
		return false
	}
	return op != roce.CNP
}

// TestRoundTrip builds every known opcode in both families and reads it back.
func TestRoundTrip(t *testing.T) {
	known := 0
	for o := range 256 {
		op := roce.Opcode(o)
		if !op.IsKnown() {
			continue
		}
		known++
		for _, v4 := range []bool{false, true} {
			for _, n := range []int{0, 1, 2, 3, 4, 64, 1021, roce.MaxPayload} {
				p := full(op, v4)
				fields(&p)
				payload := bytes.Repeat([]byte{0xa5}, n)
				isMiddle := hasPayload(op) && !op.IsLast()
				if !hasPayload(op) && n != 0 || isMiddle && (n == 0 || n%4 != 0) {
					continue
				}
				b := build(t, p, payload)
				var got roce.Packet
				if err := roce.Parse(append(bytes.Clone(b[roce.Headroom:]), 0, 0, 0), &got); err != nil {
					t.Fatalf("opcode %#x, v4 %v, %d bytes: %v", o, v4, n, err)
				}
				p.Payload = payload
				if !bytes.Equal(got.Payload, payload) {
					t.Fatalf("opcode %#x: payload differs", o)
				}
				got.Payload = payload
				if !reflect.DeepEqual(got, p) {
					t.Fatalf("opcode %#x:\n got %+v\nwant %+v", o, got, p)
				}
			}
		}
	}
	if want := 25 + 23 + 12 + 2 + 1; known != want {
		t.Errorf("%d opcodes are known, want %d", known, want)
	}
}

// TestParseRefuses damages a good packet.
func TestParseRefuses(t *testing.T) {
	for _, v4 := range []bool{true, false} {
		p := full(roce.RC|roce.WriteOnly, v4)
		fields(&p)
		good := build(t, p, []byte("payload!"))[roce.Headroom:]
		udp := 40
		if v4 {
			udp = 20
		}
		for _, c := range []struct {
			name   string
			damage func(b []byte) []byte
			want   error
		}{
			{"nothing", func([]byte) []byte { return nil }, roce.ErrShort},
			{"another version", func(b []byte) []byte { b[0] = 5 << 4; return b }, roce.ErrIP},
			{"cut", func(b []byte) []byte { return b[:len(b)-1] }, roce.ErrShort},
			{"another port", func(b []byte) []byte { b[udp+3]++; return b }, roce.ErrUDP},
			{"UDP length", func(b []byte) []byte { b[udp+5]--; return b }, roce.ErrShort},
			{"TVer", func(b []byte) []byte { b[udp+9] |= 1; return b }, roce.ErrBTH},
			{"opcode", func(b []byte) []byte { b[udp+8] = 0x1F; return b }, roce.ErrBTH},
			{"no payload allowed", func(b []byte) []byte { b[udp+8] = byte(roce.ReadRequest); return b }, roce.ErrLength},
			{"first with padding", func(b []byte) []byte { b[udp+8] = byte(roce.WriteFirst); b[udp+9] |= 0x10; return b }, roce.ErrLength},
			{"too short for AtomicETH", func(b []byte) []byte { b[udp+8] = byte(roce.FetchAdd); return b }, roce.ErrShort},
			{"a bit of the payload", func(b []byte) []byte { b[len(b)-5] ^= 1; return b }, roce.ErrICRC},
			{"a bit of the ICRC", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, roce.ErrICRC},
			{"a bit of the source port", func(b []byte) []byte { b[udp] ^= 1; return b }, roce.ErrICRC},
			{"a bit of the address", func(b []byte) []byte { b[udp-1] ^= 1; return b }, roce.ErrICRC},
			{"a bit of the PSN", func(b []byte) []byte { b[udp+8+11] ^= 1; return b }, roce.ErrICRC},
			{"what may change", func(b []byte) []byte {
				b[udp+6], b[udp+8+4] = 1, b[udp+8+4]^0x40
				if v4 {
					b[1], b[8] = 3, 1
				} else {
					b[0], b[1], b[7] = 6<<4|1, 0xff, 1
				}
				return b
			}, nil},
		} {
			if err := roce.Parse(c.damage(bytes.Clone(good)), &roce.Packet{}); !errors.Is(err, c.want) {
				t.Errorf("v4 %v, %s: %v, want %v", v4, c.name, err, c.want)
			}
		}
	}
}

// TestIPv4Damage is of what only IPv4 has.
func TestIPv4Damage(t *testing.T) {
	p := full(roce.RC|roce.SendOnly, true)
	good := build(t, p, []byte("four"))[roce.Headroom:]
	for _, c := range []struct {
		name string
		at   int
		xor  byte
	}{{"options", 0, 2}, {"more fragments", 6, 0x20}, {"fragment offset", 7, 1}, {"protocol", 9, 1}} {
		b := bytes.Clone(good)
		b[c.at] ^= c.xor
		if err := roce.Parse(b, &roce.Packet{}); !errors.Is(err, roce.ErrIP) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestIPv6Mapped: an IPv6 packet with an IPv4-mapped address is none of IPv4's.
func TestIPv6Mapped(t *testing.T) {
	for _, at := range []int{8, 24} {
		p := full(roce.RC|roce.SendOnly, false)
		buf := make([]byte, roce.Headroom+roce.MaxPacket)
		end := p.Build(buf)
		copy(buf[roce.Headroom+at:], v4a[:])
		if err := roce.Parse(roce.Seal(buf, end)[roce.Headroom:], &roce.Packet{}); !errors.Is(err, roce.ErrIP) {
			t.Errorf("mapped address at %d: %v", at, err)
		}
	}
}

// TestICRC computes the ICRC as the specification has it: over eight bytes of ones
// and a copy of the packet in which what may change is ones (Annex A17.3.3).
func TestICRC(t *testing.T) {
	for _, v4 := range []bool{false, true} {
		p := full(roce.RC|roce.WriteOnly, v4)
		fields(&p)
		ip := build(t, p, []byte("seven b"))[roce.Headroom:]
		masked := append(bytes.Repeat([]byte{0xff}, 8), ip[:len(ip)-4]...)
		m, udp := masked[8:], 40
		if v4 {
			udp = 20
			m[1], m[8], m[10], m[11] = 0xff, 0xff, 0xff, 0xff
		} else {
			m[0], m[1], m[2], m[3], m[7] = 0x6f, 0xff, 0xff, 0xff, 0xff
		}
		m[udp+6], m[udp+7], m[udp+8+4] = 0xff, 0xff, 0xff
		if got, want := binary.LittleEndian.Uint32(ip[len(ip)-4:]), crc32.ChecksumIEEE(masked); got != want {
			t.Errorf("IPv4 %v: ICRC is %#x, want %#x", v4, got, want)
		}
	}
}

// TestPSNDiff is of the circle of PSNs.
func TestPSNDiff(t *testing.T) {
	for _, c := range []struct {
		a, b uint32
		want int32
	}{{0, 0, 0}, {1, 0, 1}, {0, 1, -1}, {0, 0xffffff, 1}, {0xffffff, 0, -1}, {0x800000, 0, -0x800000}, {0x7fffff, 0, 0x7fffff}} {
		if got := roce.PSNDiff(c.a, c.b); got != c.want {
			t.Errorf("%#x-%#x is %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

// FuzzParse: whatever comes in, Parse ends, stays within it, and what it takes is
// made the same way again.
func FuzzParse(f *testing.F) {
	for _, op := range []roce.Opcode{roce.RC | roce.SendOnly, roce.UD | roce.SendOnlyImm, roce.XRC | roce.WriteOnly, roce.RC | roce.AtomicAck, roce.CNP} {
		for _, v4 := range []bool{false, true} {
			p := full(op, v4)
			fields(&p)
			buf := make([]byte, roce.Headroom+roce.MaxPacket)
			at := p.Build(buf)
			f.Add([]byte(roce.Seal(buf, at)[roce.Headroom:]))
		}
	}
	f.Fuzz(func(t *testing.T, ip []byte) {
		var p roce.Packet
		before := bytes.Clone(ip)
		err := roce.Parse(ip, &p)
		if !bytes.Equal(before, ip) {
			t.Fatal("Parse wrote to the packet")
		}
		if err != nil {
			return
		}
		var again roce.Packet
		b := build(t, p, p.Payload)
		if err := roce.Parse(b[roce.Headroom:], &again); err != nil {
			t.Fatalf("%v of %s", err, hex.EncodeToString(ip))
		}
		again.Payload, p.Payload = nil, nil
		if !reflect.DeepEqual(p, again) {
			t.Fatalf("%+v became %+v", p, again)
		}
	})
}

// BenchmarkPacket is a packet of a full payload made and read, and a small one.
func BenchmarkPacket(b *testing.B) {
	for _, n := range []int{64, 1024, 4096} {
		buf := make([]byte, roce.Headroom+roce.MaxPacket)
		p := full(roce.RC|roce.SendOnly, true)
		payload := make([]byte, n)
		for i := range payload {
			payload[i] = byte(rand.Int())
		}
		b.Run("size"+string(rune('0'+n/1024)), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(n))
			var got roce.Packet
			for b.Loop() {
				at := p.Build(buf)
				out := roce.Seal(buf, at+copy(buf[at:], payload))
				if err := roce.Parse(out[roce.Headroom:], &got); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
