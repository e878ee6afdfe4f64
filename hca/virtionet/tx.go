package virtionet

import (
	"fmt"
	"sync"

	"github.com/uverbsd/uverbsd/hca/nic"
)

// txPad goes in front of a slot, so that the frame is aligned to 16 bytes for the
// copy.
const txPad = 4

// txQueue is a transmit queue. Descriptor i always points to slot i: a header of
// zeros (§5.1.6.2: no offload), then room for the largest frame.
type txQueue struct {
	p      *Port
	dma    nic.DMA
	stride int

	// mu guards the rest. A leaf.
	mu   sync.Mutex
	shut bool
	q    *virtq
	free []uint16
	// copying is how many are writing to slots they took, without mu. Once the queue
	// is shut the last of them closes idle.
	copying int
	idle    chan struct{}

	packets, bytes, dropped, full, bad uint64
}

func newTxQueue(p *Port, entries int) (*txQueue, error) {
	q, err := newVirtq(p.t.fn, entries, p.features&fEventIdx != 0)
	if err != nil {
		return nil, err
	}
	x := &txQueue{p: p, q: q, idle: make(chan struct{})}
	x.stride = (txPad + netHdr + p.maxFrame + cacheLine - 1) &^ (cacheLine - 1)
	if x.dma, err = alloc(p.t.fn, x.stride*entries); err != nil {
		return nil, err
	}
	for i := range entries {
		q.describe(i, x.dma.IOVA+uint64(i*x.stride+txPad), netHdr, 0, 0)
		x.free = append(x.free, uint16(entries-1-i))
	}
	return x, nil
}

// send sends up to txBatch frames and returns how many it took.
func (x *txQueue) send(frames [][]byte) (int, error) {
	var slots [txBatch]uint16
	x.mu.Lock()
	if x.shut {
		x.mu.Unlock()
		return 0, x.p.over()
	}
	if len(x.free) < len(frames) || x.q.nout >= txLazy {
		if err := x.reclaimLocked(); err != nil {
			x.bad++
			x.shut = true // nobody else is to stumble over it
			err = x.p.fail(err)
			x.mu.Unlock()
			return 0, err
		}
	}
	n := min(len(x.free), len(frames))
	if n < len(frames) {
		x.full++
	}
	if n == 0 {
		x.mu.Unlock()
		return 0, nic.ErrFull
	}
	rest := len(x.free) - n
	copy(slots[:n], x.free[rest:])
	x.free = x.free[:rest]
	x.copying++
	x.mu.Unlock()

	bytes := 0
	for i, s := range slots[:n] {
		bytes += copy(x.dma.Mem[int(s)*x.stride+txPad+netHdr:(int(s)+1)*x.stride], frames[i])
	}

	x.mu.Lock()
	defer x.mu.Unlock()
	x.copying--
	if x.shut {
		if x.copying == 0 {
			close(x.idle)
		}
		return 0, x.p.over()
	}
	for i, s := range slots[:n] {
		x.q.resize(int(s), netHdr+len(frames[i]))
		x.q.push(int(s))
	}
	x.q.publish()
	x.packets += uint64(n)
	x.bytes += uint64(bytes)
	if n < len(frames) {
		return n, nic.ErrFull
	}
	return n, nil
}

// reclaimLocked takes back the slots of frames that were sent. The lengths say
// nothing: there is nothing for the device to write.
func (x *txQueue) reclaimLocked() error {
	n, err := x.q.pending()
	for ; n > 0 && err == nil; n-- {
		var i int
		if i, _, err = x.q.pop(); err == nil {
			x.free = append(x.free, uint16(i))
		}
	}
	return err
}

// drop counts frames that found the link down.
func (x *txQueue) drop(n int) {
	x.mu.Lock()
	x.dropped += uint64(n)
	x.mu.Unlock()
}

// close waits until nobody writes to a slot.
func (x *txQueue) close() {
	x.mu.Lock()
	x.shut = true
	busy := x.copying > 0
	x.mu.Unlock()
	if busy {
		<-x.idle
	}
}

// sendable is how many of the frames in front can be sent, and why the next is
// none.
func sendable(frames [][]byte, most int) (int, error) {
	for i, f := range frames {
		if len(f) < ethHeader || len(f) > most {
			return i, fmt.Errorf("frame of %d bytes: has to be %d to %d: %w", len(f), ethHeader, most, einval)
		}
	}
	return len(frames), nil
}
