package caller

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// testTimeout bounds every wait of a test: far above what a loaded two-CPU machine needs.
const testTimeout = 20 * time.Second

// clientPath is the compiled testdata/client.c.
var clientPath string

func TestMain(m *testing.M) {
	if mode := os.Getenv("CALLER_TEST_MODE"); mode != "" {
		os.Exit(goClient(mode))
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "caller")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	clientPath = filepath.Join(dir, "client")
	if out, err := exec.Command("gcc", "-O1", "-pthread", "-o", clientPath, "testdata/client.c").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "gcc: %v\n%s", err, out)
		return 1
	}
	mounts.abort = map[*fuseServer]func(){}
	before := openFDs()
	if code := m.Run(); code != 0 {
		return code
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if after := openFDs(); len(after) > len(before) {
		fmt.Fprintf(os.Stderr, "leaked fds:\nbefore %v\nafter  %v\n", before, after)
		return 1
	}
	return 0
}

// openFDs lists what the process has open, but for the Go runtime's own poller.
func openFDs() (list []string) {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || strings.Contains(to, "[eventpoll]") || strings.Contains(to, "[eventfd]") {
			continue
		}
		list = append(list, e.Name()+"="+to)
	}
	return list
}

// client is a child process that speaks in lines.
type client struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
}

// startClient runs the C client.
func startClient(t testing.TB, args ...string) *client {
	return start(t, exec.Command(clientPath, args...))
}

// startGo runs this test binary as a Go client.
func startGo(t testing.TB, mode string, args ...string) *client {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "CALLER_TEST_MODE="+mode)
	return start(t, cmd)
}

func start(t testing.TB, cmd *exec.Cmd) *client {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &client{t: t, cmd: cmd, in: in, lines: make(chan string, 64)}
	go func() {
		defer close(c.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			c.lines <- s.Text()
		}
	}()
	t.Cleanup(c.stop)
	return c
}

func (c *client) pid() int { return c.cmd.Process.Pid }

// line returns the client's next line, "" at its end.
func (c *client) line() string {
	c.t.Helper()
	select {
	case s := <-c.lines:
		return s
	case <-time.After(testTimeout):
		c.t.Fatal("client says nothing")
		return ""
	}
}

func (c *client) expect(want string) {
	c.t.Helper()
	if got := c.line(); got != want {
		c.t.Fatalf("client says %q, want %q", got, want)
	}
}

// goOn lets a client that awaits a line continue.
func (c *client) goOn() {
	c.t.Helper()
	if _, err := io.WriteString(c.in, "go\n"); err != nil {
		c.t.Fatal(err)
	}
}

// addr reads a line that is an address.
func (c *client) addr() (a uint64) {
	c.t.Helper()
	s := strings.TrimPrefix(c.line(), "image ")
	if _, err := fmt.Sscanf(s, "0x%x", &a); err != nil {
		c.t.Fatalf("client says %q, want an address", s)
	}
	return a
}

// mounts are the test file systems: a client that waits for a FUSE answer can be ended only by aborting those.
var mounts struct {
	sync.Mutex
	abort map[*fuseServer]func()
}

// stop ends the client and waits for it.
func (c *client) stop() {
	c.in.Close()
	c.cmd.Process.Kill()
	free := time.AfterFunc(time.Second, func() {
		mounts.Lock()
		defer mounts.Unlock()
		for _, abort := range mounts.abort {
			abort()
		}
	})
	defer free.Stop()
	for range c.lines {
	}
	c.cmd.Wait()
}

// wantError fails unless err is want (nil: no error).
func wantError(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

// eventually polls a condition that another process brings about.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(testTimeout); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}
