package hcatest

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

// Mem is a client's memory: a byte slice at an address. It can be read-only,
// fail, or block, as a client's pages can.
type Mem struct {
	Base     uint64
	ReadOnly bool

	failing atomic.Bool
	calls   atomic.Int64 // ReadAt and WriteAt so far
	outside atomic.Int64 // those of them beyond the bytes there are

	// stack, if set before any traffic, is told of accesses from inside a verb.
	stack  *onStack
	inside atomic.Pointer[string] // the verb that last touched the memory itself

	// gateMu guards gate: while it is set, accesses report on gate.in and wait
	// for gate.out to be closed.
	gateMu sync.Mutex
	gate   *Gate

	// mu guards b: two devices may write one address, as over a wire.
	mu sync.Mutex
	b  []byte
}

// Gate is a page that nobody fills in.
type Gate struct {
	In  chan struct{} // one value per access that blocks
	out chan struct{}
}

var _ hca.Memory = (*Mem)(nil)

// NewMem is n zero bytes at base.
func NewMem(base uint64, n int) *Mem { return &Mem{Base: base, b: make([]byte, n)} }

// Block makes every access from now on wait for Unblock.
func (m *Mem) Block() *Gate {
	m.gateMu.Lock()
	defer m.gateMu.Unlock()
	m.gate = &Gate{In: make(chan struct{}, 1024), out: make(chan struct{})}
	return m.gate
}

// Unblock lets waiting accesses go on.
func (m *Mem) Unblock() {
	m.gateMu.Lock()
	defer m.gateMu.Unlock()
	if m.gate != nil {
		close(m.gate.out)
		m.gate = nil
	}
}

// Fail makes every access fail, as when the process is gone.
func (m *Mem) Fail(on bool) { m.failing.Store(on) }

func (m *Mem) access(n int, addr uint64) (int, error) {
	m.calls.Add(1)
	if m.stack != nil {
		if v := m.stack.below(); v != "" {
			m.inside.Store(&v)
		}
	}
	m.gateMu.Lock()
	g := m.gate
	m.gateMu.Unlock()
	if g != nil {
		g.In <- struct{}{}
		<-g.out
	}
	off := addr - m.Base
	beyond := addr < m.Base || off > uint64(len(m.b)) || uint64(n) > uint64(len(m.b))-off
	if beyond {
		m.outside.Add(1)
	}
	if beyond || m.failing.Load() {
		return 0, fmt.Errorf("%d bytes at %#x: %w", n, addr, unix.EFAULT)
	}
	return int(off), nil
}

// ReadAt is hca.Memory's.
func (m *Mem) ReadAt(p []byte, addr uint64) error {
	off, err := m.access(len(p), addr)
	if err != nil {
		return err
	}
	m.mu.Lock()
	copy(p, m.b[off:])
	m.mu.Unlock()
	return nil
}

// WriteAt is hca.Memory's.
func (m *Mem) WriteAt(p []byte, addr uint64) error {
	off, err := m.access(len(p), addr)
	if err == nil && m.ReadOnly {
		err = unix.EFAULT
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	copy(m.b[off:], p)
	m.mu.Unlock()
	return nil
}

// Set stores p at an offset.
func (m *Mem) Set(off int, p []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	copy(m.b[off:], p)
}

// Get copies n bytes from an offset.
func (m *Mem) Get(off, n int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]byte(nil), m.b[off:off+n]...)
}

// Pattern is n bytes that depend on seed and position.
func Pattern(seed, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7 + i>>8 + seed*31 + 1)
	}
	return p
}
