package udp

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// batchSize is how many packets one system call sends or receives at most: more
// gain nothing, the call's own cost is then a hundredth of the packets'.
const batchSize = 64

// controlSize holds the three control messages that an IPv6 packet comes with: 40,
// 24 and 24 bytes.
const controlSize = 96

// mmsghdr is struct mmsghdr (socket.h).
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   [unsafe.Sizeof(uintptr(0)) - 4]byte
}

// sender is what one sendmmsg needs.
type sender struct {
	msgs [batchSize]mmsghdr
	iovs [batchSize]unix.Iovec
	to4  unix.RawSockaddrInet4
	to6  unix.RawSockaddrInet6
	name *byte // of the messages
}

func newSender() *sender {
	s := &sender{}
	for i := range s.msgs {
		s.msgs[i].hdr.Iov = &s.iovs[i]
		s.msgs[i].hdr.SetIovlen(1)
	}
	return s
}

// to sets where the packets go.
func (s *sender) to(dst hca.GID, index int) {
	name, size := (*byte)(unsafe.Pointer(&s.to6)), uint32(unix.SizeofSockaddrInet6)
	if a, v4 := dst.IPv4(); v4 {
		s.to4 = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: a}
		name, size = (*byte)(unsafe.Pointer(&s.to4)), unix.SizeofSockaddrInet4
	} else {
		// The index counts for link-local addresses alone.
		s.to6 = unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: dst, Scope_id: uint32(index)}
	}
	if s.name == name {
		return
	}
	s.name = name
	for i := range s.msgs {
		s.msgs[i].hdr.Name, s.msgs[i].hdr.Namelen = name, size
	}
}

// put makes packet the i-th; it is not empty.
func (s *sender) put(i int, packet []byte) {
	s.iovs[i].Base = &packet[0]
	s.iovs[i].SetLen(len(packet))
}

// send sends packets from to to, and says how many went, at least one if there is no
// error; the error is of the first that did not.
func (s *sender) send(fd, from, to int) (int, unix.Errno) {
	n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&s.msgs[from])), uintptr(to-from), 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// clear forgets the packets, which are the caller's.
func (s *sender) clear(n int) {
	for i := range s.iovs[:n] {
		s.iovs[i].Base = nil
	}
}

// batch is what one recvmmsg needs, with buffers for packets that are to come.
type batch struct {
	msgs    [batchSize]mmsghdr
	iovs    [batchSize]unix.Iovec
	names   [batchSize]unix.RawSockaddrInet6
	control [batchSize][controlSize]byte
	tokens  [batchSize]int32 // of buffers
	filled  int              // of tokens
	last    int              // the family that packets came by
	streak  int              // how often in a row
	events  [2]unix.EpollEvent
	both    bool // the last wait was told of both sockets
}

func newBatch() *batch {
	b := &batch{}
	for i := range b.msgs {
		b.msgs[i].hdr.Iov = &b.iovs[i]
		b.msgs[i].hdr.SetIovlen(1)
	}
	return b
}

// prepare readies n messages for a family.
func (b *batch) prepare(n int, v6 bool, pool *buffers) {
	for i := range n {
		h := &b.msgs[i].hdr
		h.Flags = 0
		buf := pool.bytes(b.tokens[i])
		if v6 {
			h.Name, h.Namelen = (*byte)(unsafe.Pointer(&b.names[i])), unix.SizeofSockaddrInet6
			h.Control = &b.control[i][0]
			h.SetControllen(controlSize)
			buf = buf[ipv6Size:] // the header is put in front
		} else {
			h.Name, h.Namelen, h.Control = nil, 0, nil
			h.SetControllen(0)
		}
		b.iovs[i].Base = &buf[0]
		b.iovs[i].SetLen(len(buf))
	}
}

// receive takes what is there, up to n packets, and does not wait.
func (b *batch) receive(fd, n int) (int, unix.Errno) {
	got, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&b.msgs[0])), uintptr(n), unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(got), 0
}

// truncated says that the i-th packet was longer than any RoCE packet.
func (b *batch) truncated(i int) bool {
	return b.msgs[i].hdr.Flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0
}

// header6 writes the i-th packet's IPv6 header in front of it, into buf, and says
// whether the kernel told all of it.
func (b *batch) header6(i int, buf []byte) bool {
	const toldAll = 1 | 2 | 4
	told := 0
	binary.BigEndian.PutUint32(buf, 6<<28)
	binary.BigEndian.PutUint16(buf[4:], uint16(b.msgs[i].len))
	buf[6] = unix.IPPROTO_UDP
	copy(buf[v6Src:], b.names[i].Addr[:])
	c := b.control[i][:min(int(b.msgs[i].hdr.Controllen), controlSize)]
	for len(c) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&c[0]))
		n := int(h.Len)
		if n < unix.SizeofCmsghdr || n > len(c) {
			return false
		}
		data := c[unix.CmsgLen(0):n]
		if h.Level == unix.IPPROTO_IPV6 && len(data) >= 4 {
			switch h.Type {
			case unix.IPV6_TCLASS:
				class := binary.NativeEndian.Uint32(data)
				buf[0] |= byte(class >> 4 & 0xf)
				buf[1] = byte(class << 4)
				told |= 1
			case unix.IPV6_HOPLIMIT:
				buf[7] = byte(binary.NativeEndian.Uint32(data))
				told |= 2
			case unix.IPV6_PKTINFO:
				if len(data) >= 16 {
					copy(buf[v6Dst:ipv6Size], data[:16])
					told |= 4
				}
			}
		}
		c = c[min(unix.CmsgSpace(n-unix.CmsgLen(0)), len(c)):]
	}
	return told == toldAll
}

// overflows is how many packets a socket dropped because its queue was full.
func overflows(fd int) uint64 {
	const dropped = 8 // SK_MEMINFO_DROPS, linux/sock_diag.h
	var info [dropped + 1]uint32
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0
	}
	return uint64(info[dropped])
}
