package dispatch

import (
	"sync"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
	"golang.org/x/sys/unix"
)

// Scratch sizes in 8-byte units: the largest request and response that a typed
// row has (extended modify_qp's request is 120 bytes, extended query_device's
// response 304).
const (
	inScratch  = 16
	outScratch = 38
)

// keptScratch is how many elements of each post scratch slice a pooled call
// keeps; a larger one came from a long list and is given to the collector.
const keptScratch = 512

// runner is work left for after the answer (hca.QP, hca.SRQ).
type runner interface{ Run() }

// call is one command under way. Pooled: nothing here outlives Write, except
// through a request that was deferred.
type call struct {
	f    *File
	r    Request
	tid  int
	size int // bytes the client wrote

	hdr  abi.CmdHdr
	ex   abi.ExCmdHdr
	row  *row
	core []byte // request without headers and udata
	udin []byte // the provider's part

	respAddr uint64 // client address of the response
	respLen  int    // bytes of it that are the core's
	udoutLen int    // bytes of it that are the provider's
	udout    []byte // and they, at most as many

	made     *idr.Object // begun, not committed
	used     []*idr.Object
	after    runner
	deferred bool // the reply is or will be given elsewhere

	old abi.DestroyCQ // see split
	in  [inScratch]uint64
	out [outScratch]uint64

	sends  []hca.SendWR
	recvs  []hca.RecvWR
	sges   []hca.SGE
	inline []byte
}

var calls = sync.Pool{New: func() any { return new(call) }}

func (c *call) reset() {
	c.f, c.r, c.row, c.core, c.udin, c.udout, c.made, c.after, c.deferred = nil, nil, nil, nil, nil, nil, nil, nil, false
	clear(c.sends)
	c.sends, c.recvs, c.sges, c.inline = c.sends[:0], c.recvs[:0], c.sges[:0], c.inline[:0]
	if cap(c.sends) > keptScratch {
		c.sends = nil
	}
	if cap(c.recvs) > keptScratch {
		c.recvs = nil
	}
	if cap(c.sges) > keptScratch {
		c.sges = nil
	}
	if cap(c.inline) > keptScratch*16 {
		c.inline = nil
	}
}

// reply answers the write() with its whole byte count, or with err.
func (c *call) reply(err error) {
	c.deferred = true
	if err != nil {
		c.r.ReplyError(errnoOf(err))
		return
	}
	c.r.ReplyWrite(c.size)
}

// dispatch checks the header as ib_uverbs_write does, in its order, and runs
// the row.
func (c *call) dispatch(data []byte) error {
	if len(data) < abi.CmdHdrSize {
		return unix.EINVAL
	}
	copy(bytesOf(&c.hdr), data)
	if c.hdr.Command&^(abi.CmdFlagExtended|abi.CmdMask) != 0 {
		return unix.EINVAL
	}
	c.row = lookupRow(c.hdr.Command)
	if c.row == nil {
		return unix.EOPNOTSUPP
	}
	ex := c.hdr.Command&abi.CmdFlagExtended != 0
	if !c.served() {
		if ex {
			// The kernel's stand-in for an extended command that a device lacks is
			// not marked as extended, so that verify_hdr refuses most of them with
			// EINVAL; numbers above the last that the device has are EOPNOTSUPP. On
			// that libibverbs relies, and gets it for all of them.
			return unix.EOPNOTSUPP
		}
		// uapi_finalize puts notsupp_method in the place of what a device lacks:
		// no sizes, but the header must still be right.
		c.row = &empty
	}
	var err error
	if ex {
		err = c.splitExtended(data)
	} else {
		err = c.split(data)
	}
	if err != nil {
		return err
	}
	if c.row.run == nil {
		return unix.EOPNOTSUPP
	}
	if !c.row.hot {
		if err := c.f.creds.CheckImage(); err != nil {
			return err
		}
	}
	defer c.unuse()
	return c.row.run(c)
}

func (c *call) served() bool { return c.row.run != nil && c.f.dev.cfg.HCA.Ops().Has(c.row.op) }

// split is verify_hdr for a legacy command and the udata arithmetic after it.
func (c *call) split(data []byte) error {
	row := c.row
	if int(c.hdr.InWords)*4 != len(data) {
		return unix.EINVAL
	}
	body := data[abi.CmdHdrSize:]
	if len(body) < row.req {
		// rdma-core 18 and 19 say 16 bytes of a DESTROY_CQ that has 24: the kernel
		// reads on behind them (verify_hdr).
		if row.num != abi.CmdDestroyCQ || len(data) != oldDestroyCQ || row.run == nil {
			return unix.ENOSPC
		}
		whole := bytesOf(&c.old)
		if !c.r.Pending() || c.f.dev.cfg.System.ReadBehind(c.tid, len(data), whole[copy(whole, body):]) != nil {
			return unix.EFAULT
		}
		body = whole
	}
	outLen := int(c.hdr.OutWords) * 4
	if outLen < row.resp {
		return unix.ENOSPC
	}
	c.core, c.respLen, c.respAddr, c.udoutLen = body, outLen, 0, 0
	if row.udata && len(body) > row.req {
		c.core, c.udin = body[:row.req], body[row.req:]
	}
	if row.resp > 0 {
		copy(bytesOf(&c.respAddr), body) // every such request begins with it
		if row.udata {
			c.respLen, c.udoutLen = row.resp, outLen-row.resp
		}
	}
	return nil
}

// oldDestroyCQ is the size of a DESTROY_CQ of rdma-core 18 and 19, in bytes.
const oldDestroyCQ = 16

// splitExtended is verify_hdr for an extended command. It asks for no least size:
// the kernel's table has one, and does not look at it (uapi_create_write takes
// sizes over for legacy commands only). What is not there is zero, and the
// response is cut.
func (c *call) splitExtended(data []byte) error {
	const headers = abi.CmdHdrSize + abi.ExCmdHdrSize
	if len(data) < headers {
		return unix.EINVAL
	}
	copy(bytesOf(&c.ex), data[abi.CmdHdrSize:])
	core, udin := int(c.hdr.InWords)*8, int(c.ex.ProviderInWords)*8
	if headers+core+udin != len(data) {
		return unix.EINVAL
	}
	if c.ex.Reserved != 0 {
		return unix.EINVAL
	}
	c.respAddr, c.respLen, c.udoutLen = c.ex.Response, int(c.hdr.OutWords)*8, int(c.ex.ProviderOutWords)*8
	if (c.respAddr != 0) != (c.respLen+c.udoutLen != 0) {
		return unix.EINVAL
	}
	if c.respAddr != 0 {
		if end := c.respAddr + uint64(c.respLen+c.udoutLen); end < c.respAddr || end > maxUserAddr {
			return unix.EFAULT // access_ok
		}
	}
	c.core, c.udin = data[headers:headers+core], data[headers+core:]
	return nil
}

// maxUserAddr is above every user address of every architecture.
const maxUserAddr = 1<<63 - 1

// responseLength is the member of that name in an extended response
// (uverbs_response_length).
func (c *call) responseLength(size int) uint32 { return uint32(min(c.respLen, size)) }

// request copies the core request into dst: a short one is extended with
// zeros, a surplus must be zero (uverbs_request).
func (c *call) request(dst []byte) error {
	n := copy(dst, c.core)
	clear(dst[n:])
	return zeros(c.core[n:])
}

// zeros is EOPNOTSUPP unless b is all zero (ib_is_buffer_cleared).
func zeros(b []byte) error {
	for _, x := range b {
		if x != 0 {
			return unix.EOPNOTSUPP
		}
	}
	return nil
}

// respond writes the core response, cut or filled with zeros to what the
// client asked for (uverbs_response). The tail beyond is the client's own.
func (c *call) respond(resp []byte) error { return c.respondWith(c.write, resp) }

// writer puts bytes into the calling thread's memory.
type writer func(b []byte, addr uint64) error

// respondWith is respond through another way to the client's memory. One write,
// even where zeros or the provider's part follow: a client that is killed while its
// memory holds up the first must not be reached for again.
func (c *call) respondWith(write writer, resp []byte) error {
	n := c.respLen + len(c.udout)
	if n == 0 {
		return nil // an extended command that asks for no answer
	}
	if n > len(resp) || c.udout != nil {
		resp = append(make([]byte, 0, n), resp[:min(len(resp), c.respLen)]...)[:n]
		copy(resp[c.respLen:], c.udout)
	}
	return write(resp[:n], c.respAddr)
}

// write and read reach the calling thread's memory while it still waits for its
// answer, and say EFAULT otherwise. Between this look and the access the thread
// could only go if it was killed long before (cuse tickKill) and its id came
// round within microseconds.
func (c *call) write(b []byte, addr uint64) error {
	if !c.r.Pending() || c.f.dev.cfg.System.Write(c.tid, b, addr) != nil {
		return unix.EFAULT
	}
	return nil
}

func (c *call) read(b []byte, addr uint64) error {
	if !c.r.Pending() || c.f.dev.cfg.System.Read(c.tid, b, addr) != nil {
		return unix.EFAULT
	}
	return nil
}

// use locks a handle for the length of the command. ENOENT: there is none.
// EINVAL: of another kind. EIO: the device was removed. EBUSY: being destroyed.
// Kernels before 6.15 and its backports say EINVAL to all of it
// (uobj_get_obj_read).
func (c *call) use(kind idr.Kind, id uint32) (*idr.Object, error) {
	if err := c.usable(kind, id); err != nil {
		return nil, err
	}
	o, err := c.f.objects.Use(kind, id)
	if err != nil {
		return nil, err
	}
	if c.f.dev.removed.Load() { // once more: now it can be dead
		o.Done()
		return nil, errRemoved
	}
	c.used = append(c.used, o)
	return o, nil
}

// usable is the error of a handle on a device that was removed. It takes no lock,
// which would hold up the removal.
func (c *call) usable(kind idr.Kind, id uint32) error {
	if !c.f.dev.removed.Load() {
		return nil
	}
	if err := c.f.objects.Check(kind, id); err != nil {
		return err
	}
	return errRemoved
}

// useXRCD is use for an XRC domain, of which commands say EINVAL whatever is
// wrong.
func (c *call) useXRCD(id uint32) (*idr.Object, error) {
	o, err := c.use(kindXRCD, id)
	if err != nil {
		return nil, unix.EINVAL
	}
	return o, nil
}

func (c *call) unuse() {
	for i, o := range c.used {
		o.Done()
		c.used[i] = nil
	}
	c.used = c.used[:0]
}

// begin reserves the handle of a new object whose queues cost queues bytes.
func (c *call) begin(kind idr.Kind, queues uint64) (*idr.Object, error) {
	cost := queues + objectBytes
	if err := c.f.take(kind, cost); err != nil {
		return nil, err
	}
	o, err := c.f.objects.Begin(kind)
	if err != nil {
		c.f.give(kind, cost)
		return nil, err
	}
	o.Cost = cost
	c.made = o
	return o, nil
}

// finish commits what the command made, or undoes it if err.
func (c *call) finish(err error) error {
	o := c.made
	c.made = nil
	if o == nil {
		return err
	}
	if err == nil {
		err = c.f.objects.Commit(o)
	}
	if err != nil {
		if o.Value != nil {
			_ = c.f.destroy(o)
		} else {
			c.f.give(o.Kind(), o.Cost)
		}
		c.f.objects.Abort(o)
	}
	return err
}

// context is the file's ucontext. EIO: the device was removed. EINVAL without one
// (ib_uverbs_get_ucontext).
func (c *call) context() (*ucontext, error) {
	if c.f.dev.removed.Load() {
		return nil, errRemoved
	}
	if u := c.f.ctx.Load(); u != nil {
		return u, nil
	}
	return nil, errNoContext
}
