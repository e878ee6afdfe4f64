package soft_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// TestHostileRequests: what a responder makes of requests that no requester should
// send. at(op, i, n) is a packet whose PSN is i after the first one expected.
func TestHostileRequests(t *testing.T) {
	type at func(op roce.Opcode, i int, n int, change ...func(*roce.Packet)) roce.Packet
	length := func(n uint32) func(*roce.Packet) { return func(k *roce.Packet) { k.DMALen = n } }
	va := func(off uint64) func(*roce.Packet) { return func(k *roce.Packet) { k.VA = hostBase + off } }
	rc, uc, tgt := hca.QPTypeRC, hca.QPTypeUC, hca.QPTypeXRCTgt
	const rts, errs = hca.QPRTS, hca.QPErr
	for _, c := range []struct {
		name    string
		typ     hca.QPType
		recvs   int
		send    func(p at) []roce.Packet
		answers string
		recv    string
		state   hca.QPState
	}{
		{"send", rc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendOnly, 0, 9)} }, "ack0", "1:0", rts},
		{"wrap", rc, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.SendMiddle, 1, 256), p(roce.SendMiddle, 2, 256), p(roce.SendLast, 3, 1)}
		}, "ack0 ack1 ack2 ack3", "1:0", rts},
		{"middle without first", rc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendMiddle, 0, 256)} }, "nak1:0", "1:5", errs},
		{"last without first", rc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteLast, 0, 2)} }, "nak1:0", "1:5", errs},
		{"first in first", rc, 2, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.SendFirst, 1, 256)} }, "ack0 nak1:1", "1:5 2:5", errs},
		{"write in send", rc, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.WriteMiddle, 1, 256)}
		}, "ack0 nak1:1", "1:5", errs},
		{"send in write", rc, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteFirst, 0, 256, length(512)), p(roce.SendLast, 1, 256)}
		}, "ack0 nak1:1", "1:5", errs},
		{"read in send", rc, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.ReadRequest, 1, 0)}
		}, "ack0 nak1:1", "1:5", errs},
		{"atomic in write", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteFirst, 0, 256, length(512)), p(roce.FetchAdd, 1, 0)}
		}, "ack0 nak1:1", "", errs},
		{"nothing after a NAK", rc, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendMiddle, 0, 256), p(roce.SendOnly, 0, 1), p(roce.SendOnly, 1, 1), p(roce.ReadRequest, 0, 0)}
		}, "nak1:0", "1:5", errs},
		{"first not the MTU", rc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendFirst, 0, 252)} }, "nak1:0", "1:5", errs},
		{"first over the MTU", rc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteFirst, 0, 512)} }, "nak1:0", "1:5", errs},
		{"only over the MTU", rc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendOnly, 0, 257)} }, "nak1:0", "1:5", errs},
		{"last empty", rc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.SendLast, 1, 0)} }, "ack0 nak1:1", "1:5", errs},
		{"receive too short", rc, 1, func(p at) []roce.Packet {
			ks := []roce.Packet{p(roce.SendFirst, 0, 256)}
			for i := range 4 {
				ks = append(ks, p(roce.SendMiddle, i+1, 256))
			}
			return ks
		}, "ack0 ack1 ack2 ack3 nak1:4", "1:1", errs},
		{"write longer than it says", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteOnly, 0, 9, length(8))} }, "nak1:0", "", errs},
		{"write shorter than it says", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteOnly, 0, 9, length(10))} }, "nak1:0", "", errs},
		{"write that goes on", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteFirst, 0, 256, length(300)), p(roce.WriteMiddle, 1, 256)}
		}, "ack0 nak1:1", "", errs},
		{"write of 2^31+1", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteFirst, 0, 256, length(1<<31+1))} }, "nak1:0", "", errs},
		{"write of 2^32-1", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteFirst, 0, 256, length(1<<32-1))} }, "nak1:0", "", errs},
		{"write of 2^31", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteFirst, 0, 256, length(1<<31))} }, "nak2:0", "", errs},
		{"read of 2^31+1", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.ReadRequest, 0, 0, length(1<<31+1))} }, "nak1:0", "", errs},
		{"read of 2^32-1", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.ReadRequest, 0, 0, length(1<<32-1))} }, "nak1:0", "", errs},
		{"write over the end", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteOnly, 0, 2, va(hostRegion-1))} }, "nak2:0", "", errs},
		{"write before it", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteOnly, 0, 2, va(1<<64-1))} }, "nak2:0", "", errs},
		{"write that wraps", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteOnly, 0, 2, func(k *roce.Packet) { k.VA = 1<<64 - 1 })}
		}, "nak2:0", "", errs},
		{"write to no key", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteOnly, 0, 2, func(k *roce.Packet) { k.RKey++ })}
		}, "nak2:0", "", errs},
		{"empty write to no key", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteOnly, 0, 0, func(k *roce.Packet) { k.RKey++ })}
		}, "ack0", "", rts},
		{"empty read", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.ReadRequest, 0, 0, func(k *roce.Packet) { k.RKey++ })}
		}, "read0+0", "", rts},
		{"read", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.ReadRequest, 0, 0, length(513)), p(roce.WriteOnly, 3, 1)}
		}, "read0+256 read1+256 read2+1 ack3", "", rts},
		{"unaligned atomic", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.FetchAdd, 0, 0, va(4))} }, "nak1:0", "", errs},
		{"atomic over the end", rc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.FetchAdd, 0, 0, va(hostRegion))} }, "nak2:0", "", errs},
		{"no receive", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendOnly, 0, 1), p(roce.SendOnly, 1, 1), p(roce.SendOnly, 0, 1)}
		}, "rnr0 rnr0", "", rts},
		{"no receive for the end of a write", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteFirst, 0, 256, length(300)), p(roce.WriteLastImm, 1, 44), p(roce.WriteLastImm, 1, 44)}
		}, "ack0 rnr1 rnr1", "", rts},
		{"one NAK for a gap", rc, 4, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendOnly, 1, 1), p(roce.SendOnly, 2, 1), p(roce.SendOnly, 1<<23-1, 1), p(roce.SendOnly, 0, 1), p(roce.SendOnly, 2, 1)}
		}, "nak0:0 ack0 nak0:1", "1:0", rts},
		{"half the space away", rc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendOnly, 1<<23, 1)} }, "ack" + fmt.Sprint(roce.PSNMask), "", rts},
		{"send again", rc, 2, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendOnly, 0, 1), p(roce.SendOnly, 0, 1), p(roce.SendOnly, 1, 1), p(roce.SendOnly, 0, 1)}
		}, "ack0 ack0 ack1 ack1", "1:0 2:0", rts},
		{"atomic again", rc, 0, func(p at) []roce.Packet {
			add := func(k *roce.Packet) { k.Swap = 5 }
			return []roce.Packet{p(roce.FetchAdd, 0, 0, add), p(roce.FetchAdd, 1, 0, add), p(roce.FetchAdd, 0, 0, add), p(roce.FetchAdd, 1, 0, add), p(roce.FetchAdd, 2, 0, add)}
		}, "atomic0=0 atomic1=5 atomic0=0 atomic1=5 atomic2=10", "", rts},
		{"atomic that was none", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteOnly, 0, 8), p(roce.FetchAdd, 0, 0)}
		}, "ack0", "", rts},
		{"part of a read again", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.ReadRequest, 0, 0, length(600)), p(roce.ReadRequest, 1, 0, length(344), va(256)), p(roce.ReadRequest, 2, 0, length(88), va(512))}
		}, "read0+256 read1+256 read2+88 read1+256 read2+88 read2+88", "", rts},
		{"read again that goes on", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.ReadRequest, 0, 0, length(1)), p(roce.ReadRequest, 0, 0, length(257)), p(roce.WriteOnly, 1, 0)}
		}, "read0+1 ack1", "", rts},
		{"read again of a key that has gone", rc, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.ReadRequest, 0, 0, length(1)), p(roce.ReadRequest, 0, 0, length(1), func(k *roce.Packet) { k.RKey++ }), p(roce.WriteOnly, 1, 0)}
		}, "read0+1 ack1", "", rts},
		{"reserved syndrome, acks of nothing", rc, 0, func(p at) []roce.Packet {
			var ks []roce.Packet
			for s := range 256 {
				ks = append(ks, p(roce.Acknowledge, s%5-2, 0, func(k *roce.Packet) { k.Syndrome = uint8(s) }))
			}
			return append(ks, p(roce.ReadRespOnly, 0, 9), p(roce.ReadRespMiddle, 0, 256), p(roce.AtomicAck, 0, 0))
		}, "", "", rts},
		{"strangers", rc, 1, func(p at) []roce.Packet {
			return []roce.Packet{
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) { k.PKey = 0x1234 }),
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) { k.Src = hca.IPv4GID([4]byte{10, 77, 0, 9}) }),
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) { k.QPN ^= 1 << 20 }),
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) { k.QPN = 0xffffff }),
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) { k.Op = roce.UC | roce.SendOnly }),
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) { k.Op = roce.XRC | roce.SendOnly }),
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) { k.Op = roce.UD | roce.SendOnly }),
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) {
					k.Op, k.QPN, k.Dst = roce.UD|roce.SendOnly, 0xffffff, hca.GID{0: 0xff, 1: 0x0e, 10: 0xff, 11: 0xff, 12: 224, 15: 9}
				}),
				p(roce.SendOnly, 0, 1, func(k *roce.Packet) { k.Dst = hca.IPv4GID([4]byte{10, 77, 0, 7}) }),
			}
		}, "", "", rts},
		{"CNP storm", rc, 0, func(p at) []roce.Packet {
			var ks []roce.Packet
			for range 300 {
				ks = append(ks, p(roce.SendOnly, 0, 0, func(k *roce.Packet) { k.Op, k.BECN, k.TrafficClass = roce.CNP, true, roce.CE }))
			}
			return ks
		}, "", "", rts},
		{"UC in order", uc, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.SendLast, 1, 1)} }, "", "1:0", rts},
		{"UC gap", uc, 2, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.SendLast, 2, 1), p(roce.SendMiddle, 3, 256), p(roce.SendOnly, 9, 1)}
		}, "", "1:0", rts},
		{"UC cut short", uc, 2, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.SendFirst, 1, 256), p(roce.SendLast, 2, 256)}
		}, "", "1:0", rts},
		{"UC send after a write cut short", uc, 2, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteFirst, 0, 256, length(512)), p(roce.SendOnly, 1, 3), p(roce.WriteFirst, 2, 256, length(512)), p(roce.WriteOnlyImm, 3, 4)}
		}, "", "1:0 2:0", rts},
		{"UC write after a send cut short", uc, 2, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.WriteOnlyImm, 1, 4)}
		}, "", "1:9 2:0", rts},
		{"UC write of 2^31+1", uc, 0, func(p at) []roce.Packet { return []roce.Packet{p(roce.WriteFirst, 0, 256, length(1<<31+1))} }, "", "", rts},
		{"UC too long", uc, 1, func(p at) []roce.Packet {
			ks := []roce.Packet{p(roce.SendFirst, 0, 256)}
			for i := range 6 {
				ks = append(ks, p(roce.SendMiddle, i+1, 256))
			}
			return append(ks, p(roce.SendLast, 7, 5), p(roce.SendOnly, 8, 5))
		}, "", "1:0", rts},
		{"XRC", tgt, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendOnly, 0, 9)} }, "ack0", "1:0", rts},
		{"XRC wrong SRQ", tgt, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendOnly, 0, 9, func(k *roce.Packet) { k.SRQN ^= 1 << 20 })}
		}, "nak1:0", "", errs},
		{"XRC SRQ of another domain", tgt, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendOnly, 0, 9, func(k *roce.Packet) { k.SRQN++ })}
		}, "nak1:0", "", errs},
		{"XRC SRQ that changes", tgt, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendFirst, 0, 256), p(roce.SendLast, 1, 9, func(k *roce.Packet) { k.SRQN++ })}
		}, "ack0 nak1:1", "1:5", errs},
		{"UD to an XRC target", tgt, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendOnly, 0, 9, func(k *roce.Packet) { k.Op = roce.UD | roce.SendOnly })}
		}, "", "", rts},
		{"requests to an XRC initiator", hca.QPTypeXRCIni, 0, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.WriteOnly, 0, 9), p(roce.SendOnly, 0, 9), p(roce.ReadRequest, 0, 0)}
		}, "", "", rts},
		{"UD", hca.QPTypeUD, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendOnly, 77, 9)} }, "", "1:0", rts},
		{"UD wrong Q_Key", hca.QPTypeUD, 1, func(p at) []roce.Packet {
			return []roce.Packet{p(roce.SendOnly, 77, 9, func(k *roce.Packet) { k.QKey++ })}
		}, "", "", rts},
		{"UD too long", hca.QPTypeUD, 1, func(p at) []roce.Packet { return []roce.Packet{p(roce.SendOnly, 77, 4096)} }, "", "", rts},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHostile(t)
			q := h.qp(c.typ, nil)
			q.recv(c.recvs, 1024)
			q.inject(c.send(func(op roce.Opcode, i, n int, change ...func(*roce.Packet)) roce.Packet {
				k := q.packet(op, uint32(hostPSN+i), n)
				for _, f := range change {
					f(&k)
				}
				return k
			})...)
			if got := q.answers(); got != c.answers {
				t.Errorf("answers %q, want %q", got, c.answers)
			}
			if got := done(q.rcq); got != c.recv {
				t.Errorf("receives %q, want %q", got, c.recv)
			}
			if got := q.state(); got != c.state {
				t.Errorf("state %d, want %d", got, c.state)
			}
		})
	}
}

// TestHostileDepth: a responder that agreed to no reads and atomics.
func TestHostileDepth(t *testing.T) {
	for _, op := range []roce.Opcode{roce.ReadRequest, roce.CompareSwap, roce.FetchAdd} {
		h := newHostile(t)
		q := h.qp(hca.QPTypeRC, func(a *hca.QPAttr) { a.MaxDestRdAtomic = 0 })
		q.inject(q.packet(op, hostPSN, 0))
		if got := q.answers(); got != "nak1:0" || q.state() != hca.QPErr {
			t.Errorf("%#x: %q in state %d", op, got, q.state())
		}
	}
}

// TestHostileMarks: of many marked packets the peer is told now and then.
func TestHostileMarks(t *testing.T) {
	h := newHostile(t)
	q := h.qp(hca.QPTypeRC, nil)
	const n = 500
	for i := range n {
		k := q.packet(roce.WriteOnly, uint32(hostPSN+i), 1)
		k.TrafficClass = roce.CE
		q.inject(k)
	}
	got := strings.Fields(q.answers())
	cnps := 0
	for _, s := range got {
		if s == "cnp" {
			cnps++
		}
	}
	if cnps == 0 || cnps > n {
		t.Errorf("%d CNPs for %d packets", cnps, n)
	}
}
