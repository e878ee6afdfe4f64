package cuse

import (
	"encoding/binary"
	"errors"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
)

const headerLen = 40 // sizeof(struct fuse_in_header)

// minBody is the fixed part of each request that a handler sees.
func minBody(op uint32) (int, bool) {
	switch op {
	case abi.FuseOpen:
		return 8, true
	case abi.FuseRead, abi.FuseWrite:
		return 40, true
	case abi.FuseRelease, abi.FuseFlush, abi.FusePoll:
		return 24, true
	case abi.FuseIoctl:
		return 32, true
	}
	return 0, false
}

// message deals with one message read by w, and says whether w still is a reader.
func (s *Session) message(w *worker, msg []byte) bool {
	var h abi.FuseInHeader
	if !load(&h, msg) {
		s.misuse("short message", zap.Int("bytes", len(msg)))
		return true
	}
	switch h.Opcode {
	case abi.FuseForget, abi.FuseBatchForget, abi.FuseNotifyReply:
		return true // no reply wanted, and a Tree counts no lookups
	case abi.FuseInterrupt:
		return s.interrupt(w, &h, msg)
	}
	if h.Unique == 0 {
		s.misuse("request without a unique", zap.Uint32("opcode", h.Opcode))
		return true
	}
	fixed, ok := minBody(h.Opcode)
	if !ok && s.tree != nil {
		s.answer(h, msg)
		return true
	}
	if !ok {
		s.sendError(h.Unique, unix.ENOSYS)
		return true
	}
	body := msg[headerLen:]
	if int(h.Len) != len(msg) || len(body) < fixed {
		s.misuse("malformed request", zap.Uint32("opcode", h.Opcode), zap.Int("bytes", len(msg)))
		s.sendError(h.Unique, unix.EIO)
		return true
	}
	head := Request{tid: h.PID, uid: h.UID, gid: h.GID}
	fh, size := binary.NativeEndian.Uint64(body), 0
	switch h.Opcode {
	case abi.FuseOpen:
		head.fileFlags = uint32(binary.NativeEndian.Uint32(body))
	case abi.FuseRead, abi.FuseWrite: // alike up to here: fh offset size flags owner flags
		size = int(binary.NativeEndian.Uint32(body[16:]))
		head.fileFlags = binary.NativeEndian.Uint32(body[32:])
		if h.Opcode == abi.FuseWrite && size > len(body)-fixed {
			s.misuse("write longer than its message")
			s.sendError(h.Unique, unix.EIO)
			return true
		}
	}
	st := s.admit(w, &h, fh, head, size, msg)
	if st == nil {
		return true
	}
	s.wakeMonitor()
	return s.run(w, st, msg)
}

// serve calls the handler for an entered request, unless that was answered for a
// killed client since. A RELEASE has to run whatever became of its reply. msg was
// checked by message.
func (s *Session) serve(st *request, msg []byte) {
	r := st.head
	if st.op != abi.FuseRelease && !r.open() {
		return
	}
	defer func() {
		if p := recover(); p != nil {
			s.panicked("a handler", p)
			r.tryError(unix.EIO)
		}
	}()
	body := msg[headerLen:]
	f := st.f
	switch st.op {
	case abi.FuseOpen:
		s.open(r, binary.NativeEndian.Uint64(msg[16:])) // fuse_in_header.nodeid
	case abi.FuseRead:
		f.impl.Read(r, st.size)
	case abi.FuseWrite:
		var in abi.FuseWriteIn
		load(&in, body)
		data, ok := body[40:40+st.size:40+st.size], true
		if f.framer != nil {
			if data, ok = s.join(r, f.framer, &in, data); !ok {
				return
			}
		}
		f.impl.Write(r, data)
	case abi.FusePoll:
		var in abi.FusePollIn
		load(&in, body)
		f.impl.Poll(r, PollArgs{Kh: in.Kh, Events: in.Events, ScheduleNotify: in.Flags&abi.FusePollScheduleNotify != 0})
	case abi.FuseIoctl:
		var in abi.FuseIoctlIn
		load(&in, body)
		n := min(int(in.InSize), len(body)-32)
		f.impl.Ioctl(r, IoctlArgs{Cmd: in.Cmd, Flags: in.Flags, Arg: in.Arg, OutSize: in.OutSize, Data: body[32 : 32+n : 32+n]})
	case abi.FuseFlush:
		f.impl.Flush(r)
	case abi.FuseRelease:
		var in abi.FuseReleaseIn
		load(&in, body)
		s.releaseFile(f, in.Flags)
		r.ReplyOK()
	}
}

// releaseFile tells the file that it ended.
func (s *Session) releaseFile(f *file, flags uint32) {
	s.callback(func() { f.impl.Release(flags) })
}

// open answers OPEN.
func (s *Session) open(r Request, node uint64) {
	var impl File
	var how OpenReply
	var err error
	if s.tree != nil {
		impl, how, err = s.tree.OpenNode(r, node, r.fileFlags)
	} else {
		impl, err = s.h.Open(r, r.fileFlags)
	}
	if err == nil && impl == nil {
		err = unix.EIO
	}
	if err != nil {
		errno := unix.EIO
		errors.As(err, &errno)
		r.ReplyError(errno)
		return
	}
	framer, _ := impl.(Framer)
	f := &file{impl: impl, framer: framer}
	s.mu.Lock()
	ok := r.claim(wordAnswered)
	var fh uint64
	if ok {
		s.unlinkLocked(r.st)
		f.user = s.userLocked(r.uid)
		fh = s.addFileLocked(f)
	}
	s.mu.Unlock()
	if ok {
		var m struct {
			h abi.FuseOutHeader
			b abi.FuseOpenOut
		}
		m.b.Fh = fh
		m.b.OpenFlags, m.b.BackingID = how.Flags, how.Backing
		m.h.Unique = r.st.unique
		m.h.Len = uint32(len(bytesOf(&m)))
		if errno := s.sendRaw(bytesOf(&m)); errno == unix.ENOENT {
			// The client died while it waited: no RELEASE will come.
			ok = !s.takeBack(fh, f)
		}
		r.st.replied()
	}
	if !ok {
		s.releaseFile(f, 0)
	}
}

// takeBack takes a file off the table, and says whether it was there still:
// shutdown may have taken the table, and then releases the file itself.
func (s *Session) takeBack(fh uint64, f *file) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fileLocked(fh) != f {
		return false
	}
	s.removeFileLocked(fh)
	s.putUserLocked(f.user)
	return true
}

// interrupt deals with INTERRUPT. It has no reply but one: for a request that is
// not known, "ask again", since another worker may have read it and not yet
// entered it. If it is over, the kernel ignores that.
func (s *Session) interrupt(w *worker, h *abi.FuseInHeader, msg []byte) bool {
	var in abi.FuseInterruptIn
	if !load(&in, msg[headerLen:]) {
		s.misuse("malformed INTERRUPT", zap.Int("bytes", len(msg)))
		return true
	}
	s.mu.Lock()
	st := s.findLocked(in.Unique)
	if st == nil {
		s.mu.Unlock()
		if h.Unique&abi.FuseIntReqBit != 0 && !s.closing.Load() {
			s.sendError(h.Unique, unix.EAGAIN)
		}
		return true
	}
	if st.interrupted.IsZero() {
		st.interrupted = time.Now()
		s.ninterrupted++
	}
	f := st.onInterrupt
	st.onInterrupt = nil
	if f != nil {
		s.enterLocked(w, nil)
	}
	s.nhandled++
	s.mu.Unlock()
	s.wakeMonitor()
	if f == nil {
		return true
	}
	s.callback(f)
	s.mu.Lock()
	s.leaveLocked(w)
	reading := w.active
	s.mu.Unlock()
	return reading
}
