package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// vandals write into rings while doorbells are rung, each what its row is about.
var vandals = map[string]func(p *mappedPort, rnd *rand.Rand){
	"row15": flipRequests,
	"row16": flipHeaders,
	"row17": flipLengths,
	"holes": punchHoles,
}

// row15: requests change while the doorbell runs.
func row15(t *rowTest) { vandalism(t, "row15") }

// row16: indices jump, sizes in the header lie.
func row16(t *rowTest) { vandalism(t, "row16") }

// row17: inline lengths, and sums of lengths that wrap.
func row17(t *rowTest) { vandalism(t, "row17") }

// rowHoles: the memory of a ring is taken away under traffic (MADV_REMOVE).
func rowHoles(t *rowTest) { vandalism(t, "holes") }

// vandalism runs one as a process of its own, which is killed in the middle of it.
// Others work meanwhile, and all that it had is given back.
func vandalism(t *rowTest, how string) {
	p, err := newMappedPort(t.node)
	if err != nil {
		t.check("setup", err)
		return
	}
	defer p.close()
	pace := func() (time.Duration, error) {
		var all []time.Duration
		for range 300 {
			start := time.Now()
			if err := p.write(); err != nil {
				return 0, err
			}
			all = append(all, time.Since(start))
		}
		slices.Sort(all)
		return all[len(all)/2], nil
	}
	before, err := pace()
	t.check("a bystander's writes before", err)
	v, err := startRole(nil, nil, "vandal", t.node, how)
	if err != nil {
		t.check("the vandal", err)
		return
	}
	rounds := func() error {
		l, err := v.line()
		if err == nil && l != "round" {
			err = errors.New(l)
		}
		return err
	}
	t.check("the vandal has begun", rounds())
	length := time.Second
	if t.long {
		length = 60 * time.Second
	}
	for end := time.Now().Add(length); time.Now().Before(end) && err == nil; {
		var during time.Duration
		during, err = pace()
		// Wide: three threads share two processors. What it must not do is stop.
		if err == nil && during > 20*before+20*time.Millisecond {
			err = fmt.Errorf("%v for one, %v before", during, before)
		}
	}
	t.check("a bystander's writes meanwhile", err)
	t.works("meanwhile")
	t.check("the vandal went on", rounds())
	t.check("kill -9", v.kill())
	t.check("nothing of it is left", gone(v.cmd.Process.Pid))
	_, err = pace()
	t.check("a bystander's writes afterwards", err)
}

// gone waits until the daemon's status has no context, and so no pinned memory, of
// a process.
func gone(pid int) error {
	daemon := os.Getenv("UVERBSD")
	if daemon == "" {
		return fmt.Errorf("%w: no daemon to ask", errSkip)
	}
	return eventually("its contexts have ended", func() bool {
		out, err := exec.Command(daemon, "status", "--json").Output()
		return err == nil && !strings.Contains(string(out), `"pid":`+strconv.Itoa(pid)+",")
	})
}

// roleVandal makes queues, spoils them from two threads while two more ring the
// doorbells, and begins anew, until it is killed.
func roleVandal(args []string) error {
	spoil := vandals[args[1]]
	p, err := newMappedPort(args[0])
	if err != nil {
		return err
	}
	for n := uint64(1); ; n++ {
		// A ring is memory like any other: requests may write into the ring that
		// they stand in.
		own, err := p.c.RegMR(p.pd, rawverbs.AddrOf(p.qps[0].sq.mem), rawverbs.Page, rawverbs.AccessLocalWrite|rawverbs.AccessRemoteWrite)
		if err != nil {
			return err
		}
		p.own = own
		var stop atomic.Bool
		var wg sync.WaitGroup
		for k := range uint64(2) {
			wg.Go(func() {
				for rnd := rand.New(rand.NewPCG(n, k)); !stop.Load(); {
					spoil(p, rnd)
				}
			})
		}
		for k := range 200 {
			q := &p.qps[k&1]
			q.sq.setProducer(q.sq.producer() + uint32(k%5))
			q.rq.setProducer(q.rq.producer() + 1)
			if err := want(p.doorbell(q), 0, unix.EINVAL); err != nil {
				return fmt.Errorf("doorbell: %w", err)
			}
			if k%32 == 31 { // an error has ended them, most of the time
				if err := p.renew(); err != nil {
					return err
				}
			}
		}
		stop.Store(true)
		wg.Wait()
		if err := p.c.Destroy(rawverbs.MR, own.MRHandle); err != nil {
			return err
		}
		if err := p.dropQueues(); err != nil {
			return err
		}
		if err := p.makeQueues(); err != nil {
			return err
		}
		fmt.Println("round")
	}
}

// renew takes both QPs through RESET. The first at RTS sends what the spoilers put
// there, so that the other may be in ERR before it is at RTS, which is then refused.
func (p *mappedPort) renew() error {
	for i := range p.qps {
		if err := p.c.ModifyQP(abi.ModifyQP{QPHandle: p.qps[i].handle, AttrMask: 1}); err != nil {
			return fmt.Errorf("to RESET: %w", err)
		}
	}
	return want(p.connect(), 0, unix.EINVAL)
}

// pick is one of l.
func pick(rnd *rand.Rand, l ...uint32) uint32 { return l[rnd.IntN(len(l))] }

func flipRequests(p *mappedPort, rnd *rand.Rand) {
	q := &p.qps[rnd.IntN(2)]
	at := rnd.Uint32()
	w := q.sq.send(at)
	if rnd.IntN(3) == 0 {
		p.putWrite(q, at, 64)
		return
	}
	length := pick(rnd, 0, 1, 64, 512, mrSize, mrSize+1, 1<<31, 1<<32-1)
	q.sq.putSendSGE(at, rnd.IntN(mappedSGE), abi.RXESGE{
		Addr: p.addr + uint64(pick(rnd, 0, 0, 1, mrSize-1, mrSize, 1<<31)), Length: length, LKey: p.mr.LKey ^ pick(rnd, 0, 0, 0, 1, 1<<31),
	})
	w.DMA.Length, w.DMA.NumSGE = length, pick(rnd, 0, 1, 1, 2, 4, 5, 1<<28, 1<<32-1)
	w.WR.Opcode = pick(rnd, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 77, 1<<32-1)
	w.WR.SendFlags = rnd.Uint32() & 0x3f
	if rnd.IntN(4) == 0 {
		b := w.WR.WR[:]
		binary.NativeEndian.PutUint32(b[4*rnd.IntN(len(b)/4):], rnd.Uint32())
	}
	// Receives: the other half of what a message meets.
	v := q.rq.recv(at)
	v.DMA.Length, v.DMA.NumSGE = length, pick(rnd, 0, 1, 1, 4, 5, 1<<32-1)
	q.rq.putRecvSGE(at, rnd.IntN(mappedSGE), abi.RXESGE{
		Addr: p.addr + uint64(pick(rnd, 0, 64, mrSize-1)), Length: length, LKey: p.mr.LKey ^ pick(rnd, 0, 0, 1),
	})
}

func flipHeaders(p *mappedPort, rnd *rand.Rand) {
	q := &p.qps[rnd.IntN(2)]
	for range 4 { // so that something gets done
		p.putWrite(q, rnd.Uint32(), 64)
	}
	r := []ring{q.sq, q.rq, p.cqRing}[rnd.IntN(3)]
	index := pick(rnd, rnd.Uint32(), rnd.Uint32N(64), 1<<31, 1<<32-1, 0)
	switch rnd.IntN(4) {
	case 0:
		r.setProducer(index)
	case 1:
		r.setConsumer(index)
	case 2:
		r.setProducer(r.producer() - 1)
	case 3:
		putRDMA(q.sq.send(index), rawverbs.AddrOf(p.qps[0].sq.mem)+uint64(pick(rnd, 0, 128, 256, 384)), p.own.RKey)
		h := r.header()
		h.Log2ElemSize, h.IndexMask = pick(rnd, 0, 6, 31, 32, 63, 64, 1<<32-1), pick(rnd, 0, 1, 2, 1<<20-1, 1<<31, 1<<32-1)
	}
}

func flipLengths(p *mappedPort, rnd *rand.Rand) {
	q := &p.qps[rnd.IntN(2)]
	at := rnd.Uint32()
	p.putWrite(q, at, 64)
	w := q.sq.send(at)
	if rnd.IntN(2) == 0 {
		w.WR.SendFlags |= 1 << 3 // IBV_SEND_INLINE
		w.DMA.Length = pick(rnd, 0, 63, 64, 65, 512, 513, 1<<12, 1<<31, 1<<32-1)
		return
	}
	// Pieces whose sum wraps to what the request says.
	w.DMA.NumSGE, w.DMA.Length = 4, 64
	for k, n := range []uint32{1 << 31, 1 << 31, 32, 32} {
		q.sq.putSendSGE(at, k, abi.RXESGE{Addr: p.addr, Length: n, LKey: p.mr.LKey})
	}
}

func punchHoles(p *mappedPort, rnd *rand.Rand) {
	q := &p.qps[rnd.IntN(2)]
	for range 20 {
		p.putWrite(q, rnd.Uint32(), 64)
	}
	_ = unix.Madvise([][]byte{q.sq.mem, q.rq.mem, p.cqRing.mem}[rnd.IntN(3)], unix.MADV_REMOVE)
}

func init() { roles["vandal"] = roleVandal }
