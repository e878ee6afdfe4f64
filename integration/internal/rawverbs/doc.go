// Package rawverbs speaks the write() ABI of a uverbs node by itself, without
// libibverbs: commands are encoded here, byte for byte, so that a test can also
// send what no library would. It serves the daemon's node and the kernel's.
//
// Who may call it: programs under integration/ that run in a guest. A Client is
// one open file; its methods may be called from any goroutine, except that
// those which have a response share Mem's first page and so want one goroutine
// at a time (Do with a Request of its own memory does not).
package rawverbs
