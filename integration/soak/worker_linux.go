package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

const (
	node = "/dev/infiniband/uverbs0"
	// maxRounds bounds a connection, so that objects are made and destroyed all the time.
	maxRounds = 24
	// redial is between two tries to reach a peer that is not there.
	redial = 20 * time.Millisecond
	// tally is how often a process says what it has done: a killed one cannot.
	tally = 500 * time.Millisecond
)

// processLinks are a process's links.
var processLinks = []linkKind{linkRC, linkRC, linkRC, linkSRQ, linkUC, linkUD, linkUD}

// worker is one process: one context, all of its links on it.
type worker struct {
	c     *rawverbs.Client
	path  rawverbs.Path
	pair  int
	dials bool
	seed  uint64
	stop  atomic.Bool

	rounds, messages, bytes, links, cut atomic.Uint64
}

// fail ends the process: the parent stops at the first such line.
func fail(format string, a ...any) {
	fmt.Printf("FAIL "+format+"\n", a...)
	os.Exit(1)
}

func workerCommand(args []string) error {
	var w worker
	fs := flag.NewFlagSet("worker", flag.ContinueOnError)
	fs.IntVar(&w.pair, "pair", 0, "number of the pair")
	fs.BoolVar(&w.dials, "dial", false, "be the end that connects")
	fs.Uint64Var(&w.seed, "seed", 1, "of all that is drawn")
	if err := fs.Parse(args); err != nil {
		return err
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, unix.SIGTERM)
	var err error
	if w.c, err = rawverbs.OpenContext(node); err != nil {
		fail("%v", err)
	}
	if w.path, err = w.c.SelfPath(node); err != nil {
		fail("%v", err)
	}
	var listeners []*net.UnixListener
	var wg sync.WaitGroup
	for i, k := range processLinks {
		addr := &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("@soak-%d-%d", w.pair, i)}
		var l *net.UnixListener
		if !w.dials {
			if l, err = net.ListenUnix("unix", addr); err != nil {
				fail("listen: %v", err)
			}
			listeners = append(listeners, l)
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			w.link(k, i, addr, l)
		}()
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	tick := time.NewTicker(tally)
	defer tick.Stop()
	for {
		select {
		case <-term:
			w.stop.Store(true)
			for _, l := range listeners {
				_ = l.Close()
			}
		case <-tick.C:
			w.tell()
		case <-done:
			w.tell()
			w.c.Close()
			return nil
		}
	}
}

// tell prints what was done since the last time.
func (w *worker) tell() {
	fmt.Printf("DID %d %d %d %d %d\n", w.rounds.Swap(0), w.messages.Swap(0), w.bytes.Swap(0), w.links.Swap(0), w.cut.Swap(0))
}

// link connects again and again until the process is to stop.
func (w *worker) link(k linkKind, n int, addr *net.UnixAddr, l *net.UnixListener) {
	c, err := w.c.Share()
	if err != nil {
		fail("%v", err)
	}
	defer c.Mem.Free()
	area, err := unix.Mmap(-1, 0, areaLen, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		fail("memory: %v", err)
	}
	defer func() { _ = unix.Munmap(area) }()
	r := rand.New(rand.NewPCG(w.seed, uint64(n)))
	for !w.stop.Load() {
		conn, err := w.meet(addr, l)
		if err != nil {
			fail("pair %d, link %d: %v", w.pair, n, err)
		}
		if conn == nil {
			continue // stopped, or nobody there yet
		}
		e := &end{c: c, ctl: newControl(conn), kind: k, path: w.path, area: area}
		err = e.create(r, r.IntN(3) == 0)
		if err == nil {
			err = w.traffic(e, r)
		}
		if errors.Is(err, errGone) {
			w.cut.Add(1)
			err = nil
		}
		if e := e.close(); err == nil && e != nil {
			err = fmt.Errorf("destroy: %w", e)
		}
		_ = conn.Close()
		if err != nil {
			fail("pair %d, link %d (%v), dials %v, seed %d: %v", w.pair, n, k, w.dials, w.seed, err)
		}
		w.links.Add(1)
	}
}

// meet is a connection to the peer, or nil.
func (w *worker) meet(addr *net.UnixAddr, l *net.UnixListener) (*net.UnixConn, error) {
	if l != nil {
		c, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil, nil
		}
		return c, err
	}
	c, err := net.DialUnix("unix", nil, addr)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EAGAIN) {
		time.Sleep(redial)
		return nil, nil
	}
	return c, err
}

// traffic is all rounds of one connection.
func (w *worker) traffic(e *end, r *rand.Rand) error {
	if err := e.connect(); err != nil {
		return e.ctl.settle(err)
	}
	stop := false // either end wants to
	for n := 1 + r.IntN(maxRounds); ; n-- {
		var sp spec
		if w.dials {
			sp = newSpec(e.kind, r.Uint64())
			if n == 0 || stop || w.stop.Load() {
				sp = spec{Op: opBye, Flush: r.IntN(3) == 0, Mess: r.IntN(3) == 0}
			}
			if err := e.ctl.send(message{Step: stepSpec, Spec: sp}); err != nil {
				return err
			}
		} else {
			m, err := e.ctl.receive(stepSpec)
			if err != nil {
				return err
			}
			sp = m.Spec
		}
		if sp.Op == opBye {
			return e.ctl.settle(e.bye(sp))
		}
		m, err := w.round(e, sp)
		if err != nil {
			return e.ctl.settle(fmt.Errorf("%v: %w", sp.Op, err))
		}
		stop = stop || m.Stop
	}
}

// round runs one, ends with an exchange of OKs, and returns the peer's.
func (w *worker) round(e *end, sp spec) (message, error) {
	items := plan(e.kind, sp)
	var err error
	if sp.DialerTo == w.dials {
		err = e.act(sp, items)
	} else {
		err = e.serve(sp, items)
	}
	if err != nil {
		return message{}, err
	}
	if err := e.ctl.send(message{Step: stepOK, Stop: w.stop.Load()}); err != nil {
		return message{}, err
	}
	m, err := e.ctl.receive(stepOK)
	if err == nil && w.dials { // once for both ends
		w.rounds.Add(1)
		w.messages.Add(uint64(len(items)))
		for _, it := range items {
			w.bytes.Add(uint64(it.size))
		}
	}
	return m, err
}
