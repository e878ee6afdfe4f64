package dispatch_test

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

// Failure class 8: each bound of a context and of a user, and that others are
// not held to it.
func TestRow8Limits(t *testing.T) {
	bounds := dispatch.Bounds{PDs: 2, MRs: 2, MWs: 2, AHs: 2, CQs: 2, QPs: 2, SRQs: 2, XRCDs: 2, CompChannels: 2}
	full := dispatch.Bounds{PDs: 2, MRs: 2, MWs: 2, AHs: 2, CQs: 2, QPs: 3, SRQs: 2, XRCDs: 2} // a stocked client has two QPs
	for _, tc := range []struct {
		name   string
		limits dispatch.Limits
	}{
		{"context", dispatch.Limits{Context: full}},
		{"user", dispatch.Limits{User: full}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := newRigWith(t, tc.limits)
			c, s := g.stocked(100) // one of each, and a UD QP
			for _, cr := range creates(s) {
				kept := []uint32{}
				for {
					a := c.write(cr.command)
					if a.errno != 0 {
						if a.errno != unix.ENOMEM {
							t.Errorf("%s: %v", cr.name, a.errno)
						}
						break
					}
					if kept = append(kept, c.newHandle(cr)); len(kept) > 4 {
						t.Fatalf("%s: no bound", cr.name)
					}
				}
				if len(kept) != 1 {
					t.Errorf("%s: %d more than the stock", cr.name, len(kept))
				}
				for _, h := range kept {
					c.destroyed(0, cr.kind, h)
				}
			}
			c.h.Release()
			g.empty()
		})
	}
	t.Run("channels", func(t *testing.T) {
		g := newRigWith(t, dispatch.Limits{Context: bounds})
		c := g.client(100)
		c.context()
		channel := func(want unix.Errno) int {
			t.Helper()
			c.cmd(want, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
			return int(out[abi.CreateCompChannelResp](c).FD)
		}
		first := channel(0)
		channel(0)
		channel(unix.ENOMEM)
		g.opened[first].Release()
		channel(0)
		channel(unix.ENOMEM)
		c.h.Release()
		g.empty()
	})
	t.Run("pinned", func(t *testing.T) {
		for _, l := range []dispatch.Limits{{Context: dispatch.Bounds{PinnedBytes: 2 * page}}, {User: dispatch.Bounds{PinnedBytes: 2 * page}}} {
			g := newRigWith(t, l)
			c := g.client(100)
			c.context()
			pd := c.pd()
			const rw = 0x10000 + 4*page
			mr := c.mr(pd, rw, 2*page, 0)
			c.cmd(unix.ENOMEM, abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: rw, HCAVA: rw, Length: 1, PDHandle: pd}))
			c.destroyed(0, "mr", mr.MRHandle)
			c.mr(pd, rw, page, 0)
			c.h.Release()
			g.empty()
		}
	})
	t.Run("depth and bytes", func(t *testing.T) {
		g := newRigWith(t, dispatch.Limits{Context: dispatch.Bounds{QueueDepth: 64, QueueBytes: 20000}})
		c := g.client(100)
		c.context()
		pd, cq := c.pd(), c.cq(-1)
		for _, tc := range []struct {
			name string
			b    []byte
			want unix.Errno
		}{
			{"cq", pack(abi.CmdCreateCQ, 8, raw(abi.CreateCQ{Response: resp, CQE: 65, CompChannel: -1})), unix.ENOMEM},
			{"resize", pack(abi.CmdResizeCQ, 8, raw(abi.ResizeCQ{Response: resp, CQHandle: cq, CQE: 65})), unix.ENOMEM},
			{"resize less", pack(abi.CmdResizeCQ, 8, raw(abi.ResizeCQ{Response: resp, CQHandle: cq, CQE: 64})), 0},
			{"srq", pack(abi.CmdCreateSRQ, 16, raw(abi.CreateSRQ{Response: resp, PDHandle: pd, MaxWR: 65, MaxSGE: 1})), unix.ENOMEM},
			{"small srq", pack(abi.CmdCreateSRQ, 16, raw(abi.CreateSRQ{Response: resp, PDHandle: pd, MaxWR: 1, MaxSGE: 32})), 0}, // handle 2
			{"srq deeper than a queue may be", pack(abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: 2, AttrMask: 1, MaxWR: 65})), unix.ENOMEM},
			{"srq that costs too much", pack(abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: 2, AttrMask: 1, MaxWR: 64})), unix.ENOMEM},
			{"srq within", pack(abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: 2, AttrMask: 1, MaxWR: 2})), 0},
			{"srq deeper than the device's", pack(abi.CmdModifySRQ, 0, raw(abi.ModifySRQ{SRQHandle: 2, AttrMask: 1, MaxWR: ^uint32(0)})), unix.EINVAL},
			{"qp", pack(abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, MaxSendWR: 65, MaxSendSGE: 1, QPType: 2})), unix.ENOMEM},
			{"qp that costs too much", pack(abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 16, MaxRecvSGE: 16, QPType: 2})), unix.ENOMEM},
			{"small qp", pack(abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, MaxSendWR: 4, MaxSendSGE: 1, QPType: 2})), 0},
		} {
			if a := c.write(tc.b); a.errno != tc.want {
				t.Errorf("%s: %v, want %v", tc.name, a.errno, tc.want)
			}
		}
		c.h.Release()
		g.empty()
	})
	t.Run("events", func(t *testing.T) {
		g := newRig(t)
		c := g.client(100)
		async := g.opened[int(c.context().AsyncFD)]
		pd, cq := c.pd(), c.cq(-1)
		for range 4 {
			qp := c.qp(pd, cq, hca.QPTypeRC)
			c.connect(qp.QPHandle, qp.QPN, 1)
			c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp.QPHandle, QPState: uint8(hca.QPSQD), EnSQDAsyncNotify: 1,
				AttrMask: uint32(hca.QPMaskState | hca.QPMaskEnSQDAsyncNotify)}))
		}
		for range 2 { // two are read, two go with the file
			r := newRequest(100)
			async.Read(r, 16)
			<-r.ch
		}
		other := g.client(200) // keeps the user's account
		c.h.Release()
		async.Release()
		if n := g.users.Held(1000); n != 0 {
			t.Errorf("%d bytes charged to the user", n)
		}
		other.h.Release()
		g.empty()
	})
	t.Run("contexts of all devices", func(t *testing.T) {
		g := newRig(t)
		g.users.Most(2)
		a, b := g.client(100), g.client(200)
		if _, err := g.dev.Open(newRequest(100)); !errors.Is(err, unix.ENFILE) {
			t.Errorf("a third context: %v", err)
		}
		g.dev.Remove() // files that are open count as before
		second := dispatch.NewDevice(dispatch.Config{HCA: g.hca, System: g.machine, Pins: &g.pins, Users: g.users})
		if _, err := second.Open(newRequest(100)); !errors.Is(err, unix.ENFILE) {
			t.Errorf("on another device: %v", err)
		}
		a.h.Release()
		h, err := second.Open(newRequest(100))
		if err != nil {
			t.Fatal(err)
		}
		h.Release()
		b.h.Release()
		g.empty()
	})
	t.Run("contexts", func(t *testing.T) {
		g := newRigWith(t, dispatch.Limits{User: dispatch.Bounds{Contexts: 2}})
		a, b := g.client(100), g.client(100)
		if _, err := g.dev.Open(newRequest(100)); err == nil {
			t.Error("a third context")
		}
		a.h.Release()
		g.client(100).h.Release()
		b.h.Release()
		g.empty()
	})
}
