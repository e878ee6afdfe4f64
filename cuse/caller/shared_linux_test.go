package caller

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSharedRanges(t *testing.T) {
	c := startClient(t, "shared", "/dev/null")
	m := c.addr()
	p := open(t, c.pid())
	const pg = 4096
	for _, byMaps := range []bool{false, true} {
		t.Run(fmt.Sprintf("byMaps=%v", byMaps), func(t *testing.T) {
			p.noQuery = byMaps
			for _, r := range []struct {
				from, n uint64 // pages
				want    [][2]uint64
			}{
				{0, 8, [][2]uint64{{1, 3}, {4, 5}, {6, 8}}},
				{0, 1, nil}, {3, 1, nil}, {2, 1, [][2]uint64{{1, 3}}}, {2, 5, [][2]uint64{{1, 3}, {4, 5}, {6, 7}}}, {0, 0, nil},
			} {
				got, err := p.SharedRanges(m+r.from*pg, r.n*pg)
				wantError(t, err, nil)
				if len(got) != len(r.want) {
					t.Fatalf("%d pages from %d: %+v", r.n, r.from, got)
				}
				for i, g := range got {
					if g.Start != m+r.want[i][0]*pg || g.End != m+r.want[i][1]*pg {
						t.Errorf("%d pages from %d: piece %d is %+v", r.n, r.from, i, g)
					}
				}
			}
			all, err := p.SharedRanges(m, 8*pg)
			wantError(t, err, nil)
			if a, b, c := all[0], all[1], all[2]; a.Dev != c.Dev || a.Ino != c.Ino || a.Dev == b.Dev && a.Ino == b.Ino || a.Ino == 0 {
				t.Errorf("one file twice and nameless memory between: %+v", all)
			}
		})
	}
	_, err := p.SharedRanges(1<<63, 1<<63)
	wantError(t, err, unix.EFAULT)
	c.stop()
	_, err = p.SharedRanges(m, pg)
	wantError(t, err, unix.ESRCH)
}
