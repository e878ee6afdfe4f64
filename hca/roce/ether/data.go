package ether

import (
	"errors"
	"time"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// Send implements roce.Link. Where the port's ring is full it waits some milliseconds
// for room, so that a burst is not lost to our own side.
func (l *Link) Send(dst hca.GID, packets []roce.Buffer) error {
	if l.closed.Load() {
		return roce.ErrClosed
	}
	if dst.IsMulticast() {
		_, v4 := dst.IPv4()
		hd := l.header(groupMAC(dst), v4)
		return l.transmit(&hd, packets, true)
	}
	h := l.routes.find(dst)
	if h == nil || h.dead.Load() {
		if h = l.route(dst); h == nil {
			l.count.noRoute.Add(uint64(len(packets)))
			return nil
		}
	}
	hd := h.head.Load()
	if hd == nil {
		return l.hold(h, packets)
	}
	if h.stale.Load() && h.stale.CompareAndSwap(true, false) {
		l.ask(h)
	}
	return l.transmit(hd, packets, true)
}

// fits says whether a packet is one, and the link's MTU holds it.
func (l *Link) fits(p roce.Buffer) bool {
	if n := len(p) - roce.Headroom; n < ipv4Header+udpHeader || n > l.net.mtu {
		l.count.badPacket.Add(1)
		return false
	}
	return true
}

// transmit sends packets with that Ethernet header. If wait is false a full ring is not
// waited for.
func (l *Link) transmit(hd *head, packets []roce.Buffer, wait bool) error {
	b := l.batches.Get().(*batch)
	defer l.batches.Put(b)
	for len(packets) > 0 {
		n := 0
		for len(packets) > 0 && n < batchSize {
			if p := packets[0]; l.fits(p) {
				f := p[roce.Headroom-hd.n:]
				copy(f, hd.b[:hd.n])
				b.out[n] = f
				n++
			}
			packets = packets[1:]
		}
		sent, bytes, err := l.push(b.out[:n], wait)
		clear(b.out[:n])
		l.count.txPackets.Add(uint64(sent))
		l.count.txBytes.Add(uint64(bytes))
		if errors.Is(err, nic.ErrFull) {
			// The port does not get on: the rest would each wait as long.
			l.count.ringLost.Add(uint64(n - sent + len(packets)))
			return nil
		}
		if err != nil {
			return l.failed(err)
		}
	}
	return nil
}

// push gives frames to the port, and says how many it took, of how many bytes. Where
// the ring stays full it says nic.ErrFull; a frame that the port calls none is left out.
func (l *Link) push(frames [][]byte, wait bool) (sent, bytes int, err error) {
	for try := 0; len(frames) > 0; {
		n, err := l.port.Send(frames)
		n = min(max(n, 0), len(frames))
		for _, f := range frames[:n] {
			bytes += len(f)
		}
		sent += n
		frames = frames[n:]
		switch {
		case len(frames) == 0:
		case errors.Is(err, nic.ErrGone), errors.Is(err, nic.ErrClosed):
			return sent, bytes, err
		case err == nil || errors.Is(err, nic.ErrFull):
			if n > 0 {
				try = 0
			}
			if try++; !wait || try > ringTries || l.closed.Load() {
				return sent, bytes, nic.ErrFull
			}
			l.count.ringWaits.Add(1)
			time.Sleep(ringWait)
		default:
			l.count.badPacket.Add(1)
			frames = frames[1:]
		}
	}
	return sent, bytes, nil
}

// Recv implements roce.Link.
func (l *Link) Recv(rs []roce.Received) (int, error) {
	if len(rs) == 0 {
		return 0, nil
	}
	b := l.batches.Get().(*batch)
	defer l.batches.Put(b)
	for {
		if l.closed.Load() {
			return 0, roce.ErrClosed
		}
		fs := b.in[:min(len(rs), batchSize)]
		n, err := l.port.Recv(fs)
		got, bytes := 0, uint64(0)
		v := l.view.Load()
		for i := range fs[:n] {
			f := &fs[i]
			k, l3, end := v.classify(f.Data)
			switch k {
			case kindRoCE:
				rs[got] = roce.Received{IP: f.Data[l3:end:end], Buf: f.Buf, Token: f.Token}
				got++
				bytes += uint64(len(f.Data))
				*f = nic.Frame{}
				continue
			case kindStack:
				l.toStack(f.Data, l3)
			default:
				l.count.rx[k].Add(1)
			}
			f.Release()
		}
		if got > 0 {
			l.count.rxPackets.Add(uint64(got))
			l.count.rxBytes.Add(bytes)
			return got, nil
		}
		if err := l.failed(err); err != nil {
			return 0, err
		}
		if n == 0 {
			// A port that gives neither frames nor a reason would be asked for ever.
			return 0, roce.ErrGone
		}
	}
}
