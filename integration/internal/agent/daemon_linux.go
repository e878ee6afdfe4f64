package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

// readyTick is how often the daemon's node and class file are looked for. Nothing announces a file in sysfs.
const readyTick = 20 * time.Millisecond

// A daemon is the one running daemon.
type daemon struct {
	spec  *wire.Daemon
	pid   int
	proc  *os.Process // holds a pidfd, so that a signal never reaches another process
	group *group
	ended chan struct{} // closed after exit is set
	exit  *wire.Exit
	ready bool // guarded by Agent.mu: the host has been, or is about to be, told that the daemon runs
	asked bool // guarded by Agent.mu: somebody waits for the end in stopDaemon
}

// daemonEnvironment tells scripts about the daemon. UVERBSD_PID is not set while none runs.
func (a *Agent) daemonEnvironment() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.daemon == nil {
		return nil
	}
	env := []string{"UVERBSD=" + a.daemon.spec.Path, "UVERBSD_LOG=" + a.daemon.spec.Log}
	select {
	case <-a.daemon.ended:
	default:
		env = append(env, "UVERBSD_PID="+strconv.Itoa(a.daemon.pid))
	}
	return env
}

// startDaemon starts the daemon, waits until it is ready and answers the host.
func (a *Agent) startDaemon(ctx context.Context, spec *wire.Daemon) {
	answer := &wire.Message{Kind: wire.KindDaemonStarted}
	d, err := a.launch(spec)
	if err == nil {
		answer.PID = d.pid
		err = d.awaitReady(ctx)
	}
	if err == nil {
		a.mu.Lock()
		d.ready = true
		select {
		case <-d.ended:
			err = d.early() // nobody else reports it
		default:
		}
		a.mu.Unlock()
	}
	if err != nil {
		answer.Error = err.Error()
	}
	a.send(answer)
}

func (a *Agent) launch(spec *wire.Daemon) (*daemon, error) {
	a.mu.Lock()
	running := a.daemon != nil
	if running {
		select {
		case <-a.daemon.ended:
			running = false
		default:
		}
	}
	a.mu.Unlock()
	if running {
		return nil, errors.New("the daemon runs already")
	}
	log, err := os.OpenFile(spec.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the daemon's log: %w", err)
	}
	defer func() { _ = log.Close() }()
	g, err := newGroup(a.cfg.Cgroup, "daemon")
	if err != nil {
		return nil, fmt.Errorf("make the daemon's control group: %w", err)
	}
	cmd := exec.Command(spec.Path, spec.Args...)
	cmd.Dir = "/"
	cmd.Env = append(a.environment("/root", "root"), spec.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	g.adopt(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		g.close()
		return nil, fmt.Errorf("start the daemon: %w", err)
	}
	d := &daemon{spec: spec, pid: cmd.Process.Pid, proc: cmd.Process, group: g, ended: make(chan struct{})}
	g.pid = d.pid
	a.mu.Lock()
	a.daemon = d
	a.mu.Unlock()
	go func() {
		err := cmd.Wait()
		d.exit = exitOf(cmd.ProcessState, err)
		a.mu.Lock()
		close(d.ended) // under mu, so that ready and asked are decided together with it
		report := d.ready && !d.asked
		a.mu.Unlock()
		d.group.close() // children of a dead daemon keep it; the next daemon joins them there
		if report {
			a.send(&wire.Message{Kind: wire.KindDaemonExit, Exit: d.exit})
		}
	}()
	return d, nil
}

// awaitReady waits for the node and the class file, for the daemon's end, or for the time limit.
func (d *daemon) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, milliseconds(d.spec.TimeoutMS))
	defer cancel()
	// The check may sleep in the daemon's own file system for ever, so it gets a goroutine that can be left behind.
	missing := make(chan string)
	go func() {
		defer close(missing)
		for {
			what := d.missing()
			if what == "" {
				return
			}
			select {
			case missing <- what:
			case <-ctx.Done():
				return
			}
			select {
			case <-time.After(readyTick):
			case <-ctx.Done():
				return
			}
		}
	}()
	last := "no answer from " + d.spec.Class
	for {
		select {
		case what, more := <-missing:
			if !more && ctx.Err() == nil {
				return nil
			}
			if more {
				last = what
			}
		case <-d.ended:
			return d.early()
		case <-ctx.Done():
			return fmt.Errorf("the daemon was not ready after %v: %s", milliseconds(d.spec.TimeoutMS), last)
		}
	}
}

// early is the error of a daemon that has ended before it was ready.
func (d *daemon) early() error {
	return fmt.Errorf("the daemon ended with status %d before it was ready", d.exit.Code)
}

// missing says what is not there yet; empty: the daemon is ready.
func (d *daemon) missing() string {
	info, err := os.Stat(d.spec.Node)
	if err != nil {
		return err.Error()
	}
	if info.Mode()&os.ModeCharDevice == 0 {
		return d.spec.Node + " is not a character device"
	}
	b, err := os.ReadFile(d.spec.Class)
	if err != nil {
		return err.Error()
	}
	if len(b) == 0 {
		return d.spec.Class + " is empty"
	}
	return ""
}

// stopDaemon signals the daemon, waits, kills it if it is late, and answers the host.
func (a *Agent) stopDaemon(m *wire.Message) {
	a.mu.Lock()
	d := a.daemon
	ended := true
	if d != nil {
		select {
		case <-d.ended:
		default:
			ended = false
			d.asked = true
			_ = d.proc.Signal(syscall.Signal(m.Signal)) // one that has just ended is waited for all the same
		}
	}
	a.mu.Unlock()
	answer := &wire.Message{Kind: wire.KindDaemonExit}
	switch {
	case d == nil:
		answer.Exit = &wire.Exit{Code: -1, Error: "no daemon was started"}
	case ended:
		answer.Exit = &wire.Exit{Code: d.exit.Code, Signal: d.exit.Signal, Error: "the daemon had ended before"}
	default:
		answer.Exit = d.stop(milliseconds(m.TimeoutMS))
	}
	answer.Exit.Asked = true
	a.send(answer)
}

func (d *daemon) stop(wait time.Duration) *wire.Exit {
	select {
	case <-d.ended:
		copied := *d.exit
		return &copied
	case <-time.After(wait):
	}
	stuck := d.group.kill(killWait)
	select {
	case <-d.ended:
		return &wire.Exit{Code: d.exit.Code, Signal: d.exit.Signal, TimedOut: true}
	case <-time.After(killWait):
		return &wire.Exit{Code: -1, TimedOut: true, Stuck: stuck, Error: "the daemon did not die of SIGKILL"}
	}
}

// killDaemon ends the daemon with the agent, for the agent's own tests: in a guest the whole machine ends.
func (a *Agent) killDaemon() {
	a.mu.Lock()
	d := a.daemon
	if d != nil {
		d.asked = true
	}
	a.mu.Unlock()
	if d != nil {
		d.stop(0)
	}
}
