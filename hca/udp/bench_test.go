package udp_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// BenchmarkStream is packets one way over the loopback interface, in batches of 32,
// with at most 256 on the way.
func BenchmarkStream(b *testing.B) {
	for _, c := range []struct {
		name     string
		src, dst hca.GID
	}{{"IPv4", lo4a, lo4b}, {"IPv6", lo6a, lo6b}} {
		for _, size := range []int{64, 1024, 4096} {
			b.Run(fmt.Sprint(c.name, "/", size), func(b *testing.B) {
				from, to := loopback(b)
				const batch, window = 32, 256
				out := make([]roce.Buffer, batch)
				for i := range out {
					out[i] = seal(full(c.src, c.dst, i), size)
				}
				var got atomic.Int64
				room := make(chan struct{}, window)
				done := make(chan struct{})
				go func() {
					defer close(done)
					rs := make([]roce.Received, 64)
					credit := 0
					for {
						n, err := to.Recv(rs)
						if err != nil {
							return
						}
						for i := range rs[:n] {
							rs[i].Release()
						}
						got.Add(int64(n))
						for credit += n; credit >= batch; credit -= batch {
							room <- struct{}{}
						}
					}
				}()
				for range window / batch {
					room <- struct{}{}
				}
				b.ReportAllocs()
				b.SetBytes(int64(size))
				b.ResetTimer()
				for sent := 0; sent < b.N; sent += batch {
					<-room
					if err := from.Send(c.dst, out); err != nil {
						b.Fatal(err)
					}
				}
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "packets/s")
				to.Close()
				<-done
			})
		}
	}
}

// BenchmarkPingPong is a packet there and one back, each side waiting for it.
func BenchmarkPingPong(b *testing.B) {
	for _, c := range []struct {
		name     string
		src, dst hca.GID
	}{{"IPv4", lo4a, lo4b}, {"IPv6", lo6a, lo6b}} {
		b.Run(c.name, func(b *testing.B) {
			x, y := loopback(b)
			there, back := []roce.Buffer{seal(full(c.src, c.dst, 1), 64)}, []roce.Buffer{seal(full(c.dst, c.src, 1), 64)}
			done := make(chan struct{})
			go func() {
				defer close(done)
				rs := make([]roce.Received, 8)
				for {
					n, err := y.Recv(rs)
					if err != nil {
						return
					}
					for i := range rs[:n] {
						rs[i].Release()
						y.Send(c.src, back)
					}
				}
			}()
			rs := make([]roce.Received, 8)
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				if err := x.Send(c.dst, there); err != nil {
					b.Fatal(err)
				}
				n, err := x.Recv(rs)
				if err != nil {
					b.Fatal(err)
				}
				for i := range rs[:n] {
					rs[i].Release()
				}
			}
			b.StopTimer()
			y.Close()
			<-done
		})
	}
}
