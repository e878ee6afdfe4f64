package cuse

import "fmt"

const (
	FileRunningMax   = fileRunningMax
	UserRunningShare = userRunningShare
	IdleMax          = idleMax
	DefaultReaders   = defaultReaders
	ParkedBytesMax   = parkedBytesMax
)

// Held says what the session still keeps for clients; empty when nobody has a
// file open, every request has its reply and no handler runs.
func (s *Session) Held() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	files, out, running, bytes := 0, 0, 0, 0
	for _, u := range s.users {
		running += u.running
		bytes += u.bytes
	}
	for _, sl := range s.slots {
		if sl.f != nil {
			files++
		}
	}
	for _, st := range s.out {
		for ; st != nil; st = st.next {
			out++
		}
	}
	owed := int(s.owed.Load())
	if owed+files+out+len(s.users)+running+bytes+s.ninterrupted+s.inside+s.ready.n == 0 {
		return ""
	}
	return fmt.Sprintf("%d files, %d requests (%d interrupted, %d owed a reply), %d users with %d handlers and %d bytes, %d handlers, %d ready",
		files, out, s.ninterrupted, owed, len(s.users), running, bytes, s.inside, s.ready.n)
}

// Workers is how many there are.
func (s *Session) Workers() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}
