package caller

import "golang.org/x/sys/unix"

// Creds is what the opener of a file had. The kernel's ib_safe_file_access (include/rdma/ib.h, used by ib_uverbs_write)
// refuses with EACCES any write whose credentials differ from the opener's: a set-uid program or another user's process
// that was handed the fd must not be made to write where the opener pleases (CVE-2016-4565).
//
// The kernel compares one pointer; from outside we compare what can be seen at a bearable price on each write: fsuid and
// fsgid, the process, and the capability sets. Not seen: a change of only the real uid or of supplementary groups, and
// exec of an image with the same credentials, which slow commands find with Process.CheckImage.
type Creds struct {
	UID, GID uint32 // fsuid and fsgid, as FUSE headers carry them
	TGID     int
	Caps     Caps
}

// Caps are the capability sets of a thread, bit n for capability n.
type Caps struct {
	Effective, Permitted, Inheritable uint64
}

// ReadCreds captures the credentials of thread tid of process tgid, which opens our file right now. uid and gid are those of the
// FUSE header. EACCES for tid 0, ESRCH when tid is not in tgid.
func ReadCreds(tgid, tid int, uid, gid uint32) (Creds, error) {
	if tid <= 0 || tgid <= 0 {
		return Creds{}, opError("credentials of thread", tid, unix.EACCES)
	}
	if err := memberOf(tgid, tid); err != nil {
		return Creds{}, opError("credentials of thread", tid, err)
	}
	caps, err := readCaps(tid)
	if err != nil {
		return Creds{}, opError("credentials of thread", tid, err)
	}
	return Creds{UID: uid, GID: gid, TGID: tgid, Caps: caps}, nil
}

// Check compares a caller with the opener: nil, or EACCES when anything differs or the thread cannot be looked at. It is
// called for each write and allocates only to refuse.
func (c *Creds) Check(tid int, uid, gid uint32) error {
	if tid <= 0 || uid != c.UID || gid != c.GID {
		return opError("credentials of thread", tid, unix.EACCES)
	}
	if memberOf(c.TGID, tid) != nil {
		return opError("credentials of thread", tid, unix.EACCES)
	}
	caps, err := readCaps(tid)
	if err != nil || caps != c.Caps {
		return opError("credentials of thread", tid, unix.EACCES)
	}
	return nil
}

// readCaps is capget(2), which needs no privilege.
func readCaps(tid int) (Caps, error) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3, Pid: int32(tid)}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return Caps{}, err
	}
	wide := func(lo, hi uint32) uint64 { return uint64(hi)<<32 | uint64(lo) }
	return Caps{
		Effective:   wide(data[0].Effective, data[1].Effective),
		Permitted:   wide(data[0].Permitted, data[1].Permitted),
		Inheritable: wide(data[0].Inheritable, data[1].Inheritable),
	}, nil
}
