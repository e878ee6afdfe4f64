package abi

import (
	"fmt"
	"testing"
)

func TestFuseMountLayout(t *testing.T) {
	compareLayouts(t, []string{"linux/fuse.h"}, []cStruct{
		{"fuse_attr", FuseAttr{}, words(`ino size blocks atime mtime ctime atimensec mtimensec ctimensec mode nlink uid gid rdev
			blksize flags`)},
		{"fuse_entry_out", FuseEntryOut{}, words("nodeid generation entry_valid attr_valid entry_valid_nsec attr_valid_nsec attr")},
		{"fuse_attr_out", FuseAttrOut{}, words("attr_valid attr_valid_nsec dummy attr")},
		{"fuse_setattr_in", FuseSetattrIn{}, words("valid padding fh size")},
		{"fuse_statfs_out", FuseStatfsOut{}, words(`st.blocks st.bfree st.bavail st.files st.ffree st.bsize st.namelen st.frsize
			st.padding st.spare`)},
		{"fuse_init_in", FuseInitIn{}, words("major minor max_readahead flags flags2 unused")},
	})
}

// Structs whose last members have had other names, and the numbers. What a header
// before 7.40 does not have is not compared with it.
func TestFuseMountNumbers(t *testing.T) {
	src := "#include <stddef.h>\n#include <sys/ioctl.h>\n#include <linux/fuse.h>\n#define IS(a, b) _Static_assert((a) == (b), #a)\n" +
		"IS(sizeof(struct fuse_init_out), 64); IS(offsetof(struct fuse_init_out, max_background), 16);\n" +
		"IS(offsetof(struct fuse_init_out, max_write), 20); IS(offsetof(struct fuse_init_out, max_pages), 28);\n" +
		"IS(offsetof(struct fuse_init_out, flags2), 32);\n" +
		"IS(sizeof(struct fuse_notify_inval_entry_out), 16); IS(offsetof(struct fuse_notify_inval_entry_out, namelen), 8);\n"
	for name, n := range map[string]uint64{
		"FUSE_LOOKUP": FuseLookup, "FUSE_GETATTR": FuseGetattr, "FUSE_SETATTR": FuseSetattr, "FUSE_READLINK": FuseReadlink,
		"FUSE_SYMLINK": FuseSymlink, "FUSE_MKNOD": FuseMknod, "FUSE_MKDIR": FuseMkdir, "FUSE_UNLINK": FuseUnlink,
		"FUSE_RMDIR": FuseRmdir, "FUSE_RENAME": FuseRename, "FUSE_LINK": FuseLink, "FUSE_STATFS": FuseStatfs,
		"FUSE_FSYNC": FuseFsync, "FUSE_SETXATTR": FuseSetxattr, "FUSE_GETXATTR": FuseGetxattr, "FUSE_LISTXATTR": FuseListxattr,
		"FUSE_REMOVEXATTR": FuseRemovexattr, "FUSE_INIT": FuseInit, "FUSE_OPENDIR": FuseOpendir, "FUSE_READDIR": FuseReaddir,
		"FUSE_RELEASEDIR": FuseReleasedir, "FUSE_FSYNCDIR": FuseFsyncdir, "FUSE_ACCESS": FuseAccess, "FUSE_CREATE": FuseCreate,
		"FUSE_BMAP": FuseBmap, "FUSE_DESTROY": FuseDestroy, "FUSE_FALLOCATE": FuseFallocate, "FUSE_READDIRPLUS": FuseReaddirplus,
		"FUSE_RENAME2": FuseRename2, "FUSE_LSEEK": FuseLseek, "FUSE_COPY_FILE_RANGE": FuseCopyFileRange, "FUSE_TMPFILE": FuseTmpfile,
		"FUSE_NOTIFY_INVAL_ENTRY": FuseNotifyInvalEntry, "FUSE_ROOT_ID": FuseRootID, "FUSE_BIG_WRITES": FuseBigWrites,
		"FUSE_PARALLEL_DIROPS": FuseParallelDirops, "FUSE_MAX_PAGES": FuseMaxPages, "FUSE_INIT_EXT": FuseInitExt,
		"FOPEN_DIRECT_IO": FopenDirectIO, "FOPEN_NOFLUSH": FopenNoflush,
		"FOPEN_PARALLEL_DIRECT_WRITES": FopenParallelDirectWrites, "FATTR_SIZE": FattrSize,
	} {
		src += fmt.Sprintf("IS(%s, %d);\n", name, n)
	}
	src += "#if FUSE_KERNEL_MINOR_VERSION >= 40\n" +
		"IS(offsetof(struct fuse_init_out, max_stack_depth), 36); IS(offsetof(struct fuse_open_out, backing_id), 12);\n" +
		"IS(sizeof(struct fuse_backing_map), 16); IS(offsetof(struct fuse_backing_map, flags), 4);\n"
	for name, n := range map[string]uint64{
		"FUSE_STATX": FuseStatx, "FOPEN_PASSTHROUGH": FopenPassthrough, "FUSE_PASSTHROUGH": FuseInit2Passthrough << 32,
		"FUSE_DEV_IOC_BACKING_OPEN": FuseDevIocBackingOpen, "FUSE_DEV_IOC_BACKING_CLOSE": FuseDevIocBackingClose,
	} {
		src += fmt.Sprintf("IS(%s, %d);\n", name, n)
	}
	runC(t, src+"#endif\nint main(void) { return 0; }\n")
}
