package dispatch

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/idr"
	"github.com/uverbsd/uverbsd/pin"
	"golang.org/x/sys/unix"
)

const (
	// objectBytes is what any object costs beside its queues: handle, locks,
	// driver object, generously.
	objectBytes = 512
	// Bytes per element of hca/soft's queues, rounded up.
	cqeBytes = 64
	sqeBytes = 128
	rqeBytes = 32
	sgeBytes = 16
	// eventBytes is what an unread event costs, with the slack of its queue.
	eventBytes = 64
)

// Bounds say how much one holder may have at a time. 0 is no bound of ours; the
// device's own limits and RLIMIT_MEMLOCK hold all the same. Over a bound: ENOMEM.
type Bounds struct {
	Contexts     uint32 `toml:"contexts"` // open files; ENFILE over it
	PDs          uint32 `toml:"pd"`
	MRs          uint32 `toml:"mr"`
	MWs          uint32 `toml:"mw"`
	AHs          uint32 `toml:"ah"`
	CQs          uint32 `toml:"cq"`
	QPs          uint32 `toml:"qp"`
	SRQs         uint32 `toml:"srq"`
	XRCDs        uint32 `toml:"xrcd"`
	CompChannels uint32 `toml:"comp_channel"`
	PinnedBytes  uint64 `toml:"pinned_bytes"` // registered memory, by page
	QueueBytes   uint64 `toml:"queue_bytes"`  // the daemon's own memory behind objects and their queues
	QueueDepth   uint32 `toml:"queue_depth"`  // entries of any one queue
}

// Limits are the bounds of one user, over all of its contexts, and of each
// context.
type Limits struct {
	User    Bounds `toml:"user"`
	Context Bounds `toml:"context"`
}

// DefaultLimits let one user have about half of what a device of hca/soft has,
// and of the daemon's memory no more than hurts no host: hundreds of large
// queues. One context may have all that its user may. Pinned memory has no
// bound here, since nothing is really pinned.
func DefaultLimits() Limits {
	return Limits{
		User: Bounds{
			Contexts: MaxFiles / 2, PDs: 1 << 17, MRs: 1 << 19, MWs: 1 << 19, AHs: 1 << 19, CQs: 1 << 17, QPs: 1 << 17,
			SRQs: 1 << 15, XRCDs: 256, CompChannels: 4096, QueueBytes: 256 << 20,
		},
		Context: Bounds{CompChannels: 1024},
	}
}

// of are the bounds by kind.
func (b *Bounds) of() [numKinds]int64 {
	return [numKinds]int64{
		kindPD: int64(b.PDs), kindMR: int64(b.MRs), kindMW: int64(b.MWs), kindAH: int64(b.AHs), kindCQ: int64(b.CQs), kindQP: int64(b.QPs),
		kindSRQ: int64(b.SRQs), kindXRCD: int64(b.XRCDs), kindChannel: int64(b.CompChannels), kindContext: int64(b.Contexts),
	}
}

// account is what one holder has. Counters only, so that the commands of two
// files never wait for each other, not even one user's.
type account struct {
	who    string // "uid 1000", "context"
	kinds  [numKinds]counter
	queue  counter // bytes
	pinned counter // bytes
	depth  uint32
	refs   int // of a user's: open files; guarded by Users.mu

	// checking is held while a user's mappings are walked, one range at a time:
	// tens of thousands of them cost the daemon's time, not the client's.
	checking sync.Mutex

	// answers counts a user's POLL_CQs that are being answered on goroutines
	// that are not their own.
	answers atomic.Int32
}

func newAccount(who string, b *Bounds) *account {
	a := &account{who: who, depth: b.QueueDepth}
	for k, most := range b.of() {
		a.kinds[k].most = most
	}
	a.queue.most, a.pinned.most = int64(b.QueueBytes), int64(b.PinnedBytes)
	return a
}

// counter counts up to most; 0 is no bound.
type counter struct {
	now  atomic.Int64
	most int64
}

// take adds n; false, and nothing is added, over the bound. n is not negative.
func (c *counter) take(n uint64) bool {
	if n >= 1<<62 {
		return false
	}
	if now := c.now.Add(int64(n)); c.most != 0 && now > c.most {
		c.now.Add(-int64(n))
		return false
	}
	return true
}

func (c *counter) give(n uint64) { c.now.Add(-int64(n)) }

// over is the error of a bound that is reached; what has its own errno.
func (a *account) over(what string, c *counter, errno unix.Errno) error {
	return fmt.Errorf("%s: %d %s in use, limit %d (raise it in the configuration's [limits]): %w", a.who, c.now.Load(), what, c.most, errno)
}

func (a *account) take(kind idr.Kind, bytes uint64) error {
	if c := &a.kinds[kind]; !c.take(1) {
		errno := unix.ENOMEM
		if kind == kindContext {
			errno = unix.ENFILE // what open(2) says
		}
		return a.over(kindNames[kind], c, errno)
	}
	if !a.queue.take(bytes) {
		a.kinds[kind].give(1)
		return a.over("bytes of queues", &a.queue, unix.ENOMEM)
	}
	return nil
}

func (a *account) give(kind idr.Kind, bytes uint64) {
	a.kinds[kind].give(1)
	a.queue.give(bytes)
}

// Users keeps what each user has, over all devices that share it.
type Users struct {
	limits Limits

	// mu guards users and the accounts' refs. Leaf.
	mu    sync.Mutex
	users map[uint32]*account
	files int // open, of all users
	most  int // files at a time; 0: no bound
}

// NewUsers bounds every user and context by l.
func NewUsers(l Limits) *Users { return &Users{limits: l, users: make(map[uint32]*account)} }

// Most bounds the open files of all users on all devices together, as the daemon's
// own descriptor limit does; 0, as at first, is no bound.
func (u *Users) Most(files int) {
	u.mu.Lock()
	u.most = files
	u.mu.Unlock()
}

// open is the account of a user who opens a file, which is counted. ENFILE over
// the bound.
func (u *Users) open(uid uint32) (*account, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.most > 0 && u.files >= u.most {
		return nil, fmt.Errorf("%d files are open on all devices, limit %d (raise the daemon's RLIMIT_NOFILE): %w", u.files, u.most, unix.ENFILE)
	}
	a := u.users[uid]
	if a == nil {
		a = newAccount(fmt.Sprintf("uid %d", uid), &u.limits.User)
		u.users[uid] = a
	}
	if err := a.take(kindContext, 0); err != nil {
		return nil, err
	}
	a.refs++
	u.files++
	return a, nil
}

// Held is the bytes of the daemon's memory behind a user's objects.
func (u *Users) Held(uid uint32) int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	if a := u.users[uid]; a != nil {
		return a.queue.now.Load()
	}
	return 0
}

func (u *Users) close(uid uint32, a *account) {
	a.give(kindContext, 0)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.files--
	if a.refs--; a.refs == 0 {
		delete(u.users, uid)
	}
}

// take charges an object to the file's context and user; ENOMEM.
func (f *File) take(kind idr.Kind, bytes uint64) error {
	if err := f.context.take(kind, bytes); err != nil {
		return err
	}
	if err := f.user.take(kind, bytes); err != nil {
		f.context.give(kind, bytes)
		return err
	}
	return nil
}

func (f *File) give(kind idr.Kind, bytes uint64) {
	f.context.give(kind, bytes)
	f.user.give(kind, bytes)
}

// takeQueue charges bytes of an object that exists already.
func (f *File) takeQueue(bytes uint64) error {
	if !f.context.queue.take(bytes) {
		return f.context.over("bytes of queues", &f.context.queue, unix.ENOMEM)
	}
	if !f.user.queue.take(bytes) {
		f.context.queue.give(bytes)
		return f.user.over("bytes of queues", &f.user.queue, unix.ENOMEM)
	}
	return nil
}

// forceQueue is takeQueue over every bound.
func (f *File) forceQueue(bytes uint64) {
	f.context.queue.now.Add(int64(bytes))
	f.user.queue.now.Add(int64(bytes))
}

func (f *File) giveQueue(bytes uint64) {
	f.context.queue.give(bytes)
	f.user.queue.give(bytes)
}

// recharge changes what an object costs, if change succeeds; both are charged
// until that is known. Nobody else does it for the object meanwhile.
func (f *File) recharge(o *idr.Object, cost uint64, change func() error) error {
	if err := f.takeQueue(cost); err != nil {
		return err
	}
	if err := change(); err != nil {
		f.giveQueue(cost)
		return err
	}
	f.giveQueue(o.Cost)
	o.Cost = cost
	return nil
}

// depth is ENOMEM for a queue with more entries than one may have.
func (f *File) depth(entries ...uint32) error {
	for _, n := range entries {
		for _, a := range [2]*account{f.context, f.user} {
			if a.depth != 0 && n > a.depth {
				return fmt.Errorf("%s: a queue of %d, limit %d (raise it in the configuration's [limits]): %w", a.who, n, a.depth, unix.ENOMEM)
			}
		}
	}
	return nil
}

// pin charges a range of the client's memory to it, to the context and to the
// user.
func (f *File) pin(start, length uint64) (pin.Charge, error) {
	charge, err := f.pins.Charge(f.proc, start, length)
	if err != nil {
		return charge, err
	}
	n := charge.Bytes()
	for _, a := range [2]*account{f.context, f.user} {
		if !a.pinned.take(n) {
			if a == f.user {
				f.context.pinned.give(n)
			}
			charge.Release()
			return pin.Charge{}, a.over("bytes of registered memory", &a.pinned, unix.ENOMEM)
		}
	}
	return charge, nil
}

func (f *File) unpin(charge *pin.Charge) {
	n := charge.Bytes()
	f.context.pinned.give(n)
	f.user.pinned.give(n)
	charge.Release()
}

// queueBytes is what n elements of size bytes cost. Both come from 32-bit
// numbers of the client's: it cannot wrap.
func queueBytes(n uint32, size uint64) uint64 { return uint64(n) * size }
