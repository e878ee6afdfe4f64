package dispatch

import (
	"fmt"
	"sync"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"golang.org/x/sys/unix"
)

// xrcdTable is a device's XRC domains by the file that names them
// (ib_uverbs_device.xrcd_tree).
type xrcdTable struct {
	// mu guards domains and their opens; the device is called under it, as under
	// xrcd_tree_mutex, so that an open never meets a domain that goes. Outermost.
	mu      sync.Mutex
	domains map[FileKey]*xrcDomain
}

// xrcDomain is an XRC domain; files that opened it through one inode share it.
type xrcDomain struct {
	hca   hca.XRCD
	file  ClientFile // keeps the inode; nil for a file's own domain
	opens int        // guarded by xrcdTable.mu

	// mu guards targets and what is in them. Events are pushed under it: inside
	// nothing, outside eventFile.mu.
	mu      sync.Mutex
	targets map[uint32]*targetQP // by QP number (ib_xrcd.tgt_qps)
}

// xrcdObject is one file's handle on a domain.
type xrcdObject struct {
	parents
	table  *xrcdTable
	domain *xrcDomain
}

func (o *xrcdObject) close() error { return o.table.leave(o.domain) }

// leave drops one open of d; the last one ends it.
func (t *xrcdTable) leave(d *xrcDomain) error {
	last, err := t.leaveLast(d)
	if last && d.file != nil {
		d.file.Close() // not under the lock: it may be the last of a large file
	}
	return err
}

func (t *xrcdTable) leaveLast(d *xrcDomain) (last bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if d.opens > 1 {
		d.opens--
		return false, nil
	}
	if err := d.hca.Close(); err != nil {
		return false, err
	}
	d.opens--
	if d.file != nil {
		delete(t.domains, d.file.Key())
	}
	return true, nil
}

// noFile is the descriptor number of a domain without a file.
const noFile = ^uint32(0)

// openXRCD follows ib_uverbs_open_xrcd.
func openXRCD(c *call, in *abi.OpenXRCD, out *abi.OpenXRCDResp) error {
	var file ClientFile
	if in.FD != noFile {
		var err error
		if file, err = c.f.dev.cfg.System.OpenFile(c.tid, int32(in.FD)); err != nil {
			return fmt.Errorf("descriptor %d of the client: %w", int32(in.FD), unix.EBADF)
		}
	}
	d, err := c.f.dev.openDomain(file, in.OFlags)
	if file != nil && (err != nil || d.file != file) {
		file.Close()
	}
	if err != nil {
		return err
	}
	o, err := c.begin(kindXRCD, 0)
	if err != nil {
		_ = c.f.dev.xrcds.leave(d)
		return err
	}
	o.Value = &xrcdObject{table: &c.f.dev.xrcds, domain: d}
	out.XRCDHandle = o.ID()
	return nil
}

// openDomain finds file's domain, or makes one and keeps file. EAGAIN: there is
// none and O_CREAT is not asked for. EINVAL: there is one and O_EXCL is.
func (d *Device) openDomain(file ClientFile, flags uint32) (*xrcDomain, error) {
	t := &d.xrcds
	t.mu.Lock()
	defer t.mu.Unlock()
	if file != nil {
		old := t.domains[file.Key()]
		switch {
		case old == nil && flags&unix.O_CREAT == 0:
			return nil, unix.EAGAIN
		case old != nil && flags&unix.O_EXCL != 0:
			return nil, unix.EINVAL
		case old != nil:
			old.opens++
			return old, nil
		}
	}
	made, err := d.cfg.HCA.AllocXRCD()
	if err != nil {
		return nil, err
	}
	dom := &xrcDomain{hca: made, file: file, opens: 1, targets: make(map[uint32]*targetQP)}
	if file != nil {
		if t.domains == nil {
			t.domains = make(map[FileKey]*xrcDomain)
		}
		t.domains[file.Key()] = dom
	}
	return dom, nil
}

// targetQP is an XRC target QP, which lives as long as a handle on it does
// (ib_qp.real_qp and open_list).
type targetQP struct {
	hca    hca.QP
	domain *xrcDomain
	opens  []*qpObject // guarded by domain.mu
}

// QPEvent goes to every handle (__ib_shared_qp_event_handler), under the lock, so
// that none is told after it has left.
func (t *targetQP) QPEvent(ev hca.EventType) {
	t.domain.mu.Lock()
	defer t.domain.mu.Unlock()
	for _, o := range t.opens {
		o.QPEvent(ev)
	}
}

func (t *targetQP) joinLocked(o *qpObject) {
	o.place = len(t.opens)
	t.opens = append(t.opens, o)
}

func (t *targetQP) partLocked(o *qpObject) {
	last := len(t.opens) - 1
	t.opens[o.place] = t.opens[last]
	t.opens[o.place].place = o.place
	t.opens[last] = nil
	t.opens = t.opens[:last]
}

// createQP makes a target QP with its first handle.
func (d *xrcDomain) createQP(first *qpObject) (*targetQP, error) {
	t := &targetQP{domain: d, opens: []*qpObject{first}}
	qp, err := d.hca.CreateQP(hca.QPInit{Type: hca.QPTypeXRCTgt, Handler: t})
	if err != nil {
		return nil, err
	}
	t.hca = qp
	d.mu.Lock()
	d.targets[qp.Num()] = t
	d.mu.Unlock()
	return t, nil
}

// openQP is OPEN_QP: one more handle on a target QP of the domain.
func openQP(c *call, in *abi.OpenQP, out *abi.CreateQPResp) error {
	u, err := c.context()
	if err != nil {
		return err
	}
	xo, err := c.useXRCD(in.PDHandle)
	if err != nil {
		return err
	}
	if hca.QPType(in.QPType) != hca.QPTypeXRCTgt {
		return unix.EINVAL // ib_open_qp
	}
	o, err := c.begin(kindQP, 0)
	if err != nil {
		return err
	}
	qp := &qpObject{typ: hca.QPTypeXRCTgt, user: in.UserHandle, async: u.async}
	d := xo.Value.(*xrcdObject).domain
	d.mu.Lock()
	t := d.targets[in.QPN]
	if t != nil {
		t.joinLocked(qp)
	}
	d.mu.Unlock()
	if t == nil {
		return unix.EINVAL
	}
	qp.hca, qp.target, qp.parents = t.hca, t, c.need()
	o.Value = qp
	*out = abi.CreateQPResp{QPHandle: o.ID(), QPN: in.QPN}
	return nil
}

// leave drops o's handle; the last one destroys the QP. Not under the lock, since
// that waits for an event that is being told, which takes it.
func (t *targetQP) leave(o *qpObject) error {
	d := t.domain
	d.mu.Lock()
	t.partLocked(o)
	last := len(t.opens) == 0
	if last {
		delete(d.targets, t.hca.Num()) // nobody opens it any more
	}
	d.mu.Unlock()
	if !last {
		return nil
	}
	err := t.hca.Close()
	if err != nil {
		d.mu.Lock()
		t.joinLocked(o)
		d.targets[t.hca.Num()] = t
		d.mu.Unlock()
	}
	return err
}
