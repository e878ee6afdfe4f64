package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/integration/guest"
)

func TestParse(t *testing.T) {
	o, err := parse([]string{
		"-guest", "trixie", "-script", "x.sh", "-packages", " ucx-utils  gdb ", "-daemon=no", "-file", "/a:/b", "-file", "/c",
		"-append", "intel_iommu=on a=b", "-qemu", "-device edu", "-cpus", "4", "-mem", "512", "-timeout", "3m", "-v",
	}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	c := o.cfg
	if c.Release != guest.Trixie || c.Daemon || !c.Verbose || c.CPUs != 4 || c.MemMiB != 512 || c.Timeout != 3*time.Minute || o.script != "x.sh" {
		t.Errorf("got %+v", c)
	}
	if !slices.Equal(c.Packages, []string{"ucx-utils", "gdb"}) || !slices.Equal(c.Append, []string{"intel_iommu=on", "a=b"}) ||
		!slices.Equal(c.QEMU, []string{"-device", "edu"}) || len(c.Files) != 2 || c.Files[0].Guest != "/b" {
		t.Errorf("lists: %+v", c)
	}
}

// The Makefile passes DAEMON=, PACKAGES= and the like even when they are empty.
func TestParseEmptyValues(t *testing.T) {
	o, err := parse([]string{"-guest", "bookworm", "-script", "x", "-packages", "", "-daemon=", "-append", "", "-qemu", ""}, io.Discard)
	if err != nil || !o.cfg.Daemon || len(o.cfg.Packages)+len(o.cfg.Append)+len(o.cfg.QEMU) != 0 {
		t.Errorf("got %+v, %v", o, err)
	}
}

func TestHarnessFailuresAre125(t *testing.T) {
	script := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(script, []byte("true"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{},
		{"-guest", "trixie"},
		{"-guest", "trixie", "-script", "/no/such/script"},
		{"-guest", "sid", "-script", script},
		{"-guest", "trixie", "-script", script, "-daemon", "maybe"},
		{"-guest", "trixie", "-script", script, "-daemon-binary", "/no/such/uverbsd"},
		{"-guest", "trixie", "-script", script, "-daemon=no", "-file", "/no/such/file"},
		{"-guest", "trixie", "-script", script, "surplus"},
		{"-nonsense"},
	} {
		status, err := run(context.Background(), args, io.Discard, io.Discard)
		if status != failure || err == nil || strings.TrimSpace(err.Error()) == "" {
			t.Errorf("%q: status %d, %v", args, status, err)
		}
	}
}
