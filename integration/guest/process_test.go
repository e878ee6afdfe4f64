package guest

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fakeQEMU is a program in QEMU's place.
func fakeQEMU(t *testing.T, script string) *process {
	t.Helper()
	p, err := startProcess("/bin/sh", []string{"-c", script}, t.TempDir(), &tail{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.stop(0) })
	return p
}

func TestProcessGivesTheSocket(t *testing.T) {
	p := fakeQEMU(t, "read x <&3; echo \"got $x\" >&3; echo console; echo complaint >&2; echo $TMPDIR")
	if _, err := p.port.Write([]byte("word\n")); err != nil {
		t.Fatal(err)
	}
	<-p.exited
	buf := make([]byte, 100)
	n, err := p.port.Read(buf)
	if err != nil || string(buf[:n]) != "got word\n" {
		t.Errorf("over the socket: %q, %v", buf[:n], err)
	}
	if _, err := p.port.Read(buf); err == nil {
		t.Error("the socket has no end although the process has ended: our copy of its end is still open")
	}
	if out := p.console.lines(9); !strings.HasPrefix(out, "console\n/") || p.stderr.lines(9) != "complaint" {
		t.Errorf("console %q, complaints %q", out, p.stderr.lines(9))
	}
}

func TestProcessStop(t *testing.T) {
	p := fakeQEMU(t, "trap '' TERM; echo up >&3; while :; do sleep 1; done")
	if _, err := p.port.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	p.stop(10 * time.Millisecond) // it ignores SIGTERM, so this returns only because of SIGKILL
	if !strings.Contains(p.state(), "killed") {
		t.Errorf("state %q", p.state())
	}
}

func TestProcessNotInstalled(t *testing.T) {
	_, err := startProcess("no-such-qemu", nil, t.TempDir(), &tail{})
	if err == nil || !strings.Contains(err.Error(), "apt-packages") {
		t.Errorf("got %v, want a hint at apt-packages", err)
	}
}

func TestGoneNamesTheCause(t *testing.T) {
	p := fakeQEMU(t, "echo '[1] Kernel panic - not syncing: test'; echo 'bad option' >&2; exit 1")
	<-p.exited
	vm := &VM{process: p}
	err := vm.gone(errors.New("port closed"))
	first, _, _ := strings.Cut(err.Error(), "\n")
	for _, want := range []string{"Kernel panic - not syncing: test", "exit status 1", "bad option"} {
		if !strings.Contains(first, want) {
			t.Errorf("first line %q lacks %q", first, want)
		}
	}
	if !errors.Is(err, ErrGuestGone) {
		t.Error("not ErrGuestGone")
	}
}

// The answer about KVM is kept for this boot of the host only.
func TestChooseAccelCache(t *testing.T) {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		if got := chooseAccel(t.Context(), t.TempDir(), "/none", func(string) {}); got != AccelTCG {
			t.Errorf("without /dev/kvm: %q", got)
		}
		return
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	line := append(bytes.TrimSpace(boot), " kvm"...)
	if err := os.WriteFile(filepath.Join(dir, ".accel"), line, 0o644); err != nil {
		t.Fatal(err)
	}
	got := chooseAccel(t.Context(), dir, "/none", func(line string) { t.Errorf("probed: %s", line) })
	if f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		if got != AccelTCG {
			t.Errorf("/dev/kvm does not open (%v), got %q", err, got)
		}
	} else {
		_ = f.Close()
		if got != AccelKVM {
			t.Errorf("got %q, want the cached kvm", got)
		}
	}
}
