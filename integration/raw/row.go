package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// patience bounds every wait: guests are emulated and share a busy machine.
const patience = 60 * time.Second

// rowTest is a run of one row of the failure classes.
type rowTest struct {
	name string
	node string
	long bool
	bad  int
}

// errSkip is a check that cannot be made here; its reason is printed.
var errSkip = errors.New("skipped")

// check prints one line.
func (t *rowTest) check(what string, err error) {
	switch {
	case err == nil:
		fmt.Printf("ok %s %s\n", t.name, what)
	case errors.Is(err, errSkip):
		fmt.Printf("ok %s %s # SKIP %v\n", t.name, what, err)
	default:
		t.bad++
		fmt.Printf("not ok %s %s: %v\n", t.name, what, err)
	}
}

// want is nil if got is one of the errnos.
func want(got error, wants ...unix.Errno) error {
	for _, w := range wants {
		if w == 0 && got == nil || w != 0 && errors.Is(got, w) {
			return nil
		}
	}
	return fmt.Errorf("got %v, want %v", got, wants)
}

func needRoot() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: only root can", errSkip)
	}
	return nil
}

// eventually polls cond until it holds.
func eventually(what string, cond func() bool) error {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if cond() {
			return nil
		}
	}
	return fmt.Errorf("never: %s", what)
}

// rowTests are the rows, in the order of failure-classes.md.
var rowTests = []struct {
	name string
	run  func(*rowTest)
}{
	{"row1", row1}, {"row4", row4}, {"row5", row5}, {"row6", row6}, {"row8", row8}, {"row9", row9},
	{"row13", row13}, {"row15", row15}, {"row16", row16}, {"row17", row17}, {"holes", rowHoles}, {"mapfile", rowMapFile}, {"mapctx", rowMapContext},
	{"row23", row23}, {"row24", row24}, {"row25", row25}, {"row26", row26},
	{"row29", row29}, {"row30", row30}, {"row31", row31}, {"row32", row32}, {"row34", row34}, {"row35", row35}, {"row36", row36},
}

func rowCommand(args []string) error {
	fs := flag.NewFlagSet("row", flag.ContinueOnError)
	node := fs.String("node", defaultNode, "the node to write to")
	long := fs.Bool("long", false, "the full counts")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() == 0 {
		return errors.New("which row? all, or one of the failure classes' names")
	}
	bad, ran := 0, 0
	for _, r := range rowTests {
		for _, a := range fs.Args() {
			if a == r.name || a == "all" {
				t := &rowTest{name: r.name, node: *node, long: *long}
				start := time.Now()
				r.run(t)
				fmt.Printf("# %s took %.1f s\n", r.name, time.Since(start).Seconds())
				bad += t.bad
				ran++
			}
		}
	}
	if ran == 0 {
		return fmt.Errorf("no row %s", strings.Join(fs.Args(), ", "))
	}
	if bad > 0 {
		return errMismatch
	}
	return nil
}

// open is OpenContext; an error is a failed check.
func (t *rowTest) open() *rawverbs.Client {
	c, err := rawverbs.OpenContext(t.node)
	if err != nil {
		t.check("open", err)
		return nil
	}
	return c
}

// works checks that a new client can do what clients do.
func (t *rowTest) works(when string) {
	t.check("a new client works "+when, func() error {
		c, err := rawverbs.OpenContext(t.node)
		if err != nil {
			return err
		}
		defer c.Close()
		pd, err := c.AllocPD()
		if err != nil {
			return err
		}
		if _, err := c.CreateCQ(16, rawverbs.NoChannel); err != nil {
			return err
		}
		_, addr := c.Mem.Data()
		if _, err := c.RegMR(pd, addr, rawverbs.Page, rawverbs.AccessLocalWrite); err != nil {
			return err
		}
		_, err = c.QueryPort(1)
		return err
	}())
}

// daemonStat reads a number out of the daemon's /proc/PID/status.
func daemonStat(field string) (int, error) {
	pid := os.Getenv("UVERBSD_PID")
	b, err := os.ReadFile("/proc/" + pid + "/status")
	if pid == "" || err != nil {
		return 0, fmt.Errorf("%w: no daemon to look at", errSkip)
	}
	for l := range strings.Lines(string(b)) {
		if f := strings.Fields(l); len(f) > 1 && f[0] == field+":" {
			return strconv.Atoi(f[1])
		}
	}
	return 0, fmt.Errorf("no %s in the daemon's status", field)
}

func daemonFDs() (int, error) {
	if err := needRoot(); err != nil {
		return 0, err
	}
	d, err := os.ReadDir("/proc/" + os.Getenv("UVERBSD_PID") + "/fd")
	return len(d), err
}
