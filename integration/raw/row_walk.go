package main

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// walkOnly runs the walk's cases that match and checks each.
func (t *rowTest) walkOnly(match func(string) bool) {
	w := &walk{node: t.node, match: match}
	if err := w.run(); err != nil {
		t.check("walk", err)
		return
	}
	for _, r := range w.results {
		var err error
		if !r.ok() {
			err = fmt.Errorf("got %s, want %s%s", errnoName(r.Got), errnoName(r.Want), r.Note)
		}
		t.check(r.Case, err)
	}
}

// row4: handles of another file, of the wrong type, dead, and 0xffffffff.
func row4(t *rowTest) {
	t.walkOnly(func(name string) bool {
		for _, s := range []string{"-foreign", "-wrong-type", "-all-ones", "-dead"} {
			if strings.HasSuffix(name, s) {
				return true
			}
		}
		return false
	})
}

// row5: responses that cannot be written, and nothing left behind.
func row5(t *rowTest) {
	t.walkOnly(func(name string) bool { return strings.Contains(name, "/resp-") })
}

// reservedBytes are the ranges of a response that are always 0, by row.
var reservedBytes = map[string][][2]int{
	"QUERY_DEVICE":    {{172, 176}},
	"QUERY_PORT":      {{39, 40}},
	"RESIZE_CQ":       {{4, 8}},
	"POLL_CQ":         {{4, 8}},
	"CREATE_QP":       {{28, 32}},
	"CREATE_QP_UD":    {{28, 32}},
	"QUERY_QP":        {{22, 24}, {54, 56}, {123, 128}},
	"QUERY_SRQ":       {{12, 16}},
	"EX_QUERY_DEVICE": {{172, 180}, {204, 208}, {244, 248}, {284, 288}, {300, 304}},
	"EX_CREATE_QP":    {{28, 36}},
	"EX_CREATE_CQ":    {{8, 12}},
	"EX_MODIFY_QP":    {{0, 4}},
}

// row6: no byte of a response is anything but an answer or 0.
func row6(t *rowTest) {
	w := &walk{node: t.node}
	if err := w.setup(); err != nil {
		t.check("setup", err)
		return
	}
	stale := bytes.Repeat([]byte{rawverbs.Poison}, 4)
	for i := range rows {
		r := &rows[i]
		if r.resp == 0 || r.missing || r.refused != 0 {
			continue
		}
		t.check(r.name, func() error {
			s, err := w.prepare(r)
			if err != nil {
				return err
			}
			if !r.udata {
				s.req.Out += 64 // what is asked for beyond is filled with zeros
				s.reencode()
			}
			for i := range s.req.Out + s.req.UOut + 64 {
				s.mem[i] = rawverbs.Poison
			}
			if e := s.c.Write(s.raw); e != 0 {
				return fmt.Errorf("a good request: %w", e)
			}
			got := bytes.Clone(s.mem[:s.req.Out+64])
			if err := s.settle(0, "good"); err != nil {
				return err
			}
			if r.always != nil {
				r.always(w)
			}
			switch full := r.out(); {
			case bytes.Contains(got[:full], stale):
				return fmt.Errorf("bytes not written in % x", got[:full])
			case !r.udata && r.num != abi.CmdPollCQ && len(bytes.TrimLeft(got[full:s.req.Out], "\x00")) > 0:
				return fmt.Errorf("not zero beyond the response: % x", got[full:s.req.Out])
			case !r.udata && len(bytes.TrimLeft(got[s.req.Out:], "\xa5")) > 0:
				return fmt.Errorf("written beyond what was asked for: % x", got[s.req.Out:])
			}
			for _, z := range reservedBytes[r.name] {
				if len(bytes.TrimLeft(got[z[0]:z[1]], "\x00")) > 0 {
					return fmt.Errorf("bytes %d to %d are % x", z[0], z[1], got[z[0]:z[1]])
				}
			}
			return nil
		}())
	}
	w.a.Close()
	w.b.Close()
}

// row8: sizes that nobody has are refused, and a client at its caps leaves room
// for others.
func row8(t *rowTest) {
	t.walkOnly(func(name string) bool {
		return strings.HasSuffix(name, "-max") && !strings.HasPrefix(name, "POST") && !strings.HasPrefix(name, "POLL") && !strings.HasPrefix(name, "REQ")
	})
	c := t.open()
	if c == nil {
		return
	}
	defer c.Close()
	dev, err := c.QueryDevice()
	t.check("query", err)
	n := 0
	t.check("largest queues until none is left", func() error {
		for ; n < 100000; n++ {
			if _, err := c.CreateCQ(dev.MaxCQE, rawverbs.NoChannel); err != nil {
				return want(err, unix.ENOMEM)
			}
		}
		return fmt.Errorf("%d largest queues and no end", n)
	}())
	if n == 0 {
		t.check("at least one largest queue", fmt.Errorf("none"))
	}
	_, err = c.QueryPort(1)
	t.check("the full client goes on", err)
	if needRoot() == nil {
		_, err := t.roleAs(testerID, "work")
		t.check("another user works meanwhile", err)
	}
	if _, err := rawverbs.OpenContext("/nonexistent"); err == nil {
		t.check("sanity", fmt.Errorf("opened nothing"))
	}
}
