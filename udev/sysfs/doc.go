// Package sysfs is what programs find under /sys/class: the classes
// infiniband and infiniband_verbs, made from the live state of an
// [hca.Registry], for sysfs itself takes no mkdir.
//
// Who may call it: cmd/uverbsd mounts and closes; the registry tells it of devices
// that come and go (hca.Consumer). It calls only hca. Devices are asked through
// their methods, from FUSE's goroutines.
//
// # How it is put together
//
//	/run/uverbsd/class          go-fuse, read only: infiniband, infiniband_verbs
//	/run/uverbsd/class.layer    a plain directory with two empty ones of those names
//	/sys/class                  overlay, read only: lowerdir=class.layer:/sys/class
//	/sys/class/infiniband       bind mount of the FUSE directory
//	/sys/class/infiniband_verbs bind mount of the FUSE directory
//	/sys/class/net …            bind mounts of the kernel's own directories
//
// The overlay gives nothing but two mount points. FUSE is not one of its layers,
// for two measured reasons (Linux 6.18). An overlay asks every layer for every
// name, so a daemon that died took all of /sys/class with it: ls, and
// /sys/class/net/lo too, answered ENOTCONN; with FUSE as the last layer known
// names went on and ls did not. And an overlay remembers: a device that was
// asked for too early stays ENOENT, and one that went is ESTALE even when it is
// back, which rules out hot-plug. With FUSE on top of it, a dead daemon breaks
// only its own two classes (ENOTCONN; libibverbs then says "no devices"), and
// devices come and go at once: there are no cache timeouts.
//
// What the overlay does to the kernel's classes, and the cure:
//
//   - Attributes that lie directly in a class directory cannot be written through
//     it (EROFS): net/bonding_masters, gpio/export, zram-control/hot_add. So
//     net, and each class that has such files, is bound over the overlay.
//     Everything below /sys/class/X/DEV is reached through a symbolic link to
//     /sys/devices and never was in the overlay.
//   - It remembers that a class was absent, and one that went away is ESTALE. A
//     netlink socket listens for uevents; when the set of real classes has
//     changed, a remount drops what the overlay remembers, within about 100 ms.
//     A process that stands in a class that went keeps the stale one.
//   - Its list of /sys/class is fixed for as long as some process keeps the
//     directory open, and it has a device number of its own (find -xdev).
//
// Processes in another mount namespace see the tree only if their /sys is a
// peer or slave of the host's (systemd services are; a container that mounts
// its own sysfs is not, nor is ip netns exec). Likewise the daemon must run in
// the host's mount namespace: no PrivateMounts, ProtectSystem and the like in its
// unit. The unit needs AF_NETLINK for the uevents.
//
// # In what order to call
//
// Start: modprobe.Check, Clean, StartKeeper, modprobe.Install, modprobe.Check
// again, devices, Mount. A device that goes: Registry.Unregister, then its
// end. Stop: Tree.Close, modprobe.Remove, Keeper.Stop. The keeper, and
// "uverbsd clean": Clean and modprobe.Remove.
//
// # Lock order
//
// Tree.mu, then nothing; device.mu alone, held shared while a method of the
// device runs; overlay.mu alone. No lock is held across two of them.
package sysfs
