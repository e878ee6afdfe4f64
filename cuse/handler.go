package cuse

// Handler answers OPEN.
type Handler interface {
	// Open makes the state behind one open file. An error that wraps a
	// unix.Errno becomes that errno (ENOSYS excepted: it would switch OPEN off
	// for good, and becomes EIO), any other EIO. The session replies.
	Open(r Request, flags uint32) (File, error)
}

// File is one open file. Each method but Release must lead to exactly one reply
// on r, now or later, from any goroutine. Methods are called concurrently.
type File interface {
	// Write gets a whole write(); data is valid until Write returns.
	Write(r Request, data []byte)
	Read(r Request, size int)
	Poll(r Request, p PollArgs)
	Ioctl(r Request, a IoctlArgs)
	Flush(r Request) // never sent by CUSE itself
	// Release is called once, when the last reference has gone and every request
	// on the file has its reply. The client's close() or exit waits for it to
	// return, so it must not wait for the client's memory. Work that runs on
	// after its reply (Request.After, or a handler whose client was killed, see
	// Config.Killed) may still be running.
	Release(flags uint32)
}

// Framer is implemented by a File whose commands can be longer than one WRITE
// (fs/fuse/file.c, fuse_direct_io: at most max_write bytes and 32 pages each).
type Framer interface {
	// WholeSize says how many bytes the command that starts with first has in
	// all. Up to len(first) means that there is nothing to wait for.
	WholeSize(first []byte) int
}

// PollArgs is what a POLL asks.
type PollArgs struct {
	Kh             uint64 // to be passed to Session.Notify
	Events         uint32 // POLLIN ... the client asks for
	ScheduleNotify bool   // the client goes to sleep: Notify(Kh) when ready
}

// IoctlArgs is what an IOCTL asks. Arg is the client's pointer; Data is what the
// kernel copied in (nothing, for an unrestricted ioctl's first round).
type IoctlArgs struct {
	Cmd     uint32
	Flags   uint32 // abi.FuseIoctl*
	Arg     uint64
	OutSize uint32
	Data    []byte // valid until Ioctl returns
}
