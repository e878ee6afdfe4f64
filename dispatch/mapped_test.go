package dispatch_test

import (
	"bytes"
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

// tail is the provider's part of a response, behind n bytes.
func tail[T any](c *client, n uint64) T {
	c.g.t.Helper()
	var v T
	if err := c.p.ReadAt(unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v)), resp+n); err != nil {
		c.g.t.Fatal(err)
	}
	return v
}

const mmInfo = 16 // bytes of a struct mminfo

func (c *client) mappedCQ() (uint32, abi.RXEMMInfo) {
	c.g.t.Helper()
	c.cmd(0, abi.CmdCreateCQ, 8+mmInfo, raw(abi.CreateCQ{Response: resp, CQE: 16, CompChannel: -1}))
	return out[abi.CreateCQResp](c).CQHandle, tail[abi.RXEMMInfo](c, 8)
}

func (c *client) mappedQP(pd, cq uint32) (abi.CreateQPResp, abi.RXECreateQPResp) {
	c.g.t.Helper()
	c.cmd(0, abi.CmdCreateQP, 32+2*mmInfo, raw(abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq,
		MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInlineData: 64, QPType: uint8(hca.QPTypeRC)}))
	return out[abi.CreateQPResp](c), tail[abi.RXECreateQPResp](c, 32)
}

// A client whose library maps its queues gets the file of its context in the place
// of its command descriptor, and is told where each queue lies. Commands come
// through either file; the context ends with the later of them.
func TestMappedContext(t *testing.T) {
	g := newMappedRig(t)
	c := g.client(100)
	r := c.context()
	if g.opened[int(r.AsyncFD)] == nil || len(g.swapped) != 1 || len(g.maps.files) != 0 {
		t.Fatalf("%+v: %d swapped, %d files with a name", r, len(g.swapped), len(g.maps.files))
	}
	c.h.Release() // dup3 has closed the node's descriptor
	c.h = g.swapped[0]

	pd := c.pd()
	cq, cqAt := c.mappedCQ()
	qp, qpAt := c.mappedQP(pd, cq)
	c.cmd(0, abi.CmdCreateSRQ, 16+mmInfo+8, raw(abi.CreateSRQ{Response: resp, PDHandle: pd, MaxWR: 8, MaxSGE: 2}))
	srq, srqAt := out[abi.CreateSRQResp](c), tail[abi.RXECreateSRQResp](c, 16)
	seen := map[uint64]bool{}
	for name, mi := range map[string]abi.RXEMMInfo{"cq": cqAt, "rq": qpAt.RQ, "sq": qpAt.SQ, "srq": srqAt.MI} {
		if seen[mi.Offset] || len(g.lastMap().pieces[mi.Offset]) != int(mi.Size) || mi.Size == 0 {
			t.Errorf("%s: %+v is no queue of its own", name, mi)
		}
		seen[mi.Offset] = true
	}
	if qp.MaxSendWR != 15 || qp.MaxRecvWR != 15 {
		t.Errorf("sizes %+v", qp)
	}

	// An address handle has a number for the requests of the ring.
	c.cmd(0, abi.CmdCreateAH, 4+8, raw(abi.CreateAH{Response: resp, PDHandle: pd, Attr: abi.AHAttr{DLID: 1, PortNum: 1}}))
	ah, num := out[abi.CreateAHResp](c), tail[abi.RXECreateAHResp](c, 4)
	if num.AHNum == 0 {
		t.Error("address handle 0")
	}

	// Another size is another place.
	c.cmd(0, abi.CmdResizeCQ, 8+mmInfo, raw(abi.ResizeCQ{Response: resp, CQHandle: cq, CQE: 100}))
	if mi := tail[abi.RXEMMInfo](c, 8); mi.Offset == cqAt.Offset || out[abi.ResizeCQResp](c).CQE != 127 {
		t.Errorf("resized to %+v", mi)
	}
	const at = resp + 256
	c.cmd(0, abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: srq.SRQHandle, AttrMask: uint32(hca.SRQMaxWR), MaxWR: 40}), raw(abi.RXEModifySRQ{MMInfoAddr: at}))
	if mi := tail[abi.RXEMMInfo](c, at-resp); mi.Offset == srqAt.MI.Offset || mi.Size == 0 {
		t.Errorf("SRQ resized to %+v", mi)
	}
	c.cmd(unix.EINVAL, abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: srq.SRQHandle, AttrMask: uint32(hca.SRQMaxWR), MaxWR: 80}))
	c.cmd(unix.EFAULT, abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: srq.SRQHandle, AttrMask: uint32(hca.SRQMaxWR), MaxWR: 80}), raw(abi.RXEModifySRQ{MMInfoAddr: 8}))

	// The doorbell writes nothing into the client.
	c.connect(qp.QPHandle, qp.QPN, 1)
	writes := g.writes.Load()
	c.cmd(0, abi.CmdPostSend, 4, raw(abi.PostSend{Response: resp, QPHandle: qp.QPHandle, WQESize: 128}))
	if g.writes.Load() != writes {
		t.Error("a doorbell writes into its client")
	}

	c.cmd(0, abi.CmdDestroyAH, 0, raw(abi.Handle{Handle: ah.AHHandle}))
	c.cmd(0, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: qp.QPHandle}))
	c.cmd(0, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: cq}))
	c.cmd(0, abi.CmdDestroySRQ, 4, raw(abi.DestroyQP{Response: resp, QPHandle: srq.SRQHandle}))
	if g.maps.bytes != 0 {
		t.Errorf("%d bytes of queues left", g.maps.bytes)
	}
	_, last := c.mappedCQ() // for the end to find
	kept := g.lastMap().pieces[last.Offset]
	c.h.Release()
	// No bound knows any more of what the client keeps mapped: there is nothing in it.
	if len(bytes.Trim(kept, "\x00")) > 0 {
		t.Error("a context's memory outlives it")
	}
	if g.maps.live != 0 || g.maps.bytes != 0 {
		t.Errorf("%d files, %d bytes left", g.maps.live, g.maps.bytes)
	}
	g.empty()
}

// A step that fails leaves nothing: neither of a queue's memory nor of a context.
func TestMappedUndo(t *testing.T) {
	g := newMappedRig(t)
	c := g.client(100)
	g.hide = true // the path leads nowhere in the client's mount namespace
	c.write(pack(abi.CmdGetContext, 8, raw(abi.GetContext{Response: resp})))
	if n := g.undone.Load(); n != 1 || g.maps.live != 0 {
		t.Fatalf("%d undone, %d files", n, g.maps.live)
	}
	g.hide = false
	c.context()
	pd := c.pd()
	cq, _ := c.mappedCQ()
	before := g.maps.bytes
	for _, tc := range []struct {
		name string
		want unix.Errno
		num  uint32
		out  int
		body []byte
	}{
		{"cq without room for the answer", unix.EINVAL, abi.CmdCreateCQ, 8, raw(abi.CreateCQ{Response: resp, CQE: 4, CompChannel: -1})},
		{"cq of nothing", unix.EINVAL, abi.CmdCreateCQ, 24, raw(abi.CreateCQ{Response: resp, CompChannel: -1})},
		{"cq answered nowhere", unix.EFAULT, abi.CmdCreateCQ, 24, raw(abi.CreateCQ{CQE: 4, CompChannel: -1})},
		{"resize without room", unix.EINVAL, abi.CmdResizeCQ, 8, raw(abi.ResizeCQ{Response: resp, CQHandle: cq, CQE: 100})},
		{"qp without room", unix.EINVAL, abi.CmdCreateQP, 32 + mmInfo, raw(abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: uint8(hca.QPTypeRC)})},
		{"qp answered nowhere", unix.EFAULT, abi.CmdCreateQP, 64, raw(abi.CreateQP{PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: uint8(hca.QPTypeRC)})},
		{"srq without room", unix.EINVAL, abi.CmdCreateSRQ, 16, raw(abi.CreateSRQ{Response: resp, PDHandle: pd, MaxWR: 1, MaxSGE: 1})},
		{"srq of nothing", unix.EINVAL, abi.CmdCreateSRQ, 40, raw(abi.CreateSRQ{Response: resp, PDHandle: pd})},
	} {
		c.cmd(tc.want, tc.num, tc.out, tc.body)
		if g.maps.bytes != before {
			t.Errorf("%s: %d bytes of queues, then %d", tc.name, before, g.maps.bytes)
		}
	}
	g.swapped[0].Release()
	c.h.Release()
	g.empty()
}

// Only the thread that is steered opens the file of a context, and once.
func TestMappedFileIsOpenedOnce(t *testing.T) {
	g := newMappedRig(t)
	c := g.client(100)
	other := g.client(200)
	g.beforeOpen = func() { // the file is there already
		for tid, want := range map[int]error{200: unix.EACCES, 101: unix.EACCES} {
			if _, err := g.lastMap().open(newRequest(tid)); !errors.Is(err, want) {
				t.Errorf("thread %d: %v", tid, err)
			}
		}
	}
	c.context()
	if _, err := g.lastMap().open(newRequest(100)); !errors.Is(err, unix.EACCES) {
		t.Errorf("a second open: %v", err)
	}
	g.swapped[0].Release()
	c.h.Release()
	other.h.Release()
	g.empty()
}

// Failure class 25: a client that cannot be seized opens the device, and is told
// that it cannot have queues.
func TestRow25NoMapping(t *testing.T) {
	g := newMappedRig(t)
	g.seized = errors.New("traced by pid 1")
	c := g.client(100)
	defer c.h.Release()
	if r := c.context(); r.AsyncFD != dispatch.NoFD || g.maps.live != 0 {
		t.Fatalf("async_fd %d, %d files", r.AsyncFD, g.maps.live)
	}
	c.pd()
	c.cmd(unix.EOPNOTSUPP, abi.CmdCreateCQ, 24, raw(abi.CreateCQ{Response: resp, CQE: 4, CompChannel: -1}))
}

// Failure class 28: a client that polls in memory asks nobody whether the device is
// still there. When it goes, what is posted is flushed, and every completion queue
// ends with an error; the memory stays as it is.
func TestRow28RemovalIsSeenInMappedQueues(t *testing.T) {
	g := newMappedRig(t)
	c := g.client(100)
	c.context()
	pd := c.pd()
	cq, at := c.mappedCQ()
	_, idle := c.mappedCQ()
	qp, _ := c.mappedQP(pd, cq)
	c.connect(qp.QPHandle, qp.QPN, 1)
	ring, other := g.lastMap().pieces[at.Offset], g.lastMap().pieces[idle.Offset]
	g.dev.Remove()
	for name, b := range map[string][]byte{"with a queue pair": ring, "idle": other} {
		head := (*abi.RXEQueueBuf)(unsafe.Pointer(&b[0]))
		if head.ProducerIndex == 0 {
			t.Fatalf("%s: nothing to poll", name)
		}
		last := (*abi.WC)(unsafe.Pointer(&b[unsafe.Sizeof(*head)+uintptr(head.ProducerIndex-1)<<head.Log2ElemSize]))
		if last.Status != uint32(hca.WCFatalErr) {
			t.Errorf("%s: the last completion is %+v", name, *last)
		}
	}
	g.swapped[0].Release()
	c.h.Release()
	g.empty()
}
