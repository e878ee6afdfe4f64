//go:build guest

package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// start boots a guest for a test, with the end of its console in the log if the test fails.
func start(t *testing.T, cfg Config) *VM {
	t.Helper()
	cfg.Progress = func(line string) { t.Log(line) }
	vm, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("console of the %s guest:\n%s", cfg.Release, vm.Console())
		}
		if err := vm.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Logf("%s guest up after %v, kernel %s", cfg.Release, vm.BootTime(), vm.Kernel())
	return vm
}

// try runs a script that must pass and returns its output without the last newline.
func try(t *testing.T, vm *VM, cmd Command) string {
	t.Helper()
	res, err := vm.Exec(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	if res.ExitCode != 0 {
		t.Fatalf("status %d:\n%s", res.ExitCode, res.Output)
	}
	return strings.TrimSuffix(string(res.Output), "\n")
}

func TestBoot(t *testing.T) {
	for _, release := range Releases {
		t.Run(string(release), func(t *testing.T) { testBoot(t, release) })
	}
}

func testBoot(t *testing.T, release Release) {
	file := filepath.Join(t.TempDir(), "tool")
	if err := os.WriteFile(file, []byte("#!/bin/sh\necho tool of the host\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	vm := start(t, Config{Release: release, Files: []File{{Host: file}, {Host: file, Guest: "/usr/local/bin/other"}, {Host: file, Guest: "/run/third"}}})
	t.Run("release", func(t *testing.T) {
		if got := try(t, vm, Command{Script: ". /etc/os-release; echo $VERSION_CODENAME"}); got != string(release) {
			t.Errorf("the guest is %q", got)
		}
	})
	t.Run("exit status", func(t *testing.T) {
		for _, want := range []int{0, 3} {
			res, err := vm.Exec(t.Context(), Command{Script: fmt.Sprintf("exit %d", want)})
			if err != nil || res.ExitCode != want {
				t.Errorf("exit %d: %+v, %v", want, res, err)
			}
		}
	})
	t.Run("output", func(t *testing.T) {
		res, err := vm.Exec(t.Context(), Command{Script: "head -c 1048576 /dev/urandom | tee /tmp/data"})
		if err != nil || len(res.Output) != 1<<20 {
			t.Fatalf("%d bytes, %v", len(res.Output), err)
		}
		want := try(t, vm, Command{Script: "sha256sum < /tmp/data"})
		if got := fmt.Sprintf("%x  -", sha256.Sum256(res.Output)); got != want {
			t.Errorf("sum here %s, in the guest %s", got, want)
		}
	})
	t.Run("files", func(t *testing.T) {
		want := "tool of the host"
		for _, tool := range []string{"/opt/uverbsd-guest/tool", "other", "/run/third"} {
			if got := try(t, vm, Command{Script: tool, User: "tester"}); got != want {
				t.Errorf("%s: %q", tool, got)
			}
		}
	})
	t.Run("tester", func(t *testing.T) {
		got := try(t, vm, Command{User: "tester", Script: `
			id -u; id -g; grep CapEff /proc/self/status; cd && pwd; touch mine /tmp/mine && echo writes
			touch /etc/mine 2>/dev/null || echo refused; : > /dev/null && echo null; id -u > /dev/stderr`})
		want := "1000\n1000\nCapEff:\t0000000000000000\n/home/tester\nwrites\nrefused\nnull\n1000"
		if got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	})
	t.Run("modules", func(t *testing.T) {
		try(t, vm, Command{Script: `set -e
			! grep -q '^ib_core' /proc/modules
			[ -c /dev/cuse ]; grep -qw overlay /proc/filesystems
			for m in vfio-pci vfio_iommu_type1 virtio_net e1000e rdma_ucm dummy; do modprobe -n $m; done`})
	})
	t.Run("concurrent", func(t *testing.T) {
		try(t, vm, Command{Script: "mkfifo -m 666 /tmp/fifo"})
		server, err := vm.Go(Command{Script: "cat /tmp/fifo"})
		if err != nil {
			t.Fatal(err)
		}
		try(t, vm, Command{Script: "echo from the client > /tmp/fifo", User: "tester"})
		if res, err := server.Wait(t.Context()); err != nil || string(res.Output) != "from the client\n" {
			t.Errorf("server: %q, %v", res.Output, err)
		}
	})
	t.Run("kill in the middle", func(t *testing.T) {
		w := newWaitFor("up")
		st, err := vm.Go(Command{Script: "echo up; exec sleep 1000", Stdout: w})
		if err != nil {
			t.Fatal(err)
		}
		<-w.seen
		pid, err := st.PID(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		try(t, vm, Command{Script: fmt.Sprintf("kill -9 %d", pid)})
		if res, err := st.Wait(t.Context()); err != nil || res.Signal != int(syscall.SIGKILL) {
			t.Errorf("got %+v, %v", res, err)
		}
	})
	t.Run("timeout", func(t *testing.T) {
		res, err := vm.Exec(t.Context(), Command{Script: "echo before; setsid sleep 1000 & sleep 1000", Timeout: time.Second})
		if !errors.Is(err, ErrTimeout) || string(res.Output) != "before\n" {
			t.Errorf("got %q, %v", res.Output, err)
		}
		try(t, vm, Command{Script: "! pgrep sleep"})
	})
	t.Run("leftovers", func(t *testing.T) {
		res, err := vm.Exec(t.Context(), Command{Script: "setsid sleep 1000 & echo done"})
		if err != nil || string(res.Output) != "done\n" || res.Leftover == 0 {
			t.Errorf("got %+v, %v", res, err)
		}
		try(t, vm, Command{Script: "! pgrep sleep"})
	})
	t.Run("a second guest from the same image", func(t *testing.T) {
		try(t, vm, Command{Script: "touch /root/mine"})
		vm2 := start(t, Config{Release: release})
		try(t, vm2, Command{Script: "! [ -e /root/mine ]"})
	})
	t.Run("kernel rxe", func(t *testing.T) {
		// Last but one, for it loads ib_core.
		try(t, vm, Command{Script: `set -e
			ip link add dum0 type dummy; ip link set dum0 up; modprobe rdma_rxe; rdma link add rxe0 type rxe netdev dum0
			ls /sys/class/infiniband | grep rxe0`})
	})
	t.Run("panic", func(t *testing.T) {
		pending, err := vm.Go(Command{Script: "sleep 1000"})
		if err != nil {
			t.Fatal(err)
		}
		_, err = vm.Exec(t.Context(), Command{Script: "echo c > /proc/sysrq-trigger; sleep 1000"})
		_, err2 := pending.Wait(t.Context())
		for _, err := range []error{err, err2} {
			if !errors.Is(err, ErrGuestGone) || !strings.Contains(fmt.Sprint(err), "Kernel panic") {
				t.Errorf("got %v, want ErrGuestGone and the panic", err)
			}
		}
	})
}

// standIn does what the harness looks for in a daemon, and no more.
const standIn = `#!/bin/bash
echo "stand-in $*"
[ "$FAIL" ] && exit 9
trap 'rm /dev/infiniband/uverbs0; umount /sys/class; exit 7' TERM
u=/run/class/infiniband_verbs/uverbs0; mkdir -p $u /dev/infiniband; echo rxe0 > $u/ibdev
mount -t overlay -o ro,lowerdir=/run/class:/sys/class overlay /sys/class
mknod /dev/infiniband/uverbs0 c 1 3
while :; do sleep 0.1; done
`

func writeStandIn(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "uverbsd")
	if err := os.WriteFile(file, []byte(standIn), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestDaemon(t *testing.T) {
	for _, release := range Releases {
		t.Run(string(release), func(t *testing.T) {
			vm := start(t, Config{Release: release, Daemon: true, DaemonBinary: writeStandIn(t)})
			first := try(t, vm, Command{Script: "kill -0 $UVERBSD_PID && [ -x $UVERBSD ] && grep serve $UVERBSD_LOG >&2; echo $UVERBSD_PID"})
			first, pid, _ := strings.Cut(first, "\n")
			if first != "stand-in serve" {
				t.Errorf("log %q", first)
			}
			if end, err := vm.StopDaemon(t.Context(), syscall.SIGTERM, 30*time.Second); err != nil || end.Code != 7 {
				t.Errorf("stop: %+v, %v", end, err)
			}
			try(t, vm, Command{Script: "! [ -e /dev/infiniband/uverbs0 ] && ! [ -e /sys/class/infiniband_verbs ] && [ -z $UVERBSD_PID ]"})
			if again, err := vm.StartDaemon(t.Context()); err != nil || fmt.Sprint(again) == pid {
				t.Errorf("second start: pid %d, %v", again, err)
			}
			try(t, vm, Command{Script: "kill -9 $UVERBSD_PID; while kill -0 $UVERBSD_PID; do sleep 0.05; done 2>/dev/null"})
			if end, ended := vm.DaemonEnded(); !ended || end.Signal != int(syscall.SIGKILL) {
				t.Errorf("after kill -9: %+v, %v", end, ended)
			}
		})
	}
}

func TestDaemonThatEndsFailsTheStart(t *testing.T) {
	vm, err := Start(t.Context(), Config{Release: Trixie, Daemon: true, DaemonBinary: writeStandIn(t), DaemonEnv: []string{"FAIL=1"}})
	if err == nil {
		_ = vm.Close()
		t.Fatal("started")
	}
	for _, want := range []string{"status 9", "stand-in serve"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
}

func TestRunScript(t *testing.T) {
	var out, log bytes.Buffer
	cfg := Config{
		Release: Trixie, Daemon: true, DaemonBinary: writeStandIn(t), DaemonArgs: []string{"serve", "--loud"},
		Script: "echo out; exit 3", Stdout: &out, DaemonLog: &log,
	}
	exit, err := Run(t.Context(), cfg)
	if err != nil || exit != 3 || out.String() != "out\n" || log.String() != "stand-in serve --loud\n" {
		t.Errorf("status %d, %v, output %q, log %q", exit, err, &out, &log)
	}
}

func TestGuestThatDoesNotBoot(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg  Config
		want string
	}{
		"panic":   {Config{Append: []string{"rdinit=/none"}}, "Kernel panic"},
		"hang":    {Config{BootTimeout: 500 * time.Millisecond}, "did not boot within 500ms"},
		"no QEMU": {Config{QEMU: []string{"-device", "no-such-device"}}, "no-such-device"},
	} {
		t.Run(name, func(t *testing.T) {
			tc.cfg.Release = Trixie
			vm, err := Start(t.Context(), tc.cfg)
			if err == nil {
				_ = vm.Close()
				t.Fatal("booted")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%q is not in: %v", tc.want, err)
			}
		})
	}
}

func TestContextEndsTheGuest(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	vm, err := Start(ctx, Config{Release: Trixie})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = vm.Close() }()
	st, err := vm.Go(Command{Script: "sleep 1000"})
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("interrupted")
	cancel(why)
	if _, err := st.Wait(t.Context()); !errors.Is(err, why) {
		t.Errorf("pending step: %v, want the cause", err)
	}
	<-vm.process.exited
}
