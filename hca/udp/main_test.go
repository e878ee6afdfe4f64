package udp_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/udp"
)

// stage says what this process is: the tests run in a network namespace of their
// own, and their peer in another.
const stage = "UVERBSD_UDP_TEST"

func TestMain(m *testing.M) {
	switch os.Getenv(stage) {
	case "":
		os.Exit(again("tests", os.Args[1:]))
	case "peer":
		if err := echo(os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if err := ip("link set lo up", "-6 address add fd00::1/128 dev lo"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	before := openFiles()
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if after := openFiles(); code == 0 && after != before {
			fmt.Fprintf(os.Stderr, "%d files are open, were %d\n", after, before)
			code = 1
		}
		os.Exit(code)
	}))
}

// openFiles counts the open files. The pipe has the runtime open its own epoll and
// eventfd before the first count.
func openFiles() int {
	r, w, err := os.Pipe()
	if err != nil {
		panic(err)
	}
	r.Close()
	w.Close()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	return len(files)
}

// command is this program again, in a new network namespace.
func command(what string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), stage+"="+what)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	return cmd
}

func again(what string, args []string) int {
	cmd := command(what, args...)
	cmd.Stdin, cmd.Stdout = os.Stdin, os.Stdout
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(exit.ExitCode(), 1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run in a network namespace:", err)
		return 1
	}
	return 0
}

// ip runs iproute2's ip for each line.
func ip(lines ...string) error {
	for _, line := range lines {
		if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", line, err, bytes.TrimSpace(out))
		}
	}
	return nil
}

func mustIP(t testing.TB, lines ...string) {
	t.Helper()
	if err := ip(lines...); err != nil {
		t.Fatal(err)
	}
}

// echo is the peer: it waits until its end of the wire is there, opens a link on it,
// and sends each packet back, until its standard input ends.
func echo(dev string) error {
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return err
	}
	err := ip("link set lo up", "address add 10.9.0.2/24 dev "+dev, "-6 address add fd09::2/64 dev "+dev+" nodad",
		"link set "+dev+" address 02:00:00:00:00:02 mtu 9000 up")
	if err != nil {
		return err
	}
	l, err := udp.New(udp.Config{NetDev: dev})
	if err != nil {
		return err
	}
	if err := errors.Join(waitUp(l), l.Join(group4), l.Join(group6)); err != nil {
		return err
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		l.Close()
	}()
	fmt.Println("ready")
	rs := make([]roce.Received, 16)
	bufs := make([][]byte, len(rs))
	for i := range bufs {
		bufs[i] = make([]byte, roce.Headroom+roce.MaxPacket)
	}
	for {
		n, err := l.Recv(rs)
		if errors.Is(err, roce.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		for i := range rs[:n] {
			var p roce.Packet
			if err := roce.Parse(rs[i].IP, &p); err != nil {
				return fmt.Errorf("peer: %w: %x", err, rs[i].IP[:min(60, len(rs[i].IP))])
			}
			src := p.Dst
			switch src {
			case group4:
				src = hca.IPv4GID([4]byte{10, 9, 0, 2})
			case group6:
				src = hca.GID{0: 0xfd, 1: 9, 15: 2}
			}
			p.Dst, p.Src = p.Src, src
			at := p.Build(bufs[i])
			l.Send(p.Dst, []roce.Buffer{roce.Seal(bufs[i], at+copy(bufs[i][at:], p.Payload))})
			rs[i].Release()
		}
	}
}
