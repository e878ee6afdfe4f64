package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// row13: one thread destroys what another works with.
func row13(t *rowTest) {
	p, err := newPort(t.node)
	if err != nil {
		t.check("setup", err)
		return
	}
	defer p.c.Close()
	other, err := p.c.Share()
	if err != nil {
		t.check("setup", err)
		return
	}
	length := 4 * time.Second
	if t.long {
		length = 10 * time.Second
	}
	var handle atomic.Uint32
	var stop atomic.Bool
	worked := make(chan error, 1)
	go func() {
		var bad error
		for i := 0; !stop.Load() && bad == nil; i++ {
			h := handle.Load()
			switch i % 4 {
			case 0:
				_, bad = other.QueryQP(h)
			case 1:
				bad = other.ModifyQP(abi.ModifyQP{QPHandle: h, AttrMask: initMask, QPState: rawverbs.QPInit, PortNum: 1})
			case 2:
				bad = other.Recv(h, 1)
			case 3:
				bad = other.Send(h, abi.SendWR{Opcode: rawverbs.OpSend})
			}
			bad = want(bad, 0, unix.EINVAL, unix.ENOENT, unix.EBUSY, unix.ENOMEM)
		}
		worked <- bad
	}()
	n := 0
	t.check("destroy against query, modify and post", func() error {
		for end := time.Now().Add(length); time.Now().Before(end); n++ {
			qp, err := p.c.CreateQP(rawverbs.SmallQP(rawverbs.QPTypeRC, p.pd, p.cq))
			if err != nil {
				return err
			}
			handle.Store(qp.QPHandle)
			if e := p.c.DestroyErrno(rawverbs.QP, qp.QPHandle); e == unix.EBUSY {
				// The other is in it: try until it is out.
				if err := eventually("destroyed", func() bool {
					e = p.c.DestroyErrno(rawverbs.QP, qp.QPHandle)
					return e != unix.EBUSY
				}); err != nil {
					return err
				}
				if e != 0 {
					return fmt.Errorf("destroy: %w", e)
				}
			} else if e != 0 {
				return fmt.Errorf("destroy: %w", e)
			}
		}
		return nil
	}())
	stop.Store(true)
	t.check("the other thread saw nothing strange", <-worked)
	t.check("both ends of it left nothing", errors.Join(
		p.c.Destroy(rawverbs.QP, p.qp.QPHandle), p.c.Destroy(rawverbs.CQ, p.cq), p.c.Destroy(rawverbs.PD, p.pd)))
}

// row29: opening and closing leaves nothing in the daemon.
func row29(t *rowTest) {
	n := 10000
	if t.long {
		n = 100000
	}
	round := func(n int) error {
		for i := range n {
			fd, err := unix.Open(t.node, unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("open %d: %w", i, err)
			}
			_ = unix.Close(fd)
			if i%100 == 0 {
				c, err := rawverbs.OpenContext(t.node)
				if err != nil {
					return fmt.Errorf("context %d: %w", i, err)
				}
				c.Close()
			}
		}
		return nil
	}
	t.check("warm up", round(n/10))
	rss, err := daemonStat("VmRSS")
	if err != nil {
		t.check("the daemon's memory", err)
		return
	}
	threads, _ := daemonStat("Threads")
	fds, fdErr := daemonFDs()
	t.check(fmt.Sprintf("%d times", n), round(n))
	// kB; the collector's own swing is a few thousand.
	t.check("flat memory", eventually("memory within 16 MiB of before", func() bool {
		now, err := daemonStat("VmRSS")
		return err == nil && now < rss+16<<10
	}))
	t.check("flat threads", eventually("threads within 8 of before", func() bool {
		now, err := daemonStat("Threads")
		return err == nil && now <= threads+8
	}))
	if fdErr != nil {
		t.check("flat descriptors", fdErr)
		return
	}
	t.check("flat descriptors", eventually("as many descriptors as before", func() bool {
		now, err := daemonFDs()
		return err == nil && now <= fds+2
	}))
}

// row34: many threads on one file, each with results of its own.
func row34(t *rowTest) {
	const threads = 32
	n := 10000 / threads
	if t.long {
		n = 10000
	}
	c := t.open()
	if c == nil {
		return
	}
	defer c.Close()
	dev, err := c.QueryDevice()
	t.check("query", err)
	var wg sync.WaitGroup
	errs := make([]error, threads)
	for i := range threads {
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs[i] = threadWork(c, dev, i, n)
		}()
	}
	wg.Wait()
	t.check(fmt.Sprintf("%d threads, %d commands each", threads, n), errors.Join(errs...))
	h, err := c.AllocPD()
	if err == nil && h != 0 {
		err = fmt.Errorf("the next handle is %d, not 0", h)
	}
	t.check("nothing left", err)
}

// threadWork is one thread's commands; each result must be its own.
func threadWork(shared *rawverbs.Client, dev abi.QueryDeviceResp, id, n int) error {
	c, err := shared.Share()
	if err != nil {
		return err
	}
	defer c.Mem.Free()
	for i := 0; i < n; i += 5 {
		pd, err := c.AllocPD()
		if err != nil {
			return err
		}
		cqe := uint32(8 + id)
		b, e := c.Call(abi.CmdCreateCQ, rawverbs.Bytes(&abi.CreateCQ{CQE: cqe, CompChannel: -1}), cqResp, true)
		r := rawverbs.Decode[abi.CreateCQResp](b)
		if e != 0 || r.CQE < cqe {
			return fmt.Errorf("thread %d: a CQ of %d has %d (%v)", id, cqe, r.CQE, e)
		}
		if d, err := c.QueryDevice(); err != nil || d != dev {
			return fmt.Errorf("thread %d: another device (%v)", id, err)
		}
		if err := errors.Join(c.Destroy(rawverbs.CQ, r.CQHandle), c.Destroy(rawverbs.PD, pd)); err != nil {
			return fmt.Errorf("thread %d: %w", id, err)
		}
	}
	return nil
}

// roleFlood has n threads each in a read of an event file without events.
func roleFlood(args []string) error {
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	c, err := rawverbs.OpenContext(args[0])
	if err != nil {
		return err
	}
	ch, err := c.CreateChannel()
	if err != nil {
		return err
	}
	var began atomic.Int32
	for range n {
		go func() {
			began.Add(1)
			_, _ = unix.Read(ch, make([]byte, 8))
		}()
	}
	if err := eventually("all have begun", func() bool { return began.Load() == int32(n) }); err != nil {
		return err
	}
	say("flooding")
	waitLine()
	return nil
}

// row36: a client with two thousand threads each inside a command.
func row36(t *rowTest) {
	const n = 2000
	c := t.open()
	if c == nil {
		return
	}
	defer c.Close()
	latency := func() (time.Duration, error) {
		var all []time.Duration
		for range 300 {
			start := time.Now()
			if _, err := c.QueryPort(1); err != nil {
				return 0, err
			}
			all = append(all, time.Since(start))
		}
		slices.Sort(all)
		return all[len(all)/2], nil
	}
	before, err := latency()
	t.check("latency before", err)
	f, err := startRole(nil, nil, "flood", t.node, fmt.Sprint(n))
	if err == nil {
		_, err = f.line()
	}
	t.check("the flood", err)
	if err != nil {
		return
	}
	during, err := latency()
	// Wide: what it must not do is grow with the threads.
	if err == nil && during > 20*before+20*time.Millisecond {
		err = fmt.Errorf("%v, %v before", during, before)
	}
	t.check("latency of others", err)
	t.works("meanwhile")
	if threads, err := daemonStat("Threads"); err != nil {
		t.check("the daemon's threads", err)
	} else {
		if threads > 300 {
			err = fmt.Errorf("%d threads", threads)
		}
		t.check("the daemon's threads are bounded", err)
	}
	t.check("kill -9 of the flood", f.kill())
	t.works("afterwards")
}
