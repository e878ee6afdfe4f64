package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// row25: contexts are made while signals rain.
func row25(t *rowTest) {
	n := 30
	if t.long {
		n = 500
	}
	_, err := t.run(nil, nil, "storm", t.node, fmt.Sprint(n))
	t.check("contexts under a storm, none of its signals lost", err)
	t.check("killed in the middle of it", func() error {
		for i := range 10 {
			v, err := startRole(nil, nil, "opens", t.node)
			if err != nil {
				return err
			}
			if _, err := v.line(); err != nil {
				return err
			}
			time.Sleep(time.Duration(i*3) * time.Millisecond) // a moment of its own, not a wait for anything
			if err := v.kill(); err != nil {
				return err
			}
		}
		return nil
	}())
	t.works("afterwards")
}

// roleOpens makes contexts until it is killed.
func roleOpens(args []string) error {
	for said := false; ; said = true {
		c, err := rawverbs.OpenContext(args[0])
		if err != nil {
			return err
		}
		c.Close()
		if !said {
			say("opening")
		}
	}
}

// roleStorm makes contexts under SIGALRM and SIGCHLD, with one SIGUSR1 aimed at
// each GET_CONTEXT's own thread: each must arrive.
func roleStorm(args []string) error {
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	usr := make(chan os.Signal, 1)
	signal.Notify(usr, syscall.SIGUSR1)
	var alarms atomic.Int64
	rain := make(chan os.Signal, 1024)
	signal.Notify(rain, syscall.SIGALRM, syscall.SIGCHLD)
	go func() {
		for range rain {
			alarms.Add(1)
		}
	}()
	tick := unix.Itimerval{Interval: unix.Timeval{Usec: 3000}, Value: unix.Timeval{Usec: 3000}}
	if _, err := unix.Setitimer(unix.ITIMER_REAL, tick); err != nil {
		return err
	}
	runtime.LockOSThread()
	pid, tid := os.Getpid(), unix.Gettid()
	for i := range n {
		go func() {
			time.Sleep(time.Duration(i%7) * 200 * time.Microsecond) // a different moment each time
			_ = unix.Kill(pid, unix.SIGCHLD)
			_ = unix.Tgkill(pid, tid, unix.SIGUSR1)
		}()
		c, err := rawverbs.OpenContext(args[0])
		if err != nil {
			return fmt.Errorf("context %d: %w", i, err)
		}
		select {
		case <-usr:
		case <-time.After(patience):
			return fmt.Errorf("context %d: its signal was lost", i)
		}
		if s := state(); strings.ContainsAny(s, "Tt") {
			return fmt.Errorf("context %d: left stopped: %s", i, s)
		}
		c.Close()
	}
	before := alarms.Load()
	return eventually("the alarms go on", func() bool { return alarms.Load() > before })
}

// state is the State and TracerPid of this process, if they are not as usual.
func state() string {
	b, _ := os.ReadFile("/proc/self/status")
	for l := range strings.Lines(string(b)) {
		if f := strings.Fields(l); len(f) > 1 && f[0] == "State:" {
			return f[1]
		}
	}
	return ""
}

// row26: a Go program, which interrupts itself with SIGURG all the time, makes
// one context after another.
func row26(t *rowTest) {
	n := 150
	if t.long {
		n = 1000
	}
	var stop atomic.Bool
	var sum atomic.Uint64
	defer stop.Store(true)
	for range 2 {
		go func() { // never yields by itself
			for x := uint64(1); !stop.Load(); x++ {
				sum.Add(x * x)
			}
		}()
	}
	t.check(fmt.Sprintf("%d contexts while goroutines are preempted", n), func() error {
		for i := range n {
			c, err := rawverbs.OpenContext(t.node)
			if err != nil {
				return fmt.Errorf("context %d: %w", i, err)
			}
			if _, err := c.QueryPort(1); err != nil {
				return fmt.Errorf("context %d: %w", i, err)
			}
			c.Close()
			if i%10 == 0 {
				runtime.GC()
			}
		}
		return nil
	}())
}

// row31: flags set later, signals, and no descriptors left.
func row31(t *rowTest) {
	c := t.open()
	if c == nil {
		return
	}
	defer c.Close()
	ch, err := c.CreateChannel()
	t.check("create a channel", err)
	if err != nil {
		return
	}
	defer unix.Close(ch)
	flags, err := unix.FcntlInt(uintptr(ch), unix.F_GETFD, 0)
	if err == nil && flags&unix.FD_CLOEXEC == 0 {
		err = errors.New("it is not")
	}
	t.check("the channel is close-on-exec", err)
	for _, fd := range []int{ch, c.Async} {
		buf := make([]byte, 16)
		t.check("a signal ends a read", func() error {
			tid, done := make(chan int, 1), make(chan error, 1)
			usr := make(chan os.Signal, 1)
			signal.Notify(usr, syscall.SIGUSR1)
			defer signal.Stop(usr)
			go func() {
				runtime.LockOSThread()
				tid <- unix.Gettid()
				_, err := unix.Read(fd, buf)
				done <- err
			}()
			id := <-tid
			// Until the read has begun a signal is only taken by the handler.
			for end := time.Now().Add(patience); time.Now().Before(end); {
				_ = unix.Tgkill(os.Getpid(), id, unix.SIGUSR1)
				select {
				case err := <-done:
					return want(err, unix.EINTR)
				case <-time.After(20 * time.Millisecond):
				}
			}
			return errors.New("the read goes on")
		}())
		t.check("O_NONBLOCK set later counts", func() error {
			if err := unix.SetNonblock(fd, true); err != nil {
				return err
			}
			_, err := unix.Read(fd, buf)
			return want(err, unix.EAGAIN)
		}())
	}
	t.limit("CREATE_COMP_CHANNEL", func() error {
		fd, err := c.CreateChannel()
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	})
	fresh, err := rawverbs.Open(t.node)
	if err != nil {
		t.check("open", err)
		return
	}
	defer fresh.Close()
	t.limit("GET_CONTEXT", fresh.GetContext)
}

// limit runs f at the descriptor limit, where it must be EMFILE and leave
// nothing, and without it, where it must work.
func (t *rowTest) limit(what string, f func() error) {
	var lim unix.Rlimit
	before, err := rawverbs.NumFDs()
	if err == nil {
		err = unix.Getrlimit(unix.RLIMIT_NOFILE, &lim)
	}
	if err != nil {
		t.check(what, err)
		return
	}
	// Every number below the limit is taken: holes are filled first.
	var fill []int
	for {
		fd, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
		if err != nil || fd >= 200 {
			if err == nil {
				_ = unix.Close(fd)
			}
			break
		}
		fill = append(fill, fd)
	}
	err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 200, Max: lim.Max})
	got := f()
	err = errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &lim))
	for _, fd := range fill {
		_ = unix.Close(fd)
	}
	t.check(what+" at the descriptor limit", errors.Join(err, want(got, unix.EMFILE)))
	now, err := rawverbs.NumFDs()
	if err == nil && now != before {
		err = fmt.Errorf("%d descriptors, %d before", now, before)
	}
	t.check(what+" left nothing", err)
	t.check(what+" works again", eventually(what, func() bool { return f() == nil }))
}
