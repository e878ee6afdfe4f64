// Command guestinit is process 1 of a test guest and the agent that the host talks to. It has three lives, one
// process image each:
//
//	/init (in the initramfs)  loads the boot modules, mounts the root disk, copies the host's files onto it, enters it
//	guestinit pid1            mounts the rest, loads cuse and overlay, starts the agent, reaps orphans, powers off
//	guestinit agent           serves the host over the virtio-serial port (package agent)
//
// Process 1 and the agent are two processes so that reaping orphans never steals the status of a step. A guest that
// boots systemd would start "guestinit agent" as a service and need neither of the other two.
package main

import (
	"fmt"
	"os"
)

func main() {
	life := "boot"
	if len(os.Args) > 1 {
		life = os.Args[1]
	}
	var err error
	switch {
	case life == "agent":
		err = agentMain()
	case os.Getpid() != 1:
		err = fmt.Errorf("this is process 1 of a test guest; on a host it does nothing")
	case life == "boot":
		err = boot() // returns only if it fails
	case life == "pid1":
		err = pid1()
	default:
		err = fmt.Errorf("unknown argument %q", life)
	}
	if err != nil {
		complain(err)
	}
	if os.Getpid() == 1 {
		powerOff()
	}
	if err != nil {
		os.Exit(1)
	}
}

// complain writes one line to the console, where the host finds it in the tail it prints.
func complain(err error) { logLine(err.Error()) }

func logLine(s string) { fmt.Fprintf(os.Stderr, "guestinit: %s\n", s) }
