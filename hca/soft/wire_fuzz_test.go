package soft_test

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// fuzzPackets makes packets of a fuzzer's bytes: opcode, flags, PSN and a length each,
// then what follows the base transport header. Addresses, queue pair and ICRC are good.
func fuzzPackets(q *host, data []byte) (ps [][]byte) {
	for len(data) >= 5 && len(ps) < 16 {
		op, flags, psn, mode, n := data[0], data[1], int8(data[2])/8, data[3], int(data[4])*4
		data = data[5:]
		if mode&2 != 0 { // as long as the MTU
			n = hostMTU
		}
		body := make([]byte, n)
		data = data[copy(body, data):]
		k := q.packet(0, uint32(hostPSN+int(psn)), 0)
		k.Op, k.Solicited, k.AckReq = roce.Opcode(op), flags&0x80 != 0, flags&0x40 != 0
		var buf [roce.Headroom + roce.MaxPacket]byte
		if mode&1 != 0 && k.Op.IsKnown() { // with good headers
			k.DMALen = uint32(mode >> 2 * 64)
			k.Syndrome = flags
			at := k.Build(buf[:])
			end := at + copy(buf[at:], body)
			ps = append(ps, append([]byte(nil), roce.Seal(buf[:], end)[roce.Headroom:]...))
			continue
		}
		at := k.Build(buf[:])
		bth := roce.Headroom + 20 + 8
		at = bth + 12
		buf[bth+1] = flags
		end := at + copy(buf[at:], body)
		ps = append(ps, append([]byte(nil), roce.Seal(buf[:], end)[roce.Headroom:]...))
	}
	return ps
}

// once checks that each of 1 to n was completed, and once.
func once(t *testing.T, cq hca.CQ, n int) {
	t.Helper()
	seen := make([]int, n+1)
	var wc [1]hca.WC
	for cq.Poll(wc[:]) == 1 {
		if wc[0].ID == 0 || wc[0].ID > uint64(n) {
			t.Fatalf("completion %+v", wc[0])
		}
		seen[wc[0].ID]++
	}
	for i, k := range seen[1:] {
		if k != 1 {
			t.Fatalf("request %d of %d was completed %d times", i+1, n, k)
		}
	}
}

func fuzzWire(f *testing.F, work bool) {
	for _, op := range []byte{0, 2, 4, 6, 8, 0x0a, 0x0b, 0x0c, 0x0d, 0x0f, 0x10, 0x11, 0x12, 0x13, 0x14, 0x16, 0x17, 0x24, 0x64, 0x81, 0xa4} {
		f.Add(byte(0), []byte{op, 0x40, 0, 1, 1, 1, 2, 3, 4, op + 1, 0x40, 8, 3, 0, op + 2, 0x40, 16, 0x11, 2, 9, 9})
		f.Add(byte(1), []byte{op, 0x1f, 0, 0x11, 2, 1, 2, 3, 4, op, 0x1f, 0, 3, 0})
	}
	h := newHostile(f)
	types := []hca.QPType{hca.QPTypeRC, hca.QPTypeUC, hca.QPTypeXRCTgt, hca.QPTypeXRCIni, hca.QPTypeUD}
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		h.t = t
		typ := types[int(kind)%len(types)]
		if work {
			typ = []hca.QPType{hca.QPTypeRC, hca.QPTypeXRCIni}[kind%2]
		}
		q := h.qp(typ, nil)
		recvs, sends := 8, 0
		if typ == hca.QPTypeXRCIni {
			recvs = 0
		} else {
			q.recv(recvs, 700)
		}
		if work {
			ws := []hca.SendWR{q.work(1, hca.OpSend, 600), q.work(2, hca.OpRDMARead, 600), q.work(3, hca.OpAtomicFetchAdd, 8), q.work(4, hca.OpRDMAWrite, 9), q.work(5, hca.OpRDMARead, 1)}
			sends = len(ws)
			q.post(ws...)
		}
		for _, p := range fuzzPackets(q, data) {
			h.l.Inject(p)
		}
		q.answers()
		if err := q.qp.Modify(&hca.QPAttr{State: hca.QPErr}, hca.QPMaskState); err != nil {
			t.Fatal(err)
		}
		once(t, q.scq, sends)
		if q.srq == nil { // what is in an SRQ is not flushed
			once(t, q.rcq, recvs)
		}
	})
}

// FuzzWireRequest: any packets at a responder.
func FuzzWireRequest(f *testing.F) { fuzzWire(f, false) }

// FuzzWireAnswer: any packets at a requester with requests of each kind on their way.
func FuzzWireAnswer(f *testing.F) { fuzzWire(f, true) }
