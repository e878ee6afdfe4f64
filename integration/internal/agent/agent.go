// Package agent runs steps and the daemon inside a guest, as the host asks over package wire. It knows nothing of
// booting, so it is tested on the host over a socket pair.
//
// Lock order: Agent.mu is a leaf; no message is sent and no process is signalled while it is held, except by
// signalling a process that Agent.mu keeps from being reaped.
package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

// Config says where an agent works.
type Config struct {
	Dir    string       // an existing folder for scripts, readable by every user
	Cgroup string       // a writable cgroup v2 folder; empty: steps are bounded by process group only
	Hello  wire.Hello   // sent first
	Log    func(string) // one line at a time, for the console
}

// Agent is one host's agent.
type Agent struct {
	cfg  Config
	conn *wire.Conn

	mu     sync.Mutex // guards all below
	steps  map[uint64]*step
	daemon *daemon
}

// Serve greets the host and answers it until the stream ends, which is no error. It returns when every step has
// been killed and reported.
func Serve(rw io.ReadWriter, cfg Config) error {
	a := &Agent{cfg: cfg, conn: wire.NewConn(rw), steps: map[uint64]*step{}}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	defer a.killDaemon()
	if err := a.conn.Send(&wire.Message{Kind: wire.KindHello, Hello: &cfg.Hello}); err != nil {
		return fmt.Errorf("greet the host: %w", err)
	}
	for {
		m, err := a.conn.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listen to the host: %w", err)
		}
		switch {
		case m.Kind == wire.KindExec && m.Exec != nil:
			s := &step{id: m.ID, exec: m.Exec, kill: make(chan struct{})}
			a.mu.Lock()
			a.steps[m.ID] = s
			a.mu.Unlock()
			running.Go(func() { a.runStep(ctx, s) })
		case m.Kind == wire.KindSignal:
			a.signalStep(m.ID, syscall.Signal(m.Signal))
		case m.Kind == wire.KindKill:
			a.killStep(m.ID)
		case m.Kind == wire.KindDaemonStart && m.Daemon != nil:
			running.Go(func() { a.startDaemon(ctx, m.Daemon) })
		case m.Kind == wire.KindDaemonStop:
			running.Go(func() { a.stopDaemon(m) })
		default:
			return fmt.Errorf("the host sent %q, which this agent does not know: rebuild both", m.Kind)
		}
	}
}

// send reports to the host. A host that is gone cannot be told so; Serve sees the same end.
func (a *Agent) send(m *wire.Message) {
	if err := a.conn.Send(m); err != nil {
		a.cfg.Log(err.Error())
	}
}

// runStep runs one step and reports its end.
func (a *Agent) runStep(ctx context.Context, s *step) {
	exit := s.run(ctx, a)
	a.mu.Lock()
	delete(a.steps, s.id)
	a.mu.Unlock()
	a.send(&wire.Message{Kind: wire.KindExit, ID: s.id, Exit: exit})
}

func (a *Agent) signalStep(id uint64, sig syscall.Signal) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.steps[id]; s != nil && s.process != nil {
		_ = s.process.Signal(sig) // an ended process is no error: the exit message is on its way
	}
}

func (a *Agent) killStep(id uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.steps[id]; s != nil && !s.killed {
		s.killed = true
		close(s.kill)
	}
}

// environment is what every step and the daemon start from.
func (a *Agent) environment(home, user string) []string {
	return []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=" + home, "USER=" + user, "LOGNAME=" + user, "LANG=C.UTF-8", "TERM=dumb",
	}
}

// exitOf turns a wait result into a report.
func exitOf(state *os.ProcessState, err error) *wire.Exit {
	if state == nil {
		return &wire.Exit{Code: -1, Error: fmt.Sprintf("wait: %v", err)}
	}
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return &wire.Exit{Code: 128 + int(ws.Signal()), Signal: int(ws.Signal())}
	}
	return &wire.Exit{Code: state.ExitCode()}
}

// milliseconds is a duration as the wire has it.
func milliseconds(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }
