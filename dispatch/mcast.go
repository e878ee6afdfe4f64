package dispatch

import (
	"sync"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
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
	o, err := c.use(kindQP, in.QPHandle)
	if err != nil {
		return err
	}
	qp := o.Value.(*qpObject)
	g := mcastGroup{in.GID, in.MLID}
	l := &qp.mcasts
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, have := range l.groups {
		if have == g {
			return nil
		}
	}
	if err := qp.hca.AttachMcast(g.gid, g.lid); err != nil {
		return err
	}
	l.groups = append(l.groups, g)
	return nil
}

func detachMcast(c *call, in *abi.Mcast) error {
	o, err := c.use(kindQP, in.QPHandle)
	if err != nil {
		return err
	}
	qp := o.Value.(*qpObject)
	g := mcastGroup{in.GID, in.MLID}
	l := &qp.mcasts
	l.mu.Lock()
	defer l.mu.Unlock()
	err = qp.hca.DetachMcast(g.gid, g.lid)
	if err != nil {
		return err
	}
	for i, have := range l.groups {
		if have == g {
			l.groups = append(l.groups[:i], l.groups[i+1:]...)
			break
		}
	}
	return nil
}
