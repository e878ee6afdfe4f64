package main

import (
	"context"
	"fmt"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
)

// sleepingFile is the file of which no byte ever comes.
const sleepingFile = "file"

// sleeping is that file.
type sleeping struct{ fs.Inode }

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

// Read sleeps for ever, not even woken by an interrupt: what waits for it sleeps
// until this process ends.
func (*sleeping) Read(context.Context, fs.FileHandle, []byte, int64) (fuse.ReadResult, syscall.Errno) {
	select {}
}

// roleSleeper serves the file in a directory until it is killed.
func roleSleeper(args []string) error {
	root := &fs.Inode{}
	s, err := fs.Mount(args[0], root, &fs.Options{
		MountOptions: fuse.MountOptions{AllowOther: true, DirectMountStrict: true, FsName: "sleeper", Name: "sleeper"},
		OnAdd: func(ctx context.Context) {
			root.AddChild(sleepingFile, root.NewPersistentInode(ctx, &sleeping{}, fs.StableAttr{Mode: syscall.S_IFREG}), false)
		},
	})
	if err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	say("serving")
	s.Wait()
	return nil
}
