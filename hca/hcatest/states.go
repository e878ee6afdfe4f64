package hcatest

import (
	"fmt"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var stateCases = []testCase{
	{"Row22Matrix", testMatrix},
	{"Row22BadAttributes", testBadAttributes},
	{"Query", testQuery},
	{"Row22PostInStates", testPostInStates},
	{"Row22SmallInputErrFlush", testErrFlush},
	{"ResetClears", testResetClears},
	{"SQDrain", testSQDrain},
	{"CurState", testCurState},
}

// kernelMove is a cell of the kernel's qp_state_table (core/verbs.c), written
// out again here as bit numbers of enum ib_qp_attr_mask.
type kernelMove struct {
	from, to hca.QPState
	typ      hca.QPType
	req, opt []int
}

const (
	bCur, bNotify, bAccess, bPKey, bPort, bQKey, bAV, bMTU, bTmo, bRetry, bRNR, bRQPSN = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
	bRd, bAlt, bMinRNR, bSQPSN, bDestRd, bMig, bCap, bQPN                              = 13, 14, 15, 16, 17, 18, 19, 20
	rst, inS, rtr, rts, sqd, sqe, errS                                                 = hca.QPReset, hca.QPInitState, hca.QPRTR, hca.QPRTS, hca.QPSQD, hca.QPSQE, hca.QPErr
	rc, uc, ud, ini, tgt                                                               = hca.QPTypeRC, hca.QPTypeUC, hca.QPTypeUD, hca.QPTypeXRCIni, hca.QPTypeXRCTgt
)

type bl = []int

var kernelMoves = []kernelMove{
	{rst, inS, rc, bl{bPKey, bPort, bAccess}, nil},
	{rst, inS, uc, bl{bPKey, bPort, bAccess}, nil},
	{rst, inS, ud, bl{bPKey, bPort, bQKey}, nil},
	{inS, inS, rc, nil, bl{bPKey, bPort, bAccess}},
	{inS, inS, uc, nil, bl{bPKey, bPort, bAccess}},
	{inS, inS, ud, nil, bl{bPKey, bPort, bQKey}},
	{inS, rtr, rc, bl{bAV, bMTU, bQPN, bRQPSN, bDestRd, bMinRNR}, bl{bAlt, bAccess, bPKey}},
	{inS, rtr, uc, bl{bAV, bMTU, bQPN, bRQPSN}, bl{bAlt, bAccess, bPKey}},
	{inS, rtr, ud, nil, bl{bPKey, bQKey}},
	{rtr, rts, rc, bl{bTmo, bRetry, bRNR, bSQPSN, bRd}, bl{bCur, bAlt, bAccess, bMinRNR, bMig}},
	{rtr, rts, uc, bl{bSQPSN}, bl{bCur, bAlt, bAccess, bMig}},
	{rtr, rts, ud, bl{bSQPSN}, bl{bCur, bQKey}},
	{rts, rts, rc, nil, bl{bCur, bAccess, bAlt, bMig, bMinRNR}},
	{rts, rts, uc, nil, bl{bCur, bAccess, bAlt, bMig}},
	{rts, rts, ud, nil, bl{bCur, bQKey}},
	{rts, sqd, rc, nil, bl{bNotify}},
	{rts, sqd, uc, nil, bl{bNotify}},
	{rts, sqd, ud, nil, bl{bNotify}},
	{sqd, rts, rc, nil, bl{bCur, bAlt, bAccess, bMinRNR, bMig}},
	{sqd, rts, uc, nil, bl{bCur, bAlt, bAccess, bMig}},
	{sqd, rts, ud, nil, bl{bCur, bQKey}},
	{sqd, sqd, rc, nil, bl{bPort, bAV, bTmo, bRetry, bRNR, bRd, bDestRd, bAlt, bAccess, bPKey, bMinRNR, bMig}},
	{sqd, sqd, uc, nil, bl{bAV, bAlt, bAccess, bPKey, bMig}},
	{sqd, sqd, ud, nil, bl{bPKey, bQKey}},
	{sqe, rts, uc, nil, bl{bCur, bAccess}},
	{sqe, rts, ud, nil, bl{bCur, bQKey}},

	{rst, inS, ini, bl{bPKey, bPort, bAccess}, nil},
	{rst, inS, tgt, bl{bPKey, bPort, bAccess}, nil},
	{inS, inS, ini, nil, bl{bPKey, bPort, bAccess}},
	{inS, inS, tgt, nil, bl{bPKey, bPort, bAccess}},
	{inS, rtr, ini, bl{bAV, bMTU, bQPN, bRQPSN}, bl{bAlt, bAccess, bPKey}},
	{inS, rtr, tgt, bl{bAV, bMTU, bQPN, bRQPSN, bDestRd, bMinRNR}, bl{bAlt, bAccess, bPKey}},
	{rtr, rts, ini, bl{bTmo, bRetry, bRNR, bSQPSN, bRd}, bl{bCur, bAlt, bAccess, bMig}},
	{rtr, rts, tgt, bl{bTmo, bSQPSN}, bl{bCur, bAlt, bAccess, bMinRNR, bMig}},
	{rts, rts, ini, nil, bl{bCur, bAccess, bAlt, bMig}},
	{rts, rts, tgt, nil, bl{bCur, bAccess, bAlt, bMig, bMinRNR}},
	{rts, sqd, ini, nil, bl{bNotify}},
	{rts, sqd, tgt, nil, bl{bNotify}},
	{sqd, rts, ini, nil, bl{bCur, bAlt, bAccess, bMig}},
	{sqd, rts, tgt, nil, bl{bCur, bAlt, bAccess, bMinRNR, bMig}},
	{sqd, sqd, ini, nil, bl{bPort, bAV, bTmo, bRetry, bRNR, bRd, bAlt, bAccess, bPKey, bMig}},
	{sqd, sqd, tgt, nil, bl{bPort, bAV, bTmo, bDestRd, bAlt, bAccess, bPKey, bMinRNR, bMig}},
}

func maskOf(bits []int) hca.QPAttrMask {
	var m hca.QPAttrMask
	for _, b := range bits {
		m |= 1 << b
	}
	return m
}

func findMove(from, to hca.QPState, typ hca.QPType) (kernelMove, bool) {
	if to == rst || to == errS && from != rst {
		return kernelMove{from: from, to: to, typ: typ}, true
	}
	for _, m := range kernelMoves {
		if m.from == from && m.to == to && m.typ == typ {
			return m, true
		}
	}
	return kernelMove{}, false
}

// bring takes a new end to a state.
func bring(t *testing.T, p Pair, typ hca.QPType, s hca.QPState) *end {
	o := defaults().with(func(o *opts) { o.typ = typ })
	e := newEnd(t, p.A, o)
	if s == rst {
		return e
	}
	e.toInit()
	if s == inS {
		return e
	}
	if s == errS {
		e.setState(errS)
		return e
	}
	e.toRTR(e)
	if s == rtr {
		return e
	}
	e.toRTS()
	switch s {
	case sqd:
		e.setState(sqd)
	case sqe:
		w := e.send(1, 0, 8)
		w.SGE[0].LKey = 0
		if typ == ud {
			w.AH, w.RemoteQPN = e.ah(e), e.qp.Num()
		}
		e.postSend(w)
		one(t, e.scq, 1, hca.WCLocProtErr)
	}
	if e.state() != s {
		t.Fatalf("state %d, want %d", e.state(), s)
	}
	return e
}

// goodAttr has a valid value for every attribute.
func goodAttr(e *end, from, to hca.QPState) hca.QPAttr {
	return hca.QPAttr{
		State: to, CurState: from, PathMTU: 5, PathMigState: 0, QKey: 7, DestQPN: e.qp.Num(), Access: allAcc,
		AH: e.attrTo(e), AltAH: e.attrTo(e), AltPort: 1, AltTimeout: 3, MaxRdAtomic: 1, MaxDestRdAtomic: 1,
		MinRNRTimer: 5, Port: 1, Timeout: 10, RetryCnt: 3, RNRRetry: 3, RQPSN: 5, SQPSN: 6,
	}
}

func testMatrix(t *testing.T, p Pair) {
	matrix(t, p, rc, uc, ud)
}

func matrix(t *testing.T, p Pair, types ...hca.QPType) {
	for _, typ := range types {
		for from := rst; from <= errS; from++ {
			if from == sqe && typ != uc && typ != ud {
				continue // cannot be reached
			}
			for to := rst; to <= errS+1; to++ {
				t.Run(fmt.Sprintf("type%d/%d-%d", typ, from, to), func(t *testing.T) { oneMove(t, p, typ, from, to) })
			}
		}
	}
}

func oneMove(t *testing.T, p Pair, typ hca.QPType, from, to hca.QPState) {
	e := bring(t, p, typ, from)
	a := goodAttr(e, from, to)
	before, _ := e.qp.Query()
	refuse := func(m hca.QPAttrMask) {
		t.Helper()
		wantErrno(t, e.qp.Modify(&a, m|hca.QPMaskState), unix.EINVAL)
		after, _ := e.qp.Query()
		if !reflect.DeepEqual(after, before) {
			t.Fatalf("mask %#x was refused but changed %+v to %+v", m, before, after)
		}
	}
	mv, ok := findMove(from, to, typ)
	if !ok {
		refuse(0)
		return
	}
	req, opt := maskOf(mv.req), maskOf(mv.opt)
	for _, b := range mv.req {
		refuse(req &^ (1 << b))
	}
	for b := 1; b < 32; b++ {
		if m := hca.QPAttrMask(1) << b; (req|opt)&m == 0 {
			refuse(req | m)
		}
	}
	if err := e.qp.Modify(&a, req|hca.QPMaskState); err != nil {
		t.Fatalf("required attributes only: %v", err)
	}
	if e.state() != to {
		t.Fatalf("state %d", e.state())
	}
	if opt != 0 {
		e := bring(t, p, typ, from)
		a := goodAttr(e, from, to)
		m := req | opt | hca.QPMaskState
		if e.eth {
			m &^= 1 << bAlt
		}
		if to != rts && to != sqd {
			m &^= 1 << bMig
		}
		if err := e.qp.Modify(&a, m); err != nil {
			t.Fatalf("all attributes: %v", err)
		}
	}
}

func testBadAttributes(t *testing.T, p Pair) {
	dev := p.A.Attr()
	toState := func(from, to hca.QPState, f func(*hca.QPAttr)) {
		t.Helper()
		e := bring(t, p, rc, from)
		a := goodAttr(e, from, to)
		mv, _ := findMove(from, to, rc)
		m := maskOf(mv.req) | maskOf(mv.opt)&^(1<<bCur|1<<bMig) | hca.QPMaskState
		if e.eth {
			m &^= 1 << bAlt
		}
		ok := a
		f(&a)
		wantErrno(t, e.qp.Modify(&a, m), unix.EINVAL)
		must(t, e.qp.Modify(&ok, m))
	}
	toState(rst, inS, func(a *hca.QPAttr) { a.Port = 0 })
	toState(rst, inS, func(a *hca.QPAttr) { a.Port = 2 })
	toState(rst, inS, func(a *hca.QPAttr) { a.PKeyIndex = uint16(dev.PKeyTableLen) })
	toState(inS, rtr, func(a *hca.QPAttr) { a.PathMTU = 0 })
	toState(inS, rtr, func(a *hca.QPAttr) { a.PathMTU = 6 })
	toState(inS, rtr, func(a *hca.QPAttr) { a.MaxDestRdAtomic = uint8(dev.MaxQPRdAtom) + 1 })
	toState(inS, rtr, func(a *hca.QPAttr) { a.MinRNRTimer = 32 })
	toState(inS, rtr, func(a *hca.QPAttr) { a.AH.Port = 3 })
	toState(inS, rtr, func(a *hca.QPAttr) { a.DestQPN = 1 << 24 })
	if port, err := p.A.Port(1); err != nil || port.LinkLayer == hca.LinkInfiniBand {
		toState(inS, rtr, func(a *hca.QPAttr) { a.AH.DLID = 0xc001 })
		toState(inS, rtr, func(a *hca.QPAttr) { a.AltPort = 2 })
	}
	toState(rtr, rts, func(a *hca.QPAttr) { a.MaxRdAtomic = uint8(dev.MaxQPInitRd) + 1 })
	toState(rtr, rts, func(a *hca.QPAttr) { a.Timeout = 32 })
	toState(rtr, rts, func(a *hca.QPAttr) { a.RetryCnt = 8 })
	toState(rtr, rts, func(a *hca.QPAttr) { a.RNRRetry = 8 })
}

func testQuery(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults().with(func(o *opts) { o.sigAll = true; o.global = true }))
	got, in := a.qp.Query()
	want := hca.QPAttr{
		State: rts, CurState: rts, PathMTU: 3, DestQPN: b.qp.Num(), RQPSN: firstPSN, SQPSN: firstPSN, AH: a.attrTo(b),
		Access: allAcc, MaxDestRdAtomic: 4, MaxRdAtomic: 4, MinRNRTimer: 12, Port: 1, Timeout: 14, RetryCnt: 7, RNRRetry: 7,
		Cap: a.qp.Cap(),
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("attributes\n%+v, want\n%+v", got, want)
	}
	if in.Type != rc || in.SendCQ != a.scq || in.RecvCQ != a.rcq || in.SRQ != nil || !in.SigAll || in.Cap != a.qp.Cap() {
		t.Errorf("init attributes %+v", in)
	}
}

func testPostInStates(t *testing.T, p Pair) {
	for _, typ := range []hca.QPType{rc, uc, ud} {
		for _, s := range []hca.QPState{rst, inS, rtr, rts, sqd, sqe, errS} {
			if typ == rc && s == sqe {
				continue
			}
			e := bring(t, p, typ, s)
			w := e.send(11, 0, 8)
			if typ == ud {
				w.AH, w.RemoteQPN, w.RemoteQKey = e.ah(e), e.qp.Num(), testQKey
			}
			n, err := e.qp.PostSend([]hca.SendWR{w})
			switch s {
			case rst, inS, rtr:
				wantErrno(t, err, unix.EINVAL)
			default:
				if err != nil || n != 1 {
					t.Fatalf("type %d state %d: %d posted: %v", typ, s, n, err)
				}
			}
			n, err = e.qp.PostRecv([]hca.RecvWR{{ID: 12, SGE: []hca.SGE{e.sge(4096, 256)}}})
			if s == rst {
				wantErrno(t, err, unix.EINVAL)
			} else if err != nil || n != 1 {
				t.Fatalf("type %d state %d: %d posted: %v", typ, s, n, err)
			}
			e.qp.Run()
			switch s {
			case errS:
				one(t, e.scq, 11, hca.WCWRFlushErr)
				one(t, e.rcq, 12, hca.WCWRFlushErr)
			case sqe:
				one(t, e.scq, 11, hca.WCWRFlushErr)
			case sqd:
				none(t, e.scq)
			}
		}
	}
}

func testErrFlush(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	must(t, errOf(a.qp.PostRecv([]hca.RecvWR{{ID: 1}, {ID: 2}, {ID: 3}})))
	for i := range 3 { // b has no receive: they wait
		w := a.send(uint64(10+i), 0, 8)
		w.Flags = 0 // flushed ones complete all the same
		a.postSend(w)
	}
	a.setState(errS)
	for i, wc := range take(t, a.rcq, 3) {
		if wc.ID != uint64(1+i) || wc.Status != hca.WCWRFlushErr || wc.QPN != a.qp.Num() {
			t.Errorf("receive %d: %+v", i, wc)
		}
	}
	for i, wc := range take(t, a.scq, 3) {
		if wc.ID != uint64(10+i) || wc.Status != hca.WCWRFlushErr {
			t.Errorf("send %d: %+v", i, wc)
		}
	}
	a.postRecv(20)
	a.postSend(a.send(21, 0, 8))
	one(t, a.rcq, 20, hca.WCWRFlushErr)
	one(t, a.scq, 21, hca.WCWRFlushErr)
	b.postRecv(30, b.sge(0, 8)) // nobody sends any more
	none(t, b.rcq)
	none(t, a.scq)
}

func errOf(_ int, err error) error { return err }

func testResetClears(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	a.postRecv(1, a.sge(0, 64))
	a.postSend(a.send(2, 0, 8))
	a.setState(rst)
	none(t, a.rcq)
	none(t, a.scq)
	got, _ := a.qp.Query()
	if want := (hca.QPAttr{Cap: a.qp.Cap()}); !reflect.DeepEqual(got, want) {
		t.Errorf("attributes after RESET %+v", got)
	}
	// It works again, with nothing of before.
	b.setState(rst)
	link(a, b)
	b.postRecv(3, b.sge(0, 64))
	a.postSend(a.send(4, 0, 8))
	one(t, a.scq, 4, hca.WCSuccess)
	one(t, b.rcq, 3, hca.WCSuccess)
	none(t, b.rcq)
}

func testSQDrain(t *testing.T, p Pair) {
	a, b := pair(t, p, defaults())
	a.postSend(a.send(1, 0, 8), a.send(2, 0, 8)) // 1 is begun and waits for a receive
	must(t, a.qp.Modify(&hca.QPAttr{State: sqd, EnSQDAsyncNotify: true}, hca.QPMaskState|hca.QPMaskEnSQDAsyncNotify))
	a.qp.Run()
	if at, _ := a.qp.Query(); !at.SQDraining || at.State != sqd {
		t.Fatalf("draining %v in state %d", at.SQDraining, at.State)
	}
	wantErrno(t, a.qp.Modify(&hca.QPAttr{State: rts}, hca.QPMaskState), unix.EINVAL)
	quiet(t, a.qev.ev, "event")
	b.postRecv(10, b.sge(0, 8))
	b.postRecv(11, b.sge(0, 8))
	one(t, a.scq, 1, hca.WCSuccess)
	event(t, a.qev.ev, hca.EventSQDrained)
	a.qp.Run()
	none(t, a.scq)
	if at, _ := a.qp.Query(); at.SQDraining {
		t.Fatal("still draining")
	}
	a.setState(rts)
	one(t, a.scq, 2, hca.WCSuccess)
	// An idle queue drains at once, and only tells who asked.
	a.setState(sqd)
	quiet(t, a.qev.ev, "event")
	a.setState(rts)
	must(t, a.qp.Modify(&hca.QPAttr{State: sqd, EnSQDAsyncNotify: true}, hca.QPMaskState|hca.QPMaskEnSQDAsyncNotify))
	a.qp.Run()
	event(t, a.qev.ev, hca.EventSQDrained)
}

func testCurState(t *testing.T, p Pair) {
	e := bring(t, p, rc, rts)
	m := hca.QPMaskState | hca.QPMaskCurState
	wantErrno(t, e.qp.Modify(&hca.QPAttr{State: rts, CurState: rtr}, m), unix.EINVAL)
	must(t, e.qp.Modify(&hca.QPAttr{State: rts, CurState: rts}, m))
}
