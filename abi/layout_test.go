package abi

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unsafe"
)

// cStruct pairs a struct with the C struct whose layout it has. C members are
// found by order, so that no table of names has to be kept: each Go field must
// start where the C member of the same position starts.
type cStruct struct {
	c       string
	v       any
	members []string // C members in the order of the Go fields
}

// compareLayouts compiles a C program against the system's headers and compares
// sizes and offsets.
func compareLayouts(t *testing.T, headers []string, structs []cStruct) {
	t.Helper()
	var src strings.Builder
	src.WriteString("#include <stdio.h>\n#include <stddef.h>\n")
	for _, h := range headers {
		fmt.Fprintf(&src, "#include <%s>\n", h)
	}
	src.WriteString("int main(void) {\n")
	var want strings.Builder
	for _, s := range structs {
		typ := reflect.TypeOf(s.v)
		if typ.NumField() != len(s.members) {
			t.Fatalf("%s: %d fields, %d members named", s.c, typ.NumField(), len(s.members))
		}
		// A flexible driver_data member adds nothing to sizeof, but may add
		// padding: the end of the last member is what udata starts at.
		last := s.members[len(s.members)-1]
		fmt.Fprintf(&src, "printf(\"%s %%zu\\n\", offsetof(struct %s, %s) + sizeof(((struct %s *)0)->%s));\n", s.c, s.c, last, s.c, last)
		fmt.Fprintf(&want, "%s %d\n", s.c, typ.Size())
		for i, m := range s.members {
			fmt.Fprintf(&src, "printf(\"%s.%s %%zu\\n\", offsetof(struct %s, %s));\n", s.c, m, s.c, m)
			fmt.Fprintf(&want, "%s.%s %d\n", s.c, m, typ.Field(i).Offset)
		}
	}
	src.WriteString("return 0; }\n")
	got := runC(t, src.String())
	wantLines, gotLines := bytes.Split([]byte(want.String()), []byte("\n")), bytes.Split(got, []byte("\n"))
	for i := range wantLines {
		if i >= len(gotLines) || !bytes.Equal(wantLines[i], gotLines[i]) {
			t.Errorf("here %q, in C %q", wantLines[i], gotLines[i])
		}
	}
}

// runC compiles and runs a program with the system's compiler and headers.
func runC(t *testing.T, src string) []byte {
	t.Helper()
	dir := t.TempDir()
	file, prog := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(file, []byte(src), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-o", prog, file).CombinedOutput(); err != nil {
		t.Fatalf("compile against the system's headers (packages gcc and linux-libc-dev): %v\n%s", err, out)
	}
	out, err := exec.Command(prog).Output()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func words(s string) []string { return strings.Fields(s) }

func TestUverbsLayout(t *testing.T) {
	compareLayouts(t, []string{"rdma/ib_user_verbs.h"}, []cStruct{
		{"ib_uverbs_cmd_hdr", CmdHdr{}, words("command in_words out_words")},
		{"ib_uverbs_ex_cmd_hdr", ExCmdHdr{}, words("response provider_in_words provider_out_words cmd_hdr_reserved")},
		{"ib_uverbs_async_event_desc", AsyncEvent{}, words("element event_type reserved")},
		{"ib_uverbs_comp_event_desc", CompEvent{}, words("cq_handle")},
		{"ib_uverbs_get_context", GetContext{}, words("response")},
		{"ib_uverbs_get_context_resp", GetContextResp{}, words("async_fd num_comp_vectors")},
		{"ib_uverbs_query_device", QueryDevice{}, words("response")},
		{"ib_uverbs_query_device_resp", QueryDeviceResp{}, words(`fw_ver node_guid sys_image_guid max_mr_size page_size_cap
			vendor_id vendor_part_id hw_ver max_qp max_qp_wr device_cap_flags max_sge max_sge_rd max_cq max_cqe max_mr max_pd
			max_qp_rd_atom max_ee_rd_atom max_res_rd_atom max_qp_init_rd_atom max_ee_init_rd_atom atomic_cap max_ee max_rdd
			max_mw max_raw_ipv6_qp max_raw_ethy_qp max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr
			max_map_per_fmr max_srq max_srq_wr max_srq_sge max_pkeys local_ca_ack_delay phys_port_cnt reserved`)},
		{"ib_uverbs_query_port", QueryPort{}, words("response port_num reserved")},
		{"ib_uverbs_query_port_resp", QueryPortResp{}, words(`port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr gid_tbl_len
			pkey_tbl_len lid sm_lid state max_mtu active_mtu lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width
			active_speed phys_state link_layer flags reserved`)},
		{"ib_uverbs_alloc_pd", AllocPD{}, words("response")},
		{"ib_uverbs_alloc_pd_resp", AllocPDResp{}, words("pd_handle")},
		{"ib_uverbs_dealloc_pd", Handle{}, words("pd_handle")},
		{"ib_uverbs_dereg_mr", Handle{}, words("mr_handle")},
		{"ib_uverbs_destroy_ah", Handle{}, words("ah_handle")},
		{"ib_uverbs_reg_mr", RegMR{}, words("response start length hca_va pd_handle access_flags")},
		{"ib_uverbs_reg_mr_resp", RegMRResp{}, words("mr_handle lkey rkey")},
		{"ib_uverbs_create_comp_channel", CreateCompChannel{}, words("response")},
		{"ib_uverbs_create_comp_channel_resp", CreateCompChannelResp{}, words("fd")},
		{"ib_uverbs_create_cq", CreateCQ{}, words("response user_handle cqe comp_vector comp_channel reserved")},
		{"ib_uverbs_create_cq_resp", CreateCQResp{}, words("cq_handle cqe")},
		{"ib_uverbs_resize_cq", ResizeCQ{}, words("response cq_handle cqe")},
		{"ib_uverbs_resize_cq_resp", ResizeCQResp{}, words("cqe reserved")},
		{"ib_uverbs_poll_cq", PollCQ{}, words("response cq_handle ne")},
		{"ib_uverbs_poll_cq_resp", PollCQResp{}, words("count reserved")},
		{"ib_uverbs_wc", WC{}, words(`wr_id status opcode vendor_err byte_len ex qp_num src_qp wc_flags pkey_index slid sl
			dlid_path_bits port_num reserved`)},
		{"ib_uverbs_req_notify_cq", ReqNotifyCQ{}, words("cq_handle solicited_only")},
		{"ib_uverbs_destroy_cq", DestroyCQ{}, words("response cq_handle reserved")},
		{"ib_uverbs_destroy_cq_resp", DestroyCQResp{}, words("comp_events_reported async_events_reported")},
		{"ib_uverbs_global_route", GlobalRoute{}, words("dgid flow_label sgid_index hop_limit traffic_class reserved")},
		{"ib_uverbs_ah_attr", AHAttr{}, words("grh dlid sl src_path_bits static_rate is_global port_num reserved")},
		{"ib_uverbs_create_ah", CreateAH{}, words("response user_handle pd_handle reserved attr")},
		{"ib_uverbs_create_ah_resp", CreateAHResp{}, words("ah_handle")},
		{"ib_uverbs_create_qp", CreateQP{}, words(`response user_handle pd_handle send_cq_handle recv_cq_handle srq_handle
			max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data sq_sig_all qp_type is_srq reserved`)},
		{"ib_uverbs_create_qp_resp", CreateQPResp{}, words(`qp_handle qpn max_send_wr max_recv_wr max_send_sge max_recv_sge
			max_inline_data reserved`)},
		{"ib_uverbs_qp_dest", QPDest{}, words(`dgid flow_label dlid reserved sgid_index hop_limit traffic_class sl
			src_path_bits static_rate is_global port_num`)},
		{"ib_uverbs_query_qp", QueryQP{}, words("response qp_handle attr_mask")},
		{"ib_uverbs_query_qp_resp", QueryQPResp{}, words(`dest alt_dest max_send_wr max_recv_wr max_send_sge max_recv_sge
			max_inline_data qkey rq_psn sq_psn dest_qp_num qp_access_flags pkey_index alt_pkey_index qp_state cur_qp_state
			path_mtu path_mig_state sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt
			rnr_retry alt_port_num alt_timeout sq_sig_all reserved`)},
		{"ib_uverbs_modify_qp", ModifyQP{}, words(`dest alt_dest qp_handle attr_mask qkey rq_psn sq_psn dest_qp_num
			qp_access_flags pkey_index alt_pkey_index qp_state cur_qp_state path_mtu path_mig_state en_sqd_async_notify
			max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num alt_timeout reserved`)},
		{"ib_uverbs_destroy_qp", DestroyQP{}, words("response qp_handle reserved")},
		{"ib_uverbs_destroy_qp_resp", EventsResp{}, words("events_reported")},
		{"ib_uverbs_destroy_srq", DestroyQP{}, words("response srq_handle reserved")},
		{"ib_uverbs_destroy_srq_resp", EventsResp{}, words("events_reported")},
		{"ib_uverbs_sge", SGE{}, words("addr length lkey")},
		{"ib_uverbs_send_wr", SendWR{}, words(`wr_id num_sge opcode send_flags ex wr.atomic.remote_addr wr.atomic.compare_add
			wr.atomic.swap wr.atomic.rkey wr.atomic.reserved`)},
		{"ib_uverbs_post_send", PostSend{}, words("response qp_handle wr_count sge_count wqe_size")},
		{"ib_uverbs_post_recv", PostSend{}, words("response qp_handle wr_count sge_count wqe_size")},
		{"ib_uverbs_post_srq_recv", PostSend{}, words("response srq_handle wr_count sge_count wqe_size")},
		{"ib_uverbs_post_send_resp", PostResp{}, words("bad_wr")},
		{"ib_uverbs_recv_wr", RecvWR{}, words("wr_id num_sge reserved")},
		{"ib_uverbs_attach_mcast", Mcast{}, words("gid qp_handle mlid reserved")},
		{"ib_uverbs_detach_mcast", Mcast{}, words("gid qp_handle mlid reserved")},
		{"ib_uverbs_create_srq", CreateSRQ{}, words("response user_handle pd_handle max_wr max_sge srq_limit")},
		{"ib_uverbs_create_srq_resp", CreateSRQResp{}, words("srq_handle max_wr max_sge srqn")},
		{"ib_uverbs_modify_srq", ModifySRQ{}, words("srq_handle attr_mask max_wr srq_limit")},
		{"ib_uverbs_query_srq", QuerySRQ{}, words("response srq_handle reserved")},
		{"ib_uverbs_query_srq_resp", QuerySRQResp{}, words("max_wr max_sge srq_limit reserved")},
		{"ib_uverbs_rereg_mr", ReregMR{}, words("response mr_handle flags start length hca_va pd_handle access_flags")},
		{"ib_uverbs_rereg_mr_resp", ReregMRResp{}, words("lkey rkey")},
		{"ib_uverbs_alloc_mw", AllocMW{}, words("response pd_handle mw_type reserved")},
		{"ib_uverbs_alloc_mw_resp", AllocMWResp{}, words("mw_handle rkey")},
		{"ib_uverbs_dealloc_mw", Handle{}, words("mw_handle")},
		{"ib_uverbs_open_xrcd", OpenXRCD{}, words("response fd oflags")},
		{"ib_uverbs_open_xrcd_resp", OpenXRCDResp{}, words("xrcd_handle")},
		{"ib_uverbs_close_xrcd", Handle{}, words("xrcd_handle")},
		{"ib_uverbs_create_xsrq", CreateXSRQ{}, words(`response user_handle srq_type pd_handle max_wr max_sge srq_limit
			max_num_tags xrcd_handle cq_handle`)},
		{"ib_uverbs_open_qp", OpenQP{}, words("response user_handle pd_handle qpn qp_type reserved")},
	})
}

func TestExtendedLayout(t *testing.T) {
	compareLayouts(t, []string{"rdma/ib_user_verbs.h"}, []cStruct{
		{"ib_uverbs_ex_query_device", ExQueryDevice{}, words("comp_mask reserved")},
		{"ib_uverbs_odp_caps", ODPCaps{}, words(`general_caps per_transport_caps.rc_odp_caps per_transport_caps.uc_odp_caps
			per_transport_caps.ud_odp_caps reserved`)},
		{"ib_uverbs_rss_caps", RSSCaps{}, words(`supported_qpts max_rwq_indirection_tables max_rwq_indirection_table_size reserved`)},
		{"ib_uverbs_tm_caps", TMCaps{}, words("max_rndv_hdr_size max_num_tags flags max_ops max_sge reserved")},
		{"ib_uverbs_cq_moderation_caps", CQModerationCaps{}, words("max_cq_moderation_count max_cq_moderation_period reserved")},
		{"ib_uverbs_ex_query_device_resp", ExQueryDeviceResp{}, words(`base comp_mask response_length odp_caps timestamp_mask
			hca_core_clock device_cap_flags_ex rss_caps max_wq_type_rq raw_packet_caps tm_caps cq_moderation_caps max_dm_size
			xrc_odp_caps reserved`)},
		{"ib_uverbs_ex_create_cq", ExCreateCQ{}, words("user_handle cqe comp_vector comp_channel comp_mask flags reserved")},
		{"ib_uverbs_ex_create_cq_resp", ExCreateCQResp{}, words("base comp_mask response_length")},
		{"ib_uverbs_ex_create_qp", ExCreateQP{}, words(`user_handle pd_handle send_cq_handle recv_cq_handle srq_handle max_send_wr
			max_recv_wr max_send_sge max_recv_sge max_inline_data sq_sig_all qp_type is_srq reserved comp_mask create_flags
			rwq_ind_tbl_handle source_qpn`)},
		{"ib_uverbs_ex_create_qp_resp", ExCreateQPResp{}, words("base comp_mask response_length")},
		{"ib_uverbs_ex_modify_qp", ExModifyQP{}, words("base rate_limit reserved")},
		{"ib_uverbs_ex_modify_qp_resp", LengthResp{}, words("comp_mask response_length")},
		{"ib_uverbs_ex_modify_cq", ExModifyCQ{}, words("cq_handle attr_mask attr.cq_count attr.cq_period reserved")},
		{"ib_uverbs_flow_attr", FlowAttr{}, words("type size priority num_of_specs reserved port flags")},
		{"ib_uverbs_create_flow", CreateFlow{}, words("comp_mask qp_handle flow_attr")},
		{"ib_uverbs_create_flow_resp", CreateFlowResp{}, words("comp_mask flow_handle")},
		{"ib_uverbs_destroy_flow", MaskedHandle{}, words("comp_mask flow_handle")},
		{"ib_uverbs_ex_create_wq", ExCreateWQ{}, words(`comp_mask wq_type user_handle pd_handle cq_handle max_wr max_sge
			create_flags reserved`)},
		{"ib_uverbs_ex_create_wq_resp", ExCreateWQResp{}, words("comp_mask response_length wq_handle max_wr max_sge wqn")},
		{"ib_uverbs_ex_destroy_wq", MaskedHandle{}, words("comp_mask wq_handle")},
		{"ib_uverbs_ex_destroy_wq_resp", ExDestroyWQResp{}, words("comp_mask response_length events_reported reserved")},
		{"ib_uverbs_ex_modify_wq", ExModifyWQ{}, words("attr_mask wq_handle wq_state curr_wq_state flags flags_mask")},
		{"ib_uverbs_ex_create_rwq_ind_table", ExCreateRWQIndTbl{}, words("comp_mask log_ind_tbl_size")},
		{"ib_uverbs_ex_create_rwq_ind_table_resp", ExCreateRWQIndTblResp{}, words(`comp_mask response_length ind_tbl_handle
			ind_tbl_num`)},
		{"ib_uverbs_ex_destroy_rwq_ind_table", MaskedHandle{}, words("comp_mask ind_tbl_handle")},
	})
}

// The numbers of the extended commands.
func TestExtendedNumbers(t *testing.T) {
	runC(t, fmt.Sprintf(`#include <rdma/ib_user_verbs.h>
#define IS(m, n) _Static_assert(IB_USER_VERBS_EX_CMD_##m == n, #m)
IS(QUERY_DEVICE, %d); IS(CREATE_CQ, %d); IS(CREATE_QP, %d); IS(MODIFY_QP, %d); IS(CREATE_FLOW, %d); IS(DESTROY_FLOW, %d);
IS(CREATE_WQ, %d); IS(MODIFY_WQ, %d); IS(DESTROY_WQ, %d); IS(CREATE_RWQ_IND_TBL, %d); IS(DESTROY_RWQ_IND_TBL, %d); IS(MODIFY_CQ, %d);
int main(void) { return 0; }
`, ExCmdQueryDevice, ExCmdCreateCQ, ExCmdCreateQP, ExCmdModifyQP, ExCmdCreateFlow, ExCmdDestroyFlow, ExCmdCreateWQ, ExCmdModifyWQ,
		ExCmdDestroyWQ, ExCmdCreateRWQIndTbl, ExCmdDestroyRWQIndTbl, ExCmdModifyCQ))
}

// The union of ib_uverbs_send_wr: where decodeUnion (dispatch) looks for the
// members of its other forms in SendWR.
func TestSendWRUnion(t *testing.T) {
	runC(t, `#include <stddef.h>
#include <rdma/ib_user_verbs.h>
#define AT(m, n) _Static_assert(offsetof(struct ib_uverbs_send_wr, m) == n, #m)
AT(wr.rdma.remote_addr, 24); AT(wr.rdma.rkey, 32);
AT(wr.ud.ah, 24); AT(wr.ud.remote_qpn, 28); AT(wr.ud.remote_qkey, 32);
int main(void) { return 0; }
`)
	if at := unsafe.Offsetof(SendWR{}.RemoteAddr); at != 24 {
		t.Errorf("RemoteAddr at %d", at)
	}
	if at := unsafe.Offsetof(SendWR{}.CompareAdd); at != 32 {
		t.Errorf("CompareAdd at %d", at)
	}
}

func TestRXELayout(t *testing.T) {
	compareLayouts(t, []string{"rdma/rdma_user_rxe.h"}, []cStruct{
		{"rxe_queue_buf", RXEQueueBuf{}, words("log2_elem_size index_mask pad_1 producer_index pad_2 consumer_index pad_3")},
		{"mminfo", RXEMMInfo{}, words("offset size pad")},
		{"rxe_create_cq_resp", RXEMMInfo{}, words("mi.offset mi.size mi.pad")},
		{"rxe_resize_cq_resp", RXEMMInfo{}, words("mi.offset mi.size mi.pad")},
		{"rxe_create_qp_resp", RXECreateQPResp{}, words("rq_mi sq_mi")},
		{"rxe_create_srq_resp", RXECreateSRQResp{}, words("mi srq_num reserved")},
		{"rxe_create_ah_resp", RXECreateAHResp{}, words("ah_num reserved")},
		{"rxe_modify_srq_cmd", RXEModifySRQ{}, words("mmap_info_addr")},
		{"rxe_sge", RXESGE{}, words("addr length lkey")},
		{"rxe_dma_info", RXEDMAInfo{}, words("length resid cur_sge num_sge sge_offset reserved")},
		{"rxe_send_wr", RXESendWR{}, words("wr_id reserved opcode send_flags ex wr")},
		{"rxe_send_wqe", RXESendWQE{}, words("wr status state iova mask first_psn last_psn ack_length ssn has_rd_atomic dma")},
		{"rxe_recv_wqe", RXERecvWQE{}, words("wr_id reserved padding dma")},
	})
}

// The forms of rxe_send_wr's union, whose structs have no names in C.
func TestRXEUnion(t *testing.T) {
	var src strings.Builder
	src.WriteString("#include <stddef.h>\n#include <rdma/rdma_user_rxe.h>\n")
	at := func(form, c string, off uintptr) {
		fmt.Fprintf(&src, "_Static_assert(offsetof(struct rxe_send_wr, wr.%s.%s) == %d, \"%s.%s\");\n",
			form, c, unsafe.Offsetof(RXESendWR{}.WR)+off, form, c)
	}
	for _, f := range []cStruct{
		{"rdma", RXERDMAWR{}, words("remote_addr rkey reserved")},
		{"atomic", RXEAtomicWR{}, words("remote_addr compare_add swap rkey reserved")},
		{"ud", RXEUDWR{}, words("remote_qpn remote_qkey pkey_index reserved ah_num pad av")},
		{"mw", RXEMWWR{}, words("addr length mr_lkey mw_rkey rkey access")},
	} {
		typ := reflect.TypeOf(f.v)
		if typ.NumField() != len(f.members) {
			t.Fatalf("%s: %d fields, %d members named", f.c, typ.NumField(), len(f.members))
		}
		for i, m := range f.members {
			at(f.c, m, typ.Field(i).Offset)
		}
	}
	src.WriteString("_Static_assert(sizeof(struct rxe_av) == 88, \"rxe_av\");\nint main(void) { return 0; }\n")
	runC(t, src.String())
}
