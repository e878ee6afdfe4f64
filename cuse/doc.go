// Package cuse runs one /dev/cuse session: it shakes hands with the kernel,
// reads requests on a small, self-adjusting number of threads, hands them to a
// Handler where they were read, and makes sure that each gets exactly one reply.
// It knows FUSE and nothing of verbs.
//
// cmd/uverbsd opens a Channel, makes a Session and calls Handshake, Serve and
// Close; dispatch implements Handler and File. Package cusetest drives a Session
// without a device.
//
// The same Session serves the /dev/fuse channel of a mounted file system
// (NewMounted). A Tree then stands in the place of the Handler: it opens files,
// and answers what is asked of directories and inodes. Package ctxfs is the one.
//
// # Threads
//
// One worker, the reader, reads and handles in turn; it alone may sleep in the
// kernel. A worker stops being a reader when its handler calls Request.Detach or
// when the monitor finds it in one handler for a whole tick; another worker then
// reads. With a backlog up to GOMAXPROCS workers read at once, and go back to one
// when a read finds nothing. All workers, stuck ones included, are bounded by
// Config.Readers, those of one user and of one file by less, so that a client
// whose memory blocks for ever holds up itself and nobody else. Requests over
// such a bound wait in the file's queue, as copies.
//
// # Locks
//
// Session.mu is the only lock with state behind it: the file table, outstanding
// requests, users, workers. No handler, callback, system call or log call runs
// under it, so Request's methods and Session.Notify may be called with any lock
// of the caller held. Callbacks (File methods, OnInterrupt, After) are called
// with no lock held. Tree.Answer is called with none either, but must not sleep.
package cuse
