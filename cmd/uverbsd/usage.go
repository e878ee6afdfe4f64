package main

import (
	"os"
	"os/signal"
	"runtime"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// reportUsage logs, at every SIGUSR1, what only this process can count of
// itself: its goroutines and its heap. Descriptors, threads and resident memory
// are in /proc; SIGQUIT prints each goroutine, and ends the daemon.
func (d *daemon) reportUsage() {
	ask := make(chan os.Signal, 1)
	signal.Notify(ask, unix.SIGUSR1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range ask {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			d.log.Info("usage", zap.Int("goroutines", runtime.NumGoroutine()), zap.Uint64("heap_bytes", m.HeapAlloc))
		}
	}()
	d.onStop(func() error {
		signal.Stop(ask)
		close(ask)
		<-done
		return nil
	})
}
