package rawverbs

import (
	"encoding/binary"
	"fmt"

	"github.com/uverbsd/uverbsd/abi"
	"golang.org/x/sys/unix"
)

// Client is one open file of a node.
type Client struct {
	FD      int
	Async   int // the event file of GET_CONTEXT, -1 before it
	Vectors uint32
	Mem     *Mem
	Room    int  // bytes of every provider response, for devices that want some
	Quick   bool // write(2) without telling the Go scheduler

	// Via, if set, takes the commands in place of write(2): a device in the same process.
	Via func(b []byte) (int, unix.Errno)
}

// DefaultRoom is enough for rxe's largest provider response (rxe_create_qp_resp).
const DefaultRoom = 64

// Open opens a node; there is no context yet.
func Open(node string) (*Client, error) {
	fd, err := unix.Open(node, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", node, err)
	}
	m, err := NewMem()
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &Client{FD: fd, Async: -1, Mem: m, Room: DefaultRoom}, nil
}

// OpenContext is Open and GET_CONTEXT.
func OpenContext(node string) (*Client, error) {
	c, err := Open(node)
	if err != nil {
		return nil, err
	}
	if err := c.GetContext(); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Close closes both files.
func (c *Client) Close() {
	if c.Async >= 0 {
		_ = unix.Close(c.Async)
	}
	_ = unix.Close(c.FD)
	c.Mem.Free()
}

// Request is one command before it is encoded.
type Request struct {
	Num  uint32 // with abi.CmdFlagExtended for an extended command
	Body []byte // without headers; a legacy one that has a response begins with its pointer
	Resp uint64 // address of the response; 0 in a legacy command: Body is left alone
	Out  int    // bytes of the core's response
	UIn  []byte // the provider's part of both
	UOut int
}

// Encode is the bytes for write(2).
func (r *Request) Encode() []byte {
	le := binary.LittleEndian
	if r.Num&abi.CmdFlagExtended != 0 {
		b := le.AppendUint32(nil, r.Num)
		b = le.AppendUint16(b, uint16(len(r.Body)/8))
		b = le.AppendUint16(b, uint16(r.Out/8))
		b = le.AppendUint64(b, r.Resp)
		b = le.AppendUint16(b, uint16(len(r.UIn)/8))
		b = le.AppendUint16(b, uint16(r.UOut/8))
		b = le.AppendUint32(b, 0)
		return append(append(b, r.Body...), r.UIn...)
	}
	b := le.AppendUint32(nil, r.Num)
	b = le.AppendUint16(b, uint16((abi.CmdHdrSize+len(r.Body)+len(r.UIn))/4))
	b = le.AppendUint16(b, uint16((r.Out+r.UOut)/4))
	b = append(append(b, r.Body...), r.UIn...)
	if r.Resp != 0 && len(r.Body) >= 8 {
		le.PutUint64(b[abi.CmdHdrSize:], r.Resp)
	}
	return b
}

// Write writes an encoded command. Anything but the whole count is an error.
func (c *Client) Write(b []byte) unix.Errno {
	if c.Via != nil {
		n, e := c.Via(b)
		return whole(n, len(b), e)
	}
	n, e := write(c.FD, b, c.Quick)
	return whole(n, len(b), e)
}

func whole(n, of int, e unix.Errno) unix.Errno {
	if e == 0 && n != of {
		return unix.EIO
	}
	return e
}

// Do encodes and writes.
func (c *Client) Do(r *Request) unix.Errno { return c.Write(r.Encode()) }

// Poison is what response memory holds before a command.
const Poison = 0xa5

// Call runs a command whose response goes into Mem, poisoned before. What it
// returns is that memory: out bytes, then Room for a row with udata.
func (c *Client) Call(num uint32, body []byte, out int, udata bool) ([]byte, unix.Errno) {
	mem, addr := c.Mem.Out()
	r := Request{Num: num, Body: body, Resp: addr, Out: out}
	if udata && out > 0 {
		r.UOut = c.Room
	}
	if out == 0 {
		r.Resp = 0
	}
	n := out + r.UOut
	for i := range n {
		mem[i] = Poison
	}
	e := c.Do(&r)
	return mem[:n], e
}

// call is Call with its structs; what names the command in errors.
func call[R, Q any](c *Client, num uint32, what string, in Q, udata bool) (R, error) {
	b, e := c.Call(num, Bytes(&in), SizeOf[R](), udata)
	if e != 0 {
		return *new(R), fmt.Errorf("%s: %w", what, e)
	}
	return Decode[R](b), nil
}

// tell is call for a command without a response.
func tell[Q any](c *Client, num uint32, what string, in Q) error {
	if _, e := c.Call(num, Bytes(&in), 0, false); e != 0 {
		return fmt.Errorf("%s: %w", what, e)
	}
	return nil
}
