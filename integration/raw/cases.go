package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// row is one command as the walk knows it.
type row struct {
	name     string
	num      uint32
	min      int // least bytes of the request; 0: all of good's
	resp     int // least bytes of the response
	full     int // of the response as asked for; 0: resp
	udata    bool
	fresh    bool          // needs a file without a context: GET_CONTEXT
	makes    rawverbs.Kind // kind of the object that a good request leaves
	makesFD  bool          // a good request leaves a descriptor instead
	destroys rawverbs.Kind // kind of the object that a good request ends
	missing  bool          // the device has no such method: EOPNOTSUPP
	refused  unix.Errno    // what a good request is answered, in the state that the object is in
	good     func(w *walk) []byte
	uin      func(w *walk) []byte // the provider's part of the request
	handles  []handleField
	fields   []field
	before   func(w *walk) // makes what the good request needs
	after    func(w *walk) // undoes a success that leaves no object
	always   func(w *walk) // tidies up after any case
}

// handleField is a handle in a request.
type handleField struct {
	name string
	off  int
	kind rawverbs.Kind
	// gone is the errno for a handle that names nothing, ENOENT if 0 (older kernels
	// said EINVAL unless destroying).
	gone unix.Errno
}

// field is a change to a good request with its outcome.
type field struct {
	name string
	set  func(b []byte)
	want unix.Errno
}

func (r *row) ex() bool { return r.num&abi.CmdFlagExtended != 0 }

func (r *row) out() int { return max(r.resp, r.full) }

// shot is one command under way: encoded, to be spoilt by a case.
type shot struct {
	w   *walk
	r   *row
	c   *rawverbs.Client
	via *rawverbs.Client // whose file is written to: c's, but for one case
	req rawverbs.Request
	raw []byte // what is written
	// victim is what a destroying row's good request names.
	victim uint32
	next   uint32 // the handle that a making row would give
	fds    int
	mem    []byte
}

// Offsets in an encoded command.
const (
	offCommand  = 0
	offInWords  = 4
	offOutWords = 6
	offResponse = 8  // extended, and the body's first field of a legacy one
	offProvIn   = 16 // extended
	offProvOut  = 18
	offReserved = 20
)

func (s *shot) addWords(off, n int) {
	le := binary.LittleEndian
	le.PutUint16(s.raw[off:], uint16(int(le.Uint16(s.raw[off:]))+n))
}

func (s *shot) setWords(off, n int) { binary.LittleEndian.PutUint16(s.raw[off:], uint16(n)) }

func (s *shot) orCommand(bits uint32) {
	binary.LittleEndian.PutUint32(s.raw, binary.LittleEndian.Uint32(s.raw)|bits)
}

func (s *shot) respond(addr uint64) { binary.LittleEndian.PutUint64(s.raw[offResponse:], addr) }

// body is the core of the request in raw.
func (s *shot) body() []byte {
	if s.r.ex() {
		return s.raw[abi.CmdHdrSize+abi.ExCmdHdrSize:]
	}
	return s.raw[abi.CmdHdrSize:]
}

// needsNetRaw ends the names of cases that are EPERM without CAP_NET_RAW.
const needsNetRaw = "-net-raw"

// noVictim stands for an object that the device cannot make.
const noVictim = 1 << 20

// reencode is for cases that change req.
func (s *shot) reencode() { s.raw = s.req.Encode() }

// prepare makes a good request of r.
func (w *walk) prepare(r *row) (*shot, error) {
	s := &shot{w: w, r: r, c: w.a}
	if r.fresh {
		c, err := rawverbs.Open(w.node)
		if err != nil {
			return nil, err
		}
		s.c = c
	}
	s.via = s.c
	if r.before != nil {
		r.before(w)
	}
	var err error
	if r.makes != rawverbs.NoKind {
		// Handles are given lowest first, by the kernel and by the daemon.
		if s.next, err = w.a.AllocPD(); err != nil {
			return nil, err
		}
		if err = w.a.Destroy(rawverbs.PD, s.next); err != nil {
			return nil, err
		}
	}
	if r.destroys != rawverbs.NoKind {
		s.victim, err = w.make(w.a, r.destroys, w.own)
		switch {
		case errors.Is(err, unix.EOPNOTSUPP):
			s.victim = noVictim // the destroying command will say the same
		case err != nil:
			return nil, fmt.Errorf("make a victim: %w", err)
		}
	}
	mem, addr := s.c.Mem.Out()
	s.mem = mem
	s.req = rawverbs.Request{Num: r.num, Body: r.good(w), Out: r.out()}
	if r.destroys != rawverbs.NoKind {
		binary.LittleEndian.PutUint32(s.req.Body[r.handles[0].off:], s.victim)
	}
	if r.resp > 0 {
		s.req.Resp = addr
		if r.udata {
			s.req.UOut = s.c.Room
		}
	}
	if r.uin != nil {
		s.req.UIn = r.uin(w)
	}
	s.raw = s.req.Encode()
	if s.fds, err = rawverbs.NumFDs(); err != nil {
		return nil, err
	}
	return s, nil
}

// try runs one case: a good request of r, spoilt by spoil.
func (w *walk) try(r *row, name string, want unix.Errno, spoil func(*shot)) {
	full := r.name + "/" + name
	if !w.wants(full) {
		return
	}
	if r.missing {
		want = r.missingWants(name, want)
	}
	if strings.HasSuffix(name, needsNetRaw) && !r.missing && os.Geteuid() != 0 {
		want = unix.EPERM
	}
	s, err := w.prepare(r)
	if err != nil {
		w.record(full, 0, want).Note = ": prepare: " + err.Error()
		return
	}
	if spoil != nil {
		spoil(s)
	}
	for i := range s.req.Out + s.req.UOut {
		s.mem[i] = rawverbs.Poison
	}
	got := s.via.Write(s.raw)
	if s.via != s.c {
		s.via.Close()
	}
	res := w.record(full, got, want)
	if r.always != nil {
		r.always(w)
	}
	if err := s.settle(got, name); err != nil {
		res.Note = ": " + err.Error()
	}
	if r.destroys != rawverbs.NoKind && isBadPointer(name) && !r.missing {
		// The object is gone even though the answer could not be given.
		w.record(full+"/again", s.c.DestroyErrno(r.destroys, s.victim), unix.ENOENT)
	} else if r.destroys != rawverbs.NoKind && s.victim != noVictim {
		switch again := s.c.DestroyErrno(r.destroys, s.victim); {
		case r.missing:
		case got != 0 && again != 0:
			res.Note += fmt.Sprintf(": the object went with it: %v", again)
		case got == 0 && want == 0 && again != unix.ENOENT:
			res.Note += fmt.Sprintf(": the object is still there: %v", again)
		}
	}
}

// settle undoes a success, and checks that a failure left nothing.
func (s *shot) settle(got unix.Errno, name string) error {
	le := binary.LittleEndian
	switch {
	case s.r.fresh && got == 0:
		_ = unix.Close(int(le.Uint32(s.mem)))
	case s.r.fresh:
		// The same file must still be able to get its context.
		if err := s.c.GetContext(); err != nil {
			later := eventually("a context", func() bool { return s.c.GetContext() == nil })
			s.c.Close()
			if later != nil {
				return fmt.Errorf("no context afterwards: %w", err)
			}
			return fmt.Errorf("no context at once afterwards, only later: %w", err)
		}
	case s.r.makesFD && got == 0:
		return unix.Close(int(le.Uint32(s.mem)))
	case s.r.makes != rawverbs.NoKind && got == 0:
		h := le.Uint32(s.mem)
		if name == "no-response" || h == 0xa5a5a5a5 {
			h = s.next
		}
		if h != s.next {
			_ = s.c.Destroy(s.r.makes, h)
			return fmt.Errorf("handle %d, not %d", h, s.next)
		}
		return s.c.Destroy(s.r.makes, h)
	case s.r.makes != rawverbs.NoKind:
		h, err := s.c.AllocPD()
		if err != nil {
			return err
		}
		if err := s.c.Destroy(rawverbs.PD, h); err != nil {
			return err
		}
		if h != s.next {
			return fmt.Errorf("an object was left: the next handle is %d, not %d", h, s.next)
		}
	case s.r.after != nil && got == 0:
		s.r.after(s.w)
	}
	if s.r.fresh {
		s.c.Close()
		s.fds--
	}
	if n, err := rawverbs.NumFDs(); err != nil || n != s.fds {
		return fmt.Errorf("%d descriptors, %d before (%v)", n, s.fds, err)
	}
	return nil
}

func isBadPointer(name string) bool {
	switch name {
	case "resp-none", "resp-ro", "resp-hole", "resp-null", "resp-kernel":
		return true
	}
	return false
}

// row runs every case that makes sense for r.
func (w *walk) row(r *row) {
	w.try(r, "good", r.refused, nil)
	if r.refused != 0 {
		return
	}
	w.lengths(r)
	w.header(r)
	if r.resp > 0 {
		w.pointers(r)
	}
	if r.missing {
		return
	}
	if !r.fresh {
		// What only looks a handle up does not find it; the rest needs the context.
		want := unix.EINVAL
		if len(r.handles) > 0 && r.makes == rawverbs.NoKind {
			want = unix.ENOENT
		}
		w.try(r, "no-context", want, func(s *shot) {
			if c, err := rawverbs.Open(w.node); err == nil {
				s.via = c
			}
		})
	}
	for _, h := range r.handles {
		w.handle(r, h)
	}
	for _, f := range r.fields {
		w.try(r, f.name, f.want, func(s *shot) { f.set(s.body()) })
	}
}

// lengths are cases about how long a request says that it is, and is.
func (w *walk) lengths(r *row) {
	unit, short := 4, r.min
	if r.ex() {
		unit = 8
	}
	w.try(r, "short-byte", unix.EINVAL, func(s *shot) { s.raw = s.raw[:len(s.raw)-1] })
	w.try(r, "lie-small", unix.EINVAL, func(s *shot) { s.addWords(offInWords, -1) })
	w.try(r, "lie-big", unix.EINVAL, func(s *shot) { s.addWords(offInWords, 1) })
	w.try(r, "lie-zero", unix.EINVAL, func(s *shot) { s.setWords(offInWords, 0) })
	w.try(r, "short-header", unix.EINVAL, func(s *shot) { s.raw = s.raw[:abi.CmdHdrSize-1] })
	// The kernel does not keep the sizes of extended commands (uapi_create_write):
	// a short request is filled up with zeros.
	tooShort := unix.ENOSPC
	if r.ex() {
		tooShort = 0
	}
	w.try(r, "short-word", tooShort, func(s *shot) {
		n := short
		if n == 0 {
			n = len(s.req.Body)
		}
		s.req.Body, s.req.UIn = s.req.Body[:(n-1)/unit*unit], nil
		s.reencode()
	})
	if r.min > 0 && r.ex() {
		w.try(r, "least", 0, func(s *shot) {
			s.req.Body = s.req.Body[:(r.min+unit-1)/unit*unit]
			s.reencode()
		})
	}
	if r.num == abi.CmdDestroyCQ {
		// rdma-core 18 and 19 say 16 bytes and mean 24: the kernel reads on behind
		// what was written (verify_hdr).
		w.try(r, "rdma-core-18", 0, func(s *shot) {
			s.setWords(offInWords, 4)
			s.raw = s.raw[:16]
		})
	}
	if r.uin == nil {
		w.try(r, "long-zero", 0, func(s *shot) {
			s.req.Body = append(s.req.Body, make([]byte, unit)...)
			s.reencode()
		})
	}
	if !r.udata || r.ex() {
		w.try(r, "long-set", unix.EOPNOTSUPP, func(s *shot) {
			s.req.Body = append(s.req.Body, make([]byte, unit)...)
			s.req.Body[len(s.req.Body)-1] = 1
			s.reencode()
		})
	}
}

// header are cases about the other header fields.
func (w *walk) header(r *row) {
	for _, bit := range []int{8, 24, 30} {
		w.try(r, fmt.Sprintf("command-bit%d", bit), unix.EINVAL, func(s *shot) { s.orCommand(1 << bit) })
	}
	if r.resp > 0 {
		unit, want := 4, unix.ENOSPC
		if r.ex() {
			unit, want = 8, 0
		}
		w.try(r, "out-small", want, func(s *shot) { s.setWords(offOutWords, (r.resp-1)/unit) })
		if !r.udata {
			w.try(r, "out-long", 0, func(s *shot) { s.req.Out += 64; s.reencode() })
		}
	}
	if !r.ex() {
		return
	}
	w.try(r, "short-ex-header", unix.EINVAL, func(s *shot) { s.raw = s.raw[:abi.CmdHdrSize+8] })
	w.try(r, "header-reserved", unix.EINVAL, func(s *shot) { s.raw[offReserved] = 1 })
	w.try(r, "provider-lie", unix.EINVAL, func(s *shot) { s.addWords(offProvIn, 1) })
	w.try(r, "response-without-words", unix.EINVAL, func(s *shot) {
		_, addr := s.c.Mem.Out()
		s.respond(addr)
		s.setWords(offOutWords, 0)
		s.setWords(offProvOut, 0)
	})
	w.try(r, "words-without-response", unix.EINVAL, func(s *shot) {
		s.respond(0)
		s.setWords(offOutWords, 2)
	})
	if r.resp > 0 {
		w.try(r, "no-response", 0, func(s *shot) {
			s.respond(0)
			s.setWords(offOutWords, 0)
			s.setWords(offProvOut, 0)
		})
	}
}

// pointers are cases of a response that cannot be written.
func (w *walk) pointers(r *row) {
	for _, p := range []struct {
		name string
		addr func(*shot) uint64
	}{
		{"resp-none", func(s *shot) uint64 { return s.c.Mem.None() + 64 }},
		{"resp-ro", func(s *shot) uint64 { return s.c.Mem.RO() + 64 }},
		{"resp-hole", func(s *shot) uint64 { return s.c.Mem.Hole() - uint64(r.resp)/2 }},
		{"resp-kernel", func(*shot) uint64 { return 0xffff_8880_0000_0000 }},
	} {
		w.try(r, p.name, unix.EFAULT, func(s *shot) { s.respond(p.addr(s)) })
	}
	if !r.ex() {
		w.try(r, "resp-null", unix.EFAULT, func(s *shot) { s.respond(0) })
	}
}

// handle are cases of a handle that does not name what it should.
func (w *walk) handle(r *row, h handleField) {
	gone := h.gone
	if gone == 0 {
		gone = unix.ENOENT
	}
	put := func(v uint32) func(*shot) {
		return func(s *shot) { binary.LittleEndian.PutUint32(s.body()[h.off:], v) }
	}
	other := rawverbs.PD
	if h.kind == rawverbs.PD {
		other = rawverbs.CQ
	}
	w.try(r, h.name+"-wrong-type", unix.EINVAL, put(w.own[other]))
	if foreign, ok := w.foreign[h.kind]; ok {
		w.try(r, h.name+"-foreign", gone, put(foreign))
	}
	w.try(r, h.name+"-all-ones", gone, put(^uint32(0)))
	w.try(r, h.name+"-dead", gone, func(s *shot) {
		dead, err := w.make(w.a, h.kind, w.own)
		if err != nil {
			return
		}
		_ = w.a.Destroy(h.kind, dead)
		put(dead)(s)
	})
}

// number is a command number that names nothing.
func (w *walk) number(num uint32) {
	name := fmt.Sprintf("NUMBER-%d", num&abi.CmdMask)
	if num&abi.CmdFlagExtended != 0 {
		name = fmt.Sprintf("EX-NUMBER-%d", num&abi.CmdMask)
	}
	if !w.wants(name + "/good") {
		return
	}
	_, addr := w.a.Mem.Out()
	for _, x := range []struct {
		name  string
		spoil func([]byte)
	}{
		{"good", func([]byte) {}},
		{"lie-small", func(b []byte) { b[offInWords]-- }},
	} {
		req := rawverbs.Request{Num: num, Body: make([]byte, 64), Resp: addr, Out: 64}
		b := req.Encode()
		x.spoil(b)
		w.record(name+"/"+x.name, w.a.Write(b), unix.EOPNOTSUPP)
	}
}
