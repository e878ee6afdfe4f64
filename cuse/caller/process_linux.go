package caller

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Process is one client process and one address space of it. It holds /proc/TID/mem and maps open from the time it was
// made: both stay bound to the address space (fs/proc/base.c __mem_open, task_mmu.c proc_maps_open), so that after exec
// or exit no access can reach another image. It also holds a pidfd, so that a limit read by pid can be known to be this
// process's.
//
// Refcounted: OpenProcess gives one reference; every method needs the caller to hold one.
type Process struct {
	pid     int
	name    string
	key     string
	auxv    []byte // of the image at open, see CheckImage
	procUID uint32 // owner of /proc/PID/auxv at open
	// auxvPath is /proc/PID/auxv with a zero byte behind it, for the system call.
	auxvPath []byte
	// otherImage is set once process_vm_readv by pid is known not to reach this address space.
	otherImage atomic.Bool

	mem, maps, pidfd int
	refs             atomic.Int32

	noQuery bool // CheckRange parses maps even where PROCMAP_QUERY exists (tests)

	mapsMu sync.Mutex // serialises the read position of maps and guards mapsBuf
	// One page: a seq_file returns no more than that in a read.
	mapsBuf [4096]byte
}

// OpenProcess opens the process of thread tid, which must be inside a request to us. EACCES for tid 0 (FUSE's way to
// say that the caller lives in a pid namespace that we cannot see), ESRCH when it is gone, EACCES or EPERM without
// CAP_SYS_PTRACE.
func OpenProcess(tid int) (*Process, error) {
	if tid <= 0 {
		return nil, opError("open process of thread", tid, unix.EACCES)
	}
	p, err := openProcess(tid)
	if err != nil {
		return nil, opError("open process of thread", tid, err)
	}
	return p, nil
}

func openProcess(tid int) (_ *Process, err error) {
	st, err := readStatus(tid)
	if err != nil {
		return nil, err
	}
	p := &Process{pid: st.tgid, mem: -1, maps: -1, pidfd: -1}
	p.refs.Store(1)
	p.auxvPath = append([]byte("/proc/"+strconv.Itoa(p.pid)+"/auxv"), 0)
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	// By tid, not tgid: the leader may have exited before the others and then has no memory any more.
	dir := "/proc/" + strconv.Itoa(tid)
	if p.pidfd, err = unix.PidfdOpen(p.pid, 0); err != nil {
		return nil, err
	}
	if p.mem, err = openProc(dir+"/mem", unix.O_RDWR); err != nil {
		return nil, err
	}
	if p.maps, err = openProc(dir+"/maps", unix.O_RDONLY); err != nil {
		return nil, err
	}
	if p.auxv, err = os.ReadFile(dir + "/auxv"); err != nil {
		return nil, goneError(err)
	}
	var owner unix.Stat_t
	if err = unix.Stat(dir+"/auxv", &owner); err != nil {
		return nil, goneError(err)
	}
	p.procUID = owner.Uid
	start, err := startTime(p.pid)
	if err != nil {
		return nil, err
	}
	p.key = strconv.Itoa(p.pid) + "@" + start
	if leader, err := readStatus(p.pid); err == nil {
		p.name = leader.name
	} else {
		p.name = st.name
	}
	// Still the thread that we began with? Then all of the above was of one process.
	if err = memberOf(p.pid, tid); err != nil {
		return nil, err
	}
	if !p.Alive() {
		return nil, unix.ESRCH
	}
	return p, nil
}

func openProc(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		return fd, goneError(err)
	}
}

// PID returns the process (thread group) id. It may belong to another once the process is gone: for status and logs.
func (p *Process) PID() int { return p.pid }

// Key names this process and no other, also none that gets its pid later. An exec does not change it; nothing that the
// process can do does.
func (p *Process) Key() string { return p.key }

// Name returns the command name at the time of OpenProcess, with unprintable bytes replaced.
func (p *Process) Name() string { return p.name }

// Get takes another reference and returns p.
func (p *Process) Get() *Process {
	if p.refs.Add(1) < 2 {
		panic("caller: Get of a released Process")
	}
	return p
}

// hold is Get for one access by whoever may come after the last Put: a copy that was stuck in the client's memory outlives
// what it was made for, and must not go on with a number that is another client's file by then. False: released.
func (p *Process) hold() bool {
	for {
		n := p.refs.Load()
		if n <= 0 {
			return false
		}
		if p.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Put drops a reference; the last one closes the files.
func (p *Process) Put() {
	switch n := p.refs.Add(-1); {
	case n == 0:
		p.close()
	case n < 0:
		panic("caller: Put of a released Process")
	}
}

func (p *Process) close() {
	for _, fd := range [...]int{p.mem, p.maps, p.pidfd} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// CheckImage says whether thread tid still runs in this address space's image: the kernel refuses a write after exec
// because exec makes new credentials (ib_safe_file_access); this is how we see an exec that kept uid and capabilities.
// EACCES when it runs another image, ESRCH when the address space or the thread is gone. It compares the auxiliary
// vector (stack, vdso and program addresses, fresh at each exec); with address randomisation off, or a vector that the
// client has forged for the purpose, and a CLONE_VM sibling that keeps the old memory alive, an exec passes. It opens a file: for slow
// commands.
func (p *Process) CheckImage(tid int) error {
	if !p.Alive() {
		return opError("check image of process", p.pid, unix.ESRCH)
	}
	now, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/auxv")
	if err == nil && !bytes.Equal(now, p.auxv) {
		err = unix.EACCES
	}
	if err != nil {
		return opError("check image of thread", tid, goneError(err))
	}
	return nil
}

// memberOf says whether tid is a thread of tgid. Signal 0 sends nothing; EPERM comes after the kernel has found the
// thread in the group (kernel/signal.c do_send_specific), so it proves as much as success.
func memberOf(tgid, tid int) error {
	err := unix.Tgkill(tgid, tid, 0)
	if err != nil && !errors.Is(err, unix.EPERM) {
		return err
	}
	return nil
}
