package dispatch

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// MaxUserBytes bounds the daemon's own memory behind one user's objects:
	// hundreds of large queues, and far from what would bring a host down.
	MaxUserBytes = 256 << 20
	// objectBytes is what any object costs beside its queues: handle, locks,
	// driver object, generously.
	objectBytes = 512
	// Bytes per element of hca/soft's queues, rounded up.
	cqeBytes  = 64
	sqeBytes  = 128
	rqeBytes  = 32
	sgeBytes  = 16
	userFiles = 2 // one user may have this share of MaxFiles
)

// budget keeps what each user's objects cost. The zero value is ready.
type budget struct {
	// mu guards the members below. Leaf.
	mu    sync.Mutex
	bytes map[uint32]uint64
	files map[uint32]int
}

// take charges n bytes to uid; ENOMEM over MaxUserBytes.
func (b *budget) take(uid uint32, n uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.bytes[uid]
	if n > MaxUserBytes || now+n > MaxUserBytes {
		return fmt.Errorf("uid %d: %d bytes of queues in use, %d more asked for, limit %d: %w", uid, now, n, MaxUserBytes, unix.ENOMEM)
	}
	if b.bytes == nil {
		b.bytes = make(map[uint32]uint64)
	}
	b.bytes[uid] = now + n
	return nil
}

func (b *budget) give(uid uint32, n uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bytes[uid] -= n; b.bytes[uid] == 0 {
		delete(b.bytes, uid)
	}
}

// open counts a file of uid; ENFILE when the device has max, or uid its share.
func (b *budget) open(uid uint32, open, most int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if open >= most || b.files[uid] >= most/userFiles {
		return fmt.Errorf("open: %d files are open, %d of them uid %d's, limit %d: %w", open, b.files[uid], uid, most, unix.ENFILE)
	}
	if b.files == nil {
		b.files = make(map[uint32]int)
	}
	b.files[uid]++
	return nil
}

func (b *budget) closed(uid uint32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.files[uid]--; b.files[uid] == 0 {
		delete(b.files, uid)
	}
}

// queueBytes is what n elements of size bytes cost. Both come from 32-bit
// numbers of the client's: it cannot wrap.
func queueBytes(n uint32, size uint64) uint64 { return uint64(n) * size }
