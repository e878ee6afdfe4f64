package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
)

// benchResult is the time of one kind at one size.
type benchResult struct {
	Kind string  `json:"kind"`
	Live int     `json:"live"`
	US   float64 `json:"us"`     // create and destroy together, the rounds' median
	Min  float64 `json:"us_min"` // the best round's
}

// benchKinds are what is timed, each made with as little as it takes.
var benchKinds = []struct {
	name string
	kind rawverbs.Kind
}{{"pd", rawverbs.PD}, {"mr", rawverbs.MR}, {"cq", rawverbs.CQ}, {"qp", rawverbs.QP}}

type bench struct {
	w      walk // for its makers
	n      int
	rounds int
	live   map[rawverbs.Kind][]uint32
}

func benchCommand(args []string) error {
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	node := fs.String("node", defaultNode, "the node to write to")
	sizes := fs.String("live", "10,1000,10000", "live objects of the kind, in turn")
	b := bench{live: map[rawverbs.Kind][]uint32{}}
	fs.IntVar(&b.n, "n", 200, "objects made and destroyed in a round")
	fs.IntVar(&b.rounds, "rounds", 5, "rounds, alternating between the kinds")
	asJSON := fs.Bool("json", false, "print JSON")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if err := b.setup(*node); err != nil {
		return err
	}
	defer b.w.a.Close()
	var out []benchResult
	for s := range strings.SplitSeq(*sizes, ",") {
		live, err := strconv.Atoi(s)
		if err != nil {
			return err
		}
		rs, err := b.size(live)
		if err != nil {
			return err
		}
		out = append(out, rs...)
	}
	if *asJSON {
		return json.NewEncoder(os.Stdout).Encode(out)
	}
	for _, r := range out {
		fmt.Printf("%s live %d: %.1f us, best %.1f us\n", r.Kind, r.Live, r.US, r.Min)
	}
	return nil
}

func (b *bench) setup(node string) (err error) {
	if b.w.a, err = rawverbs.OpenContext(node); err != nil {
		return err
	}
	b.w.a.Quick = true
	b.w.own = map[rawverbs.Kind]uint32{}
	for _, k := range []rawverbs.Kind{rawverbs.PD, rawverbs.CQ} {
		if b.w.own[k], err = b.w.make(b.w.a, k, b.w.own); err != nil {
			return err
		}
	}
	return nil
}

// size times every kind with live objects of each; rounds alternate between the
// kinds, so that what else the machine does falls on all of them.
func (b *bench) size(live int) ([]benchResult, error) {
	times := make([][]float64, len(benchKinds))
	for _, k := range benchKinds {
		if err := b.grow(k.kind, live); err != nil {
			return nil, fmt.Errorf("%s, %d live: %w", k.name, live, err)
		}
	}
	for range b.rounds {
		for i, k := range benchKinds {
			us, err := b.round(k.kind)
			if err != nil {
				return nil, fmt.Errorf("%s, %d live: %w", k.name, live, err)
			}
			times[i] = append(times[i], us)
		}
	}
	var out []benchResult
	for i, k := range benchKinds {
		if err := b.grow(k.kind, 0); err != nil {
			return out, err
		}
		slices.Sort(times[i])
		out = append(out, benchResult{k.name, live, times[i][b.rounds/2], times[i][0]})
	}
	return out, nil
}

// round is the mean time in microseconds to make and destroy one.
func (b *bench) round(k rawverbs.Kind) (float64, error) {
	start := time.Now()
	for range b.n {
		h, err := b.w.make(b.w.a, k, b.w.own)
		if err != nil {
			return 0, err
		}
		if err := b.w.a.Destroy(k, h); err != nil {
			return 0, err
		}
	}
	return float64(time.Since(start).Nanoseconds()) / 1000 / float64(b.n), nil
}

// grow makes or destroys until n are live.
func (b *bench) grow(k rawverbs.Kind, n int) error {
	for len(b.live[k]) < n {
		h, err := b.w.make(b.w.a, k, b.w.own)
		if err != nil {
			return err
		}
		b.live[k] = append(b.live[k], h)
	}
	for len(b.live[k]) > n {
		last := len(b.live[k]) - 1
		if err := b.w.a.Destroy(k, b.live[k][last]); err != nil {
			return err
		}
		b.live[k] = b.live[k][:last]
	}
	return nil
}
