package ctxfs_test

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A client is a process of its own: this test binary again, which does one system
// call after the other as it is told over a pipe.

const clientEnv = "CTXFS_TEST_CLIENT"

// patience is how long anything may take before it counts as hung.
const patience = 20 * time.Second

// ask is one system call to be made.
type ask struct {
	Op     string
	Path   string `json:",omitempty"`
	FD     int
	Flags  int
	Len    int
	Offset int64
	Data   []byte `json:",omitempty"`
	Count  int
}

// got is what came of it.
type got struct {
	N     int64
	Errno unix.Errno
	Data  []byte `json:",omitempty"`
}

type client struct {
	t   testing.TB
	cmd *exec.Cmd
	in  *json.Encoder
	inw io.Closer
	out *json.Decoder

	once            sync.Once
	pipeIn, pipeOut int // from its fd 4, to its fd 3
}

// newClient starts one; uid 0 is root.
func newClient(t testing.TB, uid int) *client {
	t.Helper()
	c := &client{t: t, cmd: exec.Command("/proc/self/exe")}
	c.cmd.Env = append(os.Environ(), clientEnv+"=1", "GODEBUG=asyncpreemptoff=1") // no signals of the runtime's in the middle of a call
	c.cmd.Stderr = nil                                                            // a killed one says nothing of interest
	in, err := c.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var to, from [2]int
	if err := errors.Join(unix.Pipe2(to[:], unix.O_CLOEXEC), unix.Pipe2(from[:], unix.O_CLOEXEC)); err != nil {
		t.Fatal(err)
	}
	c.pipeIn, c.pipeOut = from[0], to[1]
	theirs := []*os.File{os.NewFile(uintptr(to[0]), ""), os.NewFile(uintptr(from[1]), "")}
	c.cmd.ExtraFiles = theirs
	err = c.cmd.Start()
	for _, f := range theirs {
		_ = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	c.in, c.inw, c.out = json.NewEncoder(in), in, json.NewDecoder(out)
	t.Cleanup(c.kill)
	if uid != 0 {
		if r := c.do(ask{Op: "setuid", Len: uid}); r.Errno != 0 {
			t.Fatal("setuid:", r.Errno)
		}
	}
	return c
}

// kill ends the client and waits for that.
func (c *client) kill() {
	_ = c.inw.Close()
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
	c.once.Do(func() {
		_ = unix.Close(c.pipeIn)
		_ = unix.Close(c.pipeOut)
	})
}

// send asks for a call and does not wait for it.
func (c *client) send(a ask) {
	c.t.Helper()
	if err := c.in.Encode(a); err != nil {
		c.t.Fatalf("client: %s: %v", a.Op, err)
	}
}

// recv waits for the answer to send.
func (c *client) recv() got {
	c.t.Helper()
	r, err := c.tryRecv()
	if err != nil {
		c.t.Fatalf("client: %v", err)
	}
	return r
}

func (c *client) tryRecv() (r got, err error) {
	late := time.AfterFunc(patience, func() { _ = c.cmd.Process.Kill() })
	defer late.Stop()
	err = c.out.Decode(&r)
	return r, err
}

func (c *client) do(a ask) got {
	c.t.Helper()
	c.send(a)
	return c.recv()
}

// open opens an entry's file and fails the test if that fails.
func (c *client) open(path string) int {
	c.t.Helper()
	r := c.do(ask{Op: "open", Path: path, Flags: unix.O_RDWR | unix.O_CLOEXEC})
	if r.Errno != 0 {
		c.t.Fatalf("open: %v", r.Errno)
	}
	return int(r.N)
}

func (c *client) write(fd int, b []byte) (int, unix.Errno) {
	c.t.Helper()
	r := c.do(ask{Op: "write", FD: fd, Data: b})
	return int(r.N), r.Errno
}

// command is one of n bytes, all different, that says how long it is.
func command(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i ^ i>>8 ^ i>>16)
	}
	binary.NativeEndian.PutUint32(b, uint32(n))
	return b
}

// runClient is the other side.
func runClient() {
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	k := &calls{}
	for {
		var a ask
		if in.Decode(&a) != nil {
			return
		}
		n, data, err := k.call(a)
		r := got{N: n, Data: data}
		if err != nil {
			r.Errno = unix.EIO
			if errno, ok := err.(unix.Errno); ok {
				r.Errno = errno
			}
		}
		if out.Encode(r) != nil {
			return
		}
	}
}

type calls struct{ maps [][]byte }

func (k *calls) call(a ask) (int64, []byte, error) {
	fd := a.FD
	switch a.Op {
	case "setuid":
		if err := unix.Setresgid(a.Len, a.Len, a.Len); err != nil {
			return 0, nil, err
		}
		if err := unix.Setresuid(a.Len, a.Len, a.Len); err != nil {
			return 0, nil, err
		}
		return 0, nil, unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)
	case "tid":
		return int64(unix.Gettid()), nil, nil
	case "open":
		n, err := unix.Open(a.Path, a.Flags, 0)
		return int64(n), nil, err
	case "reopen":
		n, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), a.Flags, 0)
		return int64(n), nil, err
	case "close":
		return 0, nil, unix.Close(fd)
	case "write":
		n, err := unix.Write(fd, a.Data)
		return int64(n), nil, err
	case "pwrite":
		n, err := unix.Pwrite(fd, a.Data, a.Offset)
		return int64(n), nil, err
	case "command": // of Len bytes, from a buffer that starts Flags bytes into a page, at Offset unless 0
		mem, err := unix.Mmap(-1, 0, (a.Len+2*4096)&^4095, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return 0, nil, err
		}
		defer unix.Munmap(mem)
		b := mem[a.Flags : a.Flags+a.Len]
		copy(b, command(a.Len))
		n := 0
		if a.Offset != 0 {
			n, err = unix.Pwrite(fd, b, a.Offset)
		} else {
			n, err = unix.Write(fd, b)
		}
		return int64(n), nil, err
	case "torn": // a command of Len bytes of which only the first Count can be read: whole pages
		mem, err := unix.Mmap(-1, 0, a.Len, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return 0, nil, err
		}
		defer unix.Munmap(mem)
		copy(mem, command(a.Len))
		if err := unix.Mprotect(mem[a.Count:], unix.PROT_NONE); err != nil {
			return 0, nil, err
		}
		n, err := unix.Write(fd, mem)
		return int64(n), nil, err
	case "writers": // Count threads with Len write()s each
		var wg sync.WaitGroup
		errs := make([]error, a.Count)
		for i := range a.Count {
			wg.Add(1)
			go func() {
				defer wg.Done()
				b := make([]byte, 24+i)
				for range a.Len {
					if n, err := unix.Write(fd, b); n != len(b) || err != nil {
						errs[i] = fmt.Errorf("%d, %w", n, err)
						return
					}
				}
			}()
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				return 0, []byte(err.Error()), unix.EIO
			}
		}
		return 0, nil, nil
	case "roundtrips": // nanoseconds for Count write()s
		b := a.Data
		start := time.Now()
		for range a.Count {
			if n, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b))); int(n) != len(b) {
				return 0, nil, errno
			}
		}
		return int64(time.Since(start)), nil, nil
	case "pingpong": // nanoseconds for Count round trips over fds 3 and 4
		b := make([]byte, 24)
		start := time.Now()
		for range a.Count {
			_, _, _ = unix.RawSyscall(unix.SYS_WRITE, 4, uintptr(unsafe.Pointer(&b[0])), 24)
			if n, _, errno := unix.RawSyscall(unix.SYS_READ, 3, uintptr(unsafe.Pointer(&b[0])), 24); int(n) < 1 {
				return 0, nil, errno
			}
		}
		return int64(time.Since(start)), nil, nil
	case "read":
		n, err := unix.Read(fd, make([]byte, a.Len))
		return int64(n), nil, err
	case "lseek":
		n, err := unix.Seek(fd, a.Offset, a.Flags)
		return n, nil, err
	case "ftruncate":
		return 0, nil, unix.Ftruncate(fd, a.Offset)
	case "fallocate":
		return 0, nil, unix.Fallocate(fd, uint32(a.Flags), 0, a.Offset)
	case "fsync":
		return 0, nil, unix.Fsync(fd)
	case "fchmod":
		return 0, nil, unix.Fchmod(fd, 0o777)
	case "fchown":
		return 0, nil, unix.Fchown(fd, a.Len, a.Len)
	case "ioctl":
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(a.Flags), uintptr(unsafe.Pointer(&make([]byte, 4096)[0])))
		if errno != 0 {
			return 0, nil, errno
		}
		return 0, nil, nil
	case "fgetxattr":
		n, err := unix.Fgetxattr(fd, "user.x", nil)
		return int64(n), nil, err
	case "seal":
		n, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW)
		return int64(n), nil, err
	case "poll":
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}
		_, err := unix.Poll(p, 0)
		return int64(p[0].Revents), nil, err
	case "fstat":
		var st unix.Stat_t
		err := unix.Fstat(fd, &st)
		return int64(st.Mode), nil, err
	case "stat":
		var st unix.Stat_t
		err := unix.Stat(a.Path, &st)
		return int64(st.Mode), nil, err
	case "readdir":
		d, err := unix.Open(a.Path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		return int64(d), nil, err
	case "creat":
		n, err := unix.Open(a.Path, unix.O_CREAT|unix.O_WRONLY, 0o600)
		return int64(n), nil, err
	case "mmap": // returns the number of the mapping
		m, err := unix.Mmap(fd, a.Offset, a.Len, a.Flags&7, a.Flags>>8)
		if err != nil {
			return 0, nil, err
		}
		k.maps = append(k.maps, m)
		return int64(len(k.maps) - 1), nil, nil
	case "peek":
		return 0, append([]byte(nil), k.maps[fd][a.Offset:a.Offset+int64(a.Len)]...), nil
	case "poke":
		copy(k.maps[fd][a.Offset:], a.Data)
		return 0, nil, nil
	case "mprotect":
		return 0, nil, unix.Mprotect(k.maps[fd], a.Flags)
	case "madvise":
		return 0, nil, unix.Madvise(k.maps[fd], a.Flags)
	case "munmap":
		return 0, nil, unix.Munmap(k.maps[fd])
	}
	return 0, nil, unix.ENOSYS
}
