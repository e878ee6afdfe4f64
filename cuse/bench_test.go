package cuse_test

import (
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/cusetest"
)

// null is the smallest client there is: one WRITE, one reply, no allocation.
type null struct {
	k   *cusetest.Raw
	msg []byte
	buf [64]byte
}

func newNull(t testing.TB, cfg cuse.Config) *null {
	return newNullOn(t, &dev{}, cfg)
}

func newNullOn(t testing.TB, d *dev, cfg cuse.Config) *null {
	t.Helper()
	return newNullRaw(t, cusetest.NewRaw(t, d, cfg))
}

func newNullRaw(t testing.TB, k *cusetest.Raw) *null {
	t.Helper()
	if err := k.Handshake(); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- k.Session.Serve() }()
	t.Cleanup(func() {
		k.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	var buf [64]byte
	n := &null{k: k}
	_ = k.Send(cusetest.Message(abi.FuseInHeader{Opcode: abi.FuseOpen, Unique: 4, PID: 1}, make([]byte, 8)))
	if got, err := k.Recv(buf[:]); err != nil || got != 32 {
		t.Fatalf("open: %d bytes, %v", got, err)
	}
	in := make([]byte, 40)
	copy(in, buf[16:24])
	binary.NativeEndian.PutUint32(in[16:], 24)
	n.msg = cusetest.Message(abi.FuseInHeader{Opcode: abi.FuseWrite, Unique: 4, PID: 1}, in, make([]byte, 24))
	return n
}

func (n *null) command(t testing.TB) {
	u := binary.NativeEndian.Uint64(n.msg[8:]) + 2
	binary.NativeEndian.PutUint64(n.msg[8:], u)
	if err := n.k.Send(n.msg); err != nil {
		t.Fatal(err)
	}
	got, err := n.k.Recv(n.buf[:])
	if err != nil || got != 24 || binary.NativeEndian.Uint64(n.buf[8:]) != u {
		t.Fatalf("reply: %d bytes, %v", got, err)
	}
}

// pingPong is the floor: the same two messages between two threads that sleep.
func pingPong(t testing.TB, rounds int) time.Duration {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := unix.Read(fds[1], buf)
			if n == 0 || (err != nil && err != unix.EINTR) {
				return
			}
			_, _ = unix.Write(fds[1], buf[:24])
		}
	}()
	msg, buf := make([]byte, 104), make([]byte, 64)
	start := time.Now()
	for range rounds {
		_, _ = unix.Write(fds[0], msg)
		if _, err := unix.Read(fds[0], buf); err != nil {
			t.Fatal(err)
		}
	}
	d := time.Since(start)
	_ = unix.Close(fds[0])
	<-done
	_ = unix.Close(fds[1])
	return d
}

// BenchmarkNull is a null command's round trip, and its ratio to pingPong.
func BenchmarkNull(b *testing.B) {
	n := newNull(b, cuse.Config{})
	for range 100 {
		n.command(b)
	}
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		n.command(b)
	}
	b.StopTimer()
	d := b.Elapsed()
	floor := pingPong(b, b.N)
	b.ReportMetric(float64(floor.Nanoseconds())/float64(b.N), "pingpong-ns/op")
	b.ReportMetric(float64(d)/float64(floor), "ratio")
}

// BenchmarkNullSparse leaves a pause between commands, so that the reader sleeps.
func BenchmarkNullSparse(b *testing.B) {
	n := newNull(b, cuse.Config{})
	var busy time.Duration
	for range b.N {
		time.Sleep(500 * time.Microsecond)
		start := time.Now()
		n.command(b)
		busy += time.Since(start)
	}
	b.ReportMetric(float64(busy.Nanoseconds())/float64(b.N), "command-ns/op")
}

func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	n := newNull(t, cuse.Config{})
	for range 1000 {
		n.command(t)
	}
	if got := testing.AllocsPerRun(2000, func() { n.command(t) }); got != 0 {
		t.Errorf("%v allocations per command", got)
	}
}
