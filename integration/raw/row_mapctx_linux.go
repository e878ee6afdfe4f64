package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// rowMapContext: GET_CONTEXT exchanges the descriptor under the client's hands,
// and whatever that does meanwhile, the daemon goes on and nothing is left.
func rowMapContext(t *rowTest) {
	fds, fdErr := daemonFDs()
	t.check("threads on one file", oneFile(t.node))
	t.check("threads on a file each", manyFiles(t.node))
	t.check("a duplicate of before", duplicate(t.node))
	t.check("closed by another thread in a command", closedUnder(t.node))
	_, err := t.run(nil, nil, "emfile", t.node)
	t.check("at the descriptor limit", err)
	_, err = t.run(nil, nil, "nospace", t.node)
	t.check("RLIMIT_AS", err)
	_, err = t.run(nil, nil, "execed", t.node)
	t.check("exec with the file open", err)
	n := 60
	if t.long {
		n = 1000
	}
	t.check(fmt.Sprintf("kill -9 in it, %d times", n), killed(t.node, n))
	t.works("afterwards")
	t.check("no context is left", gone(os.Getpid()))
	if fdErr == nil {
		t.check("the daemon's descriptors", eventually("as many as before", func() bool {
			now, err := daemonFDs()
			return err == nil && now <= fds+4
		}))
	}
}

// oneFile: of threads that ask on one descriptor at once one gets the context.
func oneFile(node string) error {
	for range 20 {
		c, err := rawverbs.Open(node)
		if err != nil {
			return err
		}
		const threads = 8
		errs := make([]error, threads)
		asyncs := make([]int, threads)
		var wg sync.WaitGroup
		for i := range threads {
			s, err := c.Share()
			if err != nil {
				return err
			}
			wg.Go(func() {
				errs[i] = s.GetContext()
				asyncs[i] = s.Async
				s.Mem.Free()
			})
		}
		wg.Wait()
		well := 0
		for i, err := range errs {
			if err == nil {
				well++
				_ = unix.Close(asyncs[i])
			} else if err := want(err, unix.EINVAL); err != nil {
				return err
			}
		}
		if well != 1 {
			return fmt.Errorf("%d of %d threads got a context", well, threads)
		}
		_, err = c.AllocPD()
		c.Close()
		if err != nil {
			return fmt.Errorf("the file afterwards: %w", err)
		}
	}
	return nil
}

func manyFiles(node string) error {
	const threads = 16
	errs := make([]error, threads)
	var wg sync.WaitGroup
	for i := range threads {
		wg.Go(func() {
			for range 4 {
				p, err := newMappedPort(node)
				if err == nil {
					err = p.write()
					p.close()
				}
				if err != nil {
					errs[i] = err
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// duplicate: a descriptor from before GET_CONTEXT leads to the same context, which
// ends with the last of both.
func duplicate(node string) error {
	c, err := rawverbs.Open(node)
	if err != nil {
		return err
	}
	old, err := unix.FcntlInt(uintptr(c.FD), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return err
	}
	if err := c.GetContext(); err != nil {
		return err
	}
	pd, err := c.AllocPD()
	if err != nil {
		return err
	}
	second := &rawverbs.Client{FD: old, Async: -1, Mem: c.Mem, Room: c.Room}
	p := &mappedPort{c: c}
	if _, _, err := p.createCQ(8, rawverbs.NoChannel); err != nil {
		return fmt.Errorf("a CQ by the new one: %w", err)
	}
	if _, err := second.CreateCQ(8, rawverbs.NoChannel); err != nil {
		return fmt.Errorf("a CQ by the old one: %w", err)
	}
	if err := want(second.GetContext(), unix.EINVAL); err != nil {
		return fmt.Errorf("a second context: %w", err)
	}
	if _, err := second.CreateChannel(); err != nil {
		return fmt.Errorf("a channel by the old one: %w", err)
	}
	p.unmap()
	_ = unix.Close(c.FD)
	// RELEASE comes when it comes: the old one works before and after it.
	for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); {
		if _, err := second.QueryPort(1); err != nil {
			return fmt.Errorf("the old one, alone: %w", err)
		}
	}
	if err := second.Destroy(rawverbs.PD, pd); err != nil {
		return err
	}
	_ = unix.Close(c.Async)
	_ = unix.Close(old)
	return gone(os.Getpid())
}

// closedUnder closes the descriptor while another thread is in a command, or in
// GET_CONTEXT itself.
func closedUnder(node string) error {
	for k := range 20 {
		c, err := rawverbs.Open(node)
		if err != nil {
			return err
		}
		if k%2 == 0 {
			if err := c.GetContext(); err != nil {
				return err
			}
		}
		before, _ := rawverbs.NumFDs()
		done := make(chan error, 1)
		go func() {
			if k%2 == 1 {
				done <- c.GetContext()
				return
			}
			var err error
			for range 1000 {
				if _, err = c.QueryPort(1); err != nil {
					break
				}
			}
			done <- err
		}()
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond) // at a random moment: what is tested
		_ = unix.Close(c.FD)
		if err := want(<-done, 0, unix.EBADF, unix.EINVAL, unix.EIO, unix.ENOENT, unix.EACCES); err != nil {
			return err
		}
		if c.Async >= 0 {
			_ = unix.Close(c.Async)
		}
		// GET_CONTEXT may have put the file where there was none any more.
		if now, _ := rawverbs.NumFDs(); now >= before {
			_ = unix.Close(c.FD)
		}
		c.Mem.Free()
	}
	return gone(os.Getpid())
}

// roleEmfile gets a context with each number of free descriptors.
func roleEmfile(args []string) error {
	for free := range uint64(4) {
		c, err := rawverbs.Open(args[0])
		if err != nil {
			return err
		}
		var old unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			return err
		}
		before, err := rawverbs.NumFDs()
		if err != nil {
			return err
		}
		// The limit is of numbers: all below the node's are taken.
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(c.FD) + 1 + free, Max: old.Max}); err != nil {
			return err
		}
		err = c.GetContext()
		if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); e != nil {
			return e
		}
		if free >= 2 {
			if err != nil {
				return fmt.Errorf("with %d free: %w", free, err)
			}
			_, err = c.AllocPD()
			c.Close()
			if err != nil {
				return err
			}
			continue
		}
		if err := want(err, unix.EMFILE); err != nil {
			return fmt.Errorf("with %d free: %w", free, err)
		}
		if now, _ := rawverbs.NumFDs(); now != before {
			return fmt.Errorf("with %d free: %d descriptors, %d before", free, now, before)
		}
		// Nothing has happened: it works now.
		err = c.GetContext()
		c.Close()
		if err != nil {
			return fmt.Errorf("again, with %d free: %w", free, err)
		}
	}
	return nil
}

// roleNoSpace has no room for what it would map.
func roleNoSpace(args []string) error {
	c, err := rawverbs.Open(args[0])
	if err != nil {
		return err
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_AS, &old); err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: 1, Max: old.Max}); err != nil {
		return err
	}
	getErr := c.GetContext()
	p := &mappedPort{c: c}
	_, _, mapErr := p.createCQ(64, rawverbs.NoChannel)
	if err := unix.Setrlimit(unix.RLIMIT_AS, &old); err != nil {
		return err
	}
	if getErr != nil {
		return fmt.Errorf("context: %w", getErr)
	}
	if err := want(mapErr, unix.ENOMEM); err != nil {
		return fmt.Errorf("map: %w", err)
	}
	_, _, err = p.createCQ(64, rawverbs.NoChannel)
	return err
}

// roleExeced execs with its file inherited: the new image gets nothing of it.
func roleExeced(args []string) error {
	p, err := newMappedPort(args[0])
	if err != nil {
		return err
	}
	fd, err := unix.Dup(p.c.FD) // without close-on-exec
	if err != nil {
		return err
	}
	return unix.Exec("/proc/self/exe", []string{"raw", "role", "newimage", fmt.Sprint(fd)}, os.Environ())
}

// roleNewImage has inherited a file over exec: no objects for it.
func roleNewImage(args []string) error {
	fd, err := fdArg(args)
	if err != nil {
		return err
	}
	mem, err := rawverbs.NewMem()
	if err != nil {
		return err
	}
	c := &rawverbs.Client{FD: fd, Mem: mem, Room: rawverbs.DefaultRoom}
	_, addr := mem.Data()
	_, pd := c.AllocPD()
	_, cq := c.CreateCQ(8, rawverbs.NoChannel)
	_, mr := c.RegMR(0, addr, rawverbs.Page, rawverbs.AccessLocalWrite)
	for _, err := range []error{pd, cq, mr} {
		if err := want(err, unix.EACCES); err != nil {
			return err
		}
	}
	_, err = unix.Mmap(fd, 0, rawverbs.Page, unix.PROT_READ, unix.MAP_SHARED)
	return want(err, 0) // the descriptor is its own: what it has leads to its old queues
}

// roleContexts gets one context after the other until it is killed.
func roleContexts(args []string) error {
	say("begun")
	for {
		c, err := rawverbs.OpenContext(args[0])
		if err != nil {
			return err
		}
		c.Close()
	}
}

// killed kills clients that do nothing but get contexts, at random moments.
func killed(node string, n int) error {
	const atOnce = 4
	for range n / atOnce {
		var cs [atOnce]*child
		for i := range cs {
			var err error
			if cs[i], err = startRole(nil, nil, "contexts", node); err != nil {
				return err
			}
		}
		for _, c := range cs {
			if _, err := c.line(); err != nil {
				return err
			}
		}
		for _, c := range cs {
			time.Sleep(time.Duration(rand.IntN(10000)) * time.Microsecond) // at a random moment: what is tested
			if err := c.kill(); err != nil {
				return err
			}
		}
	}
	return nil
}

// statusField reads "Name:   12 kB" out of a file of /proc.
func statusField(text, name string, unit int) (int, error) {
	for l := range strings.Lines(text) {
		if f := strings.Fields(l); len(f) > 1 && f[0] == name+":" {
			n, err := strconv.Atoi(f[1])
			return n * unit, err
		}
	}
	return 0, fmt.Errorf("no %s", name)
}

func init() {
	roles["emfile"], roles["nospace"], roles["execed"] = roleEmfile, roleNoSpace, roleExeced
	roles["newimage"], roles["contexts"] = roleNewImage, roleContexts
}
