package virtionet_test

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca/nic"
	"github.com/uverbsd/uverbsd/hca/virtionet"
)

func TestOpen(t *testing.T) {
	own := nic.MAC{2, 0, 0, 0, 0, 9}
	for _, tt := range []struct {
		name  string
		set   func(*device)
		o     virtionet.Options
		feats uint64
		max   int
		mac   nic.MAC // zero: the device's
		state nic.State
	}{
		{name: "ordinary", feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "every feature", set: func(d *device) { d.offered, d.speed = ^uint64(0), 40000 },
			feats: fOrdinary | fPlatform | fSpeed | 1<<36, max: 1518, state: nic.State{Up: true, Mbps: 40000}},
		{name: "offloads", set: func(d *device) { d.offered |= fCsumAndTSO | fMQ | fIndirect | fPacked }, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "no feature", set: func(d *device) { d.offered = fVersion1 }, o: virtionet.Options{MAC: own},
			feats: fVersion1, max: 1518, mac: own, state: nic.State{Up: true}},
		{name: "CTRL_RX without its queue", set: func(d *device) { d.offered = fVersion1 | fCtrlRx | fMAC }, feats: fVersion1 | fMAC, max: 1518, state: nic.State{Up: true}},
		{name: "jumbo", set: func(d *device) { d.mtu = 9000 }, feats: fOrdinary, max: 9018, state: nic.State{Up: true}},
		{name: "huge", set: func(d *device) { d.mtu = 65535 }, feats: fOrdinary, max: 9234, state: nic.State{Up: true}},
		{name: "less than it can", set: func(d *device) { d.mtu = 9000 }, o: virtionet.Options{MTU: 4200}, feats: fOrdinary, max: 4218, state: nic.State{Up: true}},
		{name: "more than it can", o: virtionet.Options{MTU: 9000}, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "it does not say what it can", set: func(d *device) { d.offered &^= fMTU }, o: virtionet.Options{MTU: 9000}, feats: fOrdinary &^ fMTU, max: 9018, state: nic.State{Up: true}},
		{name: "link down", set: func(d *device) { d.link = 0 }, feats: fOrdinary, max: 1518},
		{name: "link unknown", set: func(d *device) { d.link, d.offered = 0, d.offered&^fStatus }, feats: fOrdinary &^ fStatus, max: 1518, state: nic.State{Up: true}},
		{name: "speed unknown", set: func(d *device) { d.offered |= fSpeed; d.speed = 0xFFFFFFFF }, feats: fOrdinary | fSpeed, max: 1518, state: nic.State{Up: true}},
		{name: "another address", set: func(d *device) { d.offered |= fMACAddr }, o: virtionet.Options{MAC: own}, feats: fOrdinary | fMACAddr, max: 1518, mac: own, state: nic.State{Up: true}},
		{name: "transitional", set: func(d *device) { d.cfg[3] = 0x10; d.cfg[2] = 0 }, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "two vectors", set: func(d *device) { d.vectors = 2 }, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "one message", set: func(d *device) { d.vectors = 1 }, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "INTx", set: func(d *device) { d.vectors, d.messages = 1, false }, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "short configuration", set: func(d *device) { binary.LittleEndian.PutUint32(d.capAt(4)[12:], 8) }, feats: fOrdinary &^ fMTU, max: 1518, state: nic.State{Up: true}},
		{name: "short rings", set: func(d *device) { d.q[0].max, d.q[1].max, d.q[2].max = 2, 4, 2 }, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "one doorbell", set: func(d *device) { d.q[0].notifyOff = 0 }, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "I/O first", set: func(d *device) {
			// A second notification capability in front, in a BAR that cannot be mapped.
			d.putCap(0xE0, int(d.cfg[0x34]), 2, 1, 0, 0x100)
			d.cfg[0x34] = 0xE0
		}, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
		{name: "reserved kinds", set: func(d *device) {
			d.putCap(0xD0-20, 0xD0, 1, 7, 0, 0x100) // BAR 7
			d.putCap(0xD0, int(d.cfg[0x34]), 77, fakeBAR, 0, 0x100)
			d.cfg[0x34] = 0xD0 - 20
		}, feats: fOrdinary, max: 1518, state: nic.State{Up: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDevice(t)
			if tt.set != nil {
				tt.set(d)
			}
			want := tt.mac
			if want == (nic.MAC{}) {
				want = d.mac
			}
			p := open(t, d, tt.o)
			if d.drvFeats != tt.feats {
				t.Errorf("features %#x, want %#x", d.drvFeats, tt.feats)
			}
			if p.MaxFrame() != tt.max {
				t.Errorf("MaxFrame %d, want %d", p.MaxFrame(), tt.max)
			}
			if p.MAC() != want {
				t.Errorf("MAC %x, want %x", p.MAC(), want)
			}
			if s := p.State(); s != tt.state {
				t.Errorf("state %+v, want %+v", s, tt.state)
			}
			d.with(func() {
				if d.status != 15 {
					t.Errorf("status %#x", d.status)
				}
				if d.promisc && d.drvFeats&fCtrlRx != 0 {
					t.Error("it lets everything through")
				}
			})
		})
	}
}

func TestOwnAddress(t *testing.T) {
	d := newDevice(t)
	d.offered &^= fMAC
	p := open(t, d, virtionet.Options{})
	if m := p.MAC(); m[0]&3 != 2 {
		t.Errorf("address %x is not locally administered, or a group's", m)
	}
	d.with(func() {
		if len(d.uni) != 1 || d.uni[0] != p.MAC() {
			t.Errorf("the device lets %x through", d.uni)
		}
	})
}

func TestOpenRefused(t *testing.T) {
	le := binary.LittleEndian
	for _, tt := range []struct {
		name string
		set  func(*device)
		o    virtionet.Options
		text string
		is   error
	}{
		{name: "MTU option", o: virtionet.Options{MTU: 60000}, text: "MTU is 60000: set it to 68 to 9216"},
		{name: "entries option", o: virtionet.Options{RxEntries: 1024}, text: "RxEntries"},
		{name: "buffer option", o: virtionet.Options{RxBuffer: 8}, text: "RxBuffer"},
		{name: "MAC option", o: virtionet.Options{MAC: nic.MAC{1}}, text: "is a group's"},
		{name: "other device", set: func(d *device) { d.cfg[2] = 0x42 }, text: "it is 1af4:1042"},
		{name: "gone", set: func(d *device) { le.PutUint16(d.cfg[:], 0xFFFF) }, text: "all ones", is: nic.ErrGone},
		{name: "no capabilities", set: func(d *device) { d.cfg[6] = 0 }, text: "no capability list"},
		{name: "list in a circle", set: func(d *device) { d.cfg[0x41] = 0x40 }, text: "capability list is broken"},
		{name: "list into the header", set: func(d *device) { d.cfg[0x41] = 0x10 }, text: "capability list is broken at 0x10"},
		{name: "short capability", set: func(d *device) { d.capAt(1)[2] = 8 }, text: "no capability for its common configuration"},
		{name: "capability at the end", set: func(d *device) { d.cfg[0x34], d.cfg[0xFC], d.cfg[0xFE], d.cfg[0xFF] = 0xFC, 9, 255, 1 }, text: "no capability for its common configuration"},
		{name: "legacy only", set: func(d *device) { d.cfg[0x41] = 0 }, text: "disable-modern=off"},
		{name: "no notification", set: func(d *device) { d.capAt(2)[3] = 9 }, text: "no capability for its notification"},
		{name: "structure outside", set: func(d *device) { le.PutUint32(d.capAt(1)[8:], barLen-8) }, text: "its common configuration is said to be"},
		{name: "structure wraps", set: func(d *device) { le.PutUint32(d.capAt(1)[8:], 0xFFFFFFF0) }, text: "its common configuration is said to be"},
		{name: "structure askew", set: func(d *device) { le.PutUint32(d.capAt(4)[8:], devAt+2) }, text: "its network configuration is said to be"},
		{name: "structure short", set: func(d *device) { le.PutUint32(d.capAt(4)[12:], 4) }, text: "its network configuration is said to be"},
		{name: "no map", set: func(d *device) { d.failMap = unix.EINVAL }, text: "map BAR 4"},
		{name: "stuck in reset", set: func(d *device) { d.status, d.stuckReset = 3, true }, text: "reset: status is still 0x3"},
		{name: "gone at reset", set: func(d *device) { d.ones = true }, text: "reset: registers read as ones", is: nic.ErrGone},
		{name: "legacy", set: func(d *device) { d.offered &^= fVersion1 }, text: "VIRTIO_F_VERSION_1"},
		{name: "features refused", set: func(d *device) { d.refuseFeats = true }, text: "are refused"},
		{name: "MTU too small", set: func(d *device) { d.mtu = 60 }, text: "its MTU is said to be 60"},
		{name: "cannot merge", o: virtionet.Options{RxBuffer: 512}, text: "VIRTIO_NET_F_MRG_RXBUF"},
		{name: "no queue", set: func(d *device) { d.q[1].max = 0 }, text: "queue 1: it says to have 0 entries"},
		{name: "odd queue", set: func(d *device) { d.q[0].max = 100 }, text: "queue 0: it says to have 100 entries"},
		{name: "no control queue", set: func(d *device) { d.q[2].max = 1 }, text: "queue 2"},
		{name: "doorbell outside", set: func(d *device) { d.q[1].notifyOff = 0x400 }, text: "queue 1: its doorbell"},
		{name: "no interrupt", set: func(d *device) { d.vectors = 0 }, text: "no interrupt"},
		{name: "interrupts fail", set: func(d *device) { d.failIRQ = unix.EINVAL }, text: "turn on 2 interrupts"},
		{name: "vector refused", set: func(d *device) { d.refuseVec = true }, text: "vector 0 is refused"},
		{name: "no bus mastering", set: func(d *device) { d.failMaster = unix.EIO }, text: "allow DMA"},
		{name: "gone when it starts", set: func(d *device) { d.diesAtDriver = true }, text: "read as ones", is: nic.ErrGone},
		{name: "no memory", set: func(d *device) { d.failAlloc = 1 }, text: "allocate", is: unix.ENOMEM},
		{name: "no memory for buffers", set: func(d *device) { d.failAlloc = 2 }, text: "allocate", is: unix.ENOMEM},
		{name: "no memory to send", set: func(d *device) { d.failAlloc = 3 }, text: "allocate", is: unix.ENOMEM},
		{name: "no memory for slots", set: func(d *device) { d.failAlloc = 4 }, text: "allocate", is: unix.ENOMEM},
		{name: "no memory for control", set: func(d *device) { d.failAlloc = 5 }, text: "allocate", is: unix.ENOMEM},
		{name: "no memory for commands", set: func(d *device) { d.failAlloc = 6 }, text: "allocate", is: unix.ENOMEM},
		{name: "bad control ring", set: func(d *device) { d.badCtrlUse = true }, text: "descriptor 7", is: nic.ErrGone},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDevice(t)
			if tt.set != nil {
				tt.set(d)
			}
			p, err := virtionet.Open(d, tt.o)
			if err == nil {
				p.Close()
				t.Fatal("opened")
			}
			if s := err.Error(); !strings.Contains(s, tt.text) || strings.Contains(s, "\n") || !strings.Contains(s, "0000:00:02.0") {
				t.Errorf("error %q, want one line with %q", s, tt.text)
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("error %q is not %v", err, tt.is)
			}
			if n := d.times(); n != 1 {
				t.Errorf("function closed %d times", n)
			}
			if d.master {
				t.Error("DMA is still allowed")
			}
		})
	}
}

// A device that ignores control commands at the start works all the same.
func TestOpenWithoutAnswers(t *testing.T) {
	d := newDevice(t)
	d.noAnswer = true
	p := open(t, d, virtionet.Options{})
	if c := p.Counters(); c["ctrl_errors"] == 0 {
		t.Errorf("counters %v", c)
	}
	d.inject(payload(1, 60))
	f := recv(t, p)
	f.Release()
}
