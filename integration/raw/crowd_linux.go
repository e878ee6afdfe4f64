package main

import (
	"flag"
	"fmt"

	"github.com/uverbsd/uverbsd/integration/internal/rawverbs"
	"golang.org/x/sys/unix"
)

// crowdCommand opens many contexts with mapped queues and keeps them until a line
// comes on standard input, so that a script can look at what they cost the daemon.
func crowdCommand(args []string) error {
	fs := flag.NewFlagSet("crowd", flag.ContinueOnError)
	node := fs.String("node", defaultNode, "the node to write to")
	contexts := fs.Int("contexts", 1000, "how many contexts")
	qps := fs.Int("qps", 10, "QPs of each")
	depth := fs.Uint("depth", 4, "entries of each queue of a QP")
	armed := fs.Bool("armed", false, "each context has a CQ that is armed, with a channel")
	if err := fs.Parse(args); err != nil {
		return err
	}
	limit := unix.Rlimit{Cur: 8192, Max: 8192}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("descriptors: %w", err)
	}
	mem, err := rawverbs.NewMem() // all share it: a client of one thread has one command at a time
	if err != nil {
		return err
	}
	for i := range *contexts {
		if err := crowdContext(*node, mem, *qps, uint32(*depth), *armed); err != nil {
			return fmt.Errorf("context %d: %w", i, err)
		}
	}
	say("ready")
	waitLine()
	return nil
}

func crowdContext(node string, mem *rawverbs.Mem, qps int, depth uint32, armed bool) error {
	fd, err := unix.Open(node, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	c := &rawverbs.Client{FD: fd, Async: -1, Mem: mem, Room: rawverbs.DefaultRoom}
	if err := c.GetContext(); err != nil {
		return err
	}
	p := &mappedPort{c: c}
	if p.pd, err = c.AllocPD(); err != nil {
		return err
	}
	channel := rawverbs.NoChannel
	if armed {
		if channel, err = c.CreateChannel(); err != nil {
			return err
		}
	}
	if p.cq, _, err = p.createCQ(2*depth, channel); err != nil {
		return err
	}
	for range qps {
		in := rawverbs.SmallQP(rawverbs.QPTypeRC, p.pd, p.cq)
		in.MaxSendWR, in.MaxRecvWR = depth, depth
		if _, err := p.createQP(in); err != nil {
			return err
		}
	}
	if armed {
		return c.ReqNotify(p.cq)
	}
	return nil
}
