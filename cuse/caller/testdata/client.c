// The client of package caller's tests: client MODE FILE [N]. It speaks to the test over stdin and stdout, a line each.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <pthread.h>

static void die(const char *what) { printf("%s: %s\n", what, strerror(errno)); fflush(stdout); exit(1); }
static void say(const char *s) { puts(s); fflush(stdout); }
static void await_line(void) { char b[80]; if (!fgets(b, sizeof b, stdin)) exit(0); }

// checked_write makes the system call with a known value in every register that it must keep, and with known bytes in the
// check_words words below the stack pointer: the red zone is 16, what lies beyond belongs to signal frames. It returns the result, or -9999 - n when check n failed.
int check_words = 80;
__asm__(
"checked_write:\n"
"  push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
"  mov $0x1111111111111111, %rbx; mov $0x2222222222222222, %rbp; mov $0x3333333333333333, %r12\n"
"  mov $0x4444444444444444, %r13; mov $0x5555555555555555, %r14; mov $0x6666666666666666, %r15\n"
"  mov $0x7777777777777777, %r8; mov $0x8888888888888888, %r9; mov $0x9999999999999999, %r10\n"
"  movq %rbx, %xmm3; movq %r10, %xmm15\n"
"  mov check_words(%rip), %ecx\n"
"1: mov %rcx, %r11; imul $0x01010101, %r11, %r11; mov %rcx, %rax; neg %rax; mov %r11, (%rsp,%rax,8); dec %ecx; jnz 1b\n"
"  movq %rdi, %xmm5; movq %rsi, %xmm6; movq %rdx, %xmm7; movq %rsp, %xmm8\n"
"  mov $1, %eax\n"
"  stc\n"
"  syscall\n"
"  setc %cl\n"
"  movq %xmm8, %r11; cmp %r11, %rsp; jne 99f\n"
"  test %cl, %cl; mov $1, %ecx; jz 9f\n"
"  mov $2, %ecx; movq %xmm5, %r11; cmp %r11, %rdi; jne 9f\n"
"  mov $3, %ecx; movq %xmm6, %r11; cmp %r11, %rsi; jne 9f\n"
"  mov $4, %ecx; movq %xmm7, %r11; cmp %r11, %rdx; jne 9f\n"
"  mov $5, %ecx; mov $0x1111111111111111, %r11; cmp %r11, %rbx; jne 9f\n"
"  mov $6, %ecx; mov $0x2222222222222222, %r11; cmp %r11, %rbp; jne 9f\n"
"  mov $7, %ecx; mov $0x3333333333333333, %r11; cmp %r11, %r12; jne 9f\n"
"  mov $8, %ecx; mov $0x4444444444444444, %r11; cmp %r11, %r13; jne 9f\n"
"  mov $9, %ecx; mov $0x5555555555555555, %r11; cmp %r11, %r14; jne 9f\n"
"  mov $10, %ecx; mov $0x6666666666666666, %r11; cmp %r11, %r15; jne 9f\n"
"  mov $11, %ecx; mov $0x7777777777777777, %r11; cmp %r11, %r8; jne 9f\n"
"  mov $12, %ecx; mov $0x8888888888888888, %r11; cmp %r11, %r9; jne 9f\n"
"  mov $13, %ecx; mov $0x9999999999999999, %r11; cmp %r11, %r10; jne 9f\n"
"  mov $14, %ecx; movq %xmm3, %r11; cmp %r11, %rbx; jne 9f\n"
"  mov $15, %ecx; movq %xmm15, %r11; cmp %r11, %r10; jne 9f\n"
"  mov check_words(%rip), %ecx\n"
"2: mov %rcx, %r11; imul $0x01010101, %r11, %r11; mov %rcx, %r8; neg %r8; cmp %r11, (%rsp,%r8,8); je 3f; add $1000, %ecx; jmp 9f\n"
"3: dec %ecx; jnz 2b\n"
"  jmp 8f\n"
"99: ud2\n"
"9: mov $-9999, %rax; sub %rcx, %rax\n"
"8: pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
"  ret\n");
long checked_write(int fd, const void *buf, size_t n);

static volatile sig_atomic_t alarms;
static volatile int queued, order_bad, last = -1;
static void on_alarm(int s) { (void)s; alarms++; }
static void on_queued(int s, siginfo_t *si, void *u)
{
	(void)s; (void)u;
	if (si->si_value.sival_int != last + 1) order_bad++;
	last = si->si_value.sival_int;
	queued++;
}

static void storm(void)
{
	check_words = 16;
	struct sigaction a = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
	struct sigaction q = { .sa_sigaction = on_queued, .sa_flags = SA_RESTART | SA_SIGINFO };
	struct itimerval it = { { 0, 1000 }, { 0, 1000 } };
	sigaction(SIGALRM, &a, NULL);
	sigaction(SIGRTMIN, &q, NULL);
	setitimer(ITIMER_REAL, &it, NULL);
}

static char buf[64] = "0123456789abcdef0123456789abcdef";

/* half a megabyte at an address that two images of this program agree on */
static void fixed(int c)
{
	char *at = (char *)(1UL << 40);
	if (mmap(at, 1 << 19, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at) die("mmap");
	memset(at, c, 1 << 19);
}

static int loop(int fd, int n, int checked)
{
	sigset_t before, after;
	sigprocmask(SIG_SETMASK, NULL, &before);
	for (int i = 0; i < n; i++) {
		long r = checked ? checked_write(fd, buf, sizeof buf) : write(fd, buf, sizeof buf);
		if (r != sizeof buf) { printf("write %d: %ld\n", i, r); return 1; }
		sigprocmask(SIG_SETMASK, NULL, &after);
		if (memcmp(&before, &after, 8)) { printf("write %d: signal mask changed\n", i); return 1; }
	}
	return 0;
}

static char stack[65536] __attribute__((aligned(16)));
static int sibling(void *pipefds) // ends when the process that it was cloned from does
{
	int *p = pipefds;
	char c;
	close(1);
	close(p[1]);
	while (read(p[0], &c, 1) > 0);
	_exit(0);
}

static int fd_of_thread;
static void *thread_write(void *a) { (void)a; if (write(fd_of_thread, buf, sizeof buf) < 0) die("write"); pause(); return NULL; }

int main(int argc, char **argv)
{
	if (argc < 3) return 2;
	const char *mode = argv[1], *file = argv[2];
	int n = argc > 3 ? atoi(argv[3]) : 1;
	if (!strcmp(mode, "image")) { // what an exec leads to: a fresh image that says where buf is
		fixed('n');
		printf("image %p\n", (void *)buf); fflush(stdout);
		await_line();
		printf("%.16s\n", buf); fflush(stdout);
		return 0;
	}
	int fd = open(file, O_RDWR | (strcmp(mode, "exec") && strcmp(mode, "execsibling") ? O_CLOEXEC : 0));
	if (fd < 0) die("open");

	if (!strcmp(mode, "regs")) {
		if (loop(fd, n, 1)) return 1;
	} else if (!strcmp(mode, "storm")) {
		storm();
		if (loop(fd, n, 1)) return 1;
		struct itimerval off = { { 0, 0 }, { 0, 0 } };
		setitimer(ITIMER_REAL, &off, NULL);
		say("looped");
		await_line(); // by now all is sent; a blocked read returns only after pending signals were handled
		printf("alarms %d queued %d disorder %d\n", alarms > 0, queued, order_bad); fflush(stdout);
		return 0;
	} else if (!strcmp(mode, "memory")) {
		long pg = sysconf(_SC_PAGESIZE);
		char *m = mmap(NULL, 8 * pg, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		memset(m, 'm', 8 * pg);
		mprotect(m + 2 * pg, pg, PROT_READ);
		mprotect(m + 4 * pg, pg, PROT_NONE);
		munmap(m + 6 * pg, pg);
		printf("%p\n", (void *)m); fflush(stdout);
	} else if (!strcmp(mode, "shared")) { // private, shared, private, shared again, of one file and of none
		long pg = sysconf(_SC_PAGESIZE);
		char *m = mmap(NULL, 8 * pg, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		int s = memfd_create("shared", 0);
		if (s < 0 || ftruncate(s, 8 * pg)) die("memfd");
		if (mmap(m + pg, 2 * pg, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, s, 0) == MAP_FAILED) die("mmap");
		if (mmap(m + 4 * pg, pg, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) die("mmap");
		if (mmap(m + 6 * pg, 2 * pg, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, s, 4 * pg) == MAP_FAILED) die("mmap");
		printf("%p\n", (void *)m); fflush(stdout);
	} else if (!strcmp(mode, "seccomp")) {
		struct sock_filter f[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
		struct sock_fprog p = { 1, f };
		if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p)) die("seccomp");
		if (loop(fd, n, 1)) return 1;
	} else if (!strcmp(mode, "int80")) { // the 32-bit ABI from a 64-bit program: write is 4
		char *low = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
		long r;
		__asm__ volatile("int $0x80" : "=a"(r) : "a"(4L), "b"((long)fd), "c"(low), "d"(64L) : "memory", "r8", "r9", "r10", "r11");
		printf("result %ld\n", r); fflush(stdout);
	} else if (!strcmp(mode, "behind")) { // runs for a while before it sleeps in a write to a full fifo
		struct timespec t, now;
		fcntl(fd, F_SETFL, O_NONBLOCK);
		while (write(fd, stack, sizeof stack) > 0) {}
		fcntl(fd, F_SETFL, 0);
		printf("running\n"); fflush(stdout);
		clock_gettime(CLOCK_MONOTONIC, &t);
		do clock_gettime(CLOCK_MONOTONIC, &now);
		while ((now.tv_sec - t.tv_sec) * 1000000000L + now.tv_nsec - t.tv_nsec < 50000000L);
		write(fd, "written behind", 8);
	} else if (!strcmp(mode, "int80probe")) { // getpid: a fault where the kernel has no such entry
		long r;
		__asm__ volatile("int $0x80" : "=a"(r) : "a"(20L) : "memory", "r8", "r9", "r10", "r11");
		return r != getpid();
	} else if (!strcmp(mode, "sendfile")) {
		int z = memfd_create("z", 0);
		if (ftruncate(z, 64)) die("ftruncate");
		off_t off = 0;
		printf("result %ld\n", (long)sendfile(fd, z, &off, 64)); fflush(stdout);
	} else if (!strcmp(mode, "exec") || !strcmp(mode, "execsibling")) {
		static int p[2];
		fixed('o');
		printf("%p\n", (void *)buf); fflush(stdout);
		if (loop(fd, 1, 0)) return 1;
		await_line();
		if (!strcmp(mode, "execsibling")) { // keeps the old memory alive
			if (pipe(p) || clone(sibling, stack + sizeof stack, CLONE_VM | SIGCHLD, p) < 0) die("clone");
		}
		execl("/proc/self/exe", argv[0], "image", "-", (char *)NULL);
		die("exec");
	} else if (!strcmp(mode, "fork")) { // parent and child write through one open file
		if (loop(fd, 1, 0)) return 1;
		pid_t c = fork();
		if (!c) { loop(fd, 1, 0); _exit(0); }
		waitpid(c, NULL, 0);
		if (loop(fd, 1, 0)) return 1;
	} else if (!strcmp(mode, "drop")) { // the same process, other credentials: first capabilities, then uid
		if (loop(fd, 1, 0)) return 1;
		struct { uint32_t v; int pid; } h = { 0x20080522, 0 };
		struct { uint32_t e, p, i; } d[2] = { { 0, 0, 0 }, { 0, 0, 0 } };
		syscall(SYS_capget, &h, d);
		d[0].e &= ~(1u << 14); // CAP_IPC_LOCK
		if (syscall(SYS_capset, &h, d)) die("capset");
		if (loop(fd, 1, 0)) return 1;
		if (setresuid(12345, 12345, 12345)) die("setresuid");
		if (loop(fd, 1, 0)) return 1;
	} else if (!strcmp(mode, "userns")) {
		if (unshare(CLONE_NEWUSER)) die("unshare");
		if (loop(fd, 1, 0)) return 1;
	} else if (!strcmp(mode, "threadexec")) { // one thread is inside a write while another is in exec
		pthread_t t;
		fd_of_thread = fd;
		pthread_create(&t, NULL, thread_write, NULL);
		await_line();
		execl("/proc/self/exe", argv[0], "image", "-", (char *)NULL);
		die("exec");
	} else if (!strcmp(mode, "maps")) { // n single-page mappings that cannot merge
		long pg = sysconf(_SC_PAGESIZE);
		char *m = mmap(NULL, (size_t)n * pg, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		for (int i = 1; i < n; i += 2) if (mprotect(m + i * pg, pg, PROT_READ | PROT_WRITE)) die("mprotect");
		printf("%p\n", (void *)m); fflush(stdout);
	} else if (!strcmp(mode, "arena")) { // n pages, all there
		size_t len = (size_t)n * sysconf(_SC_PAGESIZE);
		char *m = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
		printf("%p\n", (void *)m); fflush(stdout);
	} else if (!strcmp(mode, "leaderexit")) { // only a second thread is left
		pthread_t t;
		fd_of_thread = fd;
		printf("%p\n", (void *)buf); fflush(stdout);
		pthread_create(&t, NULL, thread_write, NULL);
		pthread_exit(NULL);
	} else if (!strcmp(mode, "idle")) {
	} else {
		return 2;
	}
	say("done");
	await_line();
	return 0;
}
