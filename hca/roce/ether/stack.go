package ether

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/uverbsd/uverbsd/hca/nic"
)

const (
	// nicID is what netstack calls our only port.
	nicID = 1
	// minFrame is the least that goes over an Ethernet, without FCS (IEEE 802.3
	// §4A.4.2): netstack's frames are padded to it.
	minFrame = 60
)

// newStack makes a netstack with the link's addresses: IPv4 with IGMP, IPv6 with MLD
// and without autoconfiguration or duplicate address detection (the addresses are
// what the configuration says, and are usable at once), no transport protocol.
func (l *Link) newStack() error {
	l.stack = stack.New(stack.Options{
		NetworkProtocols: []stack.NetworkProtocolFactory{
			arp.NewProtocol,
			ipv4.NewProtocolWithOptions(ipv4.Options{IGMP: ipv4.IGMPOptions{Enabled: true}}),
			ipv6.NewProtocolWithOptions(ipv6.Options{MLD: ipv6.MLDOptions{Enabled: true}}),
		},
		Clock:   l.clock,
		NUDDisp: neighbours{l},
	})
	l.stackEnd.l = l
	if err := l.stack.CreateNIC(nicID, &l.stackEnd); err != nil {
		return fmt.Errorf("network stack takes no NIC: %s", err)
	}
	var table []tcpip.Route
	for _, p := range l.net.addrs {
		proto, _ := protocol(p.Addr())
		pa := tcpip.ProtocolAddress{
			Protocol:          proto,
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: address(p.Addr()), PrefixLen: p.Bits()},
		}
		if err := l.stack.AddProtocolAddress(nicID, pa, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("network stack does not take address %s: %s", p, err)
		}
		table = append(table, tcpip.Route{Destination: pa.AddressWithPrefix.Subnet(), NIC: nicID})
	}
	if g := l.net.gateway4; g.IsValid() {
		table = append(table, tcpip.Route{Destination: header.IPv4EmptySubnet, Gateway: address(g), NIC: nicID})
	}
	if g := l.net.gateway6; g.IsValid() {
		table = append(table, tcpip.Route{Destination: header.IPv6EmptySubnet, Gateway: address(g), NIC: nicID})
	}
	l.stack.SetRouteTable(table)
	return nil
}

// forStack is a frame on its way to netstack.
type forStack struct {
	typ tcpip.NetworkProtocolNumber
	pkt *stack.PacketBuffer
}

// toStack puts a copy of a frame into netstack's queue, without its VLAN tag.
func (l *Link) toStack(f []byte, l3 int) {
	if len(l.queue) == cap(l.queue) { // before a copy is made
		l.count.stackFull.Add(1)
		return
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: ethHeader,
		Payload:            buffer.MakeWithData(f[l3:]),
	})
	h := pkt.LinkHeader().Push(ethHeader)
	copy(h, f[:12])
	copy(h[12:], f[l3-2:l3])
	pkt.PktType = tcpip.PacketHost
	if f[0]&1 != 0 {
		pkt.PktType = tcpip.PacketMulticast
		if nic.MAC(f[:6]) == (nic.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}) {
			pkt.PktType = tcpip.PacketBroadcast
		}
	}
	typ := tcpip.NetworkProtocolNumber(binary.BigEndian.Uint16(f[l3-2:]))
	select {
	case l.queue <- forStack{typ, pkt}:
		l.count.stackRx.Add(1)
	default:
		pkt.DecRef()
		l.count.stackFull.Add(1)
	}
}

// feed hands the queue to netstack until the link is closed. Nothing else calls into
// netstack from outside but Join, Leave, Close and ask.
func (l *Link) feed() {
	defer close(l.fed)
	for {
		select {
		case <-l.done:
			for {
				select {
				case p := <-l.queue:
					p.pkt.DecRef()
				default:
					return
				}
			}
		case <-l.plugged:
			l.replug()
		case p := <-l.queue:
			if d := l.stackEnd.dispatcher.Load(); d != nil {
				(*d).DeliverNetworkPacket(p.typ, p.pkt)
			}
			p.pkt.DecRef()
		}
	}
}

// stackEnd is the link as netstack sees it (stack.LinkEndpoint).
type stackEnd struct {
	l          *Link
	dispatcher atomic.Pointer[stack.NetworkDispatcher]
	frames     sync.Pool // *[]byte, of the port's MaxFrame
}

func (e *stackEnd) MTU() uint32                      { return uint32(e.l.net.mtu) }
func (e *stackEnd) SetMTU(uint32)                    {}
func (e *stackEnd) MaxHeaderLength() uint16          { return ethHeader }
func (e *stackEnd) LinkAddress() tcpip.LinkAddress   { return tcpip.LinkAddress(e.l.mac[:]) }
func (e *stackEnd) SetLinkAddress(tcpip.LinkAddress) {}
func (e *stackEnd) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityResolutionRequired
}
func (e *stackEnd) IsAttached() bool                        { return e.dispatcher.Load() != nil }
func (e *stackEnd) Wait()                                   {}
func (e *stackEnd) Close()                                  {}
func (e *stackEnd) SetOnCloseAction(func())                 {}
func (e *stackEnd) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }

func (e *stackEnd) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		e.dispatcher.Store(nil)
		return
	}
	e.dispatcher.Store(&d)
}

func (e *stackEnd) AddHeader(pkt *stack.PacketBuffer) {
	header.Ethernet(pkt.LinkHeader().Push(ethHeader)).Encode(&header.EthernetFields{
		SrcAddr: pkt.EgressRoute.LocalLinkAddress,
		DstAddr: pkt.EgressRoute.RemoteLinkAddress,
		Type:    pkt.NetworkProtocolNumber,
	})
}

func (e *stackEnd) ParseHeader(pkt *stack.PacketBuffer) bool {
	_, ok := pkt.LinkHeader().Consume(ethHeader)
	return ok
}

// WritePackets sends netstack's frames. One that finds the ring full for long is lost
// as on a wire, without a word: netstack would take an error for the neighbour's
// silence.
func (e *stackEnd) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	l := e.l
	buf, _ := e.frames.Get().(*[]byte)
	if buf == nil {
		b := make([]byte, max(l.port.MaxFrame(), minFrame))
		buf = &b
	}
	defer e.frames.Put(buf)
	n := 0
	for _, pkt := range pkts.AsSlice() {
		size := l.net.head - ethHeader + pkt.Size()
		if size > l.net.head+l.net.mtu {
			l.count.stackLost.Add(1)
			return n, &tcpip.ErrMessageTooLong{}
		}
		f := (*buf)[:0]
		for _, s := range pkt.AsSlices() {
			f = append(f, s...)
		}
		if l.net.vlan != 0 {
			typ := binary.BigEndian.Uint16(f[12:])
			f = f[:size]
			copy(f[ethHeader+vlanTag:], f[ethHeader:])
			l.putHeader(f, nic.MAC(f[:6]), typ)
		}
		for len(f) < minFrame {
			f = append(f, 0)
		}
		n++
		switch sent, _, err := l.push([][]byte{f}, true); {
		case sent == 1:
			l.count.stackTx.Add(1)
		case l.failed(err) == nil:
			l.count.stackLost.Add(1)
		default:
			l.count.stackLost.Add(1)
			return n - 1, &tcpip.ErrClosedForSend{}
		}
	}
	return n, nil
}
