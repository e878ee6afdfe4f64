package ctxfs

import (
	"bytes"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

const (
	// fileSize is what a file claims: a write past the end would take the inode's
	// lock exclusively (fs/fuse/file.c, fuse_dio_wr_exclusive_lock). At 24 bytes a
	// doorbell the position never gets there.
	fileSize = 1 << 62

	// attrValid is how long the kernel keeps attributes, which never change. Names
	// it keeps for no time at all: each lookup is asked.
	attrValid = uint64(time.Hour / time.Second)

	// The directory lets everybody through and nobody list it.
	dirMode  = unix.S_IFDIR | 0o711
	fileMode = unix.S_IFREG | 0o600
)

// refusals are what a file of ib_uverbs answers to what it has no method for, and
// what a directory answers in which nothing can be made. ENOSYS is said where it
// spares the kernel asking again and the program sees something else.
var refusals = map[uint32]unix.Errno{
	abi.FuseReadlink:    unix.EINVAL,
	abi.FuseSymlink:     unix.EPERM,
	abi.FuseMknod:       unix.EPERM,
	abi.FuseMkdir:       unix.EPERM,
	abi.FuseUnlink:      unix.EPERM,
	abi.FuseRmdir:       unix.EPERM,
	abi.FuseRename:      unix.EPERM,
	abi.FuseRename2:     unix.EPERM,
	abi.FuseLink:        unix.EPERM,
	abi.FuseCreate:      unix.EPERM, // instead of ENOSYS, after which MKNOD would be tried
	abi.FuseTmpfile:     unix.EOPNOTSUPP,
	abi.FuseFsync:       unix.EINVAL, // vfs_fsync_range; ENOSYS would make it succeed
	abi.FuseFsyncdir:    unix.EINVAL,
	abi.FuseOpendir:     unix.EACCES, // ENOSYS would make it succeed
	abi.FuseReaddir:     unix.EACCES,
	abi.FuseReaddirplus: unix.EACCES,
	abi.FuseReleasedir:  unix.EBADF,
	abi.FuseAccess:      unix.EACCES, // not asked with default_permissions
	abi.FuseBmap:        unix.EINVAL,
	abi.FuseFallocate:   unix.ENODEV, // vfs_fallocate on a character device
	abi.FuseLseek:       unix.ESPIPE, // SEEK_DATA and SEEK_HOLE only
	// vfs_copy_file_range on anything but regular files
	abi.FuseCopyFileRange:   unix.EINVAL,
	abi.FuseCopyFileRange64: unix.EINVAL,
	// Seen as EOPNOTSUPP.
	abi.FuseSetxattr:    unix.ENOSYS,
	abi.FuseGetxattr:    unix.ENOSYS,
	abi.FuseListxattr:   unix.ENOSYS,
	abi.FuseRemovexattr: unix.ENOSYS,
	// GETATTR is asked instead.
	abi.FuseStatx: unix.ENOSYS,
}

// Answer implements cuse.Tree.
func (fs *FS) Answer(h *abi.FuseInHeader, body, out []byte) ([]byte, unix.Errno) {
	switch h.Opcode {
	case abi.FuseLookup:
		return fs.lookup(h.Nodeid, body, out)
	case abi.FuseGetattr:
		return fs.getattr(h.Nodeid, out)
	case abi.FuseSetattr:
		return out, setattr(h.Nodeid, body)
	case abi.FuseStatfs:
		var st abi.FuseStatfsOut // of no size, so that df leaves it out
		st.Bsize, st.Frsize = 4096, 4096
		st.Namelen = 2 * nameBytes
		return append(out, bytesOf(&st)...), 0
	}
	if errno := refusals[h.Opcode]; errno != 0 {
		return out, errno
	}
	return out, unix.ENOSYS
}

func (fs *FS) lookup(parent uint64, body, out []byte) ([]byte, unix.Errno) {
	name, _, ok := bytes.Cut(body, []byte{0})
	if !ok {
		return out, unix.EINVAL
	}
	if parent != abi.FuseRootID {
		return out, unix.ENOTDIR
	}
	fs.mu.Lock()
	e := fs.names[string(name)]
	fs.mu.Unlock()
	if e == nil {
		return out, unix.ENOENT
	}
	var m abi.FuseEntryOut
	m.Nodeid = e.node
	m.AttrValid = attrValid
	m.Attr = e.attr()
	return append(out, bytesOf(&m)...), 0
}

func (fs *FS) getattr(node uint64, out []byte) ([]byte, unix.Errno) {
	var m abi.FuseAttrOut
	m.AttrValid = attrValid
	if node == abi.FuseRootID {
		m.Attr = abi.FuseAttr{Ino: node, Mode: dirMode, Nlink: 2, Blksize: 4096}
		return append(out, bytesOf(&m)...), 0
	}
	fs.mu.Lock()
	e := fs.nodes[node]
	fs.mu.Unlock()
	if e == nil {
		return out, unix.ENOENT
	}
	m.Attr = e.attr()
	return append(out, bytesOf(&m)...), 0
}

func (e *Entry) attr() abi.FuseAttr {
	return abi.FuseAttr{Ino: e.node, Size: fileSize, Mode: fileMode, Nlink: 1, UID: e.uid, GID: e.gid, Blksize: 4096}
}

// setattr refuses: ftruncate() of what is no regular file is EINVAL (fs/open.c,
// do_sys_ftruncate), and owner, mode and times are not the client's to change.
func setattr(node uint64, body []byte) unix.Errno {
	var in abi.FuseSetattrIn
	if copy(bytesOf(&in), body) < len(bytesOf(&in)) {
		return unix.EIO
	}
	if node != abi.FuseRootID && in.Valid&abi.FattrSize != 0 {
		return unix.EINVAL
	}
	return unix.EPERM
}
