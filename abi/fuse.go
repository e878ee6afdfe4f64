package abi

import "unsafe"

// FUSE and CUSE wire structs and numbers, from include/uapi/linux/fuse.h: what a
// character device served through /dev/cuse can see. What a mounted file system
// sees beside that is in fuse_mount.go.

// Protocol version (FUSE_KERNEL_VERSION and the newest minor this file was
// checked against, FUSE_KERNEL_MINOR_VERSION of the header in use).
const (
	FuseKernelVersion      = 7
	FuseKernelMinorVersion = 38
)

// enum fuse_opcode.
const (
	FuseForget      = 2  // FUSE_FORGET, takes no reply
	FuseOpen        = 14 // FUSE_OPEN
	FuseRead        = 15 // FUSE_READ
	FuseWrite       = 16 // FUSE_WRITE
	FuseRelease     = 18 // FUSE_RELEASE
	FuseFlush       = 25 // FUSE_FLUSH
	FuseInterrupt   = 36 // FUSE_INTERRUPT
	FuseIoctl       = 39 // FUSE_IOCTL
	FusePoll        = 40 // FUSE_POLL
	FuseNotifyReply = 41 // FUSE_NOTIFY_REPLY, takes no reply
	FuseBatchForget = 42 // FUSE_BATCH_FORGET, takes no reply

	CuseInit = 4096 // CUSE_INIT
)

// enum fuse_notify_code.
const FuseNotifyPoll = 1 // FUSE_NOTIFY_POLL

// Flags and limits.
const (
	CuseUnrestrictedIoctl = 1 << 0 // CUSE_UNRESTRICTED_IOCTL
	CuseInitInfoMax       = 4096   // CUSE_INIT_INFO_MAX

	FusePollScheduleNotify = 1 << 0 // FUSE_POLL_SCHEDULE_NOTIFY

	FuseIoctlCompat       = 1 << 0 // FUSE_IOCTL_COMPAT
	FuseIoctlUnrestricted = 1 << 1 // FUSE_IOCTL_UNRESTRICTED
	FuseIoctlRetry        = 1 << 2 // FUSE_IOCTL_RETRY
	FuseIoctl32bit        = 1 << 3 // FUSE_IOCTL_32BIT

	FuseMinReadBuffer = 8192 // FUSE_MIN_READ_BUFFER

	// FuseIntReqBit is FUSE_INT_REQ_BIT (fs/fuse/dev.c, not in the uapi
	// header): an INTERRUPT's own unique is the request's with this bit set.
	FuseIntReqBit = 1 << 0
)

// FuseInHeader is struct fuse_in_header, linux/fuse.h.
type FuseInHeader struct {
	Len         uint32
	Opcode      uint32
	Unique      uint64
	Nodeid      uint64
	UID         uint32
	GID         uint32
	PID         uint32 // thread id of the caller, 0 outside our pid namespace
	TotalExtlen uint16 // extensions after the arguments, in 8-byte units (7.38)
	_           uint16
}

// FuseOutHeader is struct fuse_out_header, linux/fuse.h.
type FuseOutHeader struct {
	Len    uint32
	Error  int32 // -errno, or a notify code when Unique is 0
	Unique uint64
}

// CuseInitIn is struct cuse_init_in, linux/fuse.h.
type CuseInitIn struct {
	Major uint32
	Minor uint32
	_     uint32 // unused
	Flags uint32
}

// CuseInitOut is struct cuse_init_out, linux/fuse.h.
type CuseInitOut struct {
	Major    uint32
	Minor    uint32
	_        uint32 // unused
	Flags    uint32
	MaxRead  uint32
	MaxWrite uint32
	DevMajor uint32
	DevMinor uint32
	_        [10]uint32 // spare
}

// FuseOpenIn is struct fuse_open_in, linux/fuse.h.
type FuseOpenIn struct {
	Flags     uint32
	OpenFlags uint32
}

// FuseOpenOut is struct fuse_open_out, linux/fuse.h.
type FuseOpenOut struct {
	Fh        uint64
	OpenFlags uint32
	BackingID int32 // with FopenPassthrough (7.40); padding before
}

// FuseReleaseIn is struct fuse_release_in, linux/fuse.h.
type FuseReleaseIn struct {
	Fh           uint64
	Flags        uint32
	ReleaseFlags uint32
	LockOwner    uint64
}

// FuseFlushIn is struct fuse_flush_in, linux/fuse.h.
type FuseFlushIn struct {
	Fh        uint64
	_         uint32 // unused
	_         uint32 // padding
	LockOwner uint64
}

// FuseReadIn is struct fuse_read_in, linux/fuse.h.
type FuseReadIn struct {
	Fh        uint64
	Offset    uint64
	Size      uint32
	ReadFlags uint32
	LockOwner uint64
	Flags     uint32 // the file's f_flags at this call
	_         uint32
}

// FuseWriteIn is struct fuse_write_in, linux/fuse.h.
type FuseWriteIn struct {
	Fh         uint64
	Offset     uint64
	Size       uint32
	WriteFlags uint32
	LockOwner  uint64
	Flags      uint32 // the file's f_flags at this call
	_          uint32
}

// FuseWriteOut is struct fuse_write_out, linux/fuse.h.
type FuseWriteOut struct {
	Size uint32
	_    uint32
}

// FuseInterruptIn is struct fuse_interrupt_in, linux/fuse.h.
type FuseInterruptIn struct {
	Unique uint64
}

// FuseIoctlIn is struct fuse_ioctl_in, linux/fuse.h.
type FuseIoctlIn struct {
	Fh      uint64
	Flags   uint32
	Cmd     uint32
	Arg     uint64
	InSize  uint32
	OutSize uint32
}

// FuseIoctlOut is struct fuse_ioctl_out, linux/fuse.h.
type FuseIoctlOut struct {
	Result  int32
	Flags   uint32
	InIovs  uint32
	OutIovs uint32
}

// FusePollIn is struct fuse_poll_in, linux/fuse.h.
type FusePollIn struct {
	Fh     uint64
	Kh     uint64
	Flags  uint32
	Events uint32
}

// FusePollOut is struct fuse_poll_out, linux/fuse.h.
type FusePollOut struct {
	Revents uint32
	_       uint32
}

// FuseNotifyPollWakeupOut is struct fuse_notify_poll_wakeup_out, linux/fuse.h.
type FuseNotifyPollWakeupOut struct {
	Kh uint64
}

var (
	_ [40]byte = [unsafe.Sizeof(FuseInHeader{})]byte{}
	_ [16]byte = [unsafe.Sizeof(FuseOutHeader{})]byte{}
	_ [16]byte = [unsafe.Sizeof(CuseInitIn{})]byte{}
	_ [72]byte = [unsafe.Sizeof(CuseInitOut{})]byte{}
	_ [8]byte  = [unsafe.Sizeof(FuseOpenIn{})]byte{}
	_ [16]byte = [unsafe.Sizeof(FuseOpenOut{})]byte{}
	_ [24]byte = [unsafe.Sizeof(FuseReleaseIn{})]byte{}
	_ [24]byte = [unsafe.Sizeof(FuseFlushIn{})]byte{}
	_ [40]byte = [unsafe.Sizeof(FuseReadIn{})]byte{}
	_ [40]byte = [unsafe.Sizeof(FuseWriteIn{})]byte{}
	_ [8]byte  = [unsafe.Sizeof(FuseWriteOut{})]byte{}
	_ [8]byte  = [unsafe.Sizeof(FuseInterruptIn{})]byte{}
	_ [32]byte = [unsafe.Sizeof(FuseIoctlIn{})]byte{}
	_ [16]byte = [unsafe.Sizeof(FuseIoctlOut{})]byte{}
	_ [24]byte = [unsafe.Sizeof(FusePollIn{})]byte{}
	_ [8]byte  = [unsafe.Sizeof(FusePollOut{})]byte{}
	_ [8]byte  = [unsafe.Sizeof(FuseNotifyPollWakeupOut{})]byte{}
)
