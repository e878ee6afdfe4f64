package hcatest

import (
	"bytes"
	"runtime"
	"strconv"
	"sync"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

// onStack knows which goroutines are inside a verb, so that what is called from
// there can tell.
type onStack struct{ verbs sync.Map } // goroutine to the verb's name

// in runs f as a verb.
func (o *onStack) in(verb string, f func()) {
	id := goroutine()
	o.verbs.Store(id, verb)
	defer o.verbs.Delete(id)
	f()
}

// below is the verb from whose call chain it is called, "" if from none.
func (o *onStack) below() string {
	v, _ := o.verbs.Load(goroutine())
	verb, _ := v.(string)
	return verb
}

// goroutine is the number of the calling goroutine, which its trace begins with.
func goroutine() uint64 {
	var buf [64]byte
	_, text, _ := bytes.Cut(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	num, _, _ := bytes.Cut(text, []byte(" "))
	id, err := strconv.ParseUint(string(num), 10, 64)
	if err != nil {
		panic("a trace that does not begin with the goroutine's number")
	}
	return id
}

// stage is what the verbs that never sleep are called on: a pair of RC QPs, one
// of UD for address handles, and a shared receive queue.
type stage struct {
	a, b, u, s *end
	ah         hca.AH
}

func newStage(t *testing.T, p Pair) *stage {
	st := &stage{}
	st.a, st.b = pair(t, p, defaults())
	st.u, _ = pair(t, p, udOpts())
	st.s = newEnd(t, p.A, srqOpts(64))
	st.ah = st.u.ah(st.u)
	return st
}

// atomicVerbs are the methods that never sleep (core_locking's create_ah,
// query_ah, destroy_ah, post_send, post_recv, poll_cq, req_notify_cq, and their
// kin here). modify_ah has no method. Full queues and empty ones are as good.
var atomicVerbs = []struct {
	name string
	call func(st *stage)
}{
	{"PD.CreateAH and AH.Close", func(st *stage) {
		if ah, err := st.u.pd.CreateAH(st.u.attrTo(st.u)); err == nil {
			_ = ah.Close()
		}
	}},
	{"AH.Attr", func(st *stage) { st.ah.Attr() }},
	{"QP.PostSend", func(st *stage) { _, _ = st.a.qp.PostSend([]hca.SendWR{st.a.send(1, 0, 64)}) }},
	{"QP.PostSend of a write", func(st *stage) {
		_, _ = st.a.qp.PostSend([]hca.SendWR{st.a.rdma(hca.OpRDMAWrite, 1, 0, st.b, 0, 64)})
	}},
	{"QP.PostSend of a datagram", func(st *stage) {
		_, _ = st.u.qp.PostSend([]hca.SendWR{st.u.dgram(1, 0, 8, st.u, st.ah)})
	}},
	{"QP.PostRecv", func(st *stage) { _, _ = st.b.qp.PostRecv([]hca.RecvWR{{ID: 1, SGE: []hca.SGE{st.b.sge(0, 64)}}}) }},
	{"SRQ.PostRecv", func(st *stage) { _, _ = st.s.srq.PostRecv([]hca.RecvWR{{ID: 1, SGE: []hca.SGE{st.s.sge(0, 64)}}}) }},
	{"CQ.Poll", func(st *stage) {
		var wc [4]hca.WC
		st.a.scq.Poll(wc[:])
		st.b.rcq.Poll(wc[:])
	}},
	{"CQ.ReqNotify", func(st *stage) {
		st.a.scq.ReqNotify(hca.NotifyNextComp)
		st.b.rcq.ReqNotify(hca.NotifySolicited | hca.ReportMissed)
	}},
	{"CQ.Await and Cancel", func(st *stage) {
		w := newWaiter()
		if st.b.rcq.Await(w) {
			st.b.rcq.Cancel(w)
		}
	}},
}
