package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// pairs of processes, and the queue pairs that they have together.
	pairs   = 4
	wantQPs = 64
	// pingpongs are the unmodified pairs beside them.
	pingpongs = 2
	// basePort and those above it are the pingpongs'.
	basePort = 22000
	// testerID is the guest's unprivileged user.
	testerID = 1000
	// killEvery is about how often a process is killed: on two emulated
	// processors a new one needs a second until all of its links move data.
	killEvery = 2500 * time.Millisecond
	// phaseLen is the time between two rests, of which a run has at least
	// minPhases, however slow the machine is: what is flat needs some points.
	phaseLen    = 30 * time.Second
	minPhaseLen = 5 * time.Second
	minPhases   = 4
)

// totals are what all workers have done.
type totals struct {
	rounds, messages, bytes, links, cut uint64
	kills, pingpongs, phases            int
}

// fleet is the clients.
type fleet struct {
	d    *daemon
	rng  *rand.Rand
	fail chan error

	mu    sync.Mutex // guards total
	total totals
}

// process is one worker.
type process struct {
	pair  int
	dials bool
	cmd   *exec.Cmd
	done  chan error // its end, after all that it said was read
}

func runCommand(args []string) error {
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	length := fs.Duration("for", 10*time.Minute, "how long")
	seed := fs.Uint64("seed", uint64(time.Now().UnixNano()), "of all that is drawn")
	if err := fs.Parse(args); err != nil {
		return err
	}
	d, err := daemonFromEnv()
	if err != nil {
		return err
	}
	fmt.Printf("seed %d: %d queue pairs in %d processes, %d pingpong pairs, %v\n", *seed, wantQPs, 2*pairs, pingpongs, *length)
	f := &fleet{d: d, rng: rand.New(rand.NewPCG(*seed, 0)), fail: make(chan error, 1)}
	w := watch{d: d, warm: min(maxWarm, *length/2)}
	start := time.Now()
	for ; time.Since(start) < *length || f.total.phases < minPhases; f.total.phases++ {
		left := max(minPhaseLen, min(phaseLen, *length/minPhases, *length-time.Since(start)))
		if err := f.phase(left, f.total.phases%2 == 1); err != nil {
			return err
		}
		if err := w.rest(time.Since(start)); err != nil {
			return err
		}
	}
	if err := w.flat(); err != nil {
		return err
	}
	t := f.total
	fmt.Printf("%v: %d rounds, %d messages, %d MiB, %d connections (%d cut), %d kills, %d pingpong pairs, %d rests\n",
		time.Since(start).Round(time.Second), t.rounds, t.messages, t.bytes>>20, t.links, t.cut, t.kills, t.pingpongs, t.phases)
	if t.rounds == 0 || t.kills == 0 || t.cut == 0 || t.pingpongs == 0 {
		return errors.New("something of this did not happen")
	}
	return nil
}

// report keeps the first failure.
func (f *fleet) report(err error) {
	select {
	case f.fail <- err:
	default:
	}
}

// phase runs all clients for a while and ends them, with -9 if hard.
func (f *fleet) phase(length time.Duration, hard bool) error {
	var all []*process
	for i := range pairs {
		for _, dials := range []bool{false, true} {
			p, err := f.start(i, dials)
			if err != nil {
				return errors.Join(err, f.end(all, true))
			}
			all = append(all, p)
		}
	}
	stop := make(chan struct{})
	var beside sync.WaitGroup
	for i := range pingpongs {
		beside.Add(1)
		go func() {
			defer beside.Done()
			f.pingpong(basePort+i, stop)
		}()
	}
	err := f.storm(all, length)
	began := time.Now()
	close(stop)
	if e := f.end(all, hard || err != nil); err == nil {
		err = e
	}
	beside.Wait()
	f.mu.Lock()
	fmt.Printf("phase %d: %v, %d rounds and %d kills so far; its end (hard: %v) took %v\n",
		f.total.phases, length.Round(time.Second), f.total.rounds, f.total.kills, hard, time.Since(began).Round(time.Millisecond))
	f.mu.Unlock()
	if err == nil {
		select {
		case err = <-f.fail:
		default:
		}
	}
	return err
}

// storm kills and starts again.
func (f *fleet) storm(all []*process, length time.Duration) error {
	for end := time.Now().Add(length); ; {
		pause := time.NewTimer(min(time.Until(end), killEvery/2+time.Duration(f.rng.Int64N(int64(killEvery)))))
		select {
		case <-pause.C:
		case err := <-f.fail:
			pause.Stop()
			return err
		}
		if !time.Now().Before(end) {
			return nil
		}
		i := f.rng.IntN(len(all))
		p := all[i]
		if err := p.kill(); err != nil {
			return err
		}
		f.total.kills++
		next, err := f.start(p.pair, p.dials)
		if err != nil {
			return err
		}
		all[i] = next
	}
}

// start starts a worker, and reads what it says.
func (f *fleet) start(pair int, dials bool) (*process, error) {
	cmd := exec.Command("/proc/self/exe", "worker", fmt.Sprintf("-pair=%d", pair), fmt.Sprintf("-dial=%v", dials), fmt.Sprintf("-seed=%d", f.rng.Uint64()))
	cmd.Env = append(os.Environ(), "GOTRACEBACK=all")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testerID, Gid: testerID}}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a worker: %w", err)
	}
	p := &process{pair: pair, dials: dials, cmd: cmd, done: make(chan error, 1)}
	go func() {
		for sc := bufio.NewScanner(out); sc.Scan(); {
			f.heard(sc.Text())
		}
		err := cmd.Wait()
		if err != nil && !asked(cmd.ProcessState) {
			f.report(fmt.Errorf("a worker of pair %d: %w", pair, err))
		}
		p.done <- err
	}()
	return p, nil
}

// asked says that a worker ended by one of the signals that end sends: SIGTERM may
// come before it has a handler for it.
func asked(ps *os.ProcessState) bool {
	s, ok := ps.Sys().(syscall.WaitStatus)
	return ok && s.Signaled() && (s.Signal() == syscall.SIGKILL || s.Signal() == syscall.SIGTERM)
}

// heard takes a worker's line.
func (f *fleet) heard(line string) {
	if what, ok := strings.CutPrefix(line, "FAIL "); ok {
		fmt.Println(line)
		f.report(errors.New(what))
		return
	}
	var t totals
	if n, _ := fmt.Sscanf(line, "DID %d %d %d %d %d", &t.rounds, &t.messages, &t.bytes, &t.links, &t.cut); n != 5 {
		fmt.Println(line)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.total.rounds += t.rounds
	f.total.messages += t.messages
	f.total.bytes += t.bytes
	f.total.links += t.links
	f.total.cut += t.cut
}

// kill is kill -9, and the wait for the end.
func (p *process) kill() error {
	_ = p.cmd.Process.Kill()
	return p.await()
}

func (p *process) await() error {
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case <-p.done:
		return nil
	case <-late.C:
		return fmt.Errorf("a worker of pair %d does not end", p.pair)
	}
}

// end ends all: all at once, by SIGTERM or by kill -9.
func (f *fleet) end(all []*process, hard bool) error {
	sig := syscall.SIGTERM
	if hard {
		sig = syscall.SIGKILL
	}
	for _, p := range all {
		_ = p.cmd.Process.Signal(sig)
	}
	var errs []error
	for _, p := range all {
		if err := p.await(); err != nil {
			// SIGQUIT makes it say where it stands.
			_ = p.cmd.Process.Signal(syscall.SIGQUIT)
			errs = append(errs, err, p.await())
		}
	}
	return errors.Join(errs...)
}

// pingpong runs pairs of the unmodified program one after another; each must succeed.
func (f *fleet) pingpong(port int, stop chan struct{}) {
	for n := 0; ; n++ {
		select {
		case <-stop:
			return
		default:
		}
		events := [...]string{"", " -e"}[n%2]
		cmd := exec.Command("/bin/bash", "-c", fmt.Sprintf("set -eu -o pipefail; . /opt/lib.sh; pingpong %d ibv_rc_pingpong -d qib0 -n 20 -c%s", port, events))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testerID, Gid: testerID}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			f.report(fmt.Errorf("ibv_rc_pingpong -c%s: %w\n%s", events, err, out))
			return
		}
		f.mu.Lock()
		f.total.pingpongs++
		f.mu.Unlock()
	}
}
