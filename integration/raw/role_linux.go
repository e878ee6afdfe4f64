package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// testerID is the guest's unprivileged user.
const testerID = 1000

// roles are what this program does when a row starts it again: ready is printed
// by say, and a line on stdin lets it go on.
var roles = map[string]func(args []string) error{
	"try":     roleTry,
	"work":    roleWork,
	"suid":    roleSuid,
	"victim":  roleVictim,
	"watcher": roleWatcher,
	"storm":   roleStorm,
	"opens":   roleOpens,
	"hang":    roleHang,
	"flood":   roleFlood,
	"sleeper": roleSleeper,
	"quit":    func([]string) error { return nil },
}

func roleCommand(args []string) error {
	if len(args) == 0 || roles[args[0]] == nil {
		return errors.New("no such role")
	}
	return roles[args[0]](args[1:])
}

func say(format string, a ...any) { fmt.Printf(format+"\n", a...) }

// waitLine waits for the parent.
func waitLine() {
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
}

// child is a started role.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
}

// startRole starts one; the files become descriptors 3 and up.
func startRole(attr *syscall.SysProcAttr, files []*os.File, args ...string) (*child, error) {
	cmd := exec.Command("/proc/self/exe", append([]string{"role"}, args...)...)
	cmd.SysProcAttr, cmd.ExtraFiles, cmd.Stderr = attr, files, os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd: cmd, in: in, lines: make(chan string, 64)}
	go func() {
		defer close(c.lines)
		for sc := bufio.NewScanner(out); sc.Scan(); {
			c.lines <- sc.Text()
		}
	}()
	return c, nil
}

// line is the next line that the child says.
func (c *child) line() (string, error) {
	select {
	case l, ok := <-c.lines:
		if !ok {
			return "", errors.New("the child ended")
		}
		return l, nil
	case <-time.After(patience):
		return "", errors.New("the child says nothing")
	}
}

func (c *child) goOn() { _, _ = io.WriteString(c.in, "\n") }

// wait waits for the end; what the child said last is in the error.
func (c *child) wait() error {
	done := make(chan error, 1)
	last := ""
	go func() {
		for l := range c.lines {
			last = l
		}
		done <- c.cmd.Wait()
	}()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%w: %s", err, last)
		}
		return nil
	case <-time.After(patience):
		_ = c.cmd.Process.Kill()
		return errors.New("the child does not end")
	}
}

// kill is kill -9; the process must go.
func (c *child) kill() error {
	_ = c.cmd.Process.Kill()
	err := c.wait()
	var x *exec.ExitError
	if errors.As(err, &x) && x.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		return nil
	}
	return fmt.Errorf("after kill -9: %w", err)
}

func asUser(uid uint32) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
}

// roleAs runs a role to its end as another user.
func (t *rowTest) roleAs(uid uint32, args ...string) (string, error) {
	return t.run(asUser(uid), nil, args...)
}

func (t *rowTest) run(attr *syscall.SysProcAttr, files []*os.File, args ...string) (string, error) {
	c, err := startRole(attr, files, args...)
	if err != nil {
		return "", err
	}
	return "", c.wait()
}

// file is c's descriptor as a file that a child can be given.
func file(c *rawverbs.Client) *os.File {
	fd, err := unix.FcntlInt(uintptr(c.FD), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil
	}
	return os.NewFile(uintptr(fd), "node")
}

func roleWork(args []string) error {
	c, err := rawverbs.OpenContext(defaultNode)
	if err != nil {
		return err
	}
	defer c.Close()
	for range 50 {
		pd, err := c.AllocPD()
		if err != nil {
			return err
		}
		cq, err := c.CreateCQ(16, rawverbs.NoChannel)
		if err != nil {
			return err
		}
		if err := errors.Join(c.Destroy(rawverbs.CQ, cq), c.Destroy(rawverbs.PD, pd)); err != nil {
			return err
		}
	}
	return nil
}

// fdArg is a descriptor given by number.
func fdArg(args []string) (int, error) {
	if len(args) == 0 {
		return 3, nil
	}
	return strconv.Atoi(args[0])
}
