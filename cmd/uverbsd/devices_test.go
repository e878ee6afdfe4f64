package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/ctxfs"
	"github.com/uverbsd/uverbsd/cuse/cusetest"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/roce"
)

// fakeHost has nodes that are files, and channels whose other end is the test's.
type fakeHost struct {
	t    *testing.T
	fail string // the step that fails
	maps bool   // clients can map their queues
	link func() (roce.Link, error)

	mu    sync.Mutex
	ends  []*cusetest.Raw // the kernel's ends, in order of opening
	nodes map[string]os.FileMode
}

var errFake = errors.New("the host does not want to")

func (h *fakeHost) openChannel() (*cuse.Channel, error) {
	if h.fail == "open" {
		return nil, errFake
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		h.t.Fatal(err)
	}
	k := &cusetest.Raw{FD: fds[0]}
	if h.fail == "handshake" {
		_ = unix.Close(fds[0])
		return cuse.NewChannel(fds[1])
	}
	if err := k.SendInit(abi.FuseKernelVersion, abi.FuseKernelMinorVersion); err != nil {
		h.t.Fatal(err)
	}
	h.mu.Lock()
	h.ends = append(h.ends, k)
	h.mu.Unlock()
	return cuse.NewChannel(fds[1])
}

func (h *fakeHost) setupNode(path string, mode os.FileMode) (uint64, error) {
	if h.fail == "node" {
		return 0, errFake
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.nodes[path] = mode
	return unix.Mkdev(231, 192), nil
}

func (h *fakeHost) openLink(*deviceConfig) (roce.Link, error) {
	if h.link == nil {
		return nil, errFake
	}
	return h.link()
}

func (h *fakeHost) removeNode(path string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.nodes, path)
	return nil
}

func (h *fakeHost) paths() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var l []string
	for p := range h.nodes {
		l = append(l, strings.TrimPrefix(p, devDir+"/"))
	}
	slices.Sort(l)
	return l
}

// newTestDevices checks at the end of the test that nothing is left of them.
func newTestDevices(t *testing.T) (*devices, *fakeHost) {
	t.Helper()
	running := goleak.IgnoreCurrent()
	fds := openFiles(t)
	h := &fakeHost{t: t, nodes: map[string]os.FileMode{}}
	d := newDevices(h, zap.NewNop(), dispatch.NewUsers(dispatch.DefaultLimits()))
	t.Cleanup(func() {
		if err := d.stop(); err != nil {
			t.Error(err)
		}
		for _, k := range h.ends {
			_ = unix.Close(k.FD)
		}
		if l := h.paths(); len(l) > 0 || len(d.list) > 0 || len(d.reg.List()) > 0 {
			t.Errorf("left: nodes %v, devices %v", l, d.list)
		}
		if n := openFiles(t); n > fds {
			t.Errorf("%d descriptors, then %d", fds, n)
		}
		goleak.VerifyNone(t, running)
	})
	return d, h
}

func openFiles(t *testing.T) int {
	t.Helper()
	l, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(l)
}

// client is a client of the device whose channel was opened as the nth.
func (h *fakeHost) client(n int) *self {
	h.t.Helper()
	h.mu.Lock()
	k := h.ends[n]
	h.mu.Unlock()
	s := &self{b: h.t, k: k, unique: 2}
	if _, err := k.Recv(s.reply[:]); err != nil { // of the handshake
		h.t.Fatal(err)
	}
	var err error
	if s.mem, err = unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = unix.Munmap(s.mem) })
	s.open()
	return s
}

// try sends a request and returns its errno.
func (s *self) try(op uint32, parts ...[]byte) unix.Errno {
	s.unique += 2
	h := abi.FuseInHeader{Opcode: op, Unique: s.unique, UID: uint32(unix.Getuid()), GID: uint32(unix.Getgid()), PID: uint32(unix.Getpid())}
	if err := s.k.Send(cusetest.Message(h, parts...)); err != nil {
		s.b.Fatal(err)
	}
	if _, err := s.k.Recv(s.reply[:]); err != nil {
		s.b.Fatal(err)
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(s.reply[4:])))
}

// Orders, what becomes of them, and what there is afterwards.
func TestOrders(t *testing.T) {
	add := func(name, guid string) order {
		return order{Do: "add", Device: deviceConfig{Name: name, GUID: guid}}
	}
	ethernet := func(name, guid, address string) order {
		return order{Do: "add", Device: deviceConfig{Name: name, GUID: guid, Link: "ethernet", Address: address}}
	}
	remove := func(name string) order { return order{Do: "remove", Device: deviceConfig{Name: name}} }
	for _, c := range []struct {
		name   string
		orders []order
		want   string // in the last one's outcome
		ok     bool
		nodes  []string
	}{
		{"add", []order{add("qib0", "")}, "/dev/infiniband/uverbs0, guid 0011:7500:0000:0001", true, []string{"uverbs0"}},
		{"add two", []order{add("qib0", ""), add("qib1", "")}, "uverbs1, guid 0011:7500:0000:0002", true, []string{"uverbs0", "uverbs1"}},
		{"the lowest free number and GUID", []order{add("a", ""), add("b", ""), remove("a"), add("c", "")}, "uverbs0, guid 0011:7500:0000:0001", true, []string{"uverbs0", "uverbs1"}},
		{"remove", []order{add("qib0", ""), add("qib1", ""), remove("qib0")}, "qib0 is removed", true, []string{"uverbs1"}},
		{"remove the last", []order{add("qib0", ""), remove("qib0")}, "qib0 is removed", true, nil},
		{"and add again", []order{add("qib0", ""), remove("qib0"), add("qib0", "")}, "uverbs0", true, []string{"uverbs0"}},
		{"remove an unknown one", []order{add("qib0", ""), remove("qib9")}, "remove device qib9: there is none of that name: name one of those there are (qib0)", false, []string{"uverbs0"}},
		{"remove from none", []order{remove("qib9")}, "(none)", false, nil},
		{"remove twice", []order{add("qib0", ""), remove("qib0"), remove("qib0")}, "there is none of that name", false, nil},
		{"a name that is taken", []order{add("qib0", ""), add("qib0", "")}, "choose another, or remove that one first", false, []string{"uverbs0"}},
		{"a GUID that is taken", []order{add("qib0", ""), add("qib1", defaultGUID)}, "GUID 0011:7500:0000:0001 is that of qib0", false, []string{"uverbs0"}},
		{"no GUID", []order{add("qib0", "11:22")}, "is not of the form", false, nil},
		{"no name", []order{add("", "")}, "qib0 is /dev/infiniband/uverbs0", true, []string{"uverbs0"}},
		{"rxe where nothing can be mapped", []order{{Do: "add", Device: deviceConfig{Provider: "rxe"}}}, "cannot map queues (FUSE passthrough is missing)", false, nil},
		{"rxe's name where nothing can be mapped", []order{add("rxe0", "")}, "use provider qib", false, nil},
		{"a path for a name", []order{add("../qib0", "")}, "no device name", false, nil},
		{"a long name", []order{add(strings.Repeat("q", 64), "")}, "no device name", false, nil},
		{"a bad mode", []order{{Do: "add", Device: deviceConfig{Name: "qib0", Mode: 0o4666}}}, "mode 04666", false, nil},
		{"Ethernet", []order{add("qib0", ""), ethernet("qib1", "", "")}, "uverbs1, guid 0011:7500:0000:0002, address 169.254.1.2", true, []string{"uverbs0", "uverbs1"}},
		{"Ethernet with an address", []order{ethernet("qib0", "", "10.0.0.7")}, "guid 0011:7500:0000:0001, address 10.0.0.7", true, []string{"uverbs0"}},
		{"an address that is taken", []order{ethernet("qib0", "", ""), ethernet("qib1", "", "169.254.1.1")}, "address 169.254.1.1 is that of qib0: choose another", false, []string{"uverbs0"}},
		{"an address that a GUID took", []order{ethernet("qib0", "", ""), ethernet("qib1", "0002:c903:0000:0001", "")}, "address 169.254.1.1 is that of qib0: choose another", false, []string{"uverbs0"}},
		{"an address that has become free", []order{ethernet("qib0", "", ""), remove("qib0"), ethernet("qib1", "", "169.254.1.1")}, "address 169.254.1.1", true, []string{"uverbs0"}},
		{"no link", []order{{Do: "add", Device: deviceConfig{Name: "qib0", Link: "roce"}}}, "link \"roce\": say infiniband, ethernet, udp or vfio", false, nil},
		{"no address", []order{ethernet("qib0", "", "a\nb")}, "give one host's IPv4 address", false, nil},
		{"no order", []order{{Do: "explode"}}, "unknown order", false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, h := newTestDevices(t)
			var out outcome
			for i, o := range c.orders {
				goes := d.find(o.Device.Name)
				out = d.carryOut(o)
				if i < len(c.orders)-1 && out.Error != "" {
					t.Fatal(out.Error)
				}
				if o.Do == "remove" && goes != nil {
					<-goes.ended // by itself, and frees its number
				}
			}
			got := out.Done + out.Error
			if (out.Error == "") != c.ok || !strings.Contains(got, c.want) || strings.Contains(got, "\n") {
				t.Errorf("%+v, want one line with %q", out, c.want)
			}
			if nodes := h.paths(); !slices.Equal(nodes, c.nodes) {
				t.Errorf("nodes %v, want %v", nodes, c.nodes)
			}
			if n := len(d.reg.List()); n != len(c.nodes) {
				t.Errorf("%d devices registered", n)
			}
		})
	}
}

func TestStatusOfLinks(t *testing.T) {
	d, _ := newTestDevices(t)
	for _, c := range []deviceConfig{{Name: "qib0"}, {Name: "qib1", Link: "ethernet"}} {
		if _, err := d.add(c); err != nil {
			t.Fatal(err)
		}
	}
	var text bytes.Buffer
	if err := printStatus(&text, d.status()); err != nil {
		t.Fatal(err)
	}
	want := "qib0\t/dev/infiniband/uverbs0 provider qib state active link infiniband lid 1 guid 0011:7500:0000:0001, 0 contexts\n" +
		"qib1\t/dev/infiniband/uverbs1 provider qib state active link ethernet address 169.254.1.2 guid 0011:7500:0000:0002, 0 contexts\n"
	if text.String() != want {
		t.Errorf("status\n%s, want\n%s", &text, want)
	}
}

// An add that fails half-way leaves nothing: the same one works afterwards.
func TestAddFails(t *testing.T) {
	for _, c := range []struct{ name, step string }{{"no channel", "open"}, {"no handshake", "handshake"}, {"no node", "node"}, {"not registered", "register"}} {
		t.Run(c.name, func(t *testing.T) {
			d, h := newTestDevices(t)
			h.fail = c.step
			if c.step == "register" {
				if err := d.reg.Register(&hca.Entry{Name: "qib0", Index: 99}); err != nil {
					t.Fatal(err)
				}
			}
			_, err := d.add(deviceConfig{Name: "qib0"})
			if err == nil || !strings.HasPrefix(err.Error(), "add device qib0: ") || strings.Contains(err.Error(), "\n") {
				t.Fatalf("error %v", err)
			}
			if n := len(d.status()); n != 0 {
				t.Errorf("%d devices", n)
			}
			h.fail = ""
			if c.step == "register" {
				d.reg = hca.Registry{}
				_ = d.reg.AddConsumer((*consumer)(d))
			}
			s, err := d.add(deviceConfig{Name: "qib0"})
			if err != nil || s.entry.Index != 0 || s.guid != defaultGUID {
				t.Fatalf("again: %v", err)
			}
			select {
			case err := <-d.failed:
				t.Errorf("the daemon is told to stop: %v", err)
			default:
			}
		})
	}
}

// A removed device serves the files that are open until the last is closed; its
// number is not given out meanwhile.
func TestRemoveWithOpenFiles(t *testing.T) {
	d, h := newTestDevices(t)
	if out := d.carryOut(order{Do: "add", Device: deviceConfig{Name: "qib0"}}); out.Error != "" {
		t.Fatal(out.Error)
	}
	c := h.client(0)
	c.write(legacy(abi.CmdAllocPD, 4, c.addr(0)))
	pd := c.handle()
	out := d.carryOut(order{Do: "remove", Device: deviceConfig{Name: "qib0"}})
	if out.Done != "qib0 is removed; still open: 1 contexts" {
		t.Errorf("%+v", out)
	}
	st := d.status()
	var text bytes.Buffer
	if err := printStatus(&text, st); err != nil || len(st) != 1 || !strings.HasPrefix(text.String(), "qib0\tremoved, 1 contexts\n") {
		t.Errorf("status %v %s", err, text.String())
	}
	in := make([]byte, 40)
	binary.NativeEndian.PutUint64(in, c.fh)
	cmd := legacy(abi.CmdAllocPD, 4, c.addr(0))
	in[16] = byte(len(cmd))
	if errno := c.try(abi.FuseWrite, in, cmd); errno != unix.EIO {
		t.Errorf("ALLOC_PD: %v", errno)
	}
	c.write(destroy4(abi.CmdDeallocPD, pd))
	if errno := c.try(abi.FuseOpen, make([]byte, 8)); errno != unix.ENXIO {
		t.Errorf("open: %v", errno)
	}
	if out := d.carryOut(order{Do: "add", Device: deviceConfig{Name: "qib0"}}); !strings.Contains(out.Done, "uverbs1, guid "+defaultGUID) {
		t.Errorf("%+v", out)
	}
	s := d.status()
	if len(s) != 2 || s[0].State != stateRemoved || s[1].State != "active" {
		t.Errorf("status %+v", s)
	}
	old := d.list[0]
	c.close()
	<-old.ended
	if s := d.status(); len(s) != 1 || s[0].State != "active" {
		t.Errorf("status %+v", s)
	}
	if out := d.carryOut(order{Do: "add", Device: deviceConfig{Name: "qib9"}}); !strings.Contains(out.Done, "uverbs0") {
		t.Errorf("%+v", out)
	}
}

// Stop ends also what a client keeps open for good.
func TestStopWithOpenFiles(t *testing.T) {
	d, h := newTestDevices(t)
	for _, name := range []string{"qib0", "qib1"} {
		if _, err := d.add(deviceConfig{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	h.client(0)
	h.client(1)
	if _, err := d.remove("qib0"); err != nil {
		t.Fatal(err)
	}
	if err := d.stop(); err != nil {
		t.Error(err)
	}
	if n := len(d.status()); n != 0 {
		t.Errorf("%d devices", n)
	}
	if _, err := d.add(deviceConfig{Name: "qib2"}); err == nil || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("add: %v", err)
	}
}

// Two orders at a time take turns.
func TestOrdersAtOnce(t *testing.T) {
	d, _ := newTestDevices(t)
	for range 5 {
		count := func(o order) (done int) {
			var wg sync.WaitGroup
			var mu sync.Mutex
			for range 4 {
				wg.Go(func() {
					out := d.carryOut(o)
					mu.Lock()
					defer mu.Unlock()
					if out.Error == "" {
						done++
					}
				})
			}
			wg.Wait()
			return done
		}
		for _, what := range []string{"add", "remove"} {
			if n := count(order{Do: what, Device: deviceConfig{Name: "qib0"}}); n != 1 {
				t.Errorf("%d of the same %s succeeded", n, what)
			}
		}
	}
}

// The control socket is root's alone, takes one order to a connection, and is not
// held up by who says nothing.
func TestControlSocket(t *testing.T) {
	d, _ := newTestDevices(t)
	path := filepath.Join(t.TempDir(), "run", "control.sock")
	daemon := &daemon{devices: d, log: zap.NewNop()}
	if err := daemon.serveControl(path); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	silent, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, want string }{
		{"add qib0", "qib0 is /dev/infiniband/uverbs0, guid 0011:7500:0000:0001"},
		{"add qib1 --guid 0011:7500:0000:00ff --mode 0660", "uverbs1, guid 0011:7500:0000:00ff"},
		{"add qib2 --mode rw", "error: add device qib2: mode \"rw\" is not octal"},
		{"add qib1", "error: add device qib1: there is a device of that name"},
		{"remove qib1", "qib1 is removed"},
		{"remove qib1", "error: remove device qib1: there is none of that name"},
	} {
		var b bytes.Buffer
		cmd := root()
		cmd.SetOut(&b)
		cmd.SetArgs(append([]string{"device", "--socket", path}, strings.Fields(c.args)...))
		if err := cmd.Execute(); err != nil {
			fmt.Fprintf(&b, "error: %v", err)
		}
		if got := strings.TrimSpace(b.String()); !strings.Contains(got, c.want) || strings.Contains(got, "\n") {
			t.Errorf("%s: %q, want one line with %q", c.args, got, c.want)
		}
	}
	for _, noise := range []string{"", "{", "{}", strings.Repeat("x", maxOrder+1)} {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte(noise))
		_ = c.(*net.UnixConn).CloseWrite()
		b := make([]byte, 512)
		if n, err := c.Read(b); err != nil || !bytes.Contains(b[:n], []byte(`"error":`)) {
			t.Errorf("%q: %q %v", noise, b[:n], err)
		}
		_ = c.Close()
	}
	if err := daemon.stop(); err != nil {
		t.Error(err)
	}
	_ = silent.Close()
	if _, err := give(path, order{}); err == nil || !strings.Contains(err.Error(), "uverbsd serve") {
		t.Errorf("without a daemon: %v", err)
	}
}

// mappable: queues can be mapped where the test says so.
func (h *fakeHost) mappable() error {
	if !h.maps {
		return errors.New("FUSE passthrough is missing")
	}
	return nil
}

func (h *fakeHost) mountContexts(uverbsN string, _ *zap.Logger) (*ctxfs.FS, error) {
	return ctxfs.New(filepath.Join(h.t.TempDir(), uverbsN), cuse.Config{})
}
