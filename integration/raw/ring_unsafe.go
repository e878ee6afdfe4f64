package main

import (
	"sync/atomic"
	"unsafe"

	"github.com/uverbsd/uverbsd/abi"
)

// ring is this client's view of a mapped queue. Unlike librxe's it keeps the sizes
// that it found at first, so that a row can spoil the header and go on.
type ring struct {
	mem         []byte
	shift, mask uint32
}

func newRing(mem []byte) ring {
	r := ring{mem: mem}
	r.shift, r.mask = r.header().Log2ElemSize, r.header().IndexMask
	return r
}

func (r ring) header() *abi.RXEQueueBuf { return (*abi.RXEQueueBuf)(unsafe.Pointer(&r.mem[0])) }

func (r ring) producer() uint32     { return atomic.LoadUint32(&r.header().ProducerIndex) }
func (r ring) consumer() uint32     { return atomic.LoadUint32(&r.header().ConsumerIndex) }
func (r ring) setProducer(i uint32) { atomic.StoreUint32(&r.header().ProducerIndex, i) }
func (r ring) setConsumer(i uint32) { atomic.StoreUint32(&r.header().ConsumerIndex, i) }

func (r ring) entry(i uint32) []byte {
	n := 1 << r.shift
	return r.mem[int(unsafe.Sizeof(abi.RXEQueueBuf{}))+int(i&r.mask)*n:][:n:n]
}

func (r ring) send(i uint32) *abi.RXESendWQE {
	return (*abi.RXESendWQE)(unsafe.Pointer(&r.entry(i)[0]))
}

func (r ring) recv(i uint32) *abi.RXERecvWQE {
	return (*abi.RXERecvWQE)(unsafe.Pointer(&r.entry(i)[0]))
}

func (r ring) wc(i uint32) *abi.WC { return (*abi.WC)(unsafe.Pointer(&r.entry(i)[0])) }

func (r ring) putSendSGE(i uint32, k int, g abi.RXESGE) {
	*(*abi.RXESGE)(unsafe.Pointer(&r.entry(i)[int(unsafe.Sizeof(abi.RXESendWQE{}))+k*int(unsafe.Sizeof(g))])) = g
}

func (r ring) putRecvSGE(i uint32, k int, g abi.RXESGE) {
	*(*abi.RXESGE)(unsafe.Pointer(&r.entry(i)[int(unsafe.Sizeof(abi.RXERecvWQE{}))+k*int(unsafe.Sizeof(g))])) = g
}

// putRDMA is where an RDMA request goes.
func putRDMA(w *abi.RXESendWQE, addr uint64, rkey uint32) {
	*(*abi.RXERDMAWR)(unsafe.Pointer(&w.WR.WR)) = abi.RXERDMAWR{RemoteAddr: addr, RKey: rkey}
}
