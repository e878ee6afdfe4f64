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

// notOnWire are cases that a network of its own between the devices makes untrue, with
// the reason.
var notOnWire = map[string]string{
	"SQDrain":             "several requests are begun at a time; see WireSQDrain",
	"DeregisteredMidway":  "a request is on the wire before its receive comes",
	"Row35BlockedWake":    "the same",
	"XRCWrongSRQ":         "an SRQ's number has 24 bits on the wire",
	"MaskedAtomics":       "RoCE has no packet for masked atomics",
	"MaskedErrors":        "the same",
	"MaskedAreAtomic":     "the same",
	"WindowRights":        "the same",
	"Row22EachOptional":   "Ethernet has no alternate path",
	"Row22WithoutState":   "the same",
	"Row21PeerComesLater": "with a timeout of 0 what is lost stays lost; see WirePeerComesLater",
	"Row35XRCBlocked":     "a responder that is stuck answers nothing",
	"WindowInvInTraffic":  "a sender of UC, who is told at once, floods; an access takes longer then than its end is waited for",

	"row35 turns beside large messages": "a network has no turns",
}

// RunWire runs the suite on two devices with a network between them.
func RunWire(t *testing.T, open func(t testing.TB) Pair) {
	for _, c := range concat(cases, wireCases) {
		if notOnWire[c.name] == "" {
			t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
		}
	}
}
