package virtionet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/uverbsd/uverbsd/hca/internal/ring"
	"github.com/uverbsd/uverbsd/hca/nic"
)

// Where a receive buffer, or a spare, is.
const (
	atHome  = iota // the device has it, or it waits to be posted
	lentOut        // a caller has it
	orphan         // a caller has it and the port is closed
)

const (
	// rxPad goes in front of a buffer, so that the IP header behind struct
	// virtio_net_hdr and an untagged Ethernet header is aligned to 8 bytes.
	rxPad = (-netHdr - ethHeader) & 7
	// cacheLine keeps buffers of two processors apart.
	cacheLine = 64
	// spareShare of the ring's entries is how many merged frames may be out.
	spareShare = 4
)

// rxQueue is a receive queue. Tokens below q.n are buffers, those from there on
// spares: plain memory that frames merged of several buffers are copied to
// (§5.1.6.4, VIRTIO_NET_F_MRG_RXBUF), as there are where buffers are smaller than
// frames.
type rxQueue struct {
	p      *Port
	event  *ring.Event   // of the interrupt; its leader's
	turn   chan struct{} // holds one: the lead
	spin   ring.Spinner  // the leader's
	state  []atomic.Uint32
	back   *ring.Stack // released, not yet posted
	irqs   atomic.Uint64
	foul   atomic.Uint64 // releases of what was not out
	dma    nic.DMA
	stride int
	size   int // of a buffer, header included
	merge  bool

	// mu guards the rest. A leaf.
	mu     sync.Mutex
	shut   bool
	q      *virtq
	spares [][]byte
	free   []int // spares, by token

	packets, bytes, dropped, bad uint64
}

// newRxQueue makes the queue with its buffers, none of them posted.
func newRxQueue(p *Port, entries, size int, merge bool) (*rxQueue, error) {
	q, err := newVirtq(p.t.fn, entries, p.features&fEventIdx != 0)
	if err != nil {
		return nil, err
	}
	r := &rxQueue{p: p, q: q, size: size, merge: merge, turn: make(chan struct{}, 1)}
	r.turn <- struct{}{}
	r.stride = (rxPad + size + cacheLine - 1) &^ (cacheLine - 1)
	if r.dma, err = alloc(p.t.fn, r.stride*entries); err != nil {
		return nil, err
	}
	tokens := entries
	if merge {
		for range max(entries/spareShare, 1) {
			r.spares = append(r.spares, make([]byte, p.maxFrame))
			r.free = append(r.free, tokens)
			tokens++
		}
	}
	r.state = make([]atomic.Uint32, tokens)
	r.back = ring.NewStack(tokens)
	for i := range entries {
		q.describe(i, r.dma.IOVA+uint64(i*r.stride+rxPad), size, fWrite, 0)
	}
	return r, nil
}

// fill posts all buffers, before there is traffic.
func (r *rxQueue) fill() {
	for i := range r.q.n {
		r.q.push(i)
	}
	r.q.publish()
}

// buffer is the first n bytes of buffer i.
func (r *rxQueue) buffer(i, n int) []byte {
	at := i*r.stride + rxPad
	return r.dma.Mem[at : at+n : at+n]
}

// mode is who takes frames. Only the leader, who sleeps, turns the interrupt on and
// off: nobody may turn off what another sleeps for.
type mode int

const (
	passing mode = iota // takes what is there
	leading             // turns the interrupt off if there is something
	dozing              // turns it on if there is nothing
)

// take fills fs with what has come.
func (r *rxQueue) take(fs []nic.Frame, m mode) (int, error) {
	r.mu.Lock()
	n, err := r.takeLocked(fs, m)
	if err != nil {
		r.bad++
		r.shut = true // nobody else is to stumble over it
		err = r.p.fail(err)
	}
	r.mu.Unlock()
	r.repost()
	return n, err
}

func (r *rxQueue) takeLocked(fs []nic.Frame, m mode) (n int, err error) {
	if r.shut {
		return 0, nil
	}
	r.postLocked()
	for armed := false; ; armed = true {
		pending, err := r.q.pending()
		if err != nil {
			return 0, err
		}
		for n < len(fs) && pending > 0 {
			used, err := r.frameLocked(&fs[n], pending)
			if err != nil {
				// What was taken before it is given back: the caller gets none.
				for i := range fs[:n] {
					r.state[fs[i].Token].Store(atHome)
					fs[i] = nic.Frame{}
				}
				return 0, err
			}
			pending -= used
			if fs[n].Buf != nil {
				n++
			}
		}
		if n > 0 && m != passing {
			r.q.disarm()
		}
		if n > 0 || m != dozing || armed {
			return n, nil
		}
		r.postLocked() // those that were dropped
		r.q.arm()
	}
}

// frameLocked takes one frame, of pending used buffers, and returns how many it took.
// f stays zero if the frame is dropped.
func (r *rxQueue) frameLocked(f *nic.Frame, pending int) (used int, err error) {
	i, size, err := r.popLocked()
	if err != nil {
		return 0, err
	}
	if size < netHdr {
		return 0, badDevice(fmt.Sprintf("queue %d: the device used a buffer for %d bytes, less than a header", r.q.index, size))
	}
	used = 1
	b := r.buffer(i, size)
	if r.merge {
		// The device may change it behind our back: it is read once.
		used = int(binary.LittleEndian.Uint16(b[hdrNumBuffer:]))
		if used < 1 || used > pending {
			return 0, badDevice(fmt.Sprintf("queue %d: the device says a frame is in %d buffers, of %d that it used", r.q.index, used, pending))
		}
	}
	data := b[netHdr:]
	if used > 1 {
		return used, r.mergeLocked(f, i, data, used-1)
	}
	if len(data) < ethHeader || len(data) > r.p.maxFrame {
		r.dropLocked(i)
		return used, nil
	}
	r.packets++
	r.bytes += uint64(len(data))
	r.state[i].Store(lentOut)
	*f = nic.Frame{Data: data, Buf: r, Token: i}
	return used, nil
}

// popLocked takes one used buffer with a sound length.
func (r *rxQueue) popLocked() (i, size int, err error) {
	i, n, err := r.q.pop()
	if err == nil && n > uint32(r.size) {
		err = badDevice(fmt.Sprintf("queue %d: the device used %d bytes of a buffer of %d", r.q.index, n, r.size))
	}
	return i, int(n), err
}

// dropLocked has buffer i posted again.
func (r *rxQueue) dropLocked(i int) {
	r.dropped++
	r.back.Push(i)
}

// mergeLocked copies a frame that goes on in more buffers to a spare.
func (r *rxQueue) mergeLocked(f *nic.Frame, i int, data []byte, more int) error {
	var spare []byte
	if n := len(r.free); n > 0 {
		spare = r.spares[r.free[n-1]-r.q.n]
	}
	n, whole := copy(spare, data), len(data)
	r.back.Push(i)
	for range more {
		i, size, err := r.popLocked()
		if err != nil {
			return err
		}
		n += copy(spare[n:], r.buffer(i, size))
		whole += size
		r.back.Push(i)
	}
	if n != whole || n < ethHeader { // no spare, too long, or too short
		r.dropped++
		return nil
	}
	token := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.packets++
	r.bytes += uint64(n)
	r.state[token].Store(lentOut)
	*f = nic.Frame{Data: spare[:n:n], Buf: r, Token: token}
	return nil
}

// postLocked gives the device what came back.
func (r *rxQueue) postLocked() {
	i := r.back.Take()
	if i == ring.None {
		return
	}
	for i != ring.None {
		next := r.back.Next(i)
		if i < r.q.n {
			r.q.push(i)
		} else {
			r.free = append(r.free, i)
		}
		i = next
	}
	r.q.publish()
}

// repost posts what came back while somebody else held the queue: he may have
// looked before it came. Whoever fails to get the lock leaves it to its holder, who
// comes here after he has given it up.
func (r *rxQueue) repost() {
	for !r.back.Empty() && r.mu.TryLock() {
		if r.shut {
			r.mu.Unlock()
			return
		}
		r.postLocked()
		r.mu.Unlock()
	}
}

// ReleaseFrame takes a frame's buffer back (nic.Releaser). A token that is not out is
// counted, and does no harm.
func (r *rxQueue) ReleaseFrame(token int) {
	switch {
	case token < 0 || token >= len(r.state):
		r.foul.Add(1)
	case r.state[token].CompareAndSwap(lentOut, atHome):
		r.back.Push(token)
		r.repost()
	case r.state[token].CompareAndSwap(orphan, atHome):
		_ = r.p.leave()
	default:
		r.foul.Add(1)
	}
}

// recv waits for frames.
func (r *rxQueue) recv(fs []nic.Frame) (int, error) {
	if n, err := r.take(fs, passing); n > 0 || err != nil {
		return n, err
	}
	select {
	case <-r.turn:
	case <-r.p.ended:
		return 0, r.p.over()
	}
	n, err := r.lead(fs)
	r.turn <- struct{}{}
	return n, err
}

// lead looks and sleeps for all who wait.
func (r *rxQueue) lead(fs []nic.Frame) (int, error) {
	start := time.Now()
	if budget := r.spin.Budget(); budget > 0 {
		for spent := time.Duration(0); spent <= budget; spent = time.Since(start) {
			if n, err := r.take(fs, leading); n > 0 || err != nil {
				r.spin.Caught(time.Since(start))
				return n, err
			}
			if err := r.p.over(); err != nil {
				return 0, err
			}
			runtime.Gosched() // what brings the next frame may need this processor
		}
		r.spin.Missed()
	}
	for slept := false; ; slept = true {
		n, err := r.take(fs, dozing)
		if err == nil && n == 0 {
			err = r.p.over()
		}
		if n > 0 || err != nil {
			if slept {
				r.spin.Slept(time.Since(start))
			}
			return n, err
		}
		switch {
		case r.event.Wait() > 0:
			r.irqs.Add(1)
		case r.p.over() == nil: // never; but it would go round and round
			return 0, r.p.fail(errors.New("its interrupt cannot be waited for"))
		}
	}
}

// close ends all use of the queue's memory by this side, but for the frames that are
// out: each holds one of the port's refs from here on.
func (r *rxQueue) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shut = true
	for i := range r.state {
		r.p.refs.Add(1) // before it can be released as an orphan
		if !r.state[i].CompareAndSwap(lentOut, orphan) {
			r.p.refs.Add(-1)
		}
	}
}
