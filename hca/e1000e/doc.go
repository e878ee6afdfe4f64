// Package e1000e drives Intel's 82574 gigabit controller in user space: a nic.Port on
// a nic.Function. It is also what QEMU's "-device e1000e" is.
//
// Who may call it: cmd opens a Port and hands it to roce/ether; nothing else here is
// public. Sources: Intel 82574 GbE Controller Family Datasheet (DS below), chapters 7
// (inline functions) and 10 (registers); for what it leaves out or has errata on, the
// kernel's drivers/net/ethernet/intel/e1000e; for the model, QEMU's hw/net/e1000e_core.c.
//
// One receive and one transmit queue, legacy descriptors (DS 7.1, 7.2): their status and
// their length are in one 64-bit word, which is loaded once, and of which only the
// copy is looked at. Everything else about a descriptor (its buffer, its place) is in our own
// tables, never read back. A buffer holds the largest frame, so what goes over several
// descriptors is too large and is dropped.
//
// Receive: a frame's buffer is lent out; the ring gets another from a spare pool of
// twice its size. Where the pool is empty, the ring runs dry and the hardware drops; the
// buffers that come back then go to the ring at once. Of the goroutines in Recv one leads:
// it looks at the ring for a short while if frames come often, then has the interrupt
// unmasked and sleeps in poll(2). The others wait for its place. While nobody
// sleeps, the interrupt is masked.
//
// Send copies into the ring's own slots, under txRing.mu. It asks for reports of the last
// descriptor of a batch alone, and looks at them when it needs room. There are no
// transmit interrupts. While the link is down nothing goes into the ring; what was in it
// goes out when the link is back, or never.
//
// Link changes are an interrupt vector of their own, which the goroutine serve waits on.
// Where the function has but one vector (MSI, INTx), the leader takes it and tells serve;
// while nobody is in Recv, serve sees a change within serviceTick. Flow control is off.
//
// A call that may touch the hardware is counted (enter, leave); Close waits for these,
// stops DMA, and closes the Function when the last lent frame is back: its bytes are DMA
// memory.
//
// Lock order: Port.cfg, then nothing. rxRing.mu, then pool.mu. txRing.mu alone. The lead
// (Port.lead) is taken under no lock; its holder takes rxRing.mu and pool.mu. No lock
// is held across a callback, a sleep or a call of the Function's that can block.
package e1000e
