package e1000e

import (
	"errors"
	"time"

	"github.com/uverbsd/uverbsd/hca/nic"
)

// recvTick is how long a leader sleeps at most: an interrupt that got lost costs no more.
const recvTick = time.Second

// Recv waits for frames. See nic.Port.
func (p *Port) Recv(fs []nic.Frame) (int, error) {
	if err := p.enter(); err != nil {
		return 0, err
	}
	defer p.leave()
	if len(fs) == 0 {
		return 0, nil
	}
	if n := p.rx.harvest(p.bar, fs, p); n > 0 {
		return n, nil
	}
	select {
	case <-p.lead:
	case <-p.done:
		return 0, p.over()
	}
	n, err := p.leadRecv(fs)
	p.lead <- struct{}{}
	return n, err
}

func (p *Port) leadRecv(fs []nic.Frame) (int, error) {
	for {
		if err := p.over(); err != nil {
			return 0, err
		}
		if n := p.rx.harvest(p.bar, fs, p); n > 0 {
			return n, nil
		}
		if !p.spin.spin(p.ready, p.quit) {
			p.sleep()
		}
	}
}

// sleep waits for the interrupt. Frames that came before it was unmasked left their
// cause, which is cleared so that it does not wake us for nothing; then the ring
// is looked at once more. The read in between makes sure that both writes have arrived:
// else a frame could come after the look and lose its cause to the first of them.
func (p *Port) sleep() {
	start := time.Now()
	p.bar.Store32(regICR, p.rxCauses)
	p.bar.Store32(regIMS, p.rxCauses)
	if !p.alive() {
		return
	}
	if p.rx.ready() {
		p.bar.Store32(regIMC, p.rxCauses)
		return
	}
	p.poll.wait(recvTick)
	took := time.Since(start)
	p.spin.slept(took)
	if n := p.poll.take(0); n > 0 {
		p.stats.interrupts.Add(n)
		if !p.several {
			p.acknowledge()
		}
		return // the message's vector masked itself (EIAC, EIAME)
	}
	p.bar.Store32(regIMC, p.rxCauses)
	if p.poll.broken() {
		p.lost()
	}
	if took >= recvTick && p.rx.ready() {
		p.stats.rxMissedInterrupts.Add(1)
	}
}

// acknowledge takes the causes of the only vector away. They are written back, too: by
// DS 7.4.5 a read clears them, but QEMU's model leaves them where a mask is set.
func (p *Port) acknowledge() {
	p.bar.Store32(regIMC, p.rxCauses)
	c := p.bar.Load32(regICR)
	if c == allOnes && !p.alive() {
		return
	}
	p.bar.Store32(regICR, c)
	if c&linkCauses != 0 {
		p.kick.set()
	}
	if err := p.fn.UnmaskINTx(); errors.Is(err, nic.ErrGone) {
		p.lost()
	}
}

// ReleaseFrame takes back a frame's buffer: see nic.Frame. A token that is not lent is
// counted, and nothing else happens.
func (p *Port) ReleaseFrame(token int) {
	fill, last, ok := p.rx.pool.put(token)
	switch {
	case !ok:
		p.stats.rxBadRelease.Add(1)
	case last:
		_ = p.release() // Close has returned: nobody is left to be told
	case fill && p.enter() == nil:
		p.rx.fill(p.bar)
		p.leave()
	}
}
