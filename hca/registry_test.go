package hca_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// journal is what the consumers of a test were told, in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(format string, a ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, fmt.Sprintf(format, a...))
}

func (j *journal) take() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	l := j.lines
	j.lines = nil
	return l
}

// consumer notes what it is told; during runs within the callback.
type consumer struct {
	name   string
	j      *journal
	during func(what string, e *hca.Entry)
}

func (c *consumer) tell(what string, e *hca.Entry) {
	c.j.add("%s %s %s", c.name, what, e.Name)
	if c.during != nil {
		c.during(what, e)
	}
}

func (c *consumer) Add(e *hca.Entry)    { c.tell("add", e) }
func (c *consumer) Remove(e *hca.Entry) { c.tell("remove", e) }

func entry(i int) *hca.Entry { return &hca.Entry{Name: fmt.Sprintf("dev%d", i), Index: i} }

// What consumers are told, and in what order.
func TestOrder(t *testing.T) {
	type world struct {
		reg  hca.Registry
		cons map[string]*consumer
	}
	register := func(i int) func(*world) error {
		return func(w *world) error { return w.reg.Register(entry(i)) }
	}
	unregister := func(i int) func(*world) error {
		return func(w *world) error { return w.reg.Unregister(entry(i).Name) }
	}
	add := func(c string) func(*world) error {
		return func(w *world) error { return w.reg.AddConsumer(w.cons[c]) }
	}
	remove := func(c string) func(*world) error {
		return func(w *world) error { return w.reg.RemoveConsumer(w.cons[c]) }
	}
	for _, c := range []struct {
		name string
		do   []func(*world) error
		last error // of the last step
		want []string
	}{
		{"adds oldest first, removes newest first", []func(*world) error{add("a"), add("b"), register(0), unregister(0)}, nil,
			[]string{"a add dev0", "b add dev0", "b remove dev0", "a remove dev0"}},
		{"a consumer that comes later is told of what is there", []func(*world) error{register(1), register(0), add("a")}, nil,
			[]string{"a add dev1", "a add dev0"}},
		{"a consumer that goes leaves its devices, newest first", []func(*world) error{add("a"), register(0), register(1), remove("a"), unregister(1)}, nil,
			[]string{"a add dev0", "a add dev1", "a remove dev1", "a remove dev0"}},
		{"it may come again", []func(*world) error{add("a"), register(0), remove("a"), add("a")}, nil,
			[]string{"a add dev0", "a remove dev0", "a add dev0"}},
		{"nobody listens", []func(*world) error{register(0), unregister(0)}, nil, nil},
		{"a name twice", []func(*world) error{add("a"), register(0), register(0)}, unix.EEXIST, []string{"a add dev0"}},
		{"a name again", []func(*world) error{register(0), unregister(0), register(0)}, nil, nil},
		{"an unknown device", []func(*world) error{add("a"), unregister(0)}, unix.ENODEV, nil},
		{"a device twice gone", []func(*world) error{register(0), unregister(0), unregister(0)}, unix.ENODEV, nil},
		{"a consumer twice", []func(*world) error{register(0), add("a"), add("a")}, unix.EEXIST, []string{"a add dev0"}},
		{"an unknown consumer", []func(*world) error{register(0), remove("a")}, unix.ENOENT, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := &journal{}
			w := &world{cons: map[string]*consumer{"a": {name: "a", j: j}, "b": {name: "b", j: j}}}
			for i, step := range c.do {
				err := step(w)
				if want := c.last; i < len(c.do)-1 && err != nil || i == len(c.do)-1 && !errors.Is(err, want) {
					t.Fatalf("step %d: %v", i, err)
				}
			}
			if got := j.take(); !slices.Equal(got, c.want) {
				t.Errorf("told %q, want %q", got, c.want)
			}
		})
	}
}

// A device that goes is not found any more, is usable and has its name until all
// have finished; only then does Unregister return.
func TestUnregisterWaits(t *testing.T) {
	var reg hca.Registry
	j := &journal{}
	inside, leave := make(chan struct{}), make(chan struct{})
	c := &consumer{name: "a", j: j, during: func(what string, _ *hca.Entry) {
		if what == "remove" {
			close(inside)
			<-leave
			j.add("finished")
		}
	}}
	if err := errors.Join(reg.AddConsumer(c), reg.Register(entry(0))); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		err := reg.Unregister("dev0")
		j.add("returned")
		done <- err
	}()
	<-inside
	if l := reg.List(); len(l) != 0 {
		t.Errorf("listed: %v", l)
	}
	if err := reg.Register(entry(0)); !errors.Is(err, unix.EEXIST) {
		t.Errorf("its name is free: %v", err)
	}
	if err := reg.Unregister("dev0"); !errors.Is(err, unix.ENODEV) {
		t.Errorf("again: %v", err)
	}
	late := &consumer{name: "late", j: j}
	if err := reg.AddConsumer(late); err != nil {
		t.Error(err)
	}
	close(leave)
	if err := <-done; err != nil {
		t.Error(err)
	}
	want := []string{"a add dev0", "a remove dev0", "finished", "returned"}
	if got := j.take(); !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
	if err := reg.Register(entry(0)); err != nil {
		t.Error(err)
	}
}

// An Unregister that meets a Register waits until the Add that runs is over; who
// has not been told is not told any more.
func TestUnregisterDuringRegister(t *testing.T) {
	var reg hca.Registry
	j := &journal{}
	inside, leave := make(chan struct{}), make(chan struct{})
	first := &consumer{name: "a", j: j, during: func(what string, _ *hca.Entry) {
		if what == "add" {
			close(inside)
			<-leave
		}
	}}
	second := &consumer{name: "b", j: j}
	if err := errors.Join(reg.AddConsumer(first), reg.AddConsumer(second)); err != nil {
		t.Fatal(err)
	}
	registered, unregistered := make(chan error), make(chan error)
	go func() { registered <- reg.Register(entry(0)) }()
	<-inside
	go func() { unregistered <- reg.Unregister("dev0") }()
	for len(reg.List()) != 0 { // until it has begun
		runtime.Gosched()
	}
	close(leave)
	if err := errors.Join(<-registered, <-unregistered); err != nil {
		t.Error(err)
	}
	if got, want := j.take(), []string{"a add dev0", "a remove dev0"}; !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
}

// A callback may register and unregister other devices, add and remove other
// consumers, and look.
func TestReentrant(t *testing.T) {
	for _, c := range []struct {
		name string
		on   string
		do   func(*hca.Registry, *consumer) error
		want []string
	}{
		{"register in add", "add", func(r *hca.Registry, _ *consumer) error { return r.Register(entry(1)) },
			[]string{"a add dev0", "a add dev1", "a remove dev0"}},
		{"register in remove", "remove", func(r *hca.Registry, _ *consumer) error { return r.Register(entry(1)) },
			[]string{"a add dev0", "a remove dev0", "a add dev1"}},
		{"unregister another in add", "add", func(r *hca.Registry, _ *consumer) error { return r.Unregister("dev9") },
			[]string{"a add dev9", "a add dev0", "a remove dev9", "a remove dev0"}},
		{"unregister another in remove", "remove", func(r *hca.Registry, _ *consumer) error { return r.Unregister("dev9") },
			[]string{"a add dev9", "a add dev0", "a remove dev0", "a remove dev9"}},
		{"add a consumer in add", "add", func(r *hca.Registry, o *consumer) error { return r.AddConsumer(o) },
			[]string{"a add dev0", "o add dev0", "o remove dev0", "a remove dev0"}},
		{"add a consumer in remove", "remove", func(r *hca.Registry, o *consumer) error { return r.AddConsumer(o) },
			[]string{"a add dev0", "a remove dev0"}},
		{"list in add", "add", func(r *hca.Registry, _ *consumer) error { _ = r.List(); return nil }, []string{"a add dev0", "a remove dev0"}},
		{"list in remove", "remove", func(r *hca.Registry, _ *consumer) error { _ = r.List(); return nil }, []string{"a add dev0", "a remove dev0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var reg hca.Registry
			j := &journal{}
			other := &consumer{name: "o", j: j}
			a := &consumer{name: "a", j: j, during: func(what string, e *hca.Entry) {
				if what == c.on && e.Name == "dev0" {
					if err := c.do(&reg, other); err != nil {
						t.Error(err)
					}
				}
			}}
			if c.want[0] == "a add dev9" {
				if err := reg.Register(entry(9)); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(reg.AddConsumer(a), reg.Register(entry(0)), reg.Unregister("dev0")); err != nil {
				t.Fatal(err)
			}
			if got := j.take(); !slices.Equal(got, c.want) {
				t.Errorf("told %q, want %q", got, c.want)
			}
		})
	}
}

// pairs checks that for each device Add and Remove of one consumer take turns.
type pairs struct {
	t    *testing.T
	mu   sync.Mutex
	have map[string]bool
}

func (p *pairs) Add(e *hca.Entry)    { p.change(e, true) }
func (p *pairs) Remove(e *hca.Entry) { p.change(e, false) }
func (p *pairs) change(e *hca.Entry, to bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.have[e.Name] == to {
		p.t.Errorf("%s: told twice that it is %v", e.Name, to)
	}
	p.have[e.Name] = to
}

// Devices and consumers come and go at once: each Add has its Remove, and no
// device that is unregistered is anybody's.
func TestConcurrent(t *testing.T) {
	const rounds = 300
	var reg hca.Registry
	stays := &pairs{t: t, have: map[string]bool{}}
	if err := reg.AddConsumer(stays); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range rounds {
				if err := reg.Register(entry(i)); err != nil {
					t.Error(err)
				}
				if err := reg.Unregister(entry(i).Name); err != nil {
					t.Error(err)
				}
				stays.mu.Lock()
				if stays.have[entry(i).Name] {
					t.Errorf("dev%d is unregistered and in use", i)
				}
				stays.mu.Unlock()
			}
		})
		wg.Go(func() {
			c := &pairs{t: t, have: map[string]bool{}}
			for range rounds {
				if err := errors.Join(reg.AddConsumer(c), reg.RemoveConsumer(c)); err != nil {
					t.Error(err)
				}
				for name, has := range c.have { // it is told of nothing now
					if has {
						t.Errorf("%s was not taken from a consumer that has gone", name)
					}
				}
			}
		})
	}
	wg.Wait()
	if l := reg.List(); len(l) != 0 {
		t.Errorf("left: %v", l)
	}
}
