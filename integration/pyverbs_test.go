//go:build guest

package integration_test

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/integration/guest"
	"github.com/uverbsd/uverbsd/integration/internal/pyunit"
)

// writeLists prints the lists anew instead of comparing with them.
var writeLists = flag.Bool("pyverbs-list", false, "write integration/pyverbs/RELEASE*.txt from what TestPyverbs sees")

// suiteRun is one run of the suite on one device.
type suiteRun struct {
	list    string // the file is RELEASE and this, and .txt
	device  string
	args    string   // for the suite
	modules []string // nil: all
}

// suiteRuns: everything on the InfiniBand device, then, on one with an Ethernet port,
// by its IPv4 GID, what does something else there, and a module with traffic of both
// sorts. The second device comes when the first run is over, for some modules ask
// every device there is.
var suiteRuns = []suiteRun{
	{"", "qib0", "", nil},
	{"-ethernet", "qib1", "--dev qib1 --gid 1",
		[]string{"test_addr", "test_flow", "test_qp", "test_relaxed_ordering", "test_rss_traffic"}},
}

// TestPyverbs runs rdma-core's own test suite, each module in a process of its
// own. What each test did must be what the release's list for the device says, no
// more and no less: a list holds no failure that is not proved to be the suite's or
// the library's own, and for each skip what it comes from.
func TestPyverbs(t *testing.T) {
	cfg := guest.Config{Files: []guest.File{{Host: "scripts/pyverbs.sh", Guest: "/opt/pyverbs.sh"}}}
	forEachRelease(t, cfg, func(t *testing.T, g *bootedGuest) {
		release := filepath.Base(t.Name())
		all := strings.Fields(string(g.step(t, "", ". /opt/pyverbs.sh; suite_setup")))
		for _, run := range suiteRuns {
			if run.modules == nil {
				run.modules = all
			} else {
				g.step(t, "", `"$UVERBSD" device add `+run.device+` --link ethernet`)
			}
			t.Run(run.device, func(t *testing.T) { g.suite(t, release, &run) })
		}
	})
}

// suite is one run, as each user.
func (g *bootedGuest) suite(t *testing.T, release string, run *suiteRun) {
	var users []string
	for _, u := range walkers {
		users = append(users, u.name)
	}
	list := pyunit.NewList(users...)
	begun := time.Now()
	for _, u := range walkers {
		for _, m := range run.modules {
			t.Run(m+" as "+u.name, func(t *testing.T) { g.pyverbs(t, list, u.name, u.login, m+" "+run.args) })
		}
	}
	t.Logf("%d modules as %v in %v: %d ok, %d skipped, %d failed, %d in error, %d ended in a crash", len(run.modules), users,
		time.Since(begun).Round(time.Second), list.Count(pyunit.OK), list.Count(pyunit.Skip), list.Count(pyunit.Fail),
		list.Count(pyunit.Error), list.Count(pyunit.Crash))
	got, unknown := list.Format(whyNot)
	for _, r := range unknown {
		t.Errorf("%s: %s %s: nobody has looked into why", r.Test, r.Status, r.Message)
	}
	file := filepath.Join("pyverbs", release+run.list+".txt")
	if *writeLists {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := pyunit.Diff(string(want), got); len(diff) > 0 {
		t.Errorf("the suite did not do what %s says (-: says, +: did; `make pyverbs-list` writes it anew):\n%s", file, strings.Join(diff, "\n"))
	}
}

// pyverbs runs one module, with its arguments, and adds what its tests did to list.
// Whatever they did, the daemon must live and nothing of theirs be left in it.
func (g *bootedGuest) pyverbs(t *testing.T, list *pyunit.List, name, login, module string) {
	res, err := g.vm.Exec(context.Background(), guest.Command{
		Script: ". /opt/pyverbs.sh; suite_run " + module, User: login, Timeout: 5 * time.Minute,
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, res.Output)
	}
	results, err := pyunit.Parse(string(res.Output))
	if err == nil {
		err = list.Add(name, results)
	}
	if err != nil {
		t.Errorf("exit status %d: %v", res.ExitCode, err)
	}
	clean := err == nil
	for _, r := range results {
		clean = clean && (r.Status == pyunit.OK || r.Status == pyunit.Skip)
	}
	if !clean {
		t.Logf("exit status %d\n%s", res.ExitCode, res.Output)
	}
	g.step(t, "", ". /opt/pyverbs.sh; suite_settled")
}
