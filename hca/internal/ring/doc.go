// Package ring holds what drivers of a NIC in user hands have in common beside the
// hardware: Event sleeps for an interrupt, Spinner says how long to look before
// that, Stack takes lent buffers back from any goroutine.
//
// Who may call it: the drivers below hca (virtionet, e1000e). It takes no lock and
// calls nothing out.
package ring
