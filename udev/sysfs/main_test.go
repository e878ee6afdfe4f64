package sysfs

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/splice"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

var update = flag.Bool("update", false, "write testdata/*.golden anew")

// What a re-executed test binary is to be.
const (
	roleEnv = "SYSFS_TEST_ROLE" // "namespace", "daemon", "keeper"
	dirEnv  = "SYSFS_TEST_DIR"  // the directory that a daemon or keeper works in
)

func TestMain(m *testing.M) {
	switch os.Getenv(roleEnv) {
	case "daemon":
		daemon()
	case "keeper":
		if err := KeeperMain(func(int) {}, func() error { return Clean(testOptions(os.Getenv(dirEnv))) }); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// The runtime's own descriptors exist before the count.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	splice.Resizable() // go-fuse probes pipes once, and keeps them
	before := fds()
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if after := fds(); after != before && code == 0 {
		fmt.Fprintf(os.Stderr, "descriptors leaked:\nbefore %s\nafter  %s\n", before, after)
		code = 1
	}
	os.Exit(code)
}

func fds() string {
	ents, _ := os.ReadDir("/proc/self/fd")
	var l []string
	for _, e := range ents {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.HasPrefix(to, "/proc/") {
			l = append(l, e.Name()+"="+to)
		}
	}
	return strings.Join(l, " ")
}

// inNamespace runs the calling test again in a mount namespace of its own, where
// nothing that it mounts reaches the host. It is true in there: go on.
func inNamespace(t *testing.T) bool {
	t.Helper()
	if os.Getenv(roleEnv) == "namespace" {
		return true
	}
	if os.Geteuid() != 0 {
		t.Fatal("needs root: it mounts file systems")
	}
	name := t.Name()
	args := []string{"-test.run=^" + name + "$", "-test.v", "-test.timeout=2m"}
	if *update {
		args = append(args, "-update")
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleEnv+"=namespace")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS} // makes / private too
	out, err := cmd.CombinedOutput()
	t.Logf("in a mount namespace of its own:\n%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(out, []byte("--- PASS: "+name)) {
		t.Fatal("the test did not run")
	}
	return false
}

func testOptions(dir string) Options {
	return Options{MountPoint: filepath.Join(dir, "run", "class"), ClassDir: filepath.Join(dir, "sysclass")}
}

// newDir is a directory with a stand-in for /sys/class in it: a cgroup2 mount,
// whose directories are kernfs, as sysfs' are, and can be made and removed.
func newClassDir(t *testing.T) (Options, string) {
	t.Helper()
	dir := t.TempDir()
	opt := testOptions(dir)
	if err := os.MkdirAll(opt.ClassDir, 0o755); err != nil {
		t.Fatal(err)
	}
	cg := filepath.Join(dir, "cgroup")
	if err := os.Mkdir(cg, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", cg, "cgroup2", 0, ""); err != nil {
		t.Fatalf("mount cgroup2: %v", err)
	}
	sub := filepath.Join(cg, fmt.Sprintf("sysfs-test-%d", os.Getpid()))
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(sub, opt.ClassDir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(opt.ClassDir, 0); err != nil {
			t.Errorf("unmount the stand-in: %v", err)
		}
		ents, _ := os.ReadDir(sub)
		for _, e := range ents {
			if e.IsDir() {
				_ = os.Remove(filepath.Join(sub, e.Name()))
			}
		}
		if err := os.Remove(sub); err != nil {
			t.Error(err)
		}
		if err := unix.Unmount(cg, 0); err != nil {
			t.Errorf("unmount cgroup2: %v", err)
		}
	})
	return opt, sub
}

// leftOvers lists the mounts under dir, and what lies in run.
func leftOvers(t *testing.T, opt Options) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var l []string
	for line := range strings.Lines(string(b)) {
		m, _ := parseMount(line)
		if strings.HasPrefix(m.dir, opt.ClassDir+"/") || strings.HasPrefix(m.dir, filepath.Dir(opt.MountPoint)) {
			l = append(l, m.fsType+" "+m.dir)
		}
	}
	ents, _ := os.ReadDir(filepath.Dir(opt.MountPoint))
	for _, e := range ents {
		l = append(l, "file "+e.Name())
	}
	return strings.Join(l, "\n")
}

// daemon is the daemon that the tests kill: it serves one device until then.
func daemon() {
	opt := testOptions(os.Getenv(dirEnv))
	if os.Getenv("SYSFS_TEST_KEEPER") != "" {
		os.Setenv(roleEnv, "keeper")
		if _, err := StartKeeper(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	reg := new(hca.Registry)
	_ = reg.Register(qibEntry())
	if _, err := Mount(reg, opt); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	time.Sleep(time.Hour)
}

// startDaemon starts one and returns how to kill it.
func startDaemon(t *testing.T, opt Options, env ...string) (kill func()) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(slices.Concat(os.Environ(), env), roleEnv+"=daemon", dirEnv+"="+filepath.Dir(opt.ClassDir))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	b := make([]byte, 512)
	n, err := out.Read(b)
	if got := strings.TrimSpace(string(b[:n])); got != "ready" {
		kill()
		t.Fatalf("daemon: %s %v", got, err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	return kill
}

// eventually waits for f, which says what is not yet so.
func eventually(t *testing.T, f func() string) {
	t.Helper()
	var s string
	for range 200 {
		if s = f(); s == "" {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error(s)
}
