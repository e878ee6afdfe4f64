package agent

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// peer is the host's side of an agent on this machine.
type peer struct {
	t    *testing.T
	conn *wire.Conn
	dir  string
}

func newPeer(t *testing.T) *peer {
	t.Helper()
	host, guest := net.Pipe()
	dir := t.TempDir()
	served := make(chan error)
	go func() { served <- Serve(guest, Config{Dir: dir, Log: func(string) {}}) }()
	t.Cleanup(func() {
		host.Close()
		if err := <-served; err != nil {
			t.Errorf("agent: %v", err)
		}
	})
	p := &peer{t, wire.NewConn(host), dir}
	p.expect(wire.KindHello)
	return p
}

func (p *peer) expect(kind wire.Kind) *wire.Message {
	p.t.Helper()
	m, err := p.conn.Receive()
	if err != nil {
		p.t.Fatal(err)
	}
	if m.Kind != kind {
		p.t.Fatalf("got %+v, want %s", m, kind)
	}
	return m
}

// start starts a stand-in for the daemon; /dev/null stands in for its node.
func (p *peer) start(script string, change func(*wire.Daemon)) *wire.Message {
	p.t.Helper()
	class := filepath.Join(p.dir, "ibdev")
	d := &wire.Daemon{
		Path: "/bin/sh", Args: []string{"-c", "class=" + class + "; " + script},
		Log: filepath.Join(p.dir, "log"), Node: "/dev/null", Class: class, TimeoutMS: 30_000,
	}
	if change != nil {
		change(d)
	}
	p.send(&wire.Message{Kind: wire.KindDaemonStart, Daemon: d})
	return p.expect(wire.KindDaemonStarted)
}

func (p *peer) send(m *wire.Message) {
	p.t.Helper()
	if err := p.conn.Send(m); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) stop(sig syscall.Signal, ms int64) *wire.Exit {
	p.t.Helper()
	p.send(&wire.Message{Kind: wire.KindDaemonStop, Signal: int(sig), TimeoutMS: ms})
	m := p.expect(wire.KindDaemonExit)
	if !m.Exit.Asked {
		p.t.Errorf("the end was not reported as asked for: %+v", m.Exit)
	}
	return m.Exit
}

const serve = "trap 'exit 7' TERM; echo serving; echo rxe0 > $class; while :; do sleep 0.01; done"

func TestDaemonLife(t *testing.T) {
	p := newPeer(t)
	m := p.start(serve, nil)
	if m.Error != "" || m.PID <= 1 {
		t.Fatalf("start: %+v", m)
	}
	if again := p.start(serve, nil); !strings.Contains(again.Error, "already") {
		t.Errorf("a second daemon: %+v", again)
	}
	p.send(&wire.Message{Kind: wire.KindExec, ID: 1, Exec: &wire.Exec{
		Script: `[ "$UVERBSD_PID" ] && [ "$UVERBSD" ] && grep -q serving "$UVERBSD_LOG"`, TimeoutMS: 30_000,
	}})
	p.expect(wire.KindStarted)
	if e := p.expect(wire.KindExit).Exit; e.Code != 0 {
		t.Errorf("the environment of a step: %+v", e)
	}
	if e := p.stop(syscall.SIGTERM, 30_000); e.Code != 7 || e.TimedOut || e.Error != "" {
		t.Errorf("stop: %+v, want status 7", e)
	}
	if e := p.stop(syscall.SIGTERM, 30_000); e.Error == "" || e.Code != 7 {
		t.Errorf("stop of an ended daemon: %+v", e)
	}
	if m := p.start(serve, nil); m.Error != "" {
		t.Errorf("start after stop: %+v", m)
	}
}

func TestDaemonThatIgnoresSIGTERM(t *testing.T) {
	p := newPeer(t)
	if m := p.start("trap '' TERM; "+strings.TrimPrefix(serve, "trap 'exit 7' TERM; "), nil); m.Error != "" {
		t.Fatal(m.Error)
	}
	if e := p.stop(syscall.SIGTERM, 10); !e.TimedOut || e.Signal != int(syscall.SIGKILL) {
		t.Errorf("stop: %+v, want SIGKILL after the limit", e)
	}
}

func TestDaemonNotReady(t *testing.T) {
	absent := func(d *wire.Daemon) { d.Node, d.TimeoutMS = "/dev/no-such-node", 50 }
	for _, tc := range []struct {
		name, script, want string
		change             func(*wire.Daemon)
	}{
		{"ends", "exit 3", "status 3", nil},
		{"no node", serve, "no-such-node", absent},
		{"node is a file", serve, "not a character device", func(d *wire.Daemon) { d.Node, d.TimeoutMS = "/etc/passwd", 50 }},
		{"no class", "while :; do sleep 0.01; done", "ibdev", func(d *wire.Daemon) { d.TimeoutMS = 50 }},
		{"empty class", ": > $class; " + "while :; do sleep 0.01; done", "ibdev", func(d *wire.Daemon) { d.TimeoutMS = 50 }},
		{"no program", "", "no-such-program", func(d *wire.Daemon) { d.Path = "/no-such-program" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPeer(t)
			if m := p.start(tc.script, tc.change); !strings.Contains(m.Error, tc.want) {
				t.Errorf("got %q, want %q in it", m.Error, tc.want)
			}
		})
	}
}

func TestDaemonCrashIsReported(t *testing.T) {
	p := newPeer(t)
	m := p.start("echo rxe0 > $class; trap 'kill -SEGV $$' USR1; while :; do sleep 0.01; done", nil)
	if m.Error != "" {
		t.Fatal(m.Error)
	}
	if err := syscall.Kill(m.PID, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	e := p.expect(wire.KindDaemonExit).Exit
	if e.Asked || e.Signal != int(syscall.SIGSEGV) {
		t.Errorf("got %+v, want an unasked SIGSEGV", e)
	}
	if e := p.stop(syscall.SIGTERM, 10); e.Error == "" {
		t.Errorf("stop after the crash: %+v", e)
	}
}

func TestStopWithoutDaemon(t *testing.T) {
	p := newPeer(t)
	if e := p.stop(syscall.SIGTERM, 10); e.Error == "" {
		t.Errorf("got %+v, want an error", e)
	}
}

func TestDescribe(t *testing.T) {
	if s := describe(os.Getpid()); !strings.Contains(s, "agent") {
		t.Errorf("this process is described as %q", s)
	}
}
