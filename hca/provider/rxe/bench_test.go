package rxe_test

import (
	"fmt"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
)

// flat is a client's memory without checks or locks, so that what is measured is
// the queues and the engine.
type flat []byte

func (m flat) ReadAt(p []byte, addr uint64) error  { copy(p, m[addr-memBase:]); return nil }
func (m flat) WriteAt(p []byte, addr uint64) error { copy(m[addr-memBase:], p); return nil }

// stepper does messages one after the other, from the write of the request to the
// read of its completions. Nothing escapes per call.
type stepper struct {
	a, b *client
	send []hca.SendWR
	recv []hca.RecvWR
	wc   [8]hca.WC
}

func newStepper(t testing.TB, typ hca.QPType, op hca.SendOpcode, n int, srq, inline bool) *stepper {
	d := device(t, loop.New(hca.LinkInfiniBand), 1)
	c := hca.QPCap{MaxSendWR: 127, MaxRecvWR: 127, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInline: 64}
	s := &stepper{a: newClient(t, d, typ, c, srq), b: newClient(t, d, typ, c, srq)}
	s.a.to(s.b)
	s.b.to(s.a)
	lkeys := make(map[*client]uint32)
	for _, e := range []*client{s.a, s.b} {
		mr, err := e.pd.RegMR(hca.MRInit{Mem: make(flat, memSize), Start: memBase, Length: memSize, IOVA: memBase, Access: 15})
		check(t, err)
		t.Cleanup(func() { check(t, mr.Close()) })
		lkeys[e] = mr.LKey()
		if e == s.b {
			s.send = []hca.SendWR{{ID: 1, Opcode: op, Flags: hca.SendSignaled, RemoteAddr: memBase, RKey: mr.RKey()}}
		}
	}
	if inline {
		s.send[0].Flags |= hca.SendInline
		s.send[0].Inline = make([]byte, n)
	} else {
		s.send[0].SGE = []hca.SGE{{Addr: memBase, Length: uint32(n), LKey: lkeys[s.a]}}
	}
	if op == hca.OpSend {
		s.recv = []hca.RecvWR{{ID: 2, SGE: []hca.SGE{{Addr: memBase, Length: uint32(n + 40), LKey: lkeys[s.b]}}}}
	}
	if typ == hca.QPTypeUD {
		h, err := s.a.pd.CreateAH(hca.AHAttr{DLID: 1, Port: 1})
		check(t, err)
		t.Cleanup(func() { check(t, h.Close()) })
		s.send[0].AH, s.send[0].RemoteQPN, s.send[0].RemoteQKey = h, s.b.qp.Num(), 5
	}
	return s
}

func (s *stepper) step(t testing.TB) {
	if len(s.recv) > 0 {
		var err error
		if s.b.srq != nil {
			_, err = s.b.srq.PostRecv(s.recv)
		} else {
			_, err = s.b.qp.PostRecv(s.recv)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.a.qp.PostSend(s.send); err != nil {
		t.Fatal(err)
	}
	s.a.qp.Run()
	if n := s.a.scq.Poll(s.wc[:]); n != 1 || s.wc[0].Status != hca.WCSuccess {
		t.Fatalf("%d sends done: %+v", n, s.wc[0])
	}
	if len(s.recv) > 0 {
		if n := s.b.rcq.Poll(s.wc[:]); n != 1 || s.wc[0].Status != hca.WCSuccess {
			t.Fatalf("%d receives done: %+v", n, s.wc[0])
		}
	}
}

var paths = []struct {
	name        string
	typ         hca.QPType
	op          hca.SendOpcode
	n           int
	srq, inline bool
}{
	{"Send64", hca.QPTypeRC, hca.OpSend, 64, false, false},
	{"Send64Inline", hca.QPTypeRC, hca.OpSend, 64, false, true},
	{"Send64SRQ", hca.QPTypeRC, hca.OpSend, 64, true, false},
	{"Send64UD", hca.QPTypeUD, hca.OpSend, 64, false, false},
	{"Send64K", hca.QPTypeRC, hca.OpSend, 64 << 10, false, false},
	{"Write64", hca.QPTypeRC, hca.OpRDMAWrite, 64, false, false},
	{"Write64Inline", hca.QPTypeRC, hca.OpRDMAWrite, 64, false, true},
	{"Write64K", hca.QPTypeRC, hca.OpRDMAWrite, 64 << 10, false, false},
	{"Read64", hca.QPTypeRC, hca.OpRDMARead, 64, false, false},
}

func TestMappedNoAllocs(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, p := range paths {
		t.Run(p.name, func(t *testing.T) {
			s := newStepper(t, p.typ, p.op, p.n, p.srq, p.inline)
			for range 300 {
				s.step(t)
			}
			if n := testing.AllocsPerRun(1000, func() { s.step(t) }); n > 0 {
				t.Errorf("%v allocations per message", n)
			}
		})
	}
}

// BenchmarkMapped is one message's whole way through mapped queues in one process:
// what librxe writes, doorbell, engine, what librxe reads.
func BenchmarkMapped(b *testing.B) {
	for _, p := range paths {
		b.Run(p.name, func(b *testing.B) {
			s := newStepper(b, p.typ, p.op, p.n, p.srq, p.inline)
			b.SetBytes(int64(p.n))
			b.ReportAllocs()
			for b.Loop() {
				s.step(b)
			}
		})
	}
}

// BenchmarkMappedBatch rings once for many requests.
func BenchmarkMappedBatch(b *testing.B) {
	for _, batch := range []int{4, 64} {
		b.Run(fmt.Sprint("Write64x", batch), func(b *testing.B) {
			s := newStepper(b, hca.QPTypeRC, hca.OpRDMAWrite, 64, false, false)
			w := make([]hca.SendWR, batch)
			for i := range w {
				w[i] = s.send[0]
				if i < batch-1 {
					w[i].Flags = 0
				}
			}
			s.send = w
			b.ReportAllocs()
			for b.Loop() {
				s.step(b)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*batch), "ns/message")
		})
	}
}
