package soft_test

import (
	"sync/atomic"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
)

// endless are the queues of a client that writes as fast as they are read: there
// is always one more. The engine's own lock makes taken and done one caller's.
type endless struct {
	n           int
	taken, done atomic.Int64
}

func (q *endless) Info() hca.MapInfo { return hca.MapInfo{} }
func (q *endless) Len() int          { return q.n }
func (q *endless) Close()            {}
func (q *endless) Done(n int)        { q.done.Add(int64(n)) }
func (q *endless) Reset()            { q.done.Store(q.taken.Load()) }
func (q *endless) Queued() int       { return q.n }

type endlessSends struct{ endless }

func (q *endlessSends) Cap() hca.QPCap { return hca.QPCap{MaxSendWR: uint32(q.n), MaxSendSGE: 1} }
func (q *endlessSends) Next(w *hca.SendWR) bool {
	q.taken.Add(1)
	w.Opcode = hca.OpRDMAWrite
	return true
}

type endlessRecvs struct{ endless }

func (q *endlessRecvs) Next(w *hca.RecvWR) (ok, bad bool) {
	q.taken.Add(1)
	return true, false
}
func (q *endlessRecvs) MoveTo(hca.RecvQueue) bool { return false }

// Failure class 16: neither a doorbell nor a flush is without end, and both say of
// each place that it is free again.
func TestRow16Endless(t *testing.T) {
	d := device(t, loop.New(hca.LinkInfiniBand), 1)
	a, b := newClient(t, d, hca.QPTypeRC, 4096), newClient(t, d, hca.QPTypeRC, 4096)
	sends, recvs := &endlessSends{endless{n: 100}}, &endlessRecvs{endless{n: 100}}
	big, err := d.AllocUContext(nil)
	check(t, err)
	cq, err := big.CreateCQ(hca.CQInit{Entries: 1 << 20})
	check(t, err)
	q, err := a.pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: cq, RecvCQ: cq, SQ: sends, RQ: recvs,
		Cap: hca.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1}})
	check(t, err)
	t.Cleanup(func() {
		check(t, cq.Close())
		check(t, big.Close())
	})
	if c := q.Cap(); c.MaxSendWR != 100 || c.MaxRecvWR != 100 {
		t.Errorf("sizes %+v", c)
	}
	connect(t, &client{qp: q, way: a.way}, b, hca.QPTypeRC)
	const ahead = 16 // are taken at a time
	for range 3 {
		_, err := q.PostSend(nil)
		check(t, err)
		q.Run() // a worker goes on
	}
	toErr := func() { check(t, q.Modify(&hca.QPAttr{State: hca.QPErr}, hca.QPMaskState)) }
	toErr()
	for name, f := range map[string]func(){
		"doorbell": func() {
			_, err := q.PostSend(nil)
			check(t, err)
		},
		"modify": toErr,
	} {
		s, r := sends.taken.Load(), recvs.taken.Load()
		f()
		if n := sends.taken.Load() - s; n > 100+1+ahead {
			t.Errorf("%s: %d sends taken", name, n)
		}
		if n := recvs.taken.Load() - r; n > 100+1 || n == 0 {
			t.Errorf("%s: %d receives taken", name, n)
		}
	}
	if s, r := sends.taken.Load()-sends.done.Load(), recvs.taken.Load()-recvs.done.Load(); s != 0 || r != 0 {
		t.Errorf("%d sends and %d receives have lost their places", s, r)
	}
	check(t, q.Close())
}

// Mapped queues where there can be none, and the verbs of the other kind.
func TestMappedChecks(t *testing.T) {
	d := device(t, loop.New(hca.LinkInfiniBand), 1)
	a := newClient(t, d, hca.QPTypeRC, 4096)
	srq, err := a.pd.CreateSRQ(hca.SRQInit{MaxWR: 4, MaxSGE: 1, RQ: &endlessRecvs{endless{n: 7}}})
	check(t, err)
	plain, err := a.pd.CreateSRQ(hca.SRQInit{MaxWR: 4, MaxSGE: 1})
	check(t, err)
	if at := srq.Attr(); at.MaxWR != 7 {
		t.Errorf("SRQ of %d", at.MaxWR)
	}
	q, err := a.pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: a.cq, RecvCQ: a.cq, RQ: &endlessRecvs{endless{n: 7}}, Cap: hca.QPCap{MaxSendWR: 1}})
	check(t, err)
	check(t, q.Modify(&hca.QPAttr{State: hca.QPInitState, Port: 1}, hca.QPMaskState|hca.QPMaskPort|hca.QPMaskPKeyIndex|hca.QPMaskAccess))
	cap := hca.QPCap{MaxSendWR: 1}
	errOf := func(_ any, err error) error { return err }
	for name, err := range map[string]error{
		"RQ beside an SRQ":       errOf(a.pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: a.cq, RecvCQ: a.cq, SRQ: srq, RQ: &endlessRecvs{}, Cap: cap})),
		"RQ of an XRC initiator": errOf(a.pd.CreateQP(hca.QPInit{Type: hca.QPTypeXRCIni, SendCQ: a.cq, RQ: &endlessRecvs{}, Cap: cap})),
		"post to an SRQ":         errOf(srq.PostRecv(make([]hca.RecvWR, 1))),
		"post to a QP":           errOf(q.PostRecv(make([]hca.RecvWR, 1))),
		"no new queue":           srq.Modify(hca.SRQAttr{MaxWR: 8}, hca.SRQMaxWR, nil),
		"new queue, no size":     srq.Modify(hca.SRQAttr{Limit: 1}, hca.SRQLimit, &endlessRecvs{}),
		"queue of a plain SRQ":   plain.Modify(hca.SRQAttr{MaxWR: 8}, hca.SRQMaxWR, &endlessRecvs{}),
		"does not move":          srq.Modify(hca.SRQAttr{MaxWR: 8}, hca.SRQMaxWR, &endlessRecvs{endless{n: 15}}),
	} {
		if err == nil {
			t.Error(name)
		}
	}
	check(t, q.Close())
	check(t, srq.Close())
	check(t, plain.Close())
}
