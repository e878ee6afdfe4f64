package soft_test

import (
	"fmt"
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/hcatest"
	"github.com/uverbsd/uverbsd/hca/roce/rocetest"
	"github.com/uverbsd/uverbsd/hca/soft"
)

// BenchmarkWire is one message at a time, and 16, over a network in memory: what the
// engine and the packets cost without a NIC.
func BenchmarkWire(b *testing.B) {
	const room = 1 << 20
	for _, c := range []struct {
		name string
		op   hca.SendOpcode
		n    int
	}{
		{"send64", hca.OpSend, 64}, {"send4K", hca.OpSend, 4096}, {"send64K", hca.OpSend, 65536},
		{"write1M", hca.OpRDMAWrite, 1 << 20}, {"read1M", hca.OpRDMARead, 1 << 20},
	} {
		for _, depth := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s/depth%d", c.name, depth), func(b *testing.B) {
				pair, links := wired(b, rocetest.Config{})
				var ends [2]*modelEnd
				for i, d := range []hca.Device{pair.A, pair.B} {
					e := &modelEnd{t: b, dev: d.(*soft.Device), gid: links[i].IPv4(), mem: hcatest.NewMem(hostBase, room)}
					e.ctx = ok(d.AllocUContext(nil))(b)
					e.pd = ok(e.ctx.AllocPD())(b)
					e.s = ok(e.ctx.CreateCQ(hca.CQInit{Entries: 64}))(b)
					e.r = ok(e.ctx.CreateCQ(hca.CQInit{Entries: 64}))(b)
					e.mr = ok(e.pd.RegMR(hca.MRInit{Mem: e.mem, Start: hostBase, Length: room, IOVA: hostBase, Access: hostAcc}))(b)
					e.qp = ok(e.pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: e.s, RecvCQ: e.r, Cap: hca.QPCap{MaxSendWR: 32, MaxRecvWR: 32, MaxSendSGE: 1, MaxRecvSGE: 1}}))(b)
					ends[i] = e
					b.Cleanup(func() {
						e.qp.Close()
						e.mr.Close()
						e.s.Close()
						e.r.Close()
						e.pd.Close()
						e.ctx.Close()
					})
				}
				x, y := ends[0], ends[1]
				x.connect(y, hca.QPTypeRC, [2]uint32{1, 1}, 5)
				y.connect(x, hca.QPTypeRC, [2]uint32{1, 1}, 5)
				send := []hca.SendWR{{Opcode: c.op, Flags: hca.SendSignaled, SGE: []hca.SGE{{Addr: hostBase, Length: uint32(c.n), LKey: x.mr.LKey()}}, RemoteAddr: hostBase, RKey: y.mr.RKey()}}
				recv := []hca.RecvWR{{SGE: []hca.SGE{{Addr: hostBase, Length: uint32(c.n), LKey: y.mr.LKey()}}}}
				w := wakes(make(chan struct{}, 1))
				var wc [1]hca.WC
				wait := func(cq hca.CQ) {
					for cq.Poll(wc[:]) == 0 {
						if cq.Await(w) {
							<-w
						}
					}
					if wc[0].Status != hca.WCSuccess {
						b.Fatalf("completion %+v", wc[0])
					}
				}
				b.SetBytes(int64(c.n))
				b.ReportAllocs()
				b.ResetTimer()
				sent := 0
				for i := range b.N {
					for ; sent < b.N && sent < i+depth; sent++ {
						if c.op == hca.OpSend {
							if _, err := y.qp.PostRecv(recv); err != nil {
								b.Fatal(err)
							}
						}
						if _, err := x.qp.PostSend(send); err != nil {
							b.Fatal(err)
						}
						x.qp.Run()
					}
					wait(x.s)
					if c.op == hca.OpSend {
						wait(y.r)
					}
				}
			})
		}
	}
}
