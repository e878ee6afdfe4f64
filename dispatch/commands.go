package dispatch

import (
	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

// Answer is what becomes of a command on a device.
type Answer string

// Answers to a command.
const (
	Served     Answer = "served"
	NoMethod   Answer = "EOPNOTSUPP: the device has no such method"
	NotServed  Answer = "EOPNOTSUPP: not implemented"
	NotInLinux Answer = "EOPNOTSUPP: empty in the kernel too"
)

// Command describes one row of the table.
type Command struct {
	Number   uint32   `json:"number"`
	Extended bool     `json:"extended"`
	Name     string   `json:"name"`
	Request  int      `json:"request_bytes"`  // at least, without headers
	Response int      `json:"response_bytes"` // at least; 0: none
	Last     string   `json:"last_mandatory_member,omitempty"`
	Udata    bool     `json:"udata"`
	Object   string   `json:"object,omitempty"`
	Access   string   `json:"access,omitempty"`
	Needs    []string `json:"needs,omitempty"` // driver methods
	Answer   Answer   `json:"answer"`
}

// Commands lists the table as a device with ops serves it, legacy commands
// first, each sort in order of number.
func Commands(ops hca.OpSet) []Command {
	var out []Command
	for sort := range index {
		for _, r := range index[sort] {
			if r == nil || r.name == "" {
				continue
			}
			c := Command{
				Number: r.num & abi.CmdMask, Extended: r.extended(), Name: r.name, Request: r.req, Response: r.resp,
				Last: r.last, Udata: r.udata || r.extended(), Object: kindNames[r.kind], Access: r.does.String(),
				Needs: r.op.Names(), Answer: Served,
			}
			switch {
			case r.run == nil && r.req == 0:
				c.Answer, c.Udata = NotInLinux, false
			case r.run == nil:
				c.Answer = NotServed
			case !ops.Has(r.op):
				c.Answer = NoMethod
			}
			out = append(out, c)
		}
	}
	return out
}

func (r *row) extended() bool { return r.num&abi.CmdFlagExtended != 0 }
