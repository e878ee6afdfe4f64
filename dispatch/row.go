package dispatch

import (
	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/idr"
)

// access is what a command does to the object that it is about
// (enum uverbs_obj_access).
type access uint8

const (
	accessNone access = iota
	accessNew
	accessUse
	accessDestroy
)

func (a access) String() string { return [...]string{"", "new", "use", "destroy"}[a] }

// row is one command: all that is known of it before its handler runs.
type row struct {
	num   uint32 // with abi.CmdFlagExtended for an extended command
	name  string
	req   int    // bytes of the request that must be there, headers and udata apart
	resp  int    // the same of the response; 0: none
	last  string // of an extended command, req and resp are only said to be needed: up to this member
	udata bool   // a provider's part may follow both; an extended command's always may
	kind  idr.Kind
	does  access
	hot   bool      // on the data path: no check that costs a sleeping system call
	op    hca.OpSet // driver methods without which the answer is EOPNOTSUPP
	run   func(*call) error
}

// on says what kind of object a row is about, and what it does to it.
func (r row) on(kind idr.Kind, does access) row {
	r.kind, r.does = kind, does
	return r
}

// needs names the driver methods of a row.
func (r row) needs(op hca.OpSet) row {
	r.op = op
	return r
}

// onDataPath marks the rows of which a message takes several.
func (r row) onDataPath() row {
	r.hot = true
	return r
}

// withUdata marks a legacy row whose structs end in driver_data.
func (r row) withUdata() row {
	r.udata = true
	return r
}

// atLeast makes a row extended: number and, in bytes up to the end of the last
// mandatory member, request and response (UAPI_DEF_WRITE_IO_EX), for the record.
func (r row) atLeast(req int, last string, resp int) row {
	r.num |= abi.CmdFlagExtended
	r.req, r.last, r.resp = req, last, resp
	return r
}

// typed is a row whose request and response are one struct each.
func typed[Q, R any](num uint32, name string, h func(*call, *Q, *R) error) row {
	return row{num: num, name: name, req: sizeOf[Q](), resp: sizeOf[R](), run: func(c *call) error {
		in, out := at[Q](c.in[:]), at[R](c.out[:])
		if err := c.request(bytesOf(in)); err != nil {
			return err
		}
		if err := c.needContext(); err != nil {
			return err
		}
		clear(bytesOf(out))
		err := h(c, in, out)
		if err == nil {
			err = c.respond(bytesOf(out))
		}
		return c.finish(err)
	}}
}

// needContext is EINVAL without a context for what makes objects or asks about
// the device (ib_uverbs_get_ucontext). Other commands find no object then.
func (c *call) needContext() error {
	if c.row.does == accessUse || c.row.does == accessDestroy {
		return nil
	}
	_, err := c.context()
	return err
}

// silent is a row without a response.
func silent[Q any](num uint32, name string, h func(*call, *Q) error) row {
	return row{num: num, name: name, req: sizeOf[Q](), run: func(c *call) error {
		in := at[Q](c.in[:])
		if err := c.request(bytesOf(in)); err != nil {
			return err
		}
		if err := c.needContext(); err != nil {
			return err
		}
		return h(c, in)
	}}
}

// custom is a row whose handler decodes and responds for itself.
func custom[Q, R any](num uint32, name string, run func(*call) error) row {
	return row{num: num, name: name, req: sizeOf[Q](), resp: sizeOf[R](), run: run}
}

// absent is a number that the ABI has and no kernel ever served.
func absent(num uint32, name string) row { return row{num: num, name: name} }

// unserved is an extended row of which we have no handler: its sizes are known,
// its answer is EOPNOTSUPP whatever the device says.
func unserved[Q any](num uint32, name, last string, resp int) row {
	return row{num: num, name: name}.atLeast(sizeOf[Q](), last, resp)
}

// index finds rows by number: legacy, extended.
var index [2][abi.CmdMask + 1]*row

// ends are the first numbers of either sort that the ABI does not have.
var ends [2]uint32

func init() {
	// The rows' handlers refer to nothing that refers to index, so a loop here
	// is the table's only user that needs an init.
	for i := range table {
		sort, num := table[i].num>>31, table[i].num&abi.CmdMask
		if index[sort][num] != nil {
			panic("dispatch: two rows for one command: " + table[i].name)
		}
		index[sort][num] = &table[i]
		ends[sort] = max(ends[sort], num+1)
	}
	for sort, end := range ends {
		for num := range end {
			if index[sort][num] == nil {
				index[sort][num] = &empty
			}
		}
	}
}

// empty is the row of the numbers in between: notsupp_method (uverbs_uapi.c).
var empty row

// lookupRow is uapi_get_method; nil is EOPNOTSUPP before the header is looked at.
func lookupRow(command uint32) *row { return index[command>>31][command&abi.CmdMask] }
