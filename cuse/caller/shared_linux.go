package caller

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"
)

// maxShared bounds what SharedRanges lists: a region of more pieces than this is no use that anybody makes of atomics.
const maxShared = 64

// SharedRange is a piece of an address space that is a MAP_SHARED mapping of the file, or of the nameless shared memory,
// with this device and inode number: who maps the same has the same bytes.
type SharedRange struct {
	Start, End uint64
	Dev, Ino   uint64 // Dev as unix.Mkdev
}

// SharedRanges lists the shared mappings in [addr, addr+length), in order, at most maxShared. ESRCH when the address space is
// gone. What is mapped there later is not known.
func (p *Process) SharedRanges(addr, length uint64) ([]SharedRange, error) {
	if !validRange(addr, length) {
		return nil, opError("shared ranges of process", p.pid, unix.EFAULT)
	}
	if !p.hold() {
		return nil, opError("shared ranges of process", p.pid, unix.ESRCH)
	}
	defer p.Put()
	var list []SharedRange
	errno := unix.ENOTTY
	if !p.noQuery && !noProcmapQuery.Load() {
		list, errno = p.sharedByQuery(addr, addr+length)
	}
	if errno == unix.ENOTTY {
		list, errno = p.sharedByMaps(addr, addr+length)
		if errno == unix.ESRCH && p.Alive() && p.reopenMaps() == nil {
			list, errno = p.sharedByMaps(addr, addr+length)
		}
	}
	if errno != 0 {
		return nil, opError("shared ranges of process", p.pid, errno)
	}
	return list, nil
}

func (p *Process) sharedByQuery(addr, end uint64) (list []SharedRange, _ unix.Errno) {
	for addr < end && len(list) < maxShared {
		r, errno := queryShared(p.maps, addr)
		switch {
		case errno == unix.ENOENT:
			return list, 0
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return nil, errno
		case r.Start >= end || r.End <= addr:
			return list, 0
		}
		addr = r.End
		r.End = min(r.End, end)
		list = append(list, r)
	}
	return list, 0
}

// sharedByMaps reads the maps file from its start until it has passed end.
func (p *Process) sharedByMaps(addr, end uint64) (list []SharedRange, _ unix.Errno) {
	p.mapsMu.Lock()
	defer p.mapsMu.Unlock()
	var rest []byte
	for off := int64(0); ; {
		n, err := unix.Pread(p.maps, p.mapsBuf[:], off)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ESRCH || err == nil && n == 0 && off == 0:
			return nil, unix.ESRCH
		case err != nil:
			return nil, unix.EIO
		case n == 0:
			return list, 0
		}
		off += int64(n)
		rest = append(rest, p.mapsBuf[:n]...)
		for {
			line, after, whole := bytes.Cut(rest, []byte{'\n'})
			if !whole {
				break
			}
			rest = after
			if end, ok := mapsLineEnd(line); ok && end <= addr {
				continue
			}
			r, shared, ok := parseMapsLine(line)
			if !ok {
				return nil, unix.EIO
			}
			if r.Start >= end || len(list) == maxShared {
				return list, 0
			}
			if shared && r.End > addr {
				r.End = min(r.End, end)
				list = append(list, r)
			}
		}
	}
}

// mapsLineEnd is where the mapping of a line ends.
func mapsLineEnd(line []byte) (end uint64, ok bool) {
	_, line, ok = bytes.Cut(line, []byte{'-'})
	for i, c := range line {
		if !hexDigit(&end, c) {
			return end, ok && i > 0 && c == ' '
		}
	}
	return 0, false
}

// parseMapsLine takes "start-end rwxs offset major:minor inode path" apart (fs/proc/task_mmu.c show_vma_header_prefix).
func parseMapsLine(line []byte) (r SharedRange, shared, ok bool) {
	f := bytes.Fields(line)
	if len(f) < 5 || len(f[1]) < 4 {
		return r, false, false
	}
	var major, minor uint32
	var text [3]string
	for i, k := range []int{0, 3, 4} {
		text[i] = string(f[k])
	}
	if _, err := fmt.Sscanf(text[0], "%x-%x", &r.Start, &r.End); err != nil {
		return r, false, false
	}
	if _, err := fmt.Sscanf(text[1], "%x:%x", &major, &minor); err != nil {
		return r, false, false
	}
	if _, err := fmt.Sscan(text[2], &r.Ino); err != nil {
		return r, false, false
	}
	r.Dev = unix.Mkdev(major, minor)
	return r, f[1][3] == 's', true
}
