package guest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestFillDefaults(t *testing.T) {
	c := Config{Release: Bookworm}
	if err := c.fill(); err != nil {
		t.Fatal(err)
	}
	if c.CPUs != DefaultCPUs || c.MemMiB != DefaultMemMiB || c.BootTimeout != DefaultBootTimeout || c.Timeout != DefaultRunTimeout {
		t.Errorf("defaults missing: %+v", c)
	}
	if filepath.Base(c.BuildDir) != "build" || c.DaemonBinary != filepath.Join(c.BuildDir, "uverbsd") {
		t.Errorf("build folder %s, daemon %s", c.BuildDir, c.DaemonBinary)
	}
	if len(c.payload()) != 0 {
		t.Errorf("files without a daemon: %v", c.payload())
	}
}

func TestFillRefuses(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]Config{
		"release": {Release: "sid"},
		"cpus":    {Release: Trixie, CPUs: -1},
		"accel":   {Release: Trixie, Accel: "hvf"},
		"file":    {Release: Trixie, Files: []File{{Host: filepath.Join(dir, "absent")}}},
		"place":   {Release: Trixie, Files: []File{{Host: dir, Guest: "relative"}}},
		"root":    {Release: Trixie, Files: []File{{Host: dir, Guest: "/"}}},
		"daemon":  {Release: Trixie, Daemon: true, DaemonBinary: filepath.Join(dir, "absent")},
	} {
		if err := c.fill(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestFillTwiceKeepsThePayload(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "uverbsd")
	if err := os.WriteFile(bin, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	c := Config{Release: Trixie, Daemon: true, DaemonBinary: bin, Files: []File{{Host: bin}}}
	for range 2 {
		if err := c.fill(); err != nil {
			t.Fatal(err)
		}
	}
	var places []string
	for _, f := range c.payload() {
		places = append(places, f.Guest)
	}
	if want := []string{"/opt/uverbsd-guest/uverbsd", "/opt/uverbsd/uverbsd"}; !slices.Equal(places, want) {
		t.Errorf("files go to %v, want %v", places, want)
	}
}

func TestParseFile(t *testing.T) {
	for in, want := range map[string]string{"/x/tool": "/opt/uverbsd-guest/tool", "/x/tool:/usr/bin/t": "/usr/bin/t"} {
		if f, err := ParseFile(in); err != nil || f.Guest != want || f.Host != "/x/tool" {
			t.Errorf("%s: %+v, %v, want guest path %s", in, f, err, want)
		}
	}
	for _, in := range []string{"", ":/x", "/x:y", "/x:/"} {
		if _, err := ParseFile(in); err == nil {
			t.Errorf("%q was accepted", in)
		}
	}
}

func TestQEMUArguments(t *testing.T) {
	m := machine{
		accel: AccelTCG, cpus: 3, memMiB: 512, kernel: "/k", initrd: "/i", disk: "/a,b",
		append: []string{"intel_iommu=on", "x=y"}, extra: []string{"-device", "edu"},
	}
	args := m.args()
	value := func(flag string) string {
		if i := slices.Index(args, flag); i >= 0 {
			return args[i+1]
		}
		return ""
	}
	for flag, want := range map[string]string{
		"-smp": "3", "-m": "512", "-kernel": "/k", "-initrd": "/i", "-accel": "tcg,thread=multi", "-cpu": emulatedCPU,
	} {
		if got := value(flag); got != want {
			t.Errorf("%s %q, want %q", flag, got, want)
		}
	}
	if d := value("-drive"); !strings.HasPrefix(d, "file=/a,,b,") || !strings.Contains(d, "snapshot=on") {
		t.Errorf("-drive %q: the comma of the path must be doubled and the image must not be written", d)
	}
	if k := value("-append"); !strings.HasSuffix(k, " intel_iommu=on x=y") || !strings.Contains(k, "panic=-1") {
		t.Errorf("-append %q", k)
	}
	if !slices.Equal(args[len(args)-2:], []string{"-device", "edu"}) {
		t.Errorf("extra arguments are not last: %q", args)
	}
	m.accel = AccelKVM
	if args = m.args(); value("-accel") != "kvm" || value("-cpu") != "host" {
		t.Errorf("with KVM: %q", args)
	}
}

func TestTail(t *testing.T) {
	var next strings.Builder
	c := tail{next: &next}
	for range 3000 {
		_, _ = c.Write([]byte("0123456789abcde\r\n"))
	}
	_, _ = c.Write([]byte("last\r\n"))
	if len(c.buf) > tailSize {
		t.Errorf("%d bytes kept", len(c.buf))
	}
	if got := c.lines(2); got != "0123456789abcde\nlast" {
		t.Errorf("last two lines: %q", got)
	}
	if next.Len() != 3000*17+6 {
		t.Errorf("%d bytes passed on", next.Len())
	}
}

func TestConsoleCause(t *testing.T) {
	for in, want := range map[string]string{
		"":     "",
		"a\nb": "",
		"x\n[ 1.2] Kernel panic - not syncing: sysrq triggered crash\n[ 1.3] CPU: 0": "Kernel panic - not syncing: sysrq triggered crash",
		"guestinit: noise\nguestinit: why\nend":                                      "guestinit: why",
		"guestinit: boot: root disk: not there":                                      "guestinit: boot: root disk: not there",
	} {
		if got := consoleCause(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
