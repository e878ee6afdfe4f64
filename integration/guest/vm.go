package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/cpio"
	"github.com/uverbsd/uverbsd/integration/internal/image"
	"github.com/uverbsd/uverbsd/integration/internal/payload"
	"github.com/uverbsd/uverbsd/integration/internal/wire"
)

const (
	quitWait    = 3 * time.Second // from SIGTERM to SIGKILL for QEMU
	reportWait  = 2 * time.Second // after the agent's port closed, for QEMU to end and say why
	consoleTail = 40              // lines of the console in an error
)

// VM is a running guest. Its methods may be called concurrently.
type VM struct {
	cfg     Config
	image   *image.Image
	dir     string // temporary: initramfs, QEMU's snapshot
	session *session
	process *process
	wait    sync.WaitGroup // the VM's own goroutines

	booted time.Duration // from QEMU's start to the agent's greeting

	closeOnce sync.Once
	closeErr  error
	closing   chan struct{} // closed by Close, so that the end of QEMU is not reported as a failure
}

// Prepare builds the image of cfg's release and packages unless it is cached. Start does so too; callers that bound
// Start's time call Prepare first.
func Prepare(ctx context.Context, cfg Config) error {
	if err := cfg.fill(); err != nil {
		return err
	}
	img, err := cfg.openImage(ctx)
	if err != nil {
		return err
	}
	return img.Close()
}

func (c *Config) openImage(ctx context.Context) (*image.Image, error) {
	recipe, err := image.NewRecipe(string(c.Release), c.Packages)
	if err != nil {
		return nil, err
	}
	return image.Open(ctx, filepath.Join(c.BuildDir, "guest"), recipe, c.Progress)
}

// Start boots a guest, waits for its agent and, if asked for, for the daemon. The end of ctx ends the guest, also
// later. Close must be called.
func Start(ctx context.Context, cfg Config) (*VM, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	vm, err := startVM(ctx, cfg)
	for try := 1; try < bootTries && emulatorFault(err); try++ {
		cfg.Progress(fmt.Sprintf("%s guest: the emulator broke its kernel while it patched itself; booting again", cfg.Release))
		vm, err = startVM(ctx, cfg)
	}
	if err != nil {
		return nil, err
	}
	if cfg.Daemon {
		if _, err := vm.StartDaemon(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("%s guest: %w", cfg.Release, err), vm.Close())
		}
	}
	return vm, nil
}

// bootTries bounds the boots of one Start.
const bootTries = 3

// emulatorFault: QEMU's multi-threaded emulation lets one processor run into the
// int3 that the kernel puts over an instruction while it patches it, after the
// kernel has taken its handler away again (seen once in about 80 boots, on a
// loaded machine, with QEMU 7.2 and kernel 6.12). It says nothing of what is
// tested; every other end of a boot is a failure.
func emulatorFault(err error) bool {
	return err != nil && errors.Is(err, ErrGuestGone) && strings.Contains(err.Error(), "int3: 0000")
}

func startVM(ctx context.Context, cfg Config) (*VM, error) {
	img, err := cfg.openImage(ctx)
	if err != nil {
		return nil, err
	}
	vm := &VM{cfg: cfg, image: img, closing: make(chan struct{})}
	if err := vm.boot(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s guest: %w", cfg.Release, err), vm.Close())
	}
	return vm, nil
}

func (vm *VM) boot(ctx context.Context) error {
	var err error
	if vm.dir, err = os.MkdirTemp(filepath.Join(vm.cfg.BuildDir, "guest"), ".vm-"); err != nil {
		return fmt.Errorf("make a temporary folder: %w", err)
	}
	initrd := filepath.Join(vm.dir, "initrd")
	if err := vm.writeInitrd(ctx, initrd); err != nil {
		return fmt.Errorf("make the initramfs: %w", err)
	}
	accel := vm.cfg.Accel
	if accel == AccelAuto {
		accel = chooseAccel(ctx, filepath.Join(vm.cfg.BuildDir, "guest"), vm.image.Kernel, vm.cfg.Progress)
	}
	m := machine{
		accel: accel, cpus: vm.cfg.CPUs, memMiB: vm.cfg.MemMiB,
		kernel: vm.image.Kernel, initrd: initrd, disk: vm.image.Root,
		append: vm.cfg.Append, extra: vm.cfg.QEMU,
	}
	start := time.Now()
	if vm.process, err = startProcess(qemuProgram, m.args(), vm.dir, &tail{next: vm.cfg.Console}); err != nil {
		return err
	}
	vm.session = newSession(vm.process.port)
	vm.wait.Go(vm.supervise)
	vm.wait.Go(func() { // the guest ends with its context
		select {
		case <-ctx.Done():
			vm.session.fail(fmt.Errorf("guest ended: %w", context.Cause(ctx)))
			vm.process.kill()
		case <-vm.process.exited:
		}
	})
	limit := time.NewTimer(vm.cfg.BootTimeout)
	defer limit.Stop()
	select {
	case <-vm.session.greeted:
		vm.booted = time.Since(start)
		// QEMU has read the initramfs and unlinked its snapshot: an owner that is killed from here on leaves nothing.
		if err := os.RemoveAll(vm.dir); err != nil {
			return fmt.Errorf("remove the temporary folder: %w", err)
		}
		return nil
	case <-vm.session.dead:
		return fmt.Errorf("did not boot: %w", vm.session.err)
	case <-limit.C:
		return fmt.Errorf("did not boot within %v; the end of its console:\n%s", vm.cfg.BootTimeout, vm.process.console.lines(consoleTail))
	}
}

// supervise serves the session and reports the guest's end to everybody who waits.
func (vm *VM) supervise() {
	err := vm.session.serve()
	select {
	case <-vm.process.exited:
	case <-time.After(reportWait):
	}
	select {
	case <-vm.closing:
		vm.session.fail(fmt.Errorf("%w: it was closed", ErrGuestGone))
	default:
		vm.session.fail(vm.gone(err))
	}
	vm.process.kill() // a guest without its agent is of no use
}

// gone describes the end of a guest whose port failed with err.
func (vm *VM) gone(err error) error {
	what := err.Error()
	select {
	case <-vm.process.exited:
		what = fmt.Sprintf("QEMU ended (%v)", vm.process.state())
	default:
	}
	if cause := consoleCause(vm.Console()); cause != "" {
		what = cause + ", " + what
	}
	if msg := vm.process.stderr.lines(10); msg != "" {
		what += "; it said: " + msg
	}
	return fmt.Errorf("%w: %s; the end of its console:\n%s", ErrGuestGone, what, vm.process.console.lines(consoleTail))
}

// consoleCause picks the line that says why a guest ended, if there is one: a panic, or process 1's last complaint.
func consoleCause(console string) string {
	cause := ""
	for line := range strings.Lines(console) {
		if at := strings.Index(line, "Kernel panic - not syncing"); at >= 0 {
			return strings.TrimSpace(line[at:])
		}
		if at := strings.Index(line, "guestinit: "); at >= 0 {
			cause = strings.TrimSpace(line[at:])
		}
	}
	return cause
}

// writeInitrd writes the image's boot archive followed by one with process 1 and the caller's files.
func (vm *VM) writeInitrd(ctx context.Context, file string) (err error) {
	initProgram := filepath.Join(vm.dir, "guestinit")
	if err := buildInit(ctx, initProgram); err != nil {
		return err
	}
	modules, err := os.ReadFile(vm.image.Modules)
	if err != nil {
		return fmt.Errorf("read boot modules: %w", err)
	}
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if _, err := out.Write(modules); err != nil {
		return err
	}
	w := cpio.NewWriter(out)
	if err := w.Tree(payload.Boot, initProgram, 0o755); err != nil {
		return err
	}
	if err := w.Tree(payload.Root+payload.Init, initProgram, 0o755); err != nil {
		return err
	}
	for _, f := range vm.cfg.payload() {
		if err := w.Tree(payload.Root+f.Guest, f.Host, f.Perm); err != nil {
			return err
		}
	}
	return w.Close()
}

// buildInit builds the guest's process 1, statically, with the go program of PATH.
func buildInit(ctx context.Context, out string) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "./integration/guestinit")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=")
	if msg, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build ./integration/guestinit: %w\n%s", err, bytes.TrimSpace(msg))
	}
	return nil
}

// Kernel is the guest's kernel release.
func (vm *VM) Kernel() string { return vm.session.hello.Kernel }

// BootTime is the time from QEMU's start until the guest could run steps.
func (vm *VM) BootTime() time.Duration { return vm.booted }

// Console is the end of the serial console, at most 32 KiB.
func (vm *VM) Console() string { return vm.process.console.lines(1 << 20) }

// Go starts a step. The caller must Wait for it.
func (vm *VM) Go(cmd Command) (*Step, error) { return vm.session.start(cmd) }

// Exec runs a step to its end. Several may run at once. The error is ErrTimeout, ErrGuestGone, the context's, or
// says why the step could not run; it is nil for a script that failed by itself.
func (vm *VM) Exec(ctx context.Context, cmd Command) (Result, error) {
	st, err := vm.Go(cmd)
	if err != nil {
		return Result{ExitCode: -1}, err
	}
	return st.Wait(ctx)
}

// StartDaemon starts the daemon as Config says and waits until it is ready. It returns its process id in the guest.
// Start has done this already if Config.Daemon is set; tests that stop the daemon start it again with this.
func (vm *VM) StartDaemon(ctx context.Context) (pid int, err error) {
	limit := vm.cfg.DaemonReadyTimeout
	m, err := vm.session.ask(ctx, &vm.session.started, &wire.Message{Kind: wire.KindDaemonStart, Daemon: &wire.Daemon{
		Path: payload.DaemonPath, Args: vm.cfg.DaemonArgs, Env: vm.cfg.DaemonEnv, Log: payload.DaemonLog,
		Node: DaemonNode, Class: DaemonClass, TimeoutMS: limit.Milliseconds(),
	}}, limit+answerGrace)
	if err != nil {
		return 0, err
	}
	if m.Error != "" {
		log, err := vm.DaemonLog(ctx)
		if err != nil {
			log = []byte(err.Error())
		}
		return m.PID, fmt.Errorf("%s; the end of its log:\n%s", m.Error, lastLines(log, 20))
	}
	return m.PID, nil
}

// DaemonExit says how the daemon ended.
type DaemonExit struct {
	Code     int  // its exit status, or 128 plus the signal
	Signal   int  // the signal that ended it, or 0
	TimedOut bool // it did not end in time and was killed
}

// StopDaemon sends sig to the daemon and waits for its end, at most limit; then it is killed.
func (vm *VM) StopDaemon(ctx context.Context, sig syscall.Signal, limit time.Duration) (DaemonExit, error) {
	m, err := vm.session.ask(ctx, &vm.session.stopped, &wire.Message{
		Kind: wire.KindDaemonStop, Signal: int(sig), TimeoutMS: limit.Milliseconds(),
	}, limit+answerGrace)
	if err != nil {
		return DaemonExit{}, err
	}
	e := DaemonExit{Code: m.Exit.Code, Signal: m.Exit.Signal, TimedOut: m.Exit.TimedOut}
	if m.Exit.Error != "" {
		return e, fmt.Errorf("stop the daemon: %s %s", m.Exit.Error, strings.Join(m.Exit.Stuck, "; "))
	}
	return e, nil
}

// DaemonEnded reports the daemon's last end that StopDaemon did not ask for, if there was one.
func (vm *VM) DaemonEnded() (DaemonExit, bool) {
	vm.session.mu.Lock()
	defer vm.session.mu.Unlock()
	if e := vm.session.crash; e != nil {
		return DaemonExit{Code: e.Code, Signal: e.Signal}, true
	}
	return DaemonExit{}, false
}

// DaemonLog is everything the daemon has written, over all of its lives.
func (vm *VM) DaemonLog(ctx context.Context) ([]byte, error) {
	res, err := vm.Exec(ctx, Command{Script: "cat " + payload.DaemonLog, Timeout: 30 * time.Second})
	if err != nil {
		return nil, fmt.Errorf("read the daemon's log: %w", err)
	}
	return res.Output, nil
}

// Close ends the guest at once and removes what it left on the host. Pending steps fail. It is safe to call twice.
func (vm *VM) Close() error {
	vm.closeOnce.Do(func() {
		close(vm.closing)
		if vm.process != nil {
			vm.process.stop(quitWait)
		}
		vm.wait.Wait()
		if vm.dir != "" {
			vm.closeErr = os.RemoveAll(vm.dir)
		}
		vm.closeErr = errors.Join(vm.closeErr, vm.image.Close())
	})
	return vm.closeErr
}

// lastLines is the end of b, at most n lines.
func lastLines(b []byte, n int) string {
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
