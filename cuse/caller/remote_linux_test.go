package caller

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inject does for one write what the daemon does for GET_CONTEXT: seize, answer, open again; and then closes the fd.
func inject(w *fuseWrite) error {
	r, err := Seize(w.tid)
	if err != nil {
		w.reply()
		return err
	}
	return r.Run(w.reply, func(s *Stopped) error {
		fd, err := openAgain(s, unix.O_RDWR)
		if err != nil {
			return err
		}
		return s.Close(fd)
	})
}

func released(tid int) bool {
	st, err := readStatus(tid)
	return err != nil || st.tracerPid == 0
}

func TestOpenAgain(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "regs", srv.file)
	w := srv.next()
	r, err := Seize(w.tid)
	wantError(t, err, nil)
	err = r.Run(w.reply, func(s *Stopped) error {
		if n := w.answered.Load(); n != 1 {
			t.Errorf("%d answers", n)
		}
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", c.pid(), s.FD()))
		if err != nil || link != srv.file {
			t.Errorf("FD() = %d is %q: %v", s.FD(), link, err)
		}
		fd, err := openAgain(s, unix.O_RDWR|unix.O_NONBLOCK)
		if err != nil {
			return err
		}
		link, err = os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", c.pid(), fd))
		if err != nil || link != srv.file {
			t.Errorf("new fd %d is %q: %v", fd, link, err)
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", c.pid(), fd))
		var flags uint64
		if i := strings.Index(string(info), "flags:\t"); err == nil && i >= 0 {
			flags, _ = strconv.ParseUint(strings.Fields(string(info[i:]))[1], 8, 64)
		}
		if want := uint64(unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_RDWR); flags&want != want {
			t.Errorf("flags %#o lack %#o", flags, want)
		}
		if _, err := s.Open("/no/such/file", unix.O_RDONLY); !errors.Is(err, unix.ENOENT) {
			t.Errorf("open of a missing file: %v", err)
		}
		if err := s.Close(99); !errors.Is(err, unix.EBADF) {
			t.Errorf("close of a bad fd: %v", err)
		}
		if pid, err := s.Syscall(unix.SYS_GETPID); err != nil || pid != int64(c.pid()) {
			t.Errorf("getpid %d: %v", pid, err)
		}
		if _, err := s.Syscall(0, 1, 2, 3, 4, 5, 6, 7); !errors.Is(err, unix.EINVAL) {
			t.Errorf("seven arguments: %v", err)
		}
		return nil
	})
	wantError(t, err, nil)
	if n := srv.opens.Load(); n != 2 {
		t.Errorf("%d opens arrived", n)
	}
	c.expect("done") // the client found its registers, stack and signal mask as they were
	if !released(w.tid) {
		t.Error("still traced")
	}
}

func TestRegistersAndStackKept(t *testing.T) {
	srv := newFuse(t)
	const n = 100
	c := startClient(t, "regs", srv.file, strconv.Itoa(n))
	for range n {
		wantError(t, inject(srv.next()), nil)
	}
	c.expect("done")
}

// Row 25: a thread under a storm of signals. SIGALRM every millisecond; queued signals, which do not merge, are counted,
// each once and in order.
func TestStorm(t *testing.T) {
	srv := newFuse(t)
	const n = 1000
	c := startClient(t, "storm", srv.file, strconv.Itoa(n))
	sent := 0
	for i := range n {
		w := srv.next()
		send := func(k int) {
			for range k {
				for {
					err := sigqueue(c.pid(), 34, sent) // SIGRTMIN, as glibc has it
					if err == nil {
						sent++
						break
					}
					if !errors.Is(err, unix.EAGAIN) { // the queue's limit
						t.Fatal(err)
					}
				}
			}
		}
		send(i % 3)
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		send(1)
		err = r.Run(w.reply, func(s *Stopped) error {
			send(i % 2)
			fd, err := openAgain(s, unix.O_RDWR)
			if err != nil {
				return err
			}
			send(1)
			return s.Close(fd)
		})
		if err != nil {
			t.Fatalf("injection %d: %v", i, err)
		}
	}
	c.expect("looped")
	c.goOn()
	c.expect(fmt.Sprintf("alarms 1 queued %d disorder 0", sent))
	t.Logf("%d injections, %d queued signals, %d FUSE interrupts", n, sent, srv.interrupts.Load())
}

// Row 26.
func TestGoClient(t *testing.T) {
	srv := newFuse(t)
	const threads, writes = 8, 60
	c := startGo(t, "write", srv.file, strconv.Itoa(threads), strconv.Itoa(writes))
	errs := make(chan error, threads*writes)
	for range threads * writes {
		w := srv.next()
		go func() { errs <- inject(w) }()
	}
	for range threads * writes {
		wantError(t, <-errs, nil)
	}
	c.expect("done")
}

func TestSeccompRefused(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "seccomp", srv.file)
	w := srv.next()
	wantError(t, inject(w), ErrSeccomp)
	c.expect("done")
}

func TestTracedRefused(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "regs", srv.file, "2")
	w := srv.next()
	tracerTID, end := make(chan int), make(chan struct{})
	var trace func()
	trace = func() { // never unlocked: the OS thread ends and with it the trace
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the runtime would not end this one
			go trace()
			<-end
			return
		}
		if err := ptraceSeize(w.tid); err != nil {
			t.Error(err)
		}
		tracerTID <- unix.Gettid()
		<-end
	}
	go trace()
	tid := <-tracerTID
	_, err := Seize(w.tid)
	wantError(t, err, ErrTraced)
	if !strings.Contains(err.Error(), fmt.Sprintf("process %d", tid)) {
		t.Errorf("%v: does not name %d", err, tid)
	}
	w.reply()
	w = srv.next()
	close(end)
	eventually(t, "released", func() bool { return released(w.tid) })
	wantError(t, inject(w), nil)
	c.expect("done")
}

func TestNotInWrite(t *testing.T) {
	for _, mode := range []string{"int80", "sendfile"} {
		t.Run(mode, func(t *testing.T) {
			if mode == "int80" && !hasInt80(t) {
				t.Skip("int 0x80 faults on this machine: no client here can come that way")
			}
			srv := newFuse(t)
			c := startClient(t, mode, srv.file)
			wantError(t, inject(srv.next()), ErrNotInWrite)
			c.expect("result 64")
			c.expect("done")
		})
	}
}

// hasInt80 asks a process of its own whether the 32-bit entry works: some
// hypervisors' guests get SIGSEGV for it, whatever the kernel was built with.
func hasInt80(t *testing.T) bool {
	t.Helper()
	err := exec.Command(clientPath, "int80probe", os.DevNull).Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == unix.SIGSEGV {
		return false
	}
	wantError(t, err, nil)
	return true
}

func TestFailedWrite(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "regs", srv.file)
	w := srv.next()
	r, err := Seize(w.tid)
	wantError(t, err, nil)
	err = r.Run(func() { w.fail(unix.ENOMEM) }, func(*Stopped) error {
		t.Error("called")
		return nil
	})
	wantError(t, err, ErrWriteFailed)
	c.expect("write 0: -12")
}

// A write that was answered well can still be made to fail.
func TestFail(t *testing.T) {
	srv := newFuse(t)
	for _, after := range []bool{false, true} { // a system call
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		err = r.Run(w.reply, func(s *Stopped) error {
			wantError(t, s.Fail(0), unix.EINVAL)
			wantError(t, s.Fail(512), unix.EINVAL)
			wantError(t, s.Fail(unix.EIO), nil)
			if after {
				return openAndClose(s)
			}
			return nil
		})
		wantError(t, err, nil)
		c.expect("write 0: -5")
	}
}

// A write that the interrupt itself ends with ERESTARTSYS (a full pipe) is left to the kernel, which starts it again.
func TestRestartedWrite(t *testing.T) {
	fifo := t.TempDir() + "/fifo"
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(fifo, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	wantError(t, err, nil)
	defer unix.Close(fd)
	b := make([]byte, 4096)
	for err == nil {
		_, err = unix.Write(fd, b)
	}
	wantError(t, err, unix.EAGAIN)
	c := startClient(t, "regs", fifo, "1")
	eventually(t, "client blocks in write", func() bool { return inSyscall(c.pid(), unix.SYS_WRITE) })
	r, err := Seize(c.pid())
	wantError(t, err, nil)
	err = r.Run(func() {}, func(*Stopped) error { return nil })
	wantError(t, err, ErrWriteFailed)
	eventually(t, "client blocks in write again", func() bool { return inSyscall(c.pid(), unix.SYS_WRITE) })
	for err = nil; err == nil; {
		_, err = unix.Read(fd, b)
	}
	c.expect("done")
}

// inSyscall says whether the thread sleeps in system call nr.
func inSyscall(tid, nr int) bool {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", tid))
	return strings.HasPrefix(string(b), strconv.Itoa(nr)+" ")
}

func TestFDLimit(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "regs", srv.file)
	w := srv.next()
	wantError(t, unix.Prlimit(c.pid(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 4, Max: 4}, nil), nil)
	wantError(t, inject(w), unix.EMFILE)
	c.expect("done")
}

func TestKilled(t *testing.T) {
	kill := func(c *client) {
		if err := unix.Kill(c.pid(), unix.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	stages := map[string]func(t *testing.T, srv *fuseServer, c *client, w *fuseWrite){
		"before seize": func(t *testing.T, srv *fuseServer, c *client, w *fuseWrite) {
			kill(c)
			if inject(w) == nil {
				t.Error("no error")
			}
		},
		"before reply": func(t *testing.T, srv *fuseServer, c *client, w *fuseWrite) {
			r, err := Seize(w.tid)
			wantError(t, err, nil)
			kill(c)
			err = r.Run(w.reply, func(*Stopped) error { return errors.New("called") })
			wantError(t, err, unix.ESRCH)
		},
		"while stopped": func(t *testing.T, srv *fuseServer, c *client, w *fuseWrite) {
			r, err := Seize(w.tid)
			wantError(t, err, nil)
			err = r.Run(w.reply, func(s *Stopped) error {
				kill(c)
				_, err := openAgain(s, unix.O_RDWR)
				if err == nil {
					t.Error("no error")
				}
				_, err = openAgain(s, unix.O_RDWR)
				if err == nil {
					t.Error("no error")
				}
				return nil
			})
			wantError(t, err, unix.ESRCH)
		},
		"in the injected call": func(t *testing.T, srv *fuseServer, c *client, w *fuseWrite) {
			srv.holdOpens.Store(true)
			r, err := Seize(w.tid)
			wantError(t, err, nil)
			done := make(chan struct{})
			go func() {
				defer close(done)
				unique := <-srv.held
				kill(c)
				srv.answerOpen(unique)
			}()
			err = r.Run(w.reply, func(s *Stopped) error {
				_, err := openAgain(s, unix.O_RDWR)
				return err
			})
			<-done
			wantError(t, err, unix.ESRCH)
		},
	}
	for name, f := range stages {
		t.Run(name, func(t *testing.T) {
			srv := newFuse(t)
			c := startClient(t, "regs", srv.file)
			w := srv.next()
			f(t, srv, c, w)
			if n := w.answered.Load(); n != 1 {
				t.Errorf("%d answers", n)
			}
			if s := c.line(); s != "" {
				t.Errorf("client says %q", s)
			}
			err := c.cmd.Wait() // its parent gets its status
			if err == nil || !c.cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() {
				t.Errorf("exit status %v", c.cmd.ProcessState)
			}
		})
	}
}

// Killed at any time, without an arranged order.
func TestKilledAnyTime(t *testing.T) {
	srv := newFuse(t)
	for range 60 {
		c := startClient(t, "regs", srv.file, "100000")
		done := make(chan struct{})
		w := srv.next()
		go func() {
			defer close(done)
			for {
				inject(w)
				select {
				case w = <-srv.writes:
				case <-time.After(100 * time.Millisecond):
					return
				}
			}
		}()
		time.Sleep(time.Duration(rand.Int64N(int64(3 * time.Millisecond)))) // the point of the test, not a synchronisation
		unix.Kill(c.pid(), unix.SIGKILL)
		<-done
		c.stop()
		if c.cmd.ProcessState == nil {
			t.Fatal("not reaped")
		}
	}
}

func TestStopSignals(t *testing.T) {
	stopped := func(c *client) func() bool {
		return func() bool {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.pid()))
			_, rest, _ := strings.Cut(string(b), ") ")
			return strings.HasPrefix(rest, "T")
		}
	}
	t.Run("before reply", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		unix.Kill(c.pid(), unix.SIGSTOP)
		wantError(t, r.Run(w.reply, openAndClose), nil)
		eventually(t, "stopped", stopped(c))
		unix.Kill(c.pid(), unix.SIGCONT)
		c.expect("done")
	})
	t.Run("in the injected call", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		srv.holdOpens.Store(true)
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		go func() {
			unique := <-srv.held
			unix.Kill(c.pid(), unix.SIGSTOP)
			srv.answerOpen(unique)
		}()
		wantError(t, r.Run(w.reply, openAndClose), nil)
		eventually(t, "stopped", stopped(c))
		unix.Kill(c.pid(), unix.SIGCONT)
		c.expect("done")
	})
	t.Run("interrupts a sleeping call", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		err = r.Run(w.reply, func(s *Stopped) error {
			go func() {
				eventually(t, "in pause", func() bool { return inSyscall(w.tid, unix.SYS_PPOLL) })
				unix.Kill(c.pid(), unix.SIGSTOP)
			}()
			_, err := s.SyscallWithin(300*time.Millisecond, unix.SYS_PPOLL)
			wantError(t, err, ErrExpired) // it was started again after the stop, and then our own bound ended it
			return openAndClose(s)
		})
		wantError(t, err, nil)
		eventually(t, "stopped", stopped(c))
		unix.Kill(c.pid(), unix.SIGCONT)
		c.expect("done")
	})
	t.Run("continued meanwhile", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		err = r.Run(w.reply, func(s *Stopped) error {
			for range 20 {
				unix.Kill(c.pid(), unix.SIGSTOP)
				if err := openAndClose(s); err != nil {
					return err
				}
				unix.Kill(c.pid(), unix.SIGCONT)
			}
			return nil
		})
		wantError(t, err, nil)
		c.expect("done")
	})
}

func openAndClose(s *Stopped) error {
	fd, err := openAgain(s, unix.O_RDWR)
	if err != nil {
		return err
	}
	return s.Close(fd)
}

func TestBounds(t *testing.T) {
	t.Run("sleeping call", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		err = r.Run(w.reply, func(s *Stopped) error {
			_, err := s.SyscallWithin(20*time.Millisecond, unix.SYS_PPOLL)
			wantError(t, err, ErrExpired)
			return openAndClose(s) // the thread is still ours
		})
		wantError(t, err, nil)
		c.expect("done")
	})
	t.Run("stuck call", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		srv.holdOpens.Store(true)
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		err = r.Run(w.reply, func(s *Stopped) error {
			err := s.Scratch([]byte("/proc/self/fd/"+strconv.Itoa(s.FD())+"\x00"), func(addr uint64) error {
				at := unix.AT_FDCWD
				_, err := s.SyscallWithin(20*time.Millisecond, unix.SYS_OPENAT, uintptr(at), uintptr(addr), unix.O_RDWR, 0)
				return err
			})
			wantError(t, err, ErrExpired)
			_, err = s.Syscall(unix.SYS_GETPID)
			wantError(t, err, ErrExpired)
			return nil
		})
		wantError(t, err, ErrExpired)
		// It comes back to its own registers whenever the call ends, without the file and to a write that failed.
		srv.answerOpen(<-srv.held)
		c.expect("write 0: -5")
		eventually(t, "released", func() bool { return released(w.tid) })
	})
	t.Run("idle daemon", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		tr := newTracer(w.tid)
		tr.stoppedLimit = 20 * time.Millisecond
		r, err := tr.start()
		wantError(t, err, nil)
		err = r.Run(w.reply, func(s *Stopped) error {
			wantError(t, openAndClose(s), nil)
			c.expect("write 0: -5") // while we are in here
			wantError(t, s.ReadMem(0, nil), ErrExpired)
			wantError(t, openAndClose(s), ErrExpired)
			return nil
		})
		wantError(t, err, ErrExpired)
	})
	t.Run("forgotten", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file, "2")
		w := srv.next()
		tr := newTracer(w.tid)
		tr.replyTimeout = 20 * time.Millisecond
		r, err := tr.start()
		wantError(t, err, nil)
		eventually(t, "released", func() bool { return released(w.tid) })
		wantError(t, r.Run(w.reply, openAndClose), ErrExpired)
		wantError(t, inject(srv.next()), nil)
		c.expect("done")
	})
	t.Run("cancelled", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		r.Cancel()
		wantError(t, r.Run(w.reply, openAndClose), ErrFinished)
		c.expect("done")
		eventually(t, "released", func() bool { return released(w.tid) })
	})
	t.Run("answer never arrives", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "regs", srv.file)
		w := srv.next()
		tr := newTracer(w.tid)
		tr.firstStopTimeout = 20 * time.Millisecond
		r, err := tr.start()
		wantError(t, err, nil)
		wantError(t, r.Run(func() {}, openAndClose), ErrExpired)
		eventually(t, "released", func() bool { return released(w.tid) })
		w.reply()
		c.expect("done")
	})
	// The deadlock that ptrace(2) knows: exec holds what PTRACE_SEIZE waits for, and waits for our thread.
	t.Run("exec of another thread", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "threadexec", srv.file)
		w := srv.next()
		c.goOn()
		eventually(t, "in exec", func() bool { return inSyscall(c.pid(), unix.SYS_EXECVE) })
		_, err := Seize(w.tid)
		wantError(t, err, ErrExpired)
		w.reply()
		c.addr() // the new image is up
	})
}

func TestPanics(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "regs", srv.file, "3")
	try := func(w *fuseWrite, reply func(), fn func(*Stopped) error) (v any) {
		r, err := Seize(w.tid)
		wantError(t, err, nil)
		defer func() { v = recover() }()
		r.Run(reply, fn)
		return nil
	}
	w := srv.next()
	if v := try(w, w.reply, func(*Stopped) error { panic("fn") }); v != "fn" {
		t.Errorf("panic %v", v)
	}
	w = srv.next()
	if v := try(w, func() { w.reply(); panic("reply") }, openAndClose); v != "reply" {
		t.Errorf("panic %v", v)
	}
	w = srv.next()
	eventually(t, "released", func() bool { return released(w.tid) })
	var kept *Stopped
	r, err := Seize(w.tid)
	wantError(t, err, nil)
	wantError(t, r.Run(w.reply, func(s *Stopped) error { kept = s; return nil }), nil)
	wantError(t, openAndClose(kept), ErrFinished)
	c.expect("done")
}

// The process's first thread cannot be ended by the runtime, so the tracer must not run on it.
func TestManyAtOnce(t *testing.T) {
	srv := newFuse(t)
	const clients, writes = 12, 30
	var cs []*client
	for range clients {
		cs = append(cs, startClient(t, "regs", srv.file, strconv.Itoa(writes)))
	}
	errs := make(chan error, clients*writes)
	for range clients * writes {
		w := srv.next()
		go func() { errs <- inject(w) }()
	}
	for range clients * writes {
		wantError(t, <-errs, nil)
	}
	for _, c := range cs {
		c.expect("done")
	}
}

// Without bound of its own, for a look at what one costs.
func BenchmarkInject(b *testing.B) {
	srv := newFuse(b)
	startClient(b, "regs", srv.file, strconv.Itoa(1<<30))
	b.ResetTimer()
	for range b.N {
		w := srv.next()
		if err := inject(w); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
}

// openAgain has the client open its own file once more.
func openAgain(s *Stopped, flags int) (int, error) {
	return s.Open("/proc/thread-self/fd/"+strconv.Itoa(s.FD()), flags)
}
