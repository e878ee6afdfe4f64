package pyunit

import (
	"slices"
	"strings"
	"testing"
)

// output has the shapes that unittest prints: with and without a docstring, with
// output of the test's own in front of the result, and each result.
const output = `test_create_ah (tests.test_addr.AHTest.test_create_ah)
Test ibv_create_ah. ... ok
test_plain (tests.test_addr.AHTest.test_plain) ... ok
test_prints (tests.test_addr.AHTest.test_prints) ... not there: ok or not
ok
test_roce (tests.test_addr.AHTest.test_roce)
Verify that AH can't be created ... skipped 'Link layer of port=1 is InfiniBand , skip RoCE test'
test_quoted (tests.test_addr.AHTest.test_quoted) ... skipped "device doesn't"
test_bad (tests.test_addr.AHTest.test_bad) ... FAIL
test_worse (tests.test_addr.AHTest.test_worse) ... ERROR
`

const end2 = `
======================================================================
ERROR: test_worse (tests.test_addr.AHTest.test_worse)
----------------------------------------------------------------------
Traceback (most recent call last):
test_not_a_test (tests.test_addr.AHTest.test_not_a_test) ... ok

----------------------------------------------------------------------
Ran 7 tests in 0.5s

FAILED (failures=1, errors=1, skipped=2)
`

func TestParse(t *testing.T) {
	got, err := Parse(output + strings.Replace(end2, "test_not_a_test", " test_not_a_test", 1))
	if err != nil {
		t.Fatal(err)
	}
	want := []Result{
		{"test_addr.AHTest.test_create_ah", OK, ""},
		{"test_addr.AHTest.test_plain", OK, ""},
		{"test_addr.AHTest.test_prints", OK, ""},
		{"test_addr.AHTest.test_roce", Skip, "Link layer of port=1 is InfiniBand , skip RoCE test"},
		{"test_addr.AHTest.test_quoted", Skip, "device doesn't"},
		{"test_addr.AHTest.test_bad", Fail, ""},
		{"test_addr.AHTest.test_worse", Error, ""},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v", got)
	}
}

// An interpreter that ends in the middle of a test has crashed in it.
func TestParseCrash(t *testing.T) {
	got, err := Parse("test_a (tests.test_x.C.test_a) ... ok\ntest_b (tests.test_x.C.test_b)\nWhat it does ... Fatal Python error: Segmentation fault\n")
	if err != nil || !slices.Equal(got, []Result{{"test_x.C.test_a", OK, ""}, {"test_x.C.test_b", Crash, ""}}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// What does not agree with itself is no result.
func TestParseRefuses(t *testing.T) {
	for name, out := range map[string]string{
		"nothing":         "",
		"no summary":      "test_a (tests.test_x.C.test_a) ... ok\n",
		"no verdict":      "test_a (tests.test_x.C.test_a) ... ok\nRan 1 test in 1s\n",
		"one more":        "test_a (tests.test_x.C.test_a) ... ok\n\nRan 2 tests in 1s\n\nOK\n",
		"one skip less":   "test_a (tests.test_x.C.test_a) ... ok\n\nRan 1 test in 1s\n\nOK (skipped=1)\n",
		"error elsewhere": "test_a (tests.test_x.C.test_a) ... ok\n\nRan 1 test in 1s\n\nFAILED (errors=1)\n",
		"unended":         "test_a (tests.test_x.C.test_a) ... \ntest_b (tests.test_x.C.test_b) ... ok\n\nRan 2 tests in 1s\n\nOK\n",
	} {
		if got, err := Parse(out); err == nil {
			t.Errorf("%s: read %+v", name, got)
		}
	}
}

func TestListAndDiff(t *testing.T) {
	l := NewList("root", "tester")
	add := func(user string, r ...Result) {
		t.Helper()
		if err := l.Add(user, r); err != nil {
			t.Fatal(err)
		}
	}
	add("root", Result{"m.C.a", OK, ""}, Result{"m.C.b", Skip, "not there"}, Result{"m.C.c", OK, ""})
	add("tester", Result{"m.C.a", OK, ""}, Result{"m.C.b", Skip, "not there"}, Result{"m.C.c", Skip, "not root"})
	if err := l.Add("root", []Result{{"m.C.a", OK, ""}}); err == nil {
		t.Error("a test was taken twice")
	}
	text, unknown := l.Format(func(r Result) string { return map[string]string{"not there": "of course"}[r.Message] })
	want := "ok\n\tm.C.a\n\tm.C.c (root)\nskip: not root\n\tm.C.c (tester)\nskip: not there\n  why: of course\n\tm.C.b\n"
	if text != want {
		t.Errorf("got\n%s", text)
	}
	if len(unknown) != 1 || unknown[0].Test != "m.C.c" {
		t.Errorf("without a reason: %+v", unknown)
	}
	if l.Count(OK) != 3 || l.Count(Skip) != 3 || l.Count(Fail) != 0 {
		t.Errorf("%d ok, %d skipped", l.Count(OK), l.Count(Skip))
	}
	if d := Diff("# a comment\n"+text, text); len(d) != 0 {
		t.Errorf("a list differs from itself: %q", d)
	}
	for user, want := range map[string]string{
		"root":   "ok\n\tm.C.a\n\tm.C.c\nskip: not there\n  why: of course\n\tm.C.b\n",
		"tester": "ok\n\tm.C.a\nskip: not root\n\tm.C.c\nskip: not there\n  why: of course\n\tm.C.b\n",
	} {
		if got := Of(text, user); got != want {
			t.Errorf("of %s:\n%s", user, got)
		}
	}
	for name, c := range map[string]struct {
		from, to string
		want     []string
	}{
		"a test is gone":  {"\tm.C.a\n", "", []string{"- m.C.a ok"}},
		"a new skip":      {"\tm.C.c (root)\n", "", []string{"- m.C.c (root) ok"}},
		"another reason":  {"of course", "of late", []string{"- skip: not there  why: of course", "+ skip: not there  why: of late"}},
		"another message": {"not root", "not me", []string{"- m.C.c (tester) skip: not root", "+ m.C.c (tester) skip: not me"}},
	} {
		if d := Diff(text, strings.Replace(text, c.from, c.to, 1)); !slices.Equal(d, c.want) {
			t.Errorf("%s: %q", name, d)
		}
	}
}
