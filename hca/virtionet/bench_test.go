package virtionet_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/virtionet"
)

func benchDevice(b testing.TB) (*device, *virtionet.Port) {
	d := newDevice(b)
	d.mtu, d.quiet = 9000, true
	return d, open(b, d, virtionet.Options{})
}

// refill is the fast device: what BenchmarkRecv measures should be the driver.
func (d *device) refill(frame []byte, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for range n {
		d.injectLocked(frame)
	}
}

func BenchmarkSend(b *testing.B) {
	for _, size := range []int{64, 1500, 4200} {
		for _, batch := range []int{1, 16} {
			b.Run(fmt.Sprintf("%dB/batch %d", size, batch), func(b *testing.B) {
				d, p := benchDevice(b)
				d.discard = true
				frames := make([][]byte, batch)
				for i := range frames {
					frames[i] = payload(i, size)
				}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				b.ResetTimer()
				for i := 0; i < b.N; i += batch {
					if _, err := p.Send(frames); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "frames/s")
			})
		}
	}
}

// Several goroutines send: they copy beside each other.
func BenchmarkSendParallel(b *testing.B) {
	d, p := benchDevice(b)
	d.discard = true
	b.SetBytes(4200)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		frames := [][]byte{payload(0, 4200)}
		for pb.Next() {
			if _, err := p.Send(frames); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func BenchmarkRecv(b *testing.B) {
	for _, batch := range []int{1, 16} {
		b.Run(fmt.Sprintf("batch %d", batch), func(b *testing.B) {
			d, p := benchDevice(b)
			frame := payload(1, 64)
			fs := make([]nic.Frame, batch)
			b.ReportAllocs()
			b.ResetTimer()
			for i := 0; i < b.N; i += batch {
				d.refill(frame, batch)
				n, err := p.Recv(fs)
				if err != nil || n != batch {
					b.Fatal(n, err)
				}
				for i := range fs {
					fs[i].Release()
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "frames/s")
		})
	}
}

// One waits for the other: sleep, interrupt, wake-up, or a look that finds it.
func BenchmarkPingPong(b *testing.B) {
	d, p := benchDevice(b)
	frame := payload(1, 64)
	came := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		var fs [1]nic.Frame
		for {
			if _, err := p.Recv(fs[:]); err != nil {
				return
			}
			fs[0].Release()
			came <- struct{}{}
		}
	})
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		d.inject(frame)
		<-came
	}
	b.StopTimer()
	p.Close()
	wg.Wait()
}

func TestNoAlloc(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes allocations of its own")
	}
	d, p := benchDevice(t)
	d.discard = true
	frames := [][]byte{payload(0, 64), payload(1, 4200)}
	fs := make([]nic.Frame, 4)
	if n := testing.AllocsPerRun(2000, func() {
		if _, err := p.Send(frames); err != nil {
			t.Fatal(err)
		}
		d.refill(frames[0], 2)
		n, err := p.Recv(fs)
		if err != nil {
			t.Fatal(err)
		}
		for i := range fs[:n] {
			fs[i].Release()
		}
	}); n != 0 {
		t.Errorf("%v allocations for two frames each way", n)
	}
}
