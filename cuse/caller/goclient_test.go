package caller

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// goClient is the test binary in the role of a client.
func goClient(mode string) int {
	err := fmt.Errorf("unknown mode %q", mode)
	switch mode {
	case "write": // FILE THREADS WRITES
		err = goWrite()
	case "unprivileged": // PID TID
		err = goUnprivileged()
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("done")
	return 0
}

// goWrite writes from many goroutines under what makes Go programs special: preemption signals, a moving scheduler, the
// garbage collector, growing stacks.
func goWrite() error {
	threads, _ := strconv.Atoi(os.Args[2])
	writes, _ := strconv.Atoi(os.Args[3])
	fd, err := unix.Open(os.Args[1], unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	var noise, work sync.WaitGroup
	noise.Go(func() {
		tick := time.NewTicker(200 * time.Microsecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				runtime.GC() // stops the world by SIGURG
			}
		}
	})
	errs := make(chan error, threads)
	for range threads {
		work.Go(func() {
			buf := make([]byte, 64)
			for i := range writes {
				if got := deep(fd, buf, i%50); got != len(buf) {
					errs <- fmt.Errorf("write: %d", got)
					return
				}
			}
		})
	}
	work.Wait()
	close(stop)
	noise.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

// deep makes the write at varying distances from the end of the goroutine's stack, and checks what lies around it.
func deep(fd int, buf []byte, depth int) int {
	var local [24]int
	for i := range local {
		local[i] = depth*100 + i
	}
	var n int
	if depth > 0 {
		n = deep(fd, buf, depth-1)
	} else {
		n, _ = unix.Write(fd, buf)
	}
	for i := range local {
		if local[i] != depth*100+i {
			return -1000 - depth
		}
	}
	return n
}

func goUnprivileged() error {
	pid, _ := strconv.Atoi(os.Args[1])
	if err := syscall.Setresuid(65534, 65534, 65534); err != nil {
		return err
	}
	if _, err := OpenProcess(pid); !errors.Is(err, unix.EACCES) {
		return fmt.Errorf("OpenProcess: %v", err)
	}
	if err := Thread(pid).Read(make([]byte, 1), 4096); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("Thread.Read: %v", err)
	}
	if _, err := Seize(pid); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("Seize: %v", err)
	}
	return nil
}
