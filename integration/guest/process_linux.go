package guest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a QEMU process: its console on stdout, its complaints on stderr, and the agent's socket.
type process struct {
	cmd     *exec.Cmd
	console *tail
	stderr  tail
	port    *os.File      // the host's end of the agent's socket
	exited  chan struct{} // closed when the process has been reaped
}

// startProcess starts QEMU with the agent's socket as file descriptor agentFD and its temporary files in dir.
func startProcess(program string, args []string, dir string, console *tail) (*process, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make the agent's socket: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "agent socket")
	defer func() { _ = theirs.Close() }()
	if err := unix.SetNonblock(fds[0], true); err != nil { // so that Close ends a pending Read
		_ = unix.Close(fds[0])
		return nil, fmt.Errorf("make the agent's socket: %w", err)
	}
	p := &process{console: console, port: os.NewFile(uintptr(fds[0]), "agent socket"), exited: make(chan struct{})}
	p.cmd = exec.Command(program, args...)
	p.cmd.ExtraFiles = []*os.File{theirs}
	p.cmd.Stdout, p.cmd.Stderr = p.console, &p.stderr
	p.cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	p.cmd.WaitDelay = time.Second
	// A group of its own, so that the terminal's Ctrl-C does not end the guest before its owner has reported; and
	// a death signal, so that no guest outlives an owner that was killed.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The death signal is sent when the starting thread ends, so that thread must last as long as the process.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // the result is in ProcessState
			close(p.exited)
		}
	}()
	if err := <-started; err != nil {
		_ = p.port.Close()
		if errors.Is(err, exec.ErrNotFound) {
			return nil, fmt.Errorf("%w: install the packages in integration/apt-packages", err)
		}
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	return p, nil
}

// state is how the process ended; exited must be closed.
func (p *process) state() string { return p.cmd.ProcessState.String() }

// kill ends the process; one that has ended is no error.
func (p *process) kill() { _ = p.cmd.Process.Kill() }

// stop ends the process, at once if wait is over before it has ended by itself, and returns when it has gone.
func (p *process) stop(wait time.Duration) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(wait):
		p.kill()
		<-p.exited
	}
	_ = p.port.Close()
}
