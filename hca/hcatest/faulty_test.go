package hcatest

import (
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
)

// What the child is told by its environment.
const (
	faultEnv = "HCATEST_FAULT"
	caseEnv  = "HCATEST_CASE"
)

// TestContractCanFail runs the contract's cases on devices that break one rule
// each, in a process of its own: the case must fail, and say what the matter is.
func TestContractCanFail(t *testing.T) {
	type trial struct{ fault, name, want string }
	var trials []trial
	for _, c := range append(append([]testCase{}, contractCases...), bubbleCases...) {
		trials = append(trials, trial{"", c.name, ""}) // a sound device passes
	}
	for _, v := range []string{"PD.CreateAH", "AH.Attr", "AH.Close", "QP.PostSend", "QP.PostRecv", "SRQ.PostRecv", "CQ.Poll", "CQ.ReqNotify", "CQ.Await"} {
		trials = append(trials,
			trial{"sleep in " + v, "ContractNeverSleeps", v},
			trial{"channel in " + v, "ContractNeverSleeps", " sleeps, "})
	}
	trials = append(trials,
		trial{"", "Row30ContractOneHandler", ""},
		trial{"lock across memory in CQ.Poll", "ContractNoWaitForOthers", "CQ.Poll, while others are stuck, hangs"},
		trial{"lock across memory in CQ.ReqNotify", "ContractNoWaitForOthers", "CQ.ReqNotify, while others are stuck, hangs"},
		trial{"memory in QP.PostSend", "ContractNoMemoryInVerbs", "QP.PostSend of a write touches a client's memory"},
		trial{"memory in QP.PostRecv", "ContractNoMemoryInVerbs", "QP.PostRecv touches a client's memory"},
		trial{"memory in CQ.Poll", "ContractNoMemoryInVerbs", "CQ.Poll touches a client's memory"},
		trial{"callback in QP.PostSend", "ContractCallbacksElsewhere", "a completion comes from inside PostSend"},
		trial{"callback in QP.PostRecv", "ContractCallbacksElsewhere", "a completion comes from inside PostRecv"},
		trial{"callback in CQ.ReqNotify", "ContractCallbacksElsewhere", "a completion comes from inside ReqNotify"},
		trial{"callback in QP.Modify", "ContractCallbacksElsewhere", "a QP's event comes from inside Modify"},
		trial{"callback in CQ.Close", "ContractCallbacksElsewhere", "a CQ's event comes from inside Close"},
		trial{"two handlers", "Row30ContractOneHandler", "two handlers of one CQ at a time"},
		trial{"late completion", "ContractNothingComesLate", "a completion comes after the close"},
		trial{"late event", "ContractNothingComesLate", "a QP's event comes after the close"},
	)
	for _, x := range trials {
		t.Run(x.name+" "+x.fault, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0], "-test.run=^TestFaultyChild$", "-test.timeout=2m")
			cmd.Env = append(os.Environ(), faultEnv+"="+x.fault, caseEnv+"="+x.name)
			out, err := cmd.CombinedOutput()
			switch failed := err != nil; {
			case failed != (x.fault != ""):
				t.Errorf("with fault %q: %v\n%s", x.fault, err, out)
			case failed && !strings.Contains(string(out), x.want):
				t.Errorf("with fault %q it does not say %q\n%s", x.fault, x.want, out)
			}
		})
	}
}

// TestFaultyChild is the child: without a case it has nothing to do.
func TestFaultyChild(t *testing.T) {
	name, fault := os.Getenv(caseEnv), os.Getenv(faultEnv)
	if name == "" {
		return
	}
	open := func(t testing.TB) Pair {
		f := loop.New(hca.LinkInfiniBand)
		dev := func(id byte) hca.Device {
			d, err := soft.New(f, soft.Config{GUID: hca.GUID{0, 2, 0xc9, 3, 7: id}, NodeDesc: "test"})
			must(t, err)
			t.Cleanup(func() { must(t, d.Close()) })
			return &faulty{Device: d, fault: fault}
		}
		return Pair{A: dev(1), B: dev(2)}
	}
	all := cases
	cases = nil
	for _, c := range all {
		if c.name == name {
			cases = append(cases, c)
		}
	}
	inBubble := bubbleCases
	bubbleCases = nil
	for _, c := range inBubble {
		if c.name == name {
			bubbleCases = append(bubbleCases, c)
		}
	}
	if len(cases)+len(bubbleCases) != 1 {
		t.Fatalf("%d cases %s", len(cases)+len(bubbleCases), name)
	}
	Run(t, open)
	RunInBubble(t, open)
}

// faulty breaks one rule.
type faulty struct {
	hca.Device
	fault string
}

// is says whether the fault is of this kind in this verb.
func (d *faulty) is(kind, verb string) bool { return d.fault == kind+" in "+verb }

// sleep is a fault of every verb: a sleep, or a wait for another goroutine.
func (d *faulty) sleep(verb string) {
	switch {
	case d.is("sleep", verb):
		time.Sleep(time.Microsecond)
	case d.is("channel", verb):
		c := make(chan struct{})
		time.AfterFunc(time.Microsecond, func() { close(c) })
		<-c
	}
}

func (d *faulty) AllocUContext(n hca.Notifier) (hca.UContext, error) {
	c, err := d.Device.AllocUContext(n)
	return &faultyContext{UContext: c, d: d}, err
}

type faultyContext struct {
	hca.UContext
	d   *faulty
	mu  sync.Mutex // held across memory
	mem hca.Memory
}

func (c *faultyContext) AllocPD() (hca.PD, error) {
	p, err := c.UContext.AllocPD()
	return &faultyPD{p, c}, err
}

// touch reads the client's memory inside a verb.
func (c *faultyContext) touch(verb string) {
	if c.d.is("memory", verb) && c.mem != nil {
		var b [1]byte
		_ = c.mem.ReadAt(b[:], memBase)
	}
}

func (c *faultyContext) CreateCQ(in hca.CQInit) (hca.CQ, error) {
	h := in.Handler
	if c.d.fault == "two handlers" {
		in.Handler = twice{h}
	}
	q, err := c.UContext.CreateCQ(in)
	return &faultyCQ{q, c, h}, err
}

// twice makes two callbacks at a time of each.
type twice struct{ hca.CQHandler }

func (h twice) Completion() {
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(h.CQHandler.Completion)
	}
	wg.Wait()
}

type faultyCQ struct {
	hca.CQ
	c *faultyContext
	h hca.CQHandler
}

func (q *faultyCQ) fault(verb string) {
	q.c.d.sleep(verb)
	q.c.touch(verb)
	if q.c.d.is("lock across memory", verb) {
		q.c.mu.Lock()
		defer q.c.mu.Unlock()
	}
	if q.c.d.is("callback", verb) {
		q.h.Completion()
	}
}

func (q *faultyCQ) Poll(wc []hca.WC) int {
	q.fault("CQ.Poll")
	return q.CQ.Poll(wc)
}

func (q *faultyCQ) ReqNotify(f hca.NotifyFlags) bool {
	q.fault("CQ.ReqNotify")
	return q.CQ.ReqNotify(f)
}

func (q *faultyCQ) Await(w hca.Waiter) bool {
	q.c.d.sleep("CQ.Await")
	return q.CQ.Await(w)
}

func (q *faultyCQ) Close() error {
	switch {
	case q.c.d.is("callback", "CQ.Close"):
		q.h.CQEvent(hca.EventCQErr)
	case q.c.d.fault == "late completion":
		time.AfterFunc(time.Millisecond, q.h.Completion)
	}
	return q.CQ.Close()
}

type faultyPD struct {
	hca.PD
	c *faultyContext
}

// locked is a client's memory, used with a lock held.
type locked struct {
	hca.Memory
	mu *sync.Mutex
}

func (m locked) ReadAt(p []byte, addr uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Memory.ReadAt(p, addr)
}

func (m locked) WriteAt(p []byte, addr uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Memory.WriteAt(p, addr)
}

func (p *faultyPD) RegMR(in hca.MRInit) (hca.MR, error) {
	p.c.mem = in.Mem
	if strings.HasPrefix(p.c.d.fault, "lock across memory") {
		in.Mem = locked{in.Mem, &p.c.mu}
	}
	return p.PD.RegMR(in)
}

func (p *faultyPD) CreateAH(a hca.AHAttr) (hca.AH, error) {
	p.c.d.sleep("PD.CreateAH")
	h, err := p.PD.CreateAH(a)
	return &faultyAH{h, p.c.d}, err
}

type faultyAH struct {
	hca.AH
	d *faulty
}

func (h *faultyAH) Attr() hca.AHAttr { h.d.sleep("AH.Attr"); return h.AH.Attr() }
func (h *faultyAH) Close() error     { h.d.sleep("AH.Close"); return h.AH.Close() }

func (p *faultyPD) CreateSRQ(in hca.SRQInit) (hca.SRQ, error) {
	s, err := p.PD.CreateSRQ(in)
	return &faultySRQ{s, p.c.d}, err
}

type faultySRQ struct {
	hca.SRQ
	d *faulty
}

func (s *faultySRQ) PostRecv(w []hca.RecvWR) (int, error) {
	s.d.sleep("SRQ.PostRecv")
	return s.SRQ.PostRecv(w)
}

func (p *faultyPD) CreateQP(in hca.QPInit) (hca.QP, error) {
	h := in.Handler
	cq, _ := in.RecvCQ.(*faultyCQ)
	if s, ok := in.SendCQ.(*faultyCQ); ok {
		in.SendCQ = s.CQ
	}
	if cq != nil {
		in.RecvCQ = cq.CQ
	}
	if s, ok := in.SRQ.(*faultySRQ); ok {
		in.SRQ = s.SRQ
	}
	q, err := p.PD.CreateQP(in)
	return &faultyQP{q, p.c, cq, h}, err
}

type faultyQP struct {
	hca.QP
	c  *faultyContext
	cq *faultyCQ
	h  hca.QPHandler
}

func (q *faultyQP) fault(verb string) {
	q.c.d.sleep(verb)
	q.c.touch(verb)
	if q.c.d.is("callback", verb) {
		q.cq.h.Completion()
	}
}

// PostSend gives the real device its own address handles.
func (q *faultyQP) PostSend(w []hca.SendWR) (int, error) {
	q.fault("QP.PostSend")
	w = append([]hca.SendWR(nil), w...)
	for i := range w {
		if h, ok := w[i].AH.(*faultyAH); ok {
			w[i].AH = h.AH
		}
	}
	return q.QP.PostSend(w)
}

func (q *faultyQP) PostRecv(w []hca.RecvWR) (int, error) {
	q.fault("QP.PostRecv")
	return q.QP.PostRecv(w)
}

func (q *faultyQP) Modify(a *hca.QPAttr, m hca.QPAttrMask) error {
	if q.c.d.is("callback", "QP.Modify") {
		q.h.QPEvent(hca.EventQPFatal)
	}
	return q.QP.Modify(a, m)
}

func (q *faultyQP) Close() error {
	if q.c.d.fault == "late event" {
		time.AfterFunc(time.Millisecond, func() { q.h.QPEvent(hca.EventQPFatal) })
	}
	return q.QP.Close()
}
