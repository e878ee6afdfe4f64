package main

import (
	"errors"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/udev/modprobe"
	"github.com/uverbsd/uverbsd/udev/sysfs"
)

const (
	cusePath = "/dev/cuse"
	devDir   = "/dev/infiniband"
	// keeperArg is the hidden command that the keeper runs as.
	keeperArg = "keeper"
)

func serveCmd() *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "serve the configured devices until SIGTERM",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			c, err := loadConfig(path)
			if err != nil {
				return err
			}
			log, err := newLogger(c.Log)
			if err != nil {
				return err
			}
			defer func() { _ = log.Sync() }()
			return serve(c, log)
		},
	}
	cmd.Flags().StringVar(&path, "config", "", "TOML configuration file (without one: one device on the in-process fabric)")
	return cmd
}

// daemon is what serve has brought up, in order; undo takes it down in reverse.
type daemon struct {
	*devices
	log  *zap.Logger
	undo []func() error
}

func serve(c config, log *zap.Logger) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("must run as root (it opens /dev/cuse and reaches its clients' memory): use sudo or the systemd unit")
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM, unix.SIGINT)
	defer signal.Stop(stop)

	c.Scheduling.apply(log)
	users := dispatch.NewUsers(c.Limits)
	users.Most(raiseFileLimit())
	d := &daemon{log: log, devices: newDevices(kernelHost{}, log, users)}
	defer func() {
		if e := d.stop(); err == nil {
			err = e
		}
	}()
	if err := d.prepareHost(); err != nil {
		return err
	}
	d.onStop(d.devices.stop)
	for _, dc := range c.Device {
		if _, err := d.add(dc); err != nil {
			return err
		}
	}
	tree, err := sysfs.Mount(&d.reg, sysfs.Options{Log: log})
	if err != nil {
		return err
	}
	d.onStop(tree.Close)
	if err := d.serveStatus(c.Socket); err != nil {
		return err
	}
	if err := d.serveControl(c.ControlSocket); err != nil {
		return err
	}
	d.reportUsage()
	log.Info("ready", zap.Int("devices", len(d.reg.List())))
	select {
	case s := <-stop:
		log.Info("stopping", zap.Stringer("signal", s))
		return nil
	case err := <-d.failed:
		return err
	}
}

const (
	// wantFiles is the descriptor limit that the daemon asks for: three for each
	// of dispatch.MaxFiles contexts, and room.
	wantFiles = 1 << 15
	// ownFiles are kept back for the daemon's own descriptors (devices, class
	// tree, status) and for the files that name XRC domains.
	ownFiles = 1 << 12
	// filesPerContext: see caller.Process.
	filesPerContext = 3
)

// raiseFileLimit raises the daemon's descriptor limit as far as it may be and
// returns how many contexts fit.
func raiseFileLimit() int {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return 1
	}
	if want := (unix.Rlimit{Cur: max(l.Max, wantFiles), Max: max(l.Max, wantFiles)}); unix.Setrlimit(unix.RLIMIT_NOFILE, &want) == nil {
		l = want
	}
	return contextsWithin(l.Cur)
}

// contextsWithin is how many contexts a descriptor limit leaves room for: a
// quarter at most is kept back.
func contextsWithin(limit uint64) int {
	limit = min(limit, 1<<20)
	return max(int(limit-min(ownFiles, limit/4))/filesPerContext, 1)
}

func (d *daemon) onStop(f func() error) { d.undo = append(d.undo, f) }

// stop undoes everything, newest first, once.
func (d *daemon) stop() error {
	var errs []error
	for i := len(d.undo) - 1; i >= 0; i-- {
		if err := d.undo[i](); err != nil {
			d.log.Error("stop", zap.Error(err))
			errs = append(errs, err)
		}
	}
	d.undo = nil
	return errors.Join(errs...)
}

// prepareHost cleans up after a killed daemon and keeps ib_core out.
func (d *daemon) prepareHost() error {
	var guard modprobe.Guard
	if err := sysfs.Clean(sysfs.Options{Log: d.log}); err != nil {
		return err
	}
	if err := cleanMaps(); err != nil {
		return err
	}
	if err := guard.Check(); err != nil {
		return err
	}
	keeper, err := sysfs.StartKeeper(keeperArg)
	if err != nil {
		return err
	}
	d.onStop(keeper.Stop)
	d.devices.keeper = keeper
	if err := guard.Install(); err != nil {
		return err
	}
	d.onStop(guard.Remove)
	// Until the guard stood, the module could still have come.
	return guard.Check()
}

func cleanCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "clean",
		Short: "remove what a killed daemon left on the host",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return clean() },
	}
}

// clean is idempotent and refuses while a daemon serves.
func clean() error {
	if err := sysfs.Clean(sysfs.Options{}); err != nil {
		return err
	}
	if err := cleanMaps(); err != nil {
		return err
	}
	for _, socket := range []string{defaultSocket, defaultControlSocket} {
		if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return modprobe.Guard{}.Remove()
}

// keeperCmd is what a daemon starts to be cleaned up after if it is killed.
func keeperCmd() *cobra.Command {
	return &cobra.Command{
		Use:    keeperArg,
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(*cobra.Command, []string) error { return sysfs.KeeperMain(endMapped, clean) },
	}
}
