package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// daemon is what is looked at from outside.
type daemon struct {
	pid     int
	log     string
	program string
}

// daemonFromEnv takes the harness's word for where it is.
func daemonFromEnv() (*daemon, error) {
	d := &daemon{log: os.Getenv("UVERBSD_LOG"), program: os.Getenv("UVERBSD")}
	var err error
	if d.pid, err = strconv.Atoi(os.Getenv("UVERBSD_PID")); err != nil || d.log == "" || d.program == "" {
		return nil, fmt.Errorf("UVERBSD_PID, UVERBSD_LOG and UVERBSD do not name a daemon")
	}
	return d, nil
}

// usage is what the daemon has.
type usage struct {
	contexts   int
	pinned     uint64 // bytes, all contexts together
	fds        int
	threads    int
	goroutines int
	rssKiB     int
	heapKiB    int
}

func (u usage) String() string {
	return fmt.Sprintf("%d contexts, %d pinned bytes, %d descriptors, %d goroutines, %d threads, RSS %d KiB, heap %d KiB",
		u.contexts, u.pinned, u.fds, u.goroutines, u.threads, u.rssKiB, u.heapKiB)
}

// usage asks for all of it.
func (d *daemon) usage() (u usage, err error) {
	text, err := exec.Command(d.program, "status", "--json").Output()
	if err != nil {
		return u, fmt.Errorf("status: %w", err)
	}
	var devices []struct {
		Contexts []struct {
			Pinned uint64 `json:"pinned_bytes"`
		} `json:"contexts"`
	}
	if err := json.Unmarshal(text, &devices); err != nil {
		return u, fmt.Errorf("status: %w", err)
	}
	for _, dev := range devices {
		u.contexts += len(dev.Contexts)
		for _, c := range dev.Contexts {
			u.pinned += c.Pinned
		}
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.pid))
	if err != nil {
		return u, err
	}
	u.fds = len(fds)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.pid))
	if err != nil {
		return u, err
	}
	for l := range strings.Lines(string(status)) {
		f := strings.Fields(l)
		switch {
		case len(f) < 2:
		case f[0] == "VmRSS:":
			u.rssKiB, _ = strconv.Atoi(f[1])
		case f[0] == "Threads:":
			u.threads, _ = strconv.Atoi(f[1])
		}
	}
	u.goroutines, u.heapKiB, err = d.inside()
	return u, err
}

// usageLine is what the daemon logs at SIGUSR1.
var usageLine = regexp.MustCompile(`usage\s.*"goroutines": (\d+), "heap_bytes": (\d+)`)

// inside is what only the daemon itself can count.
func (d *daemon) inside() (goroutines, heapKiB int, err error) {
	f, err := os.Open(d.log)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = f.Close() }()
	end, err := f.Seek(0, 2)
	if err != nil {
		return 0, 0, err
	}
	if err := unix.Kill(d.pid, unix.SIGUSR1); err != nil {
		return 0, 0, fmt.Errorf("SIGUSR1 to the daemon: %w", err)
	}
	b := make([]byte, 64<<10)
	for limit := time.Now().Add(patience); time.Now().Before(limit); time.Sleep(redial) {
		n, _ := f.ReadAt(b, end)
		if m := usageLine.FindSubmatch(b[:n]); m != nil {
			goroutines, _ = strconv.Atoi(string(m[1]))
			heap, _ := strconv.Atoi(string(m[2]))
			return goroutines, heap >> 10, nil
		}
	}
	return 0, 0, fmt.Errorf("no usage in the daemon's log after SIGUSR1")
}
