package sysfs

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

// Keeper is a child process that outlives a daemon that is killed, and cleans
// up after it. Under systemd ExecStopPost does the same; the keeper is for
// all other ends (a daemon in the foreground, the OOM killer taking only it).
type Keeper struct {
	cmd  *exec.Cmd
	pipe *os.File
}

// StartKeeper runs this program again with args, which must lead it to
// KeeperMain. Call it before anything is mounted.
func StartKeeper(args ...string) (*Keeper, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the keeper: %w", err)
	}
	defer r.Close()
	// Its own session: a Ctrl-C or a hangup of the terminal is not for it.
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Stdin, cmd.Stderr = r, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = w.Close()
		return nil, fmt.Errorf("start the keeper: %w", err)
	}
	return &Keeper{cmd: cmd, pipe: w}, nil
}

// Stop dismisses the keeper without cleaning: the daemon has done it itself.
func (k *Keeper) Stop() error {
	_, err := k.pipe.Write([]byte{'q'})
	_ = k.pipe.Close()
	if werr := k.cmd.Wait(); err == nil {
		err = werr
	}
	if err != nil {
		return fmt.Errorf("stop the keeper: %w", err)
	}
	return nil
}

// KeeperMain is the child's whole life: it waits for the daemon's end of stdin
// to close, and then, unless it was dismissed, runs clean (sysfs.Clean and the
// modprobe guard's).
func KeeperMain(stdin io.Reader, clean func() error) error {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	var b [1]byte
	if n, err := stdin.Read(b[:]); n == 1 && b[0] == 'q' {
		return nil
	} else if n == 0 && err != io.EOF {
		return fmt.Errorf("keeper: wait for the daemon: %w", err)
	}
	return clean()
}
