package ring

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	e, err := NewEvent() // the runtime's poller exists before the count
	if err != nil {
		panic(err)
	}
	e.Close()
	before := fds()
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if after := fds(); after != before && code == 0 {
		fmt.Fprintf(os.Stderr, "descriptors leaked:\nbefore %s\nafter  %s\n", before, after)
		code = 1
	}
	os.Exit(code)
}

func fds() string {
	ents, _ := os.ReadDir("/proc/self/fd")
	var l []string
	for _, e := range ents {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(to, "/proc/") {
			l = append(l, e.Name()+"="+to)
		}
	}
	return strings.Join(l, " ")
}

func TestStack(t *testing.T) {
	s := NewStack(4)
	if !s.Empty() || s.Take() != None {
		t.Fatal("a new stack is not empty")
	}
	for i := range 4 {
		s.Push(i)
	}
	var got []int
	for i := s.Take(); i != None; i = s.Next(i) {
		got = append(got, i)
	}
	if fmt.Sprint(got) != "[3 2 1 0]" || !s.Empty() {
		t.Errorf("took %v", got)
	}
}

// Every index that is pushed is taken once, whoever pushes it.
func TestStackCrowd(t *testing.T) {
	const pushers, each, rounds = 4, 16, 500
	s := NewStack(pushers * each)
	var home [pushers * each]chan struct{}
	for i := range home {
		home[i] = make(chan struct{}, 1)
		home[i] <- struct{}{}
	}
	var wg sync.WaitGroup
	for p := range pushers {
		wg.Go(func() {
			for r := range rounds * each {
				i := p*each + r%each
				<-home[i]
				s.Push(i)
			}
		})
	}
	for n := 0; n < pushers*each*rounds; {
		for i := s.Take(); i != None; {
			next := s.Next(i)
			home[i] <- struct{}{}
			i = next
			n++
		}
	}
	wg.Wait()
	if !s.Empty() {
		t.Error("one came twice")
	}
}

func TestSpinner(t *testing.T) {
	var p Spinner
	defer func(was bool) { alone = was }(alone)
	alone = false
	short, long := spinMax, 2*spinNear*spinMax
	for range 100 {
		p.Slept(long)
	}
	if p.Budget() != 0 {
		t.Fatal("spins when nothing comes")
	}
	for range spinHot {
		p.Slept(short)
	}
	if p.Budget() != spinMax {
		t.Fatalf("budget %v after short sleeps", p.Budget())
	}
	for range 100 {
		p.Caught(time.Microsecond)
	}
	if p.Budget() != spinMin {
		t.Errorf("budget %v when frames come at once", p.Budget())
	}
	p.Missed()
	if p.Budget() != spinMax {
		t.Errorf("one miss: budget %v", p.Budget())
	}
	p.Missed()
	if p.Budget() != 0 {
		t.Errorf("two misses: budget %v", p.Budget())
	}
	for range spinBack {
		p.Slept(short)
		if p.Budget() != 0 {
			t.Fatal("spins again too early")
		}
	}
	p.Slept(short)
	if p.Budget() == 0 {
		t.Error("never spins again")
	}
	p.Missed()
	p.Missed()
	if p.hold != 2*spinBack {
		t.Errorf("sits out %d sleeps after the second failure", p.hold)
	}
}

func TestEvent(t *testing.T) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	e, err := OpenEvent(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	e.Signal()
	e.Signal()
	if n := e.Wait(); n != 2 {
		t.Errorf("signalled twice, told %d", n)
	}
	got := make(chan uint64)
	go func() { got <- e.Wait() }()
	if _, err := unix.Write(fd, []byte{3, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	if n := <-got; n != 3 {
		t.Errorf("signalled 3 times, told %d", n)
	}
	go func() { got <- e.Wait() }()
	e.Wake()
	if n := <-got; n != 0 {
		t.Errorf("woken, told %d", n)
	}
	if n := e.Wait(); n != 0 {
		t.Errorf("woken before, told %d", n)
	}
	e.Within(time.Millisecond)
	if n := e.Wait(); n != 0 {
		t.Errorf("nothing came, told %d", n)
	}
	e.Within(time.Hour)
	e.Signal()
	if n := e.Wait(); n != 1 {
		t.Errorf("told %d after Within", n)
	}
	go func() { got <- e.Wait() }()
	e.Close()
	if n := <-got; n != 0 {
		t.Errorf("closed, told %d", n)
	}
	e.Signal() // hits nobody
}

func TestEventRefusesWhatIsNone(t *testing.T) {
	if _, err := OpenEvent(-1); err == nil {
		t.Error("took fd -1")
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if e, err := OpenEvent(fd); err == nil {
		e.Close()
		t.Error("took an eventfd that blocks")
	}
}

func BenchmarkEvent(b *testing.B) {
	e, err := NewEvent()
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	b.ReportAllocs()
	for b.Loop() {
		e.Signal()
		e.Wait()
	}
}
