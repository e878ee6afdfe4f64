package caller

// mapsScan walks the lines of /proc/PID/maps, "start-end rwxp offset dev inode path", which come in address order and in
// chunks that may break anywhere, and finds out whether [next, end) is covered. It does not allocate. Anything that it
// does not understand ends the scan as "not covered".
type mapsScan struct {
	next, end uint64 // next: the first byte not yet known to be covered
	write     bool

	state      mapsState
	start, lim uint64 // of the line at hand
	ok         bool   // its permission
}

type mapsState uint8

const (
	mapsStart mapsState = iota
	mapsEnd
	mapsRead
	mapsWrite
	mapsRest
)

// covered is the result once feed has returned true.
func (s *mapsScan) covered() bool { return s.next >= s.end }

// feed takes the next chunk and reports whether the result is known.
func (s *mapsScan) feed(b []byte) (done bool) {
	for _, c := range b {
		switch s.state {
		case mapsStart:
			if c == '-' {
				s.state = mapsEnd
			} else if !hexDigit(&s.start, c) {
				return true
			}
		case mapsEnd:
			if c == ' ' {
				s.state = mapsRead
			} else if !hexDigit(&s.lim, c) {
				return true
			}
		case mapsRead:
			s.ok = s.write || c == 'r'
			s.state = mapsWrite
		case mapsWrite:
			s.ok = s.ok && (!s.write || c == 'w')
			s.state = mapsRest
			if s.lim > s.next { // the line reaches beyond what is known
				if s.start > s.next || !s.ok {
					return true
				}
				if s.next = s.lim; s.next >= s.end {
					return true
				}
			}
		case mapsRest:
			if c == '\n' {
				s.state, s.start, s.lim = mapsStart, 0, 0
			}
		}
	}
	return false
}

func hexDigit(v *uint64, c byte) bool {
	switch {
	case c >= '0' && c <= '9':
		c -= '0'
	case c >= 'a' && c <= 'f':
		c -= 'a' - 10
	default:
		return false
	}
	*v = *v<<4 | uint64(c)
	return true
}
