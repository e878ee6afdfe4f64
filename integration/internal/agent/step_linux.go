package agent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

// The bounds of a step's end. All are generous: the guest is emulated, and its two processors may be busy.
const (
	killWait   = 5 * time.Second // from SIGKILL until a process must be gone, or is reported as stuck
	outputWait = 2 * time.Second // from the last process's end until its output must have been read
	goneTick   = 10 * time.Millisecond
)

// A step is one script. It runs in a session and, in a guest, a cgroup of its own, so that nothing of it survives.
type step struct {
	id   uint64
	exec *wire.Exec
	kill chan struct{} // closed under Agent.mu when the host asks for its end

	// Guarded by Agent.mu.
	killed  bool
	process *os.Process // nil before the start and after the end
}

// run runs the step to its end and returns the report.
func (s *step) run(ctx context.Context, a *Agent) *wire.Exit {
	script := filepath.Join(a.cfg.Dir, fmt.Sprintf("step-%d", s.id))
	if err := os.WriteFile(script, []byte(s.exec.Script), 0o755); err != nil {
		return failed("write the script", err)
	}
	defer func() { _ = os.Remove(script) }()
	cmd := exec.Command("/bin/bash", script)
	if strings.HasPrefix(s.exec.Script, "#!") {
		cmd = exec.Command(script)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	home, name, err := s.credentials(cmd.SysProcAttr)
	if err != nil {
		return failed("become user "+s.exec.User, err)
	}
	cmd.Dir = s.exec.Dir
	if cmd.Dir == "" {
		cmd.Dir = "/"
	}
	cmd.Env = append(append(a.environment(home, name), a.daemonEnvironment()...), s.exec.Env...)
	if len(s.exec.Stdin) > 0 {
		cmd.Stdin = bytes.NewReader(s.exec.Stdin)
		cmd.WaitDelay = outputWait // a step need not read all of its input
	}
	group, err := newGroup(a.cfg.Cgroup, fmt.Sprintf("step-%d", s.id))
	if err != nil {
		return failed("make a control group", err)
	}
	defer group.close()
	group.adopt(cmd.SysProcAttr)
	// One pipe for both streams keeps their order. It is our own, not exec's, because Wait would wait for every
	// process that still holds it.
	r, w, err := os.Pipe()
	if err != nil {
		return failed("make a pipe", err)
	}
	defer func() { _ = r.Close() }()
	if c := cmd.SysProcAttr.Credential; c != nil {
		// /dev/stderr opens the pipe anew, which only its owner may do.
		if err := w.Chown(int(c.Uid), int(c.Gid)); err != nil {
			_ = w.Close()
			return failed("give the pipe to "+s.exec.User, err)
		}
	}
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return failed("start the script", err)
	}
	group.pid = cmd.Process.Pid
	a.send(&wire.Message{Kind: wire.KindStarted, ID: s.id, PID: group.pid})
	a.setProcess(s, cmd.Process)
	read := make(chan struct{})
	go func() {
		defer close(read)
		s.forward(a, r)
	}()
	ended := make(chan *wire.Exit, 1)
	go func() {
		err := cmd.Wait()
		ended <- exitOf(cmd.ProcessState, err)
	}()
	return s.await(ctx, a, group, ended, read, r)
}

// await waits for the end of the step or for a reason to end it, and then for all of its processes and output.
func (s *step) await(ctx context.Context, a *Agent, g *group, ended chan *wire.Exit, read chan struct{}, r *os.File) *wire.Exit {
	limit := time.NewTimer(milliseconds(s.exec.TimeoutMS))
	defer limit.Stop()
	var exit *wire.Exit
	timedOut := false
	select {
	case exit = <-ended:
	case <-limit.C:
		timedOut = true
	case <-s.kill:
	case <-ctx.Done():
	}
	a.setProcess(s, nil)
	leftover := 0
	if exit != nil {
		leftover = len(g.pids())
	}
	stuck := g.kill(killWait)
	if exit == nil {
		select {
		case exit = <-ended:
		case <-time.After(killWait):
			exit = &wire.Exit{Code: 128 + int(syscall.SIGKILL), Error: "the script did not die of SIGKILL"}
		}
	}
	exit.TimedOut, exit.Leftover, exit.Stuck = timedOut, leftover, stuck
	select {
	case <-read:
	case <-time.After(outputWait):
		_ = r.Close() // a stuck process holds the pipe open
		<-read
	}
	return exit
}

func failed(what string, err error) *wire.Exit {
	return &wire.Exit{Code: -1, Error: fmt.Sprintf("%s: %v", what, err)}
}

func (a *Agent) setProcess(s *step, p *os.Process) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s.process = p
}

// forward sends the step's output until every writer has closed it.
func (s *step) forward(a *Agent, r *os.File) {
	buf := make([]byte, wire.MaxOutput)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			a.send(&wire.Message{Kind: wire.KindOutput, ID: s.id, Data: buf[:n]})
		}
		if err != nil {
			return
		}
	}
}

// credentials makes the step run as its user and returns that user's home and name.
func (s *step) credentials(attr *syscall.SysProcAttr) (home, name string, err error) {
	if s.exec.User == "" {
		return "/root", "root", nil
	}
	u, err := user.Lookup(s.exec.User)
	if err != nil {
		return "", "", err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return "", "", fmt.Errorf("user id %q: %w", u.Uid, err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return "", "", fmt.Errorf("group id %q: %w", u.Gid, err)
	}
	cred := &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	ids, err := u.GroupIds()
	if err != nil {
		return "", "", fmt.Errorf("groups of %s: %w", s.exec.User, err)
	}
	for _, id := range ids {
		n, err := strconv.ParseUint(id, 10, 32)
		if err != nil {
			return "", "", fmt.Errorf("group id %q: %w", id, err)
		}
		cred.Groups = append(cred.Groups, uint32(n))
	}
	attr.Credential = cred
	return u.HomeDir, u.Username, nil
}
