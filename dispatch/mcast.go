package dispatch

import (
	"slices"
	"sync"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"golang.org/x/sys/unix"
)

// mcastGroup is one multicast address.
type mcastGroup struct {
	gid hca.GID
	lid uint16
}

// mcastList is a QP's groups (ib_uqp_object.mcast_list): a QP that is attached
// cannot be destroyed by command.
type mcastList struct {
	// mu also makes attach and detach of one QP take turns, as
	// ib_uqp_object.mcast_lock's write side does; the device is called under it.
	mu     sync.Mutex
	groups []mcastGroup
}

func (l *mcastList) attached() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.groups) > 0
}

func (l *mcastList) detachAll(qp hca.QP) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range l.groups {
		_ = qp.DetachMcast(g.gid, g.lid)
	}
	l.groups = nil
}

// attachMcast: a duplicate succeeds and changes nothing (ib_uverbs_attach_mcast).
func attachMcast(c *call, in *abi.Mcast) error {
	return c.withMcasts(in, func(qp hca.QP, l *mcastList, g mcastGroup) error {
		if slices.Contains(l.groups, g) {
			return nil
		}
		if err := qp.AttachMcast(g.gid, g.lid); err != nil {
			return err
		}
		l.groups = append(l.groups, g)
		return nil
	})
}

// detachMcast: EINVAL for a group that is not in the list, by GID and LID.
func detachMcast(c *call, in *abi.Mcast) error {
	return c.withMcasts(in, func(qp hca.QP, l *mcastList, g mcastGroup) error {
		i := slices.Index(l.groups, g)
		if i < 0 {
			return unix.EINVAL
		}
		if err := qp.DetachMcast(g.gid, g.lid); err != nil {
			return err
		}
		l.groups = slices.Delete(l.groups, i, i+1)
		return nil
	})
}

// withMcasts runs fn on the QP and group that in names, with the list locked.
func (c *call) withMcasts(in *abi.Mcast, fn func(hca.QP, *mcastList, mcastGroup) error) error {
	o, err := c.use(kindQP, in.QPHandle)
	if err != nil {
		return err
	}
	qp := o.Value.(*qpObject)
	qp.mcasts.mu.Lock()
	defer qp.mcasts.mu.Unlock()
	return fn(qp.hca, &qp.mcasts, mcastGroup{in.GID, in.MLID})
}
