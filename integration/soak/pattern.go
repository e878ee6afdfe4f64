package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
)

// blank is what memory holds that nothing may be written to.
const blank = 0xee

// mix is splitmix64's output function: neighbouring keys give unlike patterns.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// fill writes key's pattern over b. No two words of a pattern are alike, so that
// data in the wrong place is wrong data.
func fill(b []byte, key uint64) {
	for i := uint64(0); len(b) >= 8; i++ {
		binary.LittleEndian.PutUint64(b, mix(key+i))
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(mix(key^0x5a) >> (8 * i))
	}
}

// blanks is what b is compared with and copied from at once: most of what is
// looked at is blank.
var blanks = bytes.Repeat([]byte{blank}, slotLen)

// wipe makes b, at most a slot, blank.
func wipe(b []byte) { copy(b, blanks[:len(b)]) }

// check compares b with key's pattern.
func check(b []byte, key uint64) error {
	var w [8]byte
	for at := 0; at < len(b); at += 8 {
		n := min(8, len(b)-at)
		if n == 8 {
			want := mix(key + uint64(at/8))
			if binary.LittleEndian.Uint64(b[at:]) == want {
				continue
			}
			binary.LittleEndian.PutUint64(w[:], want)
		} else {
			fill(w[:n], key)
		}
		for i := range n {
			if b[at+i] != w[i] {
				return fmt.Errorf("byte %d of %d is %#02x, not %#02x", at+i, len(b), b[at+i], w[i])
			}
		}
	}
	return nil
}

// checkBlank says that nothing was written to b, at most a slot.
func checkBlank(b []byte) error {
	if bytes.Equal(b, blanks[:len(b)]) {
		return nil
	}
	i := slices.IndexFunc(b, func(x byte) bool { return x != blank })
	return fmt.Errorf("byte %d of %d that nothing should touch is %#02x", i, len(b), b[i])
}
