//go:build guest

package integration_test

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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
	library string   // the provider's, of which it hangs what is skipped
}

// suiteRuns: everything on the InfiniBand device, then, on one with an Ethernet port,
// by its IPv4 GID, what does something else there, and a module with traffic of both
// sorts. The second device comes when the first run is over, for some modules ask
// every device there is.
var suiteRuns = []suiteRun{
	{"", "qib0", "", nil, "libipathverbs"},
	{"-ethernet", "qib1", "--dev qib1 --gid 1",
		[]string{"test_addr", "test_flow", "test_qp", "test_relaxed_ordering", "test_rss_traffic"}, "libipathverbs"},
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
			as := walkers
			if !*writeLists {
				// For want of time: `make pyverbs-list` has both in both.
				as = walkers[g.release%len(walkers):][:1]
			}
			t.Run(run.device, func(t *testing.T) { g.suite(t, release, &run, as) })
		}
	})
}

// TestPyverbsMapped runs the suite on rxe0, whose queues the clients map, as root. At
// least what passes on the kernel's rdma_rxe passes here, and the resizing of CQs
// besides, which does not there. What that is stands in RELEASE-rdma_rxe.txt; with
// -pyverbs-list it is found out anew, in the same boot.
func TestPyverbsMapped(t *testing.T) {
	cfg := guest.Config{Files: []guest.File{{Host: "scripts/pyverbs.sh", Guest: "/opt/pyverbs.sh"}}}
	forReleases(t, mappable, cfg, func(t *testing.T, g *bootedGuest) {
		release := filepath.Base(t.Name())
		modules := strings.Fields(string(g.step(t, "", ". /opt/pyverbs.sh; suite_setup")))
		run := suiteRun{"-rxe", "rxe0", "--dev rxe0 --gid 1", modules, "librxe"}
		passed := make(map[string]bool)
		t.Run("ours", func(t *testing.T) {
			for _, r := range g.suite(t, release, &run, walkers[:1]) {
				passed[r.Test] = r.Status == pyunit.OK
			}
		})
		reference := filepath.Join("pyverbs", release+"-rdma_rxe.txt")
		if *writeLists {
			t.Run("rdma_rxe", func(t *testing.T) { g.referenceSuite(t, reference, &run) })
		}
		want, err := os.ReadFile(reference)
		if err != nil {
			t.Fatal(err)
		}
		const besides = "test_cq.CQTest.test_resize_cq"
		for _, test := range append(strings.Fields(string(want)), besides) {
			if !passed[test] {
				t.Errorf("%s does not pass, but on rdma_rxe", test)
			}
		}
	})
}

// referenceSuite writes down what passes on the kernel's rdma_rxe. A module can crash
// its client there, or hang.
func (g *bootedGuest) referenceSuite(t *testing.T, file string, run *suiteRun) {
	if _, err := g.vm.StopDaemon(context.Background(), syscall.SIGTERM, 20*time.Second); err != nil {
		t.Fatal(err)
	}
	g.step(t, "", `. /opt/pyverbs.sh; to_kernel; rm "$suite/bin/rdma"`)
	var passed []string
	for _, m := range run.modules {
		res, err := g.vm.Exec(context.Background(), guest.Command{
			Script: ". /opt/pyverbs.sh; suite_limit=60 suite_run " + m + " " + run.args, Timeout: 2 * time.Minute,
		})
		if err != nil {
			t.Fatalf("%v\n%s", err, res.Output)
		}
		results, _ := pyunit.Parse(string(res.Output)) // as far as it came
		n := len(passed)
		for _, r := range results {
			if r.Status == pyunit.OK {
				passed = append(passed, r.Test)
			}
		}
		t.Logf("%s: %d of %d pass, exit status %d", m, len(passed)-n, len(results), res.ExitCode)
	}
	slices.Sort(passed)
	if err := os.WriteFile(file, []byte(strings.Join(passed, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// suite is one run, as each of the users.
func (g *bootedGuest) suite(t *testing.T, release string, run *suiteRun, as []user) (all []pyunit.Result) {
	var users []string
	for _, u := range as {
		users = append(users, u.name)
	}
	list := pyunit.NewList(users...)
	begun := time.Now()
	for _, u := range as {
		for _, m := range run.modules {
			t.Run(m+" as "+u.name, func(t *testing.T) { all = append(all, g.pyverbs(t, list, u, m+" "+run.args)...) })
		}
	}
	t.Logf("%d modules as %v in %v: %d ok, %d skipped, %d failed, %d in error, %d ended in a crash", len(run.modules), users,
		time.Since(begun).Round(time.Second), list.Count(pyunit.OK), list.Count(pyunit.Skip), list.Count(pyunit.Fail),
		list.Count(pyunit.Error), list.Count(pyunit.Crash))
	got, unknown := list.Format(func(r pyunit.Result) string { return whyNot(r, run.library) })
	for _, r := range unknown {
		t.Errorf("%s: %s %s: nobody has looked into why", r.Test, r.Status, r.Message)
	}
	file := filepath.Join("pyverbs", release+run.list+".txt")
	if *writeLists {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return all
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	said := string(want)
	if len(as) == 1 {
		said = pyunit.Of(said, as[0].name)
	}
	if diff := pyunit.Diff(said, got); len(diff) > 0 {
		t.Errorf("the suite did not do what %s says (-: says, +: did; `make pyverbs-list` writes it anew):\n%s", file, strings.Join(diff, "\n"))
	}
	return all
}

// pyverbs runs one module, with its arguments, and adds what its tests did to list.
// Whatever they did, the daemon must live and nothing of theirs be left in it.
func (g *bootedGuest) pyverbs(t *testing.T, list *pyunit.List, u user, module string) []pyunit.Result {
	res, err := g.vm.Exec(context.Background(), guest.Command{
		Script: ". /opt/pyverbs.sh; suite_run " + module, User: u.login, Timeout: 5 * time.Minute,
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, res.Output)
	}
	results, err := pyunit.Parse(string(res.Output))
	if err == nil {
		err = list.Add(u.name, results)
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
	return results
}
