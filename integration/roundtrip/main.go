// Command roundtrip measures, side by side in one run, a null command of the
// served node (a write that only fails validation) and a pipe ping-pong between
// two processes. It prints both and their ratio.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"sort"
	"time"

	"golang.org/x/sys/unix"
)

const echoArg = "echo"

func main() {
	if len(os.Args) == 2 && os.Args[1] == echoArg {
		echo(3, 4)
		return
	}
	node := flag.String("node", "/dev/infiniband/uverbs0", "the node to write to")
	rounds := flag.Int("rounds", 9, "alternating rounds")
	n := flag.Int("n", 2000, "round trips in a round")
	flag.Parse()
	if err := run(*node, *rounds, *n); err != nil {
		fmt.Fprintln(os.Stderr, "roundtrip:", err)
		os.Exit(1)
	}
}

func run(node string, rounds, n int) error {
	fd, err := unix.Open(node, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", node, err)
	}
	there, back, stop, err := startEcho()
	if err != nil {
		return err
	}
	defer stop()
	var cmd, pipe, ratio []float64
	for range rounds {
		p, err := timed(n, func() error { return pingPong(there, back) })
		if err != nil {
			return err
		}
		c, err := timed(n, func() error { return nullCommand(fd) })
		if err != nil {
			return err
		}
		cmd, pipe, ratio = append(cmd, c), append(pipe, p), append(ratio, c/p)
	}
	sort.Float64s(ratio)
	fmt.Printf("null command %.1f us, pipe ping-pong %.1f us, ratio %.2f (medians of %d rounds of %d; ratio %.2f to %.2f)\n",
		median(cmd), median(pipe), ratio[len(ratio)/2], rounds, n, ratio[0], ratio[len(ratio)-1])
	return nil
}

// timed is the mean time of f in microseconds.
func timed(n int, f func() error) (float64, error) {
	start := time.Now()
	for range n {
		if err := f(); err != nil {
			return 0, err
		}
	}
	return float64(time.Since(start).Nanoseconds()) / float64(n) / 1000, nil
}

func median(x []float64) float64 {
	sort.Float64s(x)
	return x[len(x)/2]
}

func startEcho() (there, back int, stop func(), err error) {
	r1, w1, err := os.Pipe()
	if err != nil {
		return 0, 0, nil, err
	}
	r2, w2, err := os.Pipe()
	if err != nil {
		return 0, 0, nil, err
	}
	c := exec.Command("/proc/self/exe", echoArg)
	c.ExtraFiles = []*os.File{r1, w2}
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		return 0, 0, nil, err
	}
	_ = r1.Close()
	_ = w2.Close()
	return int(w1.Fd()), int(r2.Fd()), func() { _ = w1.Close(); _ = c.Wait() }, nil
}
