package cuse

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

// Tree is the Handler of a mounted file system. Its open files are Files like
// those of a device: the same bounds, the same one reply, the same joining of long
// writes.
type Tree interface {
	// OpenNode is Handler.Open for one inode, and says how the kernel is to treat
	// the file.
	OpenNode(r Request, node uint64, flags uint32) (File, OpenReply, error)
	// Answer answers at once what is not about an open file, on the goroutine that
	// read it: it takes no lock that another holds while it sleeps, and reaches
	// for no memory of the caller's. h is the request's header, body what follows.
	// The answer is appended to out. ENOSYS switches most calls off for good.
	Answer(h *abi.FuseInHeader, body, out []byte) ([]byte, unix.Errno)
}

// OpenReply is what an answer to OPEN says beside the file handle.
type OpenReply struct {
	Flags   uint32 // abi.Fopen*
	Backing int32  // with abi.FopenPassthrough: what OpenBacking returned
}

const (
	// mountPages hold the longest legacy command, 65535 * 4 bytes, wherever in its
	// first page it starts: only extended ones are ever split. An administrator's
	// limit may be lower.
	mountPages    = 65
	mountMaxWrite = mountPages * 4096

	// mountBackground is how many requests that no thread waits for may be with us
	// at a time, of which RELEASE is the only one. The kernel's own 12
	// (FUSE_DEFAULT_MAX_BACKGROUND) would let a few that take long hold up all.
	mountBackground = 1 << 12

	maxPagesLimit = "/proc/sys/fs/fuse/max_pages_limit" // since Linux 6.13; 256 before
)

// NewMounted makes a session of the /dev/fuse channel of a file system that is
// mounted, or about to be. The session closes the channel at the end. Config.Name
// is for messages.
func NewMounted(ch *Channel, t Tree, cfg Config) *Session {
	if cfg.MaxWrite == 0 {
		cfg.MaxWrite = mountMaxWrite
	}
	s := newSession(ch, cfg)
	s.tree = t
	s.what = cfg.Name
	s.pages = min(max(s.cfg.MaxWrite/os.Getpagesize(), 1), pagesLimit())
	return s
}

// pagesLimit is what the kernel allows in one request (fs/fuse/inode.c,
// process_init_reply). It does not say so, and without it what is whole and what
// is a piece could not be told apart.
func pagesLimit() int {
	const usual = 256 // FUSE_MAX_MAX_PAGES
	b, err := os.ReadFile(maxPagesLimit)
	if err != nil {
		return usual
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n < 1 {
		return usual
	}
	return n
}

// initMount answers FUSE_INIT. Without passthrough the session is of no use.
func (s *Session) initMount() error {
	var in abi.FuseInitIn
	h, err := s.first(abi.FuseInit, "FUSE_INIT", bytesOf(&in))
	if err != nil {
		return err
	}
	if in.Major != abi.FuseKernelVersion || in.Minor < abi.FusePassthroughMinor ||
		in.Flags&abi.FuseInitExt == 0 || in.Flags2&abi.FuseInit2Passthrough == 0 {
		s.sendError(h.Unique, unix.EPROTO)
		return fmt.Errorf("cuse: this kernel (FUSE %d.%d) has no FUSE passthrough: Linux 6.9 or newer with CONFIG_FUSE_PASSTHROUGH is needed: %w",
			in.Major, in.Minor, unix.EOPNOTSUPP)
	}
	var m struct {
		_ abi.FuseOutHeader
		b abi.FuseInitOut
	}
	m.b.Major = abi.FuseKernelVersion
	m.b.Minor = abi.FusePassthroughMinor
	m.b.Flags = in.Flags & (abi.FuseInitExt | abi.FuseMaxPages | abi.FuseBigWrites | abi.FuseParallelDirops)
	m.b.Flags2 = abi.FuseInit2Passthrough
	m.b.MaxWrite = uint32(s.cfg.MaxWrite)
	m.b.TimeGran = 1
	if in.Flags&abi.FuseMaxPages == 0 {
		s.pages = min(s.pages, piecePages)
	}
	m.b.MaxPages = uint16(s.pages)
	m.b.MaxBackground = mountBackground
	m.b.CongestionThreshold = mountBackground
	m.b.MaxStackDepth = 1 // the files behind lie on no other stacked file system
	msg := bytesOf(&m)
	putHeader(msg, h.Unique, 0)
	if errno := s.ch.write(msg); errno != 0 {
		return fmt.Errorf("cuse: FUSE_INIT reply: %w", errno)
	}
	return nil
}

// answer answers a request that is not about an open file.
func (s *Session) answer(h abi.FuseInHeader, msg []byte) {
	if int(h.Len) != len(msg) {
		s.misuse("malformed request", zap.Uint32("opcode", h.Opcode), zap.Int("bytes", len(msg)))
		s.sendError(h.Unique, unix.EIO)
		return
	}
	if h.Opcode == abi.FuseDestroy {
		s.sendError(h.Unique, 0)
		return
	}
	var room [outLen + 128]byte // fuse_entry_out is the longest answer
	out, errno := s.ask(&h, msg[headerLen:], room[:outLen])
	if errno != 0 {
		if errno > errnoMax {
			errno = unix.EIO
		}
		s.sendError(h.Unique, errno)
		return
	}
	s.send(h.Unique, out)
}

const outLen = 16 // sizeof(struct fuse_out_header)

// ask calls Tree.Answer.
func (s *Session) ask(h *abi.FuseInHeader, body, out []byte) (got []byte, errno unix.Errno) {
	defer func() {
		if p := recover(); p != nil {
			s.panicked("an answer", p)
			errno = unix.EIO
		}
	}()
	return s.tree.Answer(h, body, out)
}

// ForgetName has the kernel drop what it remembers of a name in the root
// directory. It waits for lookups in that directory, which the session answers:
// not to be called from a Tree or File method. ENOENT, the usual answer, is no
// error.
func (s *Session) ForgetName(name string) error {
	var m struct {
		h abi.FuseOutHeader
		b abi.FuseNotifyInvalEntryOut
	}
	m.b.Parent = abi.FuseRootID
	m.b.Namelen = uint32(len(name))
	m.h.Error = abi.FuseNotifyInvalEntry
	msg := append(append(bytesOf(&m), name...), 0)
	putHeader(msg, 0, abi.FuseNotifyInvalEntry)
	if err := s.ch.writeSleeping(msg); err != nil && err != unix.ENOENT {
		return fmt.Errorf("cuse: %s: forget a name: %w", s.what, err)
	}
	return nil
}

// OpenBacking makes fd's file one that the kernel can pass mmap() on to, and
// returns its id for OpenReply (fs/fuse/backing.c, fuse_backing_open). fd may be
// closed afterwards. CAP_SYS_ADMIN is needed.
func (s *Session) OpenBacking(fd int) (int32, error) {
	id, errno := s.ch.backingOpen(fd)
	if errno != 0 {
		return 0, fmt.Errorf("cuse: %s: FUSE_DEV_IOC_BACKING_OPEN: %w", s.what, errno)
	}
	return id, nil
}

// CloseBacking gives an id back. Files that are open keep what is behind them.
func (s *Session) CloseBacking(id int32) error {
	if errno := s.ch.backingClose(id); errno != 0 {
		return fmt.Errorf("cuse: %s: FUSE_DEV_IOC_BACKING_CLOSE: %w", s.what, errno)
	}
	return nil
}
