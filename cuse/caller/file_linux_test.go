package caller

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// An inode that is held is nobody else's, even unlinked; two descriptors of one file are one.
func TestOpenFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "domain")
	f, err := os.Create(path)
	wantError(t, err, nil)
	defer f.Close()
	again, err := os.Open(path)
	wantError(t, err, nil)
	defer again.Close()
	before := len(openFDs())
	one, err := OpenFile(unix.Gettid(), int32(f.Fd()))
	wantError(t, err, nil)
	two, err := OpenFile(unix.Gettid(), int32(again.Fd()))
	wantError(t, err, nil)
	if one.Dev != two.Dev || one.Ino != two.Ino {
		t.Errorf("%+v, %+v", one, two)
	}
	if err := os.Remove(path); err != nil {
		t.Error(err)
	}
	path2, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.O_PATH|unix.O_CLOEXEC, 0)
	wantError(t, err, nil)
	defer unix.Close(path2)
	before++
	// A path is no file: who cannot open it must not share what it names.
	for _, n := range []int32{-1, 1 << 20, int32(path2)} {
		_, err := OpenFile(unix.Gettid(), n)
		wantError(t, err, unix.EBADF)
	}
	dup, err := unix.Dup(int(f.Fd()))
	wantError(t, err, nil)
	for fd, want := range map[int]bool{dup: true, int(f.Fd()): true, int(again.Fd()): false, 1 << 20: false} {
		if got := SameFile(unix.Gettid(), int32(f.Fd()), int32(fd)); got != want {
			t.Errorf("descriptors %d and %d are one file: %v", f.Fd(), fd, got)
		}
	}
	_ = unix.Close(dup)
	pipe := []int{0, 0}
	wantError(t, unix.Pipe(pipe), nil)
	p, err := OpenFile(unix.Gettid(), int32(pipe[0]))
	wantError(t, err, nil)
	if p.Ino == one.Ino && p.Dev == one.Dev {
		t.Error("a pipe is the file")
	}
	for _, x := range []*File{one, two, p} {
		x.Close()
	}
	_ = unix.Close(pipe[0])
	_ = unix.Close(pipe[1])
	if n := len(openFDs()); n != before {
		t.Errorf("%d descriptors, %d before", n, before)
	}
}

// What a program has behind the bytes that it says it writes.
func TestReadBehind(t *testing.T) {
	srv := newFuse(t)
	c := startClient(t, "regs", srv.file)
	w := srv.next()
	b := make([]byte, 4)
	wantError(t, Thread(w.tid).ReadBehind(64, b), nil)
	wantError(t, Thread(w.tid).ReadBehind(16, b), unix.EFAULT) // not what it says
	w.reply()
	c.expect("done")
	wantError(t, Thread(unix.Gettid()).ReadBehind(64, b), unix.EFAULT) // in no such call
}

// A request can be looked at before its thread has fallen asleep.
func TestReadBehindBeforeTheSleep(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	wantError(t, unix.Mkfifo(fifo, 0o600), nil)
	c := startClient(t, "behind", fifo)
	c.expect("running")
	b := make([]byte, 6)
	wantError(t, Thread(c.pid()).ReadBehind(8, b), nil)
	if string(b) != "behind" {
		t.Errorf("read %q", b)
	}
	c.stop()
}
