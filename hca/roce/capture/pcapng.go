package capture

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

// Block types, option codes and constants of draft-ietf-opsawg-pcapng; all is written
// in little endian.
const (
	blockSection   = 0x0A0D0D0A // §4.1
	blockInterface = 1          // §4.2
	blockStats     = 5          // §4.5
	blockPacket    = 6          // §4.3
	byteOrder      = 0x1A2B3C4D
	linkTypeRaw    = 101 // begins with an IPv4 or IPv6 header

	optEnd      = 0 // §3.5
	optAppl     = 4 // shb_userappl
	optName     = 2 // if_name
	optResol    = 9 // if_tsresol
	optFlags    = 2 // epb_flags
	optStart    = 2 // isb_starttime
	optEndTime  = 3 // isb_endtime
	optReceived = 4 // isb_ifrecv
	optDropped  = 5 // isb_ifdrop

	// resolution is if_tsresol: times are in 10^-9 s.
	resolution = 9
	// bufferSize gathers small packets into one write.
	bufferSize = 64 << 10
	// maxName bounds the interface's name; longer ones are cut.
	maxName = 255
)

// Writer writes packets as a pcapng file. It is for one goroutine. After an error all
// that follows fails with it.
type Writer struct {
	w   *bufio.Writer
	buf []byte // one block
}

// NewWriter begins a file: a section, and one interface with that name, of which at
// most snap bytes a packet are kept.
func NewWriter(w io.Writer, name string, snap int) (*Writer, error) {
	p := &Writer{w: bufio.NewWriterSize(w, bufferSize)}
	p.begin(blockSection)
	p.u32(byteOrder)
	p.u16(1) // version 1.0
	p.u16(0)
	p.u64(^uint64(0)) // the section's length is not known
	p.option(optAppl, "uverbsd")
	p.option(optEnd, "")
	if err := p.end(); err != nil {
		return nil, err
	}
	p.begin(blockInterface)
	p.u16(linkTypeRaw)
	p.u16(0)
	p.u32(uint32(snap))
	p.option(optName, name[:min(len(name), maxName)])
	p.option(optResol, string(rune(resolution)))
	p.option(optEnd, "")
	if err := p.end(); err != nil {
		return nil, err
	}
	return p, nil
}

// Write writes a packet. It may stay in the buffer until Flush.
func (p *Writer) Write(k Packet) error {
	p.begin(blockPacket)
	p.u32(0) // the interface
	p.time(k.Time)
	p.u32(uint32(len(k.Data)))
	p.u32(uint32(max(k.Len, len(k.Data))))
	p.buf = append(p.buf, k.Data...)
	p.pad()
	p.u16(optFlags)
	p.u16(4)
	p.u32(uint32(k.Dir))
	p.option(optEnd, "")
	return p.end()
}

// Finish ends the file with how many packets went past since start, and how many of
// these are not in it, and flushes.
func (p *Writer) Finish(start time.Time, received, dropped uint64) error {
	now := time.Now()
	p.begin(blockStats)
	p.u32(0)
	p.time(now)
	p.u16(optStart)
	p.u16(8)
	p.time(start)
	p.u16(optEndTime)
	p.u16(8)
	p.time(now)
	for _, o := range []struct {
		code uint16
		n    uint64
	}{{optReceived, received}, {optDropped, dropped}} {
		p.u16(o.code)
		p.u16(8)
		p.u64(o.n)
	}
	p.option(optEnd, "")
	if err := p.end(); err != nil {
		return err
	}
	return p.Flush()
}

// Flush writes what is buffered.
func (p *Writer) Flush() error {
	if err := p.w.Flush(); err != nil {
		return fmt.Errorf("write capture: %w", err)
	}
	return nil
}

func (p *Writer) u16(v uint16) { p.buf = binary.LittleEndian.AppendUint16(p.buf, v) }
func (p *Writer) u32(v uint32) { p.buf = binary.LittleEndian.AppendUint32(p.buf, v) }
func (p *Writer) u64(v uint64) { p.buf = binary.LittleEndian.AppendUint64(p.buf, v) }

// time writes a time in its two halves, the upper one first.
func (p *Writer) time(t time.Time) {
	ns := uint64(t.UnixNano())
	p.u32(uint32(ns >> 32))
	p.u32(uint32(ns))
}

func (p *Writer) pad() {
	for len(p.buf)%4 != 0 {
		p.buf = append(p.buf, 0)
	}
}

func (p *Writer) option(code uint16, value string) {
	p.u16(code)
	p.u16(uint16(len(value)))
	p.buf = append(p.buf, value...)
	p.pad()
}

func (p *Writer) begin(typ uint32) {
	p.buf = p.buf[:0]
	p.u32(typ)
	p.u32(0) // length, when it is known
}

func (p *Writer) end() error {
	n := uint32(len(p.buf) + 4)
	p.u32(n)
	binary.LittleEndian.PutUint32(p.buf[4:], n)
	if _, err := p.w.Write(p.buf); err != nil {
		return fmt.Errorf("write capture: %w", err)
	}
	return nil
}

// Copy writes a subscription's packets as a file until count are written (0: no
// bound), ctx ends or the subscription does, none of which is an error, and closes the
// subscription. What waits when ctx ends is written too. What was read is written at
// the latest when no more waits.
func Copy(ctx context.Context, w io.Writer, name string, s *Subscription, count uint64) error {
	defer s.Close()
	p, err := NewWriter(w, name, s.snap)
	if err != nil {
		return err
	}
	var dropped uint64
	written := uint64(0)
	for count == 0 || written < count {
		if len(s.full) == 0 {
			if err := p.Flush(); err != nil {
				return err
			}
		}
		k, err := s.Next(ctx)
		if err != nil && ctx.Err() != nil {
			// No more come: what is there is read without waiting.
			s.Close()
			k, err = s.Next(context.WithoutCancel(ctx))
		}
		dropped = s.Dropped()
		if err != nil {
			break
		}
		if err := p.Write(k); err != nil {
			return err
		}
		written++
	}
	s.Close()
	// What comes in after the last one that was asked for is not counted.
	return p.Finish(s.start, written+dropped, dropped)
}
