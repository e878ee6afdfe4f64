// Command soak keeps a daemon under mixed load and looks for wrong bytes, hangs
// and leaks:
//
//	soak run [-for 10m] [-seed N]
//
// It runs as root beside the daemon. It starts itself again, unprivileged, as
// the two ends of pairs of processes, each with several queue pairs of every
// type, which move patterned data and check every byte of it on arrival; and
// unmodified ibv_rc_pingpong pairs beside them. It kills processes, which the
// surviving ends must take as the end of a connection and nothing else. Every
// phase ends with all clients gone, orderly or by kill -9, and then the daemon
// must have exactly what it had before.
//
// fleet*.go is that parent, worker.go a process, link.go one connection of it,
// round.go what moves over one, plan.go and pattern.go what both ends must agree
// on.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
)

// commands are run, and the role in which run starts this program again.
var commands = map[string]func(args []string) error{
	"run":    runCommand,
	"worker": workerCommand,
}

func main() {
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "soak: want run")
		os.Exit(2)
	}
	switch err := commands[os.Args[1]](os.Args[2:]); {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintf(os.Stderr, "soak %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}
