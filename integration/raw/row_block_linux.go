package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// userfaultfd is the kind of blockedMem that is not a file.
const userfaultfd = "userfaultfd"

// blockedPages is the size of a mapping that blocks.
const blockedPages = 4

// blockedMem is a mapping of which no page ever comes: under a userfaultfd that
// nobody answers, or of the sleeping server's file.
func blockedMem(kind string) ([]byte, error) {
	const prot = unix.PROT_READ | unix.PROT_WRITE
	if kind == userfaultfd {
		b, err := unix.Mmap(-1, 0, blockedPages*rawverbs.Page, prot, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err == nil {
			err = uffdMissing(b)
		}
		return b, err
	}
	f, err := os.OpenFile(kind, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return unix.Mmap(int(f.Fd()), 0, blockedPages*rawverbs.Page, prot, unix.MAP_PRIVATE)
}

// hangs are what can stand in memory that blocks. Each starts what hangs; ended
// says whether it has come to an end after all.
var hangs = []struct {
	what  string
	start func(p *port, b []byte, n int) (ended func() error, err error)
}{
	{"response", hangResponse},
	{"send buffer", hangCopy(rawverbs.OpSend, true)},
	{"receive buffer", hangCopy(rawverbs.OpSend, false)},
	{"write source", hangCopy(rawverbs.OpRDMAWrite, true)},
	{"write target", hangCopy(rawverbs.OpRDMAWrite, false)},
	{"read target", hangCopy(rawverbs.OpRDMARead, true)},
	{"read source", hangCopy(rawverbs.OpRDMARead, false)},
}

// errCopy: a copy failed, and did not hang. So it is with a userfaultfd, because
// the kernel's way through /proc/PID/mem does not let the fault be tried again,
// for which a userfaultfd answers SIGBUS (fs/userfaultfd.c, handle_userfault).
var errCopy = errors.New("the copy failed")

// hangResponse has n threads ask for a response in b.
func hangResponse(p *port, b []byte, n int) (func() error, error) {
	said := make(chan error, n)
	for range n {
		go func() {
			runtime.LockOSThread()
			req := rawverbs.Request{Num: abi.CmdQueryDevice, Body: make([]byte, 8), Resp: rawverbs.AddrOf(b), Out: 176}
			said <- fmt.Errorf("a command returned: %w", p.c.Do(&req))
		}()
	}
	return func() error {
		select {
		case err := <-said:
			return err
		default:
			return nil
		}
	}, nil
}

// hangCopy moves bytes from or to b, on a QP that is connected to itself. local:
// b is the request's own buffer, otherwise what it reaches.
func hangCopy(op uint32, local bool) func(*port, []byte, int) (func() error, error) {
	return func(p *port, b []byte, n int) (func() error, error) {
		if err := p.c.Connect(p.qp.QPHandle, p.qp.QPN, p.path); err != nil {
			return nil, err
		}
		const access = rawverbs.AccessLocalWrite | rawverbs.AccessRemoteWrite | rawverbs.AccessRemoteRead
		bad, err := p.c.RegMR(p.pd, rawverbs.AddrOf(b), uint64(len(b)), access)
		if err != nil {
			return nil, err
		}
		_, addr := p.c.Mem.Data()
		good, err := p.c.RegMR(p.pd, addr, rawverbs.Page, access)
		if err != nil {
			return nil, err
		}
		own, far := abi.SGE{Addr: addr, Length: 64, LKey: good.LKey}, abi.SGE{Addr: rawverbs.AddrOf(b), Length: 64, LKey: bad.LKey}
		key := bad.RKey
		if local {
			own, far, key = far, own, good.RKey
		}
		wr := rawverbs.RDMA(op, far.Addr, key)
		if op == rawverbs.OpSend {
			wr = abi.SendWR{WRID: 1, Opcode: op, SendFlags: rawverbs.SendSignaled}
			if err := p.c.Recv(p.qp.QPHandle, 2, far); err != nil {
				return nil, err
			}
		}
		if err := p.c.Send(p.qp.QPHandle, wr, own); err != nil { // answered before the bytes move
			return nil, err
		}
		return func() error {
			wc, ok, err := p.c.Poll(p.cq)
			switch {
			case ok && wc.Status != 0:
				return fmt.Errorf("completion %d with status %d: %w", wc.WRID, wc.Status, errCopy)
			case ok:
				return fmt.Errorf("completion %d of what cannot be", wc.WRID)
			}
			return err
		}, nil
	}
}

// roleHang does what hangs, n times over, says so, destroys what it can when it
// is told to, and ends.
func roleHang(args []string) error {
	p, err := newPort(args[0])
	if err != nil {
		return err
	}
	b, err := blockedMem(args[1])
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	for _, h := range hangs {
		if h.what != args[2] {
			continue
		}
		// Beside a copy that sleeps in a file no command is sure to be answered, see
		// row35, and this process may be unable to say a word: where its runtime maps
		// memory, it waits for its mmap_lock. So it says beforehand that it will hang,
		// and the file's server that it does.
		asks := args[1] == userfaultfd || h.what == "response"
		if !asks {
			say("hanging")
		}
		ended, err := h.start(p, b, n)
		if err != nil {
			return err
		}
		failed := false
		for i := 0; i < 20 && asks && !failed; i++ { // what does not hang says so soon
			if err := ended(); errors.Is(err, errCopy) && args[1] == userfaultfd {
				failed = true
			} else if err != nil {
				return err
			}
			time.Sleep(5 * time.Millisecond)
		}
		if asks {
			say("hanging")
		}
		waitLine()
		if asks && !failed {
			if err := ended(); err != nil {
				return err
			}
		}
		if err := errors.Join(p.c.Destroy(rawverbs.QP, p.qp.QPHandle), p.c.Destroy(rawverbs.CQ, p.cq)); err != nil {
			return err
		}
		if h.what == "response" {
			if err := p.c.Destroy(rawverbs.PD, p.pd); err != nil {
				return err
			}
		}
		say("destroyed")
		return nil
	}
	return fmt.Errorf("nothing called %q hangs", args[2])
}

// hung is a client that hangs in something.
type hung struct {
	what string
	*child
}

// ends tells a client that hangs to destroy and to exit.
func (t *rowTest) ends(name string, h hung) {
	l, err := h.line()
	if err == nil && l != "destroyed" {
		err = fmt.Errorf("the child said %q", l)
	}
	t.check(fmt.Sprintf("destroy with a %s in a %s", h.what, name), err)
	t.check(fmt.Sprintf("exit with a %s in a %s", h.what, name), h.wait())
}

// row35: memory that blocks for ever holds up nobody but its owner, who can
// still destroy, exit and be killed. But who has its payload in a file of a FUSE
// server that sleeps waits for that server with the end of what changes its address
// space, exit among it: the kernel holds the client's mmap_lock while a fault
// of /proc/PID/mem sleeps (mm/memory.c __access_remote_vm gives no way to let it
// go). Being killed is checked all the same.
func row35(t *rowTest) {
	if err := needRoot(); err != nil {
		t.check("memory that blocks", err)
		return
	}
	t.blocked(userfaultfd, func() (string, func() error) { return userfaultfd, nil })
	dir, err := os.MkdirTemp("", "sleeper")
	if err != nil {
		t.check("a mount point", err)
		return
	}
	s, err := startRole(nil, nil, "sleeper", dir)
	if err == nil {
		_, err = s.line()
	}
	t.check("a FUSE server", err)
	if err != nil {
		return
	}
	before, threadErr := daemonStat("Threads")
	files := 0
	waiting := t.blocked("FUSE file", func() (string, func() error) {
		files++
		name := strconv.Itoa(files)
		return filepath.Join(dir, name), func() error {
			l, err := s.line()
			if err == nil && l != name {
				err = fmt.Errorf("the server was asked for file %s", l)
			}
			return err
		}
	})
	t.check("kill -9 of the FUSE server", s.kill())
	t.check("unmount", errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir)))
	for _, h := range waiting {
		t.ends("FUSE file whose server has ended", h)
	}
	t.flatThreads("the daemon's threads come back with the FUSE server's end", before, threadErr)
	t.works("after the FUSE server's end")
}

func (t *rowTest) flatThreads(what string, before int, err error) {
	if err == nil {
		// Of the threads that were needed at once Go keeps some, idle.
		const kept = 64
		err = eventually(fmt.Sprintf("within %d of before", kept), func() bool {
			now, err := daemonStat("Threads")
			return err == nil && now <= before+kept
		})
	}
	t.check(what, err)
}

// blocked has two clients for everything that can stand in memory of a kind: one
// destroys its objects and exits, the other is killed. Then one client has a
// thousand threads in such commands. It returns those that have been told to end
// and wait for the server of their file. memory is where the next client's
// memory comes from and what waits until it is asked for, nil if nobody can tell.
func (t *rowTest) blocked(name string, memory func() (kind string, asked func() error)) (waiting []hung) {
	before, threadErr := daemonStat("Threads")
	var all []hung
	file := false
	start := func(what string, n int) *child {
		kind, asked := memory()
		file = asked != nil
		h, err := startRole(nil, nil, "hang", t.node, kind, what, fmt.Sprint(n))
		if err == nil {
			_, err = h.line()
		}
		if err == nil && file {
			err = asked()
		}
		t.check(fmt.Sprintf("%s in a %s hangs", what, name), err)
		if err != nil {
			return nil
		}
		return h
	}
	for _, x := range hangs {
		for range 2 {
			if h := start(x.what, 1); h != nil {
				all = append(all, hung{x.what, h})
			}
		}
	}
	t.othersGoOn("beside " + name + "s")
	for i, h := range all {
		select {
		case l := <-h.lines:
			t.check(h.what+" still hangs", fmt.Errorf("the child said %q", l))
		default:
		}
		if i%2 == 0 {
			t.check(fmt.Sprintf("kill -9 with a %s in a %s", h.what, name), h.kill())
			continue
		}
		h.goOn()
		if file && h.what != "response" {
			waiting = append(waiting, h)
			continue
		}
		t.ends(name, h)
	}
	if h := start("response", 1000); h != nil {
		t.othersGoOn("beside a thousand threads in " + name + "s")
		if threadErr == nil {
			now, err := daemonStat("Threads")
			if err == nil && now > 300 {
				err = fmt.Errorf("%d threads", now)
			}
			t.check("the daemon's threads are bounded", err)
		}
		t.check("kill -9 of the thousand", h.kill())
	}
	if !file { // ends with its owner
		t.flatThreads("the daemon's threads come back", before, threadErr)
	}
	t.works("afterwards")
	return waiting
}

func (t *rowTest) othersGoOn(when string) {
	t.check("others go on "+when, func() error {
		c, err := rawverbs.OpenContext(t.node)
		if err != nil {
			return err
		}
		defer c.Close()
		for range 200 {
			pd, err := c.AllocPD()
			if err != nil {
				return err
			}
			if err := c.Destroy(rawverbs.PD, pd); err != nil {
				return err
			}
		}
		return nil
	}())
	t.works(when)
}
