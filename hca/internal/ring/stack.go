package ring

import "sync/atomic"

// None is the end of a chain of a Stack.
const None = -1

// Stack collects indices that many goroutines push and one at a time takes, all at
// once. Taking all at once is what makes it safe without tags: nobody ever replaces
// a head by what he read to be next to it.
type Stack struct {
	head atomic.Uint32 // index + 1; 0 is empty
	next []uint32
}

// NewStack makes an empty one for the indices below n.
func NewStack(n int) *Stack { return &Stack{next: make([]uint32, n)} }

// Push puts i on it. An index may be on it once.
func (s *Stack) Push(i int) {
	for {
		old := s.head.Load()
		s.next[i] = old
		if s.head.CompareAndSwap(old, uint32(i)+1) {
			return
		}
	}
}

// Empty says whether there is nothing on it just now.
func (s *Stack) Empty() bool { return s.head.Load() == 0 }

// Take takes everything and returns the first index, None if there is none.
func (s *Stack) Take() int {
	if s.Empty() { // a load is cheaper than the exchange
		return None
	}
	return int(s.head.Swap(0)) - 1
}

// Next is the index after i in what was taken. Ask before i can be pushed again.
func (s *Stack) Next(i int) int { return int(s.next[i]) - 1 }
