package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

// Errors of a step or a guest, for errors.Is.
var (
	// ErrTimeout: the step was killed at its Timeout. Result has what it wrote until then.
	ErrTimeout = errors.New("timed out")
	// ErrGuestGone: the guest, its agent or QEMU ended; the message has the end of the serial console.
	ErrGuestGone = errors.New("the guest is gone")
)

const (
	// DefaultCommandTimeout bounds a Command whose Timeout is zero.
	DefaultCommandTimeout = 2 * time.Minute
	// answerGrace is how long after a step's own time limit the agent's report may take: it waits itself for
	// killed processes and their output. Later the guest counts as hung.
	answerGrace = 30 * time.Second
	// maxOutput bounds Result.Output in bytes; Command.Stdout gets everything.
	maxOutput = 64 << 20
)

// Command is one step: a script run in the guest.
type Command struct {
	Script  string        // run by /bin/bash, or as it says if it starts with #!
	User    string        // a user of the guest ("tester": uid 1000, no privilege); empty: root
	Dir     string        // default /
	Env     []string      // KEY=value, added to the guest's own
	Stdin   []byte        // at most a few MiB; nil: /dev/null
	Timeout time.Duration // then the step's processes are killed; default DefaultCommandTimeout
	Stdout  io.Writer     // gets stdout and stderr as they come; one that blocks holds up the whole guest; may be nil
}

// Result is the end of a step.
type Result struct {
	Output    []byte // stdout and stderr in the order written
	Truncated bool   // Output is only the beginning
	ExitCode  int    // the exit status, or 128 plus the number of the signal that ended it
	Signal    int    // that signal, or 0
	Leftover  int    // processes the step had left running, which were killed
}

// Step is a running step.
type Step struct {
	s       *session
	id      uint64
	cmd     Command
	begun   time.Time
	started chan struct{} // closed when pid is set
	done    chan struct{} // closed when exit is set
	pid     int
	exit    *wire.Exit

	mu        sync.Mutex // guards the output
	output    []byte
	truncated bool
}

// session is the host's side of the protocol with one agent.
type session struct {
	conn *wire.Conn

	mu      sync.Mutex // guards all below
	next    uint64
	steps   map[uint64]*Step
	started chan *wire.Message // the pending daemon-start's answer, or nil
	stopped chan *wire.Message // the pending daemon-stop's answer, or nil
	crash   *wire.Exit         // the daemon's last unasked end
	hello   *wire.Hello

	greeted chan struct{} // closed when hello is set
	dead    chan struct{} // closed when err is set
	err     error
}

func newSession(rw io.ReadWriter) *session {
	return &session{
		conn:    wire.NewConn(rw),
		steps:   map[uint64]*Step{},
		greeted: make(chan struct{}),
		dead:    make(chan struct{}),
	}
}

// serve receives until the stream ends and returns why. fail must be called afterwards.
func (s *session) serve() error {
	for {
		m, err := s.conn.Receive()
		if errors.Is(err, io.EOF) {
			return errors.New("the agent closed its port")
		}
		if err != nil {
			return err
		}
		if err := s.handle(m); err != nil {
			return err
		}
	}
}

// fail ends every pending wait with err. Only the first call counts.
func (s *session) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
		close(s.dead)
	}
}

func (s *session) handle(m *wire.Message) error {
	switch {
	case m.Kind == wire.KindHello && m.Hello != nil:
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.hello != nil {
			return errors.New("the agent started twice")
		}
		s.hello = m.Hello
		close(s.greeted)
		return nil
	case m.Kind == wire.KindDaemonStarted:
		s.answer(&s.started, m)
		return nil
	case m.Kind == wire.KindDaemonExit && m.Exit != nil:
		if m.Exit.Asked {
			s.answer(&s.stopped, m)
			return nil
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.crash = m.Exit
		return nil
	}
	s.mu.Lock()
	st := s.steps[m.ID]
	if m.Kind == wire.KindExit {
		delete(s.steps, m.ID)
	}
	s.mu.Unlock()
	switch {
	case st == nil:
		return fmt.Errorf("the agent sent %q about unknown step %d", m.Kind, m.ID)
	case m.Kind == wire.KindStarted:
		st.pid = m.PID
		close(st.started)
	case m.Kind == wire.KindOutput:
		st.write(m.Data)
	case m.Kind == wire.KindExit && m.Exit != nil:
		st.exit = m.Exit
		close(st.done)
	default:
		return fmt.Errorf("the agent sent %q, which this harness does not know", m.Kind)
	}
	return nil
}

// answer hands m to whoever waits in *to.
func (s *session) answer(to *chan *wire.Message, m *wire.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if *to != nil {
		*to <- m // has room for the one answer
		*to = nil
	}
}

// ask sends a request whose single answer comes through *to, and waits at most limit.
func (s *session) ask(ctx context.Context, to *chan *wire.Message, m *wire.Message, limit time.Duration) (*wire.Message, error) {
	answer := make(chan *wire.Message, 1)
	s.mu.Lock()
	if *to != nil {
		s.mu.Unlock()
		return nil, fmt.Errorf("%s: another is still being answered", m.Kind)
	}
	*to = answer
	s.mu.Unlock()
	if err := s.send(m); err != nil {
		return nil, err
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case got := <-answer:
		return got, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: %w", m.Kind, context.Cause(ctx))
	case <-s.dead:
		return nil, s.err
	case <-timer.C:
		return nil, fmt.Errorf("%s: no answer from the guest after %v: it hangs", m.Kind, limit)
	}
}

// send sends m; if that fails because the guest has gone, it says that.
func (s *session) send(m *wire.Message) error {
	err := s.conn.Send(m)
	if err == nil || errors.Is(err, wire.ErrFrameTooLarge) {
		return err
	}
	select {
	case <-s.dead:
		return s.err
	case <-time.After(time.Second): // serve sees the same end and knows more about it
		return err
	}
}

// start sends a command on its way. The step must be waited for.
func (s *session) start(cmd Command) (*Step, error) {
	if cmd.Timeout <= 0 {
		cmd.Timeout = DefaultCommandTimeout
	}
	st := &Step{s: s, cmd: cmd, begun: time.Now(), started: make(chan struct{}), done: make(chan struct{})}
	s.mu.Lock()
	s.next++
	st.id = s.next
	s.steps[st.id] = st
	s.mu.Unlock()
	err := s.send(&wire.Message{Kind: wire.KindExec, ID: st.id, Exec: &wire.Exec{
		Script: cmd.Script, User: cmd.User, Dir: cmd.Dir, Env: cmd.Env, Stdin: cmd.Stdin,
		TimeoutMS: max(1, cmd.Timeout.Milliseconds()),
	}})
	if err != nil {
		s.mu.Lock()
		delete(s.steps, st.id)
		s.mu.Unlock()
		return nil, fmt.Errorf("start step: %w", err)
	}
	return st, nil
}

func (st *Step) write(p []byte) {
	st.mu.Lock()
	room := min(len(p), maxOutput-len(st.output))
	st.output = append(st.output, p[:room]...)
	st.truncated = st.truncated || room < len(p)
	st.mu.Unlock()
	if st.cmd.Stdout != nil {
		_, _ = st.cmd.Stdout.Write(p) // the guest goes on whatever becomes of its reader
	}
}

// PID waits until the script runs and returns its process id in the guest.
func (st *Step) PID(ctx context.Context) (int, error) {
	select {
	case <-st.started:
		return st.pid, nil
	case <-st.done:
		select {
		case <-st.started:
			return st.pid, nil
		default:
			return 0, fmt.Errorf("step did not start: %s", st.exit.Error)
		}
	case <-st.s.dead:
		return 0, st.s.err
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for step to start: %w", context.Cause(ctx))
	}
}

// Signal signals the script's own process; a script that ends with "exec PROGRAM" is PROGRAM. A step that has ended
// is no error.
func (st *Step) Signal(sig syscall.Signal) error {
	return st.s.send(&wire.Message{Kind: wire.KindSignal, ID: st.id, Signal: int(sig)})
}

// Kill kills all of the step's processes with SIGKILL.
func (st *Step) Kill() error {
	return st.s.send(&wire.Message{Kind: wire.KindKill, ID: st.id})
}

// Wait waits for the end of the step. When ctx ends first, the step is killed and the context's error returned.
func (st *Step) Wait(ctx context.Context) (Result, error) {
	hung := time.NewTimer(time.Until(st.begun.Add(st.cmd.Timeout + answerGrace)))
	defer hung.Stop()
	select {
	case <-st.done:
		return st.result()
	case <-ctx.Done():
		if err := st.Kill(); err != nil {
			return st.partial(), err
		}
		return st.partial(), fmt.Errorf("step killed: %w", context.Cause(ctx))
	case <-st.s.dead:
		select {
		case <-st.done: // its report was the guest's last word
			return st.result()
		default:
			return st.partial(), st.s.err
		}
	case <-hung.C:
		return st.partial(), fmt.Errorf("step with a limit of %v: no report from the guest %v later: it hangs: %w",
			st.cmd.Timeout, answerGrace, ErrTimeout)
	}
}

func (st *Step) partial() Result {
	st.mu.Lock()
	defer st.mu.Unlock()
	return Result{Output: append([]byte(nil), st.output...), Truncated: st.truncated, ExitCode: -1}
}

func (st *Step) result() (Result, error) {
	r := st.partial()
	r.ExitCode, r.Signal, r.Leftover = st.exit.Code, st.exit.Signal, st.exit.Leftover
	stuck := ""
	for _, p := range st.exit.Stuck {
		stuck += "\nSIGKILL did not end " + p
	}
	switch {
	case st.exit.TimedOut:
		return r, fmt.Errorf("step killed after %v: %w%s", st.cmd.Timeout.Round(time.Millisecond), ErrTimeout, stuck)
	case st.exit.Error != "":
		return r, fmt.Errorf("step: %s%s", st.exit.Error, stuck)
	case stuck != "":
		return r, fmt.Errorf("step ended but its processes stay:%s", stuck)
	}
	return r, nil
}
