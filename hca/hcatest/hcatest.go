// Package hcatest is the suite that every hca.Device must pass. It goes through
// the interfaces of package hca only, with memories of its own that can fail and
// block. The tests of a device package call Run, and RunInBubble if they can.
//
// A case whose name begins with Row and a number is that failure class of other
// implementations, SmallInput is an input from a public report, Contract is a
// rule of package hca: `go test -run Device/Row21`.
package hcatest

import (
	"testing"

	"github.com/uverbsd/uverbsd/hca"
)

// Pair is two devices that reach each other; they may be one and the same.
type Pair struct {
	A, B hca.Device
	// Mapped: their clients write requests into mapped queues, where not everything
	// is looked at that a post is refused for. It then fails in its turn.
	Mapped bool
}

// Run runs the suite. open makes a fresh pair and registers its cleanup with t.
func Run(t *testing.T, open func(t testing.TB) Pair) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
}

type testCase struct {
	name string
	run  func(t *testing.T, p Pair)
}

var cases = concat(objectCases, stateCases, rcCases, rdmaCases, errorCases, retryCases, srqCases, cqCases, udCases, ucCases, blockCases, raceCases,
	reregCases, mwCases, moderationCases, xrcCases, windowCases, windowRaceCases, invCases, maskedCases, placementCases, keyCases, crowdCases, sharedCases,
	rowCases, inputCases, contractCases)

func concat(l ...[]testCase) []testCase {
	var all []testCase
	for _, c := range l {
		all = append(all, c...)
	}
	return all
}
