package virtionet_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/virtionet"
)

// patience is how long what must happen may take.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	virtionet.SetTimes(50*time.Millisecond, 50*time.Millisecond, 5*time.Millisecond)
	// The runtime's own descriptors exist before the count.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	before := fds()
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if after := fds(); after != before && code == 0 {
		fmt.Fprintf(os.Stderr, "descriptors leaked:\nbefore %s\nafter  %s\n", before, after)
		code = 1
	}
	os.Exit(code)
}

func fds() string {
	ents, _ := os.ReadDir("/proc/self/fd")
	var l []string
	for _, e := range ents {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(to, "/proc/") {
			l = append(l, e.Name()+"="+to)
		}
	}
	return strings.Join(l, " ")
}

// open opens a port that is closed with the test, and its function with it.
func open(t testing.TB, d *device, o virtionet.Options) *virtionet.Port {
	t.Helper()
	p, err := virtionet.Open(d, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if n := d.times(); n != 1 {
			t.Errorf("function closed %d times", n)
		}
	})
	return p
}

// eventually waits for a state that nothing announces.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// soon fails the test instead of waiting for ever.
func soon[T any](t testing.TB, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatalf("never: %s", what)
		panic("unreachable")
	}
}

// recv receives one frame.
func recv(t testing.TB, p *virtionet.Port) nic.Frame {
	t.Helper()
	fs := make([]nic.Frame, 1)
	if n, err := p.Recv(fs); n != 1 || err != nil {
		t.Fatalf("received %d frames: %v", n, err)
	}
	return fs[0]
}

// payload is a frame of n bytes, of which every one tells where it is in which
// frame.
func payload(seed, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(seed*7 + i + i>>8)
	}
	return b
}

// waiters has n goroutines in Recv, whose ends come out of the channel. It returns
// once they are there, as far as can be seen.
func waiters(t testing.TB, p *virtionet.Port, n int) <-chan error {
	t.Helper()
	ends := make(chan error, n)
	ready := make(chan struct{}, n)
	for range n {
		go func() {
			ready <- struct{}{}
			var fs [4]nic.Frame
			for {
				k, err := p.Recv(fs[:])
				if err != nil {
					ends <- err
					return
				}
				for i := range fs[:k] {
					fs[i].Release()
				}
			}
		}()
	}
	for range n {
		soon(t, "a waiter starts", ready)
	}
	return ends
}

// ends checks that all waiters end so.
func ends(t testing.TB, ch <-chan error, n int, want error) {
	t.Helper()
	for range n {
		if err := soon(t, "Recv ends", ch); !errors.Is(err, want) {
			t.Errorf("Recv ended with %v, want %v", err, want)
		}
	}
}
