package cuse_test

import (
	"bytes"
	"encoding/binary"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/cusetest"
)

// Tests of the failure classes that are this package's, by their numbers.

// Failure class 27: stopping a thread raises an INTERRUPT for the command it is
// in. That is no reason to answer EINTR, nor is any other signal that a handler
// did not ask to hear of, unless the thread is killed: then it is answered for.
func TestRow27InterruptOfAStop(t *testing.T) {
	for _, c := range []struct {
		name   string
		killed bool
		calls  func(f *cusetest.File) *cusetest.Pending
	}{
		{"stopped in write", false, func(f *cusetest.File) *cusetest.Pending { return f.WriteAsync([]byte{0}) }},
		{"stopped in read", false, func(f *cusetest.File) *cusetest.Pending { return f.ReadAsync(8) }},
		{"killed in write", true, func(f *cusetest.File) *cusetest.Pending { return f.WriteAsync([]byte{0}) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			const tid = 100
			looked := make(chan struct{}) // closed when the session has seen what the INTERRUPT is
			var once sync.Once
			d := &dev{}
			k := cusetest.New(t, d, cuse.Config{Killed: func(id uint32) bool {
				if id != tid {
					t.Errorf("asked about thread %d", id)
				}
				once.Do(func() { close(looked) })
				return c.killed
			}})
			g := newGate(t)
			ended := make(chan bool, 1)
			d.write = func(_ *file, r cuse.Request, data []byte) {
				if data[0] == 0 {
					g.wait()
					ended <- r.Pending()
				}
				r.ReplyWrite(len(data))
			}
			d.read = func(_ *file, r cuse.Request, _ int) {
				g.wait()
				ended <- r.Pending()
				r.ReplyRead([]byte("fine"))
			}
			f := open(t, k, tid)
			p := c.calls(f)
			eventually(t, "the handler runs", func() bool { return g.entered.Load() == 1 })
			k.Interrupt(p.Unique())
			soon(t, "the session looks at the thread", looked)
			if c.killed { // with the handler still inside
				if _, e := p.Wait(); e != unix.EINTR {
					t.Errorf("killed: %v", e)
				}
			} else {
				// Another command goes its way while the stop is dealt with.
				if n, e := f.Thread(101).Write([]byte{1}); n != 1 || e != 0 {
					t.Errorf("meanwhile: %d, %v", n, e)
				}
				select {
				case <-p.Done():
					t.Error("answered before its handler did")
				default:
				}
			}
			g.open()
			if pending := <-ended; pending == c.killed {
				t.Errorf("pending for its handler: %v", pending)
			}
			if _, e := p.Wait(); !c.killed && e != 0 {
				t.Errorf("stopped: %v", e)
			}
		})
	}
}

// Failure class 27: a handler that asks hears of a signal; one that does not is
// left alone.
func TestRow27Interrupt(t *testing.T) {
	g := newGate(t)
	d := &dev{
		read: func(_ *file, r cuse.Request, size int) {
			if size == 1 {
				r.OnInterrupt(func() { r.TryReplyError(unix.EINTR) })
				g.entered.Add(1)
				return
			}
			g.entered.Add(1)
			r.Detach()
			<-g.ch
			r.ReplyRead([]byte("fine"))
		},
	}
	k := cusetest.New(t, d, cuse.Config{})
	f := open(t, k, 100)
	heard := f.ReadAsync(1)
	eventually(t, "the read is there", func() bool { return g.entered.Load() == 1 })
	k.Interrupt(heard.Unique())
	if _, e := heard.Wait(); e != unix.EINTR {
		t.Errorf("interrupted: %v", e)
	}
	deaf := f.Thread(101).ReadAsync(10)
	eventually(t, "the read is there", func() bool { return g.entered.Load() == 2 })
	k.Interrupt(deaf.Unique())
	if n, e := f.Write([]byte("x")); n != 1 || e != 0 {
		t.Errorf("meanwhile: %d, %v", n, e)
	}
	g.open()
	if b, e := deaf.Wait(); string(b) != "fine" || e != 0 {
		t.Errorf("not interrupted: %q, %v", b, e)
	}
}

// Failure class 28: exactly one reply, whatever the handler does. The fake kernel
// fails the test on a second, and on none when the session is closed.
func TestRow28OneReply(t *testing.T) {
	for _, c := range []struct {
		name  string
		write func(r cuse.Request, data []byte)
		want  unix.Errno
	}{
		{"twice", func(r cuse.Request, data []byte) { r.ReplyWrite(len(data)); r.ReplyError(unix.EINVAL) }, 0},
		{"of another kind", func(r cuse.Request, _ []byte) { r.ReplyPoll(1); r.ReplyIoctl(1) }, unix.EIO},
		{"none but a panic", func(cuse.Request, []byte) { panic("before") }, unix.EIO},
		{"and a panic", func(r cuse.Request, data []byte) { r.ReplyWrite(len(data)); panic("after") }, 0},
		{"an unusable errno", func(r cuse.Request, _ []byte) { r.ReplyError(4095) }, unix.EIO},
		{"no error as errno", func(r cuse.Request, _ []byte) { r.ReplyError(0) }, unix.EIO},
		{"after it returned", func(r cuse.Request, data []byte) { n := len(data); r.After(func() { r.ReplyWrite(n) }) }, 0},
		{"from elsewhere", func(r cuse.Request, data []byte) { go r.ReplyWrite(len(data)) }, 0},
		{"longer than the write", func(r cuse.Request, data []byte) { r.ReplyWrite(len(data) + 1) }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			log, seen := logs()
			k := cusetest.New(t, &dev{write: func(_ *file, r cuse.Request, data []byte) { c.write(r, data) }}, cuse.Config{Log: log})
			f := open(t, k, 100)
			for range 3 {
				if n, e := f.Write([]byte("abc")); e != c.want || e == 0 && n != 3 {
					t.Fatalf("%d, %v", n, e)
				}
			}
			if mistake := c.name != "after it returned" && c.name != "from elsewhere"; mistake && seen.Len() == 0 {
				t.Error("not logged")
			}
		})
	}
}

// Failure class 28: of many replies at once, one is taken; a request that is over
// answers nobody, though the object behind it serves others.
func TestRow28RepliesRace(t *testing.T) {
	const repliers, rounds = 4, 200
	kept := make(chan cuse.Request, rounds)
	var taken atomic.Int64
	var running sync.WaitGroup
	d := &dev{}
	d.write = func(_ *file, r cuse.Request, data []byte) {
		n := len(data)
		r.OnInterrupt(func() {
			if r.TryReplyError(unix.EINTR) {
				taken.Add(1)
			}
		})
		for range repliers {
			running.Add(1)
			go func() {
				defer running.Done()
				if r.ReplyWrite(n) {
					taken.Add(1)
				}
			}()
		}
		kept <- r
	}
	k := cusetest.New(t, d, cuse.Config{})
	f := open(t, k, 100)
	for i := range rounds {
		p := f.WriteAsync([]byte("abc"))
		if i%2 == 0 {
			k.Interrupt(p.Unique())
		}
		if n, e := cusetest.Written(p); e != unix.EINTR && (n != 3 || e != 0) {
			t.Fatalf("%d, %v", n, e)
		}
		stale := <-kept
		if stale.TryReplyError(unix.EIO) {
			t.Fatal("a request that was over answered somebody")
		}
	}
	running.Wait()
	if n := taken.Load(); n != rounds {
		t.Errorf("%d replies taken for %d requests", n, rounds)
	}
	if e := f.Release(); e != 0 {
		t.Error(e)
	}
	eventually(t, "nothing is left", func() bool { return k.Session.Held() == "" })
}

// Failure class 28: Close answers what waits, and late replies are dropped.
func TestRow28CloseAnswersOnce(t *testing.T) {
	const threads = 50
	for _, late := range []bool{false, true} {
		waiting := make(chan cuse.Request, threads)
		d := &dev{read: func(_ *file, r cuse.Request, _ int) { waiting <- r }}
		k := cusetest.New(t, d, cuse.Config{})
		f := open(t, k, 100)
		var pending []*cusetest.Pending
		var rs []cuse.Request
		for i := range threads {
			pending = append(pending, f.Thread(uint32(200+i)).ReadAsync(8))
		}
		for range threads {
			rs = append(rs, <-waiting)
		}
		var wg sync.WaitGroup
		if late { // as Close answers
			wg.Add(1)
			go func() {
				defer wg.Done()
				for _, r := range rs {
					r.ReplyRead(nil)
				}
			}()
		}
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		for i, p := range pending {
			if _, e := p.Wait(); e != unix.EIO && (e != 0 || !late) {
				t.Errorf("late replies %v: answered %v", late, e)
			}
			if rs[i].TryReplyError(unix.EINTR) {
				t.Error("a reply is taken after Close")
			}
		}
	}
}

// Failure class 34: CUSE requests share state. Many threads on one file, each
// gets the answer to what it asked, whether from the handler or from elsewhere.
func TestRow34ManyThreadsOneFile(t *testing.T) {
	const (
		threads = 60
		long    = 6 // of them write commands in pieces
		rounds  = 40
	)
	elsewhere := func(r cuse.Request, f func()) {
		switch r.TID() % 3 {
		case 0:
			f()
		case 1:
			r.Detach()
			runtime.Gosched()
			f()
		case 2:
			go f()
		}
	}
	d := &dev{
		// A command is units of 1000 bytes and its thread's id, over and over.
		write: func(_ *file, r cuse.Request, data []byte) {
			n, own := len(data), data[0]
			for i := 4; i < len(data); i += 4 {
				if binary.NativeEndian.Uint32(data[i:]) != r.TID() {
					own = 0
				}
			}
			elsewhere(r, func() {
				if own == 0 {
					r.ReplyError(unix.EBADMSG)
				} else {
					r.ReplyWrite(n)
				}
			})
		},
		read: func(_ *file, r cuse.Request, size int) {
			elsewhere(r, func() { r.ReplyRead(bytes.Repeat([]byte{byte(r.TID())}, size)) })
		},
		poll: func(_ *file, r cuse.Request, p cuse.PollArgs) {
			elsewhere(r, func() { r.ReplyPoll(p.Events ^ r.TID()) })
		},
		ioctl: func(_ *file, r cuse.Request, a cuse.IoctlArgs) {
			elsewhere(r, func() { r.ReplyIoctl(int32(a.Arg) + int32(r.TID())) })
		},
	}
	d.open = func(cuse.Request, uint32) (cuse.File, error) { return framed{&file{d: d}}, nil }
	k := cusetest.New(t, d, cuse.Config{})
	shared := open(t, k, 99)
	var wg sync.WaitGroup
	for i := range threads {
		wg.Add(1)
		go func() {
			defer wg.Done()
			tid := uint32(100 + i)
			f := shared.Thread(tid)
			units := 1
			if i < long {
				units = 200 // two pieces
			}
			command := make([]byte, units*1000)
			for j := 0; j < len(command); j += 4 {
				binary.NativeEndian.PutUint32(command[j:], tid)
			}
			command[0] = byte(units)
			for n := range rounds {
				if got, e := f.Write(command); got != len(command) || e != 0 {
					t.Errorf("thread %d: write: %d, %v", tid, got, e)
					return
				}
				if b, e := f.Read(1 + n); e != 0 || !bytes.Equal(b, bytes.Repeat([]byte{byte(tid)}, 1+n)) {
					t.Errorf("thread %d: read: %x, %v", tid, b, e)
					return
				}
				if ev, e := f.Poll(uint64(tid), uint32(n), n%2 == 0); ev != uint32(n)^tid || e != 0 {
					t.Errorf("thread %d: poll: %#x, %v", tid, ev, e)
					return
				}
				if v, e := f.Ioctl(1, uint64(n)<<16); v != int32(n)<<16+int32(tid) || e != 0 {
					t.Errorf("thread %d: ioctl: %d, %v", tid, v, e)
					return
				}
			}
		}()
	}
	wg.Wait()
	if e := shared.Release(); e != 0 {
		t.Error(e)
	}
	eventually(t, "nothing is left", func() bool { return k.Session.Held() == "" })
}

// tasks is how many threads the kernel runs for this process.
func tasks(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// median of n calls.
func median(n int, call func()) time.Duration {
	took := make([]time.Duration, n)
	for i := range took {
		start := time.Now()
		call()
		took[i] = time.Since(start)
	}
	slices.Sort(took)
	return took[n/2]
}

// Failure class 36: a client with 2,000 threads, each inside a command that
// blocks its handler in the kernel. Running handlers are bounded by file and by
// user, with them the daemon's threads; another user's commands are answered.
func TestRow36ThreadFlood(t *testing.T) {
	const threads = 2000
	for _, c := range []struct {
		name    string
		files   int
		readers int
		running int // handlers
	}{
		{"one file", 1, 0, cuse.FileRunningMax},
		{"100 files", 100, 0, cuse.DefaultReaders / cuse.UserRunningShare},
		{"few readers", 100, 16, 16 / cuse.UserRunningShare},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Handlers block in read(2) of a pipe: a thread each, as in a copy to
			// memory that is never there.
			var pipe [2]int
			if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Close(pipe[0]) })
			var entered atomic.Int64
			d := &dev{write: func(_ *file, r cuse.Request, data []byte) {
				if data[0] == 0 {
					entered.Add(1)
					_, _ = unix.Read(pipe[0], make([]byte, 1))
				}
				r.ReplyWrite(len(data))
			}}
			k := cusetest.New(t, d, cuse.Config{Readers: c.readers})
			unblock := sync.OnceFunc(func() { _ = unix.Close(pipe[1]) })
			t.Cleanup(unblock)

			var files []*cusetest.File
			for range c.files {
				files = append(files, open(t, k, 100))
			}
			other, errno := k.Open(5000, 2000, 2000, 0)
			if errno != 0 {
				t.Fatal(errno)
			}
			command := func() {
				if n, e := other.Write([]byte{1}); n != 1 || e != 0 {
					t.Fatalf("the other user: %d, %v", n, e)
				}
			}
			alone := median(200, command)
			before := tasks(t)

			var pending []*cusetest.Pending
			for i := range threads {
				pending = append(pending, files[i%c.files].Thread(uint32(10000+i)).WriteAsync([]byte{0}))
			}
			eventually(t, "handlers run up to the bound", func() bool { return entered.Load() == int64(c.running) })
			flooded := median(200, command)
			if n := entered.Load(); n != int64(c.running) {
				t.Errorf("%d handlers run, not %d", n, c.running)
			}
			spare := cuse.IdleMax + runtime.GOMAXPROCS(0) + 1
			if n := k.Session.Workers(); n > c.running+spare {
				t.Errorf("%d workers for %d handlers", n, c.running)
			}
			if n := tasks(t) - before; n > c.running+spare+8 { // the runtime's own
				t.Errorf("%d threads more, for %d handlers", n, c.running)
			}
			if k.Outstanding() != threads {
				t.Errorf("%d of %d commands wait", k.Outstanding(), threads)
			}
			t.Logf("the other user's command: %v alone, %v in the flood", alone, flooded)
			if flooded > 10*alone+10*time.Millisecond {
				t.Errorf("the other user's command takes %v, %v alone", flooded, alone)
			}

			unblock()
			for _, p := range pending {
				if n, e := cusetest.Written(p); n != 1 || e != 0 {
					t.Fatalf("%d, %v", n, e)
				}
			}
			for _, f := range append(files, other) {
				if e := f.Release(); e != 0 {
					t.Error(e)
				}
			}
			eventually(t, "nothing is left", func() bool { return k.Session.Held() == "" })
		})
	}
}

// Failure class 36: what waits is bounded in bytes too, by user, and given back.
func TestRow36FloodOfBytes(t *testing.T) {
	const size = 64 << 10
	const threads = cuse.ParkedBytesMax/size + 100
	g := newGate(t)
	d := &dev{write: func(_ *file, r cuse.Request, data []byte) {
		if data[0] == 0 {
			g.wait()
		}
		r.ReplyWrite(len(data))
	}}
	k := cusetest.New(t, d, cuse.Config{})
	f := open(t, k, 100)
	other, errno := k.Open(5000, 2000, 2000, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	var pending []*cusetest.Pending
	for i := range threads {
		pending = append(pending, f.Thread(uint32(10000+i)).WriteAsync(make([]byte, size)))
	}
	big := make([]byte, size)
	big[0] = 1
	for range 20 {
		if n, e := other.Write(big); n != size || e != 0 {
			t.Fatalf("the other user: %d, %v", n, e)
		}
	}
	g.open()
	refused := 0
	for _, p := range pending {
		switch n, e := cusetest.Written(p); {
		case e == unix.ENOMEM:
			refused++
		case n != size || e != 0:
			t.Fatalf("%d, %v", n, e)
		}
	}
	// What exceeds the bound, less what runs; the headers count too.
	if refused < 100-cuse.FileRunningMax || refused > 100 {
		t.Errorf("%d of %d commands were refused", refused, threads)
	}
	for _, f := range []*cusetest.File{f, other} {
		if e := f.Release(); e != 0 {
			t.Error(e)
		}
	}
	eventually(t, "nothing is left", func() bool { return k.Session.Held() == "" })
}

// Failure class 36: users who together have as many stuck handlers as they may
// keep out neither another user nor the news of their own end.
func TestRow36UsersTogether(t *testing.T) {
	stuck := make(chan struct{})
	d := &dev{write: func(_ *file, r cuse.Request, data []byte) {
		if len(data) > 1 {
			<-stuck
		}
		r.ReplyWrite(len(data))
	}}
	k := cusetest.New(t, d, cuse.Config{Killed: func(uint32) bool { return true }})
	var files []*cusetest.File
	for uid := uint32(1); uid <= 2*cuse.UserRunningShare; uid++ {
		for n := range cuse.DefaultReaders / cuse.UserRunningShare / 4 {
			f, errno := k.Open(1000*uid+100*uint32(n), uid, uid, 0)
			if errno != 0 {
				t.Fatalf("open: %v", errno)
			}
			files = append(files, f)
		}
	}
	var pending []*cusetest.Pending
	for _, f := range files {
		for i := range uint32(8) {
			pending = append(pending, f.Thread(f.TID+i).PieceAsync(0, []byte("long")))
		}
	}
	victim, errno := k.Open(90000, 90, 90, 0)
	if errno != 0 {
		t.Fatalf("another user's open: %v", errno)
	}
	for range 100 {
		if n, errno := victim.Write([]byte("x")); n != 1 || errno != 0 {
			t.Fatalf("another user's command: %d, %v", n, errno)
		}
	}
	for _, p := range pending {
		k.Interrupt(p.Unique())
	}
	for _, p := range pending { // they are killed: each is answered, its handler stuck or not begun
		if _, errno := p.Wait(); errno != unix.EINTR {
			t.Fatalf("a killed client's command: %v", errno)
		}
	}
	close(stuck)
}

// Failure class 36: handlers that wait for an OPEN of their own client, as those
// do that give it a descriptor, get it, however many they are: one user's files
// or many users' together. (In a soak all readers of a user waited so for a time
// limit to end it.)
func TestRow36OpensWithinWrites(t *testing.T) {
	for _, c := range []struct {
		name                  string
		users, files, threads int
	}{
		{"one file", 1, 1, 4 * cuse.FileRunningMax},
		{"one user", 1, 20, 8},
		{"many users", 3 * cuse.UserRunningShare, 5, 8},
		{"a crowd of users", cuse.DefaultReaders, 1, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			var mu sync.Mutex
			want := map[uint32]chan struct{}{}
			var k *cusetest.Kernel
			d := &dev{}
			d.open = func(r cuse.Request, _ uint32) (cuse.File, error) {
				mu.Lock()
				if ch := want[r.TID()]; ch != nil {
					close(ch)
				}
				mu.Unlock()
				return &file{d: d, nr: d.opened.Add(1)}, nil
			}
			// The client's thread opens only once its command is with us.
			inside := make(chan [2]uint32, 1)
			d.write = func(_ *file, r cuse.Request, data []byte) {
				ch := make(chan struct{})
				mu.Lock()
				want[r.TID()] = ch
				mu.Unlock()
				r.Detach()
				inside <- [2]uint32{r.TID(), r.UID()}
				<-ch
				r.ReplyWrite(len(data))
			}
			k = cusetest.New(t, d, cuse.Config{})
			var files []*cusetest.File
			for u := range c.users {
				uid := uint32(1000 + u)
				for f := range c.files {
					nf, errno := k.Open(uint32(100000*(u+1)+1000*f), uid, uid, 0)
					if errno != 0 {
						t.Fatal(errno)
					}
					files = append(files, nf)
				}
			}
			var pending, opens []*cusetest.Pending
			for i := range c.threads {
				for _, f := range files {
					pending = append(pending, f.Thread(f.TID+uint32(i)+1).WriteAsync([]byte{0}))
				}
			}
			for range pending {
				select {
				case w := <-inside:
					opens = append(opens, k.OpenAsync(w[0], w[1], w[1], 0))
				case <-time.After(cusetest.Patience):
					t.Fatal("no handler goes on: all wait for OPENs that wait for them")
				}
			}
			for _, p := range pending {
				if n, e := cusetest.Written(p); n != 1 || e != 0 {
					t.Fatalf("%d, %v", n, e)
				}
			}
			for _, p := range opens {
				if _, e := p.Wait(); e != 0 {
					t.Fatal(e)
				}
			}
		})
	}
}
