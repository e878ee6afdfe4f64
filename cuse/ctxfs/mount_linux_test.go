package ctxfs_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/ctxfs"
)

// A daemon is this test binary once more, which mounts, serves and says so.

const daemonEnv = "CTXFS_TEST_DAEMON"

func runDaemon(dir string) {
	fs, err := ctxfs.New(dir, cuse.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	a, err := ctxfs.NewArena(nil)
	if err == nil {
		mem, _, _ := a.Alloc(4096)
		copy(mem, "still there")
		var e *ctxfs.Entry
		e, err = fs.Add(a.FD(), 0, 0, func(cuse.Request, uint32) (cuse.File, error) {
			return newFile(func(cuse.Request, []byte) {}), nil // never answers
		})
		if err == nil {
			fmt.Println(e.Path())
		}
	}
	if err != nil {
		fmt.Println(err)
	}
	_ = fs.Serve()
}

// killed starts a daemon and a client of it, and kills the daemon while the client
// waits in a write().
func killed(t *testing.T, dir string) *client {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), daemonEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	line := make([]byte, 4096)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	path := strings.TrimSpace(string(line[:n]))
	c := newClient(t, 0)
	fd := c.open(path)
	if r := c.do(ask{Op: "mmap", FD: fd, Len: 4096, Flags: unix.PROT_READ | unix.MAP_SHARED<<8}); r.Errno != 0 {
		t.Fatal(r.Errno)
	}
	c.send(ask{Op: "write", FD: fd, Data: command(24)})
	_ = cmd.Process.Kill()
	if r := c.recv(); r.Errno == 0 {
		t.Errorf("write to a dead daemon: %d", r.N)
	}
	if r := c.do(ask{Op: "peek", FD: 0, Len: 11}); string(r.Data) != "still there" {
		t.Errorf("client sees %q after the daemon died", r.Data)
	}
	return c
}

func TestStaleMountIsReplaced(t *testing.T) {
	needFuse(t)
	dir := mountpoint(t)
	killed(t, dir)
	// Not stat: whoever looked before has left its answer in the kernel.
	if err := unix.Statfs(dir, new(unix.Statfs_t)); !errors.Is(err, unix.ENOTCONN) && !errors.Is(err, unix.ECONNABORTED) {
		t.Fatalf("statfs of a dead mount: %v", err)
	}
	fs, err := ctxfs.New(dir, cuse.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := fs.Close(); err != nil { // never served
		t.Error(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after Close: %v", err)
	}
}

func TestClean(t *testing.T) {
	needFuse(t)
	dir := mountpoint(t)
	if err := ctxfs.Clean(dir); err != nil {
		t.Error("nothing there:", err)
	}
	if err := ctxfs.Clean(dir + "/not/there"); err != nil {
		t.Error("no parent:", err)
	}
	c := killed(t, dir)
	if err := ctxfs.Clean(dir); err != nil {
		t.Error("dead:", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after Clean: %v", err)
	}
	if r := c.do(ask{Op: "peek", FD: 0, Len: 11}); string(r.Data) != "still there" {
		t.Errorf("client sees %q after Clean", r.Data)
	}
}

// Clean touches nothing that is not ours.
func TestCleanLeavesOthers(t *testing.T) {
	needFuse(t)
	dir := mountpoint(t)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=4k"); err != nil {
		t.Fatal(err)
	}
	if err := ctxfs.Clean(dir); err == nil {
		t.Error("Clean of a directory that is in use")
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Error(err)
	}
}

func TestLivingMountIsLeftAlone(t *testing.T) {
	fs := mount(t, cuse.Config{})
	e := add(t, fs, arena(t), 0, accept(newFile(nil)))
	if _, err := ctxfs.New(filepath.Dir(e.Path()), cuse.Config{}); !errors.Is(err, unix.EBUSY) {
		t.Errorf("second New: %v", err)
	}
	newClient(t, 0).open(e.Path())
}

func TestBadMountPoint(t *testing.T) {
	needFuse(t)
	dir := mountpoint(t)
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	if _, err := ctxfs.New(dir, cuse.Config{}); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file: %v", err)
	}
	if _, err := ctxfs.New(dir+"/a/b", cuse.Config{}); err == nil {
		t.Error("below a file")
	}
}

func TestMountOptions(t *testing.T) {
	fs := mount(t, cuse.Config{})
	dir := filepath.Dir(add(t, fs, arena(t), 0, accept(newFile(nil))).Path())
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if !strings.Contains(line, " "+dir+" ") {
			continue
		}
		for _, want := range []string{"nosuid", "nodev", "noexec", "fuse.uverbsd", "allow_other", "default_permissions"} {
			if !strings.Contains(line, want) {
				t.Errorf("%s is missing: %s", want, line)
			}
		}
		return
	}
	t.Error("not mounted")
}

// The kernel keeps nothing of files that were opened and closed, or removed.
func TestKernelForgetsEntries(t *testing.T) {
	inodes := func() int {
		b, err := os.ReadFile("/proc/slabinfo")
		if err != nil {
			return -1
		}
		for line := range strings.Lines(string(b)) {
			var n int
			if _, err := fmt.Sscanf(line, "fuse_inode %d", &n); err == nil {
				return n
			}
		}
		return -1
	}
	fs, a := mount(t, cuse.Config{}), arena(t)
	before := inodes()
	if before < 0 {
		t.Skip("this kernel does not count its FUSE inodes")
	}
	const entries = 2000
	for i := range entries {
		f := newFile(nil)
		e := add(t, fs, a, 0, accept(f))
		if i%2 == 0 {
			fd, err := unix.Open(e.Path(), unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			_ = unix.Close(fd)
			soon(t, "Release", f.released)
		} else {
			if _, err := os.Stat(e.Path()); err != nil {
				t.Fatal(err)
			}
			e.Remove()
		}
	}
	if n := inodes() - before; n > entries/2 { // objects in the allocator's own lists count
		t.Errorf("%d inodes are left of %d", n, entries)
	}
}
