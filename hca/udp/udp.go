package udp

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// maxSources bounds a link's addresses, and by that the socket filters: as many as
// the GID table of a port has room for.
const maxSources = 64

// Config says what a link stands on.
type Config struct {
	// NetDev is the network interface's name; "" is the one that has Addrs.
	NetDev string
	// Addrs are the addresses to use, all of one interface; those that go and come
	// again are followed. None is all of the interface as they come and go: the
	// link-local one first, no temporary ones (RFC 8981).
	Addrs []netip.Addr
}

// counters are a link's.
type counters struct {
	tx, txBytes, txLost, txBad, txSource, txLong, txRoute, txRefused, txFull, txFailed atomic.Uint64
	rx, rxBytes, rxOwn, rxBad, rxFailed, addrRefused                                   atomic.Uint64
}

// Link is a port's link over the host's stack. It is a roce.Link.
type Link struct {
	cfg   Config
	index int // of the interface
	count counters
	state atomic.Pointer[roce.LinkState]
	from  atomic.Pointer[sources]
	ended atomic.Pointer[error]
	pool  *buffers

	senders sync.Pool // of *sender

	// life is held for reading while the sockets below are used.
	life   sync.RWMutex
	rx     [2]int // raw sockets, of IPv4 and of IPv6; -1 is none
	epoll  int
	bell   int // an eventfd that rings at the end
	closed sync.Once
	// waiting is how many wait in epoll.
	waiting atomic.Int32

	// watchMu keeps changes of the state, and calls of the watcher, one at a time.
	watchMu sync.Mutex
	watch   func(roce.LinkState)
	news    *os.File // rtnetlink
	watcher sync.WaitGroup

	// groupMu guards the groups.
	groupMu sync.Mutex
	groups  map[hca.GID]int

	// batchMu guards what follows.
	batchMu sync.Mutex
	batches []*batch // not in use; as many as ever received at once
}

var _ roce.Link = (*Link)(nil)

// New makes a link. It needs CAP_NET_RAW. An error names the interface, the address
// or the port.
func New(cfg Config) (_ *Link, err error) {
	if cfg.NetDev == "" && len(cfg.Addrs) == 0 {
		return nil, errors.New("RoCE link over UDP: give a network interface or addresses")
	}
	if len(cfg.Addrs) > maxSources {
		return nil, fmt.Errorf("RoCE link over UDP: %d addresses are more than %d", len(cfg.Addrs), maxSources)
	}
	l := &Link{cfg: cfg, rx: [2]int{-1, -1}, epoll: -1, bell: -1, pool: newBuffers(), groups: map[hca.GID]int{}}
	l.cfg.Addrs = slices.Clone(cfg.Addrs)
	l.senders.New = func() any { return newSender() }
	l.from.Store(&sources{})
	defer func() {
		if err != nil {
			l.Close()
			err = fmt.Errorf("RoCE link over UDP: %w", err)
		}
	}()
	fd, err := subscribe() // before the scan, to miss nothing
	if err != nil {
		return nil, err
	}
	l.news = os.NewFile(uintptr(fd), "rtnetlink")
	devs, err := scan()
	if err != nil {
		return nil, err
	}
	dev, err := choose(cfg, devs)
	if err != nil {
		return nil, err
	}
	l.index = dev.index
	if err := l.open(); err != nil {
		return nil, err
	}
	if err := l.update(dev, true); err != nil {
		return nil, err
	}
	l.watcher.Go(l.follow)
	return l, nil
}

// choose finds the interface that cfg means.
func choose(cfg Config, devs []*netdev) (*netdev, error) {
	var dev *netdev
	if cfg.NetDev != "" {
		i := slices.IndexFunc(devs, func(d *netdev) bool { return d.name == cfg.NetDev })
		if i < 0 {
			return nil, fmt.Errorf("there is no network interface %s, see \"ip link\"", cfg.NetDev)
		}
		dev = devs[i]
	}
	for _, a := range cfg.Addrs {
		i := slices.IndexFunc(devs, func(d *netdev) bool { return d.holds(a) })
		switch {
		case i < 0:
			return nil, fmt.Errorf("%s is not an address of this host, see \"ip address\"", a)
		case dev == nil:
			dev = devs[i]
		case !dev.holds(a):
			return nil, fmt.Errorf("%s is an address of %s, not of %s: a link has one interface", a, devs[i].name, dev.name)
		}
	}
	return dev, nil
}

// holds says whether a is an address of the interface. The loopback interface has
// all of 127.0.0.0/8, whatever its list says.
func (d *netdev) holds(a netip.Addr) bool {
	a = a.Unmap()
	return slices.Contains(d.addrs, a.WithZone("")) || a.Is4() && a.IsLoopback() && d.flags&unix.IFF_LOOPBACK != 0
}

// wanted are the addresses that the link has while the interface is as it is.
func (l *Link) wanted(d *netdev) []netip.Addr {
	var as []netip.Addr
	if len(l.cfg.Addrs) > 0 {
		for _, a := range l.cfg.Addrs {
			if d.holds(a) {
				as = append(as, a.Unmap().WithZone(""))
			}
		}
	} else {
		for _, a := range d.addrs {
			// IPv4's link-local addresses are as good as any.
			if !slices.Contains(d.temporary, a) {
				as = append(as, a)
			}
		}
	}
	local := func(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }
	slices.SortStableFunc(as, func(a, b netip.Addr) int {
		switch {
		case local(a) == local(b):
			return 0
		case local(a):
			return -1
		}
		return 1
	})
	return as[:min(len(as), maxSources)]
}

// open makes the sockets that do not depend on addresses.
func (l *Link) open() (err error) {
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("open epoll: %w", err)
	}
	if l.bell, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("open eventfd: %w", err)
	}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, l.bell, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(l.bell)}); err != nil {
		return fmt.Errorf("wait for the end: %w", err)
	}
	for i, fam := range []int{unix.AF_INET, unix.AF_INET6} {
		if l.rx[i], err = openReceiver(fam); err != nil {
			return err
		}
		if l.rx[i] < 0 {
			continue
		}
		if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, l.rx[i], l.edge(i)); err != nil {
			return fmt.Errorf("wait for packets: %w", err)
		}
	}
	return nil
}

// edge is what a receiver waits for: news alone, so that one packet wakes one.
func (l *Link) edge(i int) *unix.EpollEvent {
	return &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff, Fd: int32(l.rx[i])}
}

// State is the link as it is now.
func (l *Link) State() roce.LinkState {
	if s := l.state.Load(); s != nil {
		return *s
	}
	return roce.LinkState{}
}

// Watch has f called after every change of the state.
func (l *Link) Watch(f func(roce.LinkState)) {
	l.watchMu.Lock()
	defer l.watchMu.Unlock()
	l.watch = f
}

// follow waits for news of the interface until the link is closed.
func (l *Link) follow() {
	buf := make([]byte, 64<<10)
	for {
		n, err := l.news.Read(buf)
		switch {
		case errors.Is(err, unix.ENOBUFS): // news were lost: look at all
		case err != nil:
			return
		case !concerns(buf[:n], l.index):
			continue
		}
		devs, err := scan()
		if err != nil {
			continue // the next news come, or the link is closed
		}
		i := slices.IndexFunc(devs, func(d *netdev) bool { return d.index == l.index })
		if i < 0 {
			l.update(&netdev{index: l.index, name: l.State().NetDev}, false)
			l.end(roce.ErrGone)
			return
		}
		l.update(devs[i], false)
	}
}

// update makes the link what the interface is now. If it is strict an address that
// cannot be had is an error, else it is left out and counted.
func (l *Link) update(d *netdev, strict bool) error {
	l.watchMu.Lock()
	defer l.watchMu.Unlock()
	if l.ended.Load() != nil {
		return nil
	}
	old, now := l.from.Load(), &sources{}
	var failed error
	for _, a := range l.wanted(d) {
		s := old.find(gidOf(a))
		if s == nil {
			var err error
			if s, err = openSource(a, d); err != nil {
				l.count.addrRefused.Add(1)
				failed = err
				continue
			}
		}
		now.list, now.gids = append(now.list, s), append(now.gids, s.gid)
	}
	for i, fd := range l.rx {
		if fd < 0 {
			continue
		}
		f := filter4(now.gids)
		if i == 1 {
			f = filter6(now.gids)
		}
		if err := attach(fd, f); err != nil {
			failed = err
		}
	}
	l.replace(now)
	if strict && failed != nil {
		return failed
	}
	state := roce.LinkState{Up: d.up(), MTU: payloadMTU(d.mtu), GIDs: now.gids, NetDev: d.name, Mbps: d.speed()}
	was := l.state.Swap(&state)
	if was == nil || was.Up != state.Up || was.MTU != state.MTU || was.NetDev != state.NetDev || was.Mbps != state.Mbps || !slices.Equal(was.GIDs, state.GIDs) {
		if l.watch != nil && was != nil {
			l.watch(state)
		}
	}
	return nil
}

// replace puts sources in the place of the link's, and closes those that are not
// among them once nobody sends by them.
func (l *Link) replace(now *sources) {
	old := l.from.Swap(now)
	old.mu.Lock()
	old.retired = true
	old.mu.Unlock()
	for _, s := range old.list {
		if now.find(s.gid) != s {
			s.close()
		}
	}
}

// Reachable says whether there is a route to dst by the interface.
func (l *Link) Reachable(dst hca.GID) bool {
	from := l.State().GIDs
	if !slices.ContainsFunc(from, func(g hca.GID) bool { return family(g) == family(dst) }) {
		return false
	}
	if dst.IsMulticast() {
		return true
	}
	return routed(dst, l.index)
}

// Join has the link receive a group's packets.
func (l *Link) Join(group hca.GID) error { return l.member(group, true) }

// Leave undoes one Join.
func (l *Link) Leave(group hca.GID) error { return l.member(group, false) }

func (l *Link) member(group hca.GID, join bool) error {
	l.life.RLock()
	defer l.life.RUnlock()
	if err := l.ended.Load(); err != nil {
		return *err
	}
	verb, other := "leave", 1
	if join {
		verb, other = "join", 0
	}
	l.groupMu.Lock()
	defer l.groupMu.Unlock()
	n := l.groups[group]
	switch {
	case !group.IsMulticast():
		return fmt.Errorf("%s group %s: it is not a multicast GID: %w", verb, group, unix.EINVAL)
	case !join && n == 0:
		return fmt.Errorf("leave group %s: the link did not join it: %w", group, unix.EADDRNOTAVAIL)
	}
	if n == other {
		fd := l.rx[0]
		if family(group) == unix.AF_INET6 {
			fd = l.rx[1]
		}
		if err := member(fd, group, l.index, join); errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("join group %s on %s: %w: raise net.ipv4.igmp_max_memberships", group, l.State().NetDev, err)
		} else if err != nil && join {
			return fmt.Errorf("join group %s on %s: %w", group, l.State().NetDev, err)
		}
	}
	if join {
		l.groups[group]++
	} else if l.groups[group]--; n == 1 {
		delete(l.groups, group)
	}
	return nil
}

// Counters are the link's: tx_lost is the sum of the reasons that follow it.
func (l *Link) Counters() map[string]uint64 {
	c := &l.count
	m := map[string]uint64{
		"tx_packets": c.tx.Load(), "tx_bytes": c.txBytes.Load(), "tx_lost": c.txLost.Load(), "tx_malformed": c.txBad.Load(),
		"tx_foreign_source": c.txSource.Load(), "tx_too_long": c.txLong.Load(), "tx_no_route": c.txRoute.Load(),
		"tx_not_permitted": c.txRefused.Load(), "tx_queue_full": c.txFull.Load(), "tx_failed": c.txFailed.Load(),
		"rx_packets": c.rx.Load(), "rx_bytes": c.rxBytes.Load(), "rx_own_multicast": c.rxOwn.Load(),
		"rx_malformed": c.rxBad.Load(), "rx_failed": c.rxFailed.Load(), "addresses_refused": c.addrRefused.Load(),
		"rx_overflow": 0,
	}
	l.life.RLock()
	defer l.life.RUnlock()
	for _, fd := range l.rx {
		if fd >= 0 {
			m["rx_overflow"] += overflows(fd)
		}
	}
	return m
}

// end ends the link for a reason: everybody who waits sees it. The first counts,
// but that it was closed counts most.
func (l *Link) end(err error) {
	if !l.ended.CompareAndSwap(nil, &err) && err == roce.ErrClosed {
		l.ended.Store(&err)
	}
	l.pool.close()
	if l.bell >= 0 {
		unix.Write(l.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// Close ends every Recv with ErrClosed and gives the port back. Buffers that are out
// stay readable.
func (l *Link) Close() error {
	l.closed.Do(func() {
		l.end(roce.ErrClosed)
		if l.news != nil {
			l.news.Close()
		}
		l.watcher.Wait()
		l.replace(&sources{})
		l.life.Lock()
		defer l.life.Unlock()
		for _, fd := range []*int{&l.rx[0], &l.rx[1], &l.epoll, &l.bell} {
			if *fd >= 0 {
				unix.Close(*fd)
				*fd = -1
			}
		}
	})
	return nil
}
