package idr

import (
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	kindA Kind = iota + 1
	kindB
)

func mustMake(t *testing.T, tb *Table, k Kind) *Object {
	t.Helper()
	o, err := tb.Begin(k)
	if err != nil {
		t.Fatal(err)
	}
	if err := tb.Commit(o); err != nil {
		t.Fatal(err)
	}
	return o
}

func nop(*Object) error { return nil }

func TestLowestHandleFirst(t *testing.T) {
	var tb Table
	for want := uint32(0); want < 5; want++ {
		if o := mustMake(t, &tb, kindA); o.ID() != want {
			t.Fatalf("handle %d, want %d", o.ID(), want)
		}
	}
	for _, id := range []uint32{3, 1} {
		if err := tb.Destroy(kindA, id, nop); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []uint32{1, 3, 5} {
		if o := mustMake(t, &tb, kindA); o.ID() != want {
			t.Fatalf("handle %d, want %d", o.ID(), want)
		}
	}
}

func TestLookupErrors(t *testing.T) {
	var tb Table
	a := mustMake(t, &tb, kindA)
	hidden, _ := tb.Begin(kindA)
	for _, c := range []struct {
		name string
		kind Kind
		id   uint32
		want unix.Errno
	}{
		{"wrong kind", kindB, a.ID(), unix.EINVAL},
		{"unknown", kindA, 77, unix.ENOENT},
		{"all ones", kindA, 0xffffffff, unix.ENOENT},
		{"not committed", kindA, hidden.ID(), unix.ENOENT},
	} {
		if _, err := tb.Use(c.kind, c.id); !errors.Is(err, c.want) {
			t.Errorf("%s: use: %v, want %v", c.name, err, c.want)
		}
		if _, err := tb.UseAlone(c.kind, c.id); !errors.Is(err, c.want) {
			t.Errorf("%s: use alone: %v, want %v", c.name, err, c.want)
		}
		if err := tb.Destroy(c.kind, c.id, nop); !errors.Is(err, c.want) {
			t.Errorf("%s: destroy: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestBusy(t *testing.T) {
	var tb Table
	a := mustMake(t, &tb, kindA)
	u, err := tb.Use(kindA, a.ID())
	if err != nil {
		t.Fatal(err)
	}
	if err := tb.Destroy(kindA, a.ID(), nop); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("destroy while used: %v", err)
	}
	u.Done()
	a.Ref()
	if err := tb.Destroy(kindA, a.ID(), nop); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("destroy while needed: %v", err)
	}
	a.Unref()
	err = tb.Destroy(kindA, a.ID(), func(*Object) error {
		if _, err := tb.Use(kindA, a.ID()); !errors.Is(err, unix.EBUSY) {
			t.Errorf("use while destroyed: %v", err)
		}
		if err := tb.Destroy(kindA, a.ID(), nop); !errors.Is(err, unix.EBUSY) {
			t.Errorf("destroy while destroyed: %v", err)
		}
		return unix.EIO
	})
	if !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
	if u, err = tb.Use(kindA, a.ID()); err != nil {
		t.Fatalf("after a failed destroy: %v", err)
	}
	u.Done()
}

func TestTeardownRepeatsNewestFirst(t *testing.T) {
	var tb Table
	base := mustMake(t, &tb, kindA)
	user := mustMake(t, &tb, kindB)
	late := mustMake(t, &tb, kindA)
	late.Ref() // an older object needs a newer one: a second pass is due
	user.Value = late
	base.Ref()
	var order []uint32
	left := tb.Teardown(func(o *Object) error {
		order = append(order, o.ID())
		if o == user {
			base.Unref()
			late.Unref()
		}
		return nil
	})
	if len(left) != 0 {
		t.Fatalf("left %d", len(left))
	}
	want := []uint32{user.ID(), base.ID(), late.ID()}
	for i := range want {
		if order[i] != want[i] {
			t.Fatalf("order %v, want %v", order, want)
		}
	}
	if _, err := tb.Begin(kindA); !errors.Is(err, unix.EIO) {
		t.Fatalf("begin after teardown: %v", err)
	}
	if n := len(tb.Counts()); n != 0 {
		t.Fatalf("%d kinds left", n)
	}
}

// Failure class 13: a lookup races a destroy of the same handle.
func TestLookupRacesDestroy(t *testing.T) {
	var tb Table
	var wg sync.WaitGroup
	const rounds = 2000
	for i := 0; i < 4; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for j := 0; j < rounds; j++ {
				if o, err := tb.Use(kindA, 0); err == nil {
					if dead := o.Value.(*bool); *dead {
						t.Error("used after destroy")
					}
					o.Done()
				}
			}
		}()
	}
	for j := 0; j < rounds; j++ {
		o, err := tb.Begin(kindA)
		if err != nil {
			t.Fatal(err)
		}
		o.Value = new(bool)
		if err := tb.Commit(o); err != nil {
			t.Fatal(err)
		}
		for tb.Destroy(kindA, o.ID(), func(o *Object) error { *(o.Value.(*bool)) = true; return nil }) != nil {
		}
	}
	wg.Wait()
}

func BenchmarkUse(b *testing.B) {
	for _, n := range []int{10, 10_000, 100_000} {
		var tb Table
		for i := 0; i < n; i++ {
			o, _ := tb.Begin(kindA)
			_ = tb.Commit(o)
		}
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; i < b.N; i++ {
				o, err := tb.Use(kindA, uint32(i%n))
				if err != nil {
					b.Fatal(err)
				}
				o.Done()
			}
		})
	}
}

// A table that is retired keeps its handles: what is behind them has gone, and
// they can be destroyed.
func TestRetire(t *testing.T) {
	var tab Table
	var order []uint32
	end := func(o *Object) error {
		if !o.Dead {
			order = append(order, o.ID())
			o.Dead = true
		}
		return nil
	}
	var objects []*Object
	for range 4 {
		objects = append(objects, mustMake(t, &tab, kindA))
	}
	objects[3].Ref() // needed by 1, which is older
	begun, err := tab.Begin(kindA)
	if err != nil {
		t.Fatal(err)
	}
	used, err := tab.Use(kindA, 0)
	if err != nil {
		t.Fatal(err)
	}
	if left := tab.Retire(func(o *Object) error {
		if o.ID() == 1 && !o.Dead {
			objects[3].Unref()
		}
		return end(o)
	}); left != 2 {
		t.Errorf("%d left, want the one that is used and the one that is begun", left)
	}
	if !slices.Equal(order, []uint32{2, 1, 3}) {
		t.Errorf("ended %v", order)
	}
	if _, err := tab.Begin(kindA); !errors.Is(err, unix.EIO) {
		t.Errorf("Begin: %v", err)
	}
	if err := tab.Commit(begun); !errors.Is(err, unix.EIO) {
		t.Errorf("Commit: %v", err)
	}
	tab.Abort(begun)
	used.Done()
	if left := tab.Retire(end); left != 0 || !slices.Equal(order, []uint32{2, 1, 3, 0}) {
		t.Errorf("%d left, ended %v", left, order)
	}
	for _, c := range []struct {
		kind Kind
		id   uint32
		want error
	}{{kindA, 0, nil}, {kindB, 0, unix.EINVAL}, {kindA, 9, unix.ENOENT}} {
		if err := tab.Check(c.kind, c.id); !errors.Is(err, c.want) {
			t.Errorf("Check(%d, %d): %v", c.kind, c.id, err)
		}
	}
	if err := tab.Destroy(kindA, 2, end); err != nil {
		t.Error(err)
	}
	if err := tab.Check(kindA, 2); !errors.Is(err, unix.ENOENT) {
		t.Errorf("destroyed: %v", err)
	}
	if left := tab.Teardown(end); len(left) != 0 || len(tab.Counts()) != 0 {
		t.Errorf("left %v", left)
	}
	if len(order) != 4 {
		t.Errorf("ended twice: %v", order)
	}
}
