package soft

import (
	"fmt"
	"time"
)

// moderation holds back the Completion of an armed CQ until enough has come or
// enough time has passed. CQ.mu guards it.
//
// There is one timer per CQ that ever was moderated. It is not stopped when
// count is reached first, because that would cost more than letting it fire:
// tick finds that there is nothing to tell, or not yet.
type moderation struct {
	on     bool          // count or period holds something back
	count  uint32        // 0: no bound
	period time.Duration // 0: no bound

	untold   uint32    // completions that the arm waited for and that are not told
	deadline time.Time // of the first of them, with a period
	timer    *time.Timer
	ticking  bool
}

// Modify sets what Completion waits for; 0 is no bound of that kind. EINVAL over
// MaxCQCount and MaxCQPeriod. What is held back already is counted, and its time
// runs from when it came.
func (c *CQ) Modify(count, period uint16) error {
	a := &c.dev.attr
	if count > a.MaxCQCount || period > a.MaxCQPeriod {
		return fmt.Errorf("modify cq to %d completions, %d us: %w", count, period, einval)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("modify cq: closed: %w", einval)
	}
	if c.mod == nil {
		c.mod = new(moderation)
	}
	m := c.mod
	old := m.period
	m.count, m.period = uint32(count), time.Duration(period)*time.Microsecond
	m.on = count > 1 || count == 0 && period > 0
	if m.untold == 0 {
		return nil
	}
	if old == 0 { // when the first came was not noted
		m.deadline = time.Now()
	}
	m.deadline = m.deadline.Add(m.period - old)
	c.tellIfDueLocked()
	if m.untold > 0 && m.period > 0 {
		c.tickAtLocked(time.Until(m.deadline))
	}
	return nil
}

// holdLocked counts a completion that the arm waits for; true when the Completion
// is due. A full CQ is told of: nothing more can come.
func (c *CQ) holdLocked() bool {
	m := c.mod
	m.untold++
	if c.enoughLocked() {
		return true
	}
	if m.untold == 1 && m.period > 0 {
		m.deadline = time.Now().Add(m.period)
		if !m.ticking {
			c.tickAtLocked(m.period)
		}
	}
	return false
}

func (c *CQ) enoughLocked() bool {
	m := c.mod
	return !m.on || m.count > 0 && m.untold >= m.count || c.queuedLocked() >= c.entries
}

// tellIfDueLocked is for verbs that change what is enough.
func (c *CQ) tellIfDueLocked() {
	if c.mod.untold > 0 && c.enoughLocked() {
		c.tellLocked()
		if c.due {
			c.dev.events.add(event{cq: c})
		}
	}
}

func (c *CQ) tickAtLocked(d time.Duration) {
	m := c.mod
	m.ticking = true
	if m.timer == nil {
		m.timer = time.AfterFunc(d, c.tick)
		return
	}
	m.timer.Reset(d)
}

// tick makes the Completion whose time has come.
func (c *CQ) tick() {
	c.mu.Lock()
	m := c.mod
	m.ticking = false
	if c.closed || m.untold == 0 || m.period == 0 {
		c.mu.Unlock()
		return
	}
	if d := time.Until(m.deadline); d > 0 {
		c.tickAtLocked(d)
		c.mu.Unlock()
		return
	}
	c.tellLocked()
	c.mu.Unlock()
	c.tell()
}
