package soft_test

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/roce/rocetest"
	"github.com/uverbsd/uverbsd/hca/soft"
)

var modelTime = flag.Duration("wire.model", 3*time.Second, "how long TestWireModel makes up traffic")

// What lies where in an end's memory. Request i of a round has the i-th slot of each.
const (
	modelOps  = 8
	modelSlot = 24 << 10
	modelMax  = 20000 // bytes of a message
	areaSend  = 0
	areaRecv  = areaSend + modelOps*modelSlot
	areaWrite = areaRecv + modelOps*modelSlot // the peer's writes
	areaConst = areaWrite + modelOps*modelSlot
	areaRead  = areaConst + modelSlot // what was read from the peer's areaConst
	areaAtom  = areaRead + modelOps*modelSlot
	areaOld   = areaAtom + 64 // what atomics answered
	modelMem  = areaOld + modelOps*8
)

// modelEnd is one end of a pair of QPs.
type modelEnd struct {
	t    testing.TB
	dev  *soft.Device
	gid  hca.GID
	ctx  hca.UContext
	pd   hca.PD
	s, r hca.CQ
	qp   hca.QP
	mem  *hcatest.Mem
	mr   hca.MR
	ops  []modelOp
}

type modelOp struct {
	op   hca.SendOpcode
	n    int
	seed int
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newModelEnd(t testing.TB, d *soft.Device, l *rocetest.Link) *modelEnd {
	e := &modelEnd{t: t, dev: d, gid: l.IPv4(), mem: hcatest.NewMem(hostBase, modelMem)}
	e.ctx = ok(d.AllocUContext(nil))(t)
	e.pd = ok(e.ctx.AllocPD())(t)
	e.s = ok(e.ctx.CreateCQ(hca.CQInit{Entries: 64}))(t)
	e.r = ok(e.ctx.CreateCQ(hca.CQInit{Entries: 64}))(t)
	e.mr = ok(e.pd.RegMR(hca.MRInit{Mem: e.mem, Start: hostBase, Length: modelMem, IOVA: hostBase, Access: hostAcc}))(t)
	return e
}

func (e *modelEnd) close() {
	for _, c := range []interface{ Close() error }{e.mr, e.s, e.r, e.pd, e.ctx} {
		must(e.t, c.Close())
	}
}

func (e *modelEnd) modify(s hca.QPState, m hca.QPAttrMask, a hca.QPAttr) {
	e.t.Helper()
	a.State = s
	must(e.t, e.qp.Modify(&a, m|hca.QPMaskState))
}

func (e *modelEnd) sge(off, n int) []hca.SGE {
	if n == 0 {
		return nil
	}
	half := n / 2 // two pieces, of no alignment
	s := []hca.SGE{{Addr: hostBase + uint64(off), Length: uint32(half), LKey: e.mr.LKey()}, {Addr: hostBase + uint64(off+half), Length: uint32(n - half), LKey: e.mr.LKey()}}
	return s
}

// connect takes the QP to RTS, from RESET.
func (e *modelEnd) connect(p *modelEnd, typ hca.QPType, psn [2]uint32, mtu hca.MTU) {
	rcMask, rtsMask := hca.QPMaskMaxDestRdAtomic|hca.QPMaskMinRNRTimer, hca.QPMaskTimeout|hca.QPMaskRetryCnt|hca.QPMaskRNRRetry|hca.QPMaskMaxRdAtomic
	if typ == hca.QPTypeUC {
		rcMask, rtsMask = 0, 0
	}
	a := hca.QPAttr{
		Port: 1, Access: hostAcc, QKey: 0x22, PathMTU: mtu, DestQPN: p.qp.Num(), SQPSN: psn[0], RQPSN: psn[1], MaxDestRdAtomic: 3, MaxRdAtomic: 3,
		MinRNRTimer: 1, Timeout: 14, RetryCnt: 7, RNRRetry: 7,
		AH: hca.AHAttr{Port: 1, IsGlobal: true, DGID: p.gid, SGIDIndex: 1, HopLimit: 64},
	}
	if typ == hca.QPTypeUD {
		e.modify(hca.QPInitState, hca.QPMaskPort|hca.QPMaskPKeyIndex|hca.QPMaskQKey, a)
		e.modify(hca.QPRTR, 0, a)
		e.modify(hca.QPRTS, hca.QPMaskSQPSN, a)
		return
	}
	e.modify(hca.QPInitState, hca.QPMaskPort|hca.QPMaskPKeyIndex|hca.QPMaskAccess, a)
	e.modify(hca.QPRTR, hca.QPMaskAV|hca.QPMaskPathMTU|hca.QPMaskDestQPN|hca.QPMaskRQPSN|rcMask, a)
	e.modify(hca.QPRTS, hca.QPMaskSQPSN|rtsMask, a)
}

// message is what a send of seed and number i carries.
func message(seed, i, n int) []byte {
	b := hcatest.Pattern(seed, n)
	if n >= 8 {
		binary.BigEndian.PutUint64(b, uint64(i))
	}
	return b
}

// wr makes request i.
func (e *modelEnd) wr(p *modelEnd, i int, ah hca.AH) hca.SendWR {
	o := e.ops[i]
	w := hca.SendWR{ID: uint64(i), Opcode: o.op, Flags: hca.SendSignaled, RKey: p.mr.RKey(), AH: ah, RemoteQPN: p.qp.Num(), RemoteQKey: 0x22}
	switch o.op {
	case hca.OpSendImm, hca.OpRDMAWriteImm:
		w.Imm = uint32(o.seed)<<8 | uint32(i)
		fallthrough
	case hca.OpSend, hca.OpRDMAWrite:
		e.mem.Set(areaSend+i*modelSlot, message(o.seed, i, o.n))
		w.SGE, w.RemoteAddr = e.sge(areaSend+i*modelSlot, o.n), hostBase+areaWrite+uint64(i)*modelSlot
	case hca.OpRDMARead:
		w.SGE, w.RemoteAddr = e.sge(areaRead+i*modelSlot, o.n), hostBase+areaConst
	case hca.OpAtomicFetchAdd:
		w.SGE = []hca.SGE{{Addr: hostBase + areaOld + uint64(i)*8, Length: 8, LKey: e.mr.LKey()}}
		w.RemoteAddr, w.CompareAdd = hostBase+areaAtom, 1
	}
	return w
}

// drain waits until n completions have come, with those in got.
func drain(t *testing.T, cq hca.CQ, n int, got []hca.WC) []hca.WC {
	t.Helper()
	var wc [1]hca.WC
	end := time.After(hostWait)
	w := wakes(make(chan struct{}, 1))
	for len(got) < n {
		if cq.Poll(wc[:]) == 1 {
			got = append(got, wc[0])
			continue
		}
		if !cq.Await(w) {
			continue
		}
		select {
		case <-w:
		case <-end:
			t.Fatalf("%d of %d completions came: %+v", len(got), n, got)
		}
	}
	return got
}

// modelRound is one connection's life.
func modelRound(t *testing.T, r *rand.Rand, a, b *modelEnd, typ hca.QPType) {
	ends := [2]*modelEnd{a, b}
	for _, e := range ends {
		e.qp = ok(e.pd.CreateQP(hca.QPInit{Type: typ, SendCQ: e.s, RecvCQ: e.r, Cap: hca.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 2, MaxRecvSGE: 3}}))(t)
	}
	mtu := hca.MTU(1 + r.IntN(5))
	psn := [2]uint32{r.Uint32() & 0xffffff, 0xffffff - uint32(r.IntN(20))}
	a.connect(b, typ, psn, mtu)
	b.connect(a, typ, [2]uint32{psn[1], psn[0]}, mtu)
	kinds := []hca.SendOpcode{hca.OpSend, hca.OpSendImm, hca.OpRDMAWrite, hca.OpRDMAWriteImm, hca.OpRDMARead, hca.OpAtomicFetchAdd}
	grh := 0
	switch typ {
	case hca.QPTypeUC:
		kinds = kinds[:4]
	case hca.QPTypeUD:
		kinds, grh = kinds[:2], 40
	}
	how := r.IntN(6) // 0: to ERR, 1: to RESET, 2: closed, in the middle; else to the end
	for _, e := range ends {
		e.ops = e.ops[:0]
		for range modelOps {
			o := modelOp{op: kinds[r.IntN(len(kinds))], n: r.IntN(modelMax), seed: r.IntN(1 << 20)}
			if r.IntN(3) == 0 {
				o.n = r.IntN(300)
			}
			if typ == hca.QPTypeUD {
				o.n %= 4096
			}
			e.ops = append(e.ops, o)
		}
		e.mem.Set(areaAtom, make([]byte, 8))
		e.mem.Set(areaConst, hcatest.Pattern(int(psn[0]), modelMax))
	}
	var ahs [2]hca.AH
	if typ == hca.QPTypeUD {
		for i, e := range ends {
			ahs[i] = ok(e.pd.CreateAH(hca.AHAttr{Port: 1, IsGlobal: true, DGID: ends[1-i].gid, SGIDIndex: 1, HopLimit: 64}))(t)
			defer func() { must(t, ahs[i].Close()) }()
		}
	}
	for i := range modelOps {
		for k, e := range ends {
			late := r.IntN(3) == 0 && typ == hca.QPTypeRC
			recv := func() {
				_, err := e.qp.PostRecv([]hca.RecvWR{{ID: uint64(i), SGE: e.sge(areaRecv+i*modelSlot, modelMax+grh)}})
				must(t, err)
				e.qp.Run()
			}
			if !late {
				recv()
			}
			if _, err := e.qp.PostSend([]hca.SendWR{e.wr(ends[1-k], i, ahs[k])}); err != nil {
				t.Fatal(err)
			}
			e.qp.Run()
			if late {
				recv()
			}
		}
	}
	var got [2][2][]hca.WC
	e := ends[r.IntN(2)]
	switch {
	case how > 2:
		for i, e := range ends {
			got[i][0] = drain(t, e.s, modelOps, nil)
		}
	case typ == hca.QPTypeRC: // all go on to the end unless they are stopped
		got[0][0] = drain(t, a.s, r.IntN(modelOps), nil)
	}
	quiet := func(e *modelEnd) {
		for _, cq := range []hca.CQ{e.s, e.r} {
			for wc := make([]hca.WC, 64); cq.Poll(wc) > 0; {
			}
		}
	}
	silent := map[*modelEnd]bool{}
	switch how {
	case 1:
		must(t, e.qp.Modify(&hca.QPAttr{State: hca.QPReset}, hca.QPMaskState))
		quiet(e)
		silent[e] = true
	case 2:
		must(t, e.qp.Close())
		quiet(e)
		silent[e] = true
	}
	for i, e := range ends {
		if silent[e] {
			continue
		}
		must(t, e.qp.Modify(&hca.QPAttr{State: hca.QPErr}, hca.QPMaskState))
		got[i][0] = drain(t, e.s, modelOps, got[i][0])
		got[i][1] = drain(t, e.r, modelOps, nil)
	}
	for i, e := range ends {
		if silent[e] {
			continue
		}
		checkSends(t, e, ends[1-i], typ, got[i][0], how > 2)
		checkRecvs(t, e, ends[1-i], typ, grh, got[i][1], how > 2)
		var wc [1]hca.WC
		if e.s.Poll(wc[:]) != 0 || e.r.Poll(wc[:]) != 0 {
			t.Fatalf("one completion too many: %+v", wc[0])
		}
	}
	for _, e := range ends {
		must(t, e.qp.Close())
		if silent[e] {
			var wc [1]hca.WC
			if e.s.Poll(wc[:]) != 0 || e.r.Poll(wc[:]) != 0 {
				t.Fatalf("completed after RESET: %+v", wc[0])
			}
		}
	}
}

// checkSends: all are there in order, all good ones first, and what they brought.
func checkSends(t *testing.T, e, p *modelEnd, typ hca.QPType, got []hca.WC, whole bool) {
	t.Helper()
	bad, adds := false, uint64(0)
	for i, wc := range got {
		if wc.ID != uint64(i) {
			t.Fatalf("completion %d is %+v", i, wc)
		}
		if wc.Status != hca.WCSuccess {
			bad = true
			continue
		}
		if bad {
			t.Fatalf("success after an error: %+v", got)
		}
		o := e.ops[i]
		switch o.op {
		case hca.OpRDMARead:
			if !bytes.Equal(e.mem.Get(areaRead+i*modelSlot, o.n), p.mem.Get(areaConst, o.n)) {
				t.Fatalf("read %d of %d bytes is wrong", i, o.n)
			}
		case hca.OpAtomicFetchAdd:
			if v := binary.NativeEndian.Uint64(e.mem.Get(areaOld+i*8, 8)); v != adds {
				t.Fatalf("atomic %d answered %d, want %d", i, v, adds)
			}
			adds++
		case hca.OpRDMAWrite:
			if typ == hca.QPTypeRC && !bytes.Equal(p.mem.Get(areaWrite+i*modelSlot, o.n), message(o.seed, i, o.n)) {
				t.Fatalf("write %d of %d bytes is wrong", i, o.n)
			}
		}
	}
	if v := binary.NativeEndian.Uint64(p.mem.Get(areaAtom, 8)); v < adds || whole && v != adds {
		t.Fatalf("%d atomics were done, %d have succeeded", v, adds)
	}
	if whole && bad {
		t.Fatalf("failed: %+v", got)
	}
}

// checkRecvs: receives are in order, and each good one is the next of the peer's
// messages, or of an unreliable peer any: its network reorders and duplicates.
func checkRecvs(t *testing.T, e, p *modelEnd, typ hca.QPType, grh int, got []hca.WC, whole bool) {
	t.Helper()
	var msgs []int
	for i, o := range p.ops {
		if o.op == hca.OpSend || o.op == hca.OpSendImm || o.op == hca.OpRDMAWriteImm {
			msgs = append(msgs, i)
		}
	}
	bad, next, count := false, 0, 0
	for k, wc := range got {
		if wc.ID != uint64(k) {
			t.Fatalf("receive %d is %+v", k, wc)
		}
		if wc.Status != hca.WCSuccess {
			// Of UC one fails alone whose message was cut short by a write.
			bad = bad || wc.Status != hca.WCRemInvReqErr || typ != hca.QPTypeUC
			continue
		}
		if bad {
			t.Fatalf("success after an error: %+v", got)
		}
		count++
		match := func(i int) bool {
			o := p.ops[i]
			if int(wc.ByteLen) != o.n+grh || (o.op != hca.OpSend) != (wc.Flags&hca.WCWithImm != 0) {
				return false
			}
			if o.op != hca.OpSend && wc.Imm != uint32(o.seed)<<8|uint32(i) {
				return false
			}
			at := areaRecv + k*modelSlot + grh
			if o.op == hca.OpRDMAWriteImm {
				at = areaWrite + i*modelSlot
			}
			return bytes.Equal(e.mem.Get(at, o.n), message(o.seed, i, o.n))
		}
		switch typ {
		case hca.QPTypeRC:
			if next >= len(msgs) || !match(msgs[next]) {
				t.Fatalf("receive %d is not message %d: %+v, ops %+v", k, next, wc, p.ops)
			}
			next++
		default:
			found := false
			for _, i := range msgs {
				found = found || match(i)
			}
			if !found {
				t.Fatalf("receive %d is no message: %+v, ops %+v", k, wc, p.ops)
			}
		}
	}
	if whole && typ == hca.QPTypeRC && count != len(msgs) {
		t.Fatalf("%d of %d messages were received", count, len(msgs))
	}
}

// TestWireModel makes up requests on queue pairs of all kinds between two devices with
// a bad network between them, and takes the queue pairs away in the middle. Each
// request is completed as it should be, and each byte is where it should be.
func TestWireModel(t *testing.T) {
	end := time.Now().Add(*modelTime)
	for seed := uint64(1); time.Now().Before(end); seed++ {
		if !t.Run(fmt.Sprint("seed", seed), func(t *testing.T) { modelSeed(t, seed) }) {
			return
		}
	}
}

func modelSeed(t *testing.T, seed uint64) {
	var links [2]*rocetest.Link
	t.Cleanup(func() { // after the devices are closed
		for _, l := range links {
			if n := l.Outstanding(); n != 0 {
				t.Errorf("%d packets were not given back", n)
			}
		}
	})
	var pair hcatest.Pair
	pair, links = wired(t, rocetest.Config{Seed: seed, Faults: rocetest.Faults{Loss: 0.01, Duplicate: 0.02, Reorder: 0.02, Corrupt: 0.01, Mark: 0.05}})
	var wg sync.WaitGroup
	for i, typ := range []hca.QPType{hca.QPTypeRC, hca.QPTypeRC, hca.QPTypeRC, hca.QPTypeUC, hca.QPTypeUD} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			a, b := newModelEnd(t, pair.A.(*soft.Device), links[0]), newModelEnd(t, pair.B.(*soft.Device), links[1])
			for range 6 {
				modelRound(t, r, a, b, typ)
				if t.Failed() {
					return
				}
			}
			a.close()
			b.close()
		}()
	}
	wg.Wait()
}
