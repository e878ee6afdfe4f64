package dispatch

import (
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/pin"
	"golang.org/x/sys/unix"
)

// Request is one system call of a client that waits for its answer. Exactly
// one Reply method is called on it, once, from any goroutine.
type Request interface {
	// TID is the calling thread, UID and GID its file-system ids.
	TID() int
	UID() uint32
	GID() uint32
	// FileFlags are the file's flags at the time of the call (O_NONBLOCK).
	FileFlags() uint32
	ReplyError(unix.Errno)
	ReplyWrite(n int)
	ReplyRead(b []byte)
	ReplyPoll(revents uint32)
	// OnInterrupt arranges for fn to be called once if the thread gets a signal
	// while it waits, at once if it already has.
	OnInterrupt(fn func())
	// Pending is false once the request has been answered, also by the
	// transport because the client was killed: its thread may be gone.
	Pending() bool
	// Detach says that the caller's goroutine is about to block.
	Detach()
}

// System is the way to the calling process (cuse/caller; a fake in tests).
type System interface {
	// OpenProcess takes hold of the process that tid belongs to and of its
	// present address space.
	OpenProcess(tid int) (Process, error)
	// Credentials notes who opens a file.
	Credentials(p Process, tid int, uid, gid uint32) (Credentials, error)
	// Read and Write reach the memory of a thread whose request is unanswered.
	// EFAULT unless all of it worked.
	Read(tid int, b []byte, addr uint64) error
	Write(tid int, b []byte, addr uint64) error
	// ReadBehind fills b from behind the first written bytes of the buffer that
	// tid's write(2) names. EFAULT.
	ReadBehind(tid, written int, b []byte) error
	// OpenFile takes hold of the file behind a descriptor of tid's. EBADF.
	OpenFile(tid int, fd int32) (ClientFile, error)
	// SameFile: descriptors a and b of tid's are one open file.
	SameFile(tid int, a, b int32) bool
	// Install opens our node, as a new descriptor of the client: by the first of
	// ways, of which each is a path, that makes opened true. ways is given the
	// client's command descriptor. An error means that nothing has been done and
	// answer was not called. Otherwise answer has been called (it must complete the
	// client's write), then done, once, while the thread stood still if that
	// could be had: with the new descriptor, or the error that prevented it.
	// What done returns, if not 0, becomes the result of the client's write in
	// place of success, and the descriptor is closed again.
	Install(tid int, ways func(commandFD int) []string, opened func() bool, answer func(), done func(s Standing, err error) unix.Errno) error
}

// FileKey tells inodes apart.
type FileKey struct{ Dev, Ino uint64 }

// ClientFile is a file of a client's. Its inode is not another's until Close.
type ClientFile interface {
	Key() FileKey
	Close()
}

// Standing is a client thread that stands still at the end of its write().
type Standing interface {
	// FD is its new descriptor.
	FD() int
	// Write is System.Write for this thread.
	Write(b []byte, addr uint64) error
	// Replace opens path and puts it in the place of the command descriptor, if
	// opened is true after it.
	Replace(path string, opened func() bool) error
}

// Process is one address space of one process.
type Process interface {
	hca.Memory
	pin.Owner
	Name() string
	// CanNetRaw is CAP_NET_RAW.
	CanNetRaw() bool
	// CheckRange is EFAULT unless every byte is mapped and, if write, writable.
	CheckRange(addr, length uint64, write bool) error
	// SharedPieces are the pieces of a range that other processes may have
	// mapped too, as far as can be seen now.
	SharedPieces(addr, length uint64) ([]hca.SharedPiece, error)
	Get()
	Put()
}

// Credentials are those of a file's opener.
type Credentials interface {
	// Check is EACCES unless the caller is the opener's process with unchanged
	// credentials (ib_safe_file_access). It is asked for each command.
	Check(tid int, uid, gid uint32) error
	// CheckImage is EACCES once the opener has exec'ed: then its credentials are
	// new ones, even if they are equal. It costs a system call that can sleep.
	CheckImage() error
}
