package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/integration/internal/agent"
	"github.com/uverbsd/uverbsd/integration/internal/payload"
	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

// portWait bounds the wait for the virtio-serial port, whose name arrives some time after its driver.
const portWait = 20 * time.Second

// agentMain serves the host until it closes the port.
func agentMain() error {
	node, err := findPort(wire.PortName, portWait)
	if err != nil {
		return err
	}
	// Blocking on purpose: the port's reads and writes sleep interruptibly, and no deadline is ever set on it.
	fd, err := unix.Open(node, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", node, err)
	}
	port := os.NewFile(uintptr(fd), node)
	defer func() { _ = port.Close() }()
	dir := "/run/uverbsd-guest"
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the agent's folder: %w", err)
	}
	hello, err := greeting()
	if err != nil {
		return err
	}
	return agent.Serve(port, agent.Config{Dir: dir, Cgroup: payload.Cgroup, Hello: hello, Log: logLine})
}

// findPort finds the port's node by its name in sysfs. Without udev there is no /dev/virtio-ports.
func findPort(name string, limit time.Duration) (string, error) {
	for deadline := time.Now().Add(limit); ; time.Sleep(diskTick) {
		files, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return "", err
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err == nil && string(bytes.TrimSpace(b)) == name {
				return "/dev/" + filepath.Base(filepath.Dir(f)), nil
			}
		}
		if time.Now().After(deadline) {
			return "", errors.New("no virtio-serial port " + name + " after " + limit.String())
		}
	}
}

func greeting() (wire.Hello, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return wire.Hello{}, fmt.Errorf("uname: %w", err)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return wire.Hello{}, fmt.Errorf("read the boot clock: %w", err)
	}
	return wire.Hello{Kernel: unix.ByteSliceToString(uts.Release[:]), UptimeMS: now.Nano() / 1e6}, nil
}
