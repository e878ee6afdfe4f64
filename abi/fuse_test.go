package abi

import (
	"fmt"
	"testing"
)

func TestFuseLayout(t *testing.T) {
	compareLayouts(t, []string{"linux/fuse.h"}, []cStruct{
		{"fuse_out_header", FuseOutHeader{}, words("len error unique")},
		{"cuse_init_in", CuseInitIn{}, words("major minor unused flags")},
		{"cuse_init_out", CuseInitOut{}, words("major minor unused flags max_read max_write dev_major dev_minor spare")},
		{"fuse_open_in", FuseOpenIn{}, words("flags open_flags")},
		{"fuse_release_in", FuseReleaseIn{}, words("fh flags release_flags lock_owner")},
		{"fuse_flush_in", FuseFlushIn{}, words("fh unused padding lock_owner")},
		{"fuse_read_in", FuseReadIn{}, words("fh offset size read_flags lock_owner flags padding")},
		{"fuse_write_in", FuseWriteIn{}, words("fh offset size write_flags lock_owner flags padding")},
		{"fuse_write_out", FuseWriteOut{}, words("size padding")},
		{"fuse_interrupt_in", FuseInterruptIn{}, words("unique")},
		{"fuse_ioctl_in", FuseIoctlIn{}, words("fh flags cmd arg in_size out_size")},
		{"fuse_ioctl_out", FuseIoctlOut{}, words("result flags in_iovs out_iovs")},
		{"fuse_poll_in", FusePollIn{}, words("fh kh flags events")},
		{"fuse_poll_out", FusePollOut{}, words("revents padding")},
		{"fuse_notify_poll_wakeup_out", FuseNotifyPollWakeupOut{}, words("kh")},
	})
}

// Structs whose last member has had other names, and the numbers.
func TestFuseNumbers(t *testing.T) {
	src := "#include <stddef.h>\n#include <linux/fuse.h>\n#define IS(a, b) _Static_assert((a) == (b), #a)\n" +
		"IS(sizeof(struct fuse_in_header), 40); IS(offsetof(struct fuse_in_header, pid), 32);\n" +
		"IS(sizeof(struct fuse_open_out), 16); IS(offsetof(struct fuse_open_out, open_flags), 8);\n"
	for name, n := range map[string]int{
		"FUSE_KERNEL_VERSION": FuseKernelVersion, "FUSE_FORGET": FuseForget, "FUSE_OPEN": FuseOpen, "FUSE_READ": FuseRead,
		"FUSE_WRITE": FuseWrite, "FUSE_RELEASE": FuseRelease, "FUSE_FLUSH": FuseFlush, "FUSE_INTERRUPT": FuseInterrupt,
		"FUSE_IOCTL": FuseIoctl, "FUSE_POLL": FusePoll, "FUSE_NOTIFY_REPLY": FuseNotifyReply, "FUSE_BATCH_FORGET": FuseBatchForget,
		"CUSE_INIT": CuseInit, "FUSE_NOTIFY_POLL": FuseNotifyPoll, "CUSE_UNRESTRICTED_IOCTL": CuseUnrestrictedIoctl,
		"CUSE_INIT_INFO_MAX": CuseInitInfoMax, "FUSE_POLL_SCHEDULE_NOTIFY": FusePollScheduleNotify,
		"FUSE_IOCTL_COMPAT": FuseIoctlCompat, "FUSE_IOCTL_UNRESTRICTED": FuseIoctlUnrestricted,
		"FUSE_IOCTL_RETRY": FuseIoctlRetry, "FUSE_IOCTL_32BIT": FuseIoctl32bit, "FUSE_MIN_READ_BUFFER": FuseMinReadBuffer,
	} {
		src += fmt.Sprintf("IS(%s, %d);\n", name, n)
	}
	runC(t, src+"int main(void) { return 0; }\n")
}
