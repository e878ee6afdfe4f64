package cuse

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	// logEvery: a mistake that repeats is logged once, then at most this often.
	logEvery = time.Minute
	// logKinds bounds the table of mistakes; they are places in the code.
	logKinds = 256
)

// limiter says whether a mistake is to be logged. Its lock is a leaf.
type limiter struct {
	mu   sync.Mutex
	seen map[string]*logged
}

type logged struct {
	at      time.Time
	skipped int
}

func (l *limiter) allow(kind string) (skipped int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.seen[kind]
	if e == nil {
		if l.seen == nil {
			l.seen = make(map[string]*logged)
		}
		if len(l.seen) >= logKinds {
			return 0, false
		}
		l.seen[kind] = &logged{at: time.Now()}
		return 0, true
	}
	if time.Since(e.at) < logEvery {
		e.skipped++
		return 0, false
	}
	skipped = e.skipped
	e.at, e.skipped = time.Now(), 0
	return skipped, true
}

// misuse logs what should not happen. It never ends anything.
func (s *Session) misuse(what string, fields ...zap.Field) {
	if skipped, ok := s.limit.allow(what); ok {
		s.cfg.Log.Error("cuse: "+what, append(fields, zap.Int("skipped", skipped))...)
	}
}

// panicked logs a recovered panic, once per place.
func (s *Session) panicked(in string, p any) {
	site := panicSite()
	if skipped, ok := s.limit.allow("panic at " + site); ok {
		s.cfg.Log.Error("cuse: panic in "+in, zap.String("panic", fmt.Sprint(p)), zap.String("at", site),
			zap.Int("skipped", skipped), zap.Stack("stack"))
	}
}

// panicSite is the function and line that panicked.
func panicSite() string {
	var pcs [32]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	below := false // below runtime.gopanic
	for {
		f, more := frames.Next()
		if inRuntime := strings.HasPrefix(f.Function, "runtime."); below && !inRuntime {
			return fmt.Sprintf("%s:%d", f.Function, f.Line)
		} else if f.Function == "runtime.gopanic" {
			below = true
		}
		if !more {
			return "unknown"
		}
	}
}

// callback runs a function of the handler's that replies to nothing by itself.
func (s *Session) callback(f func()) {
	defer func() {
		if p := recover(); p != nil {
			s.panicked("a callback", p)
		}
	}()
	f()
}
