// Package dispatch is the uverbs command layer: what the kernel's ib_uverbs
// (drivers/infiniband/core/uverbs_cmd.c, uverbs_main.c) does between a client's
// write() and the driver. It decodes a command, checks it against its row of
// the one table (table.go), locks the handles it names, calls the device, and
// puts the response into the client.
//
// Who may call it: cmd/uverbsd, which hands it the requests of a cuse session
// (Request) and a way to reach the calling process (System). It knows neither
// CUSE nor ptrace.
//
// A command is handled on the goroutine that calls Write, and answered exactly
// once. A post is answered before its payload moves; the same goroutine then
// runs the queue (hca.QP.Run).
//
// Lock order: File.hw → File.mu → eventFile.mu; the other locks are leaves. None
// is held while client memory is touched or a reply is sent, but for File.hw, and
// none while the device is called, but for that, mcastList.mu and xrcdTable.mu.
package dispatch
