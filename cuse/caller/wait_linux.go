package caller

import (
	"time"

	"golang.org/x/sys/unix"
)

type stopKind int

const (
	eventStop   stopKind = iota // PTRACE_EVENT_STOP: our interrupt, or group stop
	syscallStop                 // entry or exit of a system call
	signalStop                  // a signal is about to be delivered
)

type stop struct {
	kind stopKind
	sig  unix.Signal // of a signalStop, to be passed on; 0 otherwise
}

const (
	// waitSpin is how long wait asks without sleeping. The thread needs some microseconds to its stop on another CPU, or
	// this one, which sched_yield lends it; a sleep costs at least the 50 µs of timer slack.
	waitSpin = 100 * time.Microsecond
	// waitSleepMin and waitSleepMax are the pauses after that, doubling.
	waitSleepMin = 20 * time.Microsecond
	waitSleepMax = time.Millisecond
)

// wait waits for the next stop of the thread until deadline (ErrExpired). ESRCH when it has died.
//
// It only looks (WNOWAIT): a stop is over when the thread is resumed, and the exit status of a client that died belongs to its
// parent.
//
// It polls. A blocking waitid cannot be bounded here: Go installs all its handlers with SA_RESTART, so no signal ends it; a helper
// thread that blocks in our place may stay there for ever; pidfds tell of exits, not of stops; and SIGCHLD is shared
// with whatever else in the daemon has children. Polling costs a few tens of microseconds, once per context or channel.
func (t *tracer) wait(deadline time.Time) (stop, error) {
	began := time.Now()
	pause := waitSleepMin
	for {
		st, err := waitPeek(t.tid)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECHILD: // the leader's id went to a thread in exec, and our thread died
			return stop{}, unix.ESRCH
		case err != nil:
			return stop{}, err
		case st.code != 0:
			return decodeStop(st)
		}
		now := time.Now()
		if now.After(deadline) {
			return stop{}, ErrExpired
		}
		if now.Sub(began) < waitSpin {
			unix.RawSyscallNoError(unix.SYS_SCHED_YIELD, 0, 0, 0)
			continue
		}
		ts := unix.NsecToTimespec(int64(pause))
		unix.Nanosleep(&ts, nil)
		pause = min(2*pause, waitSleepMax)
	}
}

// decodeStop reads what waitid says of a tracee (kernel/exit.c wait_task_stopped, wait_task_zombie).
func decodeStop(st waitState) (stop, error) {
	switch {
	case st.code != cldTrapped:
		return stop{}, unix.ESRCH
	case st.status>>8 != 0: // PTRACE_EVENT_STOP is the only event, since no option asks for others
		return stop{kind: eventStop}, nil
	case st.status == int32(unix.SIGTRAP|0x80): // PTRACE_O_TRACESYSGOOD
		return stop{kind: syscallStop}, nil
	default:
		return stop{kind: signalStop, sig: unix.Signal(st.status)}, nil
	}
}
