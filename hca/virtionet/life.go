package virtionet

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca/nic"
)

const einval = unix.EINVAL

// linkUp is a bit of Port.link, above it is the speed.
const linkUp = 1

func pack(s nic.State) uint64 {
	v := uint64(s.Mbps) << 1
	if s.Up {
		v |= linkUp
	}
	return v
}

func unpack(v uint64) nic.State { return nic.State{Up: v&linkUp != 0, Mbps: int(v >> 1)} }

// over is why the port does no more, nil while it does.
func (p *Port) over() error {
	if e := p.end.Load(); e != nil {
		return e.err
	}
	return nil
}

// fail ends the port for what its device did or is, and returns the end, which may
// be an earlier one.
func (p *Port) fail(why error) error {
	if !errors.Is(why, nic.ErrGone) {
		why = fmt.Errorf("%w: %w", nic.ErrGone, why)
	}
	e := &ending{fmt.Errorf("virtio network port on %s: %w; unplug or reset it", p.t.fn.Name(), why)}
	if p.end.CompareAndSwap(nil, e) {
		p.wakeAll()
	}
	return p.over()
}

// wakeAll ends every wait; end is set.
func (p *Port) wakeAll() {
	p.endOnce.Do(func() { close(p.ended) })
	if p.rx != nil && p.rx.event != nil {
		p.rx.event.Wake()
	}
	if p.vec != nil {
		p.vec.Wake()
	}
}

// alive asks the device whether it still works, and ends the port if not.
func (p *Port) alive() error {
	switch s := p.t.common.load8(comStatus); {
	case s == allOnes8:
		return p.fail(errors.New("its registers read as ones"))
	case s&statusNeedsReset != 0: // §2.1.2
		return p.fail(fmt.Errorf("it is in an error of its own (status %#x)", s))
	case s&statusDriverOK == 0:
		return p.fail(fmt.Errorf("it was reset behind our back (status %#x)", s))
	}
	return nil
}

// readLink reads the link's state from the device.
func (p *Port) readLink() nic.State {
	s := nic.State{Up: true}
	if p.features&fStatus != 0 {
		s.Up = p.t.device.load16(netStatus)&netLinkUp != 0
	}
	if p.features&fSpeedDuplex != 0 {
		if v := p.t.device.load32(netSpeed); v <= speedUnknown {
			s.Mbps = int(v)
		}
	}
	return s
}

// watch waits for changes of the configuration, and for all interrupts where there
// is one for all.
func (p *Port) watch() {
	defer p.threads.Done()
	for {
		p.vec.Within(healthTick)
		if p.over() != nil {
			break
		}
		n := p.vec.Wait()
		if p.shared && n > 0 {
			isr := p.t.isr.load8(0) // takes the level away
			if err := p.t.fn.UnmaskINTx(); err != nil {
				_ = p.fail(fmt.Errorf("let its interrupt come again: %w", err))
				break
			}
			p.rx.event.Signal()
			if isr&isrConfig == 0 { // all ones have it
				continue
			}
		}
		if n > 0 {
			p.cfgIRQs.Add(1)
		}
		if p.alive() == nil {
			p.change(p.readLink())
		}
	}
	if !errors.Is(p.over(), nic.ErrClosed) {
		p.change(nic.State{})
	}
}

// change sets the state, and tells it.
func (p *Port) change(s nic.State) {
	if p.link.Swap(pack(s)) == pack(s) {
		return
	}
	p.changes.Add(1)
	p.watchMu.Lock()
	defer p.watchMu.Unlock()
	if p.told != nil {
		p.told(s)
	}
}

// watchRemoval ends the port when its function is asked back.
func (p *Port) watchRemoval() {
	defer p.threads.Done()
	select {
	case <-p.t.fn.Removed():
		_ = p.fail(errors.New("it is being taken away"))
	case <-p.ended:
	}
}

// Close stops the device and ends everything with ErrClosed. The Function is closed
// then, or, if frames are out, when the last of them is released: they lie in its
// memory. An error says what of the device could not be stopped.
func (p *Port) Close() error {
	p.closing.Do(func() {
		p.end.Store(&ending{fmt.Errorf("virtio network port on %s: %w", p.t.fn.Name(), nic.ErrClosed)})
		p.wakeAll()
		p.threads.Wait()
		if p.tx != nil {
			p.tx.close()
		}
		if p.ctrl != nil {
			p.ctrl.close()
		}
		if p.rx != nil {
			p.rx.close()
		}
		var errs []error
		if p.t.common.bar != nil {
			if err := p.t.reset(); err != nil && !errors.Is(err, nic.ErrGone) {
				errs = append(errs, err)
			}
		}
		if err := p.t.fn.BusMaster(false); err != nil && !errors.Is(err, nic.ErrGone) {
			errs = append(errs, fmt.Errorf("forbid DMA: %w", err))
		}
		if p.vec != nil {
			p.vec.Close()
		}
		if p.rx != nil && p.rx.event != nil {
			p.rx.event.Close()
		}
		errs = append(errs, p.leave())
		if err := errors.Join(errs...); err != nil {
			p.closed = fmt.Errorf("close virtio network port on %s: %w", p.t.fn.Name(), err)
		}
	})
	return p.closed
}

// leave gives up one of refs; the last closes the function.
func (p *Port) leave() error {
	if p.refs.Add(-1) > 0 {
		return nil
	}
	return p.t.fn.Close()
}
