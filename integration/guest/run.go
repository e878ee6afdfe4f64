package guest

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Run boots a guest, runs cfg.Script in it as root and returns the script's exit status. The error is about
// everything else: the guest, the daemon, a time limit. A daemon that crashed while the script passed is an error,
// because such a script has not tested what it seems to have tested.
func Run(ctx context.Context, cfg Config) (exit int, err error) {
	if err := cfg.fill(); err != nil {
		return -1, err
	}
	if err := Prepare(ctx, cfg); err != nil {
		return -1, err
	}
	end := time.Now().Add(cfg.Timeout)
	// The limit is not put on ctx, whose end would take the guest away and the daemon's log with it.
	cfg.BootTimeout = min(cfg.BootTimeout, cfg.Timeout)
	vm, err := Start(ctx, cfg)
	if err != nil {
		return -1, err
	}
	defer func() { err = errors.Join(err, vm.Close()) }()
	cfg.Progress(fmt.Sprintf("%s guest up after %.1f s (kernel %s)", cfg.Release, vm.BootTime().Seconds(), vm.Kernel()))
	res, err := vm.Exec(ctx, Command{Script: cfg.Script, Stdout: cfg.Stdout, Timeout: max(time.Until(end), time.Second)})
	if cfg.Daemon && cfg.DaemonLog != nil && (cfg.Verbose || err != nil || res.ExitCode != 0) {
		vm.copyDaemonLog()
	}
	if err != nil {
		return res.ExitCode, fmt.Errorf("script: %w", err)
	}
	if end, ended := vm.DaemonEnded(); ended && res.ExitCode == 0 && end.crashed() {
		return -1, fmt.Errorf("the script passed but the daemon ended with status %d", end.Code)
	}
	return res.ExitCode, nil
}

// crashed says that nobody asked the daemon to end like this.
func (e DaemonExit) crashed() bool {
	switch syscall.Signal(e.Signal) {
	case syscall.SIGTERM, syscall.SIGINT, syscall.SIGKILL:
		return false
	}
	return e.Code != 0
}

// copyDaemonLog writes the log to cfg.DaemonLog. It uses a context of its own, because the log matters most when
// the caller's has ended.
func (vm *VM) copyDaemonLog() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	log, err := vm.DaemonLog(ctx)
	if err != nil {
		if !errors.Is(err, ErrGuestGone) { // whose own report follows
			vm.cfg.Progress(err.Error())
		}
		return
	}
	vm.cfg.Progress("the daemon's log:")
	if _, err := vm.cfg.DaemonLog.Write(log); err != nil {
		vm.cfg.Progress(fmt.Sprintf("the daemon's log: %v", err))
	}
}
