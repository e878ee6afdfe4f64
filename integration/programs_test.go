//go:build guest

// Package integration_test runs unmodified clients in guests. One boot of each
// release serves all of its steps.
package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/integration/guest"
)

// bootedGuest is a guest with the daemon running in it.
type bootedGuest struct {
	t       *testing.T
	vm      *guest.VM
	release int  // in guest.Releases
	mapped  bool // its daemon serves rxe0, see adapt
}

// forEachRelease boots each release and runs f in it.
func forEachRelease(t *testing.T, cfg guest.Config, f func(*testing.T, *bootedGuest)) {
	forReleases(t, guest.Releases, qibOnly(cfg), f)
}

// qibOnly serves qib0, whatever the release would have by itself, unless the test
// says what to serve.
func qibOnly(cfg guest.Config) guest.Config {
	if cfg.DaemonArgs != nil {
		return cfg
	}
	const path = "/opt/qib.toml"
	cfg.Files = append(slices.Clip(cfg.Files), guest.File{Host: "scripts/qib.toml", Guest: path})
	cfg.DaemonArgs = []string{"serve", "--config", path}
	return cfg
}

// forReleases runs f in a guest of each.
func forReleases(t *testing.T, releases []guest.Release, cfg guest.Config, f func(*testing.T, *bootedGuest)) {
	for i, r := range releases {
		t.Run(string(r), func(t *testing.T) {
			ctx := context.Background()
			cfg := cfg
			cfg.Release = r
			cfg.Daemon = true
			cfg.Files = append(slices.Clip(cfg.Files), guest.File{Host: "scripts/lib.sh", Guest: "/opt/lib.sh"})
			cfg.Progress = func(s string) { t.Log(s) }
			if err := guest.Prepare(ctx, cfg); err != nil {
				t.Fatal(err)
			}
			vm, err := guest.Start(ctx, cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer vm.Close()
			t.Logf("kernel %s, booted in %v", vm.Kernel(), vm.BootTime().Round(time.Second))
			g := &bootedGuest{t: t, vm: vm, release: i}
			f(t, g)
			if t.Failed() {
				log, _ := vm.DaemonLog(ctx)
				t.Logf("daemon log:\n%s", log)
			}
			if x, ended := vm.DaemonEnded(); ended {
				t.Errorf("the daemon ended by itself: %+v", x)
			}
		})
	}
}

// step runs a script as user ("" is root); it must exit with 0.
func (g *bootedGuest) step(t *testing.T, user, script string) []byte {
	t.Helper()
	res, err := g.vm.Exec(context.Background(), guest.Command{
		Script: "set -eu -o pipefail\n. /opt/lib.sh\n" + g.adapt(script), User: user, Timeout: 2 * time.Minute,
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, res.Output)
	}
	if res.ExitCode != 0 {
		t.Fatalf("exit status %d\n%s", res.ExitCode, res.Output)
	}
	return res.Output
}

// programs are the steps that every user must be able to run.
var programs = []struct{ name, script string }{
	{"ibv_devices", `ibv_devices | grep -E 'qib0[[:space:]]+0011750000000001'`},
	{"ibv_devinfo", `ibv_devinfo -v -d qib0 > /tmp/info.$$; cat /tmp/info.$$; grep PORT_ACTIVE /tmp/info.$$; grep -E 'link_layer:[[:space:]]+InfiniBand' /tmp/info.$$; grep -E 'GID\[ *0\]:' /tmp/info.$$`},
	{"rc_pingpong", `pingpong 20001 ibv_rc_pingpong -d qib0 -n 500`},
	{"rc_pingpong events", `pingpong 20002 ibv_rc_pingpong -d qib0 -n 300 -e`},
	{"rc_pingpong checked", `pingpong 20003 ibv_rc_pingpong -d qib0 -n 300 -c`},
	{"rc_pingpong 1 byte", `pingpong 20004 ibv_rc_pingpong -d qib0 -n 300 -s 1`},
	{"rc_pingpong 4096", `pingpong 20005 ibv_rc_pingpong -d qib0 -n 300 -s 4096 -c`},
	{"rc_pingpong 1 MiB", `pingpong 20006 ibv_rc_pingpong -d qib0 -n 20 -s 1048576 -c`},
	{"uc_pingpong", `pingpong 20007 ibv_uc_pingpong -d qib0 -n 300`},
	{"ud_pingpong", `pingpong 20008 ibv_ud_pingpong -d qib0 -n 300`},
	{"ud_pingpong events", `pingpong 20009 ibv_ud_pingpong -d qib0 -n 300 -e`},
	{"ud_pingpong checked", `pingpong 20010 ibv_ud_pingpong -d qib0 -n 100 -c`},
	{"srq_pingpong", `pingpong 20011 ibv_srq_pingpong -d qib0 -n 300`},
	{"srq_pingpong events", `pingpong 20012 ibv_srq_pingpong -d qib0 -n 300 -e`},
	{"asyncwatch", `
		ibv_asyncwatch -d qib0 > /tmp/watch.$$ 2>&1 & w=$!
		eventually grep -q 'async event FD' /tmp/watch.$$
		kill $w; wait $w || [ $? = 143 ]
		eventually test "$(contexts)" = 0`},
	{"eight pairs", `
		for i in 1 2 3 4 5 6 7 8; do pingpong $((20100 + i)) ibv_rc_pingpong -d qib0 -n 200 & done
		for j in $(jobs -p); do wait $j; done`},
	{"send_lat", `perftest 20201 '2 +200' ib_send_lat -d qib0 -n 200`},
	{"write_bw", `perftest 20202 '65536 +100' ib_write_bw -d qib0 -n 100`},
	{"read_bw", `perftest 20203 '65536 +100' ib_read_bw -d qib0 -n 100`},
	{"atomic_lat", `perftest 20204 '8 +200' ib_atomic_lat -d qib0 -n 200`},
	{"ah_from_wc", `python3 /opt/ahfromwc.py qib0 0`},
	// qib1 is Ethernet: GID 0 is link-local, GID 1 its IPv4 address's.
	{"ethernet devinfo", `
		ibv_devinfo -v -d qib1 > /tmp/info.$$; cat /tmp/info.$$
		grep -E 'link_layer:[[:space:]]+Ethernet' /tmp/info.$$
		grep -E 'port_lid:[[:space:]]+0$' /tmp/info.$$
		grep -E 'GID\[ *0\]:[[:space:]]+fe80:.*, RoCE v2' /tmp/info.$$
		grep -E 'GID\[ *1\]:[[:space:]]+::ffff:169\.254\.1\.2, RoCE v2' /tmp/info.$$`},
	{"ethernet rc_pingpong", `pingpong 20211 ibv_rc_pingpong -d qib1 -g 1 -n 300 -c`},
	{"ethernet rc_pingpong link-local", `pingpong 20212 ibv_rc_pingpong -d qib1 -g 0 -n 100`},
	{"ethernet ud_pingpong", `pingpong 20213 ibv_ud_pingpong -d qib1 -g 1 -n 100 -c`},
	{"ethernet send_bw", `perftest 20214 '65536 +100' ib_send_bw -d qib1 -x 1 -n 100`},
	{"ethernet no GID", `refused_by_device 20215 'Failed to modify QP to RTR' ibv_rc_pingpong -d qib1 -n 10`},
	{"ethernet ah_from_wc", `python3 /opt/ahfromwc.py qib1 1`},
	{"ethernet ah_from_wc link-local", `python3 /opt/ahfromwc.py qib1 0`},
}

func TestPrograms(t *testing.T) {
	cfg := guest.Config{Files: []guest.File{{Host: "scripts/ahfromwc.py", Guest: "/opt/ahfromwc.py"}}}
	forEachRelease(t, cfg, func(t *testing.T, g *bootedGuest) {
		g.step(t, "", `"$UVERBSD" device add qib1 --link ethernet`)
		for _, user := range []string{"", "tester"} {
			name := user
			if name == "" {
				name = "root"
			}
			t.Run(name, func(t *testing.T) {
				for _, p := range programs {
					t.Run(p.name, func(t *testing.T) { t.Logf("%s", g.step(t, user, p.script)) })
				}
			})
		}
		g.step(t, "", `"$UVERBSD" device remove qib1`)
		t.Run("strace", func(t *testing.T) { testStrace(t, g) })
		t.Run("bad input", func(t *testing.T) { testBadInput(t, g) })
		t.Run("kill a client", func(t *testing.T) { testKillClient(t, g) })
		t.Run("stop the daemon", func(t *testing.T) { testStopDaemon(t, g) })
		t.Run("kill the daemon", func(t *testing.T) { testKillDaemon(t, g) })
	})
}

// Failure class 25: a traced client cannot be given an event descriptor; it
// works without, and the log says why.
func testStrace(t *testing.T, g *bootedGuest) {
	g.step(t, "tester", `pingpong 20301 strace -f -o /dev/null ibv_rc_pingpong -d qib0 -n 50`)
	g.logSays(t, "traced")
}

// logSays: the daemon's log has these words.
func (g *bootedGuest) logSays(t *testing.T, what string) {
	t.Helper()
	log, err := g.vm.DaemonLog(context.Background())
	if err != nil || !bytes.Contains(log, []byte(what)) {
		t.Errorf("the log does not say %q (%v)", what, err)
	}
}

// Any bytes from any user: an errno, no crash, no flood of the log.
func testBadInput(t *testing.T, g *bootedGuest) {
	before, err := g.vm.DaemonLog(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	g.step(t, "tester", `
		for size in 1 4 7 8 9 16 24 56 100 4096 65536 131072 131076 262140 600000; do
			for i in 1 2 3 4 5; do
				head -c $size /dev/urandom > /tmp/noise.$$
				# Whatever it says, it must come back.
				timeout 20 dd if=/tmp/noise.$$ of=/dev/infiniband/uverbs0 bs=$size 2> /dev/null || [ $? = 1 ]
			done
		done
		timeout 20 cat < /dev/infiniband/uverbs0 && exit 1
		pingpong 20302 ibv_rc_pingpong -d qib0 -n 50`)
	after, err := g.vm.DaemonLog(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(after) - len(before); n > 4096 {
		t.Errorf("bad input wrote %d bytes to the log", n)
	}
}

// kill -9 of a client in mid-traffic: the others go on, its objects go.
func testKillClient(t *testing.T, g *bootedGuest) {
	g.step(t, "tester", `
		(pingpong 20401 ibv_rc_pingpong -d qib0 -n 3000) & others=$!
		ibv_rc_pingpong -d qib0 -p 20402 -n 10000000 > /dev/null 2>&1 & server=$!
		listening 20402
		ibv_rc_pingpong -d qib0 -p 20402 -n 10000000 127.0.0.1 > /dev/null 2>&1 & client=$!
		pinned() { "$UVERBSD" status --json | grep -q "\"pid\":$1,.*\"mr\":1"; }
		eventually pinned $client
		kill -9 $client
		gone() { ! "$UVERBSD" status --json | grep -q "\"pid\":$1,"; }
		eventually gone $client
		# It ends by itself once its retries are over.
		kill $server 2> /dev/null || true
		wait $others
		eventually test "$(contexts)" = 0
		"$UVERBSD" status`)
}

// SIGTERM with clients running: errors, not hangs; nothing is left on the host;
// a restart works.
func testStopDaemon(t *testing.T, g *bootedGuest) {
	ctx := context.Background()
	g.withTraffic(t, func() {
		exit, err := g.vm.StopDaemon(ctx, syscall.SIGTERM, 20*time.Second)
		if err != nil || exit.Code != 0 || exit.TimedOut {
			t.Errorf("stop: %+v, %v", exit, err)
		}
	})
	g.hostIsClean(t)
	if _, err := g.vm.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	g.step(t, "tester", `pingpong 20501 ibv_rc_pingpong -d qib0 -n 100`)
}

// Failure class 28: kill -9 of the daemon.
func testKillDaemon(t *testing.T, g *bootedGuest) {
	ctx := context.Background()
	g.withTraffic(t, func() {
		if _, err := g.vm.StopDaemon(ctx, syscall.SIGKILL, 20*time.Second); err != nil {
			t.Error(err)
		}
	})
	g.hostIsClean(t)
	if _, err := g.vm.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	g.step(t, "tester", `pingpong 20502 ibv_rc_pingpong -d qib0 -n 100 -e`)
	if _, err := g.vm.StopDaemon(ctx, syscall.SIGTERM, 20*time.Second); err != nil {
		t.Error(err)
	}
}

// withTraffic runs f while two pairs, one polling and one waiting for events,
// are in traffic; both must then end, with errors.
func (g *bootedGuest) withTraffic(t *testing.T, f func()) {
	t.Helper()
	var clients []*guest.Step
	for _, c := range []string{
		"ibv_rc_pingpong -d qib0 -n 10000000 -p 20601", "ibv_rc_pingpong -d qib0 -n 10000000 -p 20601 127.0.0.1",
		"ibv_rc_pingpong -d qib0 -n 10000000 -e -p 20602", "ibv_rc_pingpong -d qib0 -n 10000000 -e -p 20602 127.0.0.1",
		"ibv_asyncwatch -d qib0",
	} {
		wait := ""
		if strings.HasSuffix(c, "127.0.0.1") {
			wait = "listening " + strings.Fields(c[strings.Index(c, "-p ")+3:])[0] + "; "
		}
		s, err := g.vm.Go(guest.Command{Script: ". /opt/lib.sh; " + wait + "exec " + g.adapt(c), User: "tester", Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		clients = append(clients, s)
	}
	// In traffic: a server that has not accepted would wait for its client, not for us.
	g.step(t, "", `connected() {
			[ $("$UVERBSD" status --json | grep -o '"qp":1' | wc -l) = 4 ] && [ $(contexts) = 5 ] && ! listens 20601 && ! listens 20602
		}; eventually connected`)
	f()
	g.step(t, "", `
		none() { ! pgrep '^ibv_' > /dev/null; }
		eventually none && exit
		for p in $(pgrep '^ibv_'); do
			echo "still there: $p $(tr '\\0' ' ' < /proc/$p/cmdline)"
			grep -E 'State|TracerPid|SigPnd|ShdPnd' /proc/$p/status
			cat /proc/$p/syscall /proc/$p/stack; ls -l /proc/$p/fd
		done`)
	for i, s := range clients {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		res, err := s.Wait(ctx)
		cancel()
		if err != nil {
			t.Errorf("client %d hangs: %v\n%s", i, err, res.Output)
		}
	}
}

func (g *bootedGuest) hostIsClean(t *testing.T) {
	t.Helper()
	g.step(t, "", `
		clean() {
			[ ! -e /dev/infiniband/uverbs0 ] && [ ! -e /run/modprobe.d/uverbsd.conf ] &&
			[ ! -e /sys/class/infiniband_verbs ] && ! grep -q uverbsd /proc/self/mountinfo
		}
		eventually clean || { ls -l /dev/infiniband /run/modprobe.d; cat /proc/self/mountinfo; exit 1; }
		ls /sys/class/net/lo > /dev/null`)
}

// The daemon says in one line what stands in its way, and exits with 1.
func TestRefusals(t *testing.T) {
	for _, r := range guest.Releases {
		t.Run(string(r), func(t *testing.T) {
			ctx := context.Background()
			binary := "../build/uverbsd"
			if _, err := os.Stat(binary); err != nil {
				t.Fatalf("run `make build` first: %v", err)
			}
			vm, err := guest.Start(ctx, guest.Config{Release: r, Files: []guest.File{{Host: binary, Guest: "/opt/u/uverbsd"}}})
			if err != nil {
				t.Fatal(err)
			}
			defer vm.Close()
			for _, c := range []struct{ name, user, script, want string }{
				{"not root", "tester", "/opt/u/uverbsd serve", "root"},
				{"bad config", "", "echo 'nonsense = 1' > /tmp/c; /opt/u/uverbsd serve --config /tmp/c", "nonsense"},
				{"no daemon", "", "/opt/u/uverbsd status", "uverbsd serve"},
				{"no cuse", "", "modprobe -r cuse; rm -f /dev/cuse; /opt/u/uverbsd serve", "modprobe cuse"},
				{"ib_core", "", "modprobe ib_uverbs; /opt/u/uverbsd serve", "ib_core"},
			} {
				t.Run(c.name, func(t *testing.T) {
					res, err := vm.Exec(ctx, guest.Command{Script: c.script, User: c.user, Timeout: time.Minute})
					if err != nil {
						t.Fatal(err)
					}
					out := strings.TrimSpace(string(res.Output))
					if res.ExitCode != 1 || strings.Contains(out, "\n") || !strings.Contains(out, c.want) {
						t.Errorf("exit status %d, output %q; want 1 and one line with %q", res.ExitCode, out, c.want)
					}
					fmt.Println(out)
				})
			}
		})
	}
}
