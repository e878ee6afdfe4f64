package ctxfs_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(clientEnv) != "" {
		runClient()
		return
	}
	if dir := os.Getenv(daemonEnv); dir != "" {
		runDaemon(dir)
		return
	}
	before := fds()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		if after := fds(); after > before {
			fmt.Fprintf(os.Stderr, "fds: %d before, %d after\n", before, after)
			code = 1
		}
	}
	os.Exit(code)
}

// fds counts open descriptors, the runtime's own left out.
func fds() int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	n := 0
	for _, e := range list {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && to != "anon_inode:[eventpoll]" && to != "anon_inode:[eventfd]" {
			n++
		}
	}
	return n
}
