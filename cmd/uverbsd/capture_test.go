package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/capture"
)

// serveTest is a daemon with a control socket and these devices.
func serveTest(t *testing.T, names ...string) (*daemon, string) {
	t.Helper()
	d, _ := newTestDevices(t)
	daemon := &daemon{devices: d, log: zap.NewNop()}
	path := filepath.Join(t.TempDir(), "control.sock")
	if err := daemon.serveControl(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := daemon.stop(); err != nil {
			t.Error(err)
		}
	})
	for _, n := range names {
		if _, err := d.add(deviceConfig{Name: n}); err != nil {
			t.Fatal(err)
		}
	}
	return daemon, path
}

// lockedBuffer is what a command prints, read while it runs.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
	c  chan struct{} // closed at the first line
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.b.Len() == 0 && l.c != nil {
		close(l.c)
	}
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// blocksOf takes a capture apart into the types of its blocks and the packets.
func blocksOf(t *testing.T, f []byte) (types []uint32, packets [][]byte) {
	t.Helper()
	for len(f) > 0 {
		n := int(binary.LittleEndian.Uint32(f[4:]))
		typ := binary.LittleEndian.Uint32(f)
		types = append(types, typ)
		if typ == blockPacket {
			packets = append(packets, f[28:28+binary.LittleEndian.Uint32(f[20:])])
		}
		f = f[n:]
	}
	return types, packets
}

// noMemory is a region of zeros.
type noMemory struct{}

func (noMemory) ReadAt(p []byte, _ uint64) error { clear(p); return nil }
func (noMemory) WriteAt([]byte, uint64) error    { return nil }

// datagram sends a datagram of n bytes to a queue pair that is not there.
func datagram(t *testing.T, d hca.Device, n int) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx, err := d.AllocUContext(nil)
	must(err)
	pd, err := ctx.AllocPD()
	must(err)
	cq, err := ctx.CreateCQ(hca.CQInit{Entries: 4})
	must(err)
	mr, err := pd.RegMR(hca.MRInit{Mem: noMemory{}, Start: 4096, Length: 4096, IOVA: 4096})
	must(err)
	q, err := pd.CreateQP(hca.QPInit{Type: hca.QPTypeUD, SendCQ: cq, RecvCQ: cq, Cap: hca.QPCap{MaxSendWR: 4, MaxSendSGE: 1}})
	must(err)
	must(q.Modify(&hca.QPAttr{State: hca.QPInitState, Port: 1}, hca.QPMaskState|hca.QPMaskPKeyIndex|hca.QPMaskPort|hca.QPMaskQKey))
	must(q.Modify(&hca.QPAttr{State: hca.QPRTR}, hca.QPMaskState))
	must(q.Modify(&hca.QPAttr{State: hca.QPRTS}, hca.QPMaskState|hca.QPMaskSQPSN))
	port, err := d.Port(1)
	must(err)
	ah, err := pd.CreateAH(hca.AHAttr{DLID: port.LID, Port: 1})
	must(err)
	_, err = q.PostSend([]hca.SendWR{{Opcode: hca.OpSend, AH: ah, RemoteQPN: 77, SGE: []hca.SGE{{Addr: 4096, Length: uint32(n), LKey: mr.LKey()}}}})
	must(err)
	q.Run()
	for _, c := range []io.Closer{ah, q, mr, cq, pd, ctx} {
		must(c.Close())
	}
}

// TestCapture: the command's file has what the device says, to the end, however that
// comes.
func TestCapture(t *testing.T) {
	for _, c := range []struct {
		name, args string
		want, err  string
	}{
		{"interrupted", "", "3 packets written, 0 dropped", ""},
		{"count", "--count 3 --device qib0", "3 packets written, 0 dropped", ""},
		{"removed", "", "3 packets written, 0 dropped", "the device is gone"},
		{"stopped", "", "3 packets written, 0 dropped", "the daemon has stopped"},
		{"to a file", "", "3 packets written, 0 dropped", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, socket := serveTest(t, "qib0")
			file := "-"
			if c.name == "to a file" {
				file = filepath.Join(t.TempDir(), "capture.pcapng")
			}
			var out bytes.Buffer
			told := &lockedBuffer{c: make(chan struct{})}
			ctx, interrupt := context.WithCancel(t.Context())
			cmd := root()
			cmd.SetOut(&out)
			cmd.SetErr(told)
			cmd.SetArgs(append([]string{"capture", "-w", file, "--socket", socket}, strings.Fields(c.args)...))
			done := make(chan error)
			go func() { done <- cmd.ExecuteContext(ctx) }()
			<-told.c
			for n := range 3 {
				datagram(t, d.find("qib0").engine, 100+n)
			}
			switch c.name {
			case "interrupted":
				if err := unix.Kill(os.Getpid(), unix.SIGINT); err != nil { // which the command catches
					t.Error(err)
				}
			case "to a file":
				interrupt()
			case "removed":
				if _, err := d.remove("qib0"); err != nil {
					t.Error(err)
				}
			case "stopped":
				if err := d.stop(); err != nil {
					t.Error(err)
				}
			}
			err := <-done
			interrupt()
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if s := told.String(); !strings.HasSuffix(s, c.want+"\n") {
				t.Errorf("said %q, want %q", s, c.want)
			}
			b := out.Bytes()
			if file != "-" {
				if b, err = os.ReadFile(file); err != nil {
					t.Fatal(err)
				}
			}
			types, packets := blocksOf(t, b)
			if len(types) != 6 || types[5] != blockStats {
				t.Fatalf("blocks %x", types)
			}
			for n, p := range packets {
				var k roce.Packet
				if err := roce.Parse(p, &k); err != nil || k.Op != roce.UD|roce.SendOnly || k.QPN != 77 || len(k.Payload) != 100+n {
					t.Errorf("packet %d: %v, %+v", n, err, k)
				}
			}
		})
	}
}

// wantRefused runs a capture that fails with a text.
func wantRefused(t *testing.T, socket, args, text string) {
	t.Helper()
	cmd := root()
	cmd.SetOut(io.Discard)
	cmd.SetErr(io.Discard)
	cmd.SetArgs(append([]string{"capture", "--socket", socket}, strings.Fields(args)...))
	if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v, want %q", args, err, text)
	}
}

func TestCaptureNoFile(t *testing.T) {
	_, socket := serveTest(t, "qib0")
	wantRefused(t, socket, "-w /nonexistent/file", "/nonexistent/file")
}

func TestCaptureRefused(t *testing.T) {
	d, socket := serveTest(t)
	want := func(args, text string) {
		t.Helper()
		wantRefused(t, socket, args, text)
	}
	want("", `"write" not set`)
	want("-w -", "say which device with --device (there are: none)")
	for _, n := range []string{"qib0", "qib1"} {
		if _, err := d.add(deviceConfig{Name: n}); err != nil {
			t.Fatal(err)
		}
	}
	want("-w -", "(there are: qib0, qib1)")
	want("-w - --device qib7", "no device of that name: name one of those there are (qib0, qib1)")
	want("-w - --device qib0 --snap -1", "capture of qib0")
	want("-w - --device qib0 --snap 100000", "at most")
	want("-w - --socket /nonexistent", "is `uverbsd serve` running?")
	// As many as may be.
	var open []net.Conn
	for i := range maxCaptures {
		s, _, err := ask(socket, order{Do: "capture", Device: deviceConfig{Name: []string{"qib0", "qib1"}[i%2]}})
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, s)
	}
	want("-w - --device qib0", "16 are under way already, end one")
	for _, c := range open {
		_ = c.Close()
	}
	if d.find("qib0").tap == d.find("qib1").tap {
		t.Error("one tap")
	}
}

// A client that does not read, and one that goes away, hold up neither the device nor
// the daemon.
func TestCaptureSlow(t *testing.T) {
	d, socket := serveTest(t, "qib0")
	tap := d.find("qib0").tap
	var slow []*stream
	for range 3 {
		s, _, err := ask(socket, order{Do: "capture"})
		if err != nil {
			t.Fatal(err)
		}
		slow = append(slow, s)
	}
	p := make([]byte, 4000)
	for range 10_000 { // 40 MB, far more than rings and sockets hold
		tap.Note(capture.In, p, len(p))
	}
	_ = slow[0].Close()
	// One reads on in the end, and is told what it has missed.
	_ = slow[1].CloseWrite()
	n, err := copyBlocks(io.Discard, slow[1].r)
	if err != nil || n.written == 0 || n.dropped == 0 || n.written+n.dropped != 10_000 {
		t.Errorf("%+v, %v", n, err)
	}
	_ = slow[1].Close()
	if _, err := d.remove("qib0"); err != nil {
		t.Error(err)
	}
	if err := d.stop(); err != nil { // waits for the third, which reads nothing
		t.Error(err)
	}
	_ = slow[2].Close()
}

// TestCopyBlocks: what a command makes of a stream that is not whole.
func TestCopyBlocks(t *testing.T) {
	var file bytes.Buffer
	w, err := capture.NewWriter(&file, "qib0", 100)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Write(capture.Packet{Data: []byte("abcde"), Len: 5}); err != nil {
		t.Fatal(err)
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	part := file.Len()
	for n := range part {
		var out bytes.Buffer
		got, err := copyBlocks(&out, bufio.NewReaderSize(bytes.NewReader(file.Bytes()[:n]), maxBlock))
		if err == nil || got.written != 0 {
			t.Errorf("%d bytes: %+v, %v", n, got, err)
		}
		blocksOf(t, out.Bytes())
	}
	for _, size := range []uint32{0, 8, 13, maxBlock + 4, 1 << 31} {
		b := make([]byte, 64)
		binary.LittleEndian.PutUint32(b[4:], size)
		if _, err := copyBlocks(io.Discard, bufio.NewReaderSize(bytes.NewReader(b), maxBlock)); err == nil {
			t.Errorf("block of %d bytes: no error", size)
		}
	}
	full := errors.New("disk full")
	if _, err := copyBlocks(failing{full}, bufio.NewReaderSize(bytes.NewReader(file.Bytes()), maxBlock)); !errors.Is(err, full) {
		t.Errorf("%v", err)
	}
	if n := droppedIn(make([]byte, 20)); n != 0 {
		t.Errorf("%d dropped", n)
	}
	var o order
	if err := json.Unmarshal([]byte(`{"do":"capture","capture":{"count":3,"snap":9}}`), &o); err != nil || o.Capture != (captureOrder{3, 9}) {
		t.Errorf("%+v, %v", o, err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }
