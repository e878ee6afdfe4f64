package sysfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// serveOnly mounts a tree without an overlay and returns where.
func serveOnly(t *testing.T, entries ...*hca.Entry) (*Tree, *hca.Registry, string) {
	t.Helper()
	reg := new(hca.Registry)
	for _, e := range entries {
		if err := reg.Register(e); err != nil {
			t.Fatal(err)
		}
	}
	opt := testOptions(t.TempDir())
	tr := newTree(reg, opt)
	if err := tr.serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		tr.leave()
		if err := tr.unserve(); err != nil {
			t.Error(err)
		}
		if l := leftOvers(t, opt); l != "" {
			t.Errorf("left over: %s", l)
		}
	})
	return tr, reg, opt.MountPoint
}

// dump is one line for each file under dir: mode, size, path, and content.
func dump(t *testing.T, dir string) string {
	t.Helper()
	cpus := strings.NewReplacer(must(cpuMask()), "<mask>\n", must(cpuList()), "<list>\n")
	var sb strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := os.Lstat(path)
		if err != nil {
			return err
		}
		sys := st.Sys().(*syscall.Stat_t)
		if sys.Uid != 0 || sys.Gid != 0 || sys.Nlink != 1 {
			t.Errorf("%s: uid %d gid %d nlink %d", path, sys.Uid, sys.Gid, sys.Nlink)
		}
		if d.Type() != st.Mode().Type() {
			t.Errorf("%s: readdir says %v, stat %v", path, d.Type(), st.Mode().Type())
		}
		rel, _ := filepath.Rel(dir, path)
		fmt.Fprintf(&sb, "%v %d %s", st.Mode(), st.Size(), rel)
		switch {
		case st.Mode()&os.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			sb.WriteString(" -> " + to)
		case st.Mode().IsRegular():
			b, err := os.ReadFile(path)
			s := string(b)
			if strings.Contains(path, "local_cpu") {
				s = cpus.Replace(s)
			}
			if err != nil {
				s = errors.Unwrap(err).Error()
			}
			fmt.Fprintf(&sb, " %q", s)
		}
		sb.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return sb.String()
}

func must(s string, err error) string {
	if err != nil {
		panic(err)
	}
	return s
}

func TestGolden(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	down := qibEntry()
	d := down.Device.(*fakeDevice)
	d.port = hca.PortAttr{State: 1, PhysState: 9, ActiveWidth: 3, GIDTableLen: 1} // a width that is none
	d.attr.PhysPortCnt = 2                                                        // and a port that fails
	for _, c := range []struct {
		name    string
		entries []*hca.Entry
	}{
		{"none", nil},
		{"qib", []*hca.Entry{qibEntry()}},
		{"rxe", []*hca.Entry{rxeEntry()}},
		{"ethernet", []*hca.Entry{ethernetEntry()}},
		{"two", []*hca.Entry{qibEntry(), rxeEntry()}},
		{"down", []*hca.Entry{down}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, _, dir := serveOnly(t, c.entries...)
			got := dump(t, dir)
			file := filepath.Join("testdata", c.name+".golden")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
		})
	}
}

// TestRead reads in all the ways that a client can.
func TestRead(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	e := qibEntry()
	_, _, dir := serveOnly(t, e)
	e.Device.(*fakeDevice).step.Store(1000)
	file := filepath.Join(dir, "infiniband/qib0/ports/1/counters/port_xmit_data")
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	read := func(off int64, size int) string {
		t.Helper()
		b := make([]byte, size)
		n, err := f.ReadAt(b, off)
		if err != nil && err != io.EOF {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	// The counter moves with each text that is made, so it shows how many were.
	first := read(0, 1)
	first += read(1, 1) + read(2, 1) + read(3, 100)
	if !strings.HasSuffix(first, "100\n") || len(first) != 5 {
		t.Errorf("in steps: %q", first)
	}
	for _, off := range []int64{5, 6, 4096, 1 << 40} {
		if got := read(off, 10); got != "" {
			t.Errorf("at %d: %q", off, got)
		}
	}
	if got := read(3, 4096); got != "0\n" {
		t.Errorf("from the middle: %q", got)
	}
	second := read(0, 4096)
	if n, _ := strconv.Atoi(first[:1]); second != fmt.Sprintf("%d100\n", n+1) {
		t.Errorf("from the start again: %q after %q", second, first)
	}
	// An open that starts in the middle has a text too.
	g, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	b := make([]byte, 8)
	if n, err := g.ReadAt(b, 1); string(b[:n]) != "100\n" || err != io.EOF {
		t.Errorf("middle first: %q %v", b[:n], err)
	}
	for _, flags := range []int{os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC} {
		if w, err := os.OpenFile(file, flags, 0); err == nil {
			w.Close()
			t.Errorf("opened for writing (%#x)", flags)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "infiniband/x"), 0o755); !errors.Is(err, unix.EROFS) {
		t.Errorf("mkdir: %v", err)
	}
	for _, name := range []string{"gids/3", "gids/-1", "gids/00", "gids/+1", "pkeys/2", "nosuch"} {
		if _, err := os.Stat(filepath.Join(dir, "infiniband/qib0/ports/1", name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got, err := filepath.EvalSymlinks(filepath.Join(dir, "infiniband/qib0/device/infiniband_verbs/uverbs0/dev")); err != nil || got != filepath.Join(dir, "infiniband_verbs/uverbs0/dev") {
		t.Errorf("device/infiniband_verbs leads to %s, %v", got, err)
	}
}

// identity is what libibverbs and others know a file by.
func identity(t *testing.T, path string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return err.Error()
	}
	return fmt.Sprint(st.Ino, " ", st.Mtim)
}

func TestIdentity(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	_, reg, dir := serveOnly(t, qibEntry())
	dev, deep := filepath.Join(dir, "infiniband/qib0"), filepath.Join(dir, "infiniband/qib0/ports/1/gids/0")
	id, deepID := identity(t, dev), identity(t, deep)
	time.Sleep(20 * time.Millisecond)
	for range 3 {
		dropCaches(t)
		if a, b := identity(t, dev), identity(t, deep); a != id || b != deepID {
			t.Errorf("identity changed: %s to %s, %s to %s", id, a, deepID, b)
		}
		if err := reg.Register(&hca.Entry{Name: "x", Index: 9, Device: qibDevice(), Provider: fakeProvider{}}); err != nil {
			t.Fatal(err)
		}
		if err := reg.Unregister("x"); err != nil {
			t.Fatal(err)
		}
	}
	if a := identity(t, filepath.Join(dir, "infiniband_verbs/uverbs0/device/vendor")); a == identity(t, dev+"/device/vendor") {
		t.Errorf("two files are one: %s", a)
	}

	// Another device of the same name is another device, to a reader that kept
	// its files open as well.
	f, err := os.Open(deep)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := reg.Unregister("qib0"); err != nil {
		t.Fatal(err)
	}
	if got := identity(t, dev); got != unix.ENOENT.Error() {
		t.Errorf("unregistered, but there: %s", got)
	}
	if err := reg.Register(qibEntry()); err != nil {
		t.Fatal(err)
	}
	if got := identity(t, dev); got == id || !strings.Contains(got, "{") {
		t.Errorf("the same identity for another device: %s", got)
	}
	if _, err := f.Read(make([]byte, 10)); !errors.Is(err, unix.ENODEV) {
		t.Errorf("read of a file of the device that went: %v", err)
	}
	if b, err := os.ReadFile(deep); err != nil || len(b) != 40 {
		t.Errorf("the new device's file: %q %v", b, err)
	}
}

// dropCaches makes the kernel forget the dentries and inodes that it can.
func dropCaches(t *testing.T) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0); err != nil {
		t.Fatal(err)
	}
}

// No method of a device runs once it is unregistered, which waits for those that
// run.
func TestUnregisterWaits(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	e := qibEntry()
	d := e.Device.(*fakeDevice)
	_, reg, dir := serveOnly(t, e)
	file := filepath.Join(dir, "infiniband/qib0/ports/1/state")
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d.slow.Store(true)
	res := make(chan error, 1)
	go func() {
		b := make([]byte, 20)
		n, err := f.Read(b)
		if err == nil && string(b[:n]) != "4: ACTIVE\n" {
			err = fmt.Errorf("%q", b[:n])
		}
		res <- err
	}()
	<-d.entered
	removed := make(chan error, 1)
	go func() { removed <- reg.Unregister("qib0") }()
	select {
	case <-removed:
		t.Fatal("Unregister did not wait")
	case <-time.After(50 * time.Millisecond):
	}
	close(d.leave)
	d.slow.Store(false)
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
	d.dead.Store(true)
	if err := <-res; err != nil {
		t.Errorf("the read that was running: %v", err)
	}
	if d.calls.Load() != 0 {
		t.Error("a method runs")
	}
	if _, err := f.ReadAt(make([]byte, 1), 0); !errors.Is(err, unix.ENODEV) {
		t.Errorf("afterwards: %v", err)
	}
	if d.late.Load() != 0 {
		t.Error("a method ran on a dead device")
	}
}

// TestParallel reads from many goroutines while devices come and go.
func TestParallel(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	_, reg, dir := serveOnly(t, qibEntry())
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				for _, name := range []string{"qib0", "rxe0"} {
					got := make([]string, 0, 4)
					for _, file := range []string{"node_guid", "ports/1/gids/0", "ports/1/rate", "device/numa_node"} {
						b, err := os.ReadFile(filepath.Join(dir, "infiniband", name, file))
						if err != nil {
							if name == "rxe0" && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV)) {
								continue
							}
							t.Error(err)
						}
						got = append(got, string(b))
					}
					if name == "qib0" && strings.Join(got, "") != "0011:7500:0000:0001\nfe80:0000:0000:0000:0011:7500:0000:0001\n100 Gb/sec (4X EDR)\n-1\n" {
						t.Errorf("got %q", got)
					}
				}
				ents, err := os.ReadDir(filepath.Join(dir, "infiniband_verbs"))
				if err != nil || len(ents) < 2 || len(ents) > 3 {
					t.Errorf("list: %v %v", ents, err)
				}
			}
		})
	}
	for range 50 {
		e := rxeEntry()
		if err := reg.Register(e); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
		if err := reg.Unregister("rxe0"); err != nil {
			t.Fatal(err)
		}
		e.Device.(*fakeDevice).dead.Store(true)
		defer func() {
			if n := e.Device.(*fakeDevice).late.Load(); n != 0 {
				t.Errorf("%d calls after the end", n)
			}
		}()
	}
	close(stop)
	wg.Wait()
}
