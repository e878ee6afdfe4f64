package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// port is a client with an RC QP.
type port struct {
	c      *rawverbs.Client
	path   rawverbs.Path
	pd, cq uint32
	qp     abi.CreateQPResp
}

func newPort(node string) (*port, error) {
	c, err := rawverbs.OpenContext(node)
	if err != nil {
		return nil, err
	}
	p := &port{c: c}
	if p.path, err = c.SelfPath(node); err != nil {
		return nil, err
	}
	if p.pd, err = c.AllocPD(); err != nil {
		return nil, err
	}
	if p.cq, err = c.CreateCQ(16, rawverbs.NoChannel); err != nil {
		return nil, err
	}
	p.qp, err = c.CreateQP(rawverbs.SmallQP(rawverbs.QPTypeRC, p.pd, p.cq))
	return p, err
}

// write does an RDMA write of n bytes and returns its completion's status.
func (p *port) write(lkey uint32, n uint32, remote uint64, rkey uint32) (uint32, error) {
	_, addr := p.c.Mem.Data()
	err := p.c.Send(p.qp.QPHandle, rawverbs.RDMA(rawverbs.OpRDMAWrite, remote, rkey), abi.SGE{Addr: addr, Length: n, LKey: lkey})
	if err != nil {
		return 0, err
	}
	for end := time.Now().Add(patience); time.Now().Before(end); {
		wc, ok, err := p.c.Poll(p.cq)
		if err != nil {
			return 0, err
		}
		if ok {
			return wc.Status, nil
		}
	}
	return 0, errors.New("no completion")
}

// row9: what lies outside of a registered range cannot be registered by
// wrapping around, nor written to by a byte.
func row9(t *rowTest) {
	ranges := []string{"hca-va-offset", "length-0", "length-wraps", "start-max-2", "unmapped", "kernel-address"}
	t.walkOnly(func(name string) bool {
		what, ok := strings.CutPrefix(name, "REG_MR/")
		return ok && slices.Contains(ranges, what)
	})
	const from, size = 100, 1000 // of the target, within its page
	for _, x := range []struct {
		what   string
		off, n int
		ok     bool
	}{
		{"the whole range", 0, size, true},
		{"its last byte", size - 1, 1, true},
		{"the byte before", -1, 1, false},
		{"from the byte before", -1, 2, false},
		{"the byte after", size, 1, false},
		{"to the byte after", size - 1, 2, false},
	} {
		t.check("write to "+x.what, func() error {
			p, err := newPort(t.node)
			if err != nil {
				return err
			}
			defer p.c.Close()
			if err := p.c.Connect(p.qp.QPHandle, p.qp.QPN, p.path); err != nil {
				return err
			}
			data, addr := p.c.Mem.Data()
			src, err := p.c.RegMR(p.pd, addr, 2*rawverbs.Page, rawverbs.AccessLocalWrite)
			if err != nil {
				return err
			}
			base := uint64(4*rawverbs.Page + from)
			dst, err := p.c.RegMR(p.pd, addr+base, size, rawverbs.AccessLocalWrite|rawverbs.AccessRemoteWrite)
			if err != nil {
				return err
			}
			copy(data, bytes.Repeat([]byte{0xee}, 2*rawverbs.Page))
			status, err := p.write(src.LKey, uint32(x.n), addr+base+uint64(x.off), dst.RKey)
			if err != nil {
				return err
			}
			if (status == 0) != x.ok {
				return fmt.Errorf("status %d", status)
			}
			written := bytes.Count(data[4*rawverbs.Page:], []byte{0xee})
			if x.ok && written != x.n || !x.ok && written != 0 {
				return fmt.Errorf("%d bytes written", written)
			}
			return nil
		}())
	}
}

// fixed is where a victim and what comes after it have their memory.
const fixed = 0x7000_0000_0000

func mapFixed() ([]byte, error) {
	b, err := mmapAt(fixed, rawverbs.Page)
	if err != nil {
		return nil, err
	}
	copy(b, bytes.Repeat([]byte{rawverbs.Poison}, len(b)))
	return b, nil
}

// roleVictim registers memory and connects to the parent's QP. Then: with
// "exec", it becomes another image with the file still open; otherwise it waits
// to be killed.
func roleVictim(args []string) error {
	peer, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	p, err := newPort(args[0])
	if err != nil {
		return err
	}
	b, err := mapFixed()
	if err != nil {
		return err
	}
	mr, err := p.c.RegMR(p.pd, rawverbs.AddrOf(b), rawverbs.Page, rawverbs.AccessLocalWrite|rawverbs.AccessRemoteWrite)
	if err != nil {
		return err
	}
	if err := p.c.Connect(p.qp.QPHandle, uint32(peer), p.path); err != nil {
		return err
	}
	say("%d %d", p.qp.QPN, mr.RKey)
	waitLine()
	if len(args) > 2 && args[2] == "exec" {
		if _, err := unix.FcntlInt(uintptr(p.c.FD), unix.F_SETFD, 0); err != nil {
			return err
		}
		return unix.Exec("/proc/self/exe", []string{"raw", "role", "watcher"}, os.Environ())
	}
	waitLine()
	return nil
}

// roleWatcher has memory where a victim had its own, and sees whether anything
// lands there.
func roleWatcher([]string) error {
	b, err := mapFixed()
	if err != nil {
		return err
	}
	say("watching")
	waitLine()
	if n := len(b) - bytes.Count(b, []byte{rawverbs.Poison}); n > 0 {
		return fmt.Errorf("%d bytes landed in a process that registered nothing", n)
	}
	return nil
}

// victim starts one and connects p to it.
func (t *rowTest) victim(p *port, more ...string) (v *child, rkey uint32, err error) {
	args := append([]string{"victim", t.node, fmt.Sprint(p.qp.QPN)}, more...)
	if v, err = startRole(nil, nil, args...); err != nil {
		return nil, 0, err
	}
	l, err := v.line()
	if err != nil {
		return v, 0, err
	}
	var qpn uint32
	if _, err := fmt.Sscanf(l, "%d %d", &qpn, &rkey); err != nil {
		return v, 0, fmt.Errorf("victim said %q: %w", l, err)
	}
	return v, rkey, p.c.Connect(p.qp.QPHandle, qpn, p.path)
}

// source is a port with a region to write from.
func (t *rowTest) source() (*port, uint32, error) {
	p, err := newPort(t.node)
	if err != nil {
		return nil, 0, err
	}
	_, addr := p.c.Mem.Data()
	mr, err := p.c.RegMR(p.pd, addr, rawverbs.Page, rawverbs.AccessLocalWrite)
	return p, mr.LKey, err
}

// row23: fork, exec and exit.
func row23(t *rowTest) {
	c := t.open()
	if c == nil {
		return
	}
	defer c.Close()
	f := file(c)
	pd, err := c.AllocPD()
	t.check("allocate", err)
	for range 5 {
		_, err = t.run(nil, []*os.File{f}, "quit")
		t.check("a child with the file exits", err)
	}
	_ = f.Close() // a dup of the parent's own: FLUSH, not RELEASE
	t.check("the parent's PD is still there", func() error {
		cq, err := c.CreateCQ(16, rawverbs.NoChannel)
		if err != nil {
			return err
		}
		_, err = c.CreateQP(rawverbs.SmallQP(rawverbs.QPTypeRC, pd, cq))
		return err
	}())
	t.check("after exec nothing lands in the new image", func() error {
		p, lkey, err := t.source()
		if err != nil {
			return err
		}
		defer p.c.Close()
		v, rkey, err := t.victim(p, "exec")
		if err != nil {
			return err
		}
		v.goOn()
		if l, err := v.line(); err != nil || l != "watching" {
			return fmt.Errorf("the new image said %q (%w)", l, err)
		}
		// It may succeed or fail, but not land.
		if _, err := p.write(lkey, 512, fixed, rkey); err != nil {
			return err
		}
		v.goOn()
		return v.wait()
	}())
}

// row24: a client dies, its pid is given to another process.
func row24(t *rowTest) {
	if err := needRoot(); err != nil {
		t.check("pid reuse", err)
		return
	}
	p, lkey, err := t.source()
	if err != nil {
		t.check("source", err)
		return
	}
	defer p.c.Close()
	v, rkey, err := t.victim(p)
	if err != nil {
		t.check("victim", err)
		return
	}
	status, err := p.write(lkey, 64, fixed, rkey)
	if err == nil && status != 0 {
		err = fmt.Errorf("status %d", status)
	}
	t.check("a write before", err)
	pid := v.cmd.Process.Pid
	t.check("kill the client", v.kill())
	var w *child
	for range 200 { // other processes take numbers, too
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0); err != nil {
			t.check("ns_last_pid", err)
			return
		}
		if w, err = startRole(nil, nil, "watcher"); err != nil {
			t.check("start", err)
			return
		}
		if w.cmd.Process.Pid == pid {
			break
		}
		_ = w.kill()
		w = nil
	}
	if w == nil {
		t.check("pid reuse", fmt.Errorf("%w: the number did not come again", errSkip))
		return
	}
	if _, err := w.line(); err != nil {
		t.check("watcher", err)
		return
	}
	status, err = p.write(lkey, 64, fixed, rkey)
	if err == nil && status == 0 {
		err = errors.New("the write succeeded")
	}
	t.check("a write to the dead client fails", err)
	w.goOn()
	t.check("its pid's new process is untouched", w.wait())
}

// row32: a response that cannot be written is EFAULT, and its memory stays.
func row32(t *rowTest) {
	c := t.open()
	if c == nil {
		return
	}
	defer c.Close()
	b, err := unix.Mmap(-1, 0, 2*rawverbs.Page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.check("map", err)
		return
	}
	for _, x := range []struct {
		what string
		off  int
	}{{"a page without permissions", rawverbs.Page + 64}, {"half in such a page", rawverbs.Page - 64}} {
		t.check(x.what, func() error {
			copy(b, bytes.Repeat([]byte{rawverbs.Poison}, len(b)))
			if err := unix.Mprotect(b[rawverbs.Page:], unix.PROT_NONE); err != nil {
				return err
			}
			req := rawverbs.Request{Num: abi.CmdQueryDevice, Body: make([]byte, 8), Resp: rawverbs.AddrOf(b) + uint64(x.off), Out: 176}
			e := c.Do(&req)
			if err := unix.Mprotect(b[rawverbs.Page:], unix.PROT_READ|unix.PROT_WRITE); err != nil {
				return err
			}
			if n := len(b[rawverbs.Page:]) - bytes.Count(b[rawverbs.Page:], []byte{rawverbs.Poison}); n > 0 {
				return fmt.Errorf("%d bytes written, %v", n, e)
			}
			return want(e, unix.EFAULT)
		}())
	}
	_ = unix.Munmap(b)
}
