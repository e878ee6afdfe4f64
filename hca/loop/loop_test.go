package loop_test

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
)

var (
	ll1, ll2 = hca.GID{0: 0xfe, 1: 0x80, 15: 1}, hca.GID{0: 0xfe, 1: 0x80, 15: 2}
	ip1, ip2 = hca.IPv4GID([4]byte{10, 0, 0, 1}), hca.IPv4GID([4]byte{10, 0, 0, 2})
)

func attach(t *testing.T, f *loop.Fabric, name string, gids ...hca.GID) *loop.Port {
	t.Helper()
	p, err := f.Attach(name, gids...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestResolve(t *testing.T) {
	type attr = hca.AHAttr
	for _, c := range []struct {
		name    string
		a       attr
		ib, eth string // the endpoint found; "" is none
	}{
		{"LID", attr{DLID: 2}, "two", ""},
		{"LID 0", attr{}, "", ""},
		{"unknown LID", attr{DLID: 3}, "", ""},
		{"GID", attr{IsGlobal: true, DGID: ll1}, "one", "one"},
		{"second GID", attr{IsGlobal: true, DGID: ip2}, "two", "two"},
		{"GID before LID", attr{IsGlobal: true, DGID: ll1, DLID: 2}, "one", "one"},
		{"unknown GID, LID", attr{IsGlobal: true, DGID: hca.GID{1}, DLID: 2}, "two", ""},
		{"GID, but not global", attr{DGID: ll1}, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			for link, want := range map[hca.LinkLayer]string{hca.LinkInfiniBand: c.ib, hca.LinkEthernet: c.eth} {
				f := loop.New(link)
				attach(t, f, "one", ll1, ip1)
				attach(t, f, "two", ll2, ip2)
				got := ""
				if p := f.Resolve(&c.a); p != nil {
					got = p.Endpoint().(string)
				}
				if got != want {
					t.Errorf("%v: found %q, want %q", link, got, want)
				}
			}
		})
	}
}

func TestAttach(t *testing.T) {
	for _, link := range []hca.LinkLayer{hca.LinkInfiniBand, hca.LinkEthernet} {
		t.Run(link.String(), func(t *testing.T) {
			f := loop.New(link)
			lid := func(n uint16) uint16 {
				if link == hca.LinkEthernet {
					return 0
				}
				return n
			}
			a, b := attach(t, f, "a", ll1, ip1), attach(t, f, "b", ll2)
			if a.LID() != lid(1) || b.LID() != lid(2) {
				t.Errorf("LIDs %d and %d", a.LID(), b.LID())
			}
			// One GID of two is taken: neither is given out.
			for _, gids := range [][]hca.GID{{ip2, ip1}, {ip1, ip2}} {
				if _, err := f.Attach("c", gids...); !errors.Is(err, unix.EEXIST) {
					t.Errorf("a GID that is taken: %v", err)
				}
			}
			if p := f.Resolve(&hca.AHAttr{IsGlobal: true, DGID: ip2}); p != nil {
				t.Errorf("a port that was refused is found: %v", p.Endpoint())
			}
			a.Detach()
			a.Detach()
			for _, gid := range []hca.GID{ll1, ip1} {
				if p := f.Resolve(&hca.AHAttr{IsGlobal: true, DGID: gid}); p != nil {
					t.Errorf("a detached port is found: %v", p.Endpoint())
				}
			}
			if c := attach(t, f, "c", ip1); c.LID() != lid(1) {
				t.Errorf("LID %d", c.LID())
			}
		})
	}
}

func TestIsMulticast(t *testing.T) {
	for _, c := range []struct {
		a    hca.AHAttr
		want bool
	}{
		{hca.AHAttr{DLID: 0xc000}, true},
		{hca.AHAttr{DLID: 0xbfff}, false},
		{hca.AHAttr{DLID: loop.PermissiveLID}, false},
		{hca.AHAttr{IsGlobal: true, DGID: hca.GID{0xff, 0x0e}}, true},
		{hca.AHAttr{DGID: hca.GID{0xff, 0x0e}}, false},
		{hca.AHAttr{IsGlobal: true, DGID: ll1}, false},
		{hca.AHAttr{IsGlobal: true, DGID: ip1}, false},
		{hca.AHAttr{IsGlobal: true, DGID: hca.IPv4GID([4]byte{224, 0, 0, 1})}, true},
		{hca.AHAttr{IsGlobal: true, DGID: hca.IPv4GID([4]byte{239, 255, 0, 1})}, true},
		{hca.AHAttr{IsGlobal: true, DGID: hca.IPv4GID([4]byte{240, 0, 0, 1})}, false},
	} {
		if got := loop.IsMulticast(&c.a); got != c.want {
			t.Errorf("%+v: %v", c.a, got)
		}
	}
}
