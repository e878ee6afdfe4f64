package rxe_test

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
	"github.com/uverbsd/uverbsd/hca/provider/rxe/rxetest"
)

// FuzzNext reads entries of any bytes: what comes out fits into what was given, and
// is a request or said to be none.
func FuzzNext(f *testing.F) {
	f.Add(make([]byte, 1024), uint8(2), uint8(16))
	f.Add([]byte{12: 2, 16: 8, 184: 255, 196: 255}, uint8(32), uint8(0))
	f.Add([]byte{12: 0, 196: 5, 28: 3}, uint8(1), uint8(255))
	f.Fuzz(func(t *testing.T, entry []byte, sges, inline uint8) {
		a := &rxetest.Arena{}
		q := rxe.Provider{}.NewQueues(a)
		c := hca.QPCap{MaxSendWR: 1, MaxSendSGE: uint32(sges % 33), MaxInline: uint32(inline)}
		s, err := q.NewSendQueue(c)
		check(t, err)
		defer s.Close()
		r, err := q.NewRecvQueue(1, c.MaxSendSGE)
		check(t, err)
		defer r.Close()
		for _, m := range []hca.Mapped{s, r} {
			ring := rxetest.Ring{Mem: a.Client(m.Info())}
			copy(ring.Entry(0), entry)
			ring.SetProducer(1)
		}
		w := hca.SendWR{SGE: make([]hca.SGE, 0, s.Cap().MaxSendSGE), Inline: make([]byte, 0, s.Cap().MaxInline)}
		if !s.Next(&w) || s.Next(&w) {
			t.Error("not one send")
		}
		if w.Opcode == hca.OpInvalid && len(w.SGE)+len(w.Inline) > 0 {
			t.Errorf("no request, and yet %d pieces, %d bytes", len(w.SGE), len(w.Inline))
		}
		if len(w.Inline) > 0 && w.Flags&hca.SendInline == 0 || len(w.SGE) > 0 && w.Flags&hca.SendInline != 0 {
			t.Errorf("%d pieces and %d bytes with flags %#x", len(w.SGE), len(w.Inline), w.Flags)
		}
		v := hca.RecvWR{SGE: make([]hca.SGE, 0, c.MaxSendSGE)}
		if ok, bad := r.Next(&v); !ok || bad && len(v.SGE) > 0 {
			t.Errorf("receive: %v, %v, %d pieces", ok, bad, len(v.SGE))
		}
	})
}
