//go:build guest

package integration_test

import (
	"strings"

	"github.com/uverbsd/uverbsd/integration/internal/pyunit"
)

// noVerb: what a provider's context does not have (ipath_ctx_common_ops and
// ipath_ctx_v1_ops, providers/ipathverbs/ipathverbs.c), libibverbs answers
// itself (libibverbs/dummy_ops.c): nothing of it comes to the daemon.
func noVerb(name string) string {
	return "libipathverbs has no " + name + "; libibverbs answers EOPNOTSUPP itself"
}

// noRawPackets: the suite skips in the same words on the kernel's rdma_rxe.
const noRawPackets = "neither this device nor rdma_rxe has raw packets: ibv_create_qp gets EOPNOTSUPP; " +
	"libipathverbs has no create_qp_ex either"

// whySkipped says what skips come from, by how the suite's own message begins.
var whySkipped = []struct{ message, why string }{
	{"Advise MR with flags", noVerb("advise_mr")},
	{"Allocating dmabuf", "the suite's own allocator knows no GPU here; " + noVerb("reg_dmabuf_mr")},
	{"Create Extended CQ", noVerb("create_cq_ex")},
	{"Create MW", noVerb("alloc_mw")},
	{"Create QP type", noVerb("create_qp_ex")},
	{"Create Raw Packet QP with", noRawPackets},
	{"Create RC QP with", noVerb("create_qp_ex")},
	{"Create UC QP with", noVerb("create_qp_ex")},
	{"Create UD QP with", noVerb("create_qp_ex")},
	{"Create XRCD", noVerb("open_xrcd")},
	{"Create memory window", noVerb("alloc_mw")},
	{"Create custom mr with additional access flags", "an access flag for ibv_wr_flush, which is a work request of an extended QP: " + noVerb("create_qp_ex")},
	{"Device /dev/dri/", "the guests have no GPU; " + noVerb("reg_dmabuf_mr")},
	{"Device memory", "max_dm_size must be 0: " + noVerb("alloc_dm")},
	{"Extended CQ", noVerb("create_cq_ex")},
	{"Extended QP", noVerb("create_qp_ex")},
	{"Link layer of port=1 is InfiniBand", "this device's port is InfiniBand; RELEASE-ethernet.txt has it"},
	{"Memory Window allocation", noVerb("alloc_mw")},
	{"Must be run by root on Ethernet link layer", "this device's port is InfiniBand, or the user is not root; as root on Ethernet: " + noVerb("create_qp_ex")},
	{"Operation not supported (Failed to create QP", noVerb("create_qp_ex")},
	{"Parent Domain", noVerb("alloc_parent_domain")},
	{"Rereg MR", noVerb("rereg_mr")},
	{"Tag matching", "tm_caps must be 0: " + noVerb("create_srq_ex")},
	{"To Create RAW QP", "this device's port is InfiniBand, or the user is not root; RELEASE-ethernet.txt has it as root"},
}

// whyNot says why a test did not pass; "" if nobody knows.
func whyNot(r pyunit.Result, library string) string {
	if library == "librxe" {
		return whyNotRXE(r)
	}
	if r.Status != pyunit.Skip {
		return ""
	}
	for _, w := range whySkipped {
		if strings.HasPrefix(r.Message, w.message) {
			return w.why
		}
	}
	return ""
}

// rxeSkipped: as whySkipped, of librxe (rxe_ctx_ops, providers/rxe/rxe.c).
var rxeSkipped = []struct{ message, why string }{
	{"Advise MR with flags", "librxe has no advise_mr (56), or asks by ioctl alone (later): EOPNOTSUPP"},
	{"Create Raw Packet QP with", rxeRawPackets},
	{"Create QP type 8", rxeRawPackets},
	{"Create XRCD", rxeHasNo("open_xrcd")},
	{"Device /dev/dri/", "the guests have no GPU"},
	{"Device memory", "max_dm_size must be 0: " + rxeHasNo("alloc_dm")},
	{"Extended CQ", "for tag matching librxe's create_cq_ex has no field: EOPNOTSUPP"},
	{"Parent Domain", rxeHasNo("alloc_parent_domain")},
	{"Rereg MR", rxeHasNo("rereg_mr")},
}

func rxeHasNo(verb string) string {
	return "librxe has no " + verb + "; libibverbs answers EOPNOTSUPP itself"
}

// rxeRawPackets: rdma_rxe answers the same.
const rxeRawPackets = "neither this device nor rdma_rxe has raw packets"

// whyNotRXE is whyNot on a device whose queues librxe maps.
func whyNotRXE(r pyunit.Result) string {
	if r.Status == pyunit.Error && r.Test == "test_shared_pd.SharedPDTestCase.test_imported_rc_ex_rdma_write" {
		return "ibv_import_device wants a character device and gets EINVAL: what is mapped is a regular file. On one it would " +
			"get EOPNOTSUPP, for librxe imports no context"
	}
	for _, w := range rxeSkipped {
		if r.Status == pyunit.Skip && strings.HasPrefix(r.Message, w.message) {
			return w.why
		}
	}
	return ""
}
