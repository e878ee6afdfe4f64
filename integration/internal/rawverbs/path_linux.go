package rawverbs

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// linkEthernet is IB_LINK_LAYER_ETHERNET of a port's link_layer.
const linkEthernet = 2

// SelfPath is the way from c's port 1 back to itself.
func (c *Client) SelfPath(node string) (Path, error) {
	p, err := c.QueryPort(1)
	if err != nil {
		return Path{}, err
	}
	if p.LinkLayer != linkEthernet {
		return Path{LID: p.LID}, nil
	}
	dev, err := os.ReadFile(filepath.Join("/sys/class/infiniband_verbs", filepath.Base(node), "ibdev"))
	if err != nil {
		return Path{}, fmt.Errorf("the device of %s: %w", node, err)
	}
	dir := filepath.Join("/sys/class/infiniband", string(bytes.TrimSpace(dev)), "ports/1/gids")
	var found *Path
	for i := range min(int(p.GIDTblLen), 16) {
		text, err := os.ReadFile(filepath.Join(dir, strconv.Itoa(i)))
		if err != nil {
			continue // an empty entry cannot be read
		}
		a, err := netip.ParseAddr(strings.TrimSpace(string(text)))
		// The last one: after the link-local ones come those with a route.
		if err == nil && !a.IsUnspecified() {
			found = &Path{GID: a.As16(), SGID: uint8(i), RoCE: true}
		}
	}
	if found != nil {
		return *found, nil
	}
	return Path{}, fmt.Errorf("%s: no GID", dir)
}
