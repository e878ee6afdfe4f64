package sysfs

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/fnv"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// pageSize is what stat says of every sysfs file, and the most that one holds.
const pageSize = 4096

// meta is what every node has: an identity that stays, and times.
type meta struct {
	mode uint32
	size uint64
	ino  uint64
	born time.Time
	gen  uint64 // of the device; 0 for what belongs to none
	path string // tells the nodes of one gen apart
}

// newMeta numbers the inode by device and path, so that the number is the same
// each time that the kernel asks.
func newMeta(mode uint32, gen uint64, path string, born time.Time) meta {
	h := fnv.New64a()
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], gen)
	h.Write(b[:])
	h.Write([]byte(path))
	ino := h.Sum64() &^ (1 << 63) // keeps clear of go-fuse's own
	if ino <= fuse.FUSE_ROOT_ID {
		ino += 2
	}
	m := meta{mode: mode, ino: ino, born: born, gen: gen, path: path}
	if mode&syscall.S_IFMT == syscall.S_IFREG {
		m.size = pageSize
	}
	return m
}

func (m *meta) stable() fs.StableAttr {
	return fs.StableAttr{Mode: m.mode & syscall.S_IFMT, Ino: m.ino}
}

func (m *meta) fill(a *fuse.Attr) {
	a.Mode, a.Size, a.Ino = m.mode, m.size, m.ino
	a.Nlink = 1 // for directories too: "not counted", as find(1) understands it
	a.Blksize = pageSize
	a.SetTimes(&m.born, &m.born, &m.born)
}

// Getattr is stat.
func (m *meta) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	m.fill(&out.Attr)
	return 0
}

// dirNode is a directory whose children are made when they are asked for.
type dirNode struct {
	fs.Inode
	meta
	children func() []child
	find     func(name string) (child, bool)
}

// child is a name with the identity that its node will have.
type child struct {
	item
	gen  uint64
	path string
	born time.Time
}

func (c *child) mode() uint32 {
	switch {
	case c.dir != nil:
		return syscall.S_IFDIR | 0o755
	case c.show != nil:
		return syscall.S_IFREG | 0o444
	}
	return syscall.S_IFLNK | 0o777
}

// make is the node of c, not yet in the tree.
func (c *child) make() (fs.InodeEmbedder, *meta) {
	n := newMeta(c.mode(), c.gen, c.path, c.born)
	switch {
	case c.dir != nil:
		d := newDir(n, c.dir)
		return d, &d.meta
	case c.show != nil:
		f := &fileNode{meta: n, show: c.show}
		return f, &f.meta
	}
	n.size = uint64(len(c.link))
	l := &linkNode{meta: n, target: c.link}
	return l, &l.meta
}

// newDir is a directory all of whose content belongs to one device, or to none.
func newDir(n meta, content dir) *dirNode {
	d := &dirNode{meta: n}
	own := func(it item) child { return child{it, n.gen, n.path + "/" + it.name, n.born} }
	d.children = func() []child {
		l := content.list()
		c := make([]child, len(l))
		for i := range l {
			c[i] = own(l[i])
		}
		return c
	}
	d.find = func(name string) (child, bool) {
		it, ok := content.find(name)
		return own(it), ok
	}
	return d
}

// Lookup finds a name in the directory as it is now.
func (d *dirNode) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	c, ok := d.find(name)
	if !ok {
		return nil, syscall.ENOENT
	}
	ops, n := c.make()
	n.fill(&out.Attr)
	return d.NewInode(ctx, ops, n.stable()), 0
}

// Readdir lists the directory as it is now.
func (d *dirNode) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	l := d.children()
	e := make([]fuse.DirEntry, len(l))
	for i := range l {
		n := newMeta(l[i].mode(), l[i].gen, l[i].path, l[i].born)
		e[i] = fuse.DirEntry{Name: l[i].name, Mode: n.mode, Ino: n.ino}
	}
	return fs.NewListDirStream(e), 0
}

// linkNode is a symbolic link.
type linkNode struct {
	fs.Inode
	meta
	target string
}

// Readlink is readlink.
func (l *linkNode) Readlink(context.Context) ([]byte, syscall.Errno) { return []byte(l.target), 0 }

// fileNode is an attribute.
type fileNode struct {
	fs.Inode
	meta
	show func() (string, error)
}

// Open needs no device: like sysfs, it is the read that can fail. Direct I/O,
// for the size in stat is not the content's.
func (f *fileNode) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY {
		return nil, 0, syscall.EACCES
	}
	return &openFile{show: f.show}, fuse.FOPEN_DIRECT_IO, 0
}

// openFile is one open of an attribute. Its text is made by a read at offset 0,
// as seq_file does, and stays for the reads that follow: reading in small steps
// gives one moment's text, and a program that keeps the file open and rereads
// it from the start (perftest with its counters) gets a new one.
type openFile struct {
	show func() (string, error)

	mu   sync.Mutex // guards the two below
	text string
	have bool
}

// Read is pread.
func (f *openFile) Read(_ context.Context, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if off == 0 || !f.have {
		s, err := f.show()
		if err != nil {
			return nil, errnoOf(err)
		}
		f.text, f.have = s[:min(len(s), pageSize)], true
	}
	if off < 0 || off >= int64(len(f.text)) {
		return fuse.ReadResultData(nil), 0
	}
	return fuse.ReadResultData(dest[:copy(dest, f.text[off:])]), 0
}

// errnoOf is the one place where an error becomes an errno.
func errnoOf(err error) syscall.Errno {
	var e syscall.Errno
	if errors.As(err, &e) && e != 0 {
		return e
	}
	return syscall.EIO
}

// rootNode is the root; its two classes stay for good, for they are what is
// bound into /sys/class.
type rootNode struct {
	fs.Inode
	meta
	classes map[string]*dirNode
}

// OnAdd puts the classes in.
func (r *rootNode) OnAdd(ctx context.Context) {
	for name, d := range r.classes {
		r.AddChild(name, r.NewPersistentInode(ctx, d, d.stable()), true)
	}
}

// root makes the root node.
func (t *Tree) root() *rootNode {
	return &rootNode{
		meta: meta{mode: syscall.S_IFDIR | 0o755, ino: fuse.FUSE_ROOT_ID, born: t.born},
		classes: map[string]*dirNode{
			ibClass: t.class(ibClass, nil, func(d *device) item {
				return item{name: d.entry.Name, dir: items(d.ibDir)}
			}),
			// 6 is IB_USER_VERBS_ABI_VERSION.
			verbsClass: t.class(verbsClass, []item{text("abi_version", "6\n")}, func(d *device) item {
				return item{name: d.entry.UverbsName(), dir: items(d.verbsDir)}
			}),
		},
	}
}

// class is a class directory: attrs, and one directory per device of the moment.
func (t *Tree) class(name string, attrs []item, of func(*device) item) *dirNode {
	d := &dirNode{meta: newMeta(syscall.S_IFDIR|0o755, 0, name, t.born)}
	d.children = func() []child {
		var l []child
		for _, it := range attrs {
			l = append(l, child{it, 0, name + "/" + it.name, t.born})
		}
		for _, dev := range t.devices() {
			l = append(l, child{of(dev), dev.gen, name, dev.born})
		}
		return l
	}
	d.find = func(want string) (child, bool) {
		for _, c := range d.children() {
			if c.name == want {
				return c, true
			}
		}
		return child{}, false
	}
	return d
}
