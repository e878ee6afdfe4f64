package dispatch_test

import (
	"encoding/binary"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/pin"
)

// A model of one file's objects. It learns from requests and their outcome, never
// from the tables that it checks, and says what else must then be true.
type model struct {
	t       *testing.T
	c       *client
	objects map[uint32]*modelObject
	fds     []int32 // of completion channels
	context bool
}

type modelObject struct {
	kind   string
	needs  []uint32
	pinned uint64 // bytes
	groups map[[18]byte]bool
	// Of a region: the range, and whether it must be writable.
	start, length uint64
	write         bool
}

// lowest is the handle that the next object gets (xa_alloc).
func (m *model) lowest() uint32 {
	for i := uint32(0); ; i++ {
		if m.objects[i] == nil {
			return i
		}
	}
}

func (m *model) needed(h uint32) bool {
	for _, o := range m.objects {
		for _, n := range o.needs {
			if n == h {
				return true
			}
		}
	}
	return false
}

// decode copies a request body into a struct, as far as it goes.
func decode[T any](body []byte) T {
	var v T
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v)), body)
	return v
}

// add notes an object that a command has made.
func (m *model) add(kind string, got uint32, needs ...uint32) *modelObject {
	m.t.Helper()
	if want := m.lowest(); got != want {
		m.t.Fatalf("new %s has handle %d, lowest free is %d", kind, got, want)
	}
	o := &modelObject{kind: kind, needs: needs, groups: map[[18]byte]bool{}}
	m.objects[got] = o
	return o
}

// destroyed checks the outcome of a command that destroys.
func (m *model) destroyed(kind string, h uint32, errno unix.Errno) {
	m.t.Helper()
	o := m.objects[h]
	there := o != nil && o.kind == kind
	busy := there && (m.needed(h) || len(o.groups) > 0)
	switch errno {
	case 0, unix.EFAULT: // EFAULT: it is gone, and the count of events could not be told
		if !there || busy {
			m.t.Fatalf("destroy %s %d: %v, but there %v, busy %v", kind, h, errno, there, busy)
		}
		delete(m.objects, h)
	case unix.EBUSY:
		if !busy {
			m.t.Fatalf("destroy %s %d: EBUSY, but there %v, busy %v", kind, h, there, busy)
		}
	case unix.ENOENT:
		if o != nil {
			m.t.Fatalf("destroy %s %d: ENOENT of a %s", kind, h, o.kind)
		}
	}
}

func pages(start, length uint64) uint64 {
	n, _ := pin.Pages(start, length)
	return n * pin.PageSize
}

// learn takes over what a command did.
func (m *model) learn(b []byte, errno unix.Errno) {
	m.t.Helper()
	if len(b) < abi.CmdHdrSize {
		return
	}
	h := decode[abi.CmdHdr](b)
	body := b[abi.CmdHdrSize:]
	ex := h.Command&abi.CmdFlagExtended != 0
	if ex {
		body = body[min(len(body), abi.ExCmdHdrSize):]
	}
	num := h.Command & abi.CmdMask
	switch {
	case ex:
		m.learnExtended(num, body, errno)
	case num == abi.CmdDeallocPD:
		m.destroyed("pd", decode[abi.Handle](body).Handle, errno)
	case num == abi.CmdDeregMR:
		m.destroyed("mr", decode[abi.Handle](body).Handle, errno)
	case num == abi.CmdDeallocMW:
		m.destroyed("mw", decode[abi.Handle](body).Handle, errno)
	case num == abi.CmdDestroyAH:
		m.destroyed("ah", decode[abi.Handle](body).Handle, errno)
	case num == abi.CmdCloseXRCD:
		m.destroyed("xrcd", decode[abi.Handle](body).Handle, errno)
	case num == abi.CmdDestroyCQ && len(b) == 16: // has nothing behind it here
	case num == abi.CmdDestroyCQ:
		m.destroyed("cq", decode[abi.DestroyCQ](body).CQHandle, errno)
	case num == abi.CmdDestroyQP:
		m.destroyed("qp", decode[abi.DestroyQP](body).QPHandle, errno)
	case num == abi.CmdDestroySRQ:
		m.destroyed("srq", decode[abi.DestroyQP](body).QPHandle, errno)
	case errno == 0:
		m.made(num, body)
	case errno == unix.EFAULT && num == abi.CmdReregMR && m.reachable(body):
		m.rereg(body) // done, and not told
	}
}

func (m *model) made(num uint32, body []byte) {
	m.t.Helper()
	c := m.c
	switch num {
	case abi.CmdGetContext:
		m.context = true
	case abi.CmdCreateCompChannel:
		m.fds = append(m.fds, int32(out[abi.CreateCompChannelResp](c).FD))
	case abi.CmdAllocPD:
		m.add("pd", out[abi.AllocPDResp](c).PDHandle)
	case abi.CmdCreateAH:
		m.add("ah", out[abi.CreateAHResp](c).AHHandle, decode[abi.CreateAH](body).PDHandle)
	case abi.CmdRegMR:
		in := decode[abi.RegMR](body)
		o := m.add("mr", out[abi.RegMRResp](c).MRHandle, in.PDHandle)
		o.pinned, o.start, o.length = pages(in.Start, in.Length), in.Start, in.Length
		o.write = hca.Access(in.AccessFlags)&hca.AccessNeedsWritable != 0
	case abi.CmdReregMR:
		m.rereg(body)
	case abi.CmdAllocMW:
		m.add("mw", out[abi.AllocMWResp](c).MWHandle, decode[abi.AllocMW](body).PDHandle)
	case abi.CmdCreateCQ:
		m.add("cq", out[abi.CreateCQResp](c).CQHandle)
	case abi.CmdCreateQP:
		in := decode[abi.CreateQP](body)
		m.madeQP(out[abi.CreateQPResp](c).QPHandle, hca.QPType(in.QPType), in.PDHandle, in.SendCQHandle, in.RecvCQHandle, in.SRQHandle, in.IsSRQ != 0)
	case abi.CmdOpenQP:
		m.add("qp", out[abi.CreateQPResp](c).QPHandle, decode[abi.OpenQP](body).PDHandle)
	case abi.CmdCreateSRQ:
		m.add("srq", out[abi.CreateSRQResp](c).SRQHandle, decode[abi.CreateSRQ](body).PDHandle)
	case abi.CmdCreateXSRQ:
		in, needs := decode[abi.CreateXSRQ](body), []uint32(nil)
		if in.SRQType == uint32(hca.SRQXRC) {
			needs = []uint32{in.XRCDHandle, in.CQHandle}
		}
		m.add("srq", out[abi.CreateSRQResp](c).SRQHandle, append(needs, in.PDHandle)...)
	case abi.CmdOpenXRCD:
		m.add("xrcd", out[abi.OpenXRCDResp](c).XRCDHandle)
	case abi.CmdAttachMcast, abi.CmdDetachMcast:
		in := decode[abi.Mcast](body)
		o := m.objects[in.QPHandle]
		if o == nil || o.kind != "qp" {
			m.t.Fatalf("multicast on handle %d: %+v", in.QPHandle, o)
		}
		key := [18]byte(append(in.GID[:], byte(in.MLID), byte(in.MLID>>8)))
		if num == abi.CmdAttachMcast {
			o.groups[key] = true
		} else {
			delete(o.groups, key)
		}
	}
}

// reachable says whether it was not the range that was the bad address.
func (m *model) reachable(body []byte) bool {
	in := decode[abi.ReregMR](body)
	o := m.objects[in.MRHandle]
	if o == nil || hca.ReregFlags(in.Flags)&(hca.ReregTrans|hca.ReregAccess) == 0 {
		return o != nil
	}
	start, length, write := o.start, o.length, o.write
	if hca.ReregFlags(in.Flags)&hca.ReregTrans != 0 {
		start, length = in.Start, in.Length
	}
	if hca.ReregFlags(in.Flags)&hca.ReregAccess != 0 {
		write = hca.Access(in.AccessFlags)&hca.AccessNeedsWritable != 0
	}
	return m.c.p.CheckRange(start, length, write) == nil
}

func (m *model) rereg(body []byte) {
	in := decode[abi.ReregMR](body)
	o := m.objects[in.MRHandle]
	if o == nil || o.kind != "mr" {
		m.t.Fatalf("REREG_MR of handle %d: %+v", in.MRHandle, o)
	}
	if hca.ReregFlags(in.Flags)&hca.ReregTrans != 0 {
		o.pinned, o.start, o.length = pages(in.Start, in.Length), in.Start, in.Length
	}
	if hca.ReregFlags(in.Flags)&hca.ReregAccess != 0 {
		o.write = hca.Access(in.AccessFlags)&hca.AccessNeedsWritable != 0
	}
	if hca.ReregFlags(in.Flags)&hca.ReregPD != 0 {
		o.needs = []uint32{in.PDHandle}
	}
}

func (m *model) madeQP(handle uint32, typ hca.QPType, pd, send, recv, srq uint32, isSRQ bool) {
	needs := []uint32{pd}
	switch typ {
	case hca.QPTypeXRCTgt:
	case hca.QPTypeXRCIni:
		needs = append(needs, send)
	default:
		needs = append(needs, send, recv)
		if isSRQ {
			needs = append(needs, srq)
		}
	}
	m.add("qp", handle, needs...)
}

func (m *model) learnExtended(num uint32, body []byte, errno unix.Errno) {
	if errno != 0 {
		return
	}
	switch num {
	case abi.ExCmdCreateCQ:
		m.add("cq", m.lowest())
	case abi.ExCmdCreateQP:
		in := decode[abi.ExCreateQP](body)
		m.madeQP(m.lowest(), hca.QPType(in.QPType), in.PDHandle, in.SendCQHandle, in.RecvCQHandle, in.SRQHandle, in.IsSRQ != 0)
	}
}

// check compares the model with what the device says of itself.
func (m *model) check() {
	m.t.Helper()
	want := map[string]int{}
	var pinned uint64
	for _, o := range m.objects {
		want[o.kind]++
		pinned += o.pinned
	}
	if m.context {
		want["context"] = 1
	}
	if len(m.fds) > 0 {
		want["comp_channel"] = len(m.fds)
	}
	files := m.c.g.dev.Files()
	for _, f := range files {
		if f.PID != m.c.p.pid {
			continue
		}
		if !maps.Equal(f.Objects, want) || f.Pinned != pinned {
			m.t.Fatalf("the file has %v and %d bytes pinned, the model %v and %d", f.Objects, f.Pinned, want, pinned)
		}
	}
}

// run sends one command and learns from it.
func (m *model) run(b []byte) unix.Errno {
	m.t.Helper()
	m.fit(b)
	r, undone := newRequest(m.c.p.pid), m.c.g.undone.Load()
	m.c.h.Write(r, b)
	select {
	case a := <-r.ch:
		r.ch <- a
	default: // an empty POLL_CQ waits: send it a signal
		r.mu.Lock()
		f := r.interrupt
		r.mu.Unlock()
		if f != nil {
			f()
		}
	}
	a := <-r.ch
	if len(r.ch) != 0 {
		m.t.Fatalf("answered twice: %x", b)
	}
	if a.errno == unix.EIO {
		m.t.Fatalf("EIO, which is a fault of ours: %x", b)
	}
	if m.c.g.undone.Load() != undone {
		a.errno = unix.EFAULT // what Install made of the write's result
	}
	m.learn(b, a.errno)
	m.check()
	return a.errno
}

// fit turns the addresses and descriptors of another process into the client's
// own: what was recorded came from elsewhere. An odd one stays bad, so that bad
// ones are tried too.
func (m *model) fit(b []byte) {
	if len(b) < abi.CmdHdrSize+8 {
		return
	}
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	put := func(at int, v uint64) { binary.LittleEndian.PutUint64(b[at:], v) }
	h := decode[abi.CmdHdr](b)
	if p := u64(8); h.Command&abi.CmdFlagExtended != 0 || hasResponse[h.Command&abi.CmdMask] {
		if p&1 != 0 {
			put(8, 1)
		} else if p != 0 {
			put(8, resp)
		}
	}
	if h.Command == abi.CmdRegMR && len(b) >= 40 || h.Command == abi.CmdReregMR && len(b) >= 48 {
		at := 16 // start, length, hca_va
		if h.Command == abi.CmdReregMR {
			at = 24
		}
		if start := u64(at); start&1 == 0 && len(b) >= at+24 {
			fitted := uint64(0x10000+8*page) + start%(8*page)
			put(at+16, u64(at+16)-start+fitted)
			put(at, fitted)
		}
	}
	if h.Command == abi.CmdCreateCQ && len(b) >= 36 && len(m.fds) > 0 {
		if ch := int32(binary.LittleEndian.Uint32(b[32:])); ch >= 0 && ch&1 == 0 {
			binary.LittleEndian.PutUint32(b[32:], uint32(m.fds[int(ch)%len(m.fds)]))
		}
	}
}

// hasResponse: the legacy requests that begin with a pointer.
var hasResponse = func() (has [abi.CmdMask + 1]bool) {
	for _, num := range []int{
		abi.CmdGetContext, abi.CmdQueryDevice, abi.CmdQueryPort, abi.CmdAllocPD, abi.CmdCreateAH, abi.CmdRegMR, abi.CmdReregMR,
		abi.CmdAllocMW, abi.CmdCreateCompChannel, abi.CmdCreateCQ, abi.CmdResizeCQ, abi.CmdDestroyCQ, abi.CmdPollCQ, abi.CmdCreateQP,
		abi.CmdQueryQP, abi.CmdDestroyQP, abi.CmdPostSend, abi.CmdPostRecv, abi.CmdCreateSRQ, abi.CmdQuerySRQ, abi.CmdDestroySRQ,
		abi.CmdPostSRQRecv, abi.CmdOpenXRCD, abi.CmdCreateXSRQ, abi.CmdOpenQP,
	} {
		has[num] = true
	}
	return has
}()

// commands takes a recording apart: each command after its size, 16 bits.
func commands(b []byte) [][]byte {
	var out [][]byte
	for len(b) >= 2 {
		n := int(binary.LittleEndian.Uint16(b))
		b = b[2:]
		n = min(n, len(b))
		out = append(out, append([]byte(nil), b[:n]...))
		b = b[n:]
	}
	return out
}

func recording(list ...[]byte) []byte {
	var b []byte
	for _, c := range list {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(c)))
		b = append(b, c...)
	}
	return b
}

// recorded are the requests of real programs over rdma-core in the guests
// (runs of one command cut to three), by file name.
func recorded(t testing.TB) map[string][]byte {
	files, err := filepath.Glob("testdata/recorded/*/*")
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	out := map[string][]byte{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		out[f] = b
	}
	return out
}

// sequence runs a recording from start to end of a file, and checks that nothing
// of it is left.
func sequence(t *testing.T, list [][]byte) (done []unix.Errno) {
	g := newRig(t)
	g.inodes = map[int32]uint64{3: 33, 4: 44}
	other := g.client(200)
	other.context()
	m := &model{t: t, c: g.client(100), objects: map[uint32]*modelObject{}}
	for _, b := range list {
		done = append(done, m.run(b))
	}
	other.pd() // the others go on
	m.c.h.Release()
	other.h.Release()
	if left := g.hca.count(); len(left) != 0 {
		t.Fatalf("left on the device: %v", left)
	}
	if n := g.pins.Pinned("100"); n != 0 {
		t.Fatalf("%d bytes pinned", n)
	}
	if n := g.held.Load(); n != 0 {
		t.Fatalf("%d files of the client's held", n)
	}
	if n := g.procs[100].refs.Load(); n != 0 {
		t.Fatalf("%d references to the process", n)
	}
	if f := g.dev.Files(); len(f) != 0 {
		t.Fatalf("files left: %+v", f)
	}
	return done
}

// What real programs sent succeeds, command for command, but for what needs a
// peer or the keys of its own run.
func TestRecordedPrograms(t *testing.T) {
	for name, b := range recorded(t) {
		t.Run(name, func(t *testing.T) {
			list := commands(b)
			for i, errno := range sequence(t, list) {
				switch num := decode[abi.CmdHdr](list[i]).Command; {
				case errno == 0:
				case num == abi.CmdPostSend, num == abi.CmdModifyQP: // the peer is not there
				default:
					t.Errorf("command %d (%#x): %v", i, num, errno)
				}
			}
		})
	}
}

func FuzzSequence(f *testing.F) {
	for _, b := range recorded(f) {
		f.Add(b)
	}
	for _, b := range scripted() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		list := commands(b)
		if len(list) > 200 {
			list = list[:200]
		}
		sequence(t, list)
	})
}

// scripted reaches what the recorded programs do not use.
func scripted() [][]byte {
	context := pack(abi.CmdGetContext, 8, raw(abi.GetContext{Response: resp}))
	pd := pack(abi.CmdAllocPD, 4, raw(abi.AllocPD{Response: resp}))
	cq := pack(abi.CmdCreateCQ, 8, raw(abi.CreateCQ{Response: resp, CQE: 4, CompChannel: -1}))
	xrcd := func(fd, flags uint32) []byte {
		return pack(abi.CmdOpenXRCD, 4, raw(abi.OpenXRCD{Response: resp, FD: fd, OFlags: flags}))
	}
	handle := func(num, h uint32) []byte { return pack(num, 0, raw(abi.Handle{Handle: h})) }
	qp := func(typ hca.QPType, pd uint32) []byte {
		return pack(abi.CmdCreateQP, 32, raw(abi.CreateQP{Response: resp, PDHandle: pd, SendCQHandle: 1, RecvCQHandle: 1, MaxSendWR: 2, MaxRecvWR: 2,
			MaxSendSGE: 1, MaxRecvSGE: 1, QPType: uint8(typ)}))
	}
	destroyQP := func(h uint32) []byte {
		return pack(abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: h}))
	}
	group := abi.Mcast{GID: [16]byte{0xff, 0x12, 15: 1}, QPHandle: 2, MLID: 0xc001}
	return [][]byte{
		recording(context, pd, cq, xrcd(3, unix.O_CREAT), xrcd(^uint32(0), 0), qp(hca.QPTypeXRCTgt, 2), qp(hca.QPTypeXRCIni, 0),
			pack(abi.CmdOpenQP, 32, raw(abi.OpenQP{Response: resp, PDHandle: 2, QPN: 17, QPType: uint8(hca.QPTypeXRCTgt)})),
			pack(abi.CmdCreateXSRQ, 16, raw(abi.CreateXSRQ{Response: resp, SRQType: 1, PDHandle: 0, XRCDHandle: 2, CQHandle: 1, MaxWR: 4, MaxSGE: 1})),
			handle(abi.CmdCloseXRCD, 2), destroyQP(4), handle(abi.CmdCloseXRCD, 2)),
		recording(context, pd, pd, pack(abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: 0x20000, HCAVA: 0x20000, Length: 4096, PDHandle: 0, AccessFlags: 1})),
			pack(abi.CmdReregMR, 8, raw(abi.ReregMR{Response: resp, MRHandle: 2, Flags: 7, Start: 0x30000, HCAVA: 0x30000, Length: 12288, PDHandle: 1, AccessFlags: 7})),
			pack(abi.CmdAllocMW, 8, raw(abi.AllocMW{Response: resp, PDHandle: 0, MWType: 1})), handle(abi.CmdDeallocPD, 0), handle(abi.CmdDeallocMW, 3),
			handle(abi.CmdDeallocPD, 0), handle(abi.CmdDeregMR, 2), handle(abi.CmdDeallocPD, 1)),
		recording(context, pd, cq, qp(hca.QPTypeUD, 0),
			pack(abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: 2, QPState: 1, PortNum: 1, AttrMask: uint32(hca.QPMaskState | hca.QPMaskPKeyIndex | hca.QPMaskPort | hca.QPMaskQKey)})),
			pack(abi.CmdAttachMcast, 0, raw(group)), pack(abi.CmdAttachMcast, 0, raw(group)), destroyQP(2), pack(abi.CmdDetachMcast, 0, raw(group)), destroyQP(2)),
		recording(context, packEx(abi.ExCmdCreateCQ, resp, 16, raw(abi.ExCreateCQ{CQE: 4, CompChannel: -1})), pd,
			packEx(abi.ExCmdCreateQP, resp, 40, raw(abi.ExCreateQP{PDHandle: 1, MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: 2})),
			packEx(abi.ExCmdQueryDevice, resp, 304, raw(abi.ExQueryDevice{})),
			packEx(abi.ExCmdModifyCQ, 0, 0, raw(abi.ExModifyCQ{AttrMask: 1, CQCount: 2, CQPeriod: 10})),
			pack(abi.CmdResizeCQ, 8, raw(abi.ResizeCQ{Response: resp, CQE: 64}))),
	}
}

// FuzzCommand is the decoder on any bytes, with one object of each kind there.
func FuzzCommand(f *testing.F) {
	seen := map[uint64]bool{} // one of each command and size is enough
	for _, b := range recorded(f) {
		for _, c := range commands(b) {
			if h := binary.LittleEndian.Uint64(c); !seen[h] {
				seen[h] = true
				f.Add(c)
			}
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pd := pack(abi.CmdAllocPD, 4, raw(abi.AllocPD{Response: resp}))
		list := append(commands(scripted()[0])[:8:8], pd, b, b, pd)
		sequence(t, list)
	})
}
