package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// rowMapFile: the file that is mapped is its opener's alone, and nothing but
// write() and mmap() works on it.
func rowMapFile(t *rowTest) {
	p, err := newMappedPort(t.node)
	if err != nil {
		t.check("setup", err)
		return
	}
	defer p.close()
	self, fd := os.Getpid(), p.c.FD
	way := fmt.Sprintf("/proc/%d/fd/%d", self, fd)
	t.check("opened again by its own thread", refusedOpen(way))
	t.check("opened again by another thread", func() error {
		done := make(chan error)
		go func() { done <- refusedOpen(way) }()
		return <-done
	}())
	for _, ways := range []struct{ what, glob string }{
		{"its name", "/run/uverbsd/ctx/*/*"}, {"map_files", fmt.Sprintf("/proc/%d/map_files/*", self)},
	} {
		t.check("opened through "+ways.what, refusedAll(ways.glob, fd))
	}
	name, err := os.Readlink(way)
	t.check("its name can be read", err)
	t.check("opened by the name that it had", want(openErr(filepath.Clean(trimDeleted(name))), unix.EACCES, unix.ENOENT))
	attrs := []struct {
		what string
		attr *syscall.SysProcAttr
	}{{"a child", nil}}
	if needRoot() == nil {
		attrs = append(attrs, struct {
			what string
			attr *syscall.SysProcAttr
		}{"another user", asUser(testerID)})
	}
	for _, a := range attrs {
		_, err := t.run(a.attr, nil, "reopen", strconv.Itoa(self), strconv.Itoa(fd))
		t.check("opened by "+a.what, err)
		f := file(p.c)
		_, err = t.run(a.attr, []*os.File{f}, "try")
		t.check("written by "+a.what+" that has inherited it", err)
		_ = f.Close()
	}
	t.mapForms(p)
	t.check("ftruncate", want(unix.Ftruncate(fd, 0), unix.EINVAL))
	t.check("fallocate", want(unix.Fallocate(fd, 0, 0, 1<<30), unix.ENODEV, unix.EOPNOTSUPP))
	t.check("a hole by fallocate", want(unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096), unix.ENODEV, unix.EOPNOTSUPP))
	t.check("fchmod", want(unix.Fchmod(fd, 0o666), unix.EPERM))
	_, err = unix.Read(fd, make([]byte, 8))
	t.check("read", want(err, unix.EINVAL))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	t.check("seals", want(err, unix.EINVAL))
	t.check("traffic after all that", p.write())
	t.check("a ring unmapped in traffic", func() error {
		for k := range uint32(8) {
			p.putWrite(&p.qps[0], p.qps[0].sq.producer()+k, 64)
		}
		q := &p.qps[0]
		q.sq.setProducer((q.sq.producer() + 8) & q.sq.mask)
		p.unmap()
		return p.doorbell(q)
	}())
	t.works("afterwards")
	rowMapRace(t)
	rowMapKept(t)
}

// mapForms maps in all ways that there are.
func (t *rowTest) mapForms(p *mappedPort) {
	fd, off := p.c.FD, int64(p.qps[0].sqInfo.Offset)
	try := func(what string, off int64, n, prot, flags int, wants ...unix.Errno) {
		m, err := unix.Mmap(fd, off, n, prot, flags)
		t.check("map "+what, want(err, wants...))
		if err == nil {
			_ = unix.Munmap(m)
		}
	}
	const rw = unix.PROT_READ | unix.PROT_WRITE
	// A mapping is no access: what lies behind the end of the memory is SIGBUS.
	try("beyond the queues", 1<<40, 4096, rw, unix.MAP_SHARED, 0, unix.EINVAL, unix.ENXIO)
	try("at a negative offset", -4096, 4096, rw, unix.MAP_SHARED, unix.EOVERFLOW, unix.EINVAL)
	try("privately", off, 4096, rw, unix.MAP_PRIVATE, 0, unix.EINVAL, unix.ENODEV)
	try("to execute", off, 4096, rw|unix.PROT_EXEC, unix.MAP_SHARED, 0, unix.EPERM, unix.EACCES)
	m, err := unix.Mmap(fd, off, 4096, rw, unix.MAP_SHARED)
	t.check("map again", err)
	if err == nil {
		m, err = unix.Mremap(m, 1<<20, unix.MREMAP_MAYMOVE)
		t.check("mremap beyond", want(err, 0, unix.EINVAL, unix.EFAULT))
		if err == nil {
			_ = unix.Munmap(m)
		}
	}
	t.check("traffic meanwhile", p.write())
}

// trimDeleted is a link of /proc without the mark of a file that has no name.
func trimDeleted(s string) string {
	const mark = " (deleted)"
	if len(s) > len(mark) && s[len(s)-len(mark):] == mark {
		return s[:len(s)-len(mark)]
	}
	return s
}

func openErr(path string) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err
}

// refusedOpen is an error unless path can be opened in no way.
func refusedOpen(path string) error {
	for _, flags := range []int{unix.O_RDWR, unix.O_RDONLY, unix.O_WRONLY, unix.O_RDWR | unix.O_TRUNC} {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(fd)
		}
		if err := want(err, unix.EACCES); err != nil {
			return fmt.Errorf("%s with flags %#x: %w", path, flags, err)
		}
	}
	return nil
}

// refusedAll: of all that glob finds nothing leads to the file of fd, nor to the
// memory behind it.
func refusedAll(glob string, fd int) error {
	var own unix.Stat_t
	if err := unix.Fstat(fd, &own); err != nil {
		return err
	}
	names, err := filepath.Glob(glob)
	if err != nil {
		return err
	}
	for _, n := range names {
		to, err := os.Readlink(n)
		if err != nil {
			to = n
		}
		f, err := unix.Open(n, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		var st unix.Stat_t
		err = unix.Fstat(f, &st)
		_ = unix.Close(f)
		if err == nil && (st.Dev == own.Dev && st.Ino == own.Ino || filepath.Base(trimDeleted(to)) == "memfd:uverbsd-queues") {
			return fmt.Errorf("%s -> %s is open", n, to)
		}
	}
	return nil
}

// roleReopen opens a descriptor of another process.
func roleReopen(args []string) error {
	way := fmt.Sprintf("/proc/%s/fd/%s", args[0], args[1])
	if err := refusedOpen(way); err != nil {
		return err
	}
	glob := fmt.Sprintf("/proc/%s/map_files/*", args[0])
	names, _ := filepath.Glob(glob)
	for _, n := range names {
		to, _ := os.Readlink(n)
		if dir, _ := filepath.Split(to); dir != "" && filepath.HasPrefix(dir, "/run/uverbsd/ctx/") {
			if err := want(openErr(n), unix.EACCES, unix.EPERM, unix.ENOENT); err != nil {
				return fmt.Errorf("%s: %w", n, err)
			}
		}
	}
	if _, err := os.ReadDir("/run/uverbsd/ctx/uverbs0"); err == nil {
		return errors.New("the directory of the files can be listed")
	}
	return nil
}

// rowMapRace: while contexts come and go, other threads of the process open every
// descriptor that it has; none gets the file.
func rowMapRace(t *rowTest) {
	var stop atomic.Bool
	var got atomic.Int64
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for !stop.Load() {
				for fd := 3; fd < 32; fd++ {
					name, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
					if err != nil {
						continue
					}
					if ok, _ := filepath.Match("/run/uverbsd/ctx/*/*", name); !ok {
						continue
					}
					for _, way := range []string{"/proc/self/fd/" + strconv.Itoa(fd), trimDeleted(name)} {
						if openErr(way) == nil {
							got.Add(1)
						}
					}
				}
			}
		})
	}
	err := func() error {
		for range 60 {
			c, err := rawverbs.OpenContext(t.node)
			if err != nil {
				return err
			}
			c.Close()
		}
		return nil
	}()
	stop.Store(true)
	wg.Wait()
	t.check("contexts while other threads open what they see", err)
	if n := got.Load(); n > 0 {
		err = fmt.Errorf("%d times", n)
	}
	t.check("other threads got none", err)
}

// rowMapKept: a context's memory goes with the context, also if the client keeps it
// mapped: else it could take as much as it likes, of which no bound knows.
func rowMapKept(t *rowTest) {
	var kept [][]byte
	defer func() {
		for _, m := range kept {
			_ = unix.Munmap(m)
		}
	}()
	before, err := shmem()
	if err != nil {
		t.check("shared memory", err)
		return
	}
	const cqe, times = 1<<15 - 1, 16 // 4 MiB each
	err = func() error {
		for range times {
			c, err := rawverbs.OpenContext(t.node)
			if err != nil {
				return err
			}
			p := &mappedPort{c: c}
			for range 4 {
				if _, _, err = p.createCQ(cqe, rawverbs.NoChannel); err != nil {
					break
				}
			}
			kept = append(kept, p.maps...)
			c.Close()
			if err != nil {
				return err
			}
		}
		return nil
	}()
	t.check("large queues that stay mapped", err)
	t.check("their memory is given back", eventually("shared memory as before", func() bool {
		now, err := shmem()
		return err == nil && now < before+16<<20
	}))
	// The client can still touch what it has; that is its own memory then.
	for _, m := range kept {
		m[0]++
	}
}

// shmem is the host's shared memory in bytes.
func shmem() (int, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	return statusField(string(b), "Shmem", 1<<10)
}

func init() { roles["reopen"] = roleReopen }
