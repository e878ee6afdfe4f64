// Command uverbsd serves /dev/infiniband/uverbsN from user space. This folder
// is wiring: configuration, devices, their order of coming and going, status.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

func main() {
	if err := root().Execute(); err != nil {
		fmt.Fprintf(os.Stderr, "uverbsd: %v\n", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "uverbsd",
		Short:         "RDMA verbs for programs on hosts without an RDMA kernel stack",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(serveCmd(), statusCmd(), deviceCmd(), captureCmd(), commandsCmd(), bindCmd(), unbindCmd(), cleanCmd(), keeperCmd())
	return cmd
}
