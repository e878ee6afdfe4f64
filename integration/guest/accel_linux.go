package guest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// probeLimit bounds the probe of KVM. Where KVM works, the probe takes about two seconds.
const probeLimit = 10 * time.Second

// probeTick is how often the probe looks at what QEMU has written.
const probeTick = 50 * time.Millisecond

// chooseAccel says whether guests can use KVM. A /dev/kvm that opens proves nothing: some hosts have one that makes
// virtual machines and then cannot run a kernel in them. So the guest's own kernel is booted once, without any
// root file system, up to its panic about that. The answer is kept in dir until the host boots again.
func chooseAccel(ctx context.Context, dir, kernel string, progress func(string)) Accel {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return AccelTCG
	}
	_ = f.Close()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return AccelTCG
	}
	key := strings.TrimSpace(string(boot)) + " "
	cache := filepath.Join(dir, ".accel")
	if known, err := os.ReadFile(cache); err == nil {
		switch accel, _ := strings.CutPrefix(string(known), key); Accel(accel) {
		case AccelKVM, AccelTCG:
			return Accel(accel)
		}
	}
	accel, why := AccelKVM, ""
	if err := probeKVM(ctx, kernel); err != nil {
		accel, why = AccelTCG, ": "+err.Error()
	}
	if ctx.Err() != nil {
		return AccelTCG // interrupted: this run fails anyway and says nothing about KVM
	}
	progress(fmt.Sprintf("guests on this host use %s%s", accel, why))
	if err := os.WriteFile(cache, []byte(key+string(accel)), 0o644); err != nil {
		progress(fmt.Sprintf("the answer is not kept: %v", err))
	}
	return accel
}

// probeKVM boots the kernel under KVM as far as it goes without a root file system.
func probeKVM(ctx context.Context, kernel string) error {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	console := &tail{}
	p, err := startProcess(qemuProgram, []string{
		"-no-user-config", "-nodefaults", "-no-reboot", "-display", "none",
		"-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "512",
		"-kernel", kernel, "-append", "console=ttyS0 panic=-1",
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
	}, os.TempDir(), console)
	if err != nil {
		return err
	}
	defer p.stop(0)
	tick := time.NewTicker(probeTick)
	defer tick.Stop()
	for {
		select {
		case <-p.exited:
			if strings.Contains(console.lines(1<<20), "Unable to mount root fs") {
				return nil
			}
			return fmt.Errorf("KVM does not boot a kernel here (%v)", p.state())
		case <-ctx.Done():
			return fmt.Errorf("KVM does not boot a kernel here within %v", probeLimit)
		case <-tick.C:
			// QEMU stops the machine but stays when KVM gives up.
			if strings.Contains(p.stderr.lines(1<<20), "KVM internal error") {
				return fmt.Errorf("KVM does not boot a kernel here (KVM internal error)")
			}
		}
	}
}
