package soft

import (
	"fmt"
	"sync/atomic"

	"github.com/uverbsd/uverbsd/hca"
)

// MW is a memory window that is bound to nothing: no queue takes bind requests.
type MW struct {
	dev    *Device
	key    uint32
	closed atomic.Bool
}

var _ hca.MW = (*MW)(nil)

// AllocMW: EINVAL for a type that does not exist, ENOMEM when MaxMW exist.
func (p *PD) AllocMW(typ hca.MWType) (hca.MW, error) {
	d := p.ctx.dev
	if typ != hca.MWType1 && typ != hca.MWType2 {
		return nil, fmt.Errorf("alloc mw: type %d: %w", typ, einval)
	}
	if err := take(&d.nMW, d.attr.MaxMW, "alloc mw"); err != nil {
		return nil, err
	}
	key, err := d.mrs.windowKey()
	if err != nil {
		d.nMW.Add(-1)
		return nil, fmt.Errorf("alloc mw: %w", err)
	}
	return &MW{dev: d, key: key}, nil
}

// RKey is the window's key.
func (w *MW) RKey() uint32 { return w.key }

// Close gives the key back.
func (w *MW) Close() error {
	if !w.closed.Swap(true) {
		w.dev.mrs.putWindowKey(w.key)
		w.dev.nMW.Add(-1)
	}
	return nil
}
