// Package payload names the places that the host's harness and the guest's process 1 agree on.
package payload

// Places in the initramfs.
const (
	Boot       = "/init"
	ModuleList = "/modules.list" // boot modules, one path a line, in loading order
	Root       = "/payload"      // a tree to be copied over the root disk
)

// Places in the running guest.
const (
	Dir  = "/opt/uverbsd-guest"
	Init = Dir + "/guestinit"

	DaemonDir  = "/opt/uverbsd"
	DaemonPath = DaemonDir + "/uverbsd"
	DaemonLog  = "/run/uverbsd.log"

	Cgroup = "/sys/fs/cgroup"
)

// Hostname is every guest's host name; the image's /etc/hosts has it too.
const Hostname = "guest"
