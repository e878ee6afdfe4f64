//go:build race

package virtionet_test

const raceEnabled = true
