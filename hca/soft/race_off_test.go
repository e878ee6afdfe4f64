//go:build !race

package soft_test

const raceEnabled = false
