package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// atomic is one on the cell, which holds cell before it.
func (e *end) atomic(wr abi.SendWR, it item, cell uint64) abi.SendWR {
	id := wr.WRID
	at := e.peer.In + uint64(it.off)
	switch {
	case !it.cas:
		wr = rawverbs.Atomic(rawverbs.OpFetchAdd, at, e.peer.RKey, it.add, 0)
	case it.match:
		wr = rawverbs.Atomic(rawverbs.OpCmpSwap, at, e.peer.RKey, cell, it.add)
	default:
		wr = rawverbs.Atomic(rawverbs.OpCmpSwap, at, e.peer.RKey, ^cell, it.add)
	}
	wr.WRID = id
	return wr
}

// reap takes n completions, waiting as an application does: by polling, or, with
// a channel, by arming the CQ, polling once more, and sleeping.
func (e *end) reap(n int) ([]abi.WC, error) {
	var out []abi.WC
	for limit := time.Now().Add(patience); len(out) < n; {
		wc, ok, err := e.c.Poll(e.cq)
		if err != nil {
			return out, fmt.Errorf("poll: %w", err)
		}
		if ok {
			out = append(out, wc)
			continue
		}
		if time.Now().After(limit) {
			return out, fmt.Errorf("%d of %d completions after %v", len(out), n, patience)
		}
		if e.channel == rawverbs.NoChannel {
			continue
		}
		if !e.armed {
			if err := e.c.ReqNotify(e.cq); err != nil {
				return out, err
			}
			e.armed = true
			continue
		}
		if err := e.event(); err != nil {
			return out, fmt.Errorf("%d of %d completions: %w", len(out), n, err)
		}
		e.armed = false
	}
	return out, nil
}

// event waits for one at the channel and reads it.
func (e *end) event() error {
	fds := []unix.PollFd{{Fd: int32(e.channel), Events: unix.POLLIN}}
	for limit := time.Now().Add(patience); ; {
		left := time.Until(limit)
		if left <= 0 {
			return fmt.Errorf("an armed CQ, and no event after %v", patience)
		}
		n, err := unix.Poll(fds, int(left.Milliseconds())+1)
		if errors.Is(err, unix.EINTR) || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return fmt.Errorf("poll(2): %w", err)
		}
		break
	}
	var b [8]byte
	for {
		n, err := unix.Read(e.channel, b[:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if h := binary.NativeEndian.Uint64(b[:]); err != nil || n != len(b) || h != userHandle {
			return wrongError{fmt.Errorf("an event of %d bytes, of CQ %#x (%v)", n, h, err)}
		}
		e.events++
		return nil
	}
}
