package udp

import (
	"sync"

	"github.com/uverbsd/uverbsd/hca/roce"
)

const (
	// bufferSize is a packet's, whole cache lines.
	bufferSize = (roce.MaxPacket + 63) &^ 63
	// bufferCount bounds what a link lends out and receives into: 32 batches, 8 MiB.
	bufferCount = 32 * batchSize
)

// buffers are a link's, for packets that come in.
type buffers struct {
	slab []byte

	// mu guards what follows.
	mu     sync.Mutex
	some   sync.Cond // one came back, or the end
	free   []int32
	closed bool
}

func newBuffers() *buffers {
	p := &buffers{slab: make([]byte, bufferSize*bufferCount), free: make([]int32, bufferCount)}
	p.some.L = &p.mu
	for i := range p.free {
		p.free[i] = int32(bufferCount - 1 - i)
	}
	return p
}

// bytes is a buffer, roce.MaxPacket bytes long.
func (p *buffers) bytes(token int32) []byte {
	at := int(token) * bufferSize
	return p.slab[at : at+roce.MaxPacket : at+roce.MaxPacket]
}

// take fills tokens as far as there are buffers, and returns how many. If there are
// none and wait is set it waits for one; 0 then is the end.
func (p *buffers) take(tokens []int32, wait bool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for wait && len(p.free) == 0 && !p.closed {
		p.some.Wait()
	}
	n := min(len(tokens), len(p.free))
	rest := len(p.free) - n
	copy(tokens, p.free[rest:])
	p.free = p.free[:rest]
	return n
}

// give takes buffers back.
func (p *buffers) give(tokens ...int32) {
	p.mu.Lock()
	p.free = append(p.free, tokens...)
	p.mu.Unlock()
	p.some.Signal()
}

// ReleaseFrame gives a received packet's buffer back.
func (p *buffers) ReleaseFrame(token int) { p.give(int32(token)) }

// close ends every take that waits.
func (p *buffers) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.some.Broadcast()
}
