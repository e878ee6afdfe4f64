package dispatch

import (
	"slices"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
	"github.com/uverbsd/uverbsd/pin"
)

// The kinds of object that a file may hold.
const (
	kindPD idr.Kind = iota + 1
	kindMR
	kindAH
	kindCQ
	kindQP
	kindSRQ
	kindMW
	kindXRCD
	kindChannel // known by its descriptor, not by a handle
	kindContext // an open file
	numKinds
)

// kindNames are the names that status and the configuration use.
var kindNames = [numKinds]string{
	kindPD: "pd", kindMR: "mr", kindAH: "ah", kindCQ: "cq", kindQP: "qp", kindSRQ: "srq", kindMW: "mw", kindXRCD: "xrcd",
	kindChannel: "comp_channel", kindContext: "context",
}

// object is what an idr.Object's Value is.
type object interface {
	// close destroys the driver's object. If it fails nothing has changed.
	close() error
	// release lets go of the objects that it kept from being destroyed.
	release()
}

// destroy closes o and lets go of what it needed, if that has not been done. It is
// the one way out of every object: destroy command, undo of a create, removal of
// the device, and close of the file.
func (f *File) destroy(o *idr.Object) error {
	if o.Dead {
		return nil
	}
	v := o.Value.(object)
	if err := v.close(); err != nil {
		return err
	}
	v.release()
	f.give(o.Kind(), o.Cost)
	o.Dead = true
	return nil
}

// parents is embedded by objects that need others.
type parents []*idr.Object

func (p parents) release() {
	for _, o := range p {
		o.Unref()
	}
}

// need takes a Ref on each object that the command uses, for the one that it
// makes, which holds the result: what a command looks up to make an object is
// what that needs.
func (c *call) need() parents {
	for _, o := range c.used {
		o.Ref()
	}
	return slices.Clone(c.used)
}

type pdObject struct {
	parents
	hca hca.PD
}

func (o *pdObject) close() error { return o.hca.Close() }

type mrObject struct {
	parents
	f      *File
	hca    hca.MR
	charge pin.Charge
	access hca.Access
	// The range in the client's memory, bytes.
	start, length uint64
}

func (o *mrObject) close() error {
	if err := o.hca.Close(); err != nil {
		return err
	}
	o.f.unpin(&o.charge)
	o.f.proc.Put()
	return nil
}

type mwObject struct {
	parents
	hca hca.MW
}

func (o *mwObject) close() error { return o.hca.Close() }

type ahObject struct {
	parents
	hca    hca.AH
	queues hca.Queues // nil: send requests name it by its handle
	num    uint32     // else by this
}

func (o *ahObject) close() error {
	if o.queues != nil {
		o.queues.RemoveAH(o.num)
	}
	return o.hca.Close()
}

// pd looks a PD handle up and keeps it from going while the command runs.
func (c *call) pd(handle uint32) (hca.PD, error) {
	o, err := c.use(kindPD, handle)
	if err != nil {
		return nil, err
	}
	return o.Value.(*pdObject).hca, nil
}

// destroyer is the handler of a command that only destroys.
func destroyer(kind idr.Kind) func(*call, *abi.Handle) error {
	return func(c *call, in *abi.Handle) error {
		return c.f.destroyHandle(kind, in.Handle, c.f.destroy)
	}
}
