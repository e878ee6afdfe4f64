package dispatch

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
	"golang.org/x/sys/unix"
)

// Maps makes the files that take the place of command descriptors (cuse/ctxfs): a
// CUSE node cannot be mapped.
type Maps interface {
	// New makes a file for a user, of which open answers the opens: a Handle, or
	// whom it refuses. charge is asked for the bytes of memory that the file gets,
	// and told with a negative number when it gives them back.
	New(uid, gid uint32, charge func(bytes int) error, open func(Request) (Handle, error)) (MapFile, error)
}

// MapFile is such a file, with the memory behind it.
type MapFile interface {
	hca.Arena
	// Path is what a client opens.
	Path() string
	// Unlink takes the name away: nobody opens the file any more.
	Unlink()
	// Close gives the memory back, also of what the client keeps mapped; with keep
	// that stays readable until it unmaps it.
	Close(keep bool)
}

// mapping is a context whose queues its client maps.
type mapping struct {
	f      *File
	file   MapFile
	queues hca.Queues
	async  int32       // the client's number of its async_fd
	ending atomic.Bool // all objects go, and their queues with the file

	// mu guards the members below. Leaf.
	mu     sync.Mutex
	tid    int // the one thread that may open the file, once
	opened bool
}

// newMapping is nil for a provider that maps nothing.
func newMapping(f *File, r Request) (*mapping, error) {
	p, ok := f.dev.cfg.Provider.(hca.Mapper)
	if !ok {
		return nil, nil
	}
	m := &mapping{f: f, tid: r.TID()}
	var err error
	if m.file, err = f.dev.cfg.Maps.New(r.UID(), r.GID(), f.chargeMap, m.open); err != nil {
		return nil, err
	}
	m.queues = p.NewQueues(m.file)
	return m, nil
}

// chargeMap counts the memory of mapped queues. What was freed stays charged: the
// client can touch it still.
func (f *File) chargeMap(bytes int) error {
	if bytes < 0 {
		f.giveQueue(uint64(-bytes))
		return nil
	}
	return f.takeQueue(uint64(bytes))
}

// close ends the file's memory. keep is for a client that is still there and may
// read what the end of its objects has put into its queues.
func (m *mapping) close(keep bool) {
	if m != nil {
		m.file.Unlink()
		m.file.Close(keep)
	}
}

// open is for the thread that is made to open the file, and for nobody else: not
// through /proc by a child, not after it.
func (m *mapping) open(r Request) (Handle, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.opened || r.TID() != m.tid || m.f.creds.Check(r.TID(), r.UID(), r.GID()) != nil {
		return nil, fmt.Errorf("open a context's file: %w", unix.EACCES)
	}
	m.opened = true
	m.f.active.Add(1) // the command that it comes from holds f still
	return m.f, nil
}

// swap puts the file in the place of the command descriptor of a thread that
// stands still.
func (m *mapping) swap(s Standing) error {
	m.async = int32(s.FD())
	err := s.Replace(m.file.Path(), func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.opened
	})
	m.file.Unlink()
	return err
}

// ways are what leads a client's thread to our node: its command descriptor, or,
// where that was replaced, the event descriptor that it got with its context, and
// the node's path.
func (f *File) ways() func(commandFD int) []string {
	if u := f.ctx.Load(); u != nil && u.maps != nil {
		return func(int) []string { return []string{fdPath(int(u.maps.async)), f.dev.cfg.Node} }
	}
	return func(fd int) []string { return []string{fdPath(fd)} }
}

// fdPath is not below /proc/self, which shows no descriptors once the first thread
// of the process has ended.
func fdPath(fd int) string { return "/proc/thread-self/fd/" + strconv.Itoa(fd) }

// queues are those of a context, nil if its provider maps none. EOPNOTSUPP for one
// whose command descriptor could not be replaced: its library could map nothing.
func (u *ucontext) queues(f *File) (hca.Queues, error) {
	if u.maps != nil {
		return u.maps.queues, nil
	}
	if _, ok := f.dev.cfg.Provider.(hca.Mapper); ok {
		return nil, fmt.Errorf("client cannot map its queues: %w", unix.EOPNOTSUPP)
	}
	return nil, nil
}

// mapped are the queues of one object. The driver's object is closed first.
type mapped struct {
	m    *mapping
	list []hca.Mapped
}

func (u *ucontext) mapped(q ...hca.Mapped) mapped { return mapped{u.maps, q} }

// close gives the queues' memory back, unless all of the context's goes at once: a
// client that is still there may yet read what the end has put into them.
func (q *mapped) close() {
	if q.ending() {
		return
	}
	for _, q := range q.list {
		q.Close()
	}
}

func (q *mapped) ending() bool { return q.m != nil && q.m.ending.Load() }

// end is for the objects of a context that ends as a whole.
func (m *mapping) end() {
	if m != nil {
		m.ending.Store(true)
	}
}

// answer sets the provider's part of the response. EINVAL if the client has no
// room for it, as drivers say (rxe_create_cq and its kin).
func (c *call) answer(b []byte) error {
	if c.udoutLen < len(b) {
		return unix.EINVAL
	}
	c.udout = b
	return nil
}
