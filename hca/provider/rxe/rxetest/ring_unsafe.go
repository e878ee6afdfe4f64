package rxetest

import (
	"sync/atomic"
	"unsafe"

	"github.com/uverbsd/uverbsd/abi"
)

// Ring is librxe's view of a queue (rxe_queue.h): it goes by the header.
type Ring struct{ Mem []byte }

// Header is the queue's.
func (r Ring) Header() *abi.RXEQueueBuf { return (*abi.RXEQueueBuf)(unsafe.Pointer(&r.Mem[0])) }

// Producer and Consumer are the indices.
func (r Ring) Producer() uint32 { return atomic.LoadUint32(&r.Header().ProducerIndex) }

// Consumer is what was taken last.
func (r Ring) Consumer() uint32 { return atomic.LoadUint32(&r.Header().ConsumerIndex) }

// SetProducer stores an index.
func (r Ring) SetProducer(i uint32) { atomic.StoreUint32(&r.Header().ProducerIndex, i) }

// SetConsumer stores an index.
func (r Ring) SetConsumer(i uint32) { atomic.StoreUint32(&r.Header().ConsumerIndex, i) }

// Entry is the place at an index.
func (r Ring) Entry(i uint32) []byte {
	h := r.Header()
	n := 1 << h.Log2ElemSize
	return r.Mem[int(unsafe.Sizeof(*h))+int(i&h.IndexMask)*n:][:n:n]
}

// Next is the index after one.
func (r Ring) Next(i uint32) uint32 { return (i + 1) & r.Header().IndexMask }

// Full: there is no room for the client to write to.
func (r Ring) Full() bool { return r.Next(r.Producer()) == r.Consumer() }

// Empty: there is nothing for the client to read.
func (r Ring) Empty() bool { return r.Producer() == r.Consumer() }

// Send is the entry as a request, Recv as a receive, WC as a completion.
func (r Ring) Send(i uint32) *abi.RXESendWQE {
	return (*abi.RXESendWQE)(unsafe.Pointer(&r.Entry(i)[0]))
}

// Recv is the entry as a receive.
func (r Ring) Recv(i uint32) *abi.RXERecvWQE {
	return (*abi.RXERecvWQE)(unsafe.Pointer(&r.Entry(i)[0]))
}

// WC is the entry as a completion.
func (r Ring) WC(i uint32) *abi.WC { return (*abi.WC)(unsafe.Pointer(&r.Entry(i)[0])) }

// SendData is what follows a request, RecvData what follows a receive.
func (r Ring) SendData(i uint32) []byte { return r.Entry(i)[unsafe.Sizeof(abi.RXESendWQE{}):] }

// RecvData is what follows a receive.
func (r Ring) RecvData(i uint32) []byte { return r.Entry(i)[unsafe.Sizeof(abi.RXERecvWQE{}):] }

// PutSGE writes a piece.
func PutSGE(to []byte, k int, g abi.RXESGE) {
	*(*abi.RXESGE)(unsafe.Pointer(&to[k*int(unsafe.Sizeof(g))])) = g
}

// Answer reads a struct out of an answer.
func Answer[T any](b []byte) T { return *(*T)(unsafe.Pointer(&b[:unsafe.Sizeof(*new(T))][0])) }

func rdmaOf(w *abi.RXESendWR) *abi.RXERDMAWR     { return (*abi.RXERDMAWR)(unsafe.Pointer(&w.WR)) }
func atomicOf(w *abi.RXESendWR) *abi.RXEAtomicWR { return (*abi.RXEAtomicWR)(unsafe.Pointer(&w.WR)) }
func udOf(w *abi.RXESendWR) *abi.RXEUDWR         { return (*abi.RXEUDWR)(unsafe.Pointer(&w.WR)) }
func flushOf(w *abi.RXESendWR) *abi.RXEFlushWR   { return (*abi.RXEFlushWR)(unsafe.Pointer(&w.WR)) }
func mwOf(w *abi.RXESendWR) *abi.RXEMWWR         { return (*abi.RXEMWWR)(unsafe.Pointer(&w.WR)) }

// PutRDMA writes the form of RDMA requests, PutAH that of datagrams.
func PutRDMA(w *abi.RXESendWR, addr uint64, rkey uint32) {
	*rdmaOf(w) = abi.RXERDMAWR{RemoteAddr: addr, RKey: rkey}
}

// PutAH names an address handle, and the QP behind it.
func PutAH(w *abi.RXESendWR, num, qpn, qkey uint32) {
	*udOf(w) = abi.RXEUDWR{AHNum: num, RemoteQPN: qpn, RemoteQKey: qkey}
}
