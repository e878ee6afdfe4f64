package caller

import (
	"math"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// MemlockLimit returns the process's RLIMIT_MEMLOCK as it is now, math.MaxUint64 for no limit. ESRCH when the process
// is gone, EPERM without CAP_SYS_RESOURCE when it is another user's.
func (p *Process) MemlockLimit() (bytes uint64, err error) {
	var lim unix.Rlimit
	if err = unix.Prlimit(p.pid, unix.RLIMIT_MEMLOCK, nil, &lim); err == nil {
		err = p.stillOwnsPID()
	}
	if err != nil {
		return 0, opError("memlock limit of process", p.pid, err)
	}
	if lim.Cur == unix.RLIM_INFINITY {
		return math.MaxUint64, nil
	}
	return lim.Cur, nil
}

// CanLockAny says whether RLIMIT_MEMLOCK does not bind the process (mm/mlock.c can_do_mlock, ib_umem_get).
func (p *Process) CanLockAny() bool { return p.capable(unix.CAP_IPC_LOCK) }

// CanNetRaw says whether the process may make raw packet queue pairs (create_qp in uverbs_cmd.c).
func (p *Process) CanNetRaw() bool { return p.capable(unix.CAP_NET_RAW) }

// capable is the kernel's: the capability is effective in the process's leader and was given by our own, the initial user
// namespace. Asked anew each time: unshare(CLONE_NEWUSER) fills the capability sets. Anything unknown is "no".
func (p *Process) capable(capability int) bool {
	caps, err := readCaps(p.pid)
	if err != nil || caps.Effective&(1<<capability) == 0 {
		return false
	}
	own, err := ownUserNS()
	if err != nil {
		return false
	}
	theirs, err := userNS("/proc/" + strconv.Itoa(p.pid) + "/ns/user")
	return err == nil && theirs == own && p.stillOwnsPID() == nil
}

// stillOwnsPID: as long as the pidfd answers, the pid has not been given to another process.
func (p *Process) stillOwnsPID() error {
	err := unix.PidfdSendSignal(p.pidfd, 0, nil, 0)
	if err == unix.EPERM { // found, but not ours to signal
		err = nil
	}
	return err
}

// nsID identifies a namespace (nsfs device and inode).
type nsID struct{ dev, ino uint64 }

var ownUserNS = sync.OnceValues(func() (nsID, error) { return userNS("/proc/self/ns/user") })

func userNS(path string) (nsID, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nsID{}, err
	}
	return nsID{uint64(st.Dev), st.Ino}, nil
}
