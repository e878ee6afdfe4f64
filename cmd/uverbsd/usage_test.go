package main

import (
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"
)

// SIGUSR1 is answered with one line in the log, as often as it comes.
func TestUsage(t *testing.T) {
	core, logs := observer.New(zapcore.InfoLevel)
	d := &daemon{log: zap.New(core)}
	d.reportUsage()
	for n := 1; n <= 2; n++ {
		if err := unix.Kill(unix.Getpid(), unix.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		for limit := time.Now().Add(20 * time.Second); logs.FilterMessage("usage").Len() < n; time.Sleep(time.Millisecond) {
			if time.Now().After(limit) {
				t.Fatalf("no line after %d signals", n)
			}
		}
	}
	for _, e := range logs.All() {
		m := e.ContextMap()
		if g, _ := m["goroutines"].(int64); g < 2 {
			t.Errorf("%v goroutines", m["goroutines"])
		}
		if h, _ := m["heap_bytes"].(uint64); h == 0 {
			t.Errorf("a heap of %v bytes", m["heap_bytes"])
		}
	}
	if err := d.stop(); err != nil {
		t.Error(err)
	}
}
