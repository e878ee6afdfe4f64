package e1000e_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/uverbsd/uverbsd/hca/e1000e"
	"github.com/uverbsd/uverbsd/hca/nic"
)

func TestMain(m *testing.M) {
	// The runtime's own poller comes first, so that it does not count.
	if r, w, err := os.Pipe(); err == nil {
		_, _ = r.Close(), w.Close()
	}
	before := fds()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		if after := fds(); after > before {
			fmt.Fprintf(os.Stderr, "fds: %d before, %d after\n", before, after)
			code = 1
		}
	}
	os.Exit(code)
}

func fds() int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	return len(list)
}

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// eventually looks until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

func wait[T any](t testing.TB, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Fatalf("%s: not within %v", what, patience)
	}
	return v
}

// start opens a port on a fake, and checks at the end that nothing is left.
func start(t testing.TB, d *fake, o e1000e.Options) *e1000e.Port {
	t.Helper()
	p, err := e1000e.Open(d, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { finish(t, d, p) })
	return p
}

func finish(t testing.TB, d *fake, p *e1000e.Port) {
	t.Helper()
	if err := p.Close(); err != nil && !d.masterStuck && !d.resetStuck {
		t.Error(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed != 1 {
		t.Errorf("function closed %d times", d.closed)
	}
	if d.master {
		t.Error("still bus master")
	}
	if !d.gone && d.regs[xIMS/4] != 0 {
		t.Errorf("interrupts %#x still unmasked", d.regs[xIMS/4])
	}
	if !d.gone && (d.is(xRCTL, 2) || d.is(xTCTL, 2)) {
		t.Error("units still on")
	}
	for _, f := range d.faults {
		t.Error("model: ", f)
	}
}

// frame is a frame to dst of n bytes, with a number and a pattern.
func frame(dst nic.MAC, n int, seq uint32) []byte {
	f := make([]byte, n)
	copy(f, dst[:])
	copy(f[6:], []byte{2, 0, 0, 0, 0, 1})
	f[12], f[13] = 0x08, 0x00
	if n >= 18 {
		binary.BigEndian.PutUint32(f[14:], seq)
		for i := 18; i < n; i++ {
			f[i] = byte(seq) + byte(i)
		}
	}
	return f
}

// check says whether it is frame seq, and what seq is.
func check(f []byte) (uint32, error) {
	if len(f) < 60 {
		return 0, fmt.Errorf("%d bytes", len(f))
	}
	seq := binary.BigEndian.Uint32(f[14:])
	for i := 18; i < len(f); i++ {
		if f[i] != byte(seq)+byte(i) {
			return seq, fmt.Errorf("frame %d differs at %d of %d", seq, i, len(f))
		}
	}
	return seq, nil
}

// recv takes n frames, which it must get.
func recv(t testing.TB, p *e1000e.Port, n int) []nic.Frame {
	t.Helper()
	type result struct {
		fs  []nic.Frame
		err error
	}
	c := make(chan result, 1)
	go func() {
		fs := make([]nic.Frame, n)
		got := 0
		for got < n {
			k, err := p.Recv(fs[got:])
			if err != nil {
				c <- result{fs[:got], err}
				return
			}
			got += k
		}
		c <- result{fs, nil}
	}()
	r := wait(t, fmt.Sprintf("%d frames", n), c)
	if r.err != nil {
		t.Fatal(r.err)
	}
	return r.fs
}

func release(fs []nic.Frame) {
	for i := range fs {
		fs[i].Release()
	}
}

func counter(t testing.TB, p *e1000e.Port, name string) uint64 {
	t.Helper()
	v, ok := p.Counters()[name]
	if !ok {
		t.Fatalf("no counter %s", name)
	}
	return v
}

var errNo = errors.New("no")
