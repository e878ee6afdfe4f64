package ctxfs

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"sync"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
)

// Opener decides whether this is the open that an Entry is for, and makes the
// file behind it. It is called on the goroutine that read the OPEN. An error that
// wraps a unix.Errno becomes that errno, as in cuse.Handler; the Entry can then
// still be opened by another.
type Opener func(r cuse.Request, flags uint32) (cuse.File, error)

// FS is one mounted file system.
type FS struct {
	dir string
	s   *cuse.Session
	log *zap.Logger

	forget   chan string   // names that the kernel is to drop
	stop     chan struct{} // closed by Close
	forgeter sync.WaitGroup
	once     sync.Once

	// mu guards what is below, and the state of entries.
	mu     sync.Mutex
	names  map[string]*Entry
	nodes  map[uint64]*Entry
	last   uint64 // node
	closed bool
}

// forgetMax names wait to be dropped. One that finds no room stays with the kernel
// until memory is short: it leads to nothing.
const forgetMax = 256

// nameBytes of randomness make a name.
const nameBytes = 16

// newFS is an FS without its session.
func newFS(dir string, log *zap.Logger) *FS {
	if log == nil {
		log = zap.NewNop()
	}
	return &FS{
		dir: dir, log: log,
		forget: make(chan string, forgetMax), stop: make(chan struct{}),
		names: map[string]*Entry{}, nodes: map[uint64]*Entry{}, last: abi.FuseRootID,
	}
}

// Serve serves the file system until Close, and then returns nil, or until the
// kernel ends it.
func (fs *FS) Serve() error {
	fs.mu.Lock()
	if !fs.closed {
		fs.forgeter.Add(1)
		go fs.forgetNames()
	}
	fs.mu.Unlock()
	err := fs.s.Serve()
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.closed {
		return nil // with no file open, the kernel ends the session when the mount goes
	}
	return err
}

// Close takes the mount away, ends the session as cuse.Session.Close does, and
// removes the directory. Clients that wait in a write() get EIO; what they have
// mapped stays theirs.
func (fs *FS) Close() error {
	var err error
	fs.once.Do(func() {
		fs.mu.Lock()
		fs.closed = true
		fs.mu.Unlock()
		if fs.dir != "" {
			err = detach(fs.dir)
		}
		// Before the session ends, since it may wait for a lookup to be answered and
		// keeps the channel open meanwhile.
		close(fs.stop)
		fs.forgeter.Wait()
		_ = fs.s.Close()
		fs.mu.Lock()
		clear(fs.names)
		clear(fs.nodes) // the kernel let go of what is behind them with the channel
		fs.mu.Unlock()
		if fs.dir != "" {
			_ = unix.Rmdir(fs.dir)
		}
	})
	return err
}

// forgetNames does what may wait for lookups to be answered, so that no handler
// does. It runs while the session is served.
func (fs *FS) forgetNames() {
	defer fs.forgeter.Done()
	for {
		select {
		case name := <-fs.forget:
			if err := fs.s.ForgetName(name); err != nil {
				fs.log.Debug("ctxfs: the kernel keeps a name", zap.Error(err))
			}
		case <-fs.stop:
			return
		}
	}
}

// Entry is one file that can be opened once.
type Entry struct {
	fs      *FS
	name    string
	node    uint64
	uid     uint32
	gid     uint32
	backing int32
	open    Opener

	// Guarded by FS.mu: waiting -> opening -> open -> ended, and from opening back
	// to waiting when the Opener refuses. Remove ends a waiting one.
	state   state
	removed bool // ended when the Opener refuses
}

type state int

const (
	waiting state = iota
	opening
	opened
	ended
)

// Add makes a file whose mmap() goes to memfd, which the caller may close
// afterwards, for a thread whose fsuid is uid. It is there until it was opened and
// closed again, or until Remove, which must be called if it may not be opened.
// Entries are not bounded here: there is one for a context.
func (fs *FS) Add(memfd int, uid, gid uint32, open Opener) (*Entry, error) {
	var random [nameBytes]byte
	_, _ = rand.Read(random[:]) // never fails
	backing, err := fs.s.OpenBacking(memfd)
	if err != nil {
		return nil, fmt.Errorf("ctxfs: %w", err)
	}
	e := &Entry{fs: fs, name: hex.EncodeToString(random[:]), uid: uid, gid: gid, backing: backing, open: open}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.closed {
		return nil, fmt.Errorf("ctxfs: %w", unix.ENODEV) // with the channel the backing id has gone
	}
	fs.last++ // never used again, so that a stale inode finds nothing
	e.node = fs.last
	fs.names[e.name] = e
	fs.nodes[e.node] = e
	return e, nil
}

// Path is where the file is opened.
func (e *Entry) Path() string { return filepath.Join(e.fs.dir, e.name) }

// Remove takes the name away: nobody opens the file from now on. A file that is
// open stays until it is closed. It may be called at any time, and again.
func (e *Entry) Remove() {
	e.fs.mu.Lock()
	e.removed = true
	end := e.state == waiting
	if end {
		e.endLocked()
	}
	e.fs.mu.Unlock()
	if end {
		e.gone()
	}
}

// endLocked takes an entry off the tables. gone follows.
func (e *Entry) endLocked() {
	e.state = ended
	delete(e.fs.names, e.name)
	delete(e.fs.nodes, e.node)
}

// gone gives back what an entry has that ended.
func (e *Entry) gone() {
	e.fs.forgetName(e.name)
	if err := e.fs.s.CloseBacking(e.backing); err != nil {
		e.fs.log.Error("ctxfs: memory is kept", zap.Error(err))
	}
}

func (fs *FS) forgetName(name string) {
	select {
	case fs.forget <- name:
	default:
	}
}

// openFlags are all that may stand beside FOPEN_PASSTHROUGH (fs/fuse/iomode.c,
// FOPEN_PASSTHROUGH_MASK): any other fails the open with EIO. FOPEN_NOFLUSH spares
// a round trip at close.
const openFlags = abi.FopenPassthrough | abi.FopenDirectIO | abi.FopenParallelDirectWrites | abi.FopenNoflush

// OpenNode implements cuse.Tree.
func (fs *FS) OpenNode(r cuse.Request, node uint64, flags uint32) (cuse.File, cuse.OpenReply, error) {
	fs.mu.Lock()
	e := fs.nodes[node]
	if e == nil || e.state != waiting {
		fs.mu.Unlock()
		return nil, cuse.OpenReply{}, unix.EACCES
	}
	e.state = opening
	fs.mu.Unlock()

	var impl cuse.File
	var err error
	defer func() { // also if the Opener panics
		fs.mu.Lock()
		end := false
		if impl != nil {
			e.state = opened
			delete(fs.names, e.name)
		} else if e.state = waiting; e.removed {
			end = true
			e.endLocked()
		}
		fs.mu.Unlock()
		if end {
			e.gone()
		} else if impl != nil {
			fs.forgetName(e.name)
		}
	}()
	impl, err = e.open(r, flags)
	if err == nil && impl == nil {
		err = unix.EIO
	}
	if err != nil {
		impl = nil
		return nil, cuse.OpenReply{}, err
	}
	f := &file{e: e, impl: impl}
	f.framer, _ = impl.(cuse.Framer)
	return f, cuse.OpenReply{Flags: openFlags, Backing: e.backing}, nil
}

// file is an open file.
type file struct {
	e      *Entry
	impl   cuse.File
	framer cuse.Framer // nil if impl is none
}

func (f *file) Write(r cuse.Request, data []byte) { f.impl.Write(r, data) }

// WholeSize implements cuse.Framer.
func (f *file) WholeSize(first []byte) int {
	if f.framer == nil {
		return 0
	}
	return f.framer.WholeSize(first)
}

// What ib_uverbs has no method for: read() is EINVAL (fs/read_write.c, vfs_read),
// poll() is always ready (include/linux/poll.h, DEFAULT_POLLMASK). ioctl() is
// refused so that libibverbs uses write().

func (f *file) Read(r cuse.Request, _ int)             { r.ReplyError(unix.EINVAL) }
func (f *file) Ioctl(r cuse.Request, _ cuse.IoctlArgs) { r.ReplyError(unix.ENOTTY) }
func (f *file) Flush(r cuse.Request)                   { r.ReplyOK() }

// defaultPollmask is EPOLLIN, EPOLLOUT, EPOLLRDNORM and EPOLLWRNORM.
const defaultPollmask = 0x001 | 0x004 | 0x040 | 0x100

func (f *file) Poll(r cuse.Request, _ cuse.PollArgs) {
	r.ReplyPoll(defaultPollmask)
}

func (f *file) Release(flags uint32) {
	f.impl.Release(flags)
	f.e.fs.mu.Lock()
	f.e.endLocked()
	f.e.fs.mu.Unlock()
	f.e.gone()
}
