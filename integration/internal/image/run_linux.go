package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// run runs a tool to its end, ends it and all it has started when ctx ends, and puts the last lines that the tool
// wrote into the error.
//
// As root the tool gets namespaces of its own for mounts and processes. mmdebstrap mounts file systems below the root
// it builds: in a namespace they vanish with it however it ends, and never stand in the way of, or are reached by, the
// removal of an unfinished image. And when process 1 of a namespace is killed, everything in it is: also when this
// process itself is killed, through the death signal.
func run(ctx context.Context, name string, args ...string) error {
	// The death signal is sent when the starting thread ends, so this goroutine keeps it until the tool has ended.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS // unlike a clone flag, this also makes mounts private
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second // then the tool's output is given up
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", name, context.Cause(ctx))
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("%w: install the packages in integration/apt-packages", err)
	}
	return fmt.Errorf("%s: %w\n%s", name, err, lastLines(out.String(), 20))
}
