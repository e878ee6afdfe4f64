package udp

import (
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// Send sends packets from their sources to dst; see roce.Link. A packet goes out as
// it is: sealed, from one of the link's addresses, and to dst.
func (l *Link) Send(dst hca.GID, packets []roce.Buffer) error {
	if err := l.ended.Load(); err != nil {
		return *err
	}
	from := l.sources()
	defer from.mu.RUnlock()
	s := l.senders.Get().(*sender)
	defer l.senders.Put(s)
	s.to(dst, l.index)
	for len(packets) > 0 {
		// As many as have one source.
		var src *source
		n, bytes := 0, 0
		for n < min(len(packets), batchSize) {
			gid, why := l.check(dst, packets[n])
			if why != nil {
				if n > 0 {
					break
				}
				why.Add(1)
				l.count.txLost.Add(1)
				packets = packets[1:]
				continue
			}
			if src == nil {
				if src = from.find(gid); src == nil {
					l.count.txSource.Add(1)
					l.count.txLost.Add(1)
					packets = packets[1:]
					continue
				}
			} else if src.gid != gid {
				break
			}
			s.put(n, packets[n][roce.Headroom:])
			bytes += len(packets[n]) - roce.Headroom
			n++
		}
		if n > 0 {
			full := l.transmit(s, src.send, n, bytes)
			s.clear(n)
			if packets = packets[n:]; full {
				l.count.txFull.Add(uint64(len(packets)))
				l.count.txLost.Add(uint64(len(packets)))
				break
			}
		}
	}
	return nil
}

// sources are the link's, held for reading.
func (l *Link) sources() *sources {
	for {
		from := l.from.Load()
		from.mu.RLock()
		if !from.retired {
			return from
		}
		from.mu.RUnlock()
	}
}

// check looks at a packet's addresses: who sends it, or what counts its loss.
func (l *Link) check(dst hca.GID, b roce.Buffer) (src hca.GID, why *atomic.Uint64) {
	if len(b) < roce.Headroom+ipv4Size || len(b) > roce.Headroom+roce.MaxPacket {
		return src, &l.count.txBad
	}
	ip := b[roce.Headroom:]
	var to hca.GID
	switch {
	case ip[0] == v4First:
		src, to = hca.IPv4GID([4]byte(ip[v4Src:])), hca.IPv4GID([4]byte(ip[v4Dst:]))
	case ip[0]>>4 == 6 && len(ip) >= ipv6Size:
		src, to = hca.GID(ip[v6Src:]), hca.GID(ip[v6Dst:])
	default:
		return src, &l.count.txBad
	}
	if to != dst || (ip[0] == v4First) != (family(src) == unix.AF_INET) {
		return src, &l.count.txBad
	}
	return src, nil
}

// transmit sends n packets by a socket. What fails is lost; full says that the
// interface takes no more, so that the rest would wait for nothing.
func (l *Link) transmit(s *sender, fd, n, bytes int) (full bool) {
	lost := 0
	for at := 0; at < n; {
		sent, errno := s.send(fd, at, n)
		if at += sent; errno == 0 && sent > 0 {
			continue
		}
		if errno == unix.EINTR {
			continue
		}
		// The packet at at fails, the others may go.
		left := 1
		switch errno {
		case unix.EAGAIN:
			left, full = n-at, true
			l.count.txFull.Add(uint64(left))
		case unix.ENOBUFS, unix.ENOMEM:
			l.count.txFull.Add(1)
		case unix.EMSGSIZE:
			l.count.txLong.Add(1)
		case unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EADDRNOTAVAIL, unix.ENETDOWN, unix.ENODEV, unix.ENXIO:
			l.count.txRoute.Add(1)
		case unix.EPERM, unix.EACCES:
			l.count.txRefused.Add(1)
		default:
			l.count.txFailed.Add(1)
		}
		for i := at; i < at+left; i++ {
			bytes -= int(s.iovs[i].Len)
		}
		lost += left
		at += left
	}
	l.count.tx.Add(uint64(n - lost))
	l.count.txBytes.Add(uint64(bytes))
	if lost > 0 {
		l.count.txLost.Add(uint64(lost))
	}
	return full
}

// maxStreak is how many batches of one family are taken in a row while the other may
// have some too.
const maxStreak = 16

// Recv waits for packets; see roce.Link.
func (l *Link) Recv(rs []roce.Received) (int, error) {
	if len(rs) == 0 {
		return 0, nil
	}
	l.life.RLock()
	defer l.life.RUnlock()
	b := l.takeBatch()
	defer l.giveBatch(b)
	want := min(len(rs), batchSize)
	for {
		if err := l.ended.Load(); err != nil {
			return 0, *err
		}
		if b.filled < want {
			b.filled += l.pool.take(b.tokens[b.filled:want], b.filled == 0)
		}
		if b.filled == 0 {
			continue // the end
		}
		room := min(want, b.filled)
		if n := l.poll(b, rs[:room]); n > 0 {
			if (n == room || b.both) && l.waiting.Load() > 0 {
				l.rearm()
			}
			b.both = false
			return n, nil
		}
		if err := l.wait(b); err != nil {
			return 0, err
		}
	}
}

// poll takes what has come, from one socket.
func (l *Link) poll(b *batch, rs []roce.Received) int {
	if b.streak >= maxStreak {
		b.last, b.streak = 1-b.last, 0
	}
	for range len(l.rx) {
		for tries := 0; l.rx[b.last] >= 0; tries++ {
			b.prepare(len(rs), b.last == 1, l.pool)
			got, errno := b.receive(l.rx[b.last], len(rs))
			if errno != 0 {
				if errno != unix.EAGAIN && errno != unix.EINTR {
					l.count.rxFailed.Add(1)
				}
				// An error of the socket's is told once; what comes after it is not.
				if errno == unix.EAGAIN || tries >= maxStreak {
					break
				}
				continue
			}
			if n := l.accept(b, got, rs); n > 0 {
				b.streak++
				return n
			}
		}
		b.last, b.streak = 1-b.last, 0
	}
	return 0
}

// accept makes of the first got messages what Recv returns, and says how many.
func (l *Link) accept(b *batch, got int, rs []roce.Received) int {
	n, kept, bytes, v6 := 0, 0, 0, b.last == 1
	own := l.from.Load()
	for i := range got {
		token := b.tokens[i]
		ip := l.pool.bytes(token)
		size := int(b.msgs[i].len)
		ok := !b.truncated(i)
		if v6 {
			size += ipv6Size
			ok = ok && b.header6(i, ip)
		}
		ok = ok && size <= len(ip) && size >= ipv4Size
		switch {
		case !ok:
			l.count.rxBad.Add(1)
		case v6 && ip[v6Dst] == 0xff && own.has(hca.GID(ip[v6Src:])), !v6 && ip[v4Dst]>>4 == 0xe && own.has(hca.IPv4GID([4]byte(ip[v4Src:]))):
			l.count.rxOwn.Add(1)
		default:
			rs[n] = roce.Received{IP: ip[:size], Buf: l.pool, Token: int(token)}
			bytes += size
			n++
			continue
		}
		b.tokens[kept] = token
		kept++
	}
	kept += copy(b.tokens[kept:], b.tokens[got:b.filled])
	b.filled = kept
	l.count.rx.Add(uint64(n))
	l.count.rxBytes.Add(uint64(bytes))
	return n
}

// wait waits until a socket may have something, or the end.
func (l *Link) wait(b *batch) error {
	l.waiting.Add(1)
	defer l.waiting.Add(-1)
	for {
		n, err := unix.EpollWait(l.epoll, b.events[:], -1)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if b.both = n > 1; int(b.events[0].Fd) == l.rx[1-b.last] {
			b.last, b.streak = 1-b.last, 0
		}
		return nil
	}
}

// rearm wakes another who waits, if a socket has more than its last receiver took.
func (l *Link) rearm() {
	for i, fd := range l.rx {
		if fd >= 0 {
			unix.EpollCtl(l.epoll, unix.EPOLL_CTL_MOD, fd, l.edge(i))
		}
	}
}

// takeBatch is one for the caller alone.
func (l *Link) takeBatch() *batch {
	l.batchMu.Lock()
	defer l.batchMu.Unlock()
	n := len(l.batches)
	if n == 0 {
		return newBatch()
	}
	b := l.batches[n-1]
	l.batches = l.batches[:n-1]
	return b
}

func (l *Link) giveBatch(b *batch) {
	l.batchMu.Lock()
	defer l.batchMu.Unlock()
	l.batches = append(l.batches, b)
}
