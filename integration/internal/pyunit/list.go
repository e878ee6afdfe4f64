package pyunit

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// List is what each user's run of a suite did.
type List struct {
	users   []string
	entries map[string]map[string]Result // by test, by user
}

// NewList is an empty list of runs by users.
func NewList(users ...string) *List {
	return &List{users: users, entries: map[string]map[string]Result{}}
}

// Add puts one run's results in; a test may come once for each user.
func (l *List) Add(user string, results []Result) error {
	for _, r := range results {
		of := l.entries[r.Test]
		if of == nil {
			of = map[string]Result{}
			l.entries[r.Test] = of
		}
		if _, twice := of[user]; twice {
			return fmt.Errorf("%s ran twice as %s", r.Test, user)
		}
		of[user] = r
	}
	return nil
}

// Count is how many results have the status.
func (l *List) Count(s Status) int {
	n := 0
	for _, of := range l.entries {
		for _, r := range of {
			if r.Status == s {
				n++
			}
		}
	}
	return n
}

// heading is what stands above the tests that ended alike.
func (r Result) heading() string {
	if r.Message == "" {
		return string(r.Status)
	}
	return string(r.Status) + ": " + r.Message
}

// Format prints the list in its file's form: tests in groups that ended alike, a
// user behind a test where the others' ended differently. why is asked for each
// group but the first what it comes from; what it does not know is returned.
func (l *List) Format(why func(Result) string) (text string, unknown []Result) {
	groups := map[string][]string{}
	reasons := map[string]string{}
	for _, test := range slices.Sorted(maps.Keys(l.entries)) {
		of := l.entries[test]
		byHeading := map[string][]string{}
		for _, u := range l.users {
			r, ran := of[u]
			if !ran {
				continue
			}
			h := r.heading()
			byHeading[h] = append(byHeading[h], u)
			if r.Status == OK || reasons[h] != "" {
				continue
			}
			if reasons[h] = why(r); reasons[h] == "" {
				unknown = append(unknown, r)
			}
		}
		for h, users := range byHeading {
			line := test
			if len(users) < len(l.users) {
				line += " (" + strings.Join(users, ", ") + ")"
			}
			groups[h] = append(groups[h], line)
		}
	}
	var b strings.Builder
	for _, h := range slices.Sorted(maps.Keys(groups)) {
		fmt.Fprintln(&b, h)
		if reasons[h] != "" {
			fmt.Fprintf(&b, "  why: %s\n", reasons[h])
		}
		for _, line := range groups[h] {
			fmt.Fprintf(&b, "\t%s\n", line)
		}
	}
	return b.String(), unknown
}

// Of is what a list, in its file's form, says of one of its users alone.
func Of(text, user string) string {
	var b strings.Builder
	var group strings.Builder // heading and reason, until the first test
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "\t") {
			if !strings.HasPrefix(line, " ") {
				group.Reset()
			}
			group.WriteString(line)
			continue
		}
		if test, of, some := strings.Cut(line, " ("); some {
			of = strings.TrimSuffix(of, ")\n")
			if !slices.Contains(strings.Split(of, ", "), user) {
				continue
			}
			line = test + "\n"
		}
		b.WriteString(group.String())
		group.Reset()
		b.WriteString(line)
	}
	return b.String()
}

// Diff is what differs between two lists in their files' form, one line for each
// test or reason: "-" for what only want has, "+" for what only got has.
func Diff(want, got string) []string {
	w, g := flat(want), flat(got)
	var out []string
	for _, line := range slices.Sorted(maps.Keys(w)) {
		if !g[line] {
			out = append(out, "- "+line)
		}
	}
	for _, line := range slices.Sorted(maps.Keys(g)) {
		if !w[line] {
			out = append(out, "+ "+line)
		}
	}
	return out
}

// flat writes each test's group behind it.
func flat(text string) map[string]bool {
	lines := map[string]bool{}
	heading := ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "#") || line == "":
		case strings.HasPrefix(line, "\t"):
			lines[line[1:]+" "+heading] = true
		case strings.HasPrefix(line, "  "):
			lines[heading+line] = true
		default:
			heading = line
		}
	}
	return lines
}
