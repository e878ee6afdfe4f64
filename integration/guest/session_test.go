package guest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/integration/internal/agent"
	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

// testSession is a session with a real agent that runs its steps on this host, without a guest. hangUp ends the
// agent's side as a dying guest does.
func testSession(t *testing.T) (s *session, hangUp func()) {
	t.Helper()
	host, guest := net.Pipe()
	s = newSession(host)
	var wait sync.WaitGroup
	wait.Go(func() {
		err := agent.Serve(guest, agent.Config{Dir: t.TempDir(), Hello: wire.Hello{Kernel: "test"}, Log: func(string) {}})
		if err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "closed pipe") {
			t.Errorf("agent: %v", err)
		}
		guest.Close()
	})
	wait.Go(func() { s.fail(errors.Join(ErrGuestGone, s.serve())) })
	t.Cleanup(func() {
		host.Close()
		wait.Wait()
	})
	<-s.greeted
	return s, func() { guest.Close() }
}

func run(t *testing.T, s *session, cmd Command) (Result, error) {
	t.Helper()
	st, err := s.start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	return st.Wait(t.Context())
}

// waitFor is a step's Stdout that closes seen when the text has come.
type waitFor struct {
	text string
	seen chan struct{}
	got  bytes.Buffer
	once sync.Once
}

func newWaitFor(text string) *waitFor { return &waitFor{text: text, seen: make(chan struct{})} }

func (w *waitFor) Write(p []byte) (int, error) {
	w.got.Write(p)
	if strings.Contains(w.got.String(), w.text) {
		w.once.Do(func() { close(w.seen) })
	}
	return len(p), nil
}

func TestStepEnds(t *testing.T) {
	s, _ := testSession(t)
	for _, tc := range []struct {
		name, script, output string
		exit, signal         int
		stdin                string
	}{
		{name: "pass", script: "echo out; echo err >&2", output: "out\nerr\n"},
		{name: "fail", script: "echo x; exit 3", output: "x\n", exit: 3},
		{name: "signal", script: "kill -9 $$", exit: 137, signal: 9},
		{name: "pipefail is bash", script: "set -o pipefail; false | true", exit: 1},
		{name: "interpreter", script: "#!/bin/cat\nhello\n", output: "#!/bin/cat\nhello\n"},
		{name: "stdin", script: "cat", stdin: "a\x00b", output: "a\x00b"},
		{name: "no stdin", script: "cat", output: ""},
		{name: "stdin not read", script: "exit 4", stdin: strings.Repeat("x", 1<<20), exit: 4},
		{name: "environment", script: "echo $USER $HOME ${UVERBSD_PID-none}", output: "root /root none\n"},
		{name: "empty", script: ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			res, err := run(t, s, Command{Script: tc.script, Stdin: []byte(tc.stdin)})
			if err != nil {
				t.Fatal(err)
			}
			if string(res.Output) != tc.output || res.ExitCode != tc.exit || res.Signal != tc.signal {
				t.Errorf("got %q status %d signal %d, want %q, %d, %d", res.Output, res.ExitCode, res.Signal, tc.output, tc.exit, tc.signal)
			}
		})
	}
}

func TestOutputIsByteClean(t *testing.T) {
	s, _ := testSession(t)
	want := make([]byte, 3<<20)
	for i := range want {
		want[i] = byte(i * 7 >> 3)
	}
	file := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(file, want, 0o644); err != nil {
		t.Fatal(err)
	}
	var live bytes.Buffer
	res, err := run(t, s, Command{Script: "cat " + file, Stdout: &live})
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(res.Output, want) || !bytes.Equal(live.Bytes(), want) {
		t.Errorf("%d bytes kept and %d passed on differ from the %d written", len(res.Output), live.Len(), len(want))
	}
}

// fifo makes a named pipe: the means by which steps of these tests wait for each other.
func fifo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestStepsRunConcurrently(t *testing.T) {
	s, _ := testSession(t)
	pipe := fifo(t)
	server, err := s.start(Command{Script: "cat " + pipe})
	if err != nil {
		t.Fatal(err)
	}
	if res, err := run(t, s, Command{Script: "echo from the client > " + pipe}); err != nil || res.ExitCode != 0 {
		t.Fatalf("client: %+v, %v", res, err)
	}
	res, err := server.Wait(t.Context())
	if err != nil || string(res.Output) != "from the client\n" {
		t.Errorf("server: %q, %v", res.Output, err)
	}
}

func TestTimeoutKillsTheGroup(t *testing.T) {
	s, _ := testSession(t)
	pipe := fifo(t)
	// The background process holds the pipe open: its reader sees the end only when that process is dead.
	st, err := s.start(Command{Script: "sleep 1000 > " + pipe + " & echo before; wait", Timeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile(pipe); err != nil {
		t.Fatal(err)
	}
	res, err := st.Wait(t.Context())
	if !errors.Is(err, ErrTimeout) || string(res.Output) != "before\n" || res.Signal != int(syscall.SIGKILL) {
		t.Errorf("got %+v (%q), %v, want ErrTimeout, its output and SIGKILL", res, res.Output, err)
	}
}

func TestEndOfScriptKillsTheRest(t *testing.T) {
	s, _ := testSession(t)
	pipe := fifo(t)
	// As above, and the background process also holds the step's output open.
	st, err := s.start(Command{Script: "(echo up > " + pipe + "; sleep 1000) & read x < " + pipe + "; echo $x"})
	if err != nil {
		t.Fatal(err)
	}
	res, err := st.Wait(t.Context())
	if err != nil || string(res.Output) != "up\n" || res.ExitCode != 0 {
		t.Errorf("got %q, %+v, %v", res.Output, res, err)
	}
}

func TestSignalKillAndContext(t *testing.T) {
	s, _ := testSession(t)
	const loop = "trap 'exit 5' USR1; echo ready; while :; do sleep 0.01; done"
	begin := func() *Step {
		w := newWaitFor("ready")
		st, err := s.start(Command{Script: loop, Stdout: w})
		if err != nil {
			t.Fatal(err)
		}
		<-w.seen
		return st
	}
	st := begin()
	if pid, err := st.PID(t.Context()); err != nil || pid <= 1 {
		t.Errorf("PID: %d, %v", pid, err)
	}
	if err := st.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if res, err := st.Wait(t.Context()); err != nil || res.ExitCode != 5 {
		t.Errorf("after SIGUSR1: %+v, %v, want status 5", res, err)
	}
	if err := st.Signal(syscall.SIGUSR1); err != nil {
		t.Errorf("signal to an ended step: %v", err)
	}
	st = begin()
	if err := st.Kill(); err != nil {
		t.Fatal(err)
	}
	if res, err := st.Wait(t.Context()); err != nil || res.Signal != int(syscall.SIGKILL) {
		t.Errorf("after Kill: %+v, %v", res, err)
	}
	st = begin()
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("test over")
	cancel(why)
	if _, err := st.Wait(ctx); !errors.Is(err, why) {
		t.Errorf("after the context's end: %v, want its cause", err)
	}
	<-st.done // the step was killed, not left behind
}

func TestStepThatCannotStart(t *testing.T) {
	s, _ := testSession(t)
	st, err := s.start(Command{Script: "true", User: "no-such-user"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Wait(t.Context()); err == nil || !strings.Contains(err.Error(), "no-such-user") {
		t.Errorf("got %v, want an error that names the user", err)
	}
	if _, err := st.PID(t.Context()); err == nil {
		t.Error("a step that did not start has a PID")
	}
	if _, err := s.start(Command{Script: strings.Repeat("#", wire.MaxFrame)}); !errors.Is(err, wire.ErrFrameTooLarge) {
		t.Errorf("oversized script: %v", err)
	}
	if res, err := run(t, s, Command{Script: "exit 6"}); err != nil || res.ExitCode != 6 {
		t.Errorf("the session did not survive: %+v, %v", res, err)
	}
}

func TestGuestGoneFailsPendingSteps(t *testing.T) {
	s, hangUp := testSession(t)
	w := newWaitFor("ready")
	st, err := s.start(Command{Script: "echo ready; sleep 1000", Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	<-w.seen
	hangUp()
	res, err := st.Wait(t.Context())
	if !errors.Is(err, ErrGuestGone) || string(res.Output) != "ready\n" {
		t.Errorf("got %q, %v, want ErrGuestGone and the output so far", res.Output, err)
	}
	if st, err := s.start(Command{Script: "true"}); err == nil {
		_, err = st.Wait(t.Context())
		if !errors.Is(err, ErrGuestGone) {
			t.Errorf("a later step: %v, want ErrGuestGone", err)
		}
	} else if !errors.Is(err, ErrGuestGone) {
		t.Errorf("a later step: %v, want ErrGuestGone", err)
	}
}

func TestSessionRefusesNonsense(t *testing.T) {
	for _, m := range []*wire.Message{
		{Kind: wire.KindOutput, ID: 99},
		{Kind: "surprise"},
		{Kind: wire.KindHello, Hello: &wire.Hello{}}, // a second one
	} {
		s := newSession(new(bytes.Buffer))
		if err := s.handle(&wire.Message{Kind: wire.KindHello, Hello: &wire.Hello{}}); err != nil {
			t.Fatal(err)
		}
		if err := s.handle(m); err == nil {
			t.Errorf("%+v was accepted", m)
		}
	}
}
