package dispatch_test

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/provider/qib"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
	"github.com/uverbsd/uverbsd/hca/soft"
	"github.com/uverbsd/uverbsd/pin"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is a client's address space: [base, base+len) is mapped, the first
// page of it read only.
type memory struct {
	mu   sync.Mutex
	base uint64
	b    []byte
}

const page = 4096

func (m *memory) in(addr, n uint64) bool {
	return addr >= m.base && n <= uint64(len(m.b)) && addr-m.base <= uint64(len(m.b))-n
}

func (m *memory) ReadAt(p []byte, addr uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.in(addr, uint64(len(p))) {
		return unix.EFAULT
	}
	copy(p, m.b[addr-m.base:])
	return nil
}

func (m *memory) WriteAt(p []byte, addr uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.in(addr, uint64(len(p))) || addr < m.base+page {
		return unix.EFAULT
	}
	copy(m.b[addr-m.base:], p)
	return nil
}

// process is a fake client process; pid is also the id of its first thread.
type process struct {
	memory
	pid    int
	limit  uint64
	refs   atomic.Int32
	execed atomic.Bool // it runs another image than the opener's
	// netRaw is CAP_NET_RAW.
	netRaw bool
	shared []hca.SharedPiece
	// checking runs once, inside the next CheckRange.
	checking func()
}

func (p *process) PID() int                      { return p.pid }
func (p *process) Name() string                  { return "fake" }
func (p *process) MemlockLimit() (uint64, error) { return p.limit, nil }
func (p *process) CanLockAny() bool              { return false }
func (p *process) CanNetRaw() bool               { return p.netRaw }
func (p *process) Key() string                   { return fmt.Sprint(p.pid) }
func (p *process) Get()                          { p.refs.Add(1) }
func (p *process) Put()                          { p.refs.Add(-1) }
func (p *process) SharedPieces(_, _ uint64) ([]hca.SharedPiece, error) {
	return p.shared, nil
}
func (p *process) CheckRange(addr, n uint64, write bool) error {
	if f := p.checking; f != nil {
		p.checking = nil
		f()
	}
	if !p.in(addr, n) || write && addr < p.base+page {
		return unix.EFAULT
	}
	return nil
}

// machine is the fake System: processes by pid, thread ids pid … pid+99.
type machine struct {
	dev    *dispatch.Device
	seized error  // what Install says
	noOpen error  // what Install's open says, if it does not reach the device
	letGo  func() // runs once, when Install has let the thread go and has not returned
	// beforeOpen runs once, between a command's announcement of its open and
	// the open.
	beforeOpen      func()
	undone          atomic.Int32 // installs that failed after the answer
	outer, finished chan struct{}
	nextFD          int
	procs           map[int]*process
	opened          map[int]dispatch.Handle // by the fd that Install made
	inodes          map[int32]uint64        // files that any client has open, by descriptor
	dups            map[int32]int32         // duplicates of descriptors
	behind          []byte                  // what lies behind a command in its buffer
	writes          atomic.Int32            // into clients
	stick           atomic.Pointer[func()]  // runs in each write into a client, if it is set
	held            atomic.Int32            // files that the device holds
	maps            fakeMaps
	hide            bool              // clients do not see the files of maps
	swapped         []dispatch.Handle // what has taken the place of command descriptors
}

// fakeMaps is a file system of contexts in plain memory.
type fakeMaps struct {
	n     int
	last  *fakeMap
	files map[string]*fakeMap // that have a name
	live  int
	bytes int // of all arenas
}

type fakeMap struct {
	m      *fakeMaps
	path   string
	open   func(dispatch.Request) (dispatch.Handle, error)
	next   uint64
	pieces map[uint64][]byte // by offset
}

func (m *fakeMaps) New(_, _ uint32, _ func(int) error, open func(dispatch.Request) (dispatch.Handle, error)) (dispatch.MapFile, error) {
	if m.files == nil {
		m.files = make(map[string]*fakeMap)
	}
	m.n++
	m.live++
	f := &fakeMap{m: m, path: fmt.Sprintf("/ctx/%d", m.n), open: open, pieces: make(map[uint64][]byte)}
	m.files[f.path], m.last = f, f
	return f, nil
}

func (g *rig) lastMap() *fakeMap { return g.maps.last }

func (f *fakeMap) Path() string { return f.path }
func (f *fakeMap) Unlink()      { delete(f.m.files, f.path) }

func (f *fakeMap) Close(keep bool) {
	f.m.live--
	for _, b := range f.pieces {
		f.m.bytes -= len(b)
		if !keep {
			clear(b)
		}
	}
}

func (f *fakeMap) Alloc(n int) ([]byte, uint64, error) {
	n = (n + 4095) &^ 4095
	b, off := make([]byte, n), f.next
	f.next += uint64(n)
	f.pieces[off] = b
	f.m.bytes += n
	return b, off, nil
}

func (f *fakeMap) Free(off uint64) {
	f.m.bytes -= len(f.pieces[off])
	delete(f.pieces, off)
}

// clientFile is a file of a client's that the device holds.
type clientFile struct {
	m   *machine
	ino uint64
}

func (f *clientFile) Key() dispatch.FileKey { return dispatch.FileKey{Dev: 1, Ino: f.ino} }
func (f *clientFile) Close()                { f.m.held.Add(-1) }

// ReadBehind finds what a test has put behind the command.
func (m *machine) ReadBehind(_, _ int, b []byte) error {
	if m.behind == nil {
		return unix.EFAULT
	}
	copy(b, m.behind)
	return nil
}

func (m *machine) SameFile(_ int, a, b int32) bool { return a == m.dups[b] || b == m.dups[a] }

func (m *machine) OpenFile(_ int, fd int32) (dispatch.ClientFile, error) {
	ino, ok := m.inodes[fd]
	if !ok {
		return nil, unix.EBADF
	}
	m.held.Add(1)
	return &clientFile{m, ino}, nil
}

func (m *machine) proc(tid int) *process { return m.procs[tid-tid%100] }

func (m *machine) OpenProcess(tid int) (dispatch.Process, error) {
	p := m.proc(tid)
	if p == nil {
		return nil, unix.EACCES
	}
	p.Get()
	return p, nil
}

type creds struct {
	pid    int
	execed *atomic.Bool
}

func (c creds) Check(tid int, _, _ uint32) error {
	if tid-tid%100 != c.pid {
		return unix.EACCES
	}
	return nil
}

func (c creds) CheckImage() error {
	if c.execed.Load() {
		return unix.EACCES
	}
	return nil
}

func (m *machine) Credentials(p dispatch.Process, _ int, _, _ uint32) (dispatch.Credentials, error) {
	return creds{p.PID(), &p.(*process).execed}, nil
}

func (m *machine) Read(tid int, b []byte, addr uint64) error { return m.proc(tid).ReadAt(b, addr) }
func (m *machine) Write(tid int, b []byte, addr uint64) error {
	m.writes.Add(1)
	if f := m.stick.Load(); f != nil {
		(*f)()
	}
	return m.proc(tid).WriteAt(b, addr)
}

type standing struct {
	m   *machine
	tid int
	fd  int
}

func (s standing) FD() int                           { return s.fd }
func (s standing) Write(b []byte, addr uint64) error { return s.m.Write(s.tid, b, addr) }

// Replace opens the file whose path is asked for, as a thread of the client.
func (s standing) Replace(path string, opened func() bool) error {
	f := s.m.maps.files[path]
	if f == nil || s.m.hide {
		return unix.ENOENT
	}
	h, err := f.open(newRequest(s.tid))
	if err != nil {
		return err
	}
	if !opened() {
		return unix.EBADF
	}
	s.m.swapped = append(s.m.swapped, h)
	return nil
}

func (m *machine) Install(tid int, ways func(int) []string, opened func() bool, answer func(), done func(dispatch.Standing, error) unix.Errno) error {
	if m.seized != nil {
		return m.seized
	}
	answer()
	m.nextFD++
	if f := m.beforeOpen; f != nil {
		m.beforeOpen = nil
		f()
	}
	var h dispatch.Handle
	err := m.noOpen
	if err == nil {
		h, err = m.dev.Open(newRequest(tid))
	}
	if err == nil {
		m.opened[m.nextFD] = h
	}
	if e := done(standing{m, tid, m.nextFD}, err); e != 0 {
		m.undone.Add(1)
	}
	if f := m.letGo; f != nil {
		m.letGo = nil
		f()
	}
	return nil
}

// answer is what a request was answered with.
type answer struct {
	errno   unix.Errno
	n       int
	data    []byte
	revents uint32
}

type request struct {
	tid       int
	flags     uint32
	ch        chan answer // capacity 2: a second reply is seen
	mu        sync.Mutex
	interrupt func()
	killed    atomic.Bool // the transport has answered for its handler
}

func newRequest(tid int) *request { return &request{tid: tid, ch: make(chan answer, 2)} }

func (r *request) TID() int                { return r.tid }
func (r *request) UID() uint32             { return 1000 }
func (r *request) GID() uint32             { return 1000 }
func (r *request) FileFlags() uint32       { return r.flags }
func (r *request) Detach()                 {}
func (r *request) Pending() bool           { return !r.killed.Load() && len(r.ch) == 0 }
func (r *request) ReplyError(e unix.Errno) { r.ch <- answer{errno: e} }
func (r *request) ReplyWrite(n int)        { r.ch <- answer{n: n} }
func (r *request) ReplyPoll(ev uint32)     { r.ch <- answer{revents: ev} }
func (r *request) ReplyRead(b []byte)      { r.ch <- answer{data: append([]byte(nil), b...)} }
func (r *request) OnInterrupt(f func()) {
	r.mu.Lock()
	r.interrupt = f
	r.mu.Unlock()
}

// rig is a device with the fakes around it.
type rig struct {
	*machine
	t      *testing.T
	engine *soft.Device
	hca    *faulty
	users  *dispatch.Users
	pins   pin.Accountant
	mu     sync.Mutex
	woken  map[uint64]int // notified kh
}

func newRig(t *testing.T) *rig { return newRigWith(t, dispatch.DefaultLimits()) }

func newRigWith(t *testing.T, limits dispatch.Limits) *rig {
	t.Helper()
	return newRigOn(t, loop.New(hca.LinkInfiniBand), 1, limits)
}

// newMappedRig is a rig whose clients map their queues, as librxe does.
func newMappedRig(t *testing.T) *rig {
	return newRigFor(t, rxe.Provider{}, loop.New(hca.LinkInfiniBand), 1, dispatch.DefaultLimits())
}

// newRigOn is a rig whose device is the nth on a fabric, with LID n.
func newRigOn(t *testing.T, fabric *loop.Fabric, n byte, limits dispatch.Limits) *rig {
	t.Helper()
	return newRigFor(t, qib.Provider{}, fabric, n, limits)
}

func newRigFor(t *testing.T, provider hca.Provider, fabric *loop.Fabric, n byte, limits dispatch.Limits) *rig {
	t.Helper()
	engine, err := soft.New(fabric, soft.Config{GUID: hca.GUID{0, 0x11, 0x75, 0, 0, 0, 0, n}})
	if err != nil {
		t.Fatal(err)
	}
	g := &rig{t: t, engine: engine, woken: map[uint64]int{},
		machine: &machine{procs: map[int]*process{}, opened: map[int]dispatch.Handle{}, nextFD: 10}}
	g.hca = newFaulty(engine)
	g.users = dispatch.NewUsers(limits)
	g.dev = dispatch.NewDevice(dispatch.Config{HCA: g.hca, Provider: provider, Maps: &g.maps, Node: "/dev/infiniband/uverbs0", System: g.machine, Pins: &g.pins, Users: g.users,
		Notify: func(kh uint64) { g.mu.Lock(); g.woken[kh]++; g.mu.Unlock() }})
	t.Cleanup(func() { _ = engine.Close() })
	return g
}

// client is one open file of a process.
type client struct {
	g *rig
	h dispatch.Handle
	p *process
}

const clientMem = 1 << 20

func (g *rig) client(pid int) *client {
	g.t.Helper()
	p := g.procs[pid]
	if p == nil {
		p = &process{pid: pid, limit: 8 << 20}
		p.base, p.b = 0x10000, make([]byte, clientMem)
		g.procs[pid] = p
	}
	h, err := g.dev.Open(newRequest(pid))
	if err != nil {
		g.t.Fatal(err)
	}
	return &client{g: g, h: h, p: p}
}

// resp is where responses go: in the second page.
const resp = 0x10000 + page

// out reads a response.
func out[T any](c *client) T {
	var v T
	b := unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v))
	if err := c.p.ReadAt(b, resp); err != nil {
		c.g.t.Fatal(err)
	}
	return v
}

func raw[T any](v T) []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v))...)
}

// pack builds a legacy command.
func pack(num uint32, outBytes int, body ...[]byte) []byte {
	b := make([]byte, abi.CmdHdrSize)
	for _, x := range body {
		b = append(b, x...)
	}
	binary.LittleEndian.PutUint32(b, num)
	binary.LittleEndian.PutUint16(b[4:], uint16(len(b)/4))
	binary.LittleEndian.PutUint16(b[6:], uint16(outBytes/4))
	return b
}

// write sends raw bytes from thread pid and waits for the one answer.
func (c *client) write(b []byte) answer {
	c.g.t.Helper()
	return c.writeFrom(c.p.pid, b)
}

func (c *client) writeFrom(tid int, b []byte) answer {
	c.g.t.Helper()
	r := newRequest(tid)
	c.h.Write(r, b)
	a := <-r.ch
	select {
	case a := <-r.ch:
		c.g.t.Errorf("answered twice: %+v", a)
	default:
	}
	return a
}

// cmd runs a command that must give want.
func (c *client) cmd(want unix.Errno, num uint32, outBytes int, body ...[]byte) {
	c.g.t.Helper()
	b := pack(num, outBytes, body...)
	a := c.write(b)
	if a.errno != want {
		c.g.t.Fatalf("command %d: %v, want %v", num, a.errno, want)
	}
	if want == 0 && a.n != len(b) {
		c.g.t.Fatalf("command %d returned %d of %d bytes", num, a.n, len(b))
	}
}

func (c *client) context() abi.GetContextResp {
	c.g.t.Helper()
	c.cmd(0, abi.CmdGetContext, 8, raw(abi.GetContext{Response: resp}))
	return out[abi.GetContextResp](c)
}

func (c *client) pd() uint32 {
	c.g.t.Helper()
	c.cmd(0, abi.CmdAllocPD, 4, raw(abi.AllocPD{Response: resp}))
	return out[abi.AllocPDResp](c).PDHandle
}

func (c *client) cq(channel int32) uint32 {
	c.g.t.Helper()
	c.cmd(0, abi.CmdCreateCQ, 8, raw(abi.CreateCQ{Response: resp, UserHandle: 0xc0ffee, CQE: 16, CompChannel: channel}))
	return out[abi.CreateCQResp](c).CQHandle
}

func (c *client) qp(pd, cq uint32, typ hca.QPType) abi.CreateQPResp {
	c.g.t.Helper()
	c.cmd(0, abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, UserHandle: 0x9b, PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq,
		MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInlineData: 64, QPType: uint8(typ)}))
	return out[abi.CreateQPResp](c)
}

func (c *client) mr(pd uint32, addr, n uint64, access hca.Access) abi.RegMRResp {
	c.g.t.Helper()
	c.cmd(0, abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: addr, Length: n, HCAVA: addr, PDHandle: pd, AccessFlags: uint32(access)}))
	return out[abi.RegMRResp](c)
}

// connect moves an RC QP to RTS against itself or another on LID lid.
func (c *client) connect(qp, dest uint32, lid uint16) {
	c.g.t.Helper()
	c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp, QPState: uint8(hca.QPInitState), PortNum: 1, QPAccessFlags: uint32(hca.AccessRemoteWrite | hca.AccessRemoteRead | hca.AccessRemoteAtomic),
		AttrMask: uint32(hca.QPMaskState | hca.QPMaskPKeyIndex | hca.QPMaskPort | hca.QPMaskAccess)}))
	c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp, QPState: uint8(hca.QPRTR), PathMTU: 5, DestQPNum: dest, MaxDestRdAtomic: 1, MinRNRTimer: 12,
		Dest:     abi.QPDest{DLID: lid, PortNum: 1},
		AttrMask: uint32(hca.QPMaskState | hca.QPMaskAV | hca.QPMaskPathMTU | hca.QPMaskDestQPN | hca.QPMaskRQPSN | hca.QPMaskMaxDestRdAtomic | hca.QPMaskMinRNRTimer)}))
	c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp, QPState: uint8(hca.QPRTS), Timeout: 14, RetryCnt: 7, RNRRetry: 7, MaxRdAtomic: 1,
		AttrMask: uint32(hca.QPMaskState | hca.QPMaskTimeout | hca.QPMaskRetryCnt | hca.QPMaskRNRRetry | hca.QPMaskSQPSN | hca.QPMaskMaxRdAtomic)}))
}
