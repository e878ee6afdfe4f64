package virtionet

import (
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/hca/nic"
)

// Control commands (§5.1.6.5): u8 class, u8 command, data, then the device's u8 ack.
const (
	classRx      = 0
	rxPromisc    = 0
	rxAllMulti   = 1
	classMAC     = 1
	macTableSet  = 0
	macAddrSet   = 1
	ackOK        = 0
	ackNone      = 0xFF // what no device answers
	ctrlEntries  = 64
	ctrlAckAt    = 1024 // behind the longest command, in a cache line of its own
	ctrlMemory   = ctrlAckAt + 1
	tableHeader  = 4 // le32 entries, in front of each of the two tables
	ctrlPollHot  = 64
	ctrlPollRest = 100 * time.Microsecond
)

// ctrlQueue is the control queue: one command at a time, whose end is looked for
// without an interrupt.
type ctrlQueue struct {
	p   *Port
	dma nic.DMA

	// mu guards the rest; it is held while the device does a command.
	mu       sync.Mutex
	shut     bool
	q        *virtq
	stuck    bool // a command was never answered: the device may still answer it
	allMulti bool
	promisc  bool
	commands uint64
	errors   uint64
	bad      uint64
}

func newCtrlQueue(p *Port, entries int) (*ctrlQueue, error) {
	q, err := newVirtq(p.t.fn, entries, p.features&fEventIdx != 0)
	if err != nil {
		return nil, err
	}
	c := &ctrlQueue{p: p, q: q}
	c.dma, err = alloc(p.t.fn, ctrlMemory)
	return c, err
}

// doLocked runs a command whose data the caller has put behind the first two bytes.
func (c *ctrlQueue) doLocked(class, command byte, data int) (err error) {
	defer func() {
		c.commands++
		if err != nil {
			c.errors++
		}
	}()
	if c.shut {
		return c.p.over()
	}
	if c.stuck {
		return fmt.Errorf("control command %d.%d: an earlier one was never answered: %w", class, command, unix.EIO)
	}
	m := c.dma.Mem
	m[0], m[1], m[ctrlAckAt] = class, command, ackNone
	c.q.describe(0, c.dma.IOVA, 2+data, fNext, 1)
	c.q.describe(1, c.dma.IOVA+ctrlAckAt, 1, fWrite, 0)
	c.q.push(0)
	c.q.publish()
	for tries, end := 0, time.Now().Add(ctrlWait); ; tries++ {
		n, err := c.q.pending()
		if err == nil && n > 0 {
			_, _, err = c.q.pop()
		}
		switch {
		case err != nil:
			c.bad++
			return c.p.fail(err)
		case n > 0 && m[ctrlAckAt] == ackOK:
			return nil
		case n > 0:
			return fmt.Errorf("control command %d.%d: refused with %d: %w", class, command, m[ctrlAckAt], unix.EIO)
		}
		if err := c.p.over(); err != nil {
			c.stuck = true
			return err
		}
		if time.Now().After(end) {
			c.stuck = true
			return fmt.Errorf("control command %d.%d: no answer within %v: %w", class, command, ctrlWait, unix.ETIMEDOUT)
		}
		if tries > ctrlPollHot {
			time.Sleep(ctrlPollRest)
		}
	}
}

// switchLocked turns a mode of classRx on or off, if it is not so already.
func (c *ctrlQueue) switchLocked(mode byte, is *bool, on bool) error {
	if *is == on {
		return nil
	}
	c.dma.Mem[2] = 0
	if on {
		c.dma.Mem[2] = 1
	}
	err := c.doLocked(classRx, mode, 1)
	if err == nil {
		*is = on
	}
	return err
}

// tableLocked sets the filter: the addresses of single ports, then of groups
// (§5.1.6.5.2). The device's own address needs no entry.
func (c *ctrlQueue) tableLocked(own []nic.MAC, groups []nic.MAC) error {
	at := 2
	for _, list := range [][]nic.MAC{own, groups} {
		binary.LittleEndian.PutUint32(c.dma.Mem[at:], uint32(len(list)))
		at += tableHeader
		for _, a := range list {
			at += copy(c.dma.Mem[at:], a[:])
		}
	}
	return c.doLocked(classMAC, macTableSet, at-2)
}

// setMAC tells the device our address (§5.1.6.5.2).
func (c *ctrlQueue) setMAC(a nic.MAC) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	copy(c.dma.Mem[2:], a[:])
	return c.doLocked(classMAC, macAddrSet, len(a))
}

// filter lets through our own address, where the device does not know it, and the
// groups; what the device cannot do it widens.
func (c *ctrlQueue) filter(own []nic.MAC, groups []nic.MAC) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := len(groups) > maxGroups
	if all {
		groups = nil
	}
	err := c.tableLocked(own, groups)
	promisc := err != nil && len(own) > 0
	if err != nil || all {
		err = c.switchLocked(rxAllMulti, &c.allMulti, true)
	} else {
		_ = c.switchLocked(rxAllMulti, &c.allMulti, false) // else it receives more than asked
	}
	if err != nil || promisc {
		return c.switchLocked(rxPromisc, &c.promisc, true)
	}
	_ = c.switchLocked(rxPromisc, &c.promisc, false)
	return nil
}

func (c *ctrlQueue) close() {
	c.mu.Lock()
	c.shut = true
	c.mu.Unlock()
}
