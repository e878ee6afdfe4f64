package soft

import (
	"crypto/rand"
	"encoding/binary"
)

// A key, of a region or a window, is scrambled index<<8 | low byte. The index is
// the place in the table; the scrambling is a secret permutation of each device,
// so that neighbours in the table have keys that say nothing of each other. The low
// byte is random for each region and never its predecessor's; for a bound window
// the client chooses it.
//
// This makes keys hard to guess for who does not hold them. It is no cipher that
// withstands somebody who knows tens of thousands of keys of one device; what
// keeps clients apart is the PD, which every use of a key checks.

const (
	keyRounds = 6 // of the Feistel network; 4 are the least that mix both ways
	halfBits  = 12
	halfMask  = 1<<halfBits - 1
)

// keyPerm is a permutation of the 24-bit numbers: a Feistel network whose round
// functions are random tables, 48 KiB in all.
type keyPerm [keyRounds][1 << halfBits]uint16

func (p *keyPerm) init() {
	var b [2 << halfBits]byte
	for r := range p {
		rand.Read(b[:]) // never fails
		for i := range p[r] {
			p[r][i] = binary.NativeEndian.Uint16(b[2*i:]) & halfMask
		}
	}
}

func (p *keyPerm) forward(n uint32) uint32 {
	l, r := n>>halfBits&halfMask, n&halfMask
	for i := range p {
		l, r = r, l^uint32(p[i][r])
	}
	return l<<halfBits | r
}

func (p *keyPerm) back(n uint32) uint32 {
	l, r := n>>halfBits&halfMask, n&halfMask
	for i := keyRounds - 1; i >= 0; i-- {
		l, r = r^uint32(p[i][l]), l
	}
	return l<<halfBits | r
}

// scramble and index are the permutation without 0, which what would get it
// passes on: with index 0 not used no key is below 256, whatever its low byte.
func (p *keyPerm) scramble(i uint32) uint32 {
	if n := p.forward(i); n != 0 {
		return n
	}
	return p.forward(0)
}

// index is the place of scramble(i); of 0, which is no key's, it is some place.
func (p *keyPerm) index(n uint32) uint32 {
	if i := p.back(n); i != 0 {
		return i
	}
	return p.back(0)
}

// randomBytes are random bytes, one by one, fetched many at a time. Its owner's
// lock guards it.
type randomBytes struct {
	buf  [256]byte
	left int
}

func (r *randomBytes) next() byte {
	if r.left == 0 {
		rand.Read(r.buf[:])
		r.left = len(r.buf)
	}
	r.left--
	return r.buf[r.left]
}

// after is a random byte that is not prev.
func (r *randomBytes) after(prev byte) byte {
	for {
		if d := r.next(); d != 0 {
			return prev + d
		}
	}
}
