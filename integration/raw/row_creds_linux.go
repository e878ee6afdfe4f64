package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// row1: only the opener, with the credentials that it had, may write.
func row1(t *rowTest) {
	c := t.open()
	if c == nil {
		return
	}
	defer c.Close()
	f := file(c)
	defer f.Close()
	try := func(what string, attr *syscall.SysProcAttr) {
		_, err := t.run(attr, []*os.File{f}, "try")
		t.check(what, err)
	}
	try("a child with the same credentials", nil)
	if err := needRoot(); err != nil {
		t.check("another user's process", err)
	} else {
		try("another user's process", asUser(testerID))
		try("a child in a pid namespace", &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID})
		try("a child in a user namespace", &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
		})
		t.check("after exec of a set-uid program", setUID(t))
	}
	t.check("over a socket (SCM_RIGHTS)", passed(t, int(f.Fd())))
	_, err := c.QueryPort(1)
	t.check("the opener itself goes on", err)
}

// roleTry writes every command to an inherited file: each must be EACCES, and
// this process's memory must stay as it is.
func roleTry(args []string) error {
	fd, err := fdArg(args)
	if err != nil {
		return err
	}
	mem, err := rawverbs.NewMem()
	if err != nil {
		return err
	}
	c := &rawverbs.Client{FD: fd, Mem: mem}
	out, addr := mem.Out()
	for i := range out {
		out[i] = rawverbs.Poison
	}
	for _, num := range append(numbers(), beyond...) {
		req := rawverbs.Request{Num: num, Body: make([]byte, 128), Resp: addr, Out: 512}
		if e := c.Do(&req); e != unix.EACCES {
			return fmt.Errorf("command %#x: %v, want EACCES", num, e)
		}
	}
	if e := c.Write([]byte{1}); e != unix.EACCES {
		return fmt.Errorf("one byte: %v, want EACCES", e)
	}
	if len(bytes.Trim(out, "\xa5")) > 0 {
		return fmt.Errorf("memory was written")
	}
	return nil
}

// numbers are all numbers that the tables know.
func numbers() (n []uint32) {
	for i := uint32(0); i <= abi.CmdOpenQP; i++ {
		n = append(n, i)
	}
	for i := range exRows {
		n = append(n, exRows[i].num)
	}
	return n
}

// setUID: a user's process opens the node and becomes a set-uid program with
// the file still open.
func setUID(t *rowTest) error {
	const program = "/usr/local/bin/raw-setuid"
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	to, err := os.OpenFile(program, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	defer os.Remove(program)
	if _, err := io.Copy(to, self); err != nil {
		return err
	}
	if err := to.Close(); err != nil {
		return err
	}
	if err := os.Chmod(program, 0o755|os.ModeSetuid); err != nil {
		return err
	}
	_, err = t.roleAs(testerID, "suid", t.node, program)
	return err
}

func roleSuid(args []string) error {
	c, err := rawverbs.OpenContext(args[0])
	if err != nil {
		return err
	}
	fd, err := unix.Dup(c.FD) // without close-on-exec
	if err != nil {
		return err
	}
	return unix.Exec(args[1], []string{"raw", "role", "try", fmt.Sprint(fd)}, os.Environ())
}

// passed gives the file to a process that did not inherit it.
func passed(t *rowTest, fd int) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	defer unix.Close(pair[0])
	if err := unix.Sendmsg(pair[0], []byte{1}, unix.UnixRights(fd), nil, 0); err != nil {
		return err
	}
	_, err = t.run(nil, []*os.File{theirs}, "received")
	return err
}

func init() {
	roles["received"] = func([]string) error {
		oob := make([]byte, unix.CmsgSpace(4))
		_, n, _, _, err := unix.Recvmsg(3, make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			return err
		}
		msgs, err := unix.ParseSocketControlMessage(oob[:n])
		if err != nil {
			return err
		}
		fds, err := unix.ParseUnixRights(&msgs[0])
		if err != nil {
			return err
		}
		return roleTry([]string{fmt.Sprint(fds[0])})
	}
}
