package modprobe

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func names(t *testing.T, dir string) string {
	t.Helper()
	ents, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var l []string
	for _, e := range ents {
		l = append(l, e.Name())
	}
	return strings.Join(l, " ")
}

func TestInstallRemove(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "modprobe.d")
	g := Guard{Dir: dir}
	if err := g.Remove(); err != nil {
		t.Errorf("remove with nothing there: %v", err)
	}
	for range 2 { // the second time over a left-over
		if err := g.Install(); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(g.Path())
		if err != nil {
			t.Fatal(err)
		}
		if string(b) != text || !strings.HasSuffix(text, "\ninstall ib_core /bin/false\n") || !strings.HasPrefix(text, "# Written by uverbsd") {
			t.Errorf("text %q", b)
		}
		if st, _ := os.Stat(g.Path()); st.Mode() != 0o644 {
			t.Errorf("mode %v", st.Mode())
		}
		if st, _ := os.Stat(dir); st.Mode().Perm() != 0o755 {
			t.Errorf("dir mode %v", st.Mode())
		}
		if got := names(t, dir); got != fileName {
			t.Errorf("in the directory: %s", got)
		}
	}
	// A killed writer's temporary, and a file that is not ours.
	for _, f := range []string{fileName + ".123.tmp", "other.conf"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := g.Remove(); err != nil {
			t.Fatal(err)
		}
		if got := names(t, dir); got != "other.conf" {
			t.Errorf("after remove: %s", got)
		}
	}
}

func TestInstallFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	err := Guard{Dir: filepath.Join(file, "d")}.Install()
	if err == nil || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "ib_core") {
		t.Errorf("got %v", err)
	}
}

func TestLoaded(t *testing.T) {
	for _, c := range []struct {
		name string
		mk   []string
		want bool
	}{
		{"nothing", nil, false},
		{"other module", []string{"module/ib_uverbsx"}, false},
		{"module", []string{"module/ib_core"}, true},
		{"class that is not sysfs", []string{"class/infiniband/qib0"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			sys := t.TempDir()
			for _, d := range c.mk {
				if err := os.MkdirAll(filepath.Join(sys, d), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			g := Guard{Sys: sys}
			got, err := g.Loaded()
			if err != nil || got != c.want {
				t.Errorf("Loaded: %v, %v", got, err)
			}
			if err := g.Check(); errors.Is(err, ErrLoaded) != c.want {
				t.Errorf("Check: %v", err)
			}
		})
	}
	// The real sysfs: any directory of it counts as the kernel's.
	if ok, err := onSysfs("/sys/class"); err != nil || !ok {
		t.Errorf("onSysfs(/sys/class) = %v, %v", ok, err)
	}
	if strings.Contains(ErrLoaded.Error(), "\n") {
		t.Error("more than one line")
	}
}
