package main

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// patience is how long anything may take that must happen. Two emulated
	// processors and some twenty processes: what takes milliseconds alone has
	// been seen to take seconds.
	patience = 60 * time.Second
	// goneWait is how long after an error the news of a peer's death may take.
	goneWait = 10 * time.Second
)

// errGone: the peer's process has ended, or has closed the connection.
var errGone = errors.New("the peer is gone")

// wrongError is a fault even if the peer is gone: wrong bytes that were said to be
// right.
type wrongError struct{ error }

// hello is what the ends tell each other of their objects.
type hello struct {
	QPN     [srqQPs]uint32
	QKey    uint32
	In, Out uint64
	RKey    uint32
}

// step is a message's kind.
type step uint8

const (
	stepHello step = iota
	stepReady      // connected
	stepSpec
	stepGo   // the target: it is prepared
	stepDone // the active end: its completions are there
	stepOK   // the target: it has found all right
)

// message is what goes over the connection beside a link.
type message struct {
	Step  step
	Hello hello
	Spec  spec
	Stop  bool // the sender wants to end
}

// control is that connection.
type control struct {
	conn *net.UnixConn
	enc  *gob.Encoder
	dec  *gob.Decoder
}

func newControl(c *net.UnixConn) *control { return &control{c, gob.NewEncoder(c), gob.NewDecoder(c)} }

func gone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

func (c *control) send(m message) error {
	_ = c.conn.SetWriteDeadline(time.Now().Add(patience))
	if err := c.enc.Encode(m); gone(err) {
		return errGone
	} else if err != nil {
		return fmt.Errorf("tell the peer: %w", err)
	}
	return nil
}

// receive is the next message, which must be of kind s.
func (c *control) receive(s step) (message, error) {
	_ = c.conn.SetReadDeadline(time.Now().Add(patience))
	var m message
	if err := c.dec.Decode(&m); gone(err) {
		return m, errGone
	} else if err != nil {
		return m, fmt.Errorf("hear from the peer: %w", err)
	}
	if m.Step != s {
		return m, fmt.Errorf("the peer says %d, not %d", m.Step, s)
	}
	return m, nil
}

// settle says what an error in the midst of a round means: the peer's death, if
// the connection tells of it, or a fault.
func (c *control) settle(err error) error {
	var wrong wrongError
	if err == nil || errors.Is(err, errGone) || errors.As(err, &wrong) {
		return err
	}
	_ = c.conn.SetReadDeadline(time.Now().Add(goneWait))
	for {
		var m message
		if e := c.dec.Decode(&m); gone(e) {
			return errGone
		} else if e != nil {
			return err
		}
	}
}
