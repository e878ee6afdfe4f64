package main

import (
	"os"
	"path/filepath"
	"testing"
)

func write(t *testing.T, perm os.FileMode, body string, elem ...string) {
	t.Helper()
	path := filepath.Join(elem...)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(body), perm); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, target string, elem ...string) {
	t.Helper()
	if err := os.Symlink(target, filepath.Join(elem...)); err != nil {
		t.Fatal(err)
	}
}

func TestMoveTree(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	write(t, 0o755, "tool", from, "lib/new/tool")
	write(t, 0o640, "replaced", from, "etc/conf")
	link(t, "tool", from, "lib/new/link")
	write(t, 0o644, "old and longer", to, "etc/conf")
	if err := os.MkdirAll(filepath.Join(to, "usr/lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	link(t, "usr/lib", to, "lib") // as Debian has it
	if err := moveTree(from, to); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"usr/lib/new/tool": "tool", "usr/lib/new/link": "tool", "etc/conf": "replaced"} {
		if got, err := os.ReadFile(filepath.Join(to, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, want)
		}
	}
	for name, want := range map[string]os.FileMode{"usr/lib/new/tool": 0o755, "etc/conf": 0o640} {
		if info, err := os.Stat(filepath.Join(to, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v, want %v", name, info.Mode(), err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(from, "lib/new/tool")); !os.IsNotExist(err) {
		t.Errorf("the original still takes memory: %v", err)
	}
}

// An absolute link on the root disk means another place while the initramfs is still the root.
func TestMoveTreeRefusesToLeaveTheRoot(t *testing.T) {
	from, to, outside := t.TempDir(), t.TempDir(), t.TempDir()
	write(t, 0o644, "x", from, "var/run/file")
	if err := os.Mkdir(filepath.Join(to, "var"), 0o755); err != nil {
		t.Fatal(err)
	}
	link(t, outside, to, "var/run")
	if err := moveTree(from, to); err == nil {
		t.Error("no error")
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) != 0 {
		t.Errorf("written outside the root: %v, %v", left, err)
	}
}

func TestAwaitFile(t *testing.T) {
	if err := awaitFile("/dev/null", 0); err != nil {
		t.Error(err)
	}
	if err := awaitFile(filepath.Join(t.TempDir(), "absent"), diskTick); err == nil {
		t.Error("an absent file was found")
	}
}
