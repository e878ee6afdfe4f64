// Package caller is the calling process as the daemon sees it: its memory, credentials, limits and lifetime, and the
// few system calls that the daemon must run on its behalf.
//
// Who may call it: anything in the daemon that holds a request, through small interfaces that the user declares. The
// package itself imports the standard library and x/sys only. Nothing in here trusts the client: every address is
// checked by the kernel, every wait is bounded by a named constant.
//
// Three handles, three lifetimes:
//
//   - [Thread] is a thread that waits inside write() for our answer. It can neither exit nor exec until it is answered
//     (fs/fuse/dev.c request_wait_answer: "Either request is already in userspace, or it was forced. Wait it out."),
//     so process_vm_* on its id is safe and respects page protections. Responses go this way.
//   - [Process] is one address space. It holds /proc/TID/mem, which stays with that address space: after exec, exit or
//     the reuse of the pid an access fails or reaches the old memory, never another image. Payloads go this way; large
//     reads go by process id, which is quicker, and count only if the image is still the same behind them.
//   - [Remote] is a thread that was seized with ptrace while it waited, to run system calls on it (event fds).
//
// Two duties stay with the user. A copy can block for as long as the client likes (userfaultfd, a page of a FUSE file
// that its server does not answer), so no lock that another client needs may be held across one. And /proc/PID/mem
// overrides page protections the way a debugger does (FOLL_FORCE), as a pinned page ignores a later mprotect: a range
// is checked with [Process.CheckRange] when it is registered.
//
// Privileges needed: CAP_SYS_PTRACE (memory, Seize), CAP_SYS_RESOURCE (prlimit of another user's process), CAP_KILL is
// not needed. The daemon must live in the initial pid and user namespaces.
//
// Lock order: Process.mapsMu is the only lock; nothing is called under it but read(2) on the maps file.
package caller
