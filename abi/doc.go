// Package abi holds the kernel's wire structures: the uverbs write() commands
// (include/uapi/rdma/ib_user_verbs.h) and the parts of FUSE and CUSE that
// go-fuse lacks (include/uapi/linux/fuse.h). It has no logic and may be
// imported by every room.
//
// Every struct has fixed-width members and explicit padding, is laid out as the
// C compiler lays out the struct named in its comment, and is asserted to have
// its size at compile time; a test compares every offset with the system's own
// headers. Flexible driver_data members are left out: udata starts exactly
// where a struct here ends.
package abi
