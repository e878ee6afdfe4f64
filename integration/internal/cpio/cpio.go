// Package cpio writes the "newc" archives that the Linux kernel unpacks as its initial root file system
// (Documentation/driver-api/early-userspace/buffer-format.rst). Archives may be concatenated.
package cpio

import (
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
)

// File type bits of a member's mode (stat(2)).
const (
	typeDir     = 0o040000
	typeChar    = 0o020000
	typeRegular = 0o100000
	typeLink    = 0o120000
)

// Writer appends members to an archive. Close writes the trailer. After an error every call fails with it.
type Writer struct {
	w    io.Writer
	ino  uint32
	dirs map[string]bool
	err  error
}

// NewWriter starts an archive on w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w, dirs: map[string]bool{}} }

// header writes one member's header and name. major and minor are for device nodes.
func (w *Writer) header(name string, mode uint32, size int64, major, minor uint32) {
	if w.err != nil {
		return
	}
	if size > math.MaxUint32 {
		w.err = fmt.Errorf("cpio: %s has %d bytes, the format holds less than 4 GiB", name, size)
		return
	}
	w.ino++
	head := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		w.ino, mode, 0, 0, 1, 0, uint32(size), 0, 0, major, minor, len(name)+1, 0, name)
	w.write([]byte(head))
	w.pad(int64(len(head)))
}

func (w *Writer) write(b []byte) {
	if w.err == nil {
		_, w.err = w.w.Write(b)
	}
}

func (w *Writer) pad(n int64) {
	if r := n % 4; r != 0 {
		w.write(make([]byte, 4-r))
	}
}

// clean makes name relative to the archive's root and adds the directories above it.
func (w *Writer) clean(name string) string {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	if dir := path.Dir(name); dir != "." {
		_ = w.Dir(dir)
	}
	return name
}

// Dir adds a directory, mode 0755, and those above it, unless already there.
func (w *Writer) Dir(name string) error {
	name = w.clean(name)
	if name != "" && !w.dirs[name] {
		w.dirs[name] = true
		w.header(name, typeDir|0o755, 0, 0, 0)
	}
	return w.err
}

// CharDevice adds a character device node, mode 0600.
func (w *Writer) CharDevice(name string, major, minor uint32) error {
	w.header(w.clean(name), typeChar|0o600, 0, major, minor)
	return w.err
}

// Bytes adds a regular file with the permission bits perm.
func (w *Writer) Bytes(name string, perm fs.FileMode, body []byte) error {
	w.header(w.clean(name), typeRegular|uint32(perm.Perm()), int64(len(body)), 0, 0)
	w.write(body)
	w.pad(int64(len(body)))
	return w.err
}

// Tree adds the host's file or directory tree at host under the given name, following host itself if it is a
// symbolic link and keeping the links below it. perm, if not zero, replaces the permission bits of a single file.
// Sockets, devices and pipes are refused.
func (w *Writer) Tree(name, host string, perm fs.FileMode) error {
	if w.err != nil {
		return w.err
	}
	info, err := os.Stat(host)
	if err != nil {
		return fmt.Errorf("cpio: add %s: %w", host, err)
	}
	return w.tree(name, host, info, perm)
}

func (w *Writer) tree(name, host string, info fs.FileInfo, perm fs.FileMode) error {
	switch {
	case info.IsDir():
		if err := w.Dir(name); err != nil {
			return err
		}
		entries, err := os.ReadDir(host)
		if err != nil {
			return fmt.Errorf("cpio: list %s: %w", host, err)
		}
		sort.Slice(entries, func(i, j int) bool { return entries[i].Name() < entries[j].Name() })
		for _, e := range entries {
			sub, err := e.Info()
			if err != nil {
				return fmt.Errorf("cpio: add %s: %w", filepath.Join(host, e.Name()), err)
			}
			if err := w.tree(path.Join(name, e.Name()), filepath.Join(host, e.Name()), sub, 0); err != nil {
				return err
			}
		}
		return w.err
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(host)
		if err != nil {
			return fmt.Errorf("cpio: add %s: %w", host, err)
		}
		w.header(w.clean(name), typeLink|0o777, int64(len(target)), 0, 0)
		w.write([]byte(target))
		w.pad(int64(len(target)))
		return w.err
	case info.Mode().IsRegular():
		return w.file(name, host, perm)
	}
	return fmt.Errorf("cpio: add %s: neither a file, a directory nor a symbolic link", host)
}

func (w *Writer) file(name, host string, perm fs.FileMode) error {
	f, err := os.Open(host)
	if err != nil {
		return fmt.Errorf("cpio: add %s: %w", host, err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("cpio: add %s: %w", host, err)
	}
	if perm == 0 {
		perm = info.Mode()
	}
	w.header(w.clean(name), typeRegular|uint32(perm.Perm()), info.Size(), 0, 0)
	if w.err != nil {
		return w.err
	}
	// The header has promised the size: a file that shrinks meanwhile would shift every later member.
	if _, err := io.CopyN(w.w, f, info.Size()); err != nil {
		w.err = fmt.Errorf("cpio: copy %s: %w", host, err)
		return w.err
	}
	w.pad(info.Size())
	return w.err
}

// Close ends the archive; it does not close the underlying writer.
func (w *Writer) Close() error {
	w.ino = 0
	w.header("TRAILER!!!", 0, 0, 0, 0)
	return w.err
}
