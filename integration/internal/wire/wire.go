// Package wire is the protocol between the guest harness on the host and the agent inside the guest: a byte stream
// of frames, each a big-endian uint32 length followed by that many bytes of JSON, one Message per frame.
//
// The valid sequences, host on the left:
//
//	                 <- hello                    once, first
//	exec(id)         -> ... <- started(id), output(id)*, exit(id)     exit is always the last word about an id
//	signal(id), kill(id)                         about a running id; ignored for any other
//	daemon-start     -> <- daemon-started        Error set when the daemon did not become ready
//	daemon-stop      -> <- daemon-exit           Asked set
//	                 <- daemon-exit              by itself, Asked not set
package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// PortName is the name of the virtio-serial port that carries the protocol.
const PortName = "uverbsd.agent"

// MaxFrame bounds one frame in bytes, so that a stray byte on the port cannot make a peer allocate without limit.
// It holds the largest script or standard input an Exec may bring, base64 included.
const MaxFrame = 32 << 20

// MaxOutput bounds the payload of one output message in bytes, so that concurrent steps share the port fairly.
const MaxOutput = 32 << 10

// ErrFrameTooLarge says that a frame is longer than MaxFrame.
var ErrFrameTooLarge = errors.New("frame longer than the protocol allows")

// Kind names a message.
type Kind string

// The messages; see the package comment for who sends which and when.
const (
	KindHello         Kind = "hello"
	KindExec          Kind = "exec"
	KindStarted       Kind = "started"
	KindOutput        Kind = "output"
	KindExit          Kind = "exit"
	KindSignal        Kind = "signal"
	KindKill          Kind = "kill"
	KindDaemonStart   Kind = "daemon-start"
	KindDaemonStarted Kind = "daemon-started"
	KindDaemonStop    Kind = "daemon-stop"
	KindDaemonExit    Kind = "daemon-exit"
)

// Message is one frame. Only the fields its Kind needs are set.
type Message struct {
	Kind   Kind   `json:"kind"`
	ID     uint64 `json:"id,omitempty"`     // the step: exec, started, output, exit, signal, kill
	PID    int    `json:"pid,omitempty"`    // started, daemon-started: the process in the guest
	Data   []byte `json:"data,omitempty"`   // output
	Signal int    `json:"signal,omitempty"` // signal, daemon-stop: the signal's number
	Error  string `json:"error,omitempty"`  // daemon-started: why the daemon is not ready

	Hello  *Hello  `json:"hello,omitempty"`
	Exec   *Exec   `json:"exec,omitempty"`
	Exit   *Exit   `json:"exit,omitempty"` // exit, daemon-exit
	Daemon *Daemon `json:"daemon,omitempty"`

	TimeoutMS int64 `json:"timeout_ms,omitempty"` // daemon-stop: how long to wait before SIGKILL
}

// Hello is the agent's greeting.
type Hello struct {
	Kernel   string `json:"kernel"`    // uname -r
	UptimeMS int64  `json:"uptime_ms"` // since the guest's kernel started
}

// Exec asks for one step.
type Exec struct {
	Script    string   `json:"script"`
	User      string   `json:"user,omitempty"` // empty: root
	Dir       string   `json:"dir,omitempty"`
	Env       []string `json:"env,omitempty"`
	Stdin     []byte   `json:"stdin,omitempty"`
	TimeoutMS int64    `json:"timeout_ms"`
}

// Exit says how a step or the daemon ended.
type Exit struct {
	Code     int      `json:"code"`               // the exit status, or 128 plus the signal
	Signal   int      `json:"signal,omitempty"`   // the signal that ended it, 0 if none
	TimedOut bool     `json:"timedout,omitempty"` // the agent killed it at its time limit
	Leftover int      `json:"leftover,omitempty"` // processes the step left running, killed by the agent
	Stuck    []string `json:"stuck,omitempty"`    // processes that survived SIGKILL, with where they sleep
	Asked    bool     `json:"asked,omitempty"`    // daemon-exit: in answer to daemon-stop
	Error    string   `json:"error,omitempty"`    // the step could not be started, or its end is unknown
}

// Daemon says how to start the daemon and how to know that it is ready.
type Daemon struct {
	Path      string   `json:"path"`
	Args      []string `json:"args"`
	Env       []string `json:"env,omitempty"`
	Log       string   `json:"log"`   // stdout and stderr go here, appended
	Node      string   `json:"node"`  // a character device that must exist
	Class     string   `json:"class"` // a file that must be readable and not empty
	TimeoutMS int64    `json:"timeout_ms"`
}

// Conn sends and receives messages. Send may be called concurrently; Receive by one goroutine at a time.
type Conn struct {
	mu sync.Mutex // serialises frames on w
	w  io.Writer
	r  *bufio.Reader
}

// NewConn speaks the protocol over rw.
func NewConn(rw io.ReadWriter) *Conn {
	return &Conn{w: rw, r: bufio.NewReaderSize(rw, 64<<10)}
}

// Send writes one message. ErrFrameTooLarge leaves the stream usable; any other error does not.
func (c *Conn) Send(m *Message) error {
	body, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", m.Kind, err)
	}
	if len(body) > MaxFrame {
		return fmt.Errorf("send %s of %d bytes: %w", m.Kind, len(body), ErrFrameTooLarge)
	}
	frame := make([]byte, 4+len(body))
	binary.BigEndian.PutUint32(frame, uint32(len(body)))
	copy(frame[4:], body)
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.w.Write(frame); err != nil {
		return fmt.Errorf("send %s: %w", m.Kind, err)
	}
	return nil
}

// Receive reads one message. It returns io.EOF only between frames; an end inside one is io.ErrUnexpectedEOF.
func (c *Conn) Receive() (*Message, error) {
	var head [4]byte
	if _, err := io.ReadFull(c.r, head[:]); err != nil {
		if err == io.EOF {
			return nil, io.EOF
		}
		return nil, fmt.Errorf("receive length: %w", err)
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > MaxFrame {
		return nil, fmt.Errorf("receive %d bytes: %w", n, ErrFrameTooLarge)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(c.r, body); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, fmt.Errorf("receive %d bytes: %w", n, err)
	}
	m := new(Message)
	if err := json.Unmarshal(body, m); err != nil {
		return nil, fmt.Errorf("decode frame of %d bytes: %w", n, err)
	}
	return m, nil
}
