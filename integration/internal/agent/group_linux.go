package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A group is the set of a step's processes: a cgroup, which no process can leave unnoticed, or without cgroups the
// leader's process group.
type group struct {
	dir string   // the cgroup's folder; empty: process group only
	fd  *os.File // the same, open
	pid int      // the leader, once started
}

// newGroup makes the cgroup name below root, or a group without a cgroup if root is empty.
func newGroup(root, name string) (*group, error) {
	if root == "" {
		return &group{}, nil
	}
	dir := filepath.Join(root, name)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	fd, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	return &group{dir: dir, fd: fd}, nil
}

// adopt makes a new process start inside the group.
func (g *group) adopt(attr *syscall.SysProcAttr) {
	if g.fd != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, int(g.fd.Fd())
	}
}

// pids are the processes of the cgroup, ended ones not counted. Without a cgroup they are not known.
func (g *group) pids() []int {
	if g.dir == "" {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(g.dir, "cgroup.procs"))
	if err != nil {
		return nil
	}
	var out []int
	for _, f := range strings.Fields(string(b)) {
		if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
			out = append(out, pid)
		}
	}
	return out
}

// kill ends every process of the group and waits, at most for the given time, until they are gone. It describes
// those that stay.
func (g *group) kill(wait time.Duration) []string {
	if g.dir == "" {
		if g.pid > 0 {
			_ = syscall.Kill(-g.pid, syscall.SIGKILL) // ESRCH is the usual answer: nothing was left
		}
		return nil
	}
	deadline := time.Now().Add(wait)
	for {
		left := g.pids()
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			var stuck []string
			for _, pid := range left {
				stuck = append(stuck, describe(pid))
			}
			return stuck
		}
		_ = os.WriteFile(filepath.Join(g.dir, "cgroup.kill"), []byte("1"), 0)
		time.Sleep(goneTick)
	}
}

// close removes the cgroup; one with a stuck process stays.
func (g *group) close() {
	if g.fd != nil {
		_ = g.fd.Close()
		_ = os.Remove(g.dir)
	}
}

// describe says what a process is and where in the kernel it sleeps.
func describe(pid int) string {
	read := func(name string) string {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		return strings.TrimSpace(string(b))
	}
	frames := strings.Join(strings.Fields(strings.ReplaceAll(read("stack"), "[<0>]", "")), " < ")
	return fmt.Sprintf("pid %d (%s) at %s: %s", pid, read("comm"), read("wchan"), frames)
}
