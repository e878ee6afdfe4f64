package capture_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/capture"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// link is a roce.Link that gives back what it is sent.
type link struct {
	roce.Link
	back   chan []byte
	closed atomic.Bool
}

func newLink() *link { return &link{back: make(chan []byte, 64)} }

func (l *link) Send(_ hca.GID, ps []roce.Buffer) error {
	for _, p := range ps {
		select {
		case l.back <- append([]byte(nil), p...):
		default:
		}
	}
	return nil
}

func (l *link) Recv(rs []roce.Received) (int, error) {
	p, ok := <-l.back
	if !ok {
		return 0, roce.ErrClosed
	}
	rs[0].IP = p[roce.Headroom:]
	return 1, nil
}

func (l *link) Close() error {
	if !l.closed.Swap(true) {
		close(l.back)
	}
	return nil
}

func (l *link) State() roce.LinkState { return roce.LinkState{MTU: 1024} }

func buffer(ip string) roce.Buffer { return append(make(roce.Buffer, roce.Headroom), ip...) }

func subscribe(t *testing.T, tap *capture.Tap, packets, snap int) *capture.Subscription {
	t.Helper()
	s, err := tap.Subscribe(packets, snap)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func next(t *testing.T, s *capture.Subscription, dir capture.Dir, n int, data string) {
	t.Helper()
	p, err := s.Next(t.Context())
	if err != nil || p.Dir != dir || p.Len != n || string(p.Data) != data || p.Time.IsZero() {
		t.Fatalf("packet %+v, %v; want %q of %d, dir %d", p, err, data, n, dir)
	}
}

func TestTap(t *testing.T) {
	tap := capture.New(newLink())
	if tap.State().MTU != 1024 {
		t.Error("the link does not show through")
	}
	send := func(s ...string) {
		t.Helper()
		var ps []roce.Buffer
		for _, s := range s {
			ps = append(ps, buffer(s))
		}
		if err := tap.Send(hca.GID{}, ps); err != nil {
			t.Fatal(err)
		}
	}
	recv := func(want string) {
		t.Helper()
		rs := make([]roce.Received, 4)
		if n, err := tap.Recv(rs); n != 1 || err != nil || string(rs[0].IP) != want {
			t.Fatalf("Recv: %d, %v, %q", n, err, rs[0].IP)
		}
	}
	send("nobody")
	recv("nobody")
	tap.Note(capture.In, []byte("nobody"), 6)
	if tap.Listening() {
		t.Error("somebody listens")
	}
	all, few := subscribe(t, tap, 0, 0), subscribe(t, tap, 3, 4)
	if !tap.Listening() {
		t.Error("nobody listens")
	}
	send("first", "second")
	recv("first")
	tap.Note(capture.In, []byte("noted"), 5)
	recv("second")
	for _, p := range []struct {
		dir capture.Dir
		s   string
	}{{capture.Out, "first"}, {capture.Out, "second"}, {capture.In, "first"}, {capture.In, "noted"}, {capture.In, "second"}} {
		next(t, all, p.dir, len(p.s), p.s)
	}
	next(t, few, capture.Out, 5, "firs")
	next(t, few, capture.Out, 6, "seco")
	next(t, few, capture.In, 5, "firs")
	if all.Dropped() != 0 || all.Received() != 5 || few.Dropped() != 2 || few.Received() != 5 {
		t.Errorf("dropped %d of %d, %d of %d", all.Dropped(), all.Received(), few.Dropped(), few.Received())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := few.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Next: %v", err)
	}
	send("third")
	few.Close()
	few.Close()
	next(t, few, capture.Out, 5, "thir")
	if _, err := few.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("Next after Close: %v", err)
	}
	next(t, all, capture.Out, 5, "third")
	send("fourth")
	if err := tap.Close(); err != nil {
		t.Error(err)
	}
	next(t, all, capture.Out, 6, "fourth")
	if _, err := all.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("Next after the tap's Close: %v", err)
	}
	all.Close()
	if _, err := tap.Subscribe(0, 0); !errors.Is(err, roce.ErrClosed) {
		t.Errorf("Subscribe after Close: %v", err)
	}
}

func TestLimits(t *testing.T) {
	tap := capture.New(newLink())
	defer func() { _ = tap.Close() }()
	for _, n := range [][2]int{{-1, 0}, {0, -1}, {capture.MaxPackets + 1, 1}, {1, capture.MaxSnap + 1}} {
		if _, err := tap.Subscribe(n[0], n[1]); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%v: %v", n, err)
		}
	}
	var last *capture.Subscription
	for range capture.MaxSubscribers {
		last = subscribe(t, tap, 1, 1)
	}
	if _, err := tap.Subscribe(1, 1); !errors.Is(err, unix.EBUSY) {
		t.Errorf("one too many: %v", err)
	}
	last.Close()
	subscribe(t, tap, 1, 1)
}

// Many send while listeners come, read and go.
func TestCrowd(t *testing.T) {
	tap := capture.New(newLink())
	var senders, listeners sync.WaitGroup
	for i := range 4 {
		senders.Go(func() {
			b := []roce.Buffer{buffer(string(bytes.Repeat([]byte{byte('a' + i)}, 100)))}
			for range 2000 {
				_ = tap.Send(hca.GID{}, b)
				tap.Note(capture.In, b[0][roce.Headroom:], 100)
			}
		})
	}
	for range 3 {
		listeners.Go(func() {
			for range 20 {
				s, err := tap.Subscribe(8, 64)
				if err != nil {
					return // closed
				}
				for range 50 {
					p, err := s.Next(t.Context())
					if err != nil {
						break
					}
					if p.Len != 100 || len(p.Data) != 64 || bytes.Count(p.Data, p.Data[:1]) != 64 {
						t.Errorf("packet %+v", p)
					}
				}
				s.Close()
			}
		})
	}
	senders.Wait()
	_ = tap.Close()
	listeners.Wait()
}

// block is a pcapng block, as a reader of its own finds it.
type block struct {
	typ  uint32
	body []byte
}

// blocks takes a file apart (draft-ietf-opsawg-pcapng §3.1).
func blocks(t *testing.T, f []byte) (bs []block) {
	t.Helper()
	for len(f) > 0 {
		if len(f) < 12 {
			t.Fatalf("%d bytes are left", len(f))
		}
		n := int(binary.LittleEndian.Uint32(f[4:]))
		if n < 12 || n%4 != 0 || n > len(f) || binary.LittleEndian.Uint32(f[n-4:]) != uint32(n) {
			t.Fatalf("block of %d bytes, %d are left", n, len(f))
		}
		bs = append(bs, block{binary.LittleEndian.Uint32(f), f[8 : n-4]})
		f = f[n:]
	}
	return bs
}

// options takes the options of a block apart (§3.5).
func options(t *testing.T, b []byte) map[uint16][]byte {
	t.Helper()
	m := map[uint16][]byte{}
	for len(b) >= 4 {
		code, n := binary.LittleEndian.Uint16(b), int(binary.LittleEndian.Uint16(b[2:]))
		if code == 0 {
			if len(b) != 4 || n != 0 {
				t.Errorf("%d bytes after the end of the options", len(b)-4)
			}
			return m
		}
		pad := (n + 3) &^ 3
		if 4+pad > len(b) {
			break
		}
		m[code] = b[4 : 4+n]
		b = b[4+pad:]
	}
	t.Error("options do not end")
	return m
}

func when(b []byte) time.Time {
	return time.Unix(0, int64(binary.LittleEndian.Uint32(b))<<32|int64(binary.LittleEndian.Uint32(b[4:])))
}

func TestFile(t *testing.T) {
	var file bytes.Buffer
	w, err := capture.NewWriter(&file, "uverbs0", 100)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 3, 4, 5, 6, 7, 891011121, time.UTC)
	packets := []capture.Packet{
		{Time: at, Dir: capture.Out, Len: 5, Data: []byte("abcde")},
		{Time: at.Add(1), Dir: capture.In, Len: 4000, Data: bytes.Repeat([]byte("x"), 100)},
		{Time: at.Add(2), Dir: capture.In},
	}
	for _, p := range packets {
		if err := w.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(at, 17, 14); err != nil {
		t.Fatal(err)
	}
	bs := blocks(t, file.Bytes())
	if len(bs) != 6 {
		t.Fatalf("%d blocks", len(bs))
	}
	if b := bs[0]; b.typ != 0x0a0d0d0a || !bytes.Equal(b.body[:16], []byte{0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255}) ||
		string(options(t, b.body[16:])[4]) != "uverbsd" {
		t.Errorf("section %x: %x", b.typ, b.body)
	}
	b := bs[1]
	opts := options(t, b.body[8:])
	if b.typ != 1 || !bytes.Equal(b.body[:8], []byte{101, 0, 0, 0, 100, 0, 0, 0}) || string(opts[2]) != "uverbs0" || !bytes.Equal(opts[9], []byte{9}) {
		t.Errorf("interface %x: %x", b.typ, b.body)
	}
	for i, p := range packets {
		b := bs[2+i]
		n := int(binary.LittleEndian.Uint32(b.body[12:]))
		pad := (n + 3) &^ 3
		if b.typ != 6 || binary.LittleEndian.Uint32(b.body) != 0 || !when(b.body[4:]).Equal(p.Time) ||
			int(binary.LittleEndian.Uint32(b.body[16:])) != p.Len || !bytes.Equal(b.body[20:20+n], p.Data) ||
			!bytes.Equal(options(t, b.body[20+pad:])[2], []byte{byte(p.Dir), 0, 0, 0}) {
			t.Errorf("packet %d: type %d: %x", i, b.typ, b.body)
		}
	}
	b = bs[5]
	opts = options(t, b.body[12:])
	if b.typ != 5 || binary.LittleEndian.Uint32(b.body) != 0 || !when(opts[2]).Equal(at) || !when(opts[3]).Equal(when(b.body[4:])) ||
		binary.LittleEndian.Uint64(opts[4]) != 17 || binary.LittleEndian.Uint64(opts[5]) != 14 {
		t.Errorf("statistics: type %d: %x", b.typ, b.body)
	}
}

// pipe tells what was written, when it is.
type pipe struct{ c chan []byte }

func (p pipe) Write(b []byte) (int, error) {
	p.c <- append([]byte(nil), b...)
	return len(b), nil
}

func TestCopy(t *testing.T) {
	for _, how := range []string{"cancelled", "closed", "link closed"} {
		t.Run(how, func(t *testing.T) {
			tap := capture.New(newLink())
			s := subscribe(t, tap, 0, 0)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out, done := pipe{make(chan []byte, 16)}, make(chan error)
			go func() { done <- capture.Copy(ctx, out, "uverbs0", s, 0) }()
			file := <-out.c // the header is there at once
			tap.Note(capture.Out, []byte("packet"), 6)
			file = append(file, <-out.c...) // and a packet when no other waits
			switch how {
			case "cancelled":
				cancel()
			case "closed":
				s.Close()
			case "link closed":
				_ = tap.Close()
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
			file = append(file, <-out.c...)
			bs := blocks(t, file)
			if len(bs) != 4 || bs[2].typ != 6 || bs[3].typ != 5 {
				t.Fatalf("blocks %v", bs)
			}
			o := options(t, bs[3].body[12:])
			if binary.LittleEndian.Uint64(o[4]) != 1 || binary.LittleEndian.Uint64(o[5]) != 0 {
				t.Errorf("statistics %v", o)
			}
			if tap.Listening() {
				t.Error("somebody still listens")
			}
			_ = tap.Close()
		})
	}
}

// What waits when a capture ends is in the file, up to the count that was asked for;
// a tap without a link will do.
func TestCopyWaiting(t *testing.T) {
	for _, c := range []struct{ count, written, dropped uint64 }{{0, 4, 2}, {3, 3, 2}} {
		tap := capture.New(nil)
		s := subscribe(t, tap, 4, 8)
		if tap.Wants() != 8 {
			t.Errorf("%d bytes are wanted", tap.Wants())
		}
		for range 6 {
			tap.Note(capture.In, make([]byte, 8), 1000)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		var file bytes.Buffer
		if err := capture.Copy(ctx, &file, "uverbs0", s, c.count); err != nil {
			t.Fatal(err)
		}
		bs := blocks(t, file.Bytes())
		o := options(t, bs[len(bs)-1].body[12:])
		if n := uint64(len(bs) - 3); n != c.written || binary.LittleEndian.Uint64(o[4]) != c.written+c.dropped ||
			binary.LittleEndian.Uint64(o[5]) != c.dropped || binary.LittleEndian.Uint32(bs[2].body[16:]) != 1000 {
			t.Errorf("%d: %d packets, statistics %v", c.count, n, o)
		}
		select {
		case <-s.Done():
		default:
			t.Error("the subscription goes on")
		}
		if err := tap.Close(); err != nil || tap.Wants() != 0 {
			t.Errorf("%v, %d bytes are wanted", err, tap.Wants())
		}
	}
}

// short takes so many bytes and then fails.
type short int

func (s *short) Write(b []byte) (int, error) {
	if *s -= short(len(b)); *s < 0 {
		return 0, io.ErrShortWrite
	}
	return len(b), nil
}

func TestWriteError(t *testing.T) {
	tap := capture.New(newLink())
	defer func() { _ = tap.Close() }()
	for _, n := range []short{0, 100, 200} {
		s := subscribe(t, tap, 0, 0)
		tap.Note(capture.In, make([]byte, 200), 200)
		s.Close()
		if err := capture.Copy(t.Context(), &n, "uverbs0", s, 0); !errors.Is(err, io.ErrShortWrite) {
			t.Errorf("%v", err)
		}
	}
	n := short(math.MaxInt)
	w, err := capture.NewWriter(&n, "uverbs0", 1<<17)
	if err != nil {
		t.Fatal(err)
	}
	n = 0
	big := capture.Packet{Data: make([]byte, 1<<17)}
	if err := w.Write(big); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("%v", err)
	}
	if err := w.Finish(time.Time{}, 0, 0); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("%v", err)
	}
}

type nothing struct{ roce.Link }

func (nothing) Send(hca.GID, []roce.Buffer) error { return nil }
func (nothing) Close() error                      { return nil }

func BenchmarkSend(b *testing.B) {
	for _, name := range []string{"nobody", "listener", "full"} {
		b.Run(name, func(b *testing.B) {
			tap := capture.New(nothing{})
			defer func() { _ = tap.Close() }()
			done := make(chan struct{})
			close(done)
			if name != "nobody" {
				s, err := tap.Subscribe(0, 0)
				if err != nil {
					b.Fatal(err)
				}
				if name == "listener" {
					done = make(chan struct{})
					go func() {
						defer close(done)
						_ = capture.Copy(b.Context(), io.Discard, "", s, 0)
					}()
				}
			}
			ps := []roce.Buffer{make(roce.Buffer, 1100)}
			b.ReportAllocs()
			for b.Loop() {
				_ = tap.Send(hca.GID{}, ps)
			}
			_ = tap.Close()
			<-done
		})
	}
}
