// Command raw speaks the uverbs write() ABI without libibverbs, to the daemon's
// node or to the kernel's:
//
//	raw walk [-node N] [-json] [-oracle-kernel] [-only GLOB]
//	raw compare OURS KERNEL
//	raw bench [-node N] [-live 10,1000,10000] [-n N] [-json]
//	raw row NAME...
//	raw crowd [-contexts N] [-qps N] [-depth N] [-armed]
//
// walk sends good and bad forms of every command and compares each errno with a
// table; compare sets two walks' outputs side by side; bench times creating and
// destroying objects; row runs the behaviour tests of failure classes; crowd holds
// many contexts with mapped queues, for a script to look at the daemon meanwhile.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
)

const defaultNode = "/dev/infiniband/uverbs0"

// errMismatch: it has been printed what does not match.
var errMismatch = errors.New("not all as expected")

// commands are the subcommands, and the roles in which row starts this program
// again.
var commands = map[string]func(args []string) error{
	"walk":    walkCommand,
	"compare": compareCommand,
	"bench":   benchCommand,
	"row":     rowCommand,
	"crowd":   crowdCommand,
	"role":    roleCommand,
}

func main() {
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "raw: want walk, compare, bench, row or crowd")
		os.Exit(2)
	}
	switch err := commands[os.Args[1]](os.Args[2:]); {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintf(os.Stderr, "raw %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}
