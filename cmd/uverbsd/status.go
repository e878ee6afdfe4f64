package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sort"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/uverbsd/uverbsd/dispatch"
)

// statusTimeout bounds both ends of a status question: local, answered from
// memory.
const statusTimeout = 5 * time.Second

// acceptPause is between two tries when a connection cannot be taken.
const acceptPause = 100 * time.Millisecond

// deviceStatus is one device as `uverbsd status --json` prints it.
type deviceStatus struct {
	Name     string              `json:"name"`
	Node     string              `json:"node"`
	Provider string              `json:"provider"`
	State    string              `json:"state"`
	Link     string              `json:"link"`
	LID      uint16              `json:"lid"`               // 0 on Ethernet
	Address  string              `json:"address,omitempty"` // on Ethernet
	GUID     string              `json:"node_guid"`
	Contexts []dispatch.FileInfo `json:"contexts"`
}

// serveStatus answers every connection to the socket with one JSON document.
func (d *daemon) serveStatus(path string) error {
	l, err := listen(path, 0o666)
	if err != nil {
		return fmt.Errorf("status socket: %w", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // out of descriptors, say: it passes
				time.Sleep(acceptPause)
				continue
			}
			_ = c.SetDeadline(time.Now().Add(statusTimeout))
			_ = json.NewEncoder(c).Encode(d.status())
			_ = c.Close()
		}
	}()
	d.onStop(func() error {
		err := l.Close()
		<-done
		return err
	})
	return nil
}

// stateRemoved is the State of a device that was removed and has files open.
const stateRemoved = "removed"

func (d *devices) status() []deviceStatus {
	d.mu.Lock() // no device goes while it is asked
	defer d.mu.Unlock()
	out := make([]deviceStatus, 0, len(d.list))
	for _, s := range d.list {
		st := deviceStatus{
			Name: s.entry.Name, Node: s.path(), Provider: s.entry.Provider.Name(), GUID: s.guid,
			State: "down", Link: s.link.String(), Address: s.address, Contexts: s.dev.Files(),
		}
		if s.going {
			st.State = stateRemoved
		} else if p, err := s.engine.Port(1); err == nil {
			st.LID = p.LID
			if p.State == 4 {
				st.State = "active"
			}
		}
		sort.Slice(st.Contexts, func(i, j int) bool { return st.Contexts[i].PID < st.Contexts[j].PID })
		out = append(out, st)
	}
	return out
}

func statusCmd() *cobra.Command {
	var asJSON bool
	var socket string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show devices, open contexts, their objects and pinned memory",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, err := askStatus(socket)
			if err != nil {
				return err
			}
			if asJSON {
				_, err = cmd.OutOrStdout().Write(text)
				return err
			}
			var st []deviceStatus
			if err := json.Unmarshal(text, &st); err != nil {
				return fmt.Errorf("status: %w", err)
			}
			return printStatus(cmd.OutOrStdout(), st)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().StringVar(&socket, "socket", defaultSocket, "the daemon's status socket")
	return cmd
}

func askStatus(socket string) ([]byte, error) {
	c, err := net.DialTimeout("unix", socket, statusTimeout)
	if err != nil {
		return nil, fmt.Errorf("no daemon answers at %s (is `uverbsd serve` running?): %w", socket, err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(statusTimeout))
	text, err := io.ReadAll(c)
	if err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	return text, nil
}

func printStatus(w io.Writer, st []deviceStatus) error {
	for _, d := range st {
		if d.State == stateRemoved {
			fmt.Fprintf(w, "%s\tremoved, %d contexts\n", d.Name, len(d.Contexts))
		} else {
			at := fmt.Sprintf("lid %d", d.LID)
			if d.Address != "" {
				at = "address " + d.Address
			}
			fmt.Fprintf(w, "%s\t%s provider %s state %s link %s %s guid %s, %d contexts\n",
				d.Name, d.Node, d.Provider, d.State, d.Link, at, d.GUID, len(d.Contexts))
		}
		if len(d.Contexts) == 0 {
			continue
		}
		t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
		fmt.Fprintln(t, "  PID\tPROGRAM\tUID\tPINNED\tOBJECTS")
		for _, c := range d.Contexts {
			fmt.Fprintf(t, "  %d\t%s\t%d\t%d\t%s\n", c.PID, c.Program, c.UID, c.Pinned, objectList(c.Objects))
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// objectList is "2 cq, 1 pd": counts by kind, in order of name.
func objectList(m map[string]int) string {
	kinds := make([]string, 0, len(m))
	for k := range m {
		kinds = append(kinds, k)
	}
	sort.Strings(kinds)
	parts := make([]string, len(kinds))
	for i, k := range kinds {
		parts[i] = fmt.Sprintf("%d %s", m[k], k)
	}
	return strings.Join(parts, ", ")
}
