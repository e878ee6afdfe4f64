package ctxfs_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
)

// BenchmarkCommand is the round trip of a 24-byte command from another process,
// and its ratio to a ping-pong of as many bytes with the same process over two
// pipes, which is the same two wake-ups. Both ends of that sleep in the kernel at
// once: the floor.
func BenchmarkCommand(b *testing.B) {
	fs, a := mount(b, cuse.Config{}), arena(b)
	c := newClient(b, 0)
	fd := c.open(add(b, fs, a, 0, accept(newFile(nil))).Path())
	rounds := func(n int) int64 {
		r := c.do(ask{Op: "roundtrips", FD: fd, Data: command(24), Count: n})
		if r.Errno != 0 {
			b.Fatal(r.Errno)
		}
		return r.N
	}
	rounds(1000)
	const block = 1000 // in turns, so that what else the machine does hits both
	var ns, floor int64
	for left := b.N; left > 0; left -= block {
		n := min(left, block)
		b.StartTimer()
		ns += rounds(n)
		b.StopTimer()
		floor += pingPong(b, c, n)
	}
	b.ReportMetric(float64(ns)/float64(b.N), "command-ns")
	b.ReportMetric(float64(floor)/float64(b.N), "pingpong-ns")
	b.ReportMetric(float64(ns)/float64(floor), "ratio")
}

// pingPong answers the client over the two pipes that it has as fds 3 and 4.
func pingPong(b *testing.B, c *client, n int) int64 {
	b.Helper()
	c.send(ask{Op: "pingpong", Count: n})
	buf := make([]byte, 24)
	for range n {
		if m, err := unix.Read(c.pipeIn, buf); m != len(buf) {
			b.Fatal(m, err)
		}
		_, _ = unix.Write(c.pipeOut, buf)
	}
	return c.recv().N
}
