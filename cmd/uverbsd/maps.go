package main

import (
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/ctxfs"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
)

// ctxDir has a mount for each device whose clients map their queues.
const ctxDir = "/run/uverbsd/ctx"

// maps is a ctxfs.FS as dispatch.Maps.
type maps struct {
	fs     *ctxfs.FS
	n      *node // its files count for the node's life
	keeper keeper
}

// keeper holds descriptors for the case that the daemon is killed (sysfs.Keeper).
type keeper interface {
	Hold(id uint64, fd int)
	Drop(id uint64)
}

var lastHeld atomic.Uint64

func (m *maps) New(uid, gid uint32, charge func(bytes int) error, open func(dispatch.Request) (dispatch.Handle, error)) (dispatch.MapFile, error) {
	arena, err := ctxfs.NewArena(charge)
	if err != nil {
		return nil, err
	}
	e, err := m.fs.Add(arena.FD(), uid, gid, func(r cuse.Request, _ uint32) (cuse.File, error) {
		m.n.count(1)
		q := take(r)
		defer q.drop(2) // an open is answered by the session
		h, err := open(q)
		if err != nil {
			m.n.count(-1)
			return nil, err
		}
		return &file{h, m.n}, nil
	})
	if err != nil {
		arena.Close()
		return nil, err
	}
	f := &mapFile{Arena: arena, e: e, keeper: m.keeper, id: lastHeld.Add(1)}
	if f.keeper != nil {
		f.keeper.Hold(f.id, arena.FD())
	}
	return f, nil
}

type mapFile struct {
	*ctxfs.Arena
	e      *ctxfs.Entry
	keeper keeper
	id     uint64
}

// Close is Arena's, and Empty's unless keep.
func (f *mapFile) Close(keep bool) {
	if f.keeper != nil {
		f.keeper.Drop(f.id)
	}
	if !keep {
		f.Arena.Empty()
	}
	f.Arena.Close()
}

// endMapped is what the keeper does with a context's memory after the daemon was
// killed: its client may poll there, and would for ever.
func endMapped(fd int) {
	size, err := unix.Seek(fd, 0, unix.SEEK_END)
	if err != nil || size == 0 {
		return
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return
	}
	rxe.EndAll(mem)
	_ = unix.Munmap(mem)
}

func (f *mapFile) Path() string { return f.e.Path() }
func (f *mapFile) Unlink()      { f.e.Remove() }

// cleanMaps takes away what a dead daemon has left.
func cleanMaps() error {
	dirs, err := filepath.Glob(filepath.Join(ctxDir, "*"))
	for _, d := range dirs {
		if e := ctxfs.Clean(d); err == nil {
			err = e
		}
	}
	return err
}
