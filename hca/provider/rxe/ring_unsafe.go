package rxe

import (
	"sync/atomic"
	"unsafe"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca"
)

const (
	headerSize  = int(unsafe.Sizeof(abi.RXEQueueBuf{}))
	sendWQESize = int(unsafe.Sizeof(abi.RXESendWQE{}))
	recvWQESize = int(unsafe.Sizeof(abi.RXERecvWQE{}))
	sgeSize     = int(unsafe.Sizeof(abi.RXESGE{}))
	wcSize      = int(unsafe.Sizeof(abi.WC{}))
)

// An SGE is the same here and there, so that a list is copied as bytes.
var (
	_ [unsafe.Sizeof(abi.RXESGE{})]byte          = [unsafe.Sizeof(hca.SGE{})]byte{}
	_ [unsafe.Offsetof(abi.RXESGE{}.Addr)]byte   = [unsafe.Offsetof(hca.SGE{}.Addr)]byte{}
	_ [unsafe.Offsetof(abi.RXESGE{}.Length)]byte = [unsafe.Offsetof(hca.SGE{}.Length)]byte{}
	_ [unsafe.Offsetof(abi.RXESGE{}.LKey)]byte   = [unsafe.Offsetof(hca.SGE{}.LKey)]byte{}
)

// header is the ring's; the arena's memory begins on a page.
func (r *ring) header() *abi.RXEQueueBuf { return (*abi.RXEQueueBuf)(unsafe.Pointer(&r.mem[0])) }

// producer and consumer are what the client says, made to fit.
func (r *ring) producer() uint32 { return atomic.LoadUint32(&r.header().ProducerIndex) & r.mask }
func (r *ring) consumer() uint32 { return atomic.LoadUint32(&r.header().ConsumerIndex) & r.mask }

// setProducer and setConsumer come after the entry was written or copied.
func (r *ring) setProducer(i uint32) { atomic.StoreUint32(&r.header().ProducerIndex, i) }
func (r *ring) setConsumer(i uint32) { atomic.StoreUint32(&r.header().ConsumerIndex, i) }

// copySend copies the fixed part of an entry, once.
func copySend(to *abi.RXESendWQE, e []byte) {
	copy(unsafe.Slice((*byte)(unsafe.Pointer(to)), sendWQESize), e)
}

func copyRecv(to *abi.RXERecvWQE, e []byte) {
	copy(unsafe.Slice((*byte)(unsafe.Pointer(to)), recvWQESize), e)
}

// copySGEs copies as many pieces as to has room for, all of which are in e.
func copySGEs(to []hca.SGE, e []byte) {
	if len(to) > 0 {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&to[0])), len(to)*sgeSize), e[:len(to)*sgeSize])
	}
}

// copyWC writes a completion.
func copyWC(e []byte, wc *abi.WC) {
	copy(e, unsafe.Slice((*byte)(unsafe.Pointer(wc)), wcSize))
}

// The forms of a request's union.
func rdmaOf(w *abi.RXESendWR) *abi.RXERDMAWR     { return (*abi.RXERDMAWR)(unsafe.Pointer(&w.WR)) }
func atomicOf(w *abi.RXESendWR) *abi.RXEAtomicWR { return (*abi.RXEAtomicWR)(unsafe.Pointer(&w.WR)) }
func udOf(w *abi.RXESendWR) *abi.RXEUDWR         { return (*abi.RXEUDWR)(unsafe.Pointer(&w.WR)) }
func flushOf(w *abi.RXESendWR) *abi.RXEFlushWR   { return (*abi.RXEFlushWR)(unsafe.Pointer(&w.WR)) }
func mwOf(w *abi.RXESendWR) *abi.RXEMWWR         { return (*abi.RXEMWWR)(unsafe.Pointer(&w.WR)) }

// answer is a struct's bytes.
func answer[T any](v *T) []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))...)
}
