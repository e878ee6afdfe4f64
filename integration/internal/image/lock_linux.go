package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockPoll is how often a wait for a lock looks again. flock has no wait that a context could end, and the wait is
// for a build of about a minute.
const lockPoll = 100 * time.Millisecond

// errLocked says that tryLock found the lock taken.
var errLocked = errors.New("locked by another process")

// tryLock locks path (a file, created if it is not there, or a folder) without waiting. The lock ends with
// the returned file, also if the process is killed.
func tryLock(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o644)
	if errors.Is(err, unix.EISDIR) {
		f, err = os.Open(path)
	}
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errLocked
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// lock waits for the exclusive lock on path until ctx ends; waiting is called once if it must wait.
func lock(ctx context.Context, path string, waiting func()) (*os.File, error) {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for first := true; ; first = false {
		f, err := tryLock(path, unix.LOCK_EX)
		if !errors.Is(err, errLocked) {
			return f, err
		}
		if first {
			waiting()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for lock %s: %w", path, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
