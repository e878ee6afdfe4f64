package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func recipe(t *testing.T, suite string, extra ...string) *Recipe {
	t.Helper()
	r, err := NewRecipe(suite, extra)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestCacheKey(t *testing.T) {
	base := recipe(t, "trixie")
	if other := recipe(t, "trixie", "kmod"); other.Name() != base.Name() {
		t.Error("a package that is there anyway makes another image")
	}
	if a, b := recipe(t, "trixie", "gdb", "ucx-utils"), recipe(t, "trixie", "ucx-utils", "gdb", "gdb"); a.Name() != b.Name() {
		t.Error("the order of packages makes another image")
	}
	for what, change := range map[string]func(*Recipe){
		"version": func(r *Recipe) { r.Version++ },
		"exclude": func(r *Recipe) { r.Excludes = r.Excludes[1:] },
		"include": func(r *Recipe) { r.Includes = nil },
		"hook":    func(r *Recipe) { r.Hooks = append(slices.Clone(r.Hooks), "true") },
		"module":  func(r *Recipe) { r.Modules = r.Modules[1:] },
		"size":    func(r *Recipe) { r.SpareMiB++ },
	} {
		r := recipe(t, "trixie")
		change(r)
		if r.Name() == base.Name() {
			t.Errorf("%s does not change the image's name", what)
		}
		if r.Key() != base.Key() {
			t.Errorf("%s changes the key, so the old image would stay for ever", what)
		}
	}
	for _, r := range []*Recipe{recipe(t, "bookworm"), recipe(t, "trixie", "gdb")} {
		if r.Key() == base.Key() || !strings.HasPrefix(r.Name(), r.Key()+"-") {
			t.Errorf("key %s, name %s", r.Key(), r.Name())
		}
	}
}

func TestNewRecipeRefuses(t *testing.T) {
	for _, tc := range [][2]string{{"sid", "gdb"}, {"trixie", "--setup-hook=x"}, {"trixie", "a,b"}, {"trixie", "Gdb"}, {"trixie", ""}} {
		if _, err := NewRecipe(tc[0], []string{tc[1]}); err == nil {
			t.Errorf("%q was accepted", tc)
		}
	}
}

func TestMmdebstrapArgs(t *testing.T) {
	args := recipe(t, "bookworm", "gdb").mmdebstrapArgs("/r")
	if !slices.Equal(args[len(args)-2:], []string{"bookworm", "/r"}) {
		t.Errorf("ends in %q: a mirror must not be named", args[len(args)-2:])
	}
	if i := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "--include=") }); i < 0 ||
		!strings.Contains(args[i], "gdb,") || !strings.Contains(args[i], "linux-image-amd64") {
		t.Errorf("packages missing: %q", args)
	}
	exclude := slices.Index(args, "--dpkgopt=path-exclude=/usr/share/doc/*")
	include := slices.Index(args, "--dpkgopt=path-include=/usr/share/doc/rdma-core/tests/*")
	if exclude < 0 || include < exclude {
		t.Errorf("of dpkg's patterns the last counts: test suite at %d, documentation at %d", include, exclude)
	}
	for _, keep := range []string{"drivers/infiniband", "drivers/vfio", "drivers/iommu", "drivers/net/*", "drivers/net/ethernet"} {
		for _, a := range args {
			if strings.Contains(a, "kernel/"+keep) {
				t.Errorf("%s leaves out modules that tests need", a)
			}
		}
	}
}

func TestResolveModules(t *testing.T) {
	dir := t.TempDir()
	for name, body := range map[string]string{
		"modules.dep": "kernel/fs/ext4/ext4.ko.xz: kernel/lib/crc16.ko.xz kernel/fs/jbd2.ko.xz\n" +
			"kernel/lib/crc16.ko.xz:\nkernel/fs/jbd2.ko.xz:\n" +
			"kernel/drivers/virtio-blk.ko: kernel/virtio.ko kernel/virtio_ring.ko\nkernel/virtio.ko: kernel/virtio_ring.ko\nkernel/virtio_ring.ko:\n",
		"modules.builtin": "kernel/drivers/char/virtio_console.ko\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := resolve(dir, []bootModule{{Name: "virtio_blk"}, {Name: "virtio_console"}, {Name: "gone", Optional: true}, {Name: "ext4"}})
	want := []string{
		"kernel/virtio_ring.ko", "kernel/virtio.ko", "kernel/drivers/virtio-blk.ko",
		"kernel/fs/jbd2.ko.xz", "kernel/lib/crc16.ko.xz", "kernel/fs/ext4/ext4.ko.xz",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	if _, err := resolve(dir, []bootModule{{Name: "gone"}}); err == nil {
		t.Error("a missing module was accepted")
	}
	if _, err := resolve(t.TempDir(), nil); err == nil {
		t.Error("a kernel without module lists was accepted")
	}
}

func TestPruneKeepsOthersAndImagesInUse(t *testing.T) {
	dir := t.TempDir()
	r, other := recipe(t, "trixie"), recipe(t, "trixie", "gdb")
	stay := []string{r.Name(), other.Name(), r.Key() + "-inuse", ".tmp-" + other.Key() + "-1"}
	leave := []string{r.Key() + "-older", ".tmp-" + r.Key() + "-1"}
	for _, name := range append(slices.Clone(stay), leave...) {
		if err := os.MkdirAll(filepath.Join(dir, name, "sub"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	held, err := tryLock(filepath.Join(dir, r.Key()+"-inuse"), unix.LOCK_SH)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Close() }()
	prune(dir, r, func(s string) { t.Errorf("said: %s", s) })
	for _, name := range stay {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range leave {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := lock(t.Context(), path, func() { t.Error("waited for a free lock") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	if _, err := lock(ctx, path, func() { cancel(why) }); !errors.Is(err, why) {
		t.Errorf("wait ended with %v, want the context's cause", err)
	}
	waiting := make(chan struct{})
	got := make(chan error)
	go func() {
		f, err := lock(context.WithoutCancel(t.Context()), path, func() { close(waiting) })
		if err == nil {
			_ = f.Close()
		}
		got <- err
	}()
	<-waiting
	_ = first.Close()
	if err := <-got; err != nil {
		t.Errorf("after the holder left: %v", err)
	}
}

// An image that is there is used as it is, and held.
func TestOpenCached(t *testing.T) {
	dir := t.TempDir()
	r := recipe(t, "bookworm")
	if err := os.Mkdir(filepath.Join(dir, r.Name()), 0o755); err != nil {
		t.Fatal(err)
	}
	img, err := Open(t.Context(), dir, r, func(s string) { t.Errorf("said: %s", s) })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tryLock(img.Dir, unix.LOCK_EX); !errors.Is(err, errLocked) {
		t.Errorf("an open image can be deleted: %v", err)
	}
	if err := img.Close(); err != nil {
		t.Fatal(err)
	}
	held, err := tryLock(img.Dir, unix.LOCK_EX)
	if err != nil {
		t.Fatalf("after Close: %v", err)
	}
	_ = held.Close()
}

func TestRun(t *testing.T) {
	if err := run(t.Context(), "sh", "-c", "echo why; exit 4"); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("a failing tool: %v, want its words", err)
	}
	if err := run(t.Context(), "no-such-tool"); err == nil || !strings.Contains(err.Error(), "apt-packages") {
		t.Errorf("a missing tool: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("interrupted")
	// The tool's child holds its output open: run returns only if the whole group is ended.
	cancelled := make(chan error)
	ready := filepath.Join(t.TempDir(), "ready")
	if err := unix.Mkfifo(ready, 0o600); err != nil {
		t.Fatal(err)
	}
	go func() { cancelled <- run(ctx, "sh", "-c", "sleep 1000 & echo > "+ready+"; wait") }()
	if _, err := os.ReadFile(ready); err != nil {
		t.Fatal(err)
	}
	cancel(why)
	if err := <-cancelled; !errors.Is(err, why) {
		t.Errorf("an interrupted tool: %v", err)
	}
}
