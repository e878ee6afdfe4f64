package caller

import (
	"os"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// noProcmapQuery is set once the kernel has answered ENOTTY to PROCMAP_QUERY (before Linux 6.11).
var noProcmapQuery atomic.Bool

// CheckRange says whether every byte of [addr, addr+length) can be registered: mapped and, if write, writable, else
// readable, as mm/gup.c check_vma_flags demands of a pin (with FOLL_WRITE it asks for VM_WRITE only). EFAULT when not, or when the range
// wraps; ESRCH when the address space is gone. A length of zero passes.
//
// Mappings are looked at, pages are not: a file mapping past the end of its file, a VM_PFNMAP mapping of a device and
// guard pages within a mapping (MADV_GUARD_INSTALL) pass here and fail in the copy.
func (p *Process) CheckRange(addr, length uint64, write bool) error {
	if !validRange(addr, length) {
		return opError("check range of process", p.pid, unix.EFAULT)
	}
	if length == 0 {
		return nil
	}
	if !p.hold() {
		return opError("check range of process", p.pid, unix.ESRCH)
	}
	defer p.Put()
	err := unix.ENOTTY
	if !p.noQuery && !noProcmapQuery.Load() {
		if err = p.checkByQuery(addr, addr+length, write); err == unix.ENOTTY {
			noProcmapQuery.Store(true)
		}
	}
	if err == unix.ENOTTY {
		err = p.checkByMaps(addr, addr+length, write)
		if err == unix.ESRCH && p.Alive() && p.reopenMaps() == nil {
			err = p.checkByMaps(addr, addr+length, write)
		}
	}
	if err != 0 {
		return opError("check range of process", p.pid, err)
	}
	return nil
}

// reopenMaps opens the maps file of a thread that lives: a read of it looks for the task that it was opened by (m_start in
// fs/proc/task_mmu.c), and that thread may be gone while the others go on. What is mapped in another image, should they
// have exec'ed since, does no harm: the memory that we hold is gone then.
func (p *Process) reopenMaps() error {
	dir := "/proc/" + strconv.Itoa(p.pid) + "/task"
	threads, err := os.ReadDir(dir)
	if err != nil {
		return goneError(err)
	}
	for _, t := range threads {
		fd, err := openProc(dir+"/"+t.Name()+"/maps", unix.O_RDONLY)
		if err != nil {
			continue
		}
		var b [1]byte
		if n, err := unix.Pread(fd, b[:], 0); err != nil || n == 0 { // a leader that has ended
			_ = unix.Close(fd)
			continue
		}
		p.mapsMu.Lock()
		old := p.maps
		p.maps = fd
		p.mapsMu.Unlock()
		return unix.Close(old)
	}
	return unix.ESRCH
}

// checkByQuery asks for one mapping after another; a hole or a mapping without the permission is ENOENT.
func (p *Process) checkByQuery(addr, end uint64, write bool) unix.Errno {
	need := uint64(procmapQueryVMAReadable)
	if write {
		need = procmapQueryVMAWritable
	}
	for addr < end {
		next, errno := queryVMAEnd(p.maps, addr, need)
		switch {
		case errno == unix.ENOENT || errno == 0 && next <= addr:
			return unix.EFAULT
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return errno
		}
		addr = next
	}
	return 0
}

// checkByMaps reads the maps file from its start until it has passed end.
func (p *Process) checkByMaps(addr, end uint64, write bool) unix.Errno {
	p.mapsMu.Lock()
	defer p.mapsMu.Unlock()
	s := mapsScan{next: addr, end: end, write: write}
	for off := int64(0); ; {
		n, err := unix.Pread(p.maps, p.mapsBuf[:], off)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ESRCH || err == nil && n == 0 && off == 0:
			return unix.ESRCH // the task or its memory is gone (fs/proc/task_mmu.c m_start)
		case err != nil:
			return unix.EIO
		case n == 0:
			return unix.EFAULT // the last mapping lies below end
		}
		if s.feed(p.mapsBuf[:n]) {
			if s.covered() {
				return 0
			}
			return unix.EFAULT
		}
		off += int64(n)
	}
}
