package abi

import "unsafe"

// What a mounted file system sees of FUSE beside fuse.go: the numbers and structs
// for regular files whose mmap() the kernel passes on to another file (passthrough,
// protocol 7.40, Linux 6.9).

// FusePassthroughMinor is the protocol's minor version with FUSE_PASSTHROUGH.
const FusePassthroughMinor = 40

// enum fuse_opcode.
const (
	FuseLookup        = 1  // FUSE_LOOKUP
	FuseGetattr       = 3  // FUSE_GETATTR
	FuseSetattr       = 4  // FUSE_SETATTR
	FuseReadlink      = 5  // FUSE_READLINK
	FuseSymlink       = 6  // FUSE_SYMLINK
	FuseMknod         = 8  // FUSE_MKNOD
	FuseMkdir         = 9  // FUSE_MKDIR
	FuseUnlink        = 10 // FUSE_UNLINK
	FuseRmdir         = 11 // FUSE_RMDIR
	FuseRename        = 12 // FUSE_RENAME
	FuseLink          = 13 // FUSE_LINK
	FuseStatfs        = 17 // FUSE_STATFS
	FuseFsync         = 20 // FUSE_FSYNC
	FuseSetxattr      = 21 // FUSE_SETXATTR
	FuseGetxattr      = 22 // FUSE_GETXATTR
	FuseListxattr     = 23 // FUSE_LISTXATTR
	FuseRemovexattr   = 24 // FUSE_REMOVEXATTR
	FuseInit          = 26 // FUSE_INIT
	FuseOpendir       = 27 // FUSE_OPENDIR
	FuseReaddir       = 28 // FUSE_READDIR
	FuseReleasedir    = 29 // FUSE_RELEASEDIR
	FuseFsyncdir      = 30 // FUSE_FSYNCDIR
	FuseAccess        = 34 // FUSE_ACCESS
	FuseCreate        = 35 // FUSE_CREATE
	FuseBmap          = 37 // FUSE_BMAP
	FuseDestroy       = 38 // FUSE_DESTROY
	FuseFallocate     = 43 // FUSE_FALLOCATE
	FuseReaddirplus   = 44 // FUSE_READDIRPLUS
	FuseRename2       = 45 // FUSE_RENAME2
	FuseLseek         = 46 // FUSE_LSEEK
	FuseCopyFileRange = 47 // FUSE_COPY_FILE_RANGE
	FuseTmpfile       = 51 // FUSE_TMPFILE
	FuseStatx         = 52 // FUSE_STATX (7.39)

	FuseCopyFileRange64 = 53 // FUSE_COPY_FILE_RANGE_64 (7.45)
)

// FuseNotifyInvalEntry is FUSE_NOTIFY_INVAL_ENTRY.
const FuseNotifyInvalEntry = 3

// FuseRootID is FUSE_ROOT_ID, the node of the root directory.
const FuseRootID = 1

// Flags of FUSE_INIT. Those of FuseInit2 are the upper half of 64 bits, in flags2.
const (
	FuseBigWrites      = 1 << 5  // FUSE_BIG_WRITES
	FuseParallelDirops = 1 << 18 // FUSE_PARALLEL_DIROPS
	FuseMaxPages       = 1 << 22 // FUSE_MAX_PAGES
	FuseInitExt        = 1 << 30 // FUSE_INIT_EXT: flags2 counts

	FuseInit2Passthrough = 1 << (37 - 32) // FUSE_PASSTHROUGH
)

// Flags of an answer to OPEN.
const (
	FopenDirectIO             = 1 << 0 // FOPEN_DIRECT_IO
	FopenNoflush              = 1 << 5 // FOPEN_NOFLUSH
	FopenParallelDirectWrites = 1 << 6 // FOPEN_PARALLEL_DIRECT_WRITES
	FopenPassthrough          = 1 << 7 // FOPEN_PASSTHROUGH
)

// FattrSize is FATTR_SIZE, of fuse_setattr_in.valid.
const FattrSize = 1 << 3

// ioctls of /dev/fuse: _IOW(229, 1, struct fuse_backing_map), which returns the
// id, and _IOW(229, 2, uint32_t).
const (
	FuseDevIocBackingOpen  = 1<<30 | 16<<16 | 229<<8 | 1 // FUSE_DEV_IOC_BACKING_OPEN
	FuseDevIocBackingClose = 1<<30 | 4<<16 | 229<<8 | 2  // FUSE_DEV_IOC_BACKING_CLOSE
)

// FuseInitIn is struct fuse_init_in, linux/fuse.h.
type FuseInitIn struct {
	Major        uint32
	Minor        uint32
	MaxReadahead uint32
	Flags        uint32
	Flags2       uint32
	_            [11]uint32 // unused
}

// FuseInitOut is struct fuse_init_out, linux/fuse.h.
type FuseInitOut struct {
	Major               uint32
	Minor               uint32
	MaxReadahead        uint32
	Flags               uint32
	MaxBackground       uint16
	CongestionThreshold uint16
	MaxWrite            uint32
	TimeGran            uint32
	MaxPages            uint16
	MapAlignment        uint16
	Flags2              uint32
	MaxStackDepth       uint32    // 7.40
	_                   [6]uint32 // request_timeout (7.43), unused
}

// FuseAttr is struct fuse_attr, linux/fuse.h.
type FuseAttr struct {
	Ino       uint64
	Size      uint64
	Blocks    uint64
	Atime     uint64
	Mtime     uint64
	Ctime     uint64
	Atimensec uint32
	Mtimensec uint32
	Ctimensec uint32
	Mode      uint32
	Nlink     uint32
	UID       uint32
	GID       uint32
	Rdev      uint32
	Blksize   uint32
	Flags     uint32
}

// FuseEntryOut is struct fuse_entry_out, linux/fuse.h.
type FuseEntryOut struct {
	Nodeid         uint64
	Generation     uint64
	EntryValid     uint64 // seconds
	AttrValid      uint64 // seconds
	EntryValidNsec uint32
	AttrValidNsec  uint32
	Attr           FuseAttr
}

// FuseAttrOut is struct fuse_attr_out, linux/fuse.h.
type FuseAttrOut struct {
	AttrValid     uint64 // seconds
	AttrValidNsec uint32
	_             uint32 // dummy
	Attr          FuseAttr
}

// FuseSetattrIn is the start of struct fuse_setattr_in, linux/fuse.h.
type FuseSetattrIn struct {
	Valid uint32
	_     uint32 // padding
	Fh    uint64
	Size  uint64
}

// FuseStatfsOut is struct fuse_statfs_out, linux/fuse.h.
type FuseStatfsOut struct {
	Blocks  uint64
	Bfree   uint64
	Bavail  uint64
	Files   uint64
	Ffree   uint64
	Bsize   uint32
	Namelen uint32
	Frsize  uint32
	_       uint32    // padding
	_       [6]uint32 // spare
}

// FuseNotifyInvalEntryOut is struct fuse_notify_inval_entry_out, linux/fuse.h.
// The name and a 0 follow.
type FuseNotifyInvalEntryOut struct {
	Parent  uint64
	Namelen uint32 // without the 0
	Flags   uint32 // padding before 7.38
}

// FuseBackingMap is struct fuse_backing_map, linux/fuse.h (7.40).
type FuseBackingMap struct {
	Fd    int32
	Flags uint32
	_     uint64 // padding
}

var (
	_ [64]byte  = [unsafe.Sizeof(FuseInitIn{})]byte{}
	_ [64]byte  = [unsafe.Sizeof(FuseInitOut{})]byte{}
	_ [88]byte  = [unsafe.Sizeof(FuseAttr{})]byte{}
	_ [128]byte = [unsafe.Sizeof(FuseEntryOut{})]byte{}
	_ [104]byte = [unsafe.Sizeof(FuseAttrOut{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(FuseSetattrIn{})]byte{}
	_ [80]byte  = [unsafe.Sizeof(FuseStatfsOut{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(FuseNotifyInvalEntryOut{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(FuseBackingMap{})]byte{}
)
