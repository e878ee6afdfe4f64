package main

import (
	"context"
	"fmt"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
)

// sleeping is a file of which no byte ever comes.
type sleeping struct {
	fs.Inode
	name  string
	asked sync.Once
}

var (
	_ fs.NodeOpener    = (*sleeping)(nil)
	_ fs.NodeReader    = (*sleeping)(nil)
	_ fs.NodeGetattrer = (*sleeping)(nil)
)

// Open lets the page cache have the file, so that it can be mapped.
func (*sleeping) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_KEEP_CACHE, 0
}

// Getattr gives it a size.
func (*sleeping) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size = 0o666, blockedPages*rawverbs.Page
	return 0
}

// Read says once that it was called, and sleeps for ever, not even woken by an
// interrupt: what waits for it sleeps until this process ends.
func (f *sleeping) Read(context.Context, fs.FileHandle, []byte, int64) (fuse.ReadResult, syscall.Errno) {
	f.asked.Do(func() { say("%s", f.name) })
	select {}
}

// sleeper is a directory in which a sleeping file of any name is found: one for
// each that wants to know when it is read, because who comes second to a page
// waits in the page cache and asks nobody.
type sleeper struct{ fs.Inode }

var _ fs.NodeLookuper = (*sleeper)(nil)

// Lookup finds it.
func (s *sleeper) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	out.Mode, out.Size = 0o666, blockedPages*rawverbs.Page
	return s.NewPersistentInode(ctx, &sleeping{name: name}, fs.StableAttr{Mode: syscall.S_IFREG}), 0
}

// roleSleeper serves the directory until it is killed.
func roleSleeper(args []string) error {
	s, err := fs.Mount(args[0], &sleeper{}, &fs.Options{
		MountOptions: fuse.MountOptions{AllowOther: true, DirectMountStrict: true, FsName: "sleeper", Name: "sleeper"},
	})
	if err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	say("serving")
	s.Wait()
	return nil
}
