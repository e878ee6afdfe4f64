package cuse

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// procKilled looks for SIGKILL among the signals pending on one thread. A fatal
// signal, exit_group and exec all put it there (kernel/signal.c complete_signal,
// zap_other_threads), and it stays while the thread waits for its reply.
func procKilled(tid uint32) bool {
	if tid == 0 {
		return false
	}
	b, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(tid), 10) + "/status")
	if err != nil {
		return false // gone, or not ours to read: the safe answer is to wait
	}
	key := []byte("\nSigPnd:")
	i := bytes.Index(b, key)
	if i < 0 {
		return false
	}
	line, _, _ := bytes.Cut(b[i+len(key):], []byte("\n"))
	set, err := strconv.ParseUint(string(bytes.TrimSpace(line)), 16, 64)
	return err == nil && set&(1<<(uint(unix.SIGKILL)-1)) != 0
}
