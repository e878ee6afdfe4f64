//go:build guest

package integration_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/integration/guest"
)

// rawRows are the failure classes of `raw row`; userToo: also without privilege.
var rawRows = []struct {
	name    string
	userToo bool
}{
	{"row1", true}, {"row4", false}, {"row5", false}, {"row6", false}, {"row8", true}, {"row9", true},
	{"row13", false}, {"row23", true}, {"row24", false}, {"row25", true}, {"row26", false}, {"row29", false},
	{"row30", true}, {"row31", true}, {"row32", true}, {"row34", false}, {"row35", false}, {"row36", true},
}

// user is one of a guest's; who logs in as "" is root.
type user struct{ name, login string }

// walkers are the users as whom the tables are walked.
var walkers = []user{{"root", ""}, {"tester", "tester"}}

// TestABI sends every command in good and bad forms, and runs the failure
// classes, while other clients are in traffic, which nothing of it may disturb.
func TestABI(t *testing.T) {
	raw := buildRaw(t)
	cfg := guest.Config{Files: []guest.File{{Host: raw, Guest: "/opt/raw", Perm: 0o755}}}
	forEachRelease(t, cfg, func(t *testing.T, g *bootedGuest) {
		stop := g.pingpongLoop(t)
		for _, user := range walkers {
			t.Run("walk as "+user.name, func(t *testing.T) {
				t.Logf("%s", g.step(t, user.login, "/opt/raw walk > /tmp/walk.daemon."+user.name))
			})
		}
		g.step(t, "", `"$UVERBSD" device add qib1 --link ethernet`)
		for _, user := range walkers {
			t.Run("walk over Ethernet as "+user.name, func(t *testing.T) {
				t.Logf("%s", g.step(t, user.login, "/opt/raw walk -node /dev/infiniband/uverbs1 > /tmp/walk.ethernet."+user.name))
			})
		}
		g.step(t, "", `"$UVERBSD" device remove qib1`)
		t.Run("every command", func(t *testing.T) {
			cases := g.step(t, "", "cat /tmp/walk.daemon.root")
			for _, c := range dispatch.Commands(0) {
				name := c.Name + "/"
				if c.Extended {
					name = "EX_" + name
				}
				if !bytes.Contains(cases, []byte("\n"+name)) && !bytes.HasPrefix(cases, []byte(name)) {
					t.Errorf("no case of %s", name)
				}
			}
		})
		for _, r := range rawRows {
			t.Run(r.name, func(t *testing.T) { g.row(t, "", r.name) })
			if r.userToo {
				t.Run(r.name+" as tester", func(t *testing.T) { g.row(t, "tester", r.name) })
			}
		}
		t.Run("others' traffic", stop)
		t.Run("nothing is left", func(t *testing.T) { g.step(t, "", `eventually test "$(contexts)" = 0`) })
		if _, err := g.vm.StopDaemon(context.Background(), syscall.SIGTERM, 20*time.Second); err != nil {
			t.Fatal(err)
		}
		g.step(t, "", "to_kernel")
		for _, user := range walkers {
			// The kernel in the same boot is the oracle: it must match the table,
			// and the daemon must match the kernel, on each link layer.
			t.Run("oracle as "+user.name, func(t *testing.T) {
				t.Logf("%s", g.step(t, user.login, "/opt/raw walk -oracle-kernel > /tmp/walk.kernel."+user.name))
				for _, walk := range []string{"walk.daemon.", "walk.ethernet."} {
					t.Logf("%s", g.step(t, user.login, "cd /tmp; /opt/raw compare "+walk+user.name+" walk.kernel."+user.name))
				}
			})
		}
	})
}

// row runs one failure class and shows what failed of it.
func (g *bootedGuest) row(t *testing.T, user, name string) {
	res, err := g.vm.Exec(context.Background(), guest.Command{Script: "exec /opt/raw row " + name, User: user, Timeout: 2 * time.Minute})
	if err != nil {
		t.Fatalf("%v\n%s", err, res.Output)
	}
	if res.ExitCode == 0 {
		return
	}
	for l := range strings.Lines(string(res.Output)) {
		if !strings.HasPrefix(l, "ok ") {
			t.Log(strings.TrimSpace(l))
		}
	}
	t.Errorf("exit status %d", res.ExitCode)
}

// pingpongLoop keeps pairs of ibv_rc_pingpong running, one after another, until
// the returned function is called, which checks that each succeeded.
func (g *bootedGuest) pingpongLoop(t *testing.T) func(*testing.T) {
	s, err := g.vm.Go(guest.Command{User: "tester", Timeout: 10 * time.Minute, Script: `
		set -eu -o pipefail
		. /opt/lib.sh
		n=0
		while [ ! -e /tmp/stop-pingpong ]; do
			pingpong 20701 ibv_rc_pingpong -d qib0 -n 200 -c > /dev/null
			n=$((n + 1))
		done
		echo "$n pairs"
		[ $n -gt 0 ]`})
	if err != nil {
		t.Fatal(err)
	}
	return func(t *testing.T) {
		g.step(t, "", "touch /tmp/stop-pingpong")
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		res, err := s.Wait(ctx)
		if err != nil || res.ExitCode != 0 {
			t.Errorf("exit status %d, %v", res.ExitCode, err)
		}
		t.Logf("%s", res.Output)
	}
}

// buildRaw builds the program that runs in the guests: static, as they have no Go.
func buildRaw(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "raw")
	cmd := exec.Command("go", "build", "-trimpath", "-o", out, "./raw")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the program: %v\n%s", err, text)
	}
	return out
}
