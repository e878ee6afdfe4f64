package guest

import (
	"bytes"
	"io"
	"strings"
	"sync"
)

// tailSize is how much of the console is kept, in bytes: a kernel's panic report and what led to it.
const tailSize = 32 << 10

// tail keeps the end of what is written to it and passes everything on.
type tail struct {
	next io.Writer // may be nil

	mu  sync.Mutex // guards buf
	buf []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - tailSize; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	t.mu.Unlock()
	if t.next != nil {
		_, _ = t.next.Write(p) // a reader of the console that fails must not stop the guest
	}
	return len(p), nil
}

// lines is the end of the console, at most n lines, without carriage returns.
func (t *tail) lines(n int) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := strings.Split(string(bytes.TrimRight(bytes.ReplaceAll(t.buf, []byte("\r"), nil), "\n")), "\n")
	return strings.Join(all[max(0, len(all)-n):], "\n")
}
