//go:build !race

package virtionet_test

const raceEnabled = false
