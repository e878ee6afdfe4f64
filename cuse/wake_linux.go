package cuse

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// wakeRounds of a ping-pong are measured; the quickest counts, since whatever
// else runs on the machine only adds.
const wakeRounds = 64

// wakeCost is what it takes to wake a thread that sleeps in the kernel: half a
// round trip between two threads over pipes, 10 ms in all on the slowest machine
// seen (an emulated guest). 0 if it cannot be measured.
func wakeCost() time.Duration {
	var there, back [2]int
	if unix.Pipe2(there[:], unix.O_CLOEXEC) != nil {
		return 0
	}
	if unix.Pipe2(back[:], unix.O_CLOEXEC) != nil {
		closeAll(there[0], there[1])
		return 0
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var b [1]byte
		for {
			if n, err := unix.Read(there[0], b[:]); n != 1 || err != nil {
				break
			}
			_, _ = unix.Write(back[1], b[:])
		}
		closeAll(back[1], there[0]) // ends the other's wait, if it has one
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	best := time.Duration(-1)
	var b [1]byte
	for range wakeRounds {
		start := time.Now()
		_, _ = unix.Write(there[1], b[:])
		if n, err := unix.Read(back[0], b[:]); n != 1 || err != nil {
			break
		}
		if d := time.Since(start); best < 0 || d < best {
			best = d
		}
	}
	closeAll(there[1])
	<-done
	closeAll(back[0])
	return max(best, 0) / 2
}

func closeAll(fds ...int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
