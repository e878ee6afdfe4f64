package caller

import (
	"fmt"
	"os"
	"testing"
)

// BenchmarkMemory compares the two ways into a client's memory.
func BenchmarkMemory(b *testing.B) {
	c := startClient(b, "arena", "/dev/null", "256")
	m := c.addr()
	p, th := open(b, c.pid()), Thread(c.pid())
	for _, n := range []int{64, 4096, 65536, 1 << 18, 1 << 20} {
		buf := make([]byte, n)
		for _, w := range []struct {
			name string
			f    func([]byte, uint64) error
		}{{"Thread.Write", th.Write}, {"Process.WriteAt", p.WriteAt}, {"Thread.Read", th.Read}, {"Process.ReadAt", p.ReadAt}} {
			b.Run(fmt.Sprintf("%s/%d", w.name, n), func(b *testing.B) {
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					if err := w.f(buf, m); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func BenchmarkCredsCheck(b *testing.B) {
	c := startClient(b, "idle", "/dev/null")
	c.expect("done")
	creds, err := ReadCreds(c.pid(), c.pid(), 0, 0)
	wantError(b, err, nil)
	for b.Loop() {
		if err := creds.Check(c.pid(), 0, 0); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAlive(b *testing.B) {
	c := startClient(b, "idle", "/dev/null")
	c.expect("done")
	p := open(b, c.pid())
	for b.Loop() {
		p.Alive()
	}
}

func BenchmarkCheckImage(b *testing.B) {
	c := startClient(b, "idle", "/dev/null")
	c.expect("done")
	p := open(b, c.pid())
	for b.Loop() {
		if err := p.CheckImage(c.pid()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCheckRange(b *testing.B) {
	for _, n := range []int{1, 100, 65000} {
		c := startClient(b, "maps", "/dev/null", fmt.Sprint(n))
		m := c.addr()
		p := open(b, c.pid())
		for _, p.noQuery = range []bool{false, true} {
			b.Run(fmt.Sprintf("mappings=%d,maps=%v", n, p.noQuery), func(b *testing.B) {
				for b.Loop() {
					if err := p.CheckRange(m, uint64(n*os.Getpagesize()), false); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
