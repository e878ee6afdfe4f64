package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/hca/vfio/binding"
)

// host is where functions are opened: this machine, or a test's.
type host struct {
	k    kernel
	tree binding.Tree
	dev  string // /dev/vfio

	// mu guards groups, and the users in them; held while one is opened or closed.
	mu     sync.Mutex
	groups map[string]*group // by number
}

var machine = &host{k: linux{}, dev: "/dev/vfio", groups: map[string]*group{}}

// group is an IOMMU group of ours, alone in its container.
type group struct {
	host          *host
	number        string
	fd, container int
	page          uint64          // the IOMMU's smallest, at least the processor's
	users         map[string]bool // addresses of open devices; guarded by host.mu

	// mu guards space.
	mu    sync.Mutex
	space *iovaSpace
}

// join opens a group for a device, or takes the one that is open.
func (h *host) join(number, addr string) (*group, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.groups[number]
	if g == nil {
		var err error
		if g, err = h.openGroup(number, addr); err != nil {
			return nil, err
		}
		h.groups[number] = g
	}
	if g.users[addr] {
		return nil, fmt.Errorf("it is open in this process already: %w", unix.EBUSY)
	}
	g.users[addr] = true
	return g, nil
}

// leave is join's reverse.
func (g *group) leave(addr string) error {
	h := g.host
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(g.users, addr)
	if len(g.users) > 0 {
		return nil
	}
	delete(h.groups, g.number)
	_, err := h.k.call(g.fd, abi.VfioGroupUnsetContainer, 0)
	return both(both(err, h.k.close(g.fd)), h.k.close(g.container))
}

// openGroup puts the group of addr into a new container.
func (h *host) openGroup(number, addr string) (_ *group, err error) {
	g := &group{host: h, number: number, users: map[string]bool{}}
	k := h.k
	if g.container, err = h.openContainer(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = k.close(g.container)
		}
	}()
	if g.fd, err = h.openNumber(number); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = k.close(g.fd)
		}
	}()
	status := abi.VfioGroupStatus{Argsz: uint32(len(bytesOf(new(abi.VfioGroupStatus))))}
	if _, err := k.ioctl(g.fd, abi.VfioGroupGetStatus, bytesOf(&status)); err != nil {
		return nil, fmt.Errorf("ask for the state of group %s: %w", number, err)
	}
	if status.Flags&abi.VfioGroupFlagsViable == 0 {
		return nil, h.notViable(number, addr, unix.EPERM)
	}
	if _, err := k.ioctl(g.fd, abi.VfioGroupSetContainer, binary.NativeEndian.AppendUint32(nil, uint32(g.container))); err != nil {
		if errors.Is(err, unix.EPERM) { // iommu_group_claim_dma_owner
			return nil, h.notViable(number, addr, err)
		}
		return nil, fmt.Errorf("put group %s into a container: %w", number, err)
	}
	// From here on the group's close takes it out of the container.
	if _, err := k.call(g.container, abi.VfioSetIommu, abi.VfioType1v2Iommu); err != nil {
		if errors.Is(err, unix.EPERM) { // vfio_iommu_type1_attach_group
			return nil, fmt.Errorf("the platform does not remap interrupts, so that the device could raise any: "+
				"switch interrupt remapping on in the firmware (and not off by intremap=off), or allow_unsafe_interrupts of vfio_iommu_type1: %w", err)
		}
		return nil, fmt.Errorf("set the IOMMU of group %s: %w", number, err)
	}
	page, valid, err := iommuInfo(k, g.container)
	if err != nil {
		return nil, fmt.Errorf("ask for the IOMMU of group %s: %w", number, err)
	}
	g.page, g.space = page, newIOVASpace(valid, page)
	return g, nil
}

// openContainer opens /dev/vfio/vfio and checks what is behind it.
func (h *host) openContainer() (int, error) {
	path := filepath.Join(h.dev, "vfio")
	fd, err := h.k.open(path)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return 0, fmt.Errorf("no %s: run modprobe vfio-pci: %w", path, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return 0, fmt.Errorf("open %s: run this as root: %w", path, err)
	case err != nil:
		return 0, fmt.Errorf("open %s: %w", path, err)
	}
	v, err := h.k.call(fd, abi.VfioGetAPIVersion, 0)
	if err == nil && v != abi.VfioAPIVersion {
		err = fmt.Errorf("VFIO has API version %d, not %d", v, abi.VfioAPIVersion)
	}
	if err == nil {
		if v, err = h.k.call(fd, abi.VfioCheckExtension, abi.VfioType1v2Iommu); err == nil && v == 0 {
			err = fmt.Errorf("VFIO has no type 1 IOMMU: run modprobe vfio_iommu_type1: %w", unix.EOPNOTSUPP)
		}
	}
	if err != nil {
		_ = h.k.close(fd)
		return 0, err
	}
	return fd, nil
}

func (h *host) openNumber(number string) (int, error) {
	path := filepath.Join(h.dev, number)
	fd, err := h.k.open(path)
	switch {
	case errors.Is(err, unix.EBUSY):
		return 0, fmt.Errorf("open %s: another process has group %s: see fuser %s: %w", path, number, path, err)
	case errors.Is(err, unix.ENOENT):
		return 0, fmt.Errorf("no %s: run modprobe vfio-pci, and wait for udev: %w", path, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return 0, fmt.Errorf("open %s: run this as root, or give it the node: %w", path, err)
	case err != nil:
		return 0, fmt.Errorf("open %s: %w", path, err)
	}
	return fd, nil
}

// notViable says who keeps the group from being lent.
func (h *host) notViable(number, addr string, err error) error {
	who := strings.Join(h.tree.Foreign(addr), ", ")
	if who == "" {
		who = "a device in it"
	}
	return fmt.Errorf("group %s is not viable: the host uses %s: bind all of the group to %s, or take the card to another slot: %w",
		number, who, binding.VFIODriver, err)
}

// allocate reserves size bytes of I/O addresses.
func (g *group) allocate(size, align uint64) (uint64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	iova, ok := g.space.take(size, align)
	if !ok {
		return 0, fmt.Errorf("the IOMMU of group %s has no %d bytes of addresses left: %w", g.number, size, unix.ENOSPC)
	}
	return iova, nil
}

// release gives I/O addresses back that nothing is mapped to.
func (g *group) release(iova, size uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.space.put(span{iova, iova + size})
}
