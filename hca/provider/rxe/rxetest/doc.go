// Package rxetest drives a device through mapped queues as librxe drives the
// kernel's rxe: what is posted is written into the ring, a send then rings the
// doorbell, completions are read out of the ring. Device makes an hca.Device of that
// again, so that whatever tests those tests the queues. It is for tests only.
//
// The client's side sees the memory through a mapping of its own, as another process
// would: nothing but the indices is shared with the daemon in the eyes of the race
// detector.
//
// Lock order: a client's lock of one queue (wq.mu, cq.mu) is held around nothing of
// the device's but a resize, which librxe calls under it too.
package rxetest
