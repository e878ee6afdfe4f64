package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/cuse"
	"github.com/uverbsd/uverbsd/cuse/ctxfs"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
	"github.com/uverbsd/uverbsd/hca/provider/rxe"
	"github.com/uverbsd/uverbsd/hca/roce"
	"github.com/uverbsd/uverbsd/hca/roce/capture"
	"github.com/uverbsd/uverbsd/hca/soft"
	"github.com/uverbsd/uverbsd/pin"
)

// maxName bounds a device's name: IB_DEVICE_NAME_MAX with its terminator.
const maxName = 63

// host is what devices need of the host; tests have another.
type host interface {
	// openChannel is a new /dev/cuse.
	openChannel() (*cuse.Channel, error)
	// setupNode gives the node at path, which the session has made, its mode and
	// returns its device number.
	setupNode(path string, mode os.FileMode) (uint64, error)
	// removeNode takes the node away while its session lives.
	removeNode(path string) error
	// mappable says why clients cannot map their queues here; nil: they can.
	mappable() error
	// openLink makes the link of a port that reaches other hosts.
	openLink(c *deviceConfig) (roce.Link, error)
	// mountContexts mounts the files of contexts of the device uverbsN.
	mountContexts(uverbsN string, log *zap.Logger) (*ctxfs.FS, error)
}

// devices are the HCAs of a daemon with their nodes. What starts, adds, removes
// and stops devices goes through add and remove, one at a time.
//
// A device that was removed stays in the list, and its session alive, until its
// last file is closed: if the channel went, the kernel would answer the clients'
// commands ENOTCONN in place of what ib_uverbs answers. So N of its uverbsN is not
// free until then.
type devices struct {
	host    host
	log     *zap.Logger
	fabrics map[hca.LinkLayer]*loop.Fabric // constant
	reg     hca.Registry
	pins    pin.Accountant
	users   *dispatch.Users
	failed  chan error // capacity 1: a session ended by itself
	keeper  keeper     // outlives a daemon that is killed; nil: none

	captures atomic.Int32 // under way

	// change is held by add, remove and stop. Outermost.
	change   sync.Mutex
	stopped  bool           // guarded by change
	absent   []string       // names of devices whose ports are gone; guarded by change
	stopping chan struct{}  // closed under mu
	watchers sync.WaitGroup // who wait for them; added to under mu

	// mu guards list, what is in it, and its members' going; also held while a
	// status asks the devices, so that none goes meanwhile.
	mu   sync.Mutex
	list []*servedDevice // in order of coming
}

// servedDevice is one node with all that stands behind it.
type servedDevice struct {
	entry   *hca.Entry
	guid    string
	link    hca.LinkLayer
	address string // of an Ethernet port, else ""
	engine  *soft.Device
	tap     *capture.Tap // the engine's
	dev     *dispatch.Device
	session *cuse.Session
	maps    *ctxfs.FS // nil: its clients map nothing
	node    *node
	ended   chan struct{} // closed when the session has ended
	going   bool          // it is removed, or being removed
}

func (s *servedDevice) path() string { return filepath.Join(devDir, s.entry.UverbsName()) }

func newDevices(h host, log *zap.Logger, users *dispatch.Users) *devices {
	d := &devices{host: h, log: log, users: users, failed: make(chan error, 1), stopping: make(chan struct{}), fabrics: map[hca.LinkLayer]*loop.Fabric{
		hca.LinkInfiniBand: loop.New(hca.LinkInfiniBand),
		hca.LinkEthernet:   loop.New(hca.LinkEthernet),
	}}
	_ = d.reg.AddConsumer((*consumer)(d)) // the first: the tree loses a device before its node goes
	return d
}

// consumer is devices as the registry knows them: the uverbs client of the kernel.
type consumer devices

// Add has nothing to do: bringUp has put the device into the list, with what stands
// behind it.
func (*consumer) Add(*hca.Entry) {}

// Remove takes the node away, then the device from its clients
// (ib_uverbs_remove_one).
func (c *consumer) Remove(e *hca.Entry) {
	d := (*devices)(c)
	d.mu.Lock()
	i := slices.IndexFunc(d.list, func(s *servedDevice) bool { return s.entry == e })
	s := d.list[i]
	s.going = true
	d.mu.Unlock()
	if err := d.host.removeNode(s.path()); err != nil {
		d.log.Warn("node left behind", zap.String("device", e.Name), zap.Error(err))
	}
	s.dev.Remove()
}

// find is the device of that name that is not going.
func (d *devices) find(name string) *servedDevice {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.list {
		if s.entry.Name == name && !s.going {
			return s
		}
	}
	return nil
}

// names are those of the devices that are not going, for messages.
func (d *devices) names() string {
	var l []string
	for _, e := range d.reg.List() {
		l = append(l, e.Name)
	}
	if len(l) == 0 {
		return "none"
	}
	return strings.Join(l, ", ")
}

// freeIndex is the lowest N that no session has.
func (d *devices) freeIndex() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	for n := 0; ; n++ {
		if !slices.ContainsFunc(d.list, func(s *servedDevice) bool { return s.entry.Index == n }) {
			return n
		}
	}
}

// guidOwner is the name of the device that has guid; "" is none.
func (d *devices) guidOwner(guid string) string {
	return d.owner(func(s *servedDevice) bool { return s.guid == guid })
}

// owner is the name of the device that is not going and has something; "" is none.
func (d *devices) owner(has func(*servedDevice) bool) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.list {
		if has(s) && !s.going {
			return s.entry.Name
		}
	}
	return ""
}

// check refuses what cannot be a new device, and fills in what c leaves open.
func (d *devices) check(c *deviceConfig) error {
	p, err := providerOf(c, d.host.mappable)
	if err != nil {
		return err
	}
	c.Provider = p.Name()
	for i := 0; c.Name == ""; i++ {
		if name := fmt.Sprintf("%s%d", c.Provider, i); d.find(name) == nil {
			c.Name = name
		}
	}
	if c.Name == "" || len(c.Name) > maxName || c.Name[0] == '.' || strings.ContainsFunc(c.Name, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' || r == '.')
	}) {
		return fmt.Errorf("%q is no device name: give up to %d letters, digits and any of \"_-.\", as qib1", c.Name, maxName)
	}
	if s := d.find(c.Name); s != nil {
		return fmt.Errorf("there is a device of that name, %s: choose another, or remove that one first", s.path())
	}
	for i := 1; c.GUID == "" && !c.wired(); i++ {
		if guid := numberedGUID(i); d.guidOwner(guid) == "" {
			c.GUID = guid
		}
	}
	if err := d.checkGUID(c.GUID); err != nil && !(c.GUID == "" && c.wired()) {
		return err
	}
	link, address, err := linkOf(c, p)
	if err != nil {
		return err
	}
	if !c.wired() {
		c.Link = link.String()
	}
	if link == hca.LinkEthernet && !c.wired() {
		c.Address = netip.AddrFrom4(address).String()
		if o := d.owner(func(s *servedDevice) bool { return s.address == c.Address }); o != "" {
			return fmt.Errorf("address %s is that of %s: choose another", c.Address, o)
		}
	}
	if c.Mode == 0 {
		c.Mode = defaultMode
	}
	if c.Mode&^0o777 != 0 {
		return fmt.Errorf("mode %#o is not one of a device node: give permission bits, as 0660", c.Mode)
	}
	return nil
}

func (d *devices) checkGUID(guid string) error {
	if _, err := parseGUID(guid); err != nil {
		return err
	}
	if o := d.guidOwner(guid); o != "" {
		return fmt.Errorf("GUID %s is that of %s: choose another, or leave it out", guid, o)
	}
	return nil
}

// add brings one device up: engine, session, node, registry. On an error nothing
// is left of it.
func (d *devices) add(c deviceConfig) (*servedDevice, error) {
	d.change.Lock()
	defer d.change.Unlock()
	s, err := d.bringUp(&c)
	if err != nil {
		return nil, fmt.Errorf("add device %s: %w", c.Name, err)
	}
	d.absent = slices.DeleteFunc(d.absent, func(name string) bool { return name == c.Name })
	fields := []zap.Field{zap.String("device", c.Name), zap.String("node", s.path()), zap.String("guid", s.guid), zap.Stringer("link", s.link)}
	if s.address != "" {
		fields = append(fields, zap.String("address", s.address))
	}
	d.log.Info("device added", fields...)
	return s, nil
}

func (d *devices) bringUp(c *deviceConfig) (_ *servedDevice, err error) {
	if d.stopped {
		return nil, errors.New("the daemon is stopping")
	}
	if err := d.check(c); err != nil {
		return nil, err
	}
	var undo []func()
	defer func() {
		for _, f := range slices.Backward(undo) {
			if err != nil {
				f()
			}
		}
	}()
	provider := providers[c.Provider]
	link, address, _ := linkOf(c, provider) // check has
	fabric := d.fabrics[link]
	s := &servedDevice{link: link, address: c.Address, ended: make(chan struct{})}
	var port roce.Link
	if c.wired() {
		// On a fabric of its own: what goes to another port goes over the wire.
		fabric = loop.New(hca.LinkEthernet)
		if port, err = d.openPortFor(s, c); err != nil {
			return nil, err
		}
		undo = append(undo, func() { _ = port.Close() })
	}
	s.guid = c.GUID
	guid, _ := parseGUID(c.GUID) // check has
	pci := provider.PCI()
	cfg := soft.Config{
		GUID: guid, Address: address, NodeDesc: "uverbsd " + c.Name, BoardID: provider.HCAType(),
		VendorID: uint32(pci.Vendor), VendorPartID: uint32(pci.Device), Tap: capture.New(nil),
	}
	_, mapped := provider.(hca.Mapper)
	if mapped {
		cfg.Mapped, cfg.Without, cfg.MaxSRQSGE, cfg.MaxCQE = true, rxe.Lacks, rxe.MaxSRQSGE, rxe.MaxCQE
		cfg.VendorID = rxe.VendorID
	}
	if port != nil {
		tap := capture.New(port)
		cfg.Link, cfg.Tap = tap, tap
		cfg.LinkGone = func() { d.whenGone(s, *c) }
	}
	engine, err := soft.New(fabric, cfg)
	if err != nil {
		return nil, err
	}
	s.engine, s.tap = engine, cfg.Tap
	undo = append(undo, func() { _ = engine.Close() })

	channel, err := d.host.openChannel()
	if err != nil {
		return nil, err
	}
	s.entry = &hca.Entry{Name: c.Name, Index: d.freeIndex(), Device: engine, Provider: provider}
	log := d.log.With(zap.String("device", c.Name))
	s.node = &node{}
	var files dispatch.Maps
	if mapped {
		if s.maps, err = d.host.mountContexts(s.entry.UverbsName(), log); err != nil {
			channel.Close()
			return nil, err
		}
		undo = append(undo, func() { _ = s.maps.Close() })
		files = &maps{fs: s.maps, n: s.node, keeper: d.keeper}
	}
	s.dev = dispatch.NewDevice(dispatch.Config{
		HCA: engine, Provider: provider, Maps: files, Node: s.path(), System: system{}, Pins: &d.pins, Users: d.users, Log: log,
		Notify: func(kh uint64) { _ = s.session.Notify(kh) },
	})
	s.node.dev = s.dev
	s.session = cuse.New(channel, s.node, cuse.Config{Name: "infiniband/" + s.entry.UverbsName(), Log: log})
	s.node.end = func() { _ = s.session.Close() }
	if err := s.session.Handshake(); err != nil {
		_ = s.session.Close()
		return nil, err
	}
	if s.maps != nil {
		go d.serveMaps(s)
	}
	d.mu.Lock()
	d.list = append(d.list, s)
	d.mu.Unlock()
	go d.serve(s)
	undo = append(undo, func() {
		d.mu.Lock()
		s.going = true // its end is no failure
		d.mu.Unlock()
		s.dev.Remove()
		_ = s.session.Close()
		<-s.ended
	})
	if s.entry.Node, err = d.host.setupNode(s.path(), os.FileMode(c.Mode)); err != nil {
		return nil, err
	}
	if err := d.reg.Register(s.entry); err != nil {
		return nil, err
	}
	return s, nil
}

// openPortFor makes the link of a wired device, from which it has its GUID unless c
// says one.
func (d *devices) openPortFor(s *servedDevice, c *deviceConfig) (roce.Link, error) {
	l, err := d.host.openLink(c)
	if err != nil {
		return nil, err
	}
	s.address = linkAddresses(l)
	if guid, ok := linkGUID(l); c.GUID == "" && ok && d.guidOwner(guid.String()) == "" {
		c.GUID = guid.String()
	}
	for i := 1; c.GUID == ""; i++ {
		if guid := numberedGUID(i); d.guidOwner(guid) == "" {
			c.GUID = guid
		}
	}
	return l, nil
}

// serveMaps serves the files of contexts, until the device has no others.
func (d *devices) serveMaps(s *servedDevice) {
	if err := s.maps.Serve(); err != nil {
		d.fail(fmt.Errorf("device %s: files of contexts: %w", s.entry.Name, err))
	}
}

// fail ends the daemon; one reason is enough.
func (d *devices) fail(err error) {
	select {
	case d.failed <- err:
	default:
	}
}

// serve runs a session; a device whose session has ended leaves the list.
func (d *devices) serve(s *servedDevice) {
	err := s.session.Serve()
	if s.maps != nil {
		if e := s.maps.Close(); e != nil {
			d.log.Warn("mount left behind", zap.String("device", s.entry.Name), zap.Error(e))
		}
	}
	d.mu.Lock()
	going := s.going
	if going {
		d.list = slices.DeleteFunc(d.list, func(o *servedDevice) bool { return o == s })
	}
	d.mu.Unlock()
	switch {
	case !going:
		if err == nil {
			err = errors.New("the session was closed")
		}
		d.fail(fmt.Errorf("device %s: %w", s.entry.Name, err))
	case err != nil:
		d.log.Warn("session of a removed device", zap.String("device", s.entry.Name), zap.Error(err))
	}
	close(s.ended)
}

// remove takes a device away from clients and fabric, and returns how many
// contexts are still open: those are served, EIO, until they are closed.
func (d *devices) remove(name string) (contexts int, err error) {
	d.change.Lock()
	defer d.change.Unlock()
	if i := slices.Index(d.absent, name); i >= 0 {
		d.absent = slices.Delete(d.absent, i, i+1)
		return 0, nil
	}
	s := d.find(name)
	if s == nil {
		return 0, fmt.Errorf("remove device %s: there is none of that name: name one of those there are (%s)", name, d.names())
	}
	if err := d.takeDown(s); err != nil {
		return 0, fmt.Errorf("remove device %s: %w", name, err)
	}
	n := len(s.dev.Files())
	d.log.Info("device removed", zap.String("device", name), zap.Int("contexts", n))
	return n, nil
}

func (d *devices) takeDown(s *servedDevice) error {
	if err := d.reg.Unregister(s.entry.Name); err != nil {
		return err
	}
	err := s.engine.Close()
	s.node.retire()
	return err
}

// stop removes all devices, the newest first, and ends all sessions, also those
// whose files are open.
func (d *devices) stop() error {
	d.change.Lock()
	d.stopped = true
	d.change.Unlock()
	d.mu.Lock()
	select {
	case <-d.stopping: // a second time
	default:
		close(d.stopping)
	}
	d.mu.Unlock()
	d.watchers.Wait()
	d.change.Lock()
	defer d.change.Unlock()
	d.mu.Lock()
	list := slices.Clone(d.list)
	d.mu.Unlock()
	var errs []error
	for _, s := range slices.Backward(list) {
		if d.find(s.entry.Name) == s {
			errs = append(errs, d.takeDown(s))
		}
	}
	for _, s := range list {
		errs = append(errs, s.session.Close())
		<-s.ended
	}
	return errors.Join(errs...)
}

// kernelHost is the host itself.
type kernelHost struct{}

func (kernelHost) openChannel() (*cuse.Channel, error) { return cuse.Open(cusePath) }

// setupNode finds the node that devtmpfs has made for the session.
func (kernelHost) setupNode(path string, mode os.FileMode) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("%s did not appear (is devtmpfs on /dev?): %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return 0, fmt.Errorf("%s is not a character device: remove it and start again", path)
	}
	if err := os.Chmod(path, mode); err != nil {
		return 0, fmt.Errorf("set the mode of %s: %w", path, err)
	}
	return st.Rdev, nil
}

// removeNode does what devtmpfs would do when the session ends, and which it does
// not mind having been done.
func (kernelHost) removeNode(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	_ = unix.Rmdir(filepath.Dir(path)) // if it is empty, as devtmpfs
	return nil
}

func (kernelHost) mappable() error { return mapTrial() }

var mapTrial = sync.OnceValue(ctxfs.Supported)

func (kernelHost) mountContexts(uverbsN string, log *zap.Logger) (*ctxfs.FS, error) {
	if err := os.MkdirAll(ctxDir, 0o755); err != nil {
		return nil, err
	}
	return ctxfs.New(filepath.Join(ctxDir, uverbsN), cuse.Config{Log: log})
}
