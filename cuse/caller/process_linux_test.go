package caller

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func open(t testing.TB, tid int) *Process {
	t.Helper()
	p, err := OpenProcess(tid)
	wantError(t, err, nil)
	t.Cleanup(p.Put)
	return p
}

func TestOpenProcess(t *testing.T) {
	_, err := OpenProcess(0)
	wantError(t, err, unix.EACCES)
	c := startClient(t, "idle", "/dev/null")
	c.expect("done")
	p := open(t, c.pid())
	if p.PID() != c.pid() || p.Name() != "client" || !p.Alive() {
		t.Errorf("%d %q %v", p.PID(), p.Name(), p.Alive())
	}
	if again := open(t, c.pid()); p.Key() == "" || p.Key() != again.Key() || p.Key() == open(t, os.Getpid()).Key() {
		t.Errorf("keys %q, %q", p.Key(), again.Key())
	}
	before := len(openFDs())
	q := p.Get()
	q.Put()
	if !p.Alive() || len(openFDs()) != before {
		t.Error("closed while a reference is held")
	}
	wantError(t, p.CheckImage(c.pid()), nil)
	c.stop()
	_, err = OpenProcess(c.pid())
	wantError(t, err, unix.ESRCH)
}

// A process whose first thread has ended has no /proc/TGID/mem; its others are as good.
func TestLeaderGone(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "leaderexit", srv.file)
	addr := c.addr()
	w := srv.next()
	eventually(t, "leader is a zombie", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.pid()))
		return bytes.Contains(b, []byte(") Z "))
	})
	p := open(t, w.tid)
	if p.PID() != c.pid() {
		t.Errorf("pid %d, want %d", p.PID(), c.pid())
	}
	b := make([]byte, 4)
	wantError(t, p.ReadAt(b, addr), nil)
	wantError(t, p.CheckRange(addr, 64, true), nil)
	wantError(t, p.CheckImage(w.tid), nil)
	if string(b) != "0123" {
		t.Errorf("read %q", b)
	}
	if _, err := p.MemlockLimit(); err != nil {
		t.Error(err)
	}
	wantError(t, inject(w), nil)
}

// Rows 5 and 32: whole or an error, for memory that is there, partly there, protected.
func TestMemory(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "memory", srv.file)
	m, pg := c.addr(), uint64(os.Getpagesize())
	c.expect("done")
	p, th := open(t, c.pid()), Thread(c.pid())

	ro, none, hole := m+2*pg, m+4*pg, m+6*pg
	const efault = unix.EFAULT
	for _, tc := range []struct {
		name                                   string
		addr, n                                uint64
		threadRead, threadWrite, read, written error
	}{
		{"plain", m, 2 * pg, nil, nil, nil, nil},
		{"nothing", 0, 0, nil, nil, nil, nil},
		{"unaligned", m + pg - 3, 7, nil, nil, nil, nil},
		{"null", 0, 8, efault, efault, efault, efault},
		{"read-only", ro, 8, nil, efault, nil, nil}, // the mem file forces, as documented
		{"into read-only", ro - 4, 8, nil, efault, nil, nil},
		{"no access", none, 8, efault, efault, nil, nil},
		{"into no access", none - 4, 8, efault, efault, nil, nil},
		{"hole", hole, 8, efault, efault, efault, efault},
		{"into hole", hole - 4, 8, efault, efault, efault, efault},
		{"out of hole", hole + pg - 4, 8, efault, efault, efault, efault},
		{"across hole", hole - pg, 3 * pg, efault, efault, efault, efault},
		{"kernel", 0xffff800000000000, 8, efault, efault, efault, efault},
		{"wraps", math.MaxUint64 - 3, 8, efault, efault, efault, efault},
		{"signed wraps", math.MaxInt64 - 3, 8, efault, efault, efault, efault},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := bytes.Repeat([]byte("m"), int(tc.n))
			wantError(t, th.Read(b, tc.addr), tc.threadRead)
			wantError(t, th.Write(b, tc.addr), tc.threadWrite)
			wantError(t, p.ReadAt(b, tc.addr), tc.read)
			wantError(t, p.WriteAt(b, tc.addr), tc.written)
		})
	}

	in, out := []byte("the quick brown fox"), make([]byte, 19)
	wantError(t, p.WriteAt(in, m+pg-5), nil)
	wantError(t, th.Read(out, m+pg-5), nil)
	if !bytes.Equal(in, out) {
		t.Errorf("read %q", out)
	}

	c.stop()
	if p.Alive() {
		t.Error("alive")
	}
	wantError(t, p.ReadAt(out, m), unix.ESRCH)
	wantError(t, p.WriteAt(out, m), unix.ESRCH)
	wantError(t, p.CheckRange(m, 1, false), unix.ESRCH)
	p.noQuery = true
	wantError(t, p.CheckRange(m, 1, false), unix.ESRCH)
	p.noQuery = false
	wantError(t, p.CheckImage(c.pid()), unix.ESRCH)
	_, err := p.MemlockLimit()
	wantError(t, err, unix.ESRCH)
	if p.CanLockAny() {
		t.Error("the dead can lock")
	}
	wantError(t, th.Read(out, m), unix.ESRCH)
}

// Rows 23 and 24: nothing of the old process's reaches the new image.
func TestExec(t *testing.T) {
	for _, mode := range []string{"exec", "execsibling"} {
		t.Run(mode, func(t *testing.T) {
			srv := newFuse(t)
			c := startClient(t, mode, srv.file)
			buf := c.addr()
			w := srv.next()
			p := open(t, w.tid)
			w.reply()
			c.goOn()
			image := c.addr() // of the same program's buf after exec
			wantError(t, Thread(c.pid()).Write([]byte("0123456789abcdef"), image), nil)

			evil, got := []byte("evil evil evil e"), make([]byte, 16)
			sibling := mode == "execsibling"
			want := error(unix.ESRCH)
			if sibling {
				want = nil // the old memory lives on in the sibling and is what we reach
			}
			if p.Alive() != sibling {
				t.Errorf("alive: %v", p.Alive())
			}
			wantError(t, p.WriteAt(evil, buf), want)
			for _, a := range []uint64{buf, image} {
				p.WriteAt(evil, a)
			}
			if wantError(t, p.ReadAt(got, buf), want); sibling && !bytes.Equal(got, evil) {
				t.Errorf("the sibling has %q", got)
			}
			// So large that it is read by process id: the new image has the same address.
			big := make([]byte, 1<<19)
			if wantError(t, p.ReadAt(big, 1<<40), want); sibling && !bytes.Equal(big, bytes.Repeat([]byte("o"), len(big))) {
				t.Errorf("read of the new image: %q...", big[:16])
			}
			if sibling {
				want = unix.EACCES
			}
			wantError(t, p.CheckImage(c.pid()), want)
			c.goOn()
			c.expect("0123456789abcdef")
		})
	}
}

func TestUnprivileged(t *testing.T) {
	c := startGo(t, "unprivileged", strconv.Itoa(os.Getpid()))
	c.expect("done")
}

// Row 9 and the table of ranges, through both ways to look.
func TestCheckRange(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "memory", srv.file)
	m, pg := c.addr(), uint64(os.Getpagesize())
	p := open(t, c.pid())
	both(t, p, func(t *testing.T) {
		for _, tc := range []struct {
			name        string
			addr, n     uint64
			read, write error
		}{
			{"nothing", 0, 0, nil, nil},
			{"nothing in a hole", m + 6*pg, 0, nil, nil},
			{"first page", m, pg, nil, nil},
			{"one byte", m + 2*pg - 1, 1, nil, nil},
			{"two pages", m, 2 * pg, nil, nil},
			{"one byte into read-only", m, 2*pg + 1, nil, unix.EFAULT},
			{"read-only", m + 2*pg, pg, nil, unix.EFAULT},
			{"over read-only", m + pg, 3 * pg, nil, unix.EFAULT},
			{"up to no access", m, 4 * pg, nil, unix.EFAULT},
			{"one byte into no access", m + 3*pg, pg + 1, unix.EFAULT, unix.EFAULT},
			{"no access", m + 4*pg, 1, unix.EFAULT, unix.EFAULT},
			{"last byte of no access", m + 5*pg - 1, 2, unix.EFAULT, unix.EFAULT},
			{"up to the hole", m + 5*pg, pg, nil, nil},
			{"one byte into the hole", m + 5*pg, pg + 1, unix.EFAULT, unix.EFAULT},
			{"the hole", m + 6*pg, pg, unix.EFAULT, unix.EFAULT},
			{"last byte of the hole", m + 7*pg - 1, 2, unix.EFAULT, unix.EFAULT},
			{"behind the hole", m + 7*pg, pg, nil, nil},
			{"over the hole", m + 5*pg, 3 * pg, unix.EFAULT, unix.EFAULT},
			{"null", 0, 1, unix.EFAULT, unix.EFAULT},
			{"everything", 0, math.MaxInt64, unix.EFAULT, unix.EFAULT},
			{"kernel", 1 << 63, 4096, unix.EFAULT, unix.EFAULT},
			{"last byte", math.MaxUint64, 1, unix.EFAULT, unix.EFAULT},
			{"wraps", math.MaxUint64, 2, unix.EFAULT, unix.EFAULT},
			{"wraps to a good end", m, -m + m + pg - 2*pg, unix.EFAULT, unix.EFAULT},
			{"from behind everything", 1<<47 - 4096, 4096, unix.EFAULT, unix.EFAULT},
		} {
			t.Run(tc.name, func(t *testing.T) {
				wantError(t, p.CheckRange(tc.addr, tc.n, false), tc.read)
				wantError(t, p.CheckRange(tc.addr, tc.n, true), tc.write)
			})
		}
	})
}

// both runs a test through PROCMAP_QUERY, where there is one, and through the maps file.
func both(t *testing.T, p *Process, f func(t *testing.T)) {
	t.Run("query", func(t *testing.T) {
		p.noQuery = false
		var u unix.Utsname
		unix.Uname(&u)
		if _, errno := queryVMAEnd(p.maps, 0, 0); errno == unix.ENOTTY {
			var major, minor int
			fmt.Sscanf(string(u.Release[:]), "%d.%d", &major, &minor)
			if major > 6 || major == 6 && minor >= 11 {
				t.Fatalf("no PROCMAP_QUERY on %s", u.Release)
			}
			t.Skipf("PROCMAP_QUERY came with Linux 6.11, this is %s", u.Release)
		}
		f(t)
	})
	t.Run("maps", func(t *testing.T) {
		p.noQuery = true
		f(t)
	})
}

func TestCheckRangeManyMappings(t *testing.T) {
	n := 65000
	if b, err := os.ReadFile("/proc/sys/vm/max_map_count"); err == nil {
		limit, _ := strconv.Atoi(strings.TrimSpace(string(b)))
		n = min(n, limit-200)
	}
	c := startClient(t, "maps", "/dev/null", strconv.Itoa(n))
	m, pg := c.addr(), uint64(os.Getpagesize())
	p := open(t, c.pid())
	both(t, p, func(t *testing.T) {
		wantError(t, p.CheckRange(m, uint64(n)*pg, false), nil)
		wantError(t, p.CheckRange(m, uint64(n)*pg, true), unix.EFAULT)
		wantError(t, p.CheckRange(m+pg, pg, true), nil)
		wantError(t, p.CheckRange(m+uint64(n-1)*pg, 1, false), nil)
		if n := testing.AllocsPerRun(3, func() { p.CheckRange(m, uint64(n)*pg, false) }); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
}

// The scanner must not care where chunks break, nor what a path says.
func TestMapsScan(t *testing.T) {
	text := "1000-2000 r--p 00000000 00:00 0 \n" +
		"2000-3000 rw-p 00000000 08:01 7 /a/5000-9000 rwxp 00000000\\0124000-9000 rw-p\n" +
		"3000-4000 -w-p 00000000 00:00 0 [x]\n" +
		"6000-7000 rw-s 00000000 00:00 0"
	for _, tc := range []struct {
		addr, end uint64
		write     bool
		want      bool
	}{
		{0x1000, 0x3000, false, true}, {0x1000, 0x3000, true, false}, {0x2000, 0x4000, true, true}, {0x2000, 0x3001, false, false},
		{0x4000, 0x5000, false, false}, {0x3fff, 0x4001, true, false}, {0x6000, 0x7000, true, true}, {0x6fff, 0x7001, true, false},
		{0xfff, 0x1001, false, false}, {0x1800, 0x1801, false, true},
	} {
		for chunk := 1; chunk <= len(text); chunk++ {
			s := mapsScan{next: tc.addr, end: tc.end, write: tc.write}
			for b := []byte(text); len(b) > 0; {
				n := min(chunk, len(b))
				if s.feed(b[:n]) {
					break
				}
				b = b[n:]
			}
			if s.covered() != tc.want {
				t.Fatalf("%+v in chunks of %d: %v", tc, chunk, s.covered())
			}
		}
	}
	for _, bad := range []string{"junk", "1000_2000", "10G0-2000 rw-p", "-"} {
		s := mapsScan{next: 0x1000, end: 0x1001}
		s.feed([]byte(bad + "\n"))
		if s.covered() {
			t.Errorf("%q covers", bad)
		}
	}
}

func TestLimits(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "drop", srv.file)
	w := srv.next()
	p := open(t, w.tid)
	var now unix.Rlimit
	wantError(t, unix.Prlimit(c.pid(), unix.RLIMIT_MEMLOCK, nil, &now), nil)
	most := now.Max
	if most == unix.RLIM_INFINITY {
		most = math.MaxUint64
	}
	for _, tc := range []struct{ set, want uint64 }{{65536, 65536}, {0, 0}, {now.Max, most}} {
		wantError(t, unix.Prlimit(c.pid(), unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: tc.set, Max: now.Max}, nil), nil)
		if got, err := p.MemlockLimit(); err != nil || got != tc.want {
			t.Errorf("limit %d: %v, want %d", got, err, tc.want)
		}
	}
	if !p.CanLockAny() {
		t.Error("root cannot lock")
	}
	w.reply()
	w = srv.next() // it has dropped the capability
	if p.CanLockAny() {
		t.Error("can lock without CAP_IPC_LOCK")
	}
	w.reply()
	srv.next().reply()
	c.expect("done")

	// All capabilities, but of a child user namespace.
	c = startClient(t, "userns", srv.file)
	w = srv.next()
	p = open(t, w.tid)
	if caps, err := readCaps(w.tid); err != nil || caps.Effective&(1<<unix.CAP_IPC_LOCK) == 0 {
		t.Fatalf("%+v: %v", caps, err)
	}
	if p.CanLockAny() {
		t.Error("CAP_IPC_LOCK of a child user namespace counts")
	}
	w.reply()
	c.expect("done")
}

// Row 1.
func TestCreds(t *testing.T) {
	of := func(t *testing.T, w *fuseWrite) Creds {
		t.Helper()
		p := open(t, w.tid)
		c, err := ReadCreds(p.PID(), w.tid, w.uid, w.gid)
		wantError(t, err, nil)
		wantError(t, c.Check(w.tid, w.uid, w.gid), nil)
		return c
	}
	check := func(t *testing.T, c Creds, w *fuseWrite, want error) {
		t.Helper()
		wantError(t, c.Check(w.tid, w.uid, w.gid), want)
		w.reply()
	}
	t.Run("fork", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "fork", srv.file)
		w := srv.next()
		creds := of(t, w)
		w.reply()
		check(t, creds, srv.next(), unix.EACCES) // the child
		check(t, creds, srv.next(), nil)
		c.expect("done")
	})
	t.Run("other credentials", func(t *testing.T) {
		srv := newFuse(t)
		c := startClient(t, "drop", srv.file)
		w := srv.next()
		creds := of(t, w)
		w.reply()
		w = srv.next()
		if w.uid != creds.UID {
			t.Fatal("not the stage that was meant")
		}
		check(t, creds, w, unix.EACCES) // a capability less
		w = srv.next()
		if w.uid != 12345 || w.gid != 0 {
			t.Errorf("uid %d gid %d", w.uid, w.gid)
		}
		check(t, creds, w, unix.EACCES)
		c.expect("done")
	})
	t.Run("values", func(t *testing.T) {
		tid := os.Getpid()
		c, err := ReadCreds(tid, tid, 7, 8)
		wantError(t, err, nil)
		wantError(t, c.Check(tid, 7, 8), nil)
		wantError(t, c.Check(tid, 8, 8), unix.EACCES)
		wantError(t, c.Check(tid, 7, 7), unix.EACCES)
		wantError(t, c.Check(0, 7, 8), unix.EACCES)
		wantError(t, c.Check(-1, 7, 8), unix.EACCES)
		wantError(t, c.Check(1, 7, 8), unix.EACCES) // not of this process
		wantError(t, c.Check(1<<30, 7, 8), unix.EACCES)
		_, err = ReadCreds(tid, 0, 7, 8)
		wantError(t, err, unix.EACCES)
		_, err = ReadCreds(tid, 1, 7, 8)
		wantError(t, err, unix.ESRCH)
	})
}

func TestNoAllocations(t *testing.T) {
	c := startClient(t, "arena", "/dev/null", "64")
	m := c.addr()
	c.expect("done")
	p, th := open(t, c.pid()), Thread(c.pid())
	creds, err := ReadCreds(c.pid(), c.pid(), 0, 0)
	wantError(t, err, nil)
	b, big := make([]byte, 8192), make([]byte, bulkRead)
	for name, f := range map[string]func() error{
		"Thread.Read":        func() error { return th.Read(b, m) },
		"Thread.Write":       func() error { return th.Write(b, m) },
		"Process.ReadAt":     func() error { return p.ReadAt(b, m) },
		"Process.ReadAt big": func() error { return p.ReadAt(big, m) },
		"Process.WriteAt":    func() error { return p.WriteAt(b, m) },
		"Process.CheckRange": func() error { return p.CheckRange(m, 65536, true) },
		"Process.Get, Put":   func() error { p.Get(); p.Put(); return nil },
		"Creds.Check":        func() error { return creds.Check(c.pid(), 0, 0) },
	} {
		if n := testing.AllocsPerRun(100, func() {
			if err := f(); err != nil {
				t.Error(name, err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// The thread that opened the device may end before the others: what is mapped is then asked of one that lives.
func TestOpenerGone(t *testing.T) {
	type opened struct {
		p   *Process
		tid int
		err error
	}
	ch, end := make(chan opened), make(chan struct{})
	var opener func()
	opener = func() { // never unlocked: the OS thread ends with it
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the runtime would not end this one
			go opener()
			<-end
			return
		}
		p, err := OpenProcess(unix.Gettid())
		ch <- opened{p, unix.Gettid(), err}
	}
	go opener()
	o := <-ch
	close(end)
	wantError(t, o.err, nil)
	defer o.p.Put()
	eventually(t, "the thread is gone", func() bool { return memberOf(unix.Getpid(), o.tid) == unix.ESRCH })
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	wantError(t, err, nil)
	defer unix.Munmap(mem)
	addr := uint64(uintptr(unsafe.Pointer(&mem[0])))
	o.p.noQuery = true // Linux before 6.11
	for range 2 {
		wantError(t, o.p.CheckRange(addr, 1, false), nil)
		wantError(t, o.p.CheckRange(addr, 1, true), unix.EFAULT)
	}
}
