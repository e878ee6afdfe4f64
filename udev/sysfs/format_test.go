package sysfs

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestRate(t *testing.T) {
	for _, c := range []struct {
		speed, width uint8
		want         string
	}{
		{1, 1, "2.5 Gb/sec (1X SDR)\n"},
		{1, 2, "10 Gb/sec (4X SDR)\n"},
		{2, 2, "20 Gb/sec (4X DDR)\n"},
		{4, 8, "120 Gb/sec (12X QDR)\n"},
		{8, 2, "40 Gb/sec (4X FDR10)\n"},
		{16, 2, "56 Gb/sec (4X FDR)\n"},
		{32, 2, "100 Gb/sec (4X EDR)\n"},
		{64, 16, "100 Gb/sec (2X HDR)\n"},
		{128, 4, "800 Gb/sec (8X NDR)\n"},
		{0, 1, "2.5 Gb/sec (1X SDR)\n"},
	} {
		if got, err := rate(c.speed, c.width); got != c.want || err != nil {
			t.Errorf("rate(%d, %d) = %q, %v, want %q", c.speed, c.width, got, err, c.want)
		}
	}
	if _, err := rate(32, 0); !errors.Is(err, unix.EINVAL) {
		t.Errorf("no width: %v", err)
	}
}

func TestMask(t *testing.T) {
	for _, c := range []struct{ online, possible, want string }{
		{"0\n", "0\n", "1\n"},
		{"0-3\n", "0-3\n", "f\n"},
		{"0-1,3\n", "0-7\n", "0b\n"},
		{"0-33\n", "0-33\n", "3,ffffffff\n"},
		{"32\n", "0-127\n", "00000000,00000000,00000001,00000000\n"},
	} {
		if got, err := formatMask(c.online, c.possible); got != c.want || err != nil {
			t.Errorf("mask(%q of %q) = %q, %v, want %q", c.online, c.possible, got, err, c.want)
		}
	}
	for _, bad := range []string{"", "x", "1-", "0-99999999"} {
		if _, err := formatMask("0", bad); err == nil {
			t.Errorf("%q taken", bad)
		}
	}
}

func TestStack(t *testing.T) {
	info := strings.Join([]string{
		`27 1 254:0 / / rw - ext4 /dev/vda rw`,
		`23 27 0:22 / /sys rw shared:7 - sysfs sysfs rw`,
		`90 80 0:50 / /sys/class ro - overlay third ro`, // not in order
		`70 23 0:39 / /sys/class ro master:1 shared:2 - overlay uverbsd ro,lowerdir=/run/uverbsd/class.layer:/sys/class`,
		`80 70 0:40 / /sys/class ro - tmpfs two\040words rw`,
		`71 70 0:41 /x /sys/class/net ro - sysfs sysfs rw`,
		`bad line`,
	}, "\n")
	var got []string
	for _, m := range stackAt(info, "/sys/class") {
		got = append(got, m.fsType+" "+m.source)
	}
	if s := strings.Join(got, ", "); s != "overlay uverbsd, tmpfs two words, overlay third" {
		t.Error(s)
	}
	if l := stackAt(info, "/nowhere"); len(l) != 0 {
		t.Error(l)
	}
}
