// Command guest boots a Debian release under QEMU, runs a script in it as root and exits with the script's status.
// Its own failures (a guest that does not boot, a daemon that does not become ready, a time limit) are status 125
// with one line on stderr, followed by the end of the guest's console where that helps.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/uverbsd/uverbsd/integration/guest"
)

// failure is the exit status of everything that is not the script's own status.
const failure = 125

func main() {
	// SIGHUP and SIGPIPE's cause, a closed terminal, must not leave a guest behind either; SIGKILL does not.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	status, err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "guest: %v\n", err)
	}
	os.Exit(status)
}

// options are the command line.
type options struct {
	cfg     guest.Config
	script  string
	prepare bool
	console bool
}

func parse(args []string, stderr io.Writer) (*options, error) {
	var o options
	var release, packages, appendArgs, qemu, accel string
	fs := flag.NewFlagSet("guest", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&release, "guest", "", "Debian `release`: trixie or bookworm")
	fs.StringVar(&o.script, "script", "", "`file` to run in the guest as root, by bash or as its #! says")
	fs.StringVar(&packages, "packages", "", "further Debian `packages`, separated by spaces")
	fs.Func("daemon", "`yes or no`: start build/uverbsd in the guest (default yes)", func(s string) error {
		return parseYesNo(s, &o.cfg.Daemon)
	})
	o.cfg.Daemon = true
	fs.Func("config", "the daemon's configuration `file`", func(s string) error {
		f, err := guest.ParseFile(s + ":/opt/uverbsd.toml")
		o.cfg.Files = append(o.cfg.Files, f)
		o.cfg.DaemonArgs = []string{"serve", "--config", "/opt/uverbsd.toml"}
		return err
	})
	fs.StringVar(&o.cfg.DaemonBinary, "daemon-binary", "", "static uverbsd `file` (default build/uverbsd)")
	fs.Func("file", "`HOST[:GUEST]` file or folder to bring into the guest; repeatable", func(s string) error {
		f, err := guest.ParseFile(s)
		o.cfg.Files = append(o.cfg.Files, f)
		return err
	})
	fs.StringVar(&appendArgs, "append", "", "further kernel `arguments`, separated by spaces")
	fs.StringVar(&qemu, "qemu", "", "further QEMU `arguments`, separated by spaces")
	fs.IntVar(&o.cfg.CPUs, "cpus", guest.DefaultCPUs, "virtual CPUs")
	fs.IntVar(&o.cfg.MemMiB, "mem", guest.DefaultMemMiB, "memory in `MiB`")
	fs.StringVar(&accel, "accel", "", "kvm or tcg (default $"+guest.AccelEnv+", or kvm where it really works)")
	fs.DurationVar(&o.cfg.Timeout, "timeout", guest.DefaultRunTimeout, "time for boot and script together; an image build is not counted")
	fs.StringVar(&o.cfg.BuildDir, "build-dir", "", "`folder` of the daemon and the images (default build/ in the source tree)")
	fs.BoolVar(&o.prepare, "prepare", false, "only build the image, if it is not there")
	fs.BoolVar(&o.console, "console", false, "copy the serial console to stderr")
	fs.BoolVar(&o.cfg.Verbose, "v", false, "print the daemon's log even if the script passes")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("surplus argument %q", fs.Arg(0))
	}
	if o.script == "" && !o.prepare {
		return nil, errors.New("no script: use -script FILE")
	}
	o.cfg.Release = guest.Release(release)
	o.cfg.Packages = strings.Fields(packages)
	o.cfg.Append = strings.Fields(appendArgs)
	o.cfg.QEMU = strings.Fields(qemu)
	o.cfg.Accel = guest.Accel(accel)
	o.cfg.Daemon = o.cfg.Daemon && !o.prepare
	return &o, nil
}

func parseYesNo(s string, to *bool) error {
	switch s {
	case "", "yes", "true", "1":
		*to = true
	case "no", "false", "0":
		*to = false
	default:
		return fmt.Errorf("%q is neither yes nor no", s)
	}
	return nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (int, error) {
	o, err := parse(args, stderr)
	if err != nil {
		return failure, err
	}
	o.cfg.Stdout, o.cfg.DaemonLog = stdout, stderr
	o.cfg.Progress = func(line string) { fmt.Fprintf(stderr, "guest: %s\n", line) }
	if o.console {
		o.cfg.Console = stderr
	}
	if o.script != "" {
		script, err := os.ReadFile(o.script)
		if err != nil {
			return failure, fmt.Errorf("read the script: %w", err)
		}
		o.cfg.Script = string(script)
	}
	if o.prepare {
		if err := guest.Prepare(ctx, o.cfg); err != nil {
			return failure, err
		}
		return 0, nil
	}
	status, err := guest.Run(ctx, o.cfg)
	if err != nil {
		return failure, err
	}
	return status, nil
}
