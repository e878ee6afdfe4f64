package dispatch

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
)

// removeWait bounds how long Remove waits for the commands that are under way on
// all files together: longer than any takes (GET_CONTEXT moves a descriptor into
// the client, 5 ms in an emulated guest, 100 under load), and no longer than an
// operator waits. The kernel waits without a bound (disassociate_srcu), since
// memory that blocks does not hold up what only runs in the kernel.
const removeWait = time.Second

// removeWorkers end that many files at once: each object with a copy that is stuck
// in a client's memory costs some time, and the next client shall not pay for it.
const removeWorkers = 32

// errRemoved is what a command but a destroying one answers once its device has
// gone (rdma_lookup_get_uobject, ib_uverbs_get_ucontext_file).
var errRemoved = fmt.Errorf("device was removed: %w", unix.EIO)

// Remove ends the device while clients have it open (ib_uverbs_remove_one,
// ib_uverbs_free_hw_resources): opens are refused, ENXIO; commands that are under
// way end first; then each file's objects are destroyed, newest first, its
// completion channels are closed, EIO and POLLERR, and IB_EVENT_DEVICE_FATAL is
// the last event of its asynchronous ones. From then on a command answers EIO,
// but for those that destroy: the handles are there until they are destroyed, and
// still say how many events were read. Everything that the objects cost is given
// back; the open file itself is charged until its Release.
//
// When Remove returns nothing of a client's is left on Config.HCA, unless a
// command did not end within removeWait, since it is stuck in its client's
// memory. Then what it uses goes when it ends, or with its process at the latest;
// the log says so. It may be called again.
func (d *Device) Remove() {
	d.mu.Lock()
	d.removed.Store(true) // in the lock: a new file sees it or is in the list
	files := make([]*File, 0, len(d.files))
	for f := range d.files {
		files = append(files, f)
	}
	d.mu.Unlock()
	d.awaitCommands(files)
	d.awaited.Store(true)
	next := make(chan *File)
	var wg sync.WaitGroup
	for range min(len(files), removeWorkers) {
		wg.Go(func() {
			for f := range next {
				if !f.retire() {
					d.cfg.Log.Warn("device removed under a command that does not end: what it uses goes with it",
						zap.Int("pid", f.proc.PID()), zap.String("program", f.proc.Name()))
				}
			}
		})
	}
	for _, f := range files {
		next <- f
	}
	close(next)
	wg.Wait()
}

// awaitCommands waits, within removeWait, until no command runs.
func (d *Device) awaitCommands(files []*File) {
	bound := time.NewTimer(removeWait)
	defer bound.Stop()
	for _, f := range files {
		for f.active.Load() > 1 {
			select {
			case <-d.ended:
			case <-bound.C:
				return
			}
		}
	}
}

// commandEnded is told of the end of each command on a device that is removed or
// being removed.
func (f *File) commandEnded() {
	select {
	case f.dev.ended <- struct{}{}:
	default: // Remove will look anyway, or nobody waits
	}
	if f.dev.awaited.Load() && !f.done.Load() {
		f.retire()
	}
}

// retire does what uverbs_destroy_ufile_hw does when the device goes, as far as
// commands under way let it; true when nothing is left to do.
func (f *File) retire() bool {
	f.hw.Lock()
	defer f.hw.Unlock()
	if f.done.Load() {
		return true
	}
	quiet := f.active.Load() <= 1 // looked at first: no command is making a context then
	if u := f.ctx.Load(); u != nil {
		u.maps.end()
	}
	left := f.objects.Retire(f.destroy)
	u := f.ctx.Load()
	if u != nil {
		f.tell(u)
	}
	// A command that has not begun its object will not, one that has is counted.
	if left > 0 || u == nil && !quiet {
		return false
	}
	f.closeContext(u, true)
	return true
}

// tell closes the channels and queues the last event, once. f.hw is held.
func (f *File) tell(u *ucontext) {
	f.mu.Lock()
	told := f.told
	f.told = true
	channels := make([]*eventFile, 0, len(f.channels))
	for _, ev := range f.channels {
		channels = append(channels, ev)
	}
	f.mu.Unlock()
	if told {
		return
	}
	for _, ev := range channels {
		ev.detach(false)
	}
	u.async.pushLast(0, uint32(hca.EventDeviceFatal))
}

// closeContext ends the driver's part of a file, once; keep is mapping.close's.
// f.hw is held.
func (f *File) closeContext(u *ucontext, keep bool) {
	if !f.done.Swap(true) && u != nil {
		_ = u.hca.Close()
		u.maps.close(keep)
	}
}

// destroyHandle is what the destroying commands run: it waits for a retire that
// runs, so that it finds objects there or gone (uobj_destroy under
// hw_destroy_rwsem).
func (f *File) destroyHandle(kind idr.Kind, id uint32, fn func(*idr.Object) error) error {
	f.hw.RLock()
	defer f.hw.RUnlock()
	return f.objects.Destroy(kind, id, fn)
}
