package dispatch

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/pin"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// MaxFiles bounds the open files of one device unless Config says less: each
// holds three descriptors of the daemon's (caller.Process).
const MaxFiles = 4096

// Config is what a Device needs from outside.
type Config struct {
	HCA hca.Device
	// Provider is what the clients' library takes the device for. With one that maps
	// queues (hca.Mapper) Maps makes the files for it, and Node is the path of the
	// device's node.
	Provider hca.Provider
	Maps     Maps
	Node     string
	System   System
	Pins     *pin.Accountant
	// Users bound what each user and context may have; nil: DefaultLimits.
	// Devices may share it.
	Users *Users
	// MaxFiles is how many files may be open, as the daemon's own descriptor
	// limit allows; 0 means the constant.
	MaxFiles int
	// Notify wakes the pollers of an event file: the kh of their POLL.
	Notify func(kh uint64)
	Log    *zap.Logger
}

// Device is one HCA as its uverbs node serves it.
type Device struct {
	cfg     Config
	sweeper sweeper
	xrcds   xrcdTable
	removed atomic.Bool   // Remove has begun; set with mu held
	awaited atomic.Bool   // Remove waits for commands no longer
	ended   chan struct{} // capacity 1: a command has ended since Remove began

	// mu guards the members below. Leaf.
	mu     sync.Mutex
	files  map[*File]struct{}
	coming map[int]*eventFile // by tid: opens that a running Install causes
}

// NewDevice serves cfg.HCA until Remove; there is nothing to close but its files.
func NewDevice(cfg Config) *Device {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.MaxFiles == 0 {
		cfg.MaxFiles = MaxFiles
	}
	if cfg.Users == nil {
		cfg.Users = NewUsers(DefaultLimits())
	}
	return &Device{cfg: cfg, ended: make(chan struct{}, 1), files: make(map[*File]struct{}), coming: make(map[int]*eventFile)}
}

// Handle is an open file of the node: a command file or an event file.
type Handle interface {
	Write(r Request, data []byte)
	Read(r Request, size int)
	// Poll answers with what is ready now; if notify, Config.Notify(kh) follows
	// once when more is.
	Poll(r Request, kh uint64, notify bool)
	// Release is the end: no request of the file is unanswered.
	Release()
	// WholeSize is the size in bytes of the command that first begins.
	WholeSize(first []byte) int
}

// Open answers for an open(2) of the node. EACCES: the caller cannot be
// identified. ENFILE: MaxFiles, or the bound of Users. ENXIO: the device was
// removed.
func (d *Device) Open(r Request) (Handle, error) {
	d.mu.Lock()
	ev, ours := d.coming[r.TID()]
	if ours {
		delete(d.coming, r.TID())
	}
	n := len(d.files)
	d.mu.Unlock()
	if ours {
		ev.opened()
		return ev, nil
	}
	if d.removed.Load() {
		return nil, errGoing
	}
	if n >= d.cfg.MaxFiles {
		return nil, fmt.Errorf("open: %d files are open, limit %d: %w", n, d.cfg.MaxFiles, unix.ENFILE)
	}
	user, err := d.cfg.Users.open(r.UID())
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	f, err := d.newFile(r, user)
	if err != nil {
		d.cfg.Users.close(r.UID(), user)
		return nil, err
	}
	return f, nil
}

func (d *Device) newFile(r Request, user *account) (*File, error) {
	p, err := d.cfg.System.OpenProcess(r.TID())
	if err != nil {
		return nil, fmt.Errorf("open: identify thread %d: %w", r.TID(), err)
	}
	creds, err := d.cfg.System.Credentials(p, r.TID(), r.UID(), r.GID())
	if err != nil {
		p.Put()
		return nil, fmt.Errorf("open: credentials of thread %d: %w", r.TID(), err)
	}
	f := &File{
		dev: d, proc: p, creds: creds, uid: r.UID(), user: user, context: newAccount("context", &d.cfg.Users.limits.Context),
		channels: make(map[int32]*eventFile),
	}
	f.active.Store(1)
	d.mu.Lock()
	removed := d.removed.Load()
	if !removed {
		d.files[f] = struct{}{}
		f.pins = d.cfg.Pins.Open(p)
	}
	d.mu.Unlock()
	if removed {
		p.Put()
		return nil, errGoing
	}
	return f, nil
}

// expect says that the next open by tid is ev; forget takes it back.
func (d *Device) expect(tid int, ev *eventFile) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.coming[tid]; ok {
		return fmt.Errorf("thread %d: %w", tid, unix.EBUSY)
	}
	d.coming[tid] = ev
	return nil
}

// forget takes only ev's entry: the thread runs again before its command's
// handler has ended, and may have the next one under way.
func (d *Device) forget(tid int, ev *eventFile) {
	d.mu.Lock()
	if d.coming[tid] == ev {
		delete(d.coming, tid)
	}
	d.mu.Unlock()
}

// install gives the client a descriptor for ev. commit runs, while the client
// stands still, with it; what it returns becomes the command's result.
// undo runs instead, or after a commit that failed, before the client goes on:
// it may try again at once. On an error nothing happened, neither ran, and the
// request is unanswered; otherwise it has been answered.
func (d *Device) install(c *call, ev *eventFile, commit func(s Standing) error, undo func()) error {
	if err := d.expect(c.tid, ev); err != nil {
		return err
	}
	defer d.forget(c.tid, ev)
	c.r.Detach()
	return d.cfg.System.Install(c.tid, c.f.ways(), ev.isOpen, func() { c.reply(nil) }, func(s Standing, err error) unix.Errno {
		// Nothing more is opened for us: once it goes on, what the thread opens is
		// its own affair.
		d.forget(c.tid, ev)
		if err == nil && !ev.isOpen() {
			// The path led somewhere else (another mount namespace, no /proc).
			err = fmt.Errorf("descriptor %d is not our event file: %w", s.FD(), unix.EBADF)
		}
		if err == nil {
			err = commit(s)
		}
		if err == nil {
			return 0
		}
		undo()
		d.cfg.Log.Log(blame(err), "no event descriptor for client", zap.Int("pid", c.f.proc.PID()), zap.String("program", c.f.proc.Name()), zap.Error(err))
		return errnoOf(err)
	})
}

// blame is the level at which the failure of an install is logged: what a client
// brings about at will (a bad pointer, its own end) must not fill the log.
func blame(err error) zapcore.Level {
	if errors.Is(err, unix.EFAULT) || errors.Is(err, unix.ESRCH) {
		return zap.DebugLevel
	}
	return zap.WarnLevel
}

// FileInfo is an open context, for status.
type FileInfo struct {
	PID     int            `json:"pid"`
	Program string         `json:"program"`
	UID     uint32         `json:"uid"`
	Objects map[string]int `json:"objects"`
	Pinned  uint64         `json:"pinned_bytes"`
}

// Files lists the open contexts.
func (d *Device) Files() []FileInfo {
	d.mu.Lock()
	files := make([]*File, 0, len(d.files))
	for f := range d.files {
		files = append(files, f)
	}
	d.mu.Unlock()
	out := make([]FileInfo, 0, len(files))
	for _, f := range files {
		out = append(out, f.info())
	}
	return out
}

// logTeardown reports what a close could not destroy: a fault of ours.
func (d *Device) logTeardown(f *File, left int) {
	if left > 0 {
		d.cfg.Log.Error("objects left behind by a closed file", zap.Int("pid", f.proc.PID()), zap.Int("objects", left))
	}
}

// logPin says at debug level why a client could not register memory.
func (d *Device) logPin(f *File, err error) {
	if ce := d.cfg.Log.Check(zap.DebugLevel, "memory not registered"); ce != nil {
		ce.Write(zap.Int("pid", f.proc.PID()), zap.String("program", f.proc.Name()), zap.Uint64("pinned_bytes", f.pins.Pinned()), zap.Error(err))
	}
}

// errGoing is the open of a device that is being removed: what the kernel says
// once the character device is deleted, as it is before all else (chrdev_open).
var errGoing = fmt.Errorf("open: device was removed: %w", unix.ENXIO)

// errBusyContext is a second GET_CONTEXT (ib_init_ucontext).
var errBusyContext = fmt.Errorf("file has a context already: %w", unix.EINVAL)

var errNoContext = errors.Join(errors.New("no context on this file"), unix.EINVAL)
