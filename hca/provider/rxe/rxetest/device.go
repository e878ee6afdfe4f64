package rxetest

import (
	"fmt"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
)

// Device is a device whose clients go through librxe's queues. What these have no
// room for goes to the device underneath: XRC.
type Device struct {
	hca.Device
	attr hca.DeviceAttr
}

var _ hca.Device = (*Device)(nil)

// New makes a device of one that has no less than the provider's limits.
func New(d hca.Device) *Device {
	w := &Device{Device: d, attr: *d.Attr()}
	w.attr.MaskedAtomCap = 0 // there is no opcode for them
	return w
}

// Attr is the device's underneath, without what librxe cannot ask for.
func (d *Device) Attr() *hca.DeviceAttr { return &d.attr }

// Context is one client. It tells where its queues are, for tests that write into
// them.
type Context struct {
	hca.UContext
	Arena  *Arena
	Queues hca.Queues
}

// AllocUContext begins a client.
func (d *Device) AllocUContext(n hca.Notifier) (hca.UContext, error) {
	u, err := d.Device.AllocUContext(n)
	if err != nil {
		return nil, err
	}
	a := &Arena{}
	return &Context{UContext: u, Arena: a, Queues: rxe.Provider{}.NewQueues(a)}, nil
}

// AllocXRCD gives a domain.
func (d *Device) AllocXRCD() (hca.XRCD, error) {
	x, err := d.Device.AllocXRCD()
	if err != nil {
		return nil, err
	}
	return xrcd{x}, nil
}

type xrcd struct{ hca.XRCD }

func (x xrcd) CreateQP(in hca.QPInit) (hca.QP, error) {
	q, err := x.XRCD.CreateQP(in)
	if err != nil {
		return nil, err
	}
	return &QP{QP: q, init: in}, nil
}

// AllocPD gives a PD.
func (c *Context) AllocPD() (hca.PD, error) {
	p, err := c.UContext.AllocPD()
	if err != nil {
		return nil, err
	}
	return &pd{PD: p, c: c}, nil
}

// Close ends the client; what it leaves mapped is a fault.
func (c *Context) Close() error {
	if n := c.Arena.Left(); n > 0 {
		return fmt.Errorf("%d queues are left", n)
	}
	return c.UContext.Close()
}

type pd struct {
	hca.PD
	c *Context
}

func (p *pd) RegMR(in hca.MRInit) (hca.MR, error) {
	m, err := p.PD.RegMR(in)
	if err != nil {
		return nil, err
	}
	return mr{m}, nil
}

type mr struct{ hca.MR }

func (m mr) Rereg(in hca.MRRereg) (hca.MR, error) {
	if p, ok := in.PD.(*pd); ok {
		in.PD = p.PD
	}
	n, err := m.MR.Rereg(in)
	if err != nil {
		return nil, err
	}
	return mr{n}, nil
}

func (p *pd) CreateAH(a hca.AHAttr) (hca.AH, error) {
	h, err := p.PD.CreateAH(a)
	if err != nil {
		return nil, err
	}
	num, err := p.c.Queues.AddAH(h)
	if err != nil {
		_ = h.Close()
		return nil, err
	}
	return &ah{AH: h, c: p.c, num: Answer[abi.RXECreateAHResp](p.c.Queues.AHAnswer(num)).AHNum}, nil
}

type ah struct {
	hca.AH
	c   *Context
	num uint32
}

func (h *ah) Close() error {
	h.c.Queues.RemoveAH(h.num)
	return h.AH.Close()
}

// RingOf is the client's view of what a driver's answer describes.
func (c *Context) ringOf(i abi.RXEMMInfo) Ring {
	return Ring{c.Arena.Client(hca.MapInfo{Offset: i.Offset, Size: i.Size})}
}
