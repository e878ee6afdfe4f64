package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/cusetest"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/soft"
	"github.com/uverbsd/uverbsd/pin"
)

// self is a client of a whole daemon that lives in its process: session,
// dispatch, engine and cuse/caller are the real ones, the kernel is cusetest's.
type self struct {
	b      testing.TB
	k      *cusetest.Raw
	mem    []byte // what the responses and regions lie in
	unique uint64
	fh     uint64
	reply  [64]byte
}

func newSelf(b testing.TB) *self {
	b.Helper()
	engine, err := soft.New(loop.New(hca.LinkInfiniBand), soft.Config{GUID: hca.GUID{7: 1}})
	if err != nil {
		b.Fatal(err)
	}
	var pins pin.Accountant
	dev := dispatch.NewDevice(dispatch.Config{HCA: engine, System: system{}, Pins: &pins, Users: dispatch.NewUsers(dispatch.Limits{}), Notify: func(uint64) {}})
	s := &self{b: b, k: cusetest.NewRaw(b, &node{dev: dev}, cuse.Config{}), unique: 2}
	if s.mem, err = unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		b.Fatal(err)
	}
	if err := s.k.Handshake(); err != nil {
		b.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.k.Session.Serve() }()
	b.Cleanup(func() {
		s.k.Close()
		if err := <-served; err != nil {
			b.Error(err)
		}
		_ = engine.Close()
		_ = unix.Munmap(s.mem)
	})
	s.open()
	return s
}

// open opens the device and makes a context.
func (s *self) open() {
	s.send(abi.FuseOpen, make([]byte, 8))
	s.fh = binary.NativeEndian.Uint64(s.reply[16:])
	s.write(legacy(abi.CmdGetContext, 8, s.addr(0)))
}

// close is the last close of the file.
func (s *self) close() {
	in := make([]byte, 24)
	binary.NativeEndian.PutUint64(in, s.fh)
	s.send(abi.FuseRelease, in)
}

func (s *self) addr(at int) uint64 { return uint64(uintptr(unsafe.Pointer(&s.mem[at]))) }

// send makes one request and waits for its answer.
func (s *self) send(op uint32, parts ...[]byte) {
	s.unique += 2
	h := abi.FuseInHeader{Opcode: op, Unique: s.unique, UID: uint32(unix.Getuid()), GID: uint32(unix.Getgid()), PID: uint32(unix.Getpid())}
	if err := s.k.Send(cusetest.Message(h, parts...)); err != nil {
		s.b.Fatal(err)
	}
	if _, err := s.k.Recv(s.reply[:]); err != nil {
		s.b.Fatal(err)
	}
	if errno := -int32(binary.NativeEndian.Uint32(s.reply[4:])); errno != 0 {
		s.b.Fatalf("request %d: %v", op, unix.Errno(errno))
	}
}

func (s *self) write(cmd []byte) {
	in := make([]byte, 40)
	binary.NativeEndian.PutUint64(in, s.fh)
	binary.NativeEndian.PutUint32(in[16:], uint32(len(cmd)))
	s.send(abi.FuseWrite, in, cmd)
}

// handle is the first word of the response.
func (s *self) handle() uint64 { return uint64(binary.NativeEndian.Uint32(s.mem)) }

// legacy builds a command of 64-bit words.
func legacy(num uint32, outBytes int, words ...uint64) []byte {
	b := make([]byte, 8, 8+8*len(words))
	for _, w := range words {
		b = binary.NativeEndian.AppendUint64(b, w)
	}
	binary.NativeEndian.PutUint32(b, num)
	binary.NativeEndian.PutUint16(b[4:], uint16(len(b)/4))
	binary.NativeEndian.PutUint16(b[6:], uint16(outBytes/4))
	return b
}

// destroy4 is a command of one handle, 4 bytes.
func destroy4(num uint32, handle uint64) []byte {
	b := legacy(num, 0, handle)[:12]
	binary.NativeEndian.PutUint16(b[4:], 3)
	return b
}

// BenchmarkObjects is a create and a destroy through session, dispatch, engine and
// the client's memory, with so many objects of the kind alive. The ratio is to
// two commands that do nothing, in the same run.
func BenchmarkObjects(b *testing.B) {
	kinds := []struct {
		name    string
		create  func(s *self, pd, cq uint64) []byte
		destroy func(s *self, h uint64) []byte
	}{
		{"PD", func(s *self, _, _ uint64) []byte { return legacy(abi.CmdAllocPD, 4, s.addr(0)) },
			func(_ *self, h uint64) []byte { return destroy4(abi.CmdDeallocPD, h) }},
		{"MR", func(s *self, pd, _ uint64) []byte {
			return legacy(abi.CmdRegMR, 12, s.addr(0), s.addr(4096), 4096, s.addr(4096), pd|1<<32)
		}, func(_ *self, h uint64) []byte { return destroy4(abi.CmdDeregMR, h) }},
		{"CQ", func(s *self, _, _ uint64) []byte { return legacy(abi.CmdCreateCQ, 8, s.addr(0), 0, 16, 0xffffffff) },
			func(s *self, h uint64) []byte { return legacy(abi.CmdDestroyCQ, 8, s.addr(64), h) }},
		{"QP", func(s *self, pd, cq uint64) []byte {
			// user_handle, pd|send cq, recv cq|srq, send wr|recv wr, send sge|recv sge, inline|sig_all type is_srq
			return legacy(abi.CmdCreateQP, 32, s.addr(0), 0, pd|cq<<32, cq, 4|4<<32, 1|1<<32, 2<<40)
		}, func(s *self, h uint64) []byte { return legacy(abi.CmdDestroyQP, 4, s.addr(64), h) }},
	}
	for _, k := range kinds {
		for _, live := range []int{10, 10_000, 100_000} {
			b.Run(fmt.Sprintf("%s/live=%d", k.name, live), func(b *testing.B) {
				s := newSelf(b)
				s.write(legacy(abi.CmdAllocPD, 4, s.addr(0)))
				pd := s.handle()
				s.write(legacy(abi.CmdCreateCQ, 8, s.addr(0), 0, 16, 0xffffffff))
				cq := s.handle()
				for range live {
					s.write(k.create(s, pd, cq))
				}
				b.ReportAllocs()
				b.ResetTimer()
				for range b.N {
					s.write(k.create(s, pd, cq))
					s.write(k.destroy(s, s.handle()))
				}
				b.StopTimer()
				start := time.Now()
				for range 2 * b.N { // REQ_NOTIFY_CQ: the cheapest that succeeds
					s.write(legacy(abi.CmdReqNotifyCQ, 0, cq))
				}
				b.ReportMetric(float64(b.Elapsed())/float64(time.Since(start)), "ratio")
			})
		}
	}
}

// resting is what tables may grow by while numbers rest, in bytes.
const resting = 4 << 20

// rounds of TestRow29OpenClose; the row asks for 10⁵, which takes a minute.
const rounds = 2000

// Failure class 29: opening and closing costs neither memory nor descriptors.
func TestRow29OpenClose(t *testing.T) {
	s := newSelf(t)
	measure := func() (heap uint64, fds int) {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return m.HeapAlloc, len(d)
	}
	churn := func(n int) {
		for range n {
			s.close()
			s.open()
			s.write(legacy(abi.CmdAllocPD, 4, s.addr(0)))
			pd := s.handle()
			s.write(legacy(abi.CmdRegMR, 12, s.addr(0), s.addr(4096), 4096, s.addr(4096), pd|1<<32))
		}
	}
	churn(200)
	heap, fds := measure()
	churn(rounds)
	after, fdsAfter := measure()
	t.Logf("%d rounds: heap %d, then %d bytes; descriptors %d, then %d", rounds, heap, after, fds, fdsAfter)
	// Keys and numbers of regions rest before they come again (hca/soft, mrRest):
	// that memory grows to a bound.
	if fdsAfter > fds || after > heap+resting {
		t.Error("something stays")
	}
}
