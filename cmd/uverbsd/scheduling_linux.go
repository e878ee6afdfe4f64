package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// schedulingConfig is the daemon's place among the host's processes.
type schedulingConfig struct {
	// Nice is its nice value, -20 to 19.
	Nice int `toml:"nice"`
	// Processors is how many of its goroutines run at once (GOMAXPROCS); 0 is half of
	// the host's processors. What waits in a client's memory is not counted.
	Processors int `toml:"processors"`
}

// defaultNice puts the daemon before its clients. It does what a device does, and
// these poll for it: with as many pollers as processors a request otherwise waits for
// one's time slice to end (make bench: ping-pong 2,000 to 3,000 us instead of 800).
const defaultNice = -10

func (c schedulingConfig) check() error {
	if c.Nice < -20 || c.Nice > 19 {
		return fmt.Errorf("scheduling: nice %d is not in -20 to 19", c.Nice)
	}
	if c.Processors < 0 {
		return fmt.Errorf("scheduling: processors %d is negative", c.Processors)
	}
	return nil
}

// processors is what GOMAXPROCS is to be, of now. Half: the others are its clients',
// who poll, and a goroutine that looks for work on a second processor takes it from
// one of these.
func (c schedulingConfig) processors(now int) int {
	switch {
	case c.Processors > 0:
		return c.Processors
	case os.Getenv("GOMAXPROCS") != "":
		return now // somebody has decided
	}
	return max(now/2, 1)
}

// apply comes before anything else runs: the threads to come have their creators'
// nice value.
func (c schedulingConfig) apply(log *zap.Logger) {
	now := runtime.GOMAXPROCS(0)
	if n := c.processors(now); n != now {
		runtime.GOMAXPROCS(n)
	}
	if err := renice(c.Nice); err != nil {
		log.Warn("the daemon's clients may run before it: give it CAP_SYS_NICE, or set scheduling.nice", zap.Int("nice", c.Nice), zap.Error(err))
	}
}

// renice sets the nice value of each of the process's threads: on Linux it is the
// thread's (setpriority(2), C library/kernel differences). A thread that was made
// meanwhile may have the old value, so there is a second round.
func renice(nice int) error {
	for range 2 {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("set the nice value to %d: %w", nice, err)
		}
		for _, t := range tasks {
			tid, err := strconv.Atoi(t.Name())
			if err != nil {
				continue
			}
			if err := unix.Setpriority(unix.PRIO_PROCESS, tid, nice); err != nil && err != unix.ESRCH {
				return fmt.Errorf("set the nice value to %d: %w", nice, err)
			}
		}
	}
	return nil
}
