package main

import (
	"fmt"
	"strings"

	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/provider/qib"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
)

// providers are what a device can pass for, by the name that the configuration uses.
var providers = map[string]hca.Provider{
	qib.Provider{}.Name(): qib.Provider{},
	rxe.Provider{}.Name(): rxe.Provider{},
}

// autoProvider is rxe where queues can be mapped, and qib where not.
const autoProvider = "auto"

// providerOf is the provider that c asks for. mappable says why this host cannot
// map queues. librxe takes a device for its own by its name alone (VERBS_NAME_MATCH),
// so that the name decides where nothing else does. The errors say what to write.
func providerOf(c *deviceConfig, mappable func() error) (hca.Provider, error) {
	stem := rxe.Provider{}.Name()
	named := strings.HasPrefix(c.Name, stem)
	name := c.Provider
	if name == "" || name == autoProvider {
		switch {
		case c.Link == hca.LinkInfiniBand.String(), c.Name != "" && !named, c.Name == "" && mappable() != nil:
			name = qib.Provider{}.Name()
		default:
			name = stem
		}
	}
	p := providers[name]
	if p == nil {
		return nil, fmt.Errorf("provider %q: say auto, rxe or qib", c.Provider)
	}
	if _, maps := p.(hca.Mapper); maps {
		if err := mappable(); err != nil {
			return nil, fmt.Errorf("provider %s: this host cannot map queues (%w): use provider qib, and another name than %s…", name, err, stem)
		}
	}
	if c.Name != "" && named != (name == stem) {
		return nil, fmt.Errorf("name %q: the library of provider rxe takes what is named %s… and nothing else: choose another name for provider %s", c.Name, stem, name)
	}
	return p, nil
}
