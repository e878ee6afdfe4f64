package rxe_test

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
	"github.com/uverbsd/uverbsd/hca/provider/rxe/rxetest"
	"github.com/uverbsd/uverbsd/hca/soft"
)

// Failure class 28: the daemon was killed, and who has its memory ends the waits of
// those who poll there. What a client may have made of it is not believed.
func TestRow28EndAll(t *testing.T) {
	engine, err := soft.New(loop.New(hca.LinkInfiniBand), soft.Config{GUID: hca.GUID{7: 1}})
	check(t, err)
	t.Cleanup(func() { check(t, engine.Close()) })
	c := newClient(t, rxetest.New(engine), hca.QPTypeRC, smallCap, false)
	wc := make([]hca.WC, 4)
	if n := c.scq.Poll(wc); n != 0 {
		t.Fatalf("%d completions", n)
	}
	c.ctx.Arena.Each(rxe.EndAll)
	for name, cq := range map[string]*rxetest.CQ{"send": c.scq, "receive": c.rcq} {
		if n := cq.Poll(wc); n != 1 || wc[0].Status != hca.WCFatalErr {
			t.Errorf("%s: %d completions, %+v", name, n, wc[0])
		}
	}
	for _, b := range [][]byte{nil, make([]byte, 5), make([]byte, 1<<16)} {
		for i := range b {
			b[i] = byte(i*7) | 3
		}
		rxe.EndAll(b)
	}
}
