//go:build !race

package cuse_test

const raceEnabled = false
