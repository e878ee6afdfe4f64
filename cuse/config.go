package cuse

import (
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/uverbsd/uverbsd/abi"
)

const (
	// minMinor is the oldest protocol spoken: 7.31, Linux 5.4, the oldest the
	// wire structs and the rules relied on here were checked against.
	minMinor = 31

	// defaultMaxWrite is FUSE_DEFAULT_MAX_PAGES_PER_REQ (32) pages of 4 KiB. CUSE
	// never negotiates max_pages, so asking for more only makes the buffers larger.
	defaultMaxWrite = 32 * 4096
	minMaxWrite     = 4096    // the kernel's own floor (cuse_process_init_reply)
	maxMaxWrite     = 1 << 20 // FUSE_MAX_MAX_PAGES of 4 KiB pages

	// defaultReaders bounds the threads of a session, stuck ones included: far
	// from the Go runtime's abort at 10,000, enough for several stuck users.
	defaultReaders = 256
	minReaders     = 4 // below it no user could be kept apart from the next

	// fileRunningMax is how many handlers one file can have running. A client
	// that blocks more than this holds up its own file.
	fileRunningMax = 8

	// userRunningShare: one user's handlers may take this share of Readers, so
	// that as many users have to block theirs on purpose to hold up others.
	userRunningShare = 8

	// newcomerShare: this share of Readers is kept for users of whom no handler
	// runs, so that those who have many cannot keep them out together.
	newcomerShare = 4

	// openShare: this share of Readers is kept for OPENs. Handlers of WRITE wait
	// for those, to make a descriptor, and they wait for nothing.
	openShare = 16

	// parkedBytesMax bounds the copies kept for one user: parked requests and
	// pieces of long commands. 2,000 threads with a 4 KiB command each are 8 MiB.
	parkedBytesMax = 32 << 20

	// maxWhole is the longest command there is: an extended one, whose header
	// counts 8-byte words in two 16-bit fields (uverbs_main.c verify_hdr:
	// (in_words + provider_in_words) * 8 + sizeof(hdr) + sizeof(ex_hdr)). A legacy
	// one ends at 65535 * 4 = 262,140 bytes.
	maxWhole = (65535+65535)*8 + 8 + 16

	// piecePages go into one request (fs/fuse/fuse_i.h,
	// FUSE_DEFAULT_MAX_PAGES_PER_REQ; CUSE cannot ask for more).
	piecePages = 32

	// splitMax is how many threads of one file may be inside a long command.
	splitMax = 8
	// splitStale is when a half-received command may be thrown out for another:
	// the next piece follows the reply at once, unless the thread died.
	splitStale = time.Second

	// idleMax workers wait for work; more exit. One takes over, one is spare.
	idleMax = 2

	// backlogReads in a row that found a request at once make another worker read.
	backlogReads = 32

	// closeGrace is how long Close waits for running handlers before it answers
	// for them.
	closeGrace = 250 * time.Millisecond

	// handshakeTimeout: the kernel queues CUSE_INIT in open(2).
	handshakeTimeout = 5 * time.Second
)

// Config says how a Session is run.
type Config struct {
	Name     string // the node below /dev, as "infiniband/uverbs0"
	MaxWrite int    // longest WRITE; 0 means 128 KiB
	Readers  int    // bound on worker threads; 0 means 256

	// Killed reports that a thread has a SIGKILL pending, so that it is about to
	// die and only waits for its reply. The session then answers for a handler
	// that does not: a dying client's memory may only be let go after the reply.
	// nil reads /proc.
	Killed func(tid uint32) bool

	Log *zap.Logger // nil: none
}

// normal fills in defaults and refuses what the kernel would.
func (c *Config) normal() error {
	if c.Name == "" || len(c.Name)+len("DEVNAME=")+1 > abi.CuseInitInfoMax || strings.ContainsAny(c.Name, "\x00\n") {
		return fmt.Errorf("cuse: bad device name %q", c.Name)
	}
	if c.MaxWrite == 0 {
		c.MaxWrite = defaultMaxWrite
	}
	if c.MaxWrite < minMaxWrite || c.MaxWrite > maxMaxWrite {
		return fmt.Errorf("cuse: MaxWrite %d is not within %d and %d", c.MaxWrite, minMaxWrite, maxMaxWrite)
	}
	if c.Readers == 0 {
		c.Readers = defaultReaders
	}
	if c.Readers < minReaders {
		return fmt.Errorf("cuse: Readers %d is less than %d", c.Readers, minReaders)
	}
	if c.Killed == nil {
		c.Killed = procKilled
	}
	if c.Log == nil {
		c.Log = zap.NewNop()
	}
	return nil
}

func (c *Config) userRunningMax() int { return max(1, c.Readers/userRunningShare) }
