package cpio

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// write makes an archive with every kind of member that needs no privilege to unpack.
func write(t *testing.T) []byte {
	t.Helper()
	src := t.TempDir()
	if err := os.MkdirAll(filepath.Join(src, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(src, "sub", "x.sh"), []byte("#!/bin/sh\n"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("sub/x.sh", filepath.Join(src, "link")); err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	w := NewWriter(&buf)
	for _, err := range []error{
		w.Bytes("/a/b/c", 0o640, []byte("12345")),
		w.Bytes("a/b/empty", 0o644, nil),
		w.Tree("tree", src, 0),
		w.Tree("one", filepath.Join(src, "link"), 0o755),
		w.Close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return buf.Bytes()
}

// The archive is read back with the ordinary cpio program, which apt-packages names.
func TestReadBack(t *testing.T) {
	dst := t.TempDir()
	cmd := exec.Command("cpio", "--extract", "--make-directories", "--quiet", "--no-absolute-filenames")
	cmd.Dir = dst
	cmd.Stdin = bytes.NewReader(write(t))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio (see integration/apt-packages): %v\n%s", err, out)
	}
	for name, want := range map[string]string{
		"a/b/c": "12345", "a/b/empty": "", "tree/sub/x.sh": "#!/bin/sh\n", "tree/link": "#!/bin/sh\n", "one": "#!/bin/sh\n",
	} {
		got, err := os.ReadFile(filepath.Join(dst, name))
		if err != nil || string(got) != want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, want)
		}
	}
	for name, want := range map[string]os.FileMode{"a/b/c": 0o640, "tree/sub/x.sh": 0o750, "one": 0o755} {
		info, err := os.Lstat(filepath.Join(dst, name))
		if err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v, want %v", name, info.Mode(), err, want)
		}
	}
	if target, err := os.Readlink(filepath.Join(dst, "tree/link")); target != "sub/x.sh" {
		t.Errorf("tree/link points to %q, %v", target, err)
	}
}

func TestAlignedAndDirectoriesOnce(t *testing.T) {
	b := write(t)
	if len(b)%4 != 0 {
		t.Errorf("%d bytes: an archive must stay aligned, or the next one is not found", len(b))
	}
	if n := strings.Count(string(b), "a/b\x00"); n != 1 {
		t.Errorf("directory a/b appears %d times", n)
	}
}

func TestErrors(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	if err := w.Tree("x", filepath.Join(t.TempDir(), "absent"), 0); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
	if err := w.Tree("x", "/dev/null", 0); err == nil {
		t.Error("a device was accepted")
	}
	w.header("big", typeRegular, 1<<32, 0, 0)
	if err := w.Close(); err == nil {
		t.Error("4 GiB were accepted")
	}
}
