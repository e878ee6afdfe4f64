// Package pyunit reads what Python's unittest prints with --verbose, and keeps
// lists of what a suite is known to do.
//
// Who may call it: the guest tests, which run rdma-core's own suite.
package pyunit

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Status is how a test ended.
type Status string

// The ways a test can end. Crash: the interpreter ended in the middle of it.
const (
	OK    Status = "ok"
	Skip  Status = "skip"
	Fail  Status = "FAIL"
	Error Status = "ERROR"
	Crash Status = "crash"
)

// Result is one test's.
type Result struct {
	Test    string // module.Class.method, without the package
	Status  Status
	Message string // of a skip
}

var (
	// Python 3.11 and later: "method (package.module.Class.method)". What the
	// test prints itself can follow on the line.
	begin = regexp.MustCompile(`^\w+ \(tests\.(\w+\.\w+\.\w+)\)`)
	// The result ends its line; the test's own output can stand before it.
	end     = regexp.MustCompile(`(?:^|\.\.\. )(ok|FAIL|ERROR|skipped (?:'.*'|".*"))$`)
	ran     = regexp.MustCompile(`^Ran (\d+) tests? in `)
	counted = regexp.MustCompile(`(failures|errors|skipped)=(\d+)`)
	summary = regexp.MustCompile(`^(OK|FAILED|NO TESTS RAN)(?: \(.*\))?$`)
)

// Parse reads the output of one run. What it reads must agree with the counts that
// unittest prints at the end; without them the test under way is a Crash. Errors
// outside of a test (setUpClass, an import) are errors of Parse.
func Parse(out string) ([]Result, error) {
	var (
		results []Result
		open    string // the test under way
		total   = -1
		counts  = map[string]int{}
		ended   bool
	)
	for line := range strings.Lines(out) {
		line = strings.TrimRight(line, "\r\n")
		if m := ran.FindStringSubmatch(line); m != nil {
			total, _ = strconv.Atoi(m[1])
			continue
		}
		if total >= 0 {
			if summary.MatchString(line) {
				ended = true
				for _, m := range counted.FindAllStringSubmatch(line, -1) {
					counts[m[1]], _ = strconv.Atoi(m[2])
				}
			}
			continue
		}
		if m := begin.FindStringSubmatch(line); m != nil {
			if open != "" {
				return nil, fmt.Errorf("%s begins before %s has ended", m[1], open)
			}
			open = m[1]
		}
		if open == "" {
			continue
		}
		if m := end.FindStringSubmatch(line); m != nil {
			results = append(results, result(open, m[1]))
			open = ""
		}
	}
	if open != "" {
		results = append(results, Result{Test: open, Status: Crash})
	}
	if total < 0 || !ended {
		if open == "" {
			return nil, errors.New("no summary at the end")
		}
		return results, nil
	}
	got := map[Status]int{}
	for _, r := range results {
		got[r.Status]++
	}
	if len(results) != total || got[Skip] != counts["skipped"] || got[Fail] != counts["failures"] || got[Error] != counts["errors"] {
		return nil, fmt.Errorf("read %d results (%v), but unittest counted %d tests (%v)", len(results), got, total, counts)
	}
	return results, nil
}

func result(test, text string) Result {
	if quoted, ok := strings.CutPrefix(text, "skipped "); ok {
		return Result{test, Skip, quoted[1 : len(quoted)-1]}
	}
	return Result{Test: test, Status: Status(text)}
}
