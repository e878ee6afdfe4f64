package guest

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

// qemuProgram is found on PATH.
const qemuProgram = "qemu-system-x86_64"

// agentFD is the file descriptor of the agent's socket in QEMU: the first of exec.Cmd.ExtraFiles.
const agentFD = 3

// machine is what one QEMU process is started with.
type machine struct {
	accel                Accel // AccelKVM or AccelTCG
	cpus, memMiB         int
	kernel, initrd, disk string
	append, extra        []string
}

// kernelArgs is the kernel's command line. A guest that oopses or panics ends at once (panic=-1 with QEMU's
// -no-reboot), so that the host learns of it. A busy host makes the kernel's watchdog distrust the counter that it
// tells the time by; that it then patches its code while all processors run is what TCG sometimes does not survive
// (a panic for an int3). The rest makes an emulated boot quicker.
func (m *machine) kernelArgs() string {
	args := []string{
		"console=ttyS0", "quiet", "panic=-1", "oops=panic",
		"tsc=nowatchdog", "mitigations=off", "random.trust_cpu=on", "cryptomgr.notests", "audit=0",
	}
	return strings.Join(append(args, m.append...), " ")
}

// emulatedCPU is the processor that TCG plays: all that it can, but for what it claims and is slow at. With ERMS the
// kernel copies to and from user memory by `rep movsb`, which TCG does byte by byte; FSRM is the same for short copies,
// in later versions. With SMAP it looks most accesses of user memory up anew. process_vm_readv of 64 KiB takes
// 1,900 us with both, 350 us without ERMS, and 22 us without either.
const emulatedCPU = "max,-erms,-fsrm,-smap"

// args is QEMU's command line without the program. The disk is a snapshot: writes go to a temporary file that QEMU
// has already unlinked, so that any number of guests boot from one image.
func (m *machine) args() []string {
	accel, cpu := "tcg,thread=multi", emulatedCPU
	if m.accel == AccelKVM {
		accel, cpu = "kvm", "host"
	}
	args := []string{
		"-no-user-config", "-nodefaults", "-no-reboot", "-display", "none",
		"-machine", "q35", "-accel", accel, "-cpu", cpu,
		"-smp", strconv.Itoa(m.cpus), "-m", strconv.Itoa(m.memMiB),
		"-kernel", m.kernel, "-initrd", m.initrd, "-append", m.kernelArgs(),
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-drive", "file=" + strings.ReplaceAll(m.disk, ",", ",,") + ",format=raw,if=virtio,snapshot=on,cache=unsafe",
		"-chardev", fmt.Sprintf("socket,id=agent,fd=%d", agentFD),
		"-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=" + wire.PortName,
		"-device", "virtio-rng-pci",
	}
	return append(args, m.extra...)
}
