package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"reflect"
	"sync"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	var buf bytes.Buffer
	c := NewConn(&buf)
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	sent := []*Message{
		{Kind: KindHello, Hello: &Hello{Kernel: "6.1", UptimeMS: 5}},
		{Kind: KindExec, ID: 7, Exec: &Exec{Script: "echo \x00é\n", User: "tester", Stdin: all, TimeoutMS: 10}},
		{Kind: KindOutput, ID: 7, Data: all},
		{Kind: KindExit, ID: 7, Exit: &Exit{Code: 137, Signal: 9, TimedOut: true, Stuck: []string{"x"}}},
	}
	for _, m := range sent {
		if err := c.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range sent {
		got, err := c.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if _, err := c.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last frame: %v, want io.EOF", err)
	}
}

func TestReceiveRefusesBadFrames(t *testing.T) {
	frame := func(n uint32, body string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, n), body...)
	}
	for _, tc := range []struct {
		name string
		in   []byte
		want error
	}{
		{"short length", []byte{0, 0}, io.ErrUnexpectedEOF},
		{"no body", frame(2, ""), io.ErrUnexpectedEOF},
		{"short body", frame(10, "{}"), io.ErrUnexpectedEOF},
		{"too large", frame(MaxFrame+1, "{}"), ErrFrameTooLarge},
		{"not JSON", frame(2, "xx"), nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := NewConn(bytes.NewBuffer(tc.in)).Receive()
			if err == nil || (tc.want != nil && !errors.Is(err, tc.want)) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

func TestSendRefusesTooLarge(t *testing.T) {
	var buf bytes.Buffer
	c := NewConn(&buf)
	err := c.Send(&Message{Kind: KindOutput, Data: make([]byte, MaxFrame)})
	if !errors.Is(err, ErrFrameTooLarge) {
		t.Fatalf("got %v, want ErrFrameTooLarge", err)
	}
	if buf.Len() != 0 {
		t.Errorf("%d bytes were written for a refused message", buf.Len())
	}
}

// Frames of concurrent senders must not interleave.
func TestConcurrentSend(t *testing.T) {
	r, w := io.Pipe()
	send := NewConn(struct {
		io.Reader
		io.Writer
	}{nil, w})
	const senders, each = 8, 50
	var wg sync.WaitGroup
	for i := range senders {
		wg.Go(func() {
			for j := range each {
				data := bytes.Repeat([]byte{byte(i)}, j*10)
				if err := send.Send(&Message{Kind: KindOutput, ID: uint64(i), Data: data}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	go func() { wg.Wait(); _ = w.Close() }()
	receive := NewConn(struct {
		io.Reader
		io.Writer
	}{r, nil})
	next := map[uint64]int{}
	for {
		m, err := receive.Receive()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Data) != next[m.ID]*10 {
			t.Fatalf("sender %d: %d bytes, want %d", m.ID, len(m.Data), next[m.ID]*10)
		}
		next[m.ID]++
	}
	for i := range uint64(senders) {
		if next[i] != each {
			t.Errorf("sender %d: %d frames, want %d", i, next[i], each)
		}
	}
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte{0, 0, 0, 2, '{', '}'})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) >= 4 && binary.BigEndian.Uint32(in) > 1<<16 && binary.BigEndian.Uint32(in) <= MaxFrame {
			return // allocating up to MaxFrame is allowed; it only slows the fuzzer
		}
		c := NewConn(bytes.NewBuffer(in))
		for {
			if _, err := c.Receive(); err != nil {
				return
			}
		}
	})
}
