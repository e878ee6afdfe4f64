package e1000e_test

import (
	"fmt"
	"testing"

	"github.com/uverbsd/uverbsd/hca/e1000e"
	"github.com/uverbsd/uverbsd/hca/nic"
)

func BenchmarkSend(b *testing.B) {
	for _, size := range []int{64, 4200} {
		for _, batch := range []int{1, 32} {
			b.Run(fmt.Sprintf("%d bytes by %d", size, batch), func(b *testing.B) {
				d := newFake(msix)
				d.sink = true
				p := start(b, d, e1000e.Options{MTU: 4200})
				fs := make([][]byte, batch)
				for i := range fs {
					fs[i] = frame(nic.MAC{2}, size, 0)
				}
				// The model's own copy is none of it.
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for n := 0; n < b.N; n += batch {
					if k, err := p.Send(fs); k != batch || err != nil {
						b.Fatal(k, err)
					}
				}
			})
		}
	}
}

func BenchmarkRecv(b *testing.B) {
	for _, size := range []int{64, 4200} {
		for _, batch := range []int{1, 32} {
			b.Run(fmt.Sprintf("%d bytes by %d", size, batch), func(b *testing.B) {
				d := newFake(msix)
				p := start(b, d, e1000e.Options{MTU: 4200})
				f := frame(d.mac, size, 0)
				fs := make([]nic.Frame, batch)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for n := 0; n < b.N; n += batch {
					for range batch {
						if !d.inject(f) {
							b.Fatal("no room")
						}
					}
					for got := 0; got < batch; {
						k, err := p.Recv(fs)
						if err != nil {
							b.Fatal(err)
						}
						got += k
						release(fs[:k])
					}
				}
			})
		}
	}
}

// BenchmarkWake is a frame for a receiver that waits, there and back.
func BenchmarkWake(b *testing.B) {
	d := newFake(msix)
	p := start(b, d, e1000e.Options{})
	f := frame(d.mac, 64, 0)
	c := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		fs := make([]nic.Frame, 8)
		for {
			n, err := p.Recv(fs)
			if err != nil {
				return
			}
			release(fs[:n])
			c <- struct{}{}
		}
	}()
	b.ReportAllocs()
	for range b.N {
		d.inject(f)
		<-c
	}
	b.StopTimer()
	_ = p.Close()
	<-done
}
