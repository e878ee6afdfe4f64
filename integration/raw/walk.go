package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// result is one case's outcome.
type result struct {
	Case string     `json:"case"`
	Got  unix.Errno `json:"errno"`
	Want unix.Errno `json:"want"`
	Note string     `json:"note,omitempty"` // what else was wrong: an object left behind
}

func (r *result) ok() bool { return r.Got == r.Want && r.Note == "" }

// walk is a run through the table.
type walk struct {
	node   string
	kernel bool // the node is the kernel's
	only   string
	match  func(string) bool // in place of only

	a, b    *rawverbs.Client // b holds the foreign objects
	own     map[rawverbs.Kind]uint32
	foreign map[rawverbs.Kind]uint32
	udQP    uint32 // in RTS
	rtsQP   uint32 // RC, in RTS, connected to itself
	// target is an XRC target QP's number, and targetQP its handle.
	target, targetQP uint32
	channel          int
	path             rawverbs.Path

	results []result
}

func walkCommand(args []string) error {
	fs := flag.NewFlagSet("walk", flag.ContinueOnError)
	w := &walk{}
	fs.StringVar(&w.node, "node", defaultNode, "the node to write to")
	fs.BoolVar(&w.kernel, "oracle-kernel", false, "the node is the kernel's rdma_rxe: what it may do otherwise is in oracle.go")
	fs.StringVar(&w.only, "only", "*", "cases to run, a `glob` over ROW/CASE")
	asJSON := fs.Bool("json", false, "print JSON")
	quiet := fs.Bool("quiet", false, "print only what does not match")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if err := w.run(); err != nil {
		return err
	}
	bad := 0
	for i := range w.results {
		r := &w.results[i]
		if w.kernel && excused(r.Case, r.Got) {
			r.Want, r.Note = r.Got, ""
		}
		if !r.ok() {
			bad++
		}
		if !*asJSON && !*quiet {
			fmt.Printf("%s %d\n", r.Case, int(r.Got))
		}
	}
	if *asJSON {
		if err := json.NewEncoder(os.Stdout).Encode(w.results); err != nil {
			return err
		}
	}
	for _, r := range w.results {
		if !r.ok() {
			fmt.Fprintf(os.Stderr, "mismatch: %s: got %s, want %s%s\n", r.Case, errnoName(r.Got), errnoName(r.Want), r.Note)
		}
	}
	fmt.Fprintf(os.Stderr, "walk of %s: %d cases, %d mismatches\n", w.node, len(w.results), bad)
	if bad > 0 {
		return errMismatch
	}
	return nil
}

func errnoName(e unix.Errno) string {
	if e == 0 {
		return "0"
	}
	return fmt.Sprintf("%d (%s)", int(e), unix.ErrnoName(e))
}

func (w *walk) run() error {
	if err := w.setup(); err != nil {
		return err
	}
	fds, err := rawverbs.NumFDs()
	if err != nil {
		return err
	}
	for i := range rows {
		w.row(&rows[i])
	}
	for _, n := range beyond {
		w.number(n)
	}
	if err := w.teardown(); err != nil {
		w.results = append(w.results, result{Case: "TEARDOWN", Note: ": " + err.Error()})
	}
	// b, its event file and a's two and the channel are closed by now.
	if now, err := rawverbs.NumFDs(); err == nil && now > fds-5 {
		w.results = append(w.results, result{Case: "TEARDOWN/fds", Note: fmt.Sprintf(": %d descriptors, %d before", now, fds-5)})
	}
	return nil
}

// wants says whether the case is to be run.
func (w *walk) wants(name string) bool {
	if w.match != nil {
		return w.match(name)
	}
	ok, err := path.Match(w.only, name)
	return w.only == "*" || err == nil && ok
}

func (w *walk) record(name string, got, want unix.Errno) *result {
	w.results = append(w.results, result{Case: name, Got: got, Want: want})
	return &w.results[len(w.results)-1]
}

// makers create an object of each kind that is alone in the world.
func (w *walk) make(c *rawverbs.Client, k rawverbs.Kind, own map[rawverbs.Kind]uint32) (uint32, error) {
	_, addr := c.Mem.Data()
	switch k {
	case rawverbs.PD:
		return c.AllocPD()
	case rawverbs.MR:
		r, err := c.RegMR(own[rawverbs.PD], addr, rawverbs.Page, rawverbs.AccessLocalWrite)
		return r.MRHandle, err
	case rawverbs.MW:
		return c.AllocMW(own[rawverbs.PD])
	case rawverbs.AH:
		return c.CreateAH(own[rawverbs.PD], w.path.AH())
	case rawverbs.CQ:
		return c.CreateCQ(16, rawverbs.NoChannel)
	case rawverbs.QP:
		r, err := c.CreateQP(rawverbs.SmallQP(rawverbs.QPTypeRC, own[rawverbs.PD], own[rawverbs.CQ]))
		return r.QPHandle, err
	case rawverbs.SRQ:
		return c.CreateSRQ(own[rawverbs.PD], 4, 1)
	case rawverbs.XRCD:
		return c.OpenXRCD()
	}
	return 0, unix.EOPNOTSUPP
}

// kinds are in an order in which they can be made.
var kinds = []rawverbs.Kind{rawverbs.PD, rawverbs.MR, rawverbs.MW, rawverbs.AH, rawverbs.CQ, rawverbs.QP, rawverbs.SRQ, rawverbs.XRCD}

// foreignOffset is how many objects are made first in the second file, so that
// its handles are numbers that the first does not have.
const foreignOffset = 256

func (w *walk) setup() (err error) {
	if w.a, err = rawverbs.OpenContext(w.node); err != nil {
		return err
	}
	if w.b, err = rawverbs.OpenContext(w.node); err != nil {
		return err
	}
	if w.path, err = w.a.SelfPath(w.node); err != nil {
		return err
	}
	for range foreignOffset {
		if _, err := w.b.AllocPD(); err != nil {
			return err
		}
	}
	w.own, w.foreign = map[rawverbs.Kind]uint32{}, map[rawverbs.Kind]uint32{}
	for _, side := range []struct {
		c *rawverbs.Client
		m map[rawverbs.Kind]uint32
	}{{w.a, w.own}, {w.b, w.foreign}} {
		for _, k := range kinds {
			h, err := w.make(side.c, k, side.m)
			if errors.Is(err, unix.EOPNOTSUPP) {
				continue // its own rows will say so
			}
			if err != nil {
				return fmt.Errorf("make an object of kind %d: %w", k, err)
			}
			side.m[k] = h
		}
	}
	ud, err := w.a.CreateQP(rawverbs.SmallQP(rawverbs.QPTypeUD, w.own[rawverbs.PD], w.own[rawverbs.CQ]))
	if err != nil {
		return err
	}
	w.udQP = ud.QPHandle
	if err := w.toRTS(w.udQP); err != nil {
		return err
	}
	big := rawverbs.SmallQP(rawverbs.QPTypeRC, w.own[rawverbs.PD], w.own[rawverbs.CQ])
	big.MaxSendWR = 64
	rc, err := w.a.CreateQP(big)
	if err != nil {
		return err
	}
	w.rtsQP = rc.QPHandle
	if err := w.a.Connect(w.rtsQP, rc.QPN, w.path); err != nil {
		return err
	}
	if err := w.initQP(w.own[rawverbs.QP]); err != nil {
		return err
	}
	w.channel, err = w.a.CreateChannel()
	return err
}

// initQP takes an RC QP to INIT, so that receives can be posted.
func (w *walk) initQP(qp uint32) error {
	return w.a.ModifyQP(abi.ModifyQP{QPHandle: qp, AttrMask: initMask, QPState: rawverbs.QPInit, PortNum: 1})
}

// toRTS takes a UD QP there.
func (w *walk) toRTS(qp uint32) error {
	for _, in := range []abi.ModifyQP{
		{AttrMask: initMask&^rawverbs.MaskAccess | rawverbs.MaskQKey, QPState: rawverbs.QPInit, PortNum: 1, QKey: 0x11},
		{AttrMask: rawverbs.MaskState, QPState: rawverbs.QPRTR},
		{AttrMask: rawverbs.MaskState | rawverbs.MaskSQPSN, QPState: rawverbs.QPRTS},
	} {
		in.QPHandle = qp
		if err := w.a.ModifyQP(in); err != nil {
			return err
		}
	}
	return nil
}

const initMask = rawverbs.MaskState | rawverbs.MaskPKey | rawverbs.MaskPort | rawverbs.MaskAccess

// teardown destroys what setup made: an error means that a case left something
// that depends on it.
func (w *walk) teardown() error {
	for _, qp := range []uint32{w.udQP, w.rtsQP} {
		if err := w.a.Destroy(rawverbs.QP, qp); err != nil {
			return err
		}
	}
	if w.target != 0 {
		if err := w.a.Destroy(rawverbs.QP, w.targetQP); err != nil {
			return err
		}
	}
	for i := len(kinds) - 1; i >= 0; i-- {
		k := kinds[i]
		if h, ok := w.own[k]; ok {
			if err := w.a.Destroy(k, h); err != nil {
				return err
			}
		}
	}
	// Nothing is left, so the first handle is free again.
	if h, err := w.a.AllocPD(); err != nil || h != 0 {
		return fmt.Errorf("the next handle is %d, not 0: a case left objects (%v)", h, err)
	}
	_ = unix.Close(w.channel)
	w.a.Close()
	w.b.Close()
	return nil
}
