package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/integration/internal/payload"
)

// A mount is one call of mount(2).
type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return fmt.Errorf("mount %s: %w", m.target, err)
	}
	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.kind, m.target, err)
	}
	return nil
}

// guestModules are what the daemon needs and cannot load by opening a file. ib_core must not be among them: with it
// libibverbs finds no device of ours (DESIGN.md, the discovery wall).
var guestModules = []string{"fuse", "cuse", "overlay"}

// nosuid are the flags of the guest's memory file systems.
const nosuid = uintptr(unix.MS_NOSUID | unix.MS_NODEV)

// pid1 sets the guest up, runs the agent and returns when the agent has ended.
func pid1() error {
	for _, m := range []mount{
		{"tmpfs", "/dev/shm", "tmpfs", nosuid, "mode=1777"},
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666"},
		{"cgroup2", payload.Cgroup, "cgroup2", nosuid | unix.MS_NOEXEC, ""},
		{"debugfs", "/sys/kernel/debug", "debugfs", nosuid | unix.MS_NOEXEC, "mode=0700"},
	} {
		if err := m.do(); err != nil {
			return err
		}
	}
	for _, l := range [][2]string{{"/proc/self/fd", "/dev/fd"}, {"fd/0", "/dev/stdin"}, {"fd/1", "/dev/stdout"}, {"fd/2", "/dev/stderr"}} {
		if err := os.Symlink(l[0], l[1]); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("link %s: %w", l[1], err)
		}
	}
	if err := unix.Sethostname([]byte(payload.Hostname)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	if err := linkUp("lo"); err != nil {
		return err
	}
	modprobe := exec.Command("/sbin/modprobe", append([]string{"-a"}, guestModules...)...)
	agent := exec.Command(payload.Init, "agent")
	for _, c := range []*exec.Cmd{modprobe, agent} {
		c.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
		c.Stdout, c.Stderr = os.Stderr, os.Stderr
	}
	if err := modprobe.Run(); err != nil {
		return fmt.Errorf("load modules %s: %w", strings.Join(guestModules, ", "), err)
	}
	if err := agent.Start(); err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	return reapUntil(agent.Process.Pid)
}

// reapUntil reaps every orphan until process pid has ended.
func reapUntil(pid int) error {
	for {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return fmt.Errorf("wait for the agent: %w", err)
		case got == pid && ws.Exited() && ws.ExitStatus() == 0:
			return nil
		case got == pid && ws.Signaled():
			return fmt.Errorf("the agent was killed by %v", ws.Signal())
		case got == pid:
			return fmt.Errorf("the agent ended with status %d", ws.ExitStatus())
		}
	}
}

// linkUp brings a network interface up; the kernel gives lo its addresses.
func linkUp(name string) error {
	if _, err := net.InterfaceByName(name); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	defer func() { _ = unix.Close(fd) }()
	req, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	if err := ioctlIfreq(fd, unix.SIOCGIFFLAGS, req); err != nil {
		return fmt.Errorf("bring %s up: read its flags: %w", name, err)
	}
	req.SetUint16(req.Uint16() | unix.IFF_UP)
	if err := ioctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	return nil
}

// powerOff ends the guest. Nothing is synced: its disk is thrown away.
func powerOff() {
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		complain(fmt.Errorf("power off: %w", err))
	}
	select {} // process 1 must not return; the host's time limit ends a guest that cannot power off
}
