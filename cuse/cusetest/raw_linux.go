package cusetest

import (
	"encoding/binary"
	"fmt"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
)

// sendBuffer holds one whole WRITE of the default size, and some to spare.
const sendBuffer = 1 << 20

// pair makes a socket pair that keeps message boundaries, as /dev/cuse does.
func pair(t testing.TB) (ours int, ch *cuse.Channel) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer) // capped without privilege: 208 KiB will do
		}
	}
	ch, err = cuse.NewChannel(fds[1])
	if err != nil {
		_ = unix.Close(fds[0])
		t.Fatal(err)
	}
	return fds[0], ch
}

// Raw is the kernel's end of a session with nothing around it: for benchmarks,
// fuzzing and handshakes. It is not running; Session is.
type Raw struct {
	Session *cuse.Session
	FD      int // blocking; closed by Close
	mounted bool
}

// NewRaw makes a session and the other end of its channel. Close is the caller's.
func NewRaw(t testing.TB, h cuse.Handler, cfg cuse.Config) *Raw {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "infiniband/uverbs0"
	}
	fd, ch := pair(t)
	return &Raw{Session: cuse.New(ch, h, cfg), FD: fd}
}

// NewRawMounted is NewRaw for the session of a mounted file system.
func NewRawMounted(t testing.TB, tree cuse.Tree, cfg cuse.Config) *Raw {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "ctx-0"
	}
	fd, ch := pair(t)
	return &Raw{Session: cuse.NewMounted(ch, tree, cfg), FD: fd, mounted: true}
}

// Send sends one message as the kernel would.
func (k *Raw) Send(msg []byte) error {
	_, err := unix.Write(k.FD, msg)
	return err
}

// Recv gets one message of the session's.
func (k *Raw) Recv(buf []byte) (int, error) {
	for {
		n, err := unix.Read(k.FD, buf)
		if err != unix.EINTR {
			return n, err
		}
	}
}

// SendInit asks for a handshake as a kernel of this protocol version.
func (k *Raw) SendInit(major, minor uint32) error {
	var in abi.CuseInitIn
	in.Major, in.Minor, in.Flags = major, minor, abi.CuseUnrestrictedIoctl
	return k.Send(Message(abi.FuseInHeader{Opcode: abi.CuseInit, Unique: 2}, bytesOf(&in)))
}

// SendFuseInit asks a mounted session for a handshake.
func (k *Raw) SendFuseInit(in abi.FuseInitIn) error {
	return k.Send(Message(abi.FuseInHeader{Opcode: abi.FuseInit, Unique: 2}, bytesOf(&in)))
}

// PassthroughInit is what a kernel that has passthrough says.
func PassthroughInit() abi.FuseInitIn {
	return abi.FuseInitIn{
		Major: abi.FuseKernelVersion, Minor: abi.FusePassthroughMinor, MaxReadahead: 1 << 17,
		Flags: abi.FuseInitExt | abi.FuseMaxPages | abi.FuseBigWrites | abi.FuseParallelDirops, Flags2: abi.FuseInit2Passthrough,
	}
}

// Handshake does a whole one, as Linux 6.1; for a mounted file system as 6.9.
func (k *Raw) Handshake() error {
	var err error
	if k.mounted {
		err = k.SendFuseInit(PassthroughInit())
	} else {
		err = k.SendInit(abi.FuseKernelVersion, abi.FuseKernelMinorVersion)
	}
	if err != nil {
		return err
	}
	if err := k.Session.Handshake(); err != nil {
		return err
	}
	var buf [256]byte
	n, err := k.Recv(buf[:])
	if err == nil && (n < 16 || binary.NativeEndian.Uint32(buf[4:]) != 0) {
		err = fmt.Errorf("cusetest: bad INIT reply % x", buf[:n])
	}
	return err
}

// Close closes both ends.
func (k *Raw) Close() {
	_ = k.Session.Close()
	_ = unix.Close(k.FD)
}

// Message puts a request together; the header's length is filled in.
func Message(h abi.FuseInHeader, parts ...[]byte) []byte {
	msg := append([]byte(nil), bytesOf(&h)...)
	for _, p := range parts {
		msg = append(msg, p...)
	}
	binary.NativeEndian.PutUint32(msg, uint32(len(msg)))
	return msg
}

func bytesOf[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), int(unsafe.Sizeof(*p)))
}
