package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestProcessors(t *testing.T) {
	for _, c := range []struct {
		name      string
		set, now  int
		env       string
		want      int
		wantError bool
	}{
		{"half", 0, 8, "", 4, false},
		{"half of an odd number", 0, 3, "", 1, false},
		{"never none", 0, 1, "", 1, false},
		{"as configured", 3, 2, "", 3, false},
		{"the environment's", 0, 8, "8", 8, false},
		{"the configuration before the environment", 2, 8, "8", 2, false},
		{"negative", -1, 8, "", 4, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("GOMAXPROCS", c.env)
			s := schedulingConfig{Processors: c.set}
			if got := s.processors(c.now); got != c.want {
				t.Errorf("%d of %d, want %d", got, c.now, c.want)
			}
			if err := s.check(); (err != nil) != c.wantError {
				t.Errorf("check: %v", err)
			}
		})
	}
}

func TestSchedulingConfig(t *testing.T) {
	for _, c := range []struct{ name, text, says string }{
		{"most", "[scheduling]\nnice = 19\nprocessors = 1\n", ""},
		{"least", "[scheduling]\nnice = -20\n", ""},
		{"too nice", "[scheduling]\nnice = 20\n", "nice 20"},
		{"not nice", "[scheduling]\nnice = -21\n", "nice -21"},
		{"negative processors", "[scheduling]\nprocessors = -1\n", "processors -1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "c.toml")
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := loadConfig(path)
			switch {
			case c.says == "" && err != nil:
				t.Error(err)
			case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
				t.Errorf("error %v does not say %q", err, c.says)
			}
		})
	}
	if got := defaultConfig().Scheduling; got != (schedulingConfig{Nice: defaultNice}) {
		t.Errorf("default %+v", got)
	}
}
