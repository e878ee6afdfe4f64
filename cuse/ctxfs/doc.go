// Package ctxfs is the file system whose files replace a mapped client's command
// fd: write() reaches the daemon as a write() to the CUSE node does, mmap() gets
// memory that the daemon maps too, and nothing else works. CUSE itself has no mmap;
// a FUSE file opened with FOPEN_PASSTHROUGH has one (Linux 6.9), which goes to a
// file of the server's choice, here the memfd of an Arena.
//
// cmd/uverbsd mounts one FS per device with New, serves it with Serve, and adds
// one Entry for each context that is to be mapped. It has the client's stopped
// thread open Entry.Path and put the file in the place of its command fd. The
// session is a cuse.Session: bounds, the one reply, joined long writes, interrupt
// and shutdown are the same code.
//
// # Who gets in
//
// Four walls: the name has 128 random bits and no directory lists it; the kernel
// lets only the owner open it (default_permissions, mode 0600, the client's uid);
// the Opener decides by thread; and an Entry is opened once. After that its name
// is gone, and a second open of the inode through /proc/PID/fd fails with EACCES,
// whoever asks.
//
// # Where it differs from an ib_uverbs file
//
// The kernel treats it as a regular file, and that shows:
//   - write() on one open file is one at a time among the threads that share it
//     (file.f_pos_lock, since FOPEN_STREAM may not stand beside FOPEN_PASSTHROUGH):
//     while a command of one thread waits, those of others wait in the kernel.
//   - the file has a position, which each write() moves on, and pwrite() works.
//     Offsets mean nothing here but to tell the pieces of a long write() apart.
//     RLIMIT_FSIZE counts against the position.
//   - a mapping keeps the memory but not the file: RELEASE comes with the last
//     close, where munmap() may come later for ib_uverbs.
//   - close() and exit do not wait for RELEASE, as they do with CUSE
//     (fs/fuse/file.c, fuse_release_common): what the file held is given back a
//     moment after the process may have gone.
//   - poll() says ready, as for a file that has no poll, but epoll takes the file.
//   - fsync, fallocate, ftruncate and lseek (SEEK_DATA) fail as for ib_uverbs;
//     chmod and utimes, which work on a node, fail with EPERM.
//
// # Hostile memory
//
// A client reads and writes its arena at any time. It cannot change the size: only
// the FUSE file is in its hands, whose ftruncate and fallocate are refused, and the
// memfd is sealed against shrinking. It can punch holes: madvise(MADV_REMOVE) on
// its mapping goes to the memfd (mm/madvise.c, madvise_remove). Those read as
// zeros afterwards, and the daemon's next touch allocates the page again. If that
// fails for want of memory the kernel kills by the usual rules; only with strict
// overcommit (vm.overcommit_memory 2) and nothing left, root's reserve included,
// would the touch raise SIGBUS.
//
// # Locks
//
// FS.mu and Arena.mu are leaves. No Opener, File method, system call on the FUSE
// channel or mount runs under FS.mu.
package ctxfs
