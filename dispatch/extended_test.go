package dispatch_test

import (
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
)

// packEx builds an extended command; the body is filled up to 8 bytes.
func packEx(num uint32, response uint64, outBytes int, body ...[]byte) []byte {
	b := make([]byte, abi.CmdHdrSize+abi.ExCmdHdrSize)
	for _, x := range body {
		b = append(b, x...)
	}
	b = append(b, make([]byte, -len(b)&7)...)
	binary.LittleEndian.PutUint32(b, num|abi.CmdFlagExtended)
	binary.LittleEndian.PutUint16(b[4:], uint16((len(b)-24)/8))
	binary.LittleEndian.PutUint16(b[6:], uint16(outBytes/8))
	binary.LittleEndian.PutUint64(b[8:], response)
	return b
}

// ex runs an extended command that must give want.
func (c *client) ex(want unix.Errno, num uint32, outBytes int, body ...[]byte) {
	c.g.t.Helper()
	response := uint64(resp)
	if outBytes == 0 {
		response = 0
	}
	b := packEx(num, response, outBytes, body...)
	a := c.write(b)
	if a.errno != want {
		c.g.t.Fatalf("extended command %d: %v, want %v", num, a.errno, want)
	}
	if want == 0 && a.n != len(b) {
		c.g.t.Fatalf("extended command %d returned %d of %d bytes", num, a.n, len(b))
	}
}

// Failure class 3, the header of extended commands: each rule of verify_hdr.
func TestRow3ExtendedHeader(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	good := packEx(abi.ExCmdQueryDevice, resp, 304, raw(abi.ExQueryDevice{}))
	mut := func(f func(b []byte) []byte) []byte { return f(slices.Clone(good)) }
	put16 := func(at int, v uint16) []byte {
		return mut(func(b []byte) []byte { binary.LittleEndian.PutUint16(b[at:], v); return b })
	}
	for _, tc := range []struct {
		name string
		b    []byte
		want unix.Errno
	}{
		{"good", good, 0},
		{"legacy header only", good[:8], unix.EINVAL},
		{"23 bytes", good[:23], unix.EINVAL},
		{"headers only", mut(func(b []byte) []byte { b[4] = 0; return b[:24] }), 0}, // what is not there is zero
		{"a byte short", good[:len(good)-1], unix.EINVAL},
		{"a word long", append(slices.Clone(good), 0, 0, 0, 0, 0, 0, 0, 0), unix.EINVAL},
		{"in_words too large", put16(4, 2), unix.EINVAL},
		{"provider_in_words lies", put16(16, 1), unix.EINVAL},
		{"a longer request, zero", packEx(abi.ExCmdQueryDevice, resp, 304, raw(abi.ExQueryDevice{}), make([]byte, 8)), 0},
		{"a longer request, not zero", packEx(abi.ExCmdQueryDevice, resp, 304, raw(abi.ExQueryDevice{}), []byte{1}), unix.EOPNOTSUPP},
		{"a short response", put16(6, 1), 0}, // is cut
		{"header reserved", mut(func(b []byte) []byte { b[20] = 1; return b }), unix.EINVAL},
		{"response without room", put16(6, 0), unix.EINVAL},
		{"room without response", packEx(abi.ExCmdQueryDevice, 0, 304, raw(abi.ExQueryDevice{})), unix.EINVAL},
		{"response in the kernel", packEx(abi.ExCmdQueryDevice, 1<<63, 304, raw(abi.ExQueryDevice{})), unix.EFAULT},
		{"response wraps", packEx(abi.ExCmdQueryDevice, ^uint64(0), 304, raw(abi.ExQueryDevice{})), unix.EFAULT},
		{"bad response", packEx(abi.ExCmdQueryDevice, 8, 304, raw(abi.ExQueryDevice{})), unix.EFAULT},
		{"read-only response", packEx(abi.ExCmdQueryDevice, 0x10000, 304, raw(abi.ExQueryDevice{})), unix.EFAULT},
		{"straddling response", packEx(abi.ExCmdQueryDevice, 0x10000+clientMem-8, 304, raw(abi.ExQueryDevice{})), unix.EFAULT},
		{"comp_mask", packEx(abi.ExCmdQueryDevice, resp, 304, raw(abi.ExQueryDevice{CompMask: 1})), unix.EINVAL},
		{"reserved", packEx(abi.ExCmdQueryDevice, resp, 304, raw(abi.ExQueryDevice{Reserved: 1})), unix.EINVAL},
		{"stray command bit", mut(func(b []byte) []byte { b[1] = 1; return b }), unix.EINVAL},
		{"number left empty", packEx(abi.CmdAllocPD, resp, 8, make([]byte, 8)), unix.EOPNOTSUPP},
		{"not served", packEx(abi.ExCmdCreateFlow, resp, 8, make([]byte, 24)), unix.EOPNOTSUPP},
		{"not served, header wrong", packEx(abi.ExCmdCreateFlow, 0, 8, make([]byte, 24)), unix.EOPNOTSUPP},
		{"out of range", packEx(58, resp, 8), unix.EOPNOTSUPP},
	} {
		if a := c.write(tc.b); a.errno != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, a.errno, tc.want)
		}
	}
}

// A response is cut, or filled with zeros, to what was asked for, and says how
// much of it there is.
func TestExtendedResponseLength(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	for _, tc := range []struct{ asked, length int }{{184, 184}, {192, 192}, {304, 304}, {400, 304}} {
		poison(c)
		c.ex(0, abi.ExCmdQueryDevice, tc.asked, raw(abi.ExQueryDevice{}))
		got := out[[512]byte](c)
		if n := binary.LittleEndian.Uint32(got[180:]); int(n) != tc.length {
			t.Errorf("asked for %d: response_length %d", tc.asked, n)
		}
		for i := 304; i < tc.asked; i++ {
			if got[i] != 0 {
				t.Fatalf("asked for %d: byte %d is %#x", tc.asked, i, got[i])
			}
		}
		if got[tc.asked] != poisonByte {
			t.Errorf("asked for %d: wrote beyond", tc.asked)
		}
	}
	r := out[abi.ExQueryDeviceResp](c)
	c.cmd(0, abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: resp}))
	if plain := out[abi.QueryDeviceResp](c); plain != r.Base {
		t.Errorf("%+v, and extended %+v", plain, r.Base)
	}
}

const poisonByte = 0xa5

// poison fills where responses go, so that a byte that is not written shows.
func poison(c *client) {
	b := make([]byte, 4096)
	for i := range b {
		b[i] = poisonByte
	}
	_ = c.p.WriteAt(b, resp)
}

func TestExtendedCQ(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	good := abi.ExCreateCQ{UserHandle: 7, CQE: 16, CompChannel: -1}
	c.ex(0, abi.ExCmdCreateCQ, 16, raw(good))
	r := out[abi.ExCreateCQResp](c)
	if r.ResponseLength != 16 || r.CompMask != 0 || r.Base.CQE < 16 {
		t.Fatalf("%+v", r)
	}
	for _, tc := range []struct {
		name string
		in   abi.ExCreateCQ
		want unix.Errno
	}{
		{"comp_mask", abi.ExCreateCQ{CQE: 16, CompChannel: -1, CompMask: 1}, unix.EINVAL},
		{"reserved", abi.ExCreateCQ{CQE: 16, CompChannel: -1, Reserved: 1}, unix.EINVAL},
		{"timestamps", abi.ExCreateCQ{CQE: 16, CompChannel: -1, Flags: abi.CQFlagTimestampCompletion}, unix.EOPNOTSUPP},
		{"vector", abi.ExCreateCQ{CQE: 16, CompChannel: -1, CompVector: 1 << 20}, unix.EINVAL},
		{"channel", abi.ExCreateCQ{CQE: 16, CompChannel: 99}, unix.EBADF},
		{"too deep", abi.ExCreateCQ{CQE: ^uint32(0), CompChannel: -1}, unix.EINVAL},
	} {
		t.Run(tc.name, func(*testing.T) { c.ex(tc.want, abi.ExCmdCreateCQ, 16, raw(tc.in)) })
	}
	cq := r.Base.CQHandle
	for _, tc := range []struct {
		name string
		in   abi.ExModifyCQ
		want unix.Errno
	}{
		{"moderate", abi.ExModifyCQ{CQHandle: cq, AttrMask: abi.CQModerate, CQCount: 4, CQPeriod: 100}, 0},
		{"nothing", abi.ExModifyCQ{CQHandle: cq}, unix.EINVAL},
		{"reserved", abi.ExModifyCQ{CQHandle: cq, AttrMask: abi.CQModerate, Reserved: 1}, unix.EINVAL},
		{"more than moderation", abi.ExModifyCQ{CQHandle: cq, AttrMask: 3}, unix.EOPNOTSUPP},
		{"no such cq", abi.ExModifyCQ{CQHandle: 99, AttrMask: abi.CQModerate}, unix.ENOENT},
	} {
		t.Run(tc.name, func(*testing.T) { c.ex(tc.want, abi.ExCmdModifyCQ, 0, raw(tc.in)) })
	}
}

func TestExtendedQP(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	defer c.h.Release()
	c.context()
	pd, cq := c.pd(), c.cq(-1)
	base := abi.ExCreateQP{PDHandle: pd, SendCQHandle: cq, RecvCQHandle: cq, MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, QPType: uint8(hca.QPTypeRC)}
	mut := func(f func(*abi.ExCreateQP)) []byte { in := base; f(&in); return raw(in) }
	for _, tc := range []struct {
		name   string
		body   []byte
		netRaw bool
		want   unix.Errno
	}{
		{"good", raw(base), false, 0},
		{"up to comp_mask", raw(base)[:56], false, 0},
		{"a word less", raw(base)[:48], false, 0},
		{"unknown comp_mask", mut(func(q *abi.ExCreateQP) { q.CompMask = 2 }), false, unix.EINVAL},
		{"reserved", mut(func(q *abi.ExCreateQP) { q.Reserved = 1 }), false, unix.EINVAL},
		{"indirection table", mut(func(q *abi.ExCreateQP) { q.CompMask = abi.CreateQPMaskIndTable }), false, unix.EINVAL},
		{"unknown flag", mut(func(q *abi.ExCreateQP) { q.CreateFlags = 1 << 30 }), false, unix.EINVAL},
		{"flag of others", mut(func(q *abi.ExCreateQP) { q.CreateFlags = abi.QPCreateScatterFCS }), false, unix.EOPNOTSUPP},
		{"source QPN", mut(func(q *abi.ExCreateQP) { q.CreateFlags = abi.QPCreateSourceQPN }), false, unix.EPERM},
		{"source QPN, CAP_NET_RAW", mut(func(q *abi.ExCreateQP) { q.CreateFlags = abi.QPCreateSourceQPN }), true, unix.EOPNOTSUPP},
		{"raw packet", mut(func(q *abi.ExCreateQP) { q.QPType = uint8(hca.QPTypeRawPacket) }), false, unix.EPERM},
		{"raw packet, CAP_NET_RAW", mut(func(q *abi.ExCreateQP) { q.QPType = uint8(hca.QPTypeRawPacket) }), true, unix.EOPNOTSUPP},
		{"driver's own", mut(func(q *abi.ExCreateQP) { q.QPType = 0xff }), false, unix.EOPNOTSUPP},
		{"no type", mut(func(q *abi.ExCreateQP) { q.QPType = 0 }), false, unix.EINVAL},
		{"type 7", mut(func(q *abi.ExCreateQP) { q.QPType = 7 }), false, unix.EINVAL},
	} {
		t.Run(tc.name, func(*testing.T) {
			c.p.netRaw = tc.netRaw
			c.ex(tc.want, abi.ExCmdCreateQP, 40, tc.body)
		})
	}
	c.ex(0, abi.ExCmdCreateQP, 40, raw(base))
	qp := out[abi.ExCreateQPResp](c)
	if qp.ResponseLength != 40 || qp.Base.QPN == 0 {
		t.Fatalf("%+v", qp)
	}
	toInit := abi.ModifyQP{QPHandle: qp.Base.QPHandle, QPState: uint8(hca.QPInitState), PortNum: 1,
		AttrMask: uint32(hca.QPMaskState | hca.QPMaskPKeyIndex | hca.QPMaskPort | hca.QPMaskAccess)}
	c.ex(0, abi.ExCmdModifyQP, 8, raw(abi.ExModifyQP{Base: toInit}))
	if r := out[abi.LengthResp](c); r.ResponseLength != 8 {
		t.Fatalf("%+v", r)
	}
	toInit.AttrMask |= 1 << 26
	c.ex(unix.EOPNOTSUPP, abi.ExCmdModifyQP, 8, raw(abi.ExModifyQP{Base: toInit}))
	toInit.AttrMask = uint32(hca.QPMaskRateLimit)
	c.ex(unix.EOPNOTSUPP, abi.ExCmdModifyQP, 8, raw(abi.ExModifyQP{Base: toInit, RateLimit: 1}))
	c.cmd(unix.EOPNOTSUPP, abi.CmdModifyQP, 0, raw(toInit))
}

// Each number has its row, sizes and standing: the listing is the table.
func TestCommands(t *testing.T) {
	list := dispatch.Commands(^hca.OpSet(0))
	if len(list) != 41+12 {
		t.Fatalf("%d commands", len(list))
	}
	for i, c := range list[:41] {
		if int(c.Number) != i || c.Extended {
			t.Errorf("row %d: %+v", i, c)
		}
	}
	none := map[string]bool{}
	for _, c := range dispatch.Commands(0) {
		none[c.Name] = c.Answer == dispatch.NoMethod
	}
	for name, want := range map[string]bool{"ALLOC_PD": false, "ALLOC_MW": true, "OPEN_XRCD": true, "MODIFY_CQ": true} {
		if none[name] != want {
			t.Errorf("%s on a device without methods: %v", name, none[name])
		}
	}
}
