//go:build guest

package integration_test

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/uverbsd/uverbsd/integration/guest"
)

// mappable are the releases whose kernel can map queues, where the daemon serves
// rxe0 by itself.
var mappable = []guest.Release{guest.Trixie}

var (
	pingpongOf = regexp.MustCompile(`(ibv_(rc|uc|ud|srq)_pingpong) -d qib0`)
	perftestOf = regexp.MustCompile(`(ib_[a-z]+_(bw|lat)[^|"']*) -d qib0`)
)

// adapt makes a script for qib0 one for the device of this guest's daemon. rxe0 is
// Ethernet, where a connection needs a GID: the first is link-local, the second
// the IPv4 address.
func (g *bootedGuest) adapt(script string) string {
	if !g.mapped {
		return script
	}
	script = pingpongOf.ReplaceAllString(script, "$1 -g 1 -d rxe0")
	script = perftestOf.ReplaceAllString(script, "$1 -x 1 -d rxe0")
	return strings.ReplaceAll(script, "qib0", "rxe0")
}

// notMapped are the steps of TestPrograms that are about InfiniBand or about
// another device.
var notMapped = map[string]bool{"ibv_devinfo": true}

// mappedRows are the rows of `raw row` about mapped queues, and those of the failure
// classes that the file which is mapped has a part in.
var mappedRows = []struct{ name, user string }{
	{"row1", ""}, {"row15", ""}, {"row16", ""}, {"row17", ""}, {"holes", ""},
	{"mapfile", ""}, {"mapfile", "tester"}, {"mapctx", ""},
}

// TestMapped is TestPrograms and perftest's matrix over queues that the clients
// map, with the daemon's own default.
func TestMapped(t *testing.T) {
	cfg := guest.Config{
		Append: []string{"tsc=reliable"}, // see TestPerftest
		Files: []guest.File{
			{Host: "scripts/ahfromwc.py", Guest: "/opt/ahfromwc.py"},
			{Host: buildRaw(t), Guest: "/opt/raw", Perm: 0o755},
		},
	}
	forReleases(t, mappable, cfg, func(t *testing.T, g *bootedGuest) {
		g.mapped = true
		t.Run("default", func(t *testing.T) {
			t.Logf("%s", g.step(t, "tester", `
				"$UVERBSD" status | tee /tmp/st.$$; grep -E '^rxe0.* provider rxe .*link ethernet' /tmp/st.$$
				ibv_devinfo -v -d rxe0 > /tmp/info.$$; cat /tmp/info.$$
				grep PORT_ACTIVE /tmp/info.$$
				grep -E 'link_layer:[[:space:]]+Ethernet' /tmp/info.$$
				grep -E 'GID\[ *1\]:[[:space:]]+::ffff:169\.254\.1\.1, RoCE v2' /tmp/info.$$`))
		})
		for _, u := range walkers {
			if !*wholeMatrix && u.login == "" {
				continue // as root, everything that needs a right works; `make perftest` shows it
			}
			t.Run(u.name, func(t *testing.T) {
				for _, p := range programs {
					if notMapped[p.name] || strings.HasPrefix(p.name, "ethernet") {
						continue
					}
					script := p.script
					if p.name == "ah_from_wc" {
						script = `python3 /opt/ahfromwc.py qib0 1`
					}
					t.Run(p.name, func(t *testing.T) { t.Logf("%s", g.step(t, u.login, script)) })
				}
			})
		}
		t.Run("perftest", func(t *testing.T) {
			for i, p := range slices.Concat(perftests, perftestsSince23) {
				if !*wholeMatrix && i%2 != 0 {
					continue // `make perftest` runs them all
				}
				t.Run(p.args, func(t *testing.T) {
					script := fmt.Sprintf(`perftest %d "%s" %s -d qib0`, 24000+i, p.row, p.args)
					t.Logf("%s", g.step(t, "", fmt.Sprintf(perftestUser, script)))
				})
			}
		})
		t.Run("strace", func(t *testing.T) { testMappedStrace(t, g) })
		t.Run("bad input", func(t *testing.T) { testBadInput(t, g) })
		for _, r := range mappedRows {
			t.Run("raw "+r.name+" as "+cmp.Or(r.user, "root"), func(t *testing.T) { g.row(t, r.user, r.name) })
		}
		t.Run("nothing is left", func(t *testing.T) { g.step(t, "", `eventually test "$(contexts)" = 0`) })
		t.Run("kill a client", func(t *testing.T) { testKillClient(t, g) })
		t.Run("stop the daemon", func(t *testing.T) { testStopDaemon(t, g) })
		t.Run("kill the daemon", func(t *testing.T) { testKillDaemon(t, g) })
	})
}

// Failure class 25: a traced client cannot be given what it would map. It opens the
// device, says what it cannot do, and ends; the log says why.
func testMappedStrace(t *testing.T, g *bootedGuest) {
	g.step(t, "tester", `
		timeout 30 strace -f -o /dev/null ibv_devinfo -d qib0 | grep PORT_ACTIVE
		out=$(timeout 30 strace -f -o /dev/null ibv_rc_pingpong -d qib0 2>&1) && exit 1
		[ $? != 124 ]
		grep "Couldn't create CQ" <<< "$out"`)
	g.logSays(t, "traced")
}
