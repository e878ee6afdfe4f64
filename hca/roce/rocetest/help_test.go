package rocetest_test

import (
	"runtime"
	"time"
)

// timePasses lets a bubble's clock run past the time that packets are held back.
func timePasses() { time.Sleep(time.Second) }

// yield lets others run; the test's own time limit bounds the wait.
func yield() { runtime.Gosched() }
