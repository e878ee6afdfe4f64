package dispatch

import (
	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

// row is one command: all that is known of it before its handler runs.
type row struct {
	num   uint32 // with abi.CmdFlagExtended for an extended command
	name  string
	req   int       // bytes of the request without headers and udata
	resp  int       // bytes of the response, 0: none
	udata bool      // a provider's part may follow both
	op    hca.OpSet // driver methods without which the answer is EOPNOTSUPP
	run   func(*call) error
}

// table is every command that is served; any other number answers EOPNOTSUPP.
// Rows follow uverbs_def_write_intf[] (uverbs_cmd.c).
var table = []row{
	custom[abi.GetContext, abi.GetContextResp](abi.CmdGetContext, "GET_CONTEXT", true, 0, getContext),
	typed(abi.CmdQueryDevice, "QUERY_DEVICE", false, 0, queryDevice),
	typed(abi.CmdQueryPort, "QUERY_PORT", false, 0, queryPort),
	typed(abi.CmdAllocPD, "ALLOC_PD", true, 0, allocPD),
	silent(abi.CmdDeallocPD, "DEALLOC_PD", 0, destroyer(kindPD)),
	typed(abi.CmdCreateAH, "CREATE_AH", true, hca.OpAH, createAH),
	silent(abi.CmdDestroyAH, "DESTROY_AH", hca.OpAH, destroyer(kindAH)),
	typed(abi.CmdRegMR, "REG_MR", true, 0, regMR),
	silent(abi.CmdDeregMR, "DEREG_MR", 0, destroyer(kindMR)),
	custom[abi.CreateCompChannel, abi.CreateCompChannelResp](abi.CmdCreateCompChannel, "CREATE_COMP_CHANNEL", false, 0, createCompChannel),
	typed(abi.CmdCreateCQ, "CREATE_CQ", true, 0, createCQ),
	typed(abi.CmdResizeCQ, "RESIZE_CQ", true, hca.OpResizeCQ, resizeCQ),
	typed(abi.CmdDestroyCQ, "DESTROY_CQ", false, 0, destroyCQ),
	custom[abi.PollCQ, abi.PollCQResp](abi.CmdPollCQ, "POLL_CQ", false, 0, pollCQ),
	silent(abi.CmdReqNotifyCQ, "REQ_NOTIFY_CQ", hca.OpReqNotify, reqNotifyCQ),
	typed(abi.CmdCreateQP, "CREATE_QP", true, 0, createQP),
	typed(abi.CmdQueryQP, "QUERY_QP", false, 0, queryQP),
	silent(abi.CmdModifyQP, "MODIFY_QP", 0, modifyQP),
	typed(abi.CmdDestroyQP, "DESTROY_QP", false, 0, destroyQP),
	custom[abi.PostSend, abi.PostResp](abi.CmdPostSend, "POST_SEND", false, 0, postSend),
	custom[abi.PostSend, abi.PostResp](abi.CmdPostRecv, "POST_RECV", false, 0, postRecv),
	silent(abi.CmdAttachMcast, "ATTACH_MCAST", hca.OpMcast, attachMcast),
	silent(abi.CmdDetachMcast, "DETACH_MCAST", hca.OpMcast, detachMcast),
	typed(abi.CmdCreateSRQ, "CREATE_SRQ", true, hca.OpSRQ, createSRQ),
	withUdata(silent(abi.CmdModifySRQ, "MODIFY_SRQ", hca.OpSRQ|hca.OpModifySRQ, modifySRQ)),
	typed(abi.CmdQuerySRQ, "QUERY_SRQ", false, hca.OpSRQ, querySRQ),
	typed(abi.CmdDestroySRQ, "DESTROY_SRQ", false, hca.OpSRQ, destroySRQ),
	custom[abi.PostSend, abi.PostResp](abi.CmdPostSRQRecv, "POST_SRQ_RECV", false, hca.OpSRQ, postSRQRecv),
}

// index finds rows by number: legacy, extended.
var index [2][abi.CmdMask + 1]*row

func init() {
	// The rows' handlers refer to nothing that refers to index, so a loop here
	// is the table's only user that needs an init.
	for i := range table {
		index[table[i].num>>31][table[i].num&abi.CmdMask] = &table[i]
	}
}

func lookupRow(command uint32) *row {
	return index[command>>31][command&abi.CmdMask]
}

// typed is a row whose request and response are one struct each.
func typed[Q, R any](num uint32, name string, udata bool, op hca.OpSet, h func(*call, *Q, *R) error) row {
	return row{num: num, name: name, req: sizeOf[Q](), resp: sizeOf[R](), udata: udata, op: op, run: func(c *call) error {
		in, out := at[Q](c.in[:]), at[R](c.out[:])
		if err := c.request(bytesOf(in)); err != nil {
			return err
		}
		if _, err := c.context(); err != nil {
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

// silent is a row without a response.
func silent[Q any](num uint32, name string, op hca.OpSet, h func(*call, *Q) error) row {
	return row{num: num, name: name, req: sizeOf[Q](), op: op, run: func(c *call) error {
		in := at[Q](c.in[:])
		if err := c.request(bytesOf(in)); err != nil {
			return err
		}
		if _, err := c.context(); err != nil {
			return err
		}
		return h(c, in)
	}}
}

// custom is a row whose handler decodes and responds for itself.
func custom[Q, R any](num uint32, name string, udata bool, op hca.OpSet, run func(*call) error) row {
	return row{num: num, name: name, req: sizeOf[Q](), resp: sizeOf[R](), udata: udata, op: op, run: run}
}

func withUdata(r row) row {
	r.udata = true
	return r
}
