package cusetest

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// The kernel sends at most 32 pages at once (fs/fuse/fuse_i.h,
// FUSE_DEFAULT_MAX_PAGES_PER_REQ), for a mounted file system as many as the session
// asks for.
const (
	pieceMax      = 32 * 4096
	pieceMaxMount = 65 * 4096
)

// File is one open file, seen by one thread of a client. Thread makes another
// thread's view of it.
type File struct {
	TID, UID, GID uint32
	Flags         uint32 // f_flags: O_NONBLOCK
	Fh            uint64
	Pos           uint64 // where the next write() goes; stays 0 for a device
	k             *Kernel
}

// Open opens the device.
func (k *Kernel) Open(tid, uid, gid, flags uint32) (*File, unix.Errno) {
	body, errno := k.OpenAsync(tid, uid, gid, flags).Wait()
	if errno != 0 {
		return nil, errno
	}
	return &File{TID: tid, UID: uid, GID: gid, Flags: flags, Fh: binary.NativeEndian.Uint64(body), k: k}, 0
}

// OpenAsync sends OPEN and does not wait.
func (k *Kernel) OpenAsync(tid, uid, gid, flags uint32) *Pending {
	in := abi.FuseOpenIn{Flags: flags}
	return k.start(abi.FuseOpen, tid, uid, gid, 0, bytesOf(&in))
}

// OpenNode opens an inode of a mounted file system, and returns the whole answer
// too.
func (k *Kernel) OpenNode(node uint64, tid, uid, gid, flags uint32) (*File, abi.FuseOpenOut, unix.Errno) {
	in := abi.FuseOpenIn{Flags: flags}
	var out abi.FuseOpenOut
	body, errno := k.startNode(node, abi.FuseOpen, tid, uid, gid, 0, bytesOf(&in)).Wait()
	if errno != 0 {
		return nil, out, errno
	}
	copy(bytesOf(&out), body)
	return &File{TID: tid, UID: uid, GID: gid, Flags: flags, Fh: out.Fh, k: k}, out, 0
}

// Thread is the same open file used by another thread.
func (f *File) Thread(tid uint32) *File {
	g := *f
	g.TID = tid
	return &g
}

// Write is write(2): a long one goes out in pieces, as if from a page-aligned
// buffer, and a short or failed later piece makes a short write.
func (f *File) Write(b []byte) (int, unix.Errno) { return f.WriteAt(b, 0) }

// WriteAt is Write from a buffer that starts at this offset into a page, so that
// the first piece is shorter.
func (f *File) WriteAt(b []byte, inPage int) (int, unix.Errno) {
	done, most, start := 0, pieceMax, uint64(0)
	if f.k.raw.mounted {
		most, start = pieceMaxMount, f.Pos
		defer func() { f.Pos = start + uint64(done) }()
	}
	for {
		n := min(len(b)-done, most-(inPage+done)%4096)
		got, errno := f.Piece(start+uint64(done), b[done:done+n])
		if errno != 0 {
			if done > 0 {
				return done, 0
			}
			return 0, errno
		}
		done += got
		if got < n || done == len(b) {
			return done, 0
		}
	}
}

// Piece sends a single WRITE and waits.
func (f *File) Piece(offset uint64, b []byte) (int, unix.Errno) {
	return Written(f.PieceAsync(offset, b))
}

// PieceAsync sends a single WRITE.
func (f *File) PieceAsync(offset uint64, b []byte) *Pending {
	var in abi.FuseWriteIn
	in.Fh, in.Offset, in.Size, in.Flags = f.Fh, offset, uint32(len(b)), f.Flags
	return f.start(abi.FuseWrite, 0, bytesOf(&in), b)
}

// WriteAsync sends a write() of one piece and does not wait.
func (f *File) WriteAsync(b []byte) *Pending { return f.PieceAsync(0, b) }

// Written waits for a WRITE's count.
func Written(p *Pending) (int, unix.Errno) {
	body, errno := p.Wait()
	if errno != 0 || len(body) < 4 {
		return 0, errno
	}
	return int(binary.NativeEndian.Uint32(body)), 0
}

// Read is read(2) of up to size bytes.
func (f *File) Read(size int) ([]byte, unix.Errno) { return f.ReadAsync(size).Wait() }

// ReadAsync sends READ.
func (f *File) ReadAsync(size int) *Pending {
	var in abi.FuseReadIn
	in.Fh, in.Size, in.Flags = f.Fh, uint32(size), f.Flags
	return f.start(abi.FuseRead, size, bytesOf(&in))
}

// Poll asks for events; with notify, as a client that then goes to sleep.
func (f *File) Poll(kh uint64, events uint32, notify bool) (uint32, unix.Errno) {
	var in abi.FusePollIn
	in.Fh, in.Kh, in.Events = f.Fh, kh, events
	if notify {
		in.Flags = abi.FusePollScheduleNotify
	}
	body, errno := f.start(abi.FusePoll, 0, bytesOf(&in)).Wait()
	if errno != 0 || len(body) < 4 {
		return 0, errno
	}
	return binary.NativeEndian.Uint32(body), 0
}

// Ioctl is an unrestricted ioctl(2).
func (f *File) Ioctl(cmd uint32, arg uint64) (int32, unix.Errno) {
	var in abi.FuseIoctlIn
	in.Fh, in.Cmd, in.Arg, in.Flags = f.Fh, cmd, arg, abi.FuseIoctlUnrestricted
	body, errno := f.start(abi.FuseIoctl, 0, bytesOf(&in)).Wait()
	if errno != 0 || len(body) < 4 {
		return 0, errno
	}
	return int32(binary.NativeEndian.Uint32(body)), 0
}

// Flush sends FLUSH, which CUSE does not but a FUSE file system does.
func (f *File) Flush() unix.Errno {
	in := abi.FuseFlushIn{Fh: f.Fh}
	_, errno := f.start(abi.FuseFlush, 0, bytesOf(&in)).Wait()
	return errno
}

// Release is the last close.
func (f *File) Release() unix.Errno {
	_, errno := f.ReleaseAsync().Wait()
	return errno
}

// ReleaseAsync sends RELEASE.
func (f *File) ReleaseAsync() *Pending {
	in := abi.FuseReleaseIn{Fh: f.Fh, Flags: f.Flags}
	return f.start(abi.FuseRelease, 0, bytesOf(&in))
}

func (f *File) start(op uint32, size int, parts ...[]byte) *Pending {
	return f.k.start(op, f.TID, f.UID, f.GID, size, parts...)
}
