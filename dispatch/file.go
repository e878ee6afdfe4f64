package dispatch

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
	"github.com/uverbsd/uverbsd/pin"
	"golang.org/x/sys/unix"
)

// File is an open command file: struct ib_uverbs_file.
type File struct {
	dev   *Device
	proc  Process
	creds Credentials
	uid   uint32
	user  *account
	// context is what this file has; user's counts include it.
	context *account
	pins    *pin.Account

	// active counts the commands under way, and one for the open file. A handler
	// whose client was killed can outlive the file: who takes it to zero tears
	// the file down.
	active atomic.Int32

	objects idr.Table
	ctx     atomic.Pointer[ucontext]

	// hw is held shared by commands that destroy, exclusively while all objects
	// go (ib_uverbs_file.hw_destroy_rwsem). Outermost.
	hw   sync.RWMutex
	done atomic.Bool // nothing is left on the device; set with hw held

	// mu guards the members below.
	mu       sync.Mutex
	told     bool                 // of the device's removal
	opening  bool                 // a GET_CONTEXT is under way
	channels map[int32]*eventFile // completion channels by the client's fd
}

// ucontext is what GET_CONTEXT made.
type ucontext struct {
	hca   hca.UContext
	async *eventFile
	uid   uint32
	maps  *mapping // nil: its queues are not mapped
}

// Owner is the user: what the contexts of one can take from others is bounded for
// all of them together.
func (u *ucontext) Owner() any { return u.uid }

// PortEvent passes an unaffiliated event on (ib_uverbs_event_handler).
func (u *ucontext) PortEvent(ev hca.EventType, port uint8) {
	u.async.push(uint64(port), uint32(ev), nil)
}

// Write runs one command.
func (f *File) Write(r Request, data []byte) {
	f.active.Add(1)
	after := f.handle(r, data)
	f.leave() // before Run, which a peer's memory can hold up for as long as it likes
	if after != nil {
		after.Run()
	}
}

// handle answers the command, and returns what it leaves to be done.
func (f *File) handle(r Request, data []byte) runner {
	if err := f.creds.Check(r.TID(), r.UID(), r.GID()); err != nil {
		r.ReplyError(unix.EACCES)
		return nil
	}
	c := calls.Get().(*call)
	c.f, c.r, c.tid, c.size = f, r, r.TID(), len(data)
	err := c.dispatch(data)
	if !c.deferred {
		c.reply(err)
	}
	after := c.after
	c.reset()
	calls.Put(c)
	return after
}

// Read of a command file: the kernel's uverbs_fops has no read.
func (f *File) Read(r Request, _ int) { r.ReplyError(unix.EINVAL) }

// Poll of a command file: always ready, as a file without a poll method is.
func (f *File) Poll(r Request, _ uint64, _ bool) {
	r.ReplyPoll(unix.POLLIN | unix.POLLOUT | pollRdNorm | pollWrNorm)
}

// WholeSize reads a command's size off its header.
func (f *File) WholeSize(first []byte) int { return wholeSize(first) }

// Release ends the file, once the last command has ended.
func (f *File) Release() { f.leave() }

func (f *File) leave() {
	last := f.active.Add(-1) == 0
	if last {
		f.teardown()
	}
	if f.dev.removed.Load() {
		f.commandEnded()
	}
}

// teardown destroys what is left, newest first.
func (f *File) teardown() {
	f.hw.Lock()
	u := f.ctx.Load()
	f.mu.Lock()
	told, channels := f.told, f.channels
	f.channels = nil
	f.mu.Unlock()
	if u != nil {
		// First: nobody reads what the objects' ends would say. That the device
		// has gone, everybody may.
		u.async.detach(told)
		u.maps.end()
	}
	left := f.objects.Teardown(f.destroy)
	f.dev.logTeardown(f, len(left))
	f.closeContext(u, false)
	f.hw.Unlock()
	for _, ev := range channels {
		ev.detach(false)
	}
	f.dev.mu.Lock()
	delete(f.dev.files, f)
	f.dev.mu.Unlock()
	f.dev.cfg.Users.close(f.uid, f.user)
	f.pins.Close()
	f.proc.Put()
}

// channel finds a completion channel by a descriptor of tid's: its own, or a
// duplicate while that is open. EBADF if it is none of this file's.
func (f *File) channel(tid int, fd int32) (*eventFile, error) {
	f.mu.Lock()
	ev := f.channels[fd]
	others := make(map[int32]*eventFile, len(f.channels))
	if ev == nil || ev.isClosed() {
		maps.Copy(others, f.channels)
	}
	f.mu.Unlock()
	for own, other := range others {
		if !other.isClosed() && f.dev.cfg.System.SameFile(tid, fd, own) {
			return other, nil
		}
	}
	if ev == nil || ev.isClosed() {
		return nil, unix.EBADF
	}
	return ev, nil
}

func (f *File) addChannel(fd int32, ev *eventFile) {
	f.mu.Lock()
	if f.channels != nil {
		f.channels[fd] = ev
	}
	late := f.told
	f.mu.Unlock()
	if late {
		ev.detach(false)
	}
}

func (f *File) dropChannel(ev *eventFile) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for fd, e := range f.channels {
		if e == ev {
			delete(f.channels, fd)
		}
	}
}

func (f *File) info() FileInfo {
	counts := make(map[string]int)
	if !f.dev.removed.Load() { // else they are handles and no more
		for k, n := range f.objects.Counts() {
			counts[kindNames[k]] = n
		}
	}
	if f.ctx.Load() != nil {
		counts[kindNames[kindContext]] = 1
	}
	f.mu.Lock()
	if n := len(f.channels); n > 0 {
		counts[kindNames[kindChannel]] = n
	}
	f.mu.Unlock()
	return FileInfo{PID: f.proc.PID(), Program: f.proc.Name(), UID: f.uid, Objects: counts, Pinned: uint64(f.context.pinned.now.Load())}
}

// wholeSize is the byte count that the header of a command claims; for what
// has no header, the count it has. The caller bounds it.
func wholeSize(first []byte) int {
	if len(first) < abi.CmdHdrSize {
		return len(first)
	}
	var h abi.CmdHdr
	copy(bytesOf(&h), first)
	if h.Command&abi.CmdFlagExtended == 0 {
		return int(h.InWords) * 4
	}
	if len(first) < abi.CmdHdrSize+abi.ExCmdHdrSize {
		return len(first)
	}
	var x abi.ExCmdHdr
	copy(bytesOf(&x), first[abi.CmdHdrSize:])
	return abi.CmdHdrSize + abi.ExCmdHdrSize + (int(h.InWords)+int(x.ProviderInWords))*8
}
