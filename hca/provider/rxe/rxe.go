// Package rxe presents a device to rdma-core's librxe, which maps its queues: it
// writes requests and receives into rings in shared memory, and takes completions
// out of them. Only a send rings a doorbell, a POST_SEND without requests.
//
// cmd hands a Provider to the registry, dispatch makes a context's Queues of it, and
// the engine (hca/soft) uses the queues under the locks of their objects. The
// package's own lock, of a context's address handles, is a leaf.
//
// The layout is that of rdma/rdma_user_rxe.h (package abi). The sizes are those of
// the kernel's driver: rxe_queue.c rxe_queue_init, rxe_qp.c rxe_init_sq and
// rxe_init_rq, rxe_loc.h rcv_wqe_size, rxe_param.h.
package rxe

import "github.com/uverbsd/uverbsd/hca"

// The kernel driver's limits (rxe_param.h) that its queue entries follow from; a
// device of this provider has none that are larger.
const (
	MaxSGE    = 32        // RXE_MAX_SGE, of a send or receive of a QP
	MaxSRQSGE = 27        // RXE_MAX_SRQ_SGE
	MaxCQE    = 1<<15 - 1 // RXE_MAX_CQE: a queue of so many takes 4 MiB
	MaxInline = 512       // RXE_MAX_INLINE_DATA: as many bytes as MaxSGE pieces, a WQE of 720
)

// VendorID is what query_device says (RXE_VENDOR_ID).
const VendorID = 0xffffff

// Lacks are the optional methods that librxe has no use for, and the kernel's driver
// does not have: requests in its layout name no SRQ. For soft.Config.Without.
const Lacks = hca.OpXRC | hca.OpModifyCQ

// Provider is hca.Provider for librxe. The zero value is ready.
type Provider struct{}

var _ hca.Mapper = Provider{}

// Name is the stem of device names that librxe takes for its own (rxe.c,
// hca_table: VERBS_NAME_MATCH).
func (Provider) Name() string { return "rxe" }

// ABIVersion is RXE_UVERBS_ABI_VERSION.
func (Provider) ABIVersion() int { return 2 }

// PCI is empty: an rxe device is on no PCI bus, and librxe goes by the name.
func (Provider) PCI() hca.PCIID { return hca.PCIID{} }

// HCAType is empty: the kernel's driver shows none.
func (Provider) HCAType() string { return "" }

// MapsQueues is true.
func (Provider) MapsQueues() bool { return true }

// NewQueues begins a context.
func (Provider) NewQueues(a hca.Arena) hca.Queues { return &queues{arena: a} }
