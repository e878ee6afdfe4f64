package ctxfs_test

import (
	"errors"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/ctxfs"
)

// A daemon mounts one file system for a device, and makes one file for a context.
func Example() {
	if err := ctxfs.Supported(); err != nil {
		return // offer providers that map nothing
	}
	fs, err := ctxfs.New("/run/uverbsd/ctx-0", cuse.Config{Log: zap.NewNop()})
	if err != nil {
		return
	}
	go fs.Serve()
	defer fs.Close()

	// GET_CONTEXT by a thread with this fsuid and fsgid.
	var (
		tid, uid, gid uint32
		commands      cuse.File                                // the dispatch file behind the CUSE node's
		steered       atomic.Bool                              // the thread is at its openat now
		steer         = func(path string) error { return nil } // openat and dup3 on the stopped thread
	)
	arena, err := ctxfs.NewArena(nil)
	if err != nil {
		return
	}
	e, err := fs.Add(arena.FD(), uid, gid, func(r cuse.Request, flags uint32) (cuse.File, error) {
		if !steered.Load() || r.TID() != tid {
			return nil, unix.EACCES
		}
		return commands, nil // its Release closes the arena, when the queues are gone
	})
	if err != nil {
		arena.Close()
		return
	}
	steered.Store(true)
	err = steer(e.Path())
	steered.Store(false)
	e.Remove() // no more than the name, if it was opened
	if err != nil {
		arena.Close()
	}
	if errors.Is(err, unix.ENOENT) {
		return // the client is in another mount namespace
	}
}
