package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse/caller"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
)

const (
	// arenaEnv makes this test binary a process that has memory and waits.
	arenaEnv  = "UVERBSD_TEST_ARENA"
	arenaSize = 8 << 20
)

func TestMain(m *testing.M) {
	if os.Getenv(arenaEnv) != "" {
		arena()
		return
	}
	os.Exit(m.Run())
}

// arena is another process's main: its memory's address, then the end of stdin.
func arena() {
	mem, err := unix.Mmap(-1, 0, arenaSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(uintptr(unsafe.Pointer(&mem[0])))
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// remote is a process whose memory the engine reaches as a client's.
type remote struct {
	pid  int
	addr uint64
	proc *caller.Process
}

func startRemote(t testing.TB) *remote {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), arenaEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	r := &remote{pid: cmd.Process.Pid}
	_, err = fmt.Fscan(bufio.NewReader(out), &r.addr)
	must(t, err)
	r.proc, err = caller.OpenProcess(r.pid)
	must(t, err)
	t.Cleanup(r.proc.Put)
	return r
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// party is a client of an engine whose memory is a process's.
type party struct {
	pd hca.PD
	cq hca.CQ
	mr hca.MR
	m  *remote

	bell bell
}

func newParty(t testing.TB, d hca.Device, r *remote) *party {
	t.Helper()
	c, err := d.AllocUContext(nil)
	must(t, err)
	p := &party{m: r, bell: make(bell, 1)}
	p.pd, err = c.AllocPD()
	must(t, err)
	p.cq, err = c.CreateCQ(hca.CQInit{Entries: 4096})
	must(t, err)
	p.mr, err = p.pd.RegMR(hca.MRInit{Mem: r.proc, Start: r.addr, Length: arenaSize, IOVA: r.addr,
		Access: hca.AccessLocalWrite | hca.AccessRemoteWrite | hca.AccessRemoteRead})
	must(t, err)
	t.Cleanup(func() {
		must(t, p.mr.Close())
		must(t, p.cq.Close())
		must(t, p.pd.Close())
		must(t, c.Close())
	})
	return p
}

func (p *party) qp(t testing.TB) hca.QP {
	t.Helper()
	q, err := p.pd.CreateQP(hca.QPInit{Type: hca.QPTypeRC, SendCQ: p.cq, RecvCQ: p.cq,
		Cap: hca.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1}})
	must(t, err)
	t.Cleanup(func() { must(t, q.Close()) })
	return q
}

// joined are two QPs connected to each other.
func joined(t testing.TB, a, b *party) (hca.QP, hca.QP) {
	t.Helper()
	qa, qb := a.qp(t), b.qp(t)
	for _, p := range [][2]hca.QP{{qa, qb}, {qb, qa}} {
		must(t, p[0].Modify(&hca.QPAttr{State: hca.QPInitState, Port: 1, Access: hca.AccessRemoteWrite | hca.AccessRemoteRead},
			hca.QPMaskState|hca.QPMaskPKeyIndex|hca.QPMaskPort|hca.QPMaskAccess))
		must(t, p[0].Modify(&hca.QPAttr{State: hca.QPRTR, PathMTU: 5, DestQPN: p[1].Num(), AH: hca.AHAttr{DLID: 1, Port: 1}, MaxDestRdAtomic: 4, MinRNRTimer: 12},
			hca.QPMaskState|hca.QPMaskAV|hca.QPMaskPathMTU|hca.QPMaskDestQPN|hca.QPMaskRQPSN|hca.QPMaskMaxDestRdAtomic|hca.QPMaskMinRNRTimer))
		must(t, p[0].Modify(&hca.QPAttr{State: hca.QPRTS, Timeout: 14, RetryCnt: 7, RNRRetry: 7, MaxRdAtomic: 4},
			hca.QPMaskState|hca.QPMaskSQPSN|hca.QPMaskTimeout|hca.QPMaskRetryCnt|hca.QPMaskRNRRetry|hca.QPMaskMaxRdAtomic))
	}
	return qa, qb
}

func benchDevice(t testing.TB) *soft.Device {
	t.Helper()
	d, err := soft.New(loop.New(hca.LinkInfiniBand), soft.Config{GUID: hca.GUID{7: 1}})
	must(t, err)
	t.Cleanup(func() { must(t, d.Close()) })
	return d
}

// writeOne is one RDMA write of n bytes from a's memory to b's, from post to
// completion.
func writeOne(t testing.TB, q hca.QP, a, b *party, wr []hca.SendWR, wc []hca.WC, n int) {
	wr[0] = hca.SendWR{Opcode: hca.OpRDMAWrite, Flags: hca.SendSignaled, SGE: wr[0].SGE[:1], RemoteAddr: b.m.addr, RKey: b.mr.RKey()}
	wr[0].SGE[0] = hca.SGE{Addr: a.m.addr, Length: uint32(n), LKey: a.mr.LKey()}
	if _, err := q.PostSend(wr); err != nil {
		t.Fatal(err)
	}
	q.Run()
	for a.cq.Poll(wc) == 0 { // the largest are copied by workers
		if a.cq.Await(a.bell) {
			<-a.bell
		}
	}
	if wc[0].Status != hca.WCSuccess {
		t.Fatalf("completion %+v", wc[0])
	}
}

// plainCopy is the same without an engine: one system call to read the bytes,
// one to write them.
func plainCopy(t testing.TB, a, b *remote, buf []byte) {
	local := []unix.Iovec{{Base: &buf[0], Len: uint64(len(buf))}}
	from := []unix.RemoteIovec{{Base: uintptr(a.addr), Len: len(buf)}}
	to := []unix.RemoteIovec{{Base: uintptr(b.addr), Len: len(buf)}}
	if n, err := unix.ProcessVMReadv(a.pid, local, from, 0); err != nil || n != len(buf) {
		t.Fatal(n, err)
	}
	if n, err := unix.ProcessVMWritev(b.pid, local, to, 0); err != nil || n != len(buf) {
		t.Fatal(n, err)
	}
}

// BenchmarkTwoProcesses is RDMA writes between two processes' memory, beside
// process_vm_readv and writev of the same bytes in turns: the ratio is of the
// tenth-quickest parts, which other load of the machine touches least.
func BenchmarkTwoProcesses(b *testing.B) {
	d := benchDevice(b)
	x, y := newParty(b, d, startRemote(b)), newParty(b, d, startRemote(b))
	q, _ := joined(b, x, y)
	wr, wc := []hca.SendWR{{SGE: make([]hca.SGE, 1)}}, make([]hca.WC, 4)
	for _, n := range []int{64, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			buf := make([]byte, n)
			var ours, plain []time.Duration
			b.SetBytes(int64(n))
			for b.Loop() {
				t := time.Now()
				writeOne(b, q, x, y, wr, wc, n)
				u := time.Now()
				plainCopy(b, x.m, y.m, buf)
				ours, plain = append(ours, u.Sub(t)), append(plain, time.Since(u))
			}
			o, p := tenth(ours), tenth(plain)
			b.ReportMetric(float64(p)/float64(o), "of-plain")
			b.ReportMetric(1/o.Seconds(), "msg/s")
			b.ReportMetric(float64(n)/o.Seconds()/1e6, "engine-MB/s")
		})
	}
}

func tenth(d []time.Duration) time.Duration {
	slices.Sort(d)
	return max(d[len(d)/10], 1)
}

// BenchmarkManyQPs is 64-byte writes in turns over so many QPs.
func BenchmarkManyQPs(b *testing.B) {
	d := benchDevice(b)
	x, y := newParty(b, d, startRemote(b)), newParty(b, d, startRemote(b))
	wr, wc := []hca.SendWR{{SGE: make([]hca.SGE, 1)}}, make([]hca.WC, 4)
	for _, n := range []int{1, 8, 64, 1024} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			qs := make([]hca.QP, n)
			for i := range qs {
				qs[i], _ = joined(b, x, y)
			}
			i := 0
			var took []time.Duration
			b.ReportAllocs()
			for b.Loop() {
				t := time.Now()
				for range 16 {
					writeOne(b, qs[i%n], x, y, wr, wc, 64)
					i++
				}
				took = append(took, time.Since(t))
			}
			b.ReportMetric(float64(tenth(took))/16, "ns/msg")
		})
	}
}

// BenchmarkBesideLarge is 64-byte writes of one client, alone and while another
// keeps 24 QPs busy with writes of 7.5 MiB.
func BenchmarkBesideLarge(b *testing.B) {
	const hogs, hogBytes = 24, 7680 << 10
	for _, beside := range []bool{false, true} {
		b.Run(fmt.Sprintf("beside=%v", beside), func(b *testing.B) {
			d := benchDevice(b)
			x, y := newParty(b, d, startRemote(b)), newParty(b, d, startRemote(b))
			q, _ := joined(b, x, y)
			if beside {
				stop := startHogs(b, d, hogs, hogBytes)
				defer stop()
			}
			wr, wc := []hca.SendWR{{SGE: make([]hca.SGE, 1)}}, make([]hca.WC, 4)
			var took []time.Duration
			for b.Loop() {
				t := time.Now()
				writeOne(b, q, x, y, wr, wc, 64)
				took = append(took, time.Since(t))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2])/1e3, "median-us")
			b.ReportMetric(float64(took[len(took)*99/100])/1e3, "p99-us")
		})
	}
}

// startHogs keeps n QPs writing; the returned function ends them.
func startHogs(t testing.TB, d hca.Device, n, bytes int) func() {
	x, y := newParty(t, d, startRemote(t)), newParty(t, d, startRemote(t))
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range n {
		own := &party{pd: x.pd, mr: x.mr, m: x.m}
		c, err := d.AllocUContext(nil)
		must(t, err)
		own.cq, err = c.CreateCQ(hca.CQInit{Entries: 16})
		must(t, err)
		t.Cleanup(func() { must(t, own.cq.Close()); must(t, c.Close()) })
		q, _ := joined(t, own, y)
		wg.Add(1)
		go func() {
			defer wg.Done()
			w := make(bell, 1)
			wc := make([]hca.WC, 1)
			for !stop.Load() {
				_, err := q.PostSend([]hca.SendWR{{Opcode: hca.OpRDMAWrite, Flags: hca.SendSignaled, RemoteAddr: y.m.addr, RKey: y.mr.RKey(),
					SGE: []hca.SGE{{Addr: x.m.addr, Length: uint32(bytes), LKey: x.mr.LKey()}}}})
				if err != nil {
					t.Error(err)
					return
				}
				q.Run()
				for own.cq.Poll(wc) == 0 {
					if own.cq.Await(w) {
						<-w
					}
				}
			}
		}()
	}
	return func() { stop.Store(true); wg.Wait() }
}

// bell is a hca.Waiter.
type bell chan struct{}

func (b bell) Wake(bool) { b <- struct{}{} }
