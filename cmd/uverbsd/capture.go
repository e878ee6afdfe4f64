package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca/roce/capture"
)

const (
	// maxCaptures bounds the captures of a daemon at a time; each has captureBuffer.
	maxCaptures = 16
	// captureBuffer is about the bytes that wait for one client: what a busy device
	// sends in some ten milliseconds, in which a client gets a processor.
	captureBuffer = 8 << 20
	// captureGrace is how long a client may take to read the end of its capture once
	// there is nothing more to come.
	captureGrace = 2 * time.Second
	// maxBlock is more than the longest block of a capture (capture.MaxSnap).
	maxBlock = 64 << 10
)

// captureOrder is what a capture order says beside its device.
type captureOrder struct {
	Count uint64 `json:"count,omitempty"` // packets; 0: until the client closes
	Snap  int    `json:"snap,omitempty"`  // bytes of a packet; 0: capture.DefaultSnap
}

// capture streams a device's packets to c: the outcome as one line of JSON, then
// pcapng, until the client closes its side, the count is reached, the device goes or
// ctx ends.
func (d *devices) capture(ctx context.Context, c net.Conn, o order) {
	s, sub, err := d.subscribe(o)
	out := outcome{}
	if err != nil {
		out.Error = err.Error()
	} else {
		defer d.captures.Add(-1)
		defer sub.Close()
		out.Done = "capture of " + s.entry.Name
	}
	_ = c.SetWriteDeadline(time.Now().Add(controlTimeout))
	if json.NewEncoder(c).Encode(out) != nil || err != nil {
		return
	}
	_ = c.SetDeadline(time.Time{}) // a client may stop and go on: what finds no room is dropped
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, c) // says nothing more, but that it has gone
		cancel()
	}()
	watch := make(chan struct{})
	go func() {
		defer close(watch)
		select {
		case <-ctx.Done():
		case <-sub.Done():
		}
		_ = c.SetDeadline(time.Now().Add(captureGrace))
	}()
	_ = capture.Copy(ctx, c, s.entry.Name, sub, o.Capture.Count) // the client has gone: nobody to tell
	cancel()
	<-watch
	_ = c.Close()
	<-ended
}

// subscribe begins to listen as an order says, and counts it in d.captures.
func (d *devices) subscribe(o order) (*servedDevice, *capture.Subscription, error) {
	s, err := d.captured(o.Device.Name)
	if err != nil {
		return nil, nil, err
	}
	if n := d.captures.Add(1); n > maxCaptures {
		d.captures.Add(-1)
		return nil, nil, fmt.Errorf("capture: %d are under way already, end one", maxCaptures)
	}
	snap := o.Capture.Snap
	if snap == 0 {
		snap = capture.DefaultSnap
	}
	packets := 0
	if snap > 0 {
		packets = min(captureBuffer/snap, capture.MaxPackets)
	}
	sub, err := s.tap.Subscribe(packets, snap)
	if err != nil {
		d.captures.Add(-1)
		return nil, nil, fmt.Errorf("capture of %s: %w", s.entry.Name, err)
	}
	return s, sub, nil
}

// captured is the device to capture: that of the name, or, without one, the only one.
func (d *devices) captured(name string) (*servedDevice, error) {
	if name == "" {
		l := d.reg.List()
		if len(l) != 1 {
			return nil, fmt.Errorf("capture: say which device with --device (there are: %s)", d.names())
		}
		name = l[0].Name
	}
	if s := d.find(name); s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("capture of %s: there is no device of that name: name one of those there are (%s)", name, d.names())
}

// captureCmd is what writes a running daemon's traffic into a file.
func captureCmd() *cobra.Command {
	var socket, file string
	o := order{Do: "capture"}
	cmd := &cobra.Command{
		Use:   "capture -w FILE",
		Short: "write a device's RoCE traffic as pcapng, for Wireshark; also what stays inside the daemon",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runCapture(cmd, socket, file, o)
		},
	}
	cmd.Flags().StringVarP(&file, "write", "w", "", "file to write, - for standard output")
	cmd.Flags().StringVar(&o.Device.Name, "device", "", "device to listen to (default: the only one)")
	cmd.Flags().Uint64Var(&o.Capture.Count, "count", 0, "end after so many packets (default: at Ctrl-C)")
	cmd.Flags().IntVar(&o.Capture.Snap, "snap", 0, fmt.Sprintf("bytes kept of a packet, at most %d (default: %d)", capture.MaxSnap, capture.DefaultSnap))
	cmd.Flags().StringVar(&socket, "socket", defaultControlSocket, "the daemon's control socket")
	_ = cmd.MarkFlagRequired("write")
	return cmd
}

func runCapture(cmd *cobra.Command, socket, file string, o order) (err error) {
	// From here on, so that a Ctrl-C in the middle of anything ends it well.
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM)
	defer stop()
	c, done, err := ask(socket, o)
	if err != nil {
		return err
	}
	defer c.Close()
	w := cmd.OutOrStdout()
	if file != "-" {
		f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600) // clients' payload is in it
		if err != nil {
			return err
		}
		defer func() {
			if e := f.Close(); err == nil {
				err = e
			}
		}()
		w = f
	}
	fmt.Fprintln(cmd.ErrOrStderr(), done)
	release := context.AfterFunc(ctx, func() {
		stop() // a second one ends it at once
		// The daemon sends what it has, and the statistics.
		_ = c.SetReadDeadline(time.Now().Add(captureGrace + controlTimeout))
		_ = c.CloseWrite()
	})
	defer release()
	n, err := copyBlocks(w, c.r)
	if err != nil {
		return fmt.Errorf("capture to %s: %w", file, err)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%d packets written, %d dropped\n", n.written, n.dropped)
	if ctx.Err() == nil && (o.Capture.Count == 0 || n.written < o.Capture.Count) {
		return errors.New("capture: the device is gone, or the daemon has stopped: the file ends there")
	}
	return nil
}

// stream is a connection to the daemon after its first line, which r has read.
type stream struct {
	*net.UnixConn
	r *bufio.Reader
}

// ask gives an order whose answer goes on after the outcome. The connection has no
// deadline.
func ask(socket string, o order) (*stream, string, error) {
	c, err := dial(socket)
	if err != nil {
		return nil, "", err
	}
	s := &stream{c.(*net.UnixConn), bufio.NewReaderSize(c, maxBlock)}
	_ = c.SetDeadline(time.Now().Add(orderTimeout))
	text, err := json.Marshal(o)
	var out outcome
	if err == nil {
		_, err = c.Write(text)
	}
	var line []byte
	if err == nil {
		line, err = s.r.ReadSlice('\n')
	}
	if err == nil {
		err = json.Unmarshal(line, &out)
	}
	switch {
	case err != nil:
		err = fmt.Errorf("the daemon at %s did not answer (see its log): %w", socket, err)
	case out.Error != "":
		err = errors.New(out.Error)
	}
	if err != nil {
		_ = c.Close()
		return nil, "", err
	}
	_ = c.SetDeadline(time.Time{})
	return s, out.Done, nil
}

// captured is what a capture came to.
type captured struct{ written, dropped uint64 }

// Of pcapng (draft-ietf-opsawg-pcapng §3.1, 3.5, 4.3, 4.5).
const (
	blockStats   = 5
	blockPacket  = 6
	blockMin     = 12
	statsOptions = 20 // where a block of statistics has its options
	optIfDrop    = 5
)

// copyBlocks copies a capture block by block, so that the file ends with a whole one
// whatever happens, and at once what has come. A capture ends with its statistics.
func copyBlocks(w io.Writer, r *bufio.Reader) (n captured, err error) {
	b := bufio.NewWriterSize(w, maxBlock)
	ended := false
	for {
		if r.Buffered() == 0 {
			if err := b.Flush(); err != nil {
				return n, err
			}
		}
		head, err := r.Peek(8)
		if err == io.EOF && len(head) == 0 && ended {
			return n, b.Flush()
		}
		var block []byte
		if err == nil {
			size := binary.LittleEndian.Uint32(head[4:])
			if size < blockMin || size > maxBlock || size%4 != 0 {
				err = fmt.Errorf("the daemon sent a block of %d bytes", size)
			} else {
				block, err = r.Peek(int(size))
			}
		}
		if err != nil {
			_ = b.Flush()
			return n, fmt.Errorf("cut off after %d packets: %w", n.written, err)
		}
		switch binary.LittleEndian.Uint32(block) {
		case blockPacket:
			n.written++
		case blockStats:
			n.dropped, ended = droppedIn(block), true
		}
		if _, err := b.Write(block); err != nil {
			return n, err
		}
		_, _ = r.Discard(len(block))
	}
}

// droppedIn is how many packets a block of statistics says were dropped.
func droppedIn(block []byte) uint64 {
	if len(block) < statsOptions+4 {
		return 0
	}
	o := block[statsOptions : len(block)-4]
	for len(o) >= 12 {
		code, size := binary.LittleEndian.Uint16(o), int(binary.LittleEndian.Uint16(o[2:]))
		if code == optIfDrop && size == 8 {
			return binary.LittleEndian.Uint64(o[4:])
		}
		o = o[min(4+(size+3)&^3, len(o)):]
	}
	return 0
}
