package caller

import "golang.org/x/sys/unix"

// deadProbe is an address that no process can have mapped: TASK_SIZE_MAX of x86-64 with five-level tables, and in the
// kernel's half on arm64 even after the tag byte is stripped.
const deadProbe = 1<<56 - 4096

// bulkRead is the size in bytes from which a read goes through process_vm_readv: it copies once where mem_rw copies twice,
// and from here on that saves more than the look at the image costs (BenchmarkMemory).
const bulkRead = 512 << 10

// ReadAt fills b from addr, wholly or not at all as far as the caller may rely on b. EFAULT when a byte is not mapped,
// ESRCH when the address space is gone. Protections are not looked at (see the package comment). No allocation.
func (p *Process) ReadAt(b []byte, addr uint64) error {
	if !validRange(addr, uint64(len(b))) {
		return opError("read memory of process", p.pid, unix.EFAULT)
	}
	if !p.hold() {
		return opError("read memory of process", p.pid, unix.ESRCH)
	}
	defer p.Put()
	if len(b) >= bulkRead && p.readBulk(b, addr) {
		return nil
	}
	for len(b) > 0 {
		n, err := unix.Pread(p.mem, b, int64(addr))
		if err == unix.EINTR {
			continue
		}
		if err = memError(n, err); err != nil {
			return opError("read memory of process", p.pid, err)
		}
		b, addr = b[n:], addr+uint64(n)
	}
	return nil
}

// readBulk is ReadAt by process id. What it read counts only if the process still runs the same image afterwards; false
// leaves the read, and what error it ends with, to the way that stays with the address space. There is no such way for
// writes: they would have landed by the time they are found wrong.
func (p *Process) readBulk(b []byte, addr uint64) bool {
	if p.otherImage.Load() {
		return false
	}
	if n, err := readVM(p.pid, b, addr); err != nil || n != len(b) {
		return false // PROT_NONE since it was registered, or no leader, or truly not there
	}
	if !p.Alive() || !p.sameImage() {
		p.otherImage.Store(true)
		return false
	}
	return true
}

// WriteAt copies b to addr; errors as ReadAt, and EFAULT also for a shared mapping without write permission. The bytes
// before a fault may have been written. No allocation.
func (p *Process) WriteAt(b []byte, addr uint64) error {
	if !validRange(addr, uint64(len(b))) {
		return opError("write memory of process", p.pid, unix.EFAULT)
	}
	if !p.hold() {
		return opError("write memory of process", p.pid, unix.ESRCH)
	}
	defer p.Put()
	for len(b) > 0 {
		n, err := unix.Pwrite(p.mem, b, int64(addr))
		if err == unix.EINTR {
			continue
		}
		if err = memError(n, err); err != nil {
			return opError("write memory of process", p.pid, err)
		}
		b, addr = b[n:], addr+uint64(n)
	}
	return nil
}

// memError reads the answers of fs/proc/base.c mem_rw: 0 when mmget_not_zero failed, that is, the last user of the
// address space has gone; EIO when the first page of what was asked cannot be reached.
func memError(n int, err error) error {
	switch {
	case err == unix.EIO:
		return unix.EFAULT
	case err != nil:
		return err
	case n == 0:
		return unix.ESRCH
	}
	return nil
}

// Alive says whether the address space is still there. It is not after exit or exec, unless another process shares it
// (CLONE_VM); then it is that process's memory that ReadAt and WriteAt reach.
func (p *Process) Alive() bool {
	for {
		n, err := probe(p.mem, deadProbe)
		if err == unix.EINTR {
			continue
		}
		return n != 0 || err == unix.EIO
	}
}
