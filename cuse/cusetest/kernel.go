// Package cusetest is a kernel for a cuse.Session to talk to: a socket pair in
// place of /dev/cuse, with no device and no privilege. It splits long writes,
// sends interrupts and releases as fs/fuse does, and fails the test on a reply
// that the kernel would refuse: a second one, one nobody asked for, one of the
// wrong length, one that is missing at the end.
//
// Tests of cuse, dispatch and cmd use it. Its methods may be called from any
// goroutine; each plays one thread of a client, which has one request at a time.
package cusetest

import (
	"encoding/binary"
	"errors"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
)

// Patience is how long anything may take before it counts as hung.
const Patience = 20 * time.Second

const (
	outLen = 16 // sizeof(struct fuse_out_header)

	// answeredMax bounds the memory of requests that had their reply.
	answeredMax = 1 << 14
)

// Kernel is the other side of one session.
type Kernel struct {
	Session *cuse.Session

	t      testing.TB
	raw    *Raw
	served chan error
	pumped chan struct{}

	// sending is held shared while a request is sent, so that Close can tell which
	// were.
	sending sync.RWMutex

	mu       sync.Mutex
	unique   uint64
	calls    map[uint64]*call
	answered map[uint64]bool // for telling a second reply from an unknown one
	notified map[uint64]int  // by kh
	dropped  map[string]int  // names, by INVAL_ENTRY
	change   *sync.Cond      // calls or notified
	closed   bool
	unread   bool // closed with requests in the channel, which need no reply
	ended    bool
}

// call is one request without a reply.
type call struct {
	op   uint32
	size int // READ: most that may come back
	done chan struct{}
	err  unix.Errno
	body []byte
}

// New makes a session, does the handshake, serves it, and takes all down when
// the test ends.
func New(t testing.TB, h cuse.Handler, cfg cuse.Config) *Kernel {
	t.Helper()
	return serve(t, NewRaw(t, h, cfg))
}

// NewMounted is New for the session of a mounted file system. Its files are opened
// with OpenNode, and have a position.
func NewMounted(t testing.TB, tree cuse.Tree, cfg cuse.Config) *Kernel {
	t.Helper()
	return serve(t, NewRawMounted(t, tree, cfg))
}

func serve(t testing.TB, raw *Raw) *Kernel {
	t.Helper()
	k := &Kernel{
		t: t, raw: raw,
		served: make(chan error, 1), pumped: make(chan struct{}),
		unique: 2, calls: map[uint64]*call{}, answered: map[uint64]bool{}, notified: map[uint64]int{},
		dropped: map[string]int{},
	}
	k.change = sync.NewCond(&k.mu)
	k.Session = k.raw.Session
	if err := k.raw.Handshake(); err != nil {
		k.raw.Close()
		t.Fatalf("handshake: %v", err)
	}
	go k.pump()
	go func() { k.served <- k.Session.Serve() }()
	t.Cleanup(func() { k.Close() })
	return k
}

// Close closes the session, fails the test if a request is left without a reply,
// and returns what Serve returned.
func (k *Kernel) Close() error {
	k.sending.Lock()
	k.mu.Lock()
	was := k.closed
	k.closed = true
	k.mu.Unlock()
	k.sending.Unlock()
	if was {
		return nil
	}
	k.drain()
	_ = k.Session.Close()
	var err error
	select {
	case err = <-k.served:
	case <-time.After(Patience):
		k.t.Errorf("cusetest: Serve does not return")
	}
	select {
	case <-k.pumped: // sees the channel closed after the last reply
	case <-time.After(Patience):
		k.t.Errorf("cusetest: the session did not close its channel")
		_ = unix.Shutdown(k.raw.FD, unix.SHUT_RDWR)
		<-k.pumped
	}
	k.end()
	_ = unix.Close(k.raw.FD)
	return err
}

// drainTime is how long the session is given to read what was sent.
const drainTime = time.Second

// drain waits until all requests sent were read, so that each is owed a reply.
// What a session with all its threads stuck leaves unread, the kernel answers.
func (k *Kernel) drain() {
	for end := time.Now().Add(drainTime); ; time.Sleep(time.Millisecond) {
		n, err := unix.IoctlGetInt(k.raw.FD, unix.SIOCOUTQ)
		if err != nil || n == 0 {
			return
		}
		if time.Now().After(end) {
			k.mu.Lock()
			k.unread = true
			k.mu.Unlock()
			return
		}
	}
}

// Abort ends the connection as the kernel can (fuse_abort_conn): the session's
// next read fails, clients get ECONNABORTED.
func (k *Kernel) Abort() error {
	_ = unix.Shutdown(k.raw.FD, unix.SHUT_RDWR)
	var err error
	select {
	case err = <-k.served:
	case <-time.After(Patience):
		k.t.Errorf("cusetest: Serve does not return")
	}
	k.mu.Lock()
	k.closed = true
	for u, c := range k.calls {
		c.err = unix.ECONNABORTED
		close(c.done)
		delete(k.calls, u)
	}
	k.mu.Unlock()
	<-k.pumped
	k.end()
	_ = unix.Close(k.raw.FD)
	return err
}

// end: whatever has no reply now will get none.
func (k *Kernel) end() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ended = true
	for u, c := range k.calls {
		if !k.unread {
			k.t.Errorf("cusetest: request %d (opcode %d) never got its reply", u, c.op)
		}
		c.err = unix.ENODEV
		close(c.done)
		delete(k.calls, u)
	}
	k.change.Broadcast()
}

// pump reads what the session says.
func (k *Kernel) pump() {
	defer close(k.pumped)
	buf := make([]byte, sendBuffer)
	for {
		n, err := k.raw.Recv(buf)
		if err == unix.ECONNRESET {
			continue // closed with requests unread; comes once, before the last replies
		}
		if err != nil || n == 0 {
			return
		}
		k.take(buf[:n])
	}
}

func (k *Kernel) take(msg []byte) {
	if len(msg) < outLen || int(binary.NativeEndian.Uint32(msg)) != len(msg) {
		k.t.Errorf("cusetest: reply with a wrong length: % x", msg[:min(len(msg), 64)])
		return
	}
	code := int32(binary.NativeEndian.Uint32(msg[4:]))
	unique := binary.NativeEndian.Uint64(msg[8:])
	body := msg[outLen:]
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case unique == 0 && code == abi.FuseNotifyInvalEntry:
		n := int(binary.NativeEndian.Uint32(body[8:]))
		if len(body) != 16+n+1 || body[16+n] != 0 || binary.NativeEndian.Uint64(body) != abi.FuseRootID {
			k.t.Errorf("cusetest: bad notification of %d bytes to drop a name", len(body))
			return
		}
		k.dropped[string(body[16:16+n])]++
		k.change.Broadcast()
		return
	case unique == 0:
		if code != abi.FuseNotifyPoll || len(body) != 8 {
			k.t.Errorf("cusetest: bad notification %d with %d bytes", code, len(body))
			return
		}
		k.notified[binary.NativeEndian.Uint64(body)]++
		k.change.Broadcast()
		return
	case unique&abi.FuseIntReqBit != 0:
		// The answer to an INTERRUPT: EAGAIN asks to have it again.
		if code != -int32(unix.EAGAIN) || len(body) != 0 {
			k.t.Errorf("cusetest: bad answer %d to INTERRUPT", code)
		} else if k.calls[unique&^abi.FuseIntReqBit] != nil {
			go k.sendInterrupt(unique &^ abi.FuseIntReqBit)
		}
		return
	case code > 0 || code <= -512:
		k.t.Errorf("cusetest: reply with error %d", code)
		return
	}
	c := k.calls[unique]
	if c == nil {
		if k.answered[unique] {
			k.t.Errorf("cusetest: second reply to request %d", unique)
		} else {
			k.t.Errorf("cusetest: reply to request %d that was never made", unique)
		}
		return
	}
	if code != 0 && len(body) != 0 {
		k.t.Errorf("cusetest: error reply with %d bytes", len(body))
	}
	if code == 0 && !c.fits(len(body)) {
		k.t.Errorf("cusetest: reply to opcode %d with %d bytes", c.op, len(body))
	}
	delete(k.calls, unique)
	k.answered[unique] = true
	delete(k.answered, unique-answeredMax)
	c.err = unix.Errno(-code)
	c.body = append([]byte(nil), body...)
	close(c.done)
	k.change.Broadcast()
}

// fits says whether the kernel takes a reply with a body of n bytes.
func (c *call) fits(n int) bool {
	switch c.op {
	case abi.FuseOpen, abi.FuseIoctl:
		return n == 16
	case abi.FuseRead:
		return n <= c.size
	case abi.FuseWrite, abi.FusePoll:
		return n == 8
	case abi.FuseLookup:
		return n == 128
	case abi.FuseGetattr, abi.FuseSetattr:
		return n == 104
	case abi.FuseStatfs:
		return n == 80
	}
	return n == 0
}

// Pending is one request under way.
type Pending struct {
	k      *Kernel
	unique uint64
	c      *call
}

// Unique is the request's number, for Interrupt.
func (p *Pending) Unique() uint64 { return p.unique }

// Done is closed when the reply has come.
func (p *Pending) Done() <-chan struct{} { return p.c.done }

// Wait waits for the reply's body.
func (p *Pending) Wait() ([]byte, unix.Errno) {
	select {
	case <-p.c.done:
		return p.c.body, p.c.err
	case <-time.After(Patience):
		p.k.t.Errorf("cusetest: request %d (opcode %d) hangs", p.unique, p.c.op)
		return nil, unix.ETIMEDOUT
	}
}

// start sends a request. With the session closed it fails as an open file of a
// dead CUSE device does.
func (k *Kernel) start(op, tid, uid, gid uint32, size int, parts ...[]byte) *Pending {
	return k.startNode(abi.FuseRootID, op, tid, uid, gid, size, parts...)
}

// Ask sends a request about an inode and waits.
func (k *Kernel) Ask(op uint32, node uint64, body ...[]byte) ([]byte, unix.Errno) {
	return k.startNode(node, op, 1, 0, 0, 0, body...).Wait()
}

// Dropped says how often the session had a name dropped.
func (k *Kernel) Dropped(name string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.dropped[name]
}

func (k *Kernel) startNode(node uint64, op, tid, uid, gid uint32, size int, parts ...[]byte) *Pending {
	c := &call{op: op, size: size, done: make(chan struct{})}
	k.sending.RLock()
	defer k.sending.RUnlock()
	k.mu.Lock()
	if k.closed {
		k.mu.Unlock()
		c.err = unix.ENOTCONN
		close(c.done)
		return &Pending{k: k, c: c}
	}
	k.unique += 2
	u := k.unique
	k.calls[u] = c
	k.mu.Unlock()
	msg := Message(abi.FuseInHeader{Opcode: op, Unique: u, Nodeid: node, UID: uid, GID: gid, PID: tid}, parts...)
	if err := k.raw.Send(msg); err != nil {
		k.mu.Lock()
		if k.calls[u] != nil {
			delete(k.calls, u)
			if c.err = unix.ENODEV; !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
				k.t.Errorf("cusetest: send: %v", err)
			}
			close(c.done)
		}
		k.mu.Unlock()
	}
	return &Pending{k: k, unique: u, c: c}
}

// Inject sends bytes as they are.
func (k *Kernel) Inject(msg []byte) error { return k.raw.Send(msg) }

// Interrupt sends INTERRUPT for a request, if it is still without a reply.
func (k *Kernel) Interrupt(unique uint64) {
	k.mu.Lock()
	c := k.calls[unique]
	k.mu.Unlock()
	if c != nil {
		k.sendInterrupt(unique)
	}
}

func (k *Kernel) sendInterrupt(unique uint64) {
	in := abi.FuseInterruptIn{Unique: unique}
	_ = k.raw.Send(Message(abi.FuseInHeader{Opcode: abi.FuseInterrupt, Unique: unique | abi.FuseIntReqBit}, bytesOf(&in)))
}

// WaitNotify waits for a poll notification for kh, and takes it.
func (k *Kernel) WaitNotify(kh uint64) bool {
	late := time.AfterFunc(Patience, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.notified[kh]++
		k.t.Errorf("cusetest: no notification for %d", kh)
		k.change.Broadcast()
	})
	defer late.Stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	for k.notified[kh] == 0 {
		if k.ended {
			return false
		}
		k.change.Wait()
	}
	k.notified[kh]--
	return true
}

// Notified says how many notifications for kh wait to be taken.
func (k *Kernel) Notified(kh uint64) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.notified[kh]
}

// Outstanding is how many requests are without a reply.
func (k *Kernel) Outstanding() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.calls)
}
