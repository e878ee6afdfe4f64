package sysfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/udev/modprobe"
)

func names(t *testing.T, dir string) []string {
	t.Helper()
	ents, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var l []string
	for _, e := range ents {
		if e.IsDir() {
			l = append(l, e.Name())
		}
	}
	return l
}

// TestOverlay lies over the real /sys/class.
func TestOverlay(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	opt := testOptions(t.TempDir())
	opt.ClassDir = "/sys/class"
	before := names(t, "/sys/class")
	reg := new(hca.Registry)
	if err := reg.Register(qibEntry()); err != nil {
		t.Fatal(err)
	}
	tr, err := Mount(reg, opt)
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Sorted(slices.Values(append(slices.Clone(before), classes[:]...)))
	if got := names(t, "/sys/class"); !slices.Equal(got, want) {
		t.Errorf("classes: %v, want %v", got, want)
	}
	for file, want := range map[string]string{
		"infiniband_verbs/uverbs0/ibdev":                      "qib0\n",
		"infiniband/qib0/ports/1/pkeys/0":                     "0xffff\n",
		"infiniband/qib0/device/infiniband_verbs/uverbs0/dev": "231:192\n",
		"net/lo/address":                                      "00:00:00:00:00:00\n",
	} {
		if b, err := os.ReadFile("/sys/class/" + file); err != nil || string(b) != want {
			t.Errorf("%s: %q %v", file, b, err)
		}
	}
	var st unix.Statfs_t
	if err := unix.Statfs("/sys/class/net", &st); err != nil || st.Type != unix.SYSFS_MAGIC {
		t.Errorf("net is not the kernel's own: %#x %v", st.Type, err)
	}
	if err := os.Mkdir("/sys/class/x", 0o755); err == nil {
		t.Error("the overlay takes a mkdir")
	}

	// Not for root only.
	cmd := exec.Command("cat", "/sys/class/infiniband/qib0/ports/1/gid_attrs/types/0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if b, err := cmd.CombinedOutput(); err != nil || string(b) != "IB/RoCE v1\n" {
		t.Errorf("as nobody: %q %v", b, err)
	}

	// Hot-plug, of a name that was asked for before it was there, twice over.
	file := "/sys/class/infiniband/rxe0/ports/1/link_layer"
	verbs := "/sys/class/infiniband_verbs/uverbs7/abi_version"
	for range 3 {
		for _, f := range []string{file, verbs} {
			if _, err := os.ReadFile(f); !errors.Is(err, unix.ENOENT) {
				t.Errorf("%s before: %v", f, err)
			}
		}
		if err := reg.Register(rxeEntry()); err != nil {
			t.Fatal(err)
		}
		for f, want := range map[string]string{file: "Ethernet\n", verbs: "2\n"} {
			if b, err := os.ReadFile(f); err != nil || string(b) != want {
				t.Errorf("%s while: %q %v", f, b, err)
			}
		}
		if err := reg.Unregister("rxe0"); err != nil {
			t.Fatal(err)
		}
	}

	for range 2 {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}
	if got := names(t, "/sys/class"); !slices.Equal(got, before) {
		t.Errorf("after close: %v, want %v", got, before)
	}
	if l := leftOvers(t, opt); l != "" {
		t.Errorf("left over: %s", l)
	}
}

// uevent makes the kernel send one.
func uevent(t *testing.T) {
	t.Helper()
	if err := os.WriteFile("/sys/devices/virtual/net/lo/uevent", []byte("change"), 0); err != nil {
		t.Fatal(err)
	}
}

// TestClasses: classes of the kernel that come, go and come again, with names
// that somebody had asked for, both when they are bound over the overlay
// and when they are not.
func TestClasses(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	for _, binds := range []bool{false, true} {
		t.Run(fmt.Sprintf("bound=%v", binds), func(t *testing.T) {
			opt, real := newClassDir(t)
			opt = opt.withDefaults()
			for _, c := range classes { // in place of the tree
				if err := os.MkdirAll(filepath.Join(opt.MountPoint, c), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			o := &overlay{opt: opt, base: -1, top: -1, bound: make(map[string]bound)}
			o.needs = func(name string) bool { return binds && o.needsBind(name) }
			if err := o.open(); err != nil {
				t.Fatal(err)
			}
			covered := filepath.Join(opt.ClassDir, "late")
			for range 3 {
				if _, err := os.Stat(covered); !errors.Is(err, unix.ENOENT) {
					t.Errorf("before: %v", err)
				}
				if err := os.Mkdir(filepath.Join(real, "late"), 0o755); err != nil {
					t.Fatal(err)
				}
				uevent(t)
				eventually(t, func() string {
					if _, err := os.Stat(covered + "/cgroup.procs"); err != nil {
						return "came: " + err.Error()
					}
					return ""
				})
				time.Sleep(2 * settle) // let the watcher come to the binds
				f, err := os.OpenFile(covered+"/cgroup.procs", os.O_WRONLY, 0)
				if binds && err != nil || !binds && !errors.Is(err, unix.EROFS) {
					t.Errorf("open for writing: %v", err)
				}
				if err == nil {
					f.Close()
				}
				if !slices.Contains(names(t, opt.ClassDir), "late") {
					t.Error("came, but is not listed")
				}
				if err := os.Remove(filepath.Join(real, "late")); err != nil {
					t.Fatal(err)
				}
				uevent(t)
				eventually(t, func() string {
					if _, err := os.Stat(covered); !errors.Is(err, unix.ENOENT) {
						return fmt.Sprintf("went: %v", err)
					}
					return ""
				})
				if slices.Contains(names(t, opt.ClassDir), "late") {
					t.Error("went, but is listed")
				}
			}
			if err := o.close(); err != nil {
				t.Error(err)
			}
			if err := os.RemoveAll(filepath.Dir(opt.MountPoint)); err != nil {
				t.Error(err)
			}
			if l := leftOvers(t, opt); l != "" {
				t.Errorf("left over: %s", l)
			}
		})
	}
}

// TestBusy closes under clients that stand in the tree and have files open.
func TestBusy(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	opt, _ := newClassDir(t)
	reg := new(hca.Registry)
	if err := reg.Register(qibEntry()); err != nil {
		t.Fatal(err)
	}
	tr, err := Mount(reg, opt)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(opt.ClassDir, "infiniband/qib0/fw_ver"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d, err := os.Open(opt.ClassDir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	// Not by cmd.Dir: with that, Go waits for the new process's chdir, which waits
	// for us, in a way that keeps a processor.
	dir := filepath.Join(opt.ClassDir, "infiniband/qib0")
	cmd := exec.Command("sh", "-c", `cd "$0" && exec sleep 100`, dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	eventually(t, func() string {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", cmd.Process.Pid)); to != dir {
			return fmt.Sprintf("the client stands in %s, %v", to, err)
		}
		return ""
	})
	done := make(chan error, 1)
	go func() { done <- tr.Close() }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Close waits for a client")
	}
	if l := leftOvers(t, opt); l != "" {
		t.Errorf("left over: %s", l)
	}
	if _, err := f.Read(make([]byte, 8)); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("read after the end: %v", err)
	}
}

// TestDead: what is left of a daemon that was killed, and that Clean removes it.
func TestDead(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	opt, real := newClassDir(t)
	if err := os.Mkdir(filepath.Join(real, "cls"), 0o755); err != nil {
		t.Fatal(err)
	}
	sys := t.TempDir()
	if err := os.Symlink(opt.ClassDir, filepath.Join(sys, "class")); err != nil {
		t.Fatal(err)
	}
	notKernels := func() { // the guard must not take our tree for the kernel's
		t.Helper()
		if loaded, err := (modprobe.Guard{Sys: sys}).Loaded(); loaded || err != nil {
			t.Errorf("Loaded: %v %v", loaded, err)
		}
	}
	for range 2 {
		kill := startDaemon(t, opt)
		if b, err := os.ReadFile(filepath.Join(opt.ClassDir, "infiniband/qib0/fw_ver")); err != nil || string(b) != "1.22.333\n" {
			t.Errorf("%q %v", b, err)
		}
		if err := Clean(opt); err == nil || !strings.Contains(err.Error(), "running uverbsd") {
			t.Errorf("Clean of a live one: %v", err)
		}
		notKernels()
		kill()
		notKernels()
		// Only our two classes are dead; all else goes on.
		if got := names(t, opt.ClassDir); !slices.Equal(got, []string{"cls", "infiniband", "infiniband_verbs"}) {
			t.Errorf("classes: %v", got)
		}
		if _, err := os.ReadFile(filepath.Join(opt.ClassDir, "cls/cgroup.procs")); err != nil {
			t.Error(err)
		}
		for _, c := range classes {
			if _, err := os.ReadDir(filepath.Join(opt.ClassDir, c)); !errors.Is(err, unix.ENOTCONN) {
				t.Errorf("%s: %v", c, err)
			}
		}
		for range 2 {
			if err := Clean(opt); err != nil {
				t.Error(err)
			}
			if l := leftOvers(t, opt); l != "" {
				t.Errorf("left over: %s", l)
			}
		}
		if got := names(t, opt.ClassDir); !slices.Equal(got, []string{"cls"}) {
			t.Errorf("after Clean: %v", got)
		}
	}
}

// TestKeeper: a daemon with a keeper leaves nothing even when it is killed.
func TestKeeper(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	opt, _ := newClassDir(t)
	kill := startDaemon(t, opt, "SYSFS_TEST_KEEPER=1")
	if leftOvers(t, opt) == "" {
		t.Error("nothing mounted")
	}
	kill()
	eventually(t, func() string { return leftOvers(t, opt) })

	// A daemon that ends in order dismisses its keeper.
	t.Setenv(roleEnv, "keeper")
	t.Setenv(dirEnv, filepath.Dir(opt.ClassDir))
	k, err := StartKeeper()
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Stop(); err != nil {
		t.Error(err)
	}
}

// TestKeeperThatLags: what a keeper that stands still is not told of, it is told of
// later, or it would hold a context's memory for as long as the daemon runs.
func TestKeeperThatLags(t *testing.T) {
	t.Setenv(roleEnv, "keeper")
	t.Setenv(dirEnv, t.TempDir())
	k, err := StartKeeper()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := k.Stop(); err != nil {
			t.Error(err)
		}
	}()
	held := func() (n int) {
		t.Helper()
		dir := fmt.Sprintf("/proc/%d/fd", k.cmd.Process.Pid)
		fds, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if to, _ := os.Readlink(filepath.Join(dir, fd.Name())); to == "/dev/zero" {
				n++
			}
		}
		return n
	}
	zero, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer zero.Close()
	const few, many = 50, 5000 // many fill the socket
	for id := range uint64(few) {
		k.Hold(id, int(zero.Fd()))
	}
	eventually(t, func() string {
		if n := held(); n != few {
			return fmt.Sprintf("%d held", n)
		}
		return ""
	})
	if err := k.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for id := range uint64(many) {
		k.Hold(few+id, int(zero.Fd()))
		k.Drop(few + id)
	}
	for id := range uint64(few) {
		k.Drop(id)
	}
	if err := k.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		k.Drop(0) // whatever comes next brings what was left
		if n := held(); n != 0 {
			return fmt.Sprintf("%d held", n)
		}
		return ""
	})
}

// TestPropagation: with systemd's shared mounts, services that have a mount
// namespace of their own get the tree too, and lose it too.
func TestPropagation(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Error(err)
		}
	}()
	slave := exec.Command("unshare", "-m", "--propagation", "slave", "sleep", "100")
	if err := slave.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = slave.Process.Kill(); _ = slave.Wait() }()
	opt := testOptions(t.TempDir())
	opt.ClassDir = "/sys/class"
	// The mounts of ours that it sees, once it is in its namespace. Other tests' of
	// the moment are under other directories.
	eventually(t, func() string {
		a, _ := os.Readlink("/proc/self/ns/mnt")
		if b, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", slave.Process.Pid)); a == b {
			return "no namespace"
		}
		return ""
	})
	time.Sleep(100 * time.Millisecond) // and has made it a slave
	seen := func() int {
		t.Helper()
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", slave.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for line := range strings.Lines(string(b)) {
			if m, _ := parseMount(line); strings.HasPrefix(m.dir, opt.MountPoint) || strings.HasPrefix(m.dir, opt.ClassDir) {
				n++
			}
		}
		return n
	}
	for range 2 {
		tr, err := Mount(new(hca.Registry), opt)
		if err != nil {
			t.Fatal(err)
		}
		if n := seen(); n < 5 { // FUSE, overlay, two classes, net
			t.Errorf("%d mounts in the other namespace", n)
		}
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
		if n := seen(); n != 0 {
			t.Errorf("%d mounts left in the other namespace", n)
		}
	}
}

// TestCleanTogether: ExecStopPost and the keeper may come at once.
func TestCleanTogether(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	opt, _ := newClassDir(t)
	startDaemon(t, opt)()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := Clean(opt); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if l := leftOvers(t, opt); l != "" {
		t.Errorf("left over: %s", l)
	}
}

// TestCleanForeign: what is not ours stays, over ours, under it and alone.
func TestCleanForeign(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	opt, _ := newClassDir(t)
	opt = opt.withDefaults()
	layer := opt.layerDir()
	mount := func(source, dir, fsType, data string) {
		t.Helper()
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(source, dir, fsType, 0, data); err != nil {
			t.Fatal(err)
		}
	}
	ours := func() {
		t.Helper()
		if err := makeLayer(layer); err != nil {
			t.Fatal(err)
		}
		mount(fsName, opt.ClassDir, "overlay", "lowerdir="+layer+":"+opt.ClassDir)
	}
	count := func() (n int) {
		t.Helper()
		l, err := mountsAt(opt.ClassDir)
		if err != nil {
			t.Fatal(err)
		}
		return len(l)
	}
	base := count()

	other := t.TempDir()
	mount("overlay", opt.ClassDir, "overlay", "lowerdir="+other+":"+opt.ClassDir) // somebody's
	if err := Clean(opt); err != nil || count() != base+1 {
		t.Errorf("a foreign overlay: %v, %d mounts", err, count())
	}
	ours()
	if err := Clean(opt); err != nil || count() != base+1 {
		t.Errorf("ours over a foreign one: %v, %d mounts", err, count())
	}
	if err := unix.Unmount(opt.ClassDir, 0); err != nil {
		t.Fatal(err)
	}
	ours()
	ours() // the kernel allows no third: FILESYSTEM_MAX_STACK_DEPTH
	if err := Clean(opt); err != nil || count() != base {
		t.Errorf("two of ours: %v, %d mounts", err, count())
	}
	ours()
	mount("cover", opt.ClassDir, "tmpfs", "")
	if err := Clean(opt); err == nil || count() != base+2 {
		t.Errorf("a foreign one over ours: %v, %d mounts", err, count())
	}
	if err := unix.Unmount(opt.ClassDir, 0); err != nil {
		t.Fatal(err)
	}
	mount("tmp", opt.MountPoint, "tmpfs", "")
	if err := Clean(opt); !errors.Is(err, unix.EBUSY) || count() != base {
		t.Errorf("a foreign mount at the mount point: %v, %d mounts", err, count())
	}
	if err := unix.Unmount(opt.MountPoint, 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Clean(opt); err != nil || leftOvers(t, opt) != "" {
			t.Errorf("at last: %v, %s", err, leftOvers(t, opt))
		}
	}
}

// TestMountFails: nothing stays behind when the overlay cannot be had.
func TestMountFails(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	opt := testOptions(t.TempDir())
	opt.ClassDir += "/missing"
	tr, err := Mount(new(hca.Registry), opt)
	if err == nil {
		tr.Close()
		t.Fatal("mounted")
	}
	if l := leftOvers(t, opt); l != "" {
		t.Errorf("left over: %s", l)
	}
}
