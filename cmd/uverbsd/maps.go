package main

import (
	"path/filepath"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/ctxfs"
	"github.com/uverbsd/uverbsd/dispatch"
)

// ctxDir has a mount for each device whose clients map their queues.
const ctxDir = "/run/uverbsd/ctx"

// maps is a ctxfs.FS as dispatch.Maps.
type maps struct {
	fs *ctxfs.FS
	n  *node // its files count for the node's life
}

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
	return &mapFile{arena, e}, nil
}

type mapFile struct {
	*ctxfs.Arena
	e *ctxfs.Entry
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
