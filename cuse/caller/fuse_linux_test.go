package caller

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fuseServer is the smallest FUSE file system that makes a thread wait for us inside write() as the product's clients
// do: one file, direct I/O. A thread that waits for a FUSE answer cannot stop, which no pipe can imitate.
type fuseServer struct {
	t      testing.TB
	fd     int
	dir    string
	file   string
	writes chan *fuseWrite
	opens  atomic.Int64
	// holdOpens keeps OPEN requests unanswered in held.
	holdOpens  atomic.Bool
	held       chan uint64
	interrupts atomic.Int64
	wg         sync.WaitGroup
}

// fuseWrite is a WRITE that awaits its answer.
type fuseWrite struct {
	srv      *fuseServer
	unique   uint64
	tid      int
	uid, gid uint32
	size     uint32
	answered atomic.Int32
}

const (
	fuseLookup, fuseForget, fuseGetattr, fuseOpen        = 1, 2, 3, 14
	fuseWriteOp, fuseRelease, fuseFlush, fuseInit        = 16, 18, 25, 26
	fuseInterrupt, fuseDestroy, fuseBatchForget          = 36, 38, 42
	fuseInHeader, fuseOutHeader, fuseWriteIn             = 40, 16, 40
	fopenDirectIO, fopenParallelDirectWrites      uint32 = 1, 1 << 6
)

var le = binary.LittleEndian

func newFuse(t testing.TB) *fuseServer {
	t.Helper()
	dir := t.TempDir()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("open /dev/fuse: %v", err)
	}
	opts := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)
	if err := unix.Mount("caller-test", dir, "fuse.caller-test", unix.MS_NOSUID|unix.MS_NODEV, opts); err != nil {
		unix.Close(fd)
		t.Fatalf("mount: %v", err)
	}
	s := &fuseServer{t: t, fd: fd, dir: dir, file: filepath.Join(dir, "f"), writes: make(chan *fuseWrite, 4096), held: make(chan uint64, 16)}
	s.wg.Go(s.serve)
	abort := func() { unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH) }
	mounts.Lock()
	mounts.abort[s] = abort
	mounts.Unlock()
	t.Cleanup(func() {
		abort()
		mounts.Lock()
		delete(mounts.abort, s)
		mounts.Unlock()
		s.wg.Wait()
		unix.Close(fd)
	})
	return s
}

// next returns the next write.
func (s *fuseServer) next() *fuseWrite {
	s.t.Helper()
	select {
	case w := <-s.writes:
		return w
	case <-time.After(testTimeout):
		s.t.Fatal("no write arrives")
		return nil
	}
}

func (w *fuseWrite) reply() {
	w.answered.Add(1)
	b := make([]byte, 8)
	le.PutUint32(b, w.size)
	w.srv.answer(w.unique, 0, b)
}

func (w *fuseWrite) fail(errno unix.Errno) {
	w.answered.Add(1)
	w.srv.answer(w.unique, errno, nil)
}

func (s *fuseServer) answer(unique uint64, errno unix.Errno, payload []byte) {
	b := make([]byte, fuseOutHeader, fuseOutHeader+len(payload))
	le.PutUint32(b[4:], uint32(-int32(errno)))
	le.PutUint64(b[8:], unique)
	b = append(b, payload...)
	le.PutUint32(b, uint32(len(b)))
	unix.Write(s.fd, b) // ENOENT when the request is gone
}

func (s *fuseServer) answerOpen(unique uint64) {
	b := make([]byte, 16)
	le.PutUint64(b, uint64(s.opens.Add(1)))
	le.PutUint32(b[8:], fopenDirectIO|fopenParallelDirectWrites)
	s.answer(unique, 0, b)
}

func (s *fuseServer) serve() {
	buf := make([]byte, 1<<17+4096)
	for {
		n, err := unix.Read(s.fd, buf)
		if err == unix.EINTR || err == unix.ENOENT || err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return // unmounted
		}
		op, unique, body := le.Uint32(buf[4:]), le.Uint64(buf[8:]), buf[fuseInHeader:n]
		switch op {
		case fuseInit:
			b := make([]byte, 64)
			le.PutUint32(b, 7)
			le.PutUint32(b[4:], 31)
			le.PutUint32(b[20:], 1<<16) // max_write
			s.answer(unique, 0, b)
		case fuseLookup:
			b := make([]byte, 40, 128)
			le.PutUint64(b, 2)
			le.PutUint64(b[16:], 3600)
			le.PutUint64(b[24:], 3600)
			s.answer(unique, 0, append(b, fuseAttr(2)...))
		case fuseGetattr:
			b := make([]byte, 16, 104)
			le.PutUint64(b, 3600)
			s.answer(unique, 0, append(b, fuseAttr(le.Uint64(buf[16:]))...))
		case fuseOpen:
			if s.holdOpens.Load() {
				s.held <- unique
			} else {
				s.answerOpen(unique)
			}
		case fuseWriteOp:
			s.writes <- &fuseWrite{srv: s, unique: unique, uid: le.Uint32(buf[24:]), gid: le.Uint32(buf[28:]),
				tid: int(le.Uint32(buf[32:])), size: le.Uint32(body[16:])}
		case fuseInterrupt:
			s.interrupts.Add(1)
		case fuseForget, fuseBatchForget:
		case fuseRelease, fuseFlush, fuseDestroy:
			s.answer(unique, 0, nil)
		default:
			s.answer(unique, unix.ENOSYS, nil)
		}
	}
}

func fuseAttr(ino uint64) []byte {
	b := make([]byte, 88)
	le.PutUint64(b, ino)
	mode := uint32(unix.S_IFREG | 0o666)
	if ino == 1 {
		mode = unix.S_IFDIR | 0o755
	}
	le.PutUint32(b[60:], mode)
	le.PutUint32(b[64:], 1)
	return b
}
